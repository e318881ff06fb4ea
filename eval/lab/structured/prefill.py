"""Prefill of a server over generated inputs: what is asked for, and one that writes KV and does little else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

ATTEND, SKIP = "attend", "skip"
DEFAULTS: dict[str, Any] = {"seed": 0, "recipe": {}, "prefill": ATTEND}


def read_given(given: Any) -> dict[str, Any]:
    """Check a request for generated inputs, except its recipe, and fill in the defaults.

    Args:
        given: ``seed``, ``recipe`` and ``prefill``, which says what prefill does, "attend" or "skip"; all optional.

    Returns:
        All three.

    Raises:
        ValueError: it is something else; says what is allowed.
    """
    if not isinstance(given, dict) or given.keys() - DEFAULTS.keys() or type(given.get("seed", 0)) is not int:
        raise ValueError(f"got {given!r}, allowed is an object with an integer seed, a recipe and prefill")
    found = {**DEFAULTS, **given}
    if found["prefill"] not in (ATTEND, SKIP):
        raise ValueError(f"prefill: got {found['prefill']!r}, allowed are {ATTEND!r} and {SKIP!r}")
    return found


def write_alone(
    pool: Any,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``AttentionBackend.forward_extend`` without attention: KV is written if it has to be, the output is zeros.

    Args:
        pool: SGLang's KV pool.
        q: ``[tokens, ...]``; it and all others are what the backend gets.
        k: keys.
        v: values.
        layer: SGLang's ``RadixAttention``.
        forward_batch: SGLang's ``ForwardBatch``.
        save_kv_cache: whether k and v still have to be written.
        q_rope: of MLA, not needed.
        k_rope: of MLA, which k then lacks.

    Returns:
        ``[tokens, q_heads * v_head_dim]``; where SGLang asks for the log-sum-exp, too,
        ``[tokens, q_heads, v_head_dim]`` and float32 ``[tokens, q_heads]``.
    """
    tokens, heads = q.shape[0], layer.tp_q_head_num
    if save_kv_cache and k is not None:
        if k_rope is None:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        else:
            pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
    output = q.new_zeros(tokens, heads * layer.v_head_dim)
    # Only of MLA's expanded form, which asks for it in parts.
    if getattr(forward_batch, "mha_return_lse", None):
        return output.view(tokens, heads, -1), q.new_zeros(tokens, heads, dtype=torch.float32)
    return output


def skip(backend: Any, model: torch.nn.Module) -> None:
    """Let prefill past attention, and past the MLPs of a model that tells them what batch they get, as most do.

    KV is generated, so nothing that is measured hangs on either; over millions of tokens both take minutes.

    Args:
        backend: SGLang's attention backend, or what wraps it.
        model: SGLang's.
    """
    # Of the innermost: what a wrapper does beside attention it still does.
    dense = getattr(backend, "dense", backend)
    object.__setattr__(dense, "forward_extend", partial(write_alone, dense.token_to_kv_pool))
    for module in model.modules():
        if isinstance(mlp := getattr(module, "mlp", None), torch.nn.Module):
            mlp.forward = partial(_unless_prefill, mlp.forward)


def _unless_prefill(forward: Callable[..., torch.Tensor], x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    told = (*others, *named.values())
    if any(mode.is_extend() for one in told if (mode := getattr(one, "forward_mode", None))):
        return x
    return forward(x, *others, **named)
