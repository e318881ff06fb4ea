"""Counters of a server that leaves DSA to SGLang, from what the host knows of a pass: nothing runs on the device.

A query attends to at most the model's ``index_topk`` tokens in each layer, so lengths say what SGLang's kernels do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_sparse.attention.batch import count_sizes
from sglang_sparse.attention.counters import Counters
from sglang_sparse.attention.kv_scales import kv_bytes_per_token
from sglang_sparse.attention.memory import model_shape
from sglang_sparse.attention.plan import plan_decode
from sglang_sparse.methods.aux_buffers import AuxBuffers

if TYPE_CHECKING:
    from sglang_sparse.attention.protocols import ForwardBatch, ModelRunner, ScheduleBatch
    from sglang_sparse.config.settings import Settings

# The attribute of SGLang's model runner that holds its NativeCounts.
ATTRIBUTE = "sglang_sparse_counts"


class NativeCounts(Counters):
    """Counts of one rank. In a verification of drafts each of its tokens counts as a row.

    Args:
        settings: the methods, which pass through.
        runner: the rank's model runner.
    """

    def __init__(self, settings: Settings, runner: ModelRunner):
        for method in settings.decode.methods:
            method.adopt(runner.model_config)
        pool, stage = runner.token_to_kv_pool, runner.layer_info
        own = AuxBuffers((), tuple(range(stage.start_layer, stage.end_layer)), 0, pool.page_size, "cpu")
        own.kv_bytes_per_token, own.measured_bytes = kv_bytes_per_token(pool), 0
        stats = torch.zeros(sum(count_sizes(settings.decode.methods)), dtype=torch.int64)
        super().__init__(settings, own, model_shape(runner.model_config, pool.dtype), stats)
        self.device = torch.device(runner.device)

    def follow(self, forward_batch: ForwardBatch, batch: ScheduleBatch) -> None:
        """Count a pass that is launched; passes over prompts are not counted."""
        verifies = batch.forward_mode.is_target_verify()
        if not batch.reqs or not (verifies or batch.forward_mode.is_decode()):
            return
        lengths = batch.seq_lens_cpu
        if lengths is None:
            # With drafts SGLang may leave the lengths to the device: without what the last pass has accepted.
            lengths = torch.tensor([len(one.origin_input_ids) + len(one.output_ids) for one in batch.reqs])
        if verifies:
            drafts = torch.arange(1, len(forward_batch.out_cache_loc) // len(lengths) + 1)
            lengths = (lengths[:, None] + drafts).flatten()
        plan = plan_decode(self._settings.decode, lengths)
        self.add_decode(plan)
        for group in plan.groups:
            counts = torch.stack([(group.n_select > 0).sum(), group.n_select.sum(), group.n_pages.sum()])
            self.select_stats[: len(counts)] += counts * self.sparse_layers


def counters_of(runner: ModelRunner, settings: Settings) -> Counters:
    """Return the counters of a rank, whatever its methods."""
    return native_counts(runner, settings) if settings.passes_through else runner.attn_backend.counters


def native_counts(runner: ModelRunner, settings: Settings) -> NativeCounts:
    """Return the counters of a rank whose methods pass through, made when they are first asked for."""
    counts: NativeCounts | None = getattr(runner, ATTRIBUTE, None)
    if counts is None:
        counts = NativeCounts(settings, runner)
        setattr(runner, ATTRIBUTE, counts)
    return counts
