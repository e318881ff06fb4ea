"""Counters of a method for ``/server_info``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch

from sglang_sparse.attention.memory import allocator_counts
from sglang_sparse.attention.selection_counts import SelectionCounts, sum_counts
from sglang_sparse.config import digest
from sglang_sparse.config.machine import gpu_name
from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.dsa.decode import Dsa

if TYPE_CHECKING:
    from sglang_sparse.attention.plan import DecodePlan
    from sglang_sparse.attention.prefill import PrefillPath
    from sglang_sparse.attention.prompt_selection import KeepPath
    from sglang_sparse.config.settings import Settings
    from sglang_sparse.methods.aux_buffers import AuxBuffers

KEY = "sparse"
# What a prefill method did; next to the totals of decode each name has the prefix ``prefill_``.
PREFILL_TOTALS = ("sparse_tokens", "dense_tokens", "pairs_attended", "pairs_causal")


@dataclass
class RectifyCounts:
    """Counters of rectification, on the host.

    Attributes:
        passes: steps that carried a rectifying extend pass, of decode or of mixed batches.
        second_passes: of these, the steps that also ran a decode pass, over the rows that were not rectified.
        requests: rectified rows.
        tokens: tokens that these passes encoded again.
        delay_steps: decode steps that the rectified rows had waited beyond their interval, summed.
        max_delay_steps: the longest of these waits since ``Counters.take_max_delay`` was last called.
        finish_passes: extend passes over the last tokens of finished requests.
        finish_tokens: tokens that these passes encoded again.
        tail_tokens_dropped: approximate tokens that finished requests held, whose KV was freed instead of shared.
    """

    passes: int = 0
    second_passes: int = 0
    requests: int = 0
    tokens: int = 0
    delay_steps: int = 0
    max_delay_steps: int = 0
    finish_passes: int = 0
    finish_tokens: int = 0
    tail_tokens_dropped: int = 0


def judge(steps: int, right: Sequence[int]) -> tuple[int, int]:
    """Return how many drafts of a round were right, and of how many that is: what follows a wrong one is not judged.

    Args:
        steps: drafts of a row.
        right: ``[rows]``, how many tokens of its verification are right; what follows the drafts there is no draft.
    """
    return sum(min(steps, count) for count in right), sum(min(steps, count + 1) for count in right)


@dataclass
class DraftCounts:
    """Counters of lossless decoding, on the host, when the results of a round arrive.

    Drafts of requests with ``lossless: false`` are not among them: nothing verifies those.

    Attributes:
        rounds: verifications.
        dense_steps: dense decode steps, where drafts would not pay.
        draft_steps: sparse decode steps of the rounds, each of which drafts a token of every row.
        drafted: tokens that were drafted, of all rows.
        accepted: those of them that a dense pass chose, too.
        judged: the accepted ones, and each row's first wrong one: what follows that one says nothing of acceptance.
    """

    rounds: int = 0
    dense_steps: int = 0
    draft_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    judged: int = 0

    def totals(self) -> dict[str, int]:
        """Return the counts by their names in the server info."""
        return {
            "verified_rounds": self.rounds,
            "undrafted_steps": self.dense_steps,
            "draft_steps": self.draft_steps,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "judged_drafts": self.judged,
        }

    def add(self, steps: int, right: Sequence[int]) -> None:
        """Count a round of ``steps`` drafts a row, of which ``right[row]`` were accepted."""
        self.rounds += steps > 0
        self.dense_steps += steps == 0
        self.draft_steps += steps
        self.drafted += steps * len(right)
        accepted, judged = judge(steps, right)
        self.accepted += accepted
        self.judged += judged


class Counters:
    """Counts since the server started. A *row* is one request in one decode pass; a *layer row* that in one layer.

    What the selection did is counted by each method, and added up in blocks of the smallest size; see
    ``SelectionCounts``.

    Args:
        settings: the methods and their configs.
        aux_pools: the page summaries.
        model: the model on this rank.
        select_stats: int64 on the device, which the selection itself increments: see ``BatchView.stats``.
        prefill: the prefill methods at work, if any.
        keeps: the stages at a prompt's end, of the decode methods that have one.

    Attributes:
        device: the device of the model on this rank.
        rectify: what rectification did.
        drafts: what rounds of lossless decoding did; None on servers without it.
        aux_bytes: bytes of the page summaries, and of the pages that drafts share, on this rank.
        sparse_layers: layers that run sparse.
        arrived_pages: pages whose entries were computed again as they came back from host memory.
        index_keys: keys that this project's indexer stored in prefill, over all layers.
        decodes: whether a decode method is at work.
        prefills: whether a prefill method is.
        keeps: see above.
        more_counts: names of what the decode methods count themselves.
        prefill_more_counts: those of the prefill methods.
    """

    def __init__(
        self,
        settings: Settings,
        aux_pools: AuxBuffers,
        model: ModelShape,
        select_stats: torch.Tensor,
        prefill: PrefillPath | None = None,
        keeps: Sequence[KeepPath] = (),
    ):
        self.select_stats = select_stats
        self.device = select_stats.device
        self.rectify = RectifyCounts()
        self.drafts: DraftCounts | None = None
        self.aux_bytes = aux_pools.nbytes
        self._settings = settings
        self._pools = aux_pools
        self._model = model
        self._prefill = prefill
        self.keeps = keeps
        self._dsa = settings.method if isinstance(settings.method, Dsa) else None
        self.index_keys = self.arrived_pages = 0
        self.sparse_layers = len(aux_pools.layers)
        self.decodes = settings.name is not None
        self.prefills = prefill is not None
        self.more_counts = settings.decode.more_counts
        self.prefill_more_counts = prefill.groups.more_counts if prefill else ()
        self._decode_steps = 0
        self._decode_rows = 0
        self._dense_rows = 0
        methods = settings.decode.methods
        smallest = min(method.block_size for method in methods)
        layers = [len(aux_pools.layers.intersection(one.sparse_layers(model.num_layers))) for one in methods]
        self._selections = [
            SelectionCounts(method, own, model.num_kv_heads, smallest)
            for method, own in zip(methods, layers, strict=True)
        ]
        self._max_delay_steps = 0
        self._extend_pages = torch.zeros(1, dtype=torch.int64, device=select_stats.device)

    def add_extend(self, last_slots: torch.Tensor) -> None:
        """Count the pages that an extend pass touched, from the ``last_slots`` of its refresh."""
        self._extend_pages += (last_slots >= 0).sum()

    def add_decode(self, plan: DecodePlan) -> None:
        """Count a decode pass."""
        self._decode_steps += 1
        self._decode_rows += plan.covered.shape[0]
        if not plan.sparse:
            self._dense_rows += plan.covered.shape[0]
            return
        self._dense_rows += plan.covered.tolist().count(True)
        for counts, own in zip(self._selections, plan.groups, strict=True):
            counts.add(own, plan.selective)

    def take_max_delay(self) -> int:
        """Return the longest wait of a rectified row since the last call, in decode steps, and start anew.

        ``snapshot`` keeps the longest of all.
        """
        taken = self.rectify.max_delay_steps
        self.rectify.max_delay_steps = 0
        self._max_delay_steps = max(self._max_delay_steps, taken)
        return taken

    def host_totals(self) -> dict[str, int]:
        """Return what is counted on the host and only grows."""
        rectify, path = self.rectify, self._prefill
        return {
            "decode_steps": self._decode_steps,
            "decode_rows": self._decode_rows,
            "dense_fallback_rows": self._dense_rows,
            "rectifying_steps": rectify.passes,
            "second_passes": rectify.second_passes,
            "rectified_requests": rectify.requests,
            "rectified_tokens": rectify.tokens,
            "rectify_delay_steps": rectify.delay_steps,
            "finish_passes": rectify.finish_passes,
            "finish_tokens_rectified": rectify.finish_tokens,
            "tail_tokens_dropped": rectify.tail_tokens_dropped,
            **(self.drafts.totals() if self.drafts else {}),
            **self._added([counts.host_totals() for counts in self._selections]),
            **(
                {"prefill_sparse_tokens": path.sparse_tokens, "prefill_dense_tokens": path.dense_tokens} if path else {}
            ),
        }

    @property
    def device_stats(self) -> tuple[torch.Tensor, ...]:
        """Counters on the device, int64; always the same tensors."""
        return self.select_stats, *([self._prefill.pairs] if self._prefill else [])

    def device_totals(self, counted: Sequence[int]) -> dict[str, int]:
        """Name what is counted on the device and only grows.

        Args:
            counted: a copy of all of ``device_stats`` on the host, one behind the other.
        """
        own = len(self.select_stats)
        prefill = self._prefill.device_totals(counted[own:]) if self._prefill else {}
        return {
            **self._added(self._of_groups(counted[:own])),
            **{f"prefill_{name}": count for name, count in prefill.items()},
        }

    def _added(self, totals: Sequence[Mapping[str, int]]) -> dict[str, int]:
        return sum_counts([counts.addable(own) for counts, own in zip(self._selections, totals, strict=True)])

    def _of_groups(self, counted: Sequence[int]) -> list[dict[str, int]]:
        left = iter(counted)
        return [counts.device_totals(list(islice(left, counts.size))) for counts in self._selections]

    def snapshot(self) -> dict[str, object]:
        """Return all counts as plain values, and which device and packages they are of.

        Waits for the device, so not for every step.
        """
        counted = [count for counts in self.device_stats for count in counts.tolist()]
        totals = sum_counts([self.host_totals(), self.device_totals(counted)])
        attended, held = totals["pages_attended"], totals["pages_held"]
        names = (*PREFILL_TOTALS, *self.prefill_more_counts) if self._prefill else ()
        prefill = {name: totals.pop(f"prefill_{name}") for name in names}
        published = digest.published(self._settings)
        fractions = [own.max_active_fraction for own in self._selections if own.max_active_fraction is not None]
        return {
            "device": gpu_name(self.device),
            "digest": digest.digest(digest.fields_of(published, self._settings.config.page_size)),
            **published,
            "sparse_layers": self.sparse_layers,
            **totals,
            "rectify_max_delay_steps": max(self._max_delay_steps, self.rectify.max_delay_steps),
            "active_fraction": attended / held if held else 0.0,
            "max_active_fraction": max(fractions, default=None),
            "extend_pages_summarised": int(self._extend_pages),
            "arrived_pages_summarised": self.arrived_pages,
            "summary_overflows": int(self._pools.overflows),
            "kv_bytes_per_token": self._pools.kv_bytes_per_token,
            "aux_bytes": self.aux_bytes,
            "aux_bytes_accounted": self._pools.accounted_bytes,
            "aux_bytes_measured": self._pools.measured_bytes,
            "allocator": allocator_counts(self.device),
            **({"index_keys_prefilled": self.index_keys} if self._dsa and not self._dsa.native("indexer") else {}),
            **({"parts": self._groups_snapshot(counted)} if len(self._selections) > 1 else {}),
            **({"kept": sum_counts([path.snapshot() for path in self.keeps])} if self.keeps else {}),
            **({"prefill": self._prefill_snapshot(self._prefill, prefill, published)} if self._prefill else {}),
        }

    def _groups_snapshot(self, counted: Sequence[int]) -> list[dict[str, object]]:
        groups = self._settings.decode
        on_device = self._of_groups(counted[: len(self.select_stats)])
        kept: dict[object, dict[str, object]] = {path.method: {"kept": path.snapshot()} for path in self.keeps}
        return [
            {
                "method": name,
                "layers": list(method.sparse_layers(self._model.num_layers)),
                "config": method.config.model_dump(mode="json"),
                **sum_counts([counts.host_totals(), own]),
                "max_active_fraction": counts.max_active_fraction,
                **kept.get(method, {}),
            }
            for name, method, counts, own in zip(groups.names, groups.methods, self._selections, on_device, strict=True)
        ]

    def _prefill_snapshot(
        self, path: PrefillPath, totals: Mapping[str, int], published: digest.Published
    ) -> dict[str, object]:
        causal = totals["pairs_causal"]
        return {
            **published.get("prefill", {}),
            "sparse_layers": len(path.layers),
            **({"parts": path.parts()} if len(path.groups.methods) > 1 else {}),
            **totals,
            "sparsity": 1 - totals["pairs_attended"] / causal if causal else 0.0,
        }
