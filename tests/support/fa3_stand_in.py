"""FA3's ``flash_attn_with_kvcache`` for one query a row with a latent part, in plain torch."""

from typing import Any

import torch


class FA3:
    """Called as FA3 is, with what it asks of its arguments.

    Attributes:
        splits: ``num_splits`` of each call.
    """

    def __init__(self) -> None:
        self.splits: list[int] = []

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        qv: torch.Tensor,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        num_splits: int,
        out: torch.Tensor,
        **unknown: Any,
    ) -> torch.Tensor:
        """Attend to the first tokens of each row's pages, and write zeros where there are none."""
        batch, one, heads, dim = q.shape
        pages, page_size, kv_heads, v_dim = v_cache.shape
        assert not unknown and one == kv_heads == 1
        assert qv.shape == out.shape == (batch, 1, heads, v_dim) and k_cache.shape == (pages, page_size, 1, dim)
        assert q.dtype == qv.dtype == k_cache.dtype == v_cache.dtype == out.dtype
        assert all(tensor.stride(-1) == 1 for tensor in (q, qv, k_cache, v_cache, page_table, out))
        assert cache_seqlens.dtype == page_table.dtype == torch.int32
        assert cache_seqlens.shape == (batch,) and cache_seqlens.is_contiguous() and page_table.shape[0] == batch
        # A query alone comes behind all keys.
        assert causal in (False, True) and 0 <= num_splits <= 256
        self.splits.append(num_splits)
        for row, tokens in enumerate(cache_seqlens.tolist()):
            assert 0 <= tokens <= page_table.shape[1] * page_size
            held = page_table[row, : -(-tokens // page_size)].long()
            keys, values = (cache[held].flatten(0, 2)[:tokens].float() for cache in (k_cache, v_cache))
            logits = softmax_scale * (q[row, 0].float() @ keys.T + qv[row, 0].float() @ values.T)
            out[row, 0] = (logits.softmax(dim=-1) @ values).to(out.dtype) if tokens else 0.0
        return out
