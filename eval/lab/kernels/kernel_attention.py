"""Attention by other libraries, for ``eval.lab.bench_kernels``: dense, and over this project's selection.

Over a selection by FA3 and FlashInfer: each row and KV head becomes an entry of the batch that has one KV head of its
own. SGLang's cache holds a page as ``[page_size, Hkv, d]`` (NHD), and no copy of it is needed, because both libraries
take the strides of the tensor: FA3 asks for a stride of 1 in the last dimension only and adds up 64-bit offsets,
FlashInfer (fa2) wants keys and values to have equal strides. So `folded_cache` is a view whose "pages" overlap, one
beginning every ``d`` elements, and page ``p`` of head ``h`` is number ``p * page_size * Hkv + h`` in it. The denser
numbering ``p * Hkv + h`` belongs to a cache that keeps the heads of a page apart (HND), or to a page size of 1.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from eval.lab.kernels.kernel_inputs import Layer, Step
from sglang_sparse_kernels.common.timing import Run

WORKSPACE_BYTES = 256 * 2**20
PLAN_BYTES = 8 * 2**20
MINIMAX = "sglang.kernels.ops.attention.minimax_sparse.decode.topk_sparse"


@dataclass(frozen=True)
class Paged:
    """The input of a library for paged attention in one layer.

    Attributes:
        q: ``[N, H, d]``.
        k, v: ``[pages, page_size, heads, d]``, strided views.
        table: ``[N, M]`` int32, contiguous.
        lengths: tokens of each entry, ``[N]`` int32.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


def folded_cache(pages: torch.Tensor) -> torch.Tensor:
    """A view of a cache in which each KV head of each page is a page of one head.

    Args:
        pages: ``[P, page_size, Hkv, d]``, contiguous.

    Returns:
        ``[(P - 1) * page_size * Hkv + Hkv, page_size, 1, d]``; page ``p`` of head ``h`` is ``p * page_size * Hkv + h``.
    """
    count, page_size, heads, dim = pages.shape
    return pages.as_strided(((count - 1) * page_size * heads + heads, page_size, 1, dim), (dim, heads * dim, dim, 1))


def folded_pages(indices: torch.Tensor, page_size: int) -> torch.Tensor:
    """The numbers of selected pages in `folded_cache`.

    Args:
        indices: physical pages, ``[B, Hkv, K]`` int32, none of them -1.
        page_size: tokens of a page.

    Returns:
        ``[B * Hkv, K]`` int32, contiguous.
    """
    heads = indices.shape[1]
    return (
        indices * (page_size * heads) + torch.arange(heads, dtype=torch.int32, device=indices.device)[:, None]
    ).flatten(0, 1)


def dense_calls(step: Step) -> list[Paged]:
    """Dense attention of each layer."""
    lengths = torch.full_like(step.batch.n_pages, step.shape.length)
    return [Paged(layer.q, layer.k_pages, layer.v_pages, step.batch.page_table, lengths) for layer in step.layers]


def folded_calls(step: Step) -> list[Paged]:
    """Attention of each layer over its selected pages, each row and KV head an entry of the batch."""
    shape, entries = step.shape, step.shape.batch * step.shape.kv_heads
    # The newest page is always selected, and is the last of the ascending list: it alone may be partly filled.
    tokens = shape.n_select * shape.page_size - (-shape.length % shape.page_size)
    lengths = torch.full((entries,), tokens, dtype=torch.int32, device=step.view.n_pages.device)
    return [
        Paged(
            layer.q.view(entries, -1, shape.dim),
            folded_cache(layer.k_pages),
            folded_cache(layer.v_pages),
            folded_pages(step.given_pages(layer), shape.page_size),
            lengths,
        )
        for layer in step.layers
    ]


def fa3(calls: Callable[[Step], list[Paged]], scheduled: bool, step: Step) -> list[Run]:
    """FA3; ``scheduled`` gives it the schedule of the batch beforehand, as SGLang's decode does."""
    library = importlib.import_module("sgl_kernel.flash_attn")
    paged = calls(step)
    first, shape = paged[0], step.shape
    entries, heads, dim = first.q.shape
    options: dict[str, Any] = {"cache_seqlens": first.lengths, "softmax_scale": step.sm_scale, "causal": True}
    if scheduled:
        starts = torch.arange(entries + 1, dtype=torch.int32, device=first.q.device)
        options["scheduler_metadata"] = library.get_scheduler_metadata(
            batch_size=entries,
            max_seqlen_q=1,
            max_seqlen_k=first.table.shape[1] * shape.page_size,
            num_heads=heads,
            num_heads_k=first.k.shape[2],
            headdim=dim,
            cache_seqlens=first.lengths,
            qkv_dtype=first.q.dtype,
            cu_seqlens_q=starts,
            page_size=shape.page_size,
            causal=True,
        )
        options |= {"cu_seqlens_q": starts, "max_seqlen_q": 1}

    def run(one: Paged) -> torch.Tensor:
        q = one.q if scheduled else one.q[:, None]
        out = library.flash_attn_with_kvcache(q, one.k, one.v, page_table=one.table, **options)
        return out.reshape(shape.batch, shape.q_heads, dim)

    return [partial(run, one) for one in paged]


def flashinfer(calls: Callable[[Step], list[Paged]], kv_dtype: torch.dtype, step: Step) -> list[Run]:
    """FlashInfer on tensor cores, from a cache of any element type, converted beforehand."""
    library = importlib.import_module("flashinfer")
    paged, shape, device = calls(step), step.shape, step.view.n_pages.device
    if kv_dtype != torch.bfloat16:
        paged = [replace(one, k=one.k.to(kv_dtype), v=one.v.to(kv_dtype)) for one in paged]
    # Shared, because a server plans once for all layers: the plans are equal, only the page ids differ.
    floats, plan = (torch.empty(size, dtype=torch.uint8, device=device) for size in (WORKSPACE_BYTES, PLAN_BYTES))

    def planned(one: Paged) -> Any:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(floats, "NHD", use_tensor_cores=True)
        wrapper.reset_workspace_buffer(floats, plan)
        entries, heads, dim = one.q.shape
        starts = torch.arange(entries + 1, dtype=torch.int32, device=device) * one.table.shape[1]
        last = (one.lengths - 1) % shape.page_size + 1
        sizes = (heads, one.k.shape[2], dim, shape.page_size)
        types = {"q_data_type": one.q.dtype, "kv_data_type": kv_dtype}
        wrapper.plan(starts, one.table.flatten(), last, *sizes, **types, sm_scale=step.sm_scale)
        return wrapper

    tables = {id(one.table): one for one in paged}
    wrappers = {table: planned(one) for table, one in tables.items()}

    def run(one: Paged) -> torch.Tensor:
        return wrappers[id(one.table)].run(one.q, (one.k, one.v)).reshape(shape.batch, shape.q_heads, -1)

    return [partial(run, one) for one in paged]


def minimax(step: Step) -> list[Run]:
    """SGLang's Triton kernel for MiniMax's models, which takes logical blocks and a table of token slots."""
    library = importlib.import_module(MINIMAX)
    shape, table = step.shape, step.batch.page_table
    tokens = torch.arange(shape.page_size, dtype=torch.int32, device=table.device)
    slots = (table[..., None] * shape.page_size + tokens).flatten(1)
    rows = torch.arange(shape.batch, device=table.device)
    lengths = torch.full_like(step.batch.n_pages, shape.length)
    logical_of = torch.zeros(step.batch.num_pages, dtype=torch.int32, device=table.device)
    logical_of[table.long()] = torch.arange(shape.n_pages, dtype=torch.int32, device=table.device)

    def run(layer: Layer, blocks: torch.Tensor) -> torch.Tensor:
        cache = (layer.k_cache, layer.v_cache, slots, lengths, rows, shape.page_size, blocks)
        return library.flash_decode_with_gqa_share_sparse(layer.q, None, *cache, sm_scale=step.sm_scale)

    blocks = [logical_of[step.given_pages(layer).long()].transpose(0, 1).contiguous() for layer in step.layers]
    return [partial(run, *pair) for pair in zip(step.layers, blocks, strict=True)]
