"""A decode server without its prefill server: the KV of prompts is computed here, and written like what was sent."""

from __future__ import annotations

from typing import Any

import folder_transfer as transfer
import torch
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.fake.conn import FakeKVReceiver
from sglang.srt.disaggregation.utils import KVClassType

from sglang_sparse.config.settings import settings_of
from sglang_sparse.debug import tree_check
from sglang_sparse.debug.kv_compare import borrowed
from sglang_sparse.scheduler.request_fields import pool_row, prefix_len
from sglang_sparse.scheduler.request_state import options_of

# What a request says of the prefill server.
FIELDS = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}
CLASSES = {KVClassType.KVARGS: KVArgs, KVClassType.MANAGER: transfer.Manager, KVClassType.RECEIVER: FakeKVReceiver}
# How often a transfer takes longer than a step.
LATE = 0.4


def flags(radix: bool) -> dict[str, Any]:
    """Return what makes a server the decode server of a pair; call it before the scheduler is made.

    Args:
        radix: whether it has a prefix cache.
    """
    decode.get_kv_class = lambda _, kind: CLASSES[kind]
    return {
        "disaggregation_mode": "decode",
        "disaggregation_transfer_backend": transfer.BACKEND.value,
        "disaggregation_decode_enable_radix_cache": radix,
        # Of a pool of few tokens.
        "num_reserved_decode_tokens": 2,
        # Streams of the CPU lack what the copy to the host pool needs.
        "disaggregation_decode_retraction_backup": "cpu_tensor",
    }


def deliver(scheduler: Any) -> None:
    """From now on, the KV of prompts is in the pages that a decode server allocated when it takes them as sent."""
    queue, runner = scheduler.disagg_decode_transfer_queue, scheduler.tp_worker.model_runner
    transferred = queue.pop_transferred

    def pop_transferred() -> list[Any]:
        # The seed of a schedule is that of torch, too.
        if queue.queue and float(torch.rand(())) < LATE:
            return []
        for each in queue.queue:
            _send(runner, each.req)
            row, buffers = each.metadata_buffer_index, queue.metadata_buffers
            buffers.output_ids[row, 0] = sum(each.req.origin_input_ids) % runner.model_config.vocab_size
            buffers.bootstrap_room[row, 0] = each.req.bootstrap_room
        return transferred()

    queue.pop_transferred = pop_transferred


def _send(runner: Any, request: Any) -> None:
    """Write what a prompt's pages lack; their summaries stay those of whoever had them before."""
    tokens, pool = [*request.origin_input_ids], runner.token_to_kv_pool
    slots = runner.req_to_token_pool.req_to_token[pool_row(request), : len(tokens)].long()
    missing = slots[prefix_len(request) :]
    layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
    caches = [get(layer) for layer in layers for get in (pool.get_key_buffer, pool.get_value_buffer)]
    settings = settings_of(runner.server_args)
    prefill = options_of(settings, request).prefill if settings else None
    with borrowed(pool, slots):
        tree_check._recompute(runner, tokens, slots, prefill, len(tokens))
        sent = [cache[missing] for cache in caches]
    for cache, content in zip(caches, sent, strict=True):
        cache[missing] = content
