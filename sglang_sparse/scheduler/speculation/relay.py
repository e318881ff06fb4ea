"""Lengths between overlapped rounds: the host begins a round before it knows how many drafts of the last were right.

SGLang waits for the lengths, and launches the first pass of a round while the device has nothing to do. A first draft
does not need them on the host: its launch takes bounds, its kernels what the device knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.runtime_context import get_spec

from sglang_sparse.scheduler.request_fields import committed_len
from sglang_sparse.scheduler.speculation.algorithm import Carried

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_sparse.attention.protocols import Req


class Relay(FutureMap):
    """SGLang's relay, which does not wait for the lengths of a round."""

    def resolve_seq_lens_cpu(self, batch: ScheduleBatch, stream_ordered: bool = False) -> None:
        """Give the batch its lengths on the device, bounds of them on the host, and a way to wait for those.

        Args:
            batch: of the round that runs next.
            stream_ordered: not used: SGLang sets it without a GPU of NVIDIA's.
        """
        carried = batch.spec_info
        if not isinstance(carried, Carried) or carried.future_indices is None:
            return
        rows = batch.req_pool_indices_cpu
        if self.publish_ready is not None:
            self.publish_ready.wait()
        lengths = batch.seq_lens = self.new_seq_lens_buf[carried.future_indices]
        stream, pinned = self.fwd_prepare_d2h_stream, self.new_seq_lens_cpu_pinned
        if stream is None or pinned is None or self.publish_ready is None:
            carried.late_lengths = lambda: lengths.to("cpu", torch.int64)
        else:
            stream.wait_event(self.publish_ready)
            with torch.get_device_module(self.device).stream(stream):
                pinned.copy_(self.new_seq_lens_buf, non_blocking=True)

            def late_lengths() -> torch.Tensor:
                stream.synchronize()
                return pinned[rows]

            carried.late_lengths = late_lengths
        # The results of the round that runs are not processed: a request may get as many tokens from it.
        width = int(get_spec().speculative_num_draft_tokens)
        requests = cast("list[Req]", batch.reqs)
        batch.seq_lens_cpu = torch.tensor([committed_len(request) + width for request in requests], dtype=torch.int64)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
