"""Read and write fields of SGLang's ``Req``, all in one place: SGLang moves them between releases."""

from __future__ import annotations

from sglang_sparse.attention.protocols import RadixTree, Req


def pool_row(request: Req) -> int | None:
    """Return a request's row in ``req_to_token``; None where it holds no KV."""
    return request.kv.req_pool_idx


def committed_len(request: Req) -> int:
    """Return the tokens whose KV a request has written or found."""
    return request.kv.kv_committed_len


def position_shift(request: Req) -> int:
    """Return what M-RoPE adds to the positions of a request's tokens behind its images; 0 without any."""
    media = request.multimodal_inputs
    return 0 if media is None or media.mrope_position_delta is None else int(media.mrope_position_delta)


def has_backup(request: Req) -> bool:
    """Whether SGLang keeps a copy of the KV of a retracted request in host memory."""
    return request.kv.retraction_backup is not None


def protected_len(request: Req) -> int:
    """Return where a request's own pages begin; the tree holds those before."""
    return request.kv.cache_protected_len


def prefix_len(request: Req) -> int:
    """Return the tokens that the next pass over a request need not compute."""
    return request.prefix_len


def matched_len(request: Req) -> int:
    """Return the tokens that a request which is not admitted yet has found, in the KV pool or in host memory."""
    return request.prefix_len + request.host_hit_length


def prefill_end(request: Req) -> int | None:
    """Return where the last chunk of a request's prompt ends; None before its first chunk.

    SGLang overwrites it for rows that decode within a mixed batch.
    """
    return request.extend_end


def locked_node(request: Req) -> int | None:
    """Return the tree node that a request has locked, or None."""
    return None if request.lock is None else request.lock.node


def leave_tree(request: Req, tree: RadixTree, own_from: int) -> None:
    """Give up a request's lock of the tree: from now on its own pages begin at ``own_from``."""
    tree.unlock(request.lock)
    request.lock = request.last_node = None
    request.prefix_len = 0
    request.kv.cache_protected_len = own_from


def free_tokens(request: Req, tree: RadixTree, start: int, end: int) -> None:
    """Free the slots of a request's tokens from ``start``, the beginning of a page, up to ``end``."""
    tree.free_kv_row(request.kv, [(start, end)])
