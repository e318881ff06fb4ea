"""The definition of the window score in plain torch."""

import torch

# The importance of a token whose key makes a logit infinite or NaN: before every other token, after the window.
UNBOUNDED = torch.finfo(torch.float32).max


def window_score(
    q: torch.Tensor,
    n_window: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    sm_scale: float,
    k_scale: float,
    kernel_size: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """See ``window_score.window_score``; entries at or beyond ``lengths`` are -inf."""
    out.fill_(float("-inf"))
    for row, length in enumerate(lengths.tolist()):
        window = min(int(n_window[row]), q.shape[1], length)
        context = length - window
        position = torch.arange(length, device=q.device)
        slots = page_table[row, position // page_size].long() * page_size + position % page_size
        queries = q[row, q.shape[1] - window :]
        importance = _importance(queries, k_cache[slots], sm_scale * k_scale)[None, :, :context]
        if context:
            pooled = torch.nn.functional.max_pool1d(importance, kernel_size, stride=1, padding=kernel_size // 2)
            out[row, :, :context] = pooled[0]
        out[row, :, context:length] = float("inf")
    return out


def _importance(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax weights ``[Hkv, T]`` of ``keys`` ``[T, Hkv, d]``, summed over the last ``queries`` ``[n, Hq, d]``."""
    length, num_kv_heads, _ = keys.shape
    window = len(queries)
    queries = queries.float().unflatten(1, (num_kv_heads, -1))
    logits = torch.einsum("whgd,thd->hgwt", queries, keys.float()) * scale
    position = torch.arange(length, device=keys.device)
    visible = position <= position[length - window :, None]  # [n, T]
    broken = visible & ~logits.isfinite()
    # A query all of whose logits are left out has no softmax.
    weights = logits.masked_fill(~visible | broken, float("-inf")).softmax(dim=-1).nan_to_num(nan=0.0)
    return weights.sum(dim=(1, 2)).masked_fill(broken.any(dim=2).any(dim=1), UNBOUNDED)
