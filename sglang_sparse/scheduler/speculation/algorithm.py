"""SPARSE_SELF as one of SGLang's speculative algorithms: its registration, and what it carries between passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType, SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from sglang_sparse.config.arguments import DRAFT_TOKENS, SPARSE_SELF

if TYPE_CHECKING:
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.server_args import ServerArgs

    from sglang_sparse.attention.protocols import ReqToTokenPool
    from sglang_sparse.config.arguments import Arguments


class SparseSelf(CustomSpecAlgo):
    """The algorithm; the first three methods are those that SGLang asks for and its base class lacks."""

    def need_topk(self) -> bool:
        """Drafts are chains."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """Nothing but a token is carried."""
        return False

    def create_future_map(
        self,
        device: torch.device,
        pool: ReqToTokenPool,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        """Return what relays tokens and lengths between overlapped steps."""
        from sglang_sparse.scheduler.speculation.relay import Relay

        return Relay(device, self, pool, needs_cpu_seq_lens, needs_confidence_relay)  # type: ignore[arg-type]

    def has_draft_kv(self) -> bool:
        """Drafts are written where the verification writes."""
        return False

    def supports_grammar_overlap(self) -> bool:
        """The worker waits for a grammar's state itself."""
        return True

    def handle_server_args(self, server_args: ServerArgs) -> None:
        """Complete the numbers; which are allowed is checked in ``hooks/limits.py``."""
        args = cast("Arguments", server_args)
        steps = args.speculative_num_steps or DRAFT_TOKENS
        args.speculative_num_steps, args.speculative_eagle_topk = steps, 1
        args.speculative_num_draft_tokens = steps + 1


def register() -> None:
    """Register the algorithm in this process, once."""
    if get_spec(SPARSE_SELF) is not None:
        return

    @SpeculativeAlgorithm.register(SPARSE_SELF, supports_overlap=True, spec_class=SparseSelf)
    def _worker(_: object) -> type:
        from sglang_sparse.scheduler.speculation.worker import SparseSelfWorker

        return SparseSelfWorker


@dataclass
class Carried(SpecInput):
    """The state that requests carry from one step to the next.

    Attributes:
        bonus_tokens: ``[rows]`` int64, each row's last token, which has no KV yet.
        new_seq_lens: ``[rows]`` int64, tokens that have KV.
        future_indices: set by SGLang with overlap scheduling: the rows of the relay that hold both.
        late_lengths: with overlap scheduling, waits for the lengths of the batch that runs, ``[rows]`` int64 on the
            CPU; until then the batch has bounds of them.
    """

    bonus_tokens: torch.Tensor
    new_seq_lens: torch.Tensor
    future_indices: torch.Tensor | None = None
    late_lengths: Callable[[], torch.Tensor] | None = None
    # Fields of other algorithms that the relay reads.
    topk_p: ClassVar[None] = None
    topk_index: ClassVar[None] = None
    hidden_states: ClassVar[None] = None

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.UNO_STATE)
        self.num_tokens_per_req = self.num_tokens_for_logprob_per_req = 1

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Keep these rows, as SGLang asks when requests leave."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: Carried) -> None:
        """Append the rows of requests that join."""
        if self.future_indices is not None and other.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, other.new_seq_lens])
