"""Counters of a server that leaves DSA to SGLang, from what the host knows of a pass: nothing runs on the device.

A query attends to at most the model's ``index_topk`` tokens in each layer, so lengths say what SGLang's kernels do. Of
models whose indexer pools its keys they say it but for the tokens of the last pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_sparse.attention.batch import count_sizes
from sglang_sparse.attention.counters import Counters
from sglang_sparse.attention.kv_scales import kv_bytes_per_token
from sglang_sparse.attention.memory import model_shape
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
        # A view that takes no operation of PyTorch a pass.
        self._numbers, self._topk = stats.numpy(), runner.model_config.hf_text_config.index_topk

    def follow(self, forward_batch: ForwardBatch, batch: ScheduleBatch) -> None:
        """Count a pass that is launched; passes over prompts are not counted."""
        verifies = batch.forward_mode.is_target_verify()
        if not batch.reqs or not (verifies or batch.forward_mode.is_decode()):
            return
        if batch.seq_lens_cpu is None:
            # With drafts SGLang may leave the lengths to the device. The newest token has no KV yet; what the last pass
            # has accepted is missing.
            lengths = [len(one.origin_input_ids) + max(len(one.output_ids) - 1, 0) for one in batch.reqs]
        else:
            lengths = batch.seq_lens_cpu.tolist()
        if verifies:
            drafts = range(1, len(forward_batch.out_cache_loc) // len(lengths) + 1)
            lengths = [length + more for length in lengths for more in drafts]
        sparse = [length for length in lengths if length > self._topk]
        self._decode_steps += 1
        self._decode_rows += len(lengths)
        self._dense_rows += len(lengths) - len(sparse)
        if sparse:
            (own,) = self._selections
            own.max_active_fraction = max(own.max_active_fraction or 0.0, self._topk / min(sparse))
            attended = sum(lengths) - sum(sparse) + self._topk * len(sparse)
            for place, count in enumerate((len(lengths), attended, sum(lengths))):
                self._numbers[place] += count * self.sparse_layers


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
