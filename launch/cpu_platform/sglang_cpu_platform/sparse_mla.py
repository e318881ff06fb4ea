"""DeepSeek Sparse Attention in PyTorch: the lightning indexer and attention over the tokens that it chooses.

SGLang's own needs kernels for Hopper or later in two places, and Triton around them. Its model, indexer weights, KV
pool layout and batch metadata are used as they are. Source: the DeepSeek-V3.2 report (section 2.1), with the Hadamard
rotation and the FP8 keys of its published inference code, which SGLang follows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

ROWS = 64  # queries per product: bounds the scores of all heads
FP8_MAX = 448.0
TILE = 128  # values of a latent that share a scale
LEAST = 1e-4  # of a row's largest value, so that a row of zeros has a scale
KEY_DIM = 128  # of the indexer


@cache
def hadamard(size: int) -> torch.Tensor:
    """The Hadamard matrix of a power of two, in Sylvester's order, of norm 1: ``[size, size]`` float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Spread each vector of the last dimension over all its places; products of two rotated vectors stay."""
    # The order of a float32 sum would decide on which side of the edge between two float8 values it falls.
    return (x.double() @ hadamard(x.shape[-1])).to(x.dtype)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows ``[..., 128]`` to e4m3 with scales that are powers of two.

    Returns:
        The values ``[..., 128]`` float8_e4m3fn and the scales ``[...]`` float32.
    """
    x = x.float()
    mantissa, exponent = torch.frexp(x.abs().amax(-1).clamp(min=LEAST) / FP8_MAX)
    # The least power of two that is no less: frexp's mantissa is in [0.5, 1), and 0.5 is a power of two itself.
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    return (x / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def index_views(buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the index cache of a layer, whose pages hold the keys of their tokens and then the scales.

    Args:
        buffer: ``[pages, page_size * (128 + 4)]`` uint8.

    Returns:
        Views: keys ``[pages, page_size, 128]`` uint8, e4m3, and scales ``[pages, page_size]`` float32.
    """
    page_size = buffer.shape[1] // (KEY_DIM + 4)
    keys, scales = buffer.split((page_size * KEY_DIM, page_size * 4), 1)
    return keys.unflatten(1, (page_size, KEY_DIM)), scales.view(torch.float32)


def store_keys(buffer: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """Write the indexer's keys ``[tokens, 128]`` to slots of an index cache."""
    stored, scales = index_views(buffer)
    page, place = slots // stored.shape[1], slots % stored.shape[1]
    values, scale = quantize(keys)
    stored[page, place] = values.view(torch.uint8)
    scales[page, place] = scale


def read_keys(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Read the indexer's keys of slots of an index cache, scaled: ``[tokens, 128]`` float32."""
    stored, scales = index_views(buffer)
    page, place = slots // stored.shape[1], slots % stored.shape[1]
    return stored[page, place].view(torch.float8_e4m3fn).float() * scales[page, place, None]


def indexer_forward(
    indexer: Any,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    layer_id: int,
    return_indices: bool = True,
    use_cuda_graph: bool = True,
) -> torch.Tensor | None:
    """Replace SGLang's ``Indexer.forward_native``: store the keys of a batch, choose the tokens that each attends to.

    Args:
        indexer, x, q_lora, positions, forward_batch, layer_id: as of ``Indexer.forward_cuda``.
        return_indices: whether the attention wants them.
        use_cuda_graph: ignored.

    Returns:
        ``[tokens, index_topk]`` int32, positions within the request in ascending order, -1 where there are fewer; ties
        go to the lowest. None if the backend selects nothing, or the indices are not wanted.
    """
    from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool

    metadata: Any = get_attn_backend().get_indexer_metadata(layer_id, forward_batch)
    if metadata is None:
        return None
    query, key, _ = indexer._get_q_k_bf16(q_lora, x, positions, False, forward_batch)
    pool: Any = get_token_to_kv_pool()
    buffer = pool.get_index_k_with_scale_buffer(layer_id)
    store_keys(buffer, forward_batch.out_cache_loc, key)
    if not return_indices:
        return None
    values, scales = quantize(query)
    gates = x.float() @ indexer.weights_proj.weight.float().T
    gates = gates * scales * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    batch = metadata.attn_metadata
    lengths = batch.dsa_seqlens_expanded
    rows = batch.token_to_batch_idx
    rows = torch.arange(len(lengths)) if rows is None else rows
    chosen = torch.full((len(x), indexer.index_topk), -1, dtype=torch.int32)
    for row in rows.unique().tolist():
        mine = (rows == row).nonzero().flatten()
        slots = batch.page_table_1[row, : int(lengths[mine].max())].long()
        keys = read_keys(buffer, slots) if len(slots) > indexer.index_topk else slots.new_zeros(len(slots), 0)
        for part in mine.split(ROWS):
            chosen[part] = choose(values[part].float(), gates[part], keys, lengths[part], indexer.index_topk)
    return chosen


def choose(
    query: torch.Tensor, gates: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor, topk: int
) -> torch.Tensor:
    """The best tokens of one request for each of some queries.

    Args:
        query: ``[queries, heads, 128]`` float32.
        gates: ``[queries, heads]`` float32, weights of the heads with all scales of the query in them.
        keys: ``[tokens, 128]`` float32; unused if no query has more than ``topk`` tokens.
        lengths: ``[queries]`` int32, tokens that each query sees.
        topk: most tokens of a query.

    Returns:
        ``[queries, topk]`` int32, ascending, padded with -1.
    """
    places = torch.arange(max(len(keys), topk))
    if len(keys) <= topk:
        kept = places[:topk].expand(len(lengths), -1)
    else:
        logits = torch.einsum("qhl,qh->ql", (query @ keys.T).relu_(), gates)
        logits = logits.masked_fill(places >= lengths[:, None], float("-inf"))
        best = logits.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
        # Queries that see fewer tokens have also chosen invisible ones, which go to the end.
        kept = best.masked_fill(best >= lengths[:, None], len(keys)).sort(dim=-1).values
    return kept.masked_fill(kept >= lengths[:, None], -1).int()


def slots_of_extend(
    page_table: torch.Tensor, topk_indices: torch.Tensor, extend_lens_cpu: list[int], page_size: int, **_: Any
) -> torch.Tensor:
    """Replace SGLang's ``transform_index_page_table_prefill``: token slots of chosen positions.

    Args:
        page_table: ``[rows, tokens]`` int32, one slot per token.
        topk_indices: ``[new tokens, topk]`` int32, of all rows in turn.
        extend_lens_cpu: new tokens of each row.
        page_size: 1.
    """
    rows = torch.repeat_interleave(torch.arange(len(page_table)), torch.tensor(extend_lens_cpu))
    return slots_of_decode(page_table[rows], topk_indices, page_size)


def slots_of_decode(page_table: torch.Tensor, topk_indices: torch.Tensor, page_size: int = 1, **_: Any) -> torch.Tensor:
    """Replace SGLang's ``transform_index_page_table_decode``: the same with one new token per row."""
    slots = page_table.gather(1, topk_indices.clamp(min=0).long())
    return slots.masked_fill(topk_indices < 0, -1).int()


def row_width(original: Callable[..., int], *, model_config: Any, kv_cache_dtype: torch.dtype) -> int:
    """Around SGLang's ``calculate_mla_kv_cache_dim``: the width of a token's row in the KV pool.

    SGLang would store float8 latents without scales, as the kernel that `attend` replaces reads them.
    """
    from sglang.srt.configs.model_config import is_deepseek_dsa

    if kv_cache_dtype != torch.float8_e4m3fn or not is_deepseek_dsa(model_config.hf_config):
        return original(model_config=model_config, kv_cache_dtype=kv_cache_dtype)
    return model_config.kv_lora_rank // TILE * (TILE + 4) + 2 * model_config.qk_rope_head_dim


def quantize_latents(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace SGLang's ``quantize_k_cache_separate``: quantise some tokens for a float8 cache.

    Args:
        latent: ``[tokens, 1, rank]``; rank is a multiple of 128.
        rotated: ``[tokens, 1, rope]``.

    Returns:
        Bytes: ``[tokens, 1, rank + rank / 32]``, e4m3 and then the float32 scale of each 128 values, ``amax / 448``;
        and ``[tokens, 1, 2 * rope]``, bfloat16.
    """
    tiles = latent.float().unflatten(-1, (-1, TILE))
    scales = tiles.abs().amax(-1) / FP8_MAX
    # A tile of zeros has a scale of zero.
    values = (tiles * (1 / scales.clamp(min=torch.finfo().tiny))[..., None]).clamp(-FP8_MAX, FP8_MAX)
    stored = values.to(torch.float8_e4m3fn).flatten(-2)
    return torch.cat([stored.view(torch.uint8), scales.view(torch.uint8)], -1), rotated.bfloat16().view(torch.uint8)


def expand(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """Latents and rotary keys of rows ``[tokens, bytes]`` of a float8 cache, float32."""
    values, scales, rotated = rows.view(torch.uint8).tensor_split((rank, rank + rank // 32), -1)
    latent = values.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, TILE)) * scales.view(torch.float32)[..., None]
    return torch.cat([latent.flatten(-2), rotated.view(torch.bfloat16).float()], -1)


def attend(
    backend: Any,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    page_table_1: torch.Tensor,
    sm_scale: float,
) -> torch.Tensor:
    """Replace ``DeepseekSparseAttnBackend._forward_tilelang``: attention over some slots of the latent cache.

    Args:
        backend: SGLang's backend.
        q_all: ``[tokens, heads, rank + rope]``, absorbed.
        kv_cache: ``[slots, 1, rank + rope]``, or rows of bytes if it is float8.
        v_head_dim: the rank, which is the width of the values.
        page_table_1: ``[tokens, topk]`` int32 slots, -1 where there are fewer.
        sm_scale: of the logits.

    Returns:
        ``[tokens, heads, rank]``.
    """
    output = q_all.new_empty(*q_all.shape[:2], v_head_dim)
    for first in range(0, len(q_all), ROWS):
        part = slice(first, first + ROWS)
        chosen = page_table_1[part].long()
        # Neighbours choose much the same: one product with all that any of them chose, and a mask, beats a copy each.
        slots, places = chosen.unique(return_inverse=True)
        seen = torch.zeros(len(chosen), len(slots), dtype=torch.bool).scatter_(1, places, True) & (slots >= 0)
        stored = kv_cache[slots.clamp(min=0), 0]
        float8 = stored.dtype == torch.float8_e4m3fn
        latents = (expand(stored, v_head_dim) if float8 else stored).to(q_all.dtype)
        logits = (q_all[part] @ latents.T).float() * sm_scale
        weights = logits.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        output[part] = weights.to(q_all.dtype) @ latents[:, :v_head_dim]
    return output
