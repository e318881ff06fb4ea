"""DSA's stages by SGLang on Hopper, for ``eval.lab.bench_dsa``.

Each function gets a `Step` and returns a call for each of its layers. What SGLang does once for all layers of a batch
(DeepGEMM's and FlashMLA's schedules, the plan of the selection, page tables) is done beforehand and not timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from eval.lab.kernels.dsa_inputs import FP8, INDEX_DIM, LOGITS, Layer, Step
from eval.lab.kernels.mla_inputs import SM_SCALE
from eval.lab.kernels.mla_peers import FLASHMLA, QUANTISED, SPARSE_HEADS
from sglang_sparse_kernels.common.timing import Run
from sglang_sparse_kernels.index_keys import PAGE_SIZE

DSA = "sglang.kernels.ops.attention.dsa"
KEYS = "sglang.kernels.ops.kvcache.dsa_index_k_cache"
TOPK_BACKEND = "sglang.srt.layers.attention.dsa.dsa_topk_backend"
TOPK_V2 = "sglang.kernels.ops.attention.dsv4.topk"
FLASH_ATTENTION = "sglang.kernels.ops.attention.flash_attention"

Logits = Callable[[Layer], torch.Tensor]


def _given(step: Step) -> Logits:
    return lambda layer: layer.logits


def _paged_logits(step: Step) -> Logits:
    """``Indexer._get_topk_paged`` up to its logits: of decode rows, over the pages of the indexer's cache."""
    library, paged = importlib.import_module("deep_gemm"), importlib.import_module(DSA)
    lengths = step.lengths.view(-1, 1)
    schedule = library.get_paged_mqa_logits_metadata(lengths, PAGE_SIZE, library.get_num_sms())

    def run(layer: Layer) -> torch.Tensor:
        cache = layer.buffer.view(len(layer.buffer), PAGE_SIZE, 1, INDEX_DIM + 4)
        batch = (lengths, step.page_table, schedule, step.width)
        return paged.deepgemm_paged_mqa_logits_split(
            library.fp8_paged_mqa_logits, layer.q, cache, layer.weights, *batch, q_offset=len(layer.q)
        )

    return run


def _ragged_logits(step: Step) -> Logits:
    """``Indexer._get_topk_ragged`` up to its logits: of a prompt's tokens, over a copy of the row's keys.

    In one piece: SGLang divides the queries where their logits take more than a share of the free memory, which those
    of 8k tokens at 128k, 4 GiB, do on a server that leaves little.
    """
    library = importlib.import_module("deep_gemm")
    keys = importlib.import_module(KEYS).GetKAndS
    pool, length = SimpleNamespace(index_page_size=PAGE_SIZE, index_head_dim=INDEX_DIM), step.shape.length
    row_lengths = torch.full((step.shape.batch,), length, dtype=torch.int32, device=step.device)
    first = torch.zeros_like(step.lengths)

    def run(layer: Layer) -> torch.Tensor:
        rows = {"seq_len_tensor": row_lengths, "seq_len_sum": length, "max_seq_len": length}
        values, scales = keys.execute(pool, layer.buffer, page_indices=step.page_table, **rows)
        kv = (values.view(FP8), scales.view(torch.float32).squeeze(-1))
        return library.fp8_mqa_logits(layer.q, kv, layer.weights, first, step.lengths, clean_logits=False)

    return run


def logits(step: Step) -> Logits:
    """Return the function that makes the logits of a layer."""
    if step.op in LOGITS:
        return _given(step)
    return _ragged_logits(step) if step.shape.chunk else _paged_logits(step)


def selection(v2: bool, step: Step) -> list[Run]:
    """SGLang's selection behind its logits, as its backend "sgl-kernel" dispatches it: slots in any order.

    Args:
        v2: with the kernel that SGLang takes for decode rows by default; False: with the one that it takes for a
            prompt's tokens, and for decode rows where ``SGLANG_OPT_USE_TOPK_V2`` is off.
        step: the inputs.
    """
    made, shape = logits(step), step.shape
    backend = importlib.import_module(TOPK_BACKEND)
    # SGLang's table of single tokens, of which only the other kernel reads.
    slots = torch.nn.functional.pad(step.slots().int(), (0, step.width - shape.length))
    starts = [0, shape.chunk] if shape.chunk else range(shape.batch + 1)
    queries = torch.tensor([*starts], dtype=torch.int32, device=step.device)
    facts: dict[str, Any] = {"real_page_table": step.page_table, "page_table_1": slots, "page_size": PAGE_SIZE}
    # Read on AMD's GPUs alone.
    facts["token_to_batch_idx"] = None
    if v2:
        facts["topk_v2_plan"] = importlib.import_module(TOPK_V2).plan_topk_v2(step.lengths)
    metadata = SimpleNamespace(**facts)

    def run(layer: Layer) -> torch.Tensor:
        if not v2 and not shape.chunk:
            fused = importlib.import_module("sgl_kernel").fast_topk_transform_fused
            return fused(made(layer), step.lengths, slots, queries, shape.topk)
        return backend.DSATopKBackend.SGL_KERNEL.topk_transform(
            logits=made(layer),
            lengths=step.lengths,
            topk=shape.topk,
            topk_transform_method=backend.TopkTransformMethod.PAGED,
            attn_metadata=metadata,
            cu_seqlens_q_topk=queries,
            row_starts=torch.zeros_like(step.lengths) if shape.chunk else None,
        )

    return [partial(run, layer) for layer in step.layers]


def auto(step: Step) -> list[Run]:
    """This project's selection behind SGLang's logits."""
    made = logits(step)
    return [lambda layer=layer: step.behind(made(layer)) for layer in step.layers]


def fa3(step: Step) -> list[Run]:
    """Prepare SGLang's decode attention over a bfloat16 cache (``_forward_fa3``), with pages of one token."""
    library, shape = importlib.import_module(FLASH_ATTENTION), step.shape
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=step.device)
    tables = {"cache_seqlens": step.wanted, "cu_seqlens_q": starts, "cu_seqlens_k_new": starts * shape.topk}
    options = {"max_seqlen_q": 1, "softmax_scale": SM_SCALE, "causal": True, "softcap": 0.0, "num_splits": 0}

    def made(layer: Layer) -> Run:
        q_nope, q_rope = (part.contiguous() for part in layer.attending.split([shape.latent, shape.rope], -1))
        k_rope = layer.cache[:, None, shape.latent :].view(-1, 1, 1, shape.rope)
        latents = layer.cache[:, None, : shape.latent].view(-1, 1, 1, shape.latent)
        given = {"qv": q_nope, "page_table": layer.given}
        return lambda: library.flash_attn_with_kvcache(q_rope, k_rope, latents, **given, **tables, **options)

    return [made(layer) for layer in step.layers]


def _padded(step: Step, layer: Layer, heads: int) -> torch.Tensor:
    # torch's pad copies even where there is nothing to add.
    return (
        layer.attending
        if heads == step.shape.heads
        else torch.nn.functional.pad(layer.attending, (0, 0, 0, heads - step.shape.heads))
    )


def flashmla_sparse(step: Step) -> list[Run]:
    """FlashMLA's kernel of prefill over a bfloat16 cache (``_forward_flashmla_sparse``), which decode can take, too."""
    library, shape = importlib.import_module(FLASHMLA), step.shape
    heads = -(-shape.heads // SPARSE_HEADS) * SPARSE_HEADS

    def made(layer: Layer) -> Run:
        cache = {"kv": layer.cache[:, None], "indices": layer.given[:, None], "sm_scale": SM_SCALE, "d_v": shape.latent}
        given = {"q": _padded(step, layer, heads), **cache, "topk_length": step.wanted}
        return lambda: library.flash_mla_sparse_fwd(**given)[0][:, : shape.heads]

    return [made(layer) for layer in step.layers]


def flashmla_kv(step: Step) -> list[Run]:
    """Prepare SGLang's decode attention over its float8 cache (``_forward_flashmla_kv``), with 656 bytes a token."""
    library, shape = importlib.import_module(FLASHMLA), step.shape
    quantise = importlib.import_module(QUANTISED).quantize_k_cache
    heads = 64 if shape.heads <= 64 else 128
    plan, splits = library.get_mla_metadata(
        cache_seqlens=step.wanted,
        num_q_tokens_per_head_k=heads,
        num_heads_k=1,
        num_heads_q=heads,
        is_fp8_kvcache=True,
        topk=shape.topk,
    )
    no_table = torch.empty(shape.batch, 0, dtype=torch.int32, device=step.device)

    def made(layer: Layer) -> Run:
        paged = layer.cache.view(-1, PAGE_SIZE, 1, layer.cache.shape[1])
        pages = (quantise(paged), no_table, step.wanted, shape.latent, plan, splits)
        options = {"softmax_scale": SM_SCALE, "indices": layer.given[:, None], "is_fp8_kvcache": True}
        query = _padded(step, layer, heads)[:, None]
        return lambda: library.flash_mla_with_kvcache(query, *pages, **options)[0][:, 0, : shape.heads]

    return [made(layer) for layer in step.layers]
