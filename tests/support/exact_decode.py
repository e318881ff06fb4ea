"""Decode attention over a selection in float64, for tests of kernels."""

from typing import Any

import torch


def exact(arguments: dict[str, Any]) -> torch.Tensor:
    """Attention of ``sparse_decode`` over the same selection in float64, a row and KV head at a time."""
    q, page_size, indices = arguments["q"], arguments["page_size"], arguments["indices"]
    caches = arguments["k_cache"], arguments["v_cache"]
    group = q.shape[1] // caches[0].shape[1]
    places = torch.arange(page_size, device=q.device)
    out = torch.zeros(*q.shape[:2], caches[1].shape[2], dtype=torch.float64, device=q.device)
    for row, last_slot in enumerate(arguments["last_slots"].tolist()):
        for head, count in enumerate(arguments["counts"][row].tolist()):
            slots = (indices[row, head, :count, None].long() * page_size + places).flatten()
            slots = slots[(slots // page_size != last_slot // page_size) | (slots <= last_slot)]
            keys, values = (cache[slots, head].double() for cache in caches)
            heads = slice(head * group, (head + 1) * group)
            logits = q[row, heads].double() @ keys.T * (arguments["sm_scale"] * arguments.get("k_scale", 1.0))
            out[row, heads] = logits.softmax(dim=-1) @ values * arguments.get("v_scale", 1.0)
    return out


def worst_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative L2 error of a row and query head; infinite where something is not a number."""
    errors = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    return errors.nan_to_num(float("inf")).max().item()
