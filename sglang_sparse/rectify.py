"""How much of a request's KV is exact, and the rule that only exact KV enters the radix tree.

``exact_len`` of a request: KV of positions ``[0, exact_len)`` equals what dense attention over the same tokens would
have written. A dense pass over tokens that follow exact KV writes exact KV; a sparse decode step does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_sparse.config import settings_of

# The attribute of SGLang's Req that holds its exact length; a request of a dense server never has it.
ATTRIBUTE = "sglang_sparse_exact_len"


def follow_exact_lengths(forward_batch: Any, cls: type, batch: Any, model_runner: Any, **_: Any) -> None:
    """After ``ForwardBatch.init_new``: move the exact length of every request of a forward pass.

    The pass is launched before anything that reads the KV it writes, on the same stream, so the length may move now.
    """
    if settings_of(model_runner.server_args) is None or model_runner.is_draft_worker:
        return
    mode = batch.forward_mode
    if mode.is_decode():
        covered = model_runner.attn_backend.plan(batch.seq_lens_cpu).covered.tolist()
        for request, length, dense in zip(batch.reqs, batch.seq_lens_cpu.tolist(), covered, strict=True):
            if dense and getattr(request, ATTRIBUTE) == length - 1:
                setattr(request, ATTRIBUTE, length)
    elif mode.is_extend():
        for request, prefix, extended in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            # A prefix comes from the tree or an earlier chunk, both exact; the rows that decode within a mixed
            # batch may have an approximate tail.
            if getattr(request, ATTRIBUTE, prefix) >= prefix:
                setattr(request, ATTRIBUTE, prefix + extended)


def forget_exact_length(_: None, request: Any) -> None:
    """After ``Req.reset_for_retract``: its KV is gone, and will be written again by a dense prefill."""
    if hasattr(request, ATTRIBUTE):
        delattr(request, ATTRIBUTE)


def exact_committed_len(original: Callable[[Any], int], request: Any) -> int:
    """Around ``Req.effective_kv_committed_len``: what a finished request inserts into the radix tree ends here."""
    committed = original(request)
    return min(committed, getattr(request, ATTRIBUTE, committed))


def release_inexact_tail(original: Callable[..., None], request: Any, start: int, end: int, tree_cache: Any) -> None:
    """Around ``_release_overallocated_kv_indices``: free the pages behind the exact length.

    SGLang asserts that there are none unless it speculates. The page that holds the exact length itself is freed by
    the tree, as the unaligned tail of what was inserted.

    Args:
        original: SGLang's function.
        request: the finished request.
        start: its exact length.
        end: its allocated length.
        tree_cache: the radix cache.
    """
    if not hasattr(request, ATTRIBUTE):
        return original(request, start, end, tree_cache)
    allocator = tree_cache.token_to_kv_pool_allocator
    start = -(-start // allocator.page_size) * allocator.page_size
    if start < end:
        slots = tree_cache.req_to_token_pool.req_to_token[request.req_pool_idx][start:end]
        allocator.free_segment(slots, start_pos=start)
