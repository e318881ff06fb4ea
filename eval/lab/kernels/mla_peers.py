"""MLA decode attention by other libraries, for ``eval.lab.bench_mla``: dense, and over this project's selection.

Each is called as SGLang's backend of that name calls it in a decode step, and gives ``[B, H, latent]``; where it
is not, its docstring says so. What such a backend does once for all layers (FlashMLA's and FlashInfer's plans, the
Triton backend's number of splits) is done beforehand and not timed.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial

import torch

from eval.lab.kernels.kernel_attention import WORKSPACE_BYTES
from eval.lab.kernels.mla import ROPE
from eval.lab.kernels.mla_inputs import SM_SCALE, Layer, Shape, Step
from sglang_sparse_kernels.common.launch import dependent_launch
from sglang_sparse_kernels.common.timing import Run

TRITON = "sglang.kernels.ops.attention"
FP8 = torch.float8_e4m3fn
QUANTISED = "sglang.kernels.ops.quantization.dsa_quant_k_cache"
FLASHMLA = f"{TRITON}.flash_mla_interface"
# Of its sparse kernels on Hopper: heads are computed in tiles, tokens are loaded in tiles.
SPARSE_HEADS, SPARSE_TOKENS = 64, 128


def _paged(cache: torch.Tensor, page_size: int) -> torch.Tensor:
    """``[slots, dim]`` as ``[pages, page_size, 1, dim]``."""
    return cache.view(-1, page_size, 1, cache.shape[1])


def _lengths(step: Step) -> torch.Tensor:
    return torch.full((step.shape.batch,), step.shape.length, dtype=torch.int32, device=step.device)


def _split(layer: Layer, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts of a query as backends get them that take them apart."""
    return layer.q[..., :latent].contiguous(), layer.q[..., latent:].contiguous()


def flashmla(kv_dtype: torch.dtype, step: Step) -> list[Run]:
    """FlashMLA; over a float8 cache, converted beforehand, it takes a float8 query, which each layer converts."""
    library, shape = importlib.import_module(FLASHMLA), step.shape
    lengths = _lengths(step)
    schedule, splits = library.get_mla_metadata(lengths, shape.heads, 1, is_fp8_kvcache=kv_dtype == FP8)
    caches = [_paged(layer.cache.to(kv_dtype), shape.page_size) for layer in step.layers]
    one = torch.ones(1, dtype=torch.float32, device=step.device)
    scales = {"descale_q": one, "descale_k": one} if kv_dtype == FP8 else {}

    def run(layer: Layer, cache: torch.Tensor) -> torch.Tensor:
        pages = (cache, step.batch.page_table, lengths, shape.latent, schedule, splits)
        q = layer.q[:, None].to(kv_dtype)
        return library.flash_mla_with_kvcache(q, *pages, softmax_scale=SM_SCALE, causal=True, **scales)[0][:, 0]

    return [partial(run, layer, cache) for layer, cache in zip(step.layers, caches, strict=True)]


def _fa3(step: Step, page_size: int, pages: Callable[[Layer], tuple[torch.Tensor, torch.Tensor]]) -> list[Run]:
    library, shape = importlib.import_module("sgl_kernel.flash_attn"), step.shape
    if shape.kv_dtype == FP8:
        raise ValueError("over a float8 latent cache SGLang converts all of it for FA3, in every layer")
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=step.device)
    options = {"cu_seqlens_q": starts, "max_seqlen_q": 1, "softmax_scale": SM_SCALE, "causal": True}

    def made(layer: Layer) -> Run:
        q_nope, q_rope = _split(layer, shape.latent)
        paged, (table, lengths) = _paged(layer.cache, page_size), pages(layer)
        caches = (paged[..., shape.latent :], paged[..., : shape.latent])
        tables = {"qv": q_nope, "page_table": table, "cache_seqlens": lengths}
        return lambda: library.flash_attn_with_kvcache(q_rope, *caches, **tables, **options)

    return [made(layer) for layer in step.layers]


def fa3(step: Step) -> list[Run]:
    """FA3 with the latent part of the query beside the rotated one."""
    lengths = _lengths(step)
    return _fa3(step, step.shape.page_size, lambda layer: (step.batch.page_table, lengths))


def flashinfer(step: Step) -> list[Run]:
    """FlashInfer, over pages of one token as SGLang gives them to it.

    A float8 cache it reads as it is, which SGLang's backend does not: that converts all of it in every layer. So here
    it is a stronger peer than on a server.
    """
    library, shape = importlib.import_module("flashinfer"), step.shape
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=step.device)
    wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=step.device)
    slots = torch.cat([step.slots(row) for row in range(shape.batch)]).int()
    sizes = (shape.heads, shape.latent, shape.rope, 1, False, SM_SCALE)
    wrapper.plan(starts, starts * shape.length, slots, _lengths(step), *sizes, torch.bfloat16, shape.kv_dtype)
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if shape.kv_dtype == FP8 else {}

    def made(layer: Layer) -> Run:
        caches = (layer.cache[:, None, : shape.latent], layer.cache[:, None, shape.latent :])
        return partial(wrapper.run, *_split(layer, shape.latent), *caches, out=layer.out, **scales)

    return [made(layer) for layer in step.layers]


def triton_splits(processors: int, length: int) -> int:
    """The most splits of the Triton backend's MLA decode: 8, or a power of two for the processors and the context."""
    rounded = [2 ** math.ceil(math.log2(n)) for n in (processors, -(-length // 32))]
    return max(8, min(rounded))


def triton(step: Step) -> list[Run]:
    """SGLang's Triton decode."""
    library, shape = importlib.import_module(f"{TRITON}.decode_attention"), step.shape
    metadata = importlib.import_module(f"{TRITON}.metadata")
    processors = torch.cuda.get_device_properties(step.device).multi_processor_count
    most, lengths = triton_splits(processors, shape.length), _lengths(step)
    integers = {"dtype": torch.int32, "device": step.device}
    splits = torch.empty(shape.batch, **integers)
    heads = (shape.batch, 1, shape.heads, 1, most, processors)
    metadata.get_num_kv_splits_triton[(1,)](splits, lengths, *heads, MAX_NUM_SEQ=256)
    starts = torch.arange(shape.batch + 1, **integers) * shape.length
    slots = torch.cat([step.slots(row) for row in range(shape.batch)])
    partial_out = torch.empty(shape.batch, shape.heads, most, shape.latent, device=step.device)
    sizes = (partial_out, torch.empty(partial_out.shape[:3], device=step.device), splits, most, SM_SCALE, 1.0, 1.0)
    pdl = dependent_launch(torch.device(step.device))
    options = {"has_mla": True, "use_pdl": pdl, "page_size": shape.page_size}

    def run(layer: Layer) -> torch.Tensor:
        keys = layer.cache[:, None]
        values = keys[..., : shape.latent]
        library.decode_attention_fwd(layer.q, keys, values, layer.out, starts, slots, *sizes, **options)
        return layer.out

    return [partial(run, layer) for layer in step.layers]


def selected_tokens(shape: Shape, counts: torch.Tensor) -> torch.Tensor:
    """Tokens of selections that hold the newest block, as all do: it alone may be partly filled.

    Args:
        shape: of the rows.
        counts: blocks, ``[B, 1]`` int32.

    Returns:
        ``[B]`` int32.
    """
    return counts[:, 0] * shape.block_size - (-shape.length % shape.block_size)


def fa3_blocks(step: Step) -> list[Run]:
    """FA3 over the selected blocks as pages."""

    def pages(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = layer.given[ROPE]
        # What lies beyond the count is no page.
        beyond = torch.arange(chosen.indices.shape[2], device=step.device) >= chosen.counts
        return chosen.indices[:, 0].masked_fill(beyond, 0), selected_tokens(step.shape, chosen.counts)

    return _fa3(step, step.shape.block_size, pages)


def _widest(step: Step) -> int:
    """Tokens of the largest selection of all layers, in whole tiles."""
    blocks = max(int(layer.given[ROPE].counts.max()) for layer in step.layers)
    return -(-blocks * step.shape.block_size // SPARSE_TOKENS) * SPARSE_TOKENS


def _tokens(step: Step, layer: Layer, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of the selected tokens, ``[B, width]`` int32 with -1 behind them, and how many they are, ``[B]`` int32."""
    chosen, size = layer.given[ROPE], step.shape.block_size
    token = torch.arange(size, dtype=torch.int32, device=step.device)
    slots = (chosen.indices[:, 0, :, None] * size + token).flatten(1)[:, :width]
    slots = torch.nn.functional.pad(slots, (0, width - slots.shape[1]))
    tokens = selected_tokens(step.shape, chosen.counts)
    beyond = torch.arange(width, device=step.device) >= tokens[:, None]
    return slots.masked_fill(beyond, -1).contiguous(), tokens


def flashmla_tokens(step: Step) -> list[Run]:
    """FlashMLA's sparse *prefill* kernel over the tokens of the selected blocks, the one that takes a bfloat16 cache.

    It does not split a row's tokens over processors: with few rows most of the chip is idle, which is not what FlashMLA
    can do in decode. That is `flashmla_fp8_tokens`.
    """
    library, shape = importlib.import_module(FLASHMLA), step.shape
    width, padding = _widest(step), -shape.heads % SPARSE_HEADS

    def made(layer: Layer) -> Run:
        indices, tokens = _tokens(step, layer, width)
        q = torch.nn.functional.pad(layer.q, (0, 0, 0, padding))

        def run() -> torch.Tensor:
            cache = (layer.cache[:, None], indices[:, None], SM_SCALE, shape.latent)
            return library.flash_mla_sparse_fwd(q, *cache, topk_length=tokens)[0][:, : shape.heads]

        return run

    return [made(layer) for layer in step.layers]


def flashmla_fp8_tokens(step: Step) -> list[Run]:
    """FlashMLA's sparse decode kernel over the tokens of the selected blocks, as SGLang's DSA backend calls it.

    The cache is quantised beforehand as that backend stores it: the latent in float8 with a scale for every 128
    dimensions, the rotated dimensions in bfloat16, 656 bytes a token (the row's ``bytes`` count 576). Every row costs
    as much as the longest of all layers.
    """
    library, shape = importlib.import_module(FLASHMLA), step.shape
    quantised = importlib.import_module(QUANTISED).quantize_k_cache
    width, padding = _widest(step), -shape.heads % SPARSE_HEADS
    heads, integers = shape.heads + padding, {"dtype": torch.int32, "device": step.device}
    lengths, no_table = torch.full((shape.batch,), width, **integers), torch.empty(shape.batch, 0, **integers)
    schedule, splits = library.get_mla_metadata(
        cache_seqlens=lengths,
        num_q_tokens_per_head_k=heads,
        num_heads_k=1,
        num_heads_q=heads,
        is_fp8_kvcache=True,
        topk=width,
    )

    def made(layer: Layer) -> Run:
        indices = _tokens(step, layer, width)[0]
        q = torch.nn.functional.pad(layer.q, (0, 0, 0, padding))
        pages = (quantised(_paged(layer.cache, shape.page_size)), no_table, lengths, shape.latent, schedule, splits)
        options = {"softmax_scale": SM_SCALE, "indices": indices[:, None], "is_fp8_kvcache": True}
        return lambda: library.flash_mla_with_kvcache(q[:, None], *pages, **options)[0][:, 0, : shape.heads]

    return [made(layer) for layer in step.layers]
