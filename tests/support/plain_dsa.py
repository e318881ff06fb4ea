"""DeepSeek-V3.2's indexer written out for transformers, which leaves its rotation and its FP8 out.

They change which tokens are chosen, so only a model with both is a reference. Source: the model's published inference
code; position by position where the servers' implementations take powers of two from bit patterns.
"""

import math
from pathlib import Path
from typing import Any

import torch
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling


def rotate(x: torch.Tensor) -> torch.Tensor:
    """The Walsh-Hadamard transform of the last dimension, by butterflies, of norm 1; exact but for one rounding."""
    size, dtype, x = x.shape[-1], x.dtype, x.double()
    width = 1
    while width < size:
        left, right = x.unflatten(-1, (-1, 2, width)).unbind(-2)
        x = torch.stack([left + right, left - right], dim=-2).flatten(-3)
        width *= 2
    return (x * size**-0.5).to(dtype)


def round_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round each row ``[..., 128]`` to e4m3 with a power of two for a scale."""
    largest = x.abs().amax(-1).clamp(min=1e-4).flatten().tolist()
    scales = torch.tensor([2.0 ** math.ceil(math.log2(value / 448)) for value in largest]).view(*x.shape[:-1], 1)
    return (x / scales).to(torch.float8_e4m3fn).float() * scales


def indexer_forward(
    indexer: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor,
    past_key_values: Any = None,
) -> torch.Tensor:
    """In place of ``DeepseekV32Indexer.forward``; ties go to the lowest position."""
    rope = indexer.qk_rope_head_dim
    query = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    rotated = modeling.apply_rotary_pos_emb(query[..., :rope], key[..., :rope], *position_embeddings, unsqueeze_dim=2)
    query, key = (torch.cat([turned, x[..., rope:]], -1) for turned, x in zip(rotated, (query, key), strict=True))
    key = past_key_values.update_indexer(round_to_fp8(rotate(key)).squeeze(2), indexer.layer_idx)
    query = round_to_fp8(rotate(query))
    gates = indexer.weights_proj(hidden_states) * indexer.n_heads**-0.5 * indexer.softmax_scale
    scores = sum(
        gates[..., head, None] * (query[:, :, head] @ key.transpose(1, 2)).relu() for head in range(indexer.n_heads)
    )
    places = torch.arange(key.shape[1])
    scores = scores.masked_fill(places > position_ids[:, :, None], float("-inf"))
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., : indexer.index_topk].int()


def load(checkpoint: Path) -> torch.nn.Module:
    """The model in float32, with transformers' own indexer."""
    return modeling.DeepseekV32ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
