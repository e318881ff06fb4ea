"""Gated delta net in PyTorch, of transformers: SGLang has kernels of Triton, CUDA and AMX for it.

States are SGLang's: of the convolution ``[slots, channels, width - 1]``, of the delta rule
``[slots, value heads, value dim, key dim]``, which transformers has with key and value dim exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

# Tokens behind each of which SGLang may store a state of a prompt: those of a chunk of its kernels.
CHUNK = 64


def no_device() -> str:
    """Name the place of weights, where SGLang asks CUDA for its device."""
    return "cpu"


def keep_dtype(dtype: str) -> None:
    """Let the states of convolutions be float32 where the model is: SGLang's are bfloat16 by default."""
    from sglang.srt.environ import envs

    if dtype == "float32" and not envs.SGLANG_MAMBA_CONV_DTYPE.is_set():
        envs.SGLANG_MAMBA_CONV_DTYPE.set(dtype)


def gates(
    log_decay: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the decay, as a logarithm, and the strength of each token's update, ``[1, tokens, value heads]``."""
    decay = -log_decay.float().exp() * functional.softplus(a.float() + bias.float())
    return decay[None], b.float().sigmoid()[None]


def convolve_prompts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: list[int],
) -> torch.Tensor:
    """Convolve the tokens of several rows, ``[channels, tokens]``, and store their last inputs."""
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update

    found = torch.empty_like(x)
    goes_on = has_initial_state.tolist()
    for row, (slot, tokens) in enumerate(_rows(cache_indices, query_start_loc)):
        state = conv_states[slot : slot + 1]
        if not goes_on[row]:
            state.zero_()
        found[:, tokens] = causal_conv1d_update(x[None, :, tokens], state, weight, bias, activation)[0]
    return found


def convolve_step(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Convolve one token of each row, ``[rows, channels]``, likewise."""
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update

    slots = conv_state_indices.long()
    states = conv_states[slots]
    found = causal_conv1d_update(x[:, :, None], states, weight, bias, activation)[:, :, 0]
    conv_states[slots] = states
    return found


def extend(
    kernel: object,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: object,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Run the delta rule over the tokens of several rows, ``[1, tokens, heads, dim]``, and store their last states.

    Returns:
        What it computes, ``[1, tokens, value heads, value dim]``; and the states before each chunk of each row,
        ``[1, chunks, value heads, value dim, key dim]``, which SGLang stores for the prefix cache.
    """
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as rule

    found, states = torch.empty_like(v), []
    for slot, tokens in _rows(cache_indices, query_start_loc):
        for first in range(tokens.start, tokens.stop, CHUNK):
            states.append(ssm_states[slot].clone())
            chunk = slice(first, min(first + CHUNK, tokens.stop))
            inputs = (one[:, chunk] for one in (q, k, v, g, beta))
            found[:, chunk] = _advance(rule, ssm_states, torch.tensor([slot]), *inputs)
    return found, None, torch.stack(states)[None]


def decode(
    kernel: object,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    num_v_heads: int,
    head_v_dim: int,
    **_: object,
) -> torch.Tensor:
    """Run the delta rule over one token of each row, ``[rows, channels]``.

    Returns:
        ``[1, rows, value heads, value dim]``.
    """
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule as rule

    values = num_v_heads * head_v_dim
    keys = (mixed_qkv.shape[1] - values) // 2
    q, k = (part.unflatten(1, (-1, ssm_states.shape[-1]))[:, None] for part in mixed_qkv[:, : 2 * keys].chunk(2, 1))
    v = mixed_qkv[:, 2 * keys :].unflatten(1, (num_v_heads, head_v_dim))[:, None]
    decay, strength = (gate.transpose(0, 1) for gate in gates(A_log, a, b, dt_bias))
    return _advance(rule, ssm_states, cache_indices.long(), q, k, v, decay, strength).transpose(0, 1)


def _rows(slots: torch.Tensor, starts: torch.Tensor) -> list[tuple[int, slice]]:
    bounds = starts.tolist()
    return [(slot, slice(*bounds[row : row + 2])) for row, slot in enumerate(slots.tolist()[: len(bounds) - 1])]


def _advance(
    rule: Callable[..., Any],
    states: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
) -> torch.Tensor:
    """Apply one of transformers' rules to tokens ``[rows, tokens, heads, dim]`` behind the states of ``slots``."""
    repeats = v.shape[2] // q.shape[2]
    q, k = (one.repeat_interleave(repeats, 2) for one in (q, k))
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    found, last = rule(q, k, v, g=decay, beta=strength, initial_state=states[slots].transpose(-1, -2), **options)
    states[slots] = last.transpose(-1, -2).to(states.dtype)
    return found


def gated_norm(module: Any, x: torch.Tensor, g: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """Normalise ``[rows, dim]``, and multiply by its gate: for both of SGLang's classes that do."""
    from sglang.kernels.ops.attention.fla.layernorm_gated import rms_norm_ref

    gate = torch.sigmoid if module.activation == "sigmoid" else functional.silu
    return (rms_norm_ref(x, module.weight, module.bias, eps=module.eps).float() * gate(g.float())).to(x.dtype)


def track_layers(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    slots: torch.Tensor,
    mask: torch.Tensor,
    targets: torch.Tensor,
    rows: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy the states of all layers, ``[layers, slots, ...]``, of the rows of a mask to the slots of the prefix cache.

    Rows whose target is negative have none.
    """
    taken = mask[:rows] & (targets[:rows] >= 0)
    sources, copies = slots[:rows][taken].long(), targets[:rows][taken].long()
    for states in (conv_states, ssm_states):
        states[:, copies] = states[:, sources]


def gate_heads(x: torch.Tensor, gate: torch.Tensor, **_: object) -> torch.Tensor:
    """Multiply what heads attended to, ``[tokens, heads * dim]``, by their gates ``[tokens, heads, dim]``."""
    return x * torch.sigmoid(gate.reshape(x.shape))


def add_shared_expert(
    hidden: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor, output: torch.Tensor, *, do_add: bool
) -> None:
    """Write a shared expert's output ``[tokens, dim]``, times its gate; or add it to what is there."""
    gated = torch.sigmoid(hidden @ weight)[:, None] * shared
    output.copy_(output + gated if do_add else gated)
