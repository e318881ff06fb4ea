"""SGLang's torch_native attention without its redundant work.

The stock backend extends a prompt by computing a query row for every cached token too, so a radix hit or a later chunk
costs as much as the whole prompt, and it passes MLA's unequal key and value sizes to PyTorch, which then leaves its
flash kernel: together 3.8 s instead of 18 ms per layer for 16 tokens after 4,000 (8 heads, rank 512, one core).
Results differ from the stock backend's by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from sglang_cpu_platform import invariant

ROWS = 128  # query rows per kernel call: bounds the mask, and how much of it is wasted


def allow_windows() -> None:
    """Let SGLang's lists of backends with windows and attention sinks have torch_native."""
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.arg_groups.model_override_base import attention_backends_of

    def backends(view: Any) -> tuple[str | None, ...]:
        found = attention_backends_of(view)
        return ("triton", "triton") if set(found) == {"torch_native"} else found

    # A hook would replace the function in all other modules, too.
    model_hook.attention_backends_of = backends


def note_chunks(original: Callable[..., None], backend: Any, model_runner: Any) -> None:
    """Hook around ``TorchNativeAttnBackend.__init__``: note the size of chunks, for models that SGLang has chunk."""
    original(backend, model_runner)
    chunked = model_runner.model_config.is_local_attention_model
    backend.chunk_size = model_runner.attention_chunk_size if chunked else None


def note_layer(
    original: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    layer: Any,
    *args: Any,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Hook around ``TorchNativeAttnBackend.forward_extend`` and ``forward_decode``.

    They know no sinks, chunks and soft caps. ``sinks`` is ``[heads]``, a logit of each head without a value.
    """
    backend.sinks, backend.chunk = sinks, backend.chunk_size if layer.use_irope else None
    backend.soft_cap = layer.logit_cap
    return original(backend, query, key, value, layer, *args, **options)


def extend(
    original: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor | None,
    extend_seq_lens: torch.Tensor | None,
    encoder_lens: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Hook around ``TorchNativeAttnBackend._run_sdpa_forward_extend``; causal, in windows only with sinks or a cap.

    A verification of drafts comes without lengths of its own, and the rows' lengths are without its tokens.
    """
    if extend_seq_lens is None:
        extend_seq_lens = torch.full_like(seq_lens, len(query) // len(seq_lens))
        extend_prefix_lens, seq_lens = seq_lens, seq_lens + extend_seq_lens
    sinks, cap = getattr(backend, "sinks", None), getattr(backend, "soft_cap", 0.0)
    table = _table(backend, req_to_token, seq_lens, options)
    ours = sinks is not None or cap > 0 or options["sliding_window_size"] is None
    if ours and encoder_lens is None and options["causal"]:
        caches = (k_cache, v_cache, table)
        lengths = (req_pool_indices, seq_lens, extend_seq_lens)
        return _attend(query, output, *caches, *lengths, options, sinks, getattr(backend, "chunk", None), cap)
    cached = (table, req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens)
    return original(backend, query, output, k_cache, v_cache, *cached, **options)


def decode(
    original: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Hook around ``TorchNativeAttnBackend._run_sdpa_forward_decode``; unequal sizes, sinks, chunks and caps.

    And with deterministic inference, where it must give what a prefill of the same token does.
    """
    sinks, chunk = getattr(backend, "sinks", None), getattr(backend, "chunk", None)
    cap = getattr(backend, "soft_cap", 0.0)
    table = _table(backend, req_to_token, seq_lens, options)
    ours = k_cache.shape[-1] != v_cache.shape[-1] or invariant.enabled() or chunk is not None
    ours = sinks is not None or cap > 0 or (ours and options["sliding_window_size"] is None)
    if ours and encoder_lens is None:
        caches, lengths = (k_cache, v_cache, table), (req_pool_indices, seq_lens, torch.ones_like(seq_lens))
        return _attend(query, output, *caches, *lengths, options, sinks, chunk, cap)
    cached = (table, req_pool_indices, seq_lens, encoder_lens)
    return original(backend, query, output, k_cache, v_cache, *cached, **options)


def _table(backend: Any, req_to_token: torch.Tensor, seq_lens: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The slots of requests in a layer; stock does not know that windows and chunks may have a KV pool of their own.

    As many as the longest row has: all of the table would take longer than the layers of a small model.
    """
    full = options["sliding_window_size"] is None and getattr(backend, "chunk", None) is None
    if full or not hasattr(backend.token_to_kv_pool, "full_to_swa_index_mapping"):
        return req_to_token
    return backend.token_to_kv_pool.translate_loc_from_full_to_swa(req_to_token[:, : int(seq_lens.max())])


def _attend(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    new_lens: torch.Tensor,
    options: dict[str, Any],
    sinks: torch.Tensor | None,
    chunk: int | None,
    cap: float,
) -> torch.Tensor:
    """Causal attention of the last ``new_lens[i]`` tokens of every row over all its ``seq_lens[i]`` tokens.

    Or over those of their chunk, each of ``chunk`` tokens from the first one on.
    ``query`` and ``output`` are ``[tokens, heads, dim]``, the caches ``[slots, kv_heads, dim]``, ``sinks`` ``[heads]``.
    """
    width, step = v_cache.shape[-1], 1 if invariant.enabled() else ROWS
    attend = partial(_capped_attention, cap) if cap > 0 else scaled_dot_product_attention
    start = 0
    for row, length, new in zip(req_pool_indices.tolist(), seq_lens.tolist(), new_lens.tolist(), strict=True):
        slots = req_to_token[row, :length]
        keys = k_cache[slots].to(query.dtype).transpose(0, 1).unsqueeze(0)
        values = v_cache[slots].to(query.dtype).transpose(0, 1).unsqueeze(0)
        # The flash kernel wants equal sizes; zeros change nothing and are cut off again.
        values = pad(values, (0, keys.shape[-1] - width))
        extra = 0 if sinks is None else 1
        # A sink is a key and a value of zeros, whose logit the mask adds.
        keys, values = pad(keys, (0, 0, extra, 0)), pad(values, (0, 0, extra, 0))
        for first in range(0, new, step):
            last = min(first + step, new)
            seen = length - new + last
            rows = slice(start + first, start + last)
            attended = attend(
                query[rows].transpose(0, 1).unsqueeze(0),
                keys[:, :, : seen + extra],
                values[:, :, : seen + extra],
                attn_mask=_mask(last - first, seen, options["sliding_window_size"], chunk, sinks, query.dtype),
                scale=options["scaling"],
                enable_gqa=options["enable_gqa"],
            )
            output[rows] = attended[0, :, :, :width].transpose(0, 1)
        start += new
    return output


def _capped_attention(
    cap: float,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attn_mask: torch.Tensor,
    scale: float,
    enable_gqa: bool,
) -> torch.Tensor:
    """``scaled_dot_product_attention`` of logits that become ``cap * tanh(logits / cap)`` before the mask."""
    if enable_gqa:
        keys, values = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (keys, values))
    logits = (query @ keys.transpose(-1, -2) * (scale / cap)).tanh_().mul_(cap)
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    return (logits + attn_mask).softmax(-1) @ values


def _mask(
    rows: int, seen: int, window: int | None, chunk: int | None, sinks: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the mask of ``seen`` keys for the last ``rows`` tokens; with sinks a bias ``[heads, rows, 1 + seen]``."""
    mask = torch.ones(rows, seen, dtype=torch.bool).tril(seen - rows)
    if window is not None:
        mask = mask.triu(seen - rows - window)
    if chunk is not None:
        chunks = torch.arange(seen) // chunk
        mask &= chunks == chunks[seen - rows :, None]
    if sinks is None:
        return mask
    hidden = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))
    return torch.cat([sinks.to(dtype)[:, None, None].expand(-1, rows, 1), hidden.expand(len(sinks), -1, -1)], -1)
