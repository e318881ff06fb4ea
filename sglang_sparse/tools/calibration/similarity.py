"""The agreement of an MLA layer's RoPE scores with its full scores, as RoBSA uses them in decode.

``S = softmax(scale * (q_C·k_C + q_R·k_R))`` and ``S_R = softmax(scale * q_R·k_R)``, over all tokens and for each head,
with the model's own scale (RoBSA, equations 12 and 13). Their cosine similarity is taken "for every head and layer"
(section 2.2.3), so head by head; a layer's figure is its mean over heads, queries and prompts, and its deviation is
that over prompts (figure 5: "across different samples"). The paper does not say of which positions; here it is the last
ones of a prompt, which see as much context as decode does.

Decode has one latent key for all heads and transformers expands it, ``k_C = W_UK c_KV`` for each head, next to the
one rotary key that all heads share. The scores are the same numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_sparse.tools.calibration.capture import CalibrationError, Captured
from sglang_sparse_kernels.block_topp.reference import smallest_set

# Logits that are held at once, of each kind.
LOGITS = 1 << 24


class Agreement(NamedTuple):
    """Of one layer and prompt.

    Attributes:
        similarity: cosine similarity of ``S`` and ``S_R``, mean over heads and queries; NaN where scores overflowed.
        recall: share of the attention mass on the blocks that ``S_R`` selects, mean over heads and queries; as before.
    """

    similarity: float
    recall: float


def agreement(captured: Captured, rope_dim: int, theta1: float, block_size: int) -> Agreement:
    """Judge a layer by the queries that were captured.

    Args:
        captured: of an MLA layer; a head has its rotary dimensions last, as in transformers' DeepSeek models.
        rope_dim: how many these are.
        theta1: see `select`.
        block_size: tokens of a block.

    Raises:
        CalibrationError: the last dimensions of the keys are not the same in all heads, as rotary ones of MLA are.
    """
    _require_shared(captured, rope_dim)
    tokens, heads = captured.key.shape[:2]
    positions, queries = captured.positions, captured.query.shape[0]
    later = torch.arange(tokens, device=positions.device) > positions[:, None]
    both = captured.query.new_zeros(2, queries, tokens, dtype=torch.float32)
    similarity = 0.0
    for part in torch.arange(heads, device=positions.device).split(max(1, LOGITS // (queries * tokens))):
        query, key = captured.query[:, part].float() * captured.scaling, captured.key[:, part].float()
        full = _weights(query, key, later)
        rope = _weights(query[..., -rope_dim:], key[..., -rope_dim:], later)
        similarity += torch.cosine_similarity(full, rope, dim=-1).double().sum().item()
        both += torch.stack([full.sum(0), rope.sum(0)])
    full, rope = both / heads
    kept = select(rope, positions, theta1, block_size)
    return Agreement(similarity / (heads * queries), (full * kept).double().sum(-1).mean().item())


def _weights(query: Tensor, key: Tensor, later: Tensor) -> Tensor:
    logits = torch.einsum("qhd,khd->hqk", query, key)
    return logits.masked_fill(later, -torch.inf).softmax(-1)


def select(scores: Tensor, positions: Tensor, theta1: float, block_size: int) -> Tensor:
    """The tokens of the blocks that algorithm 1 of the paper attends to, and of the newest block, as a server has it.

    Args:
        scores: ``[queries, tokens]`` float32, mean over heads; a row adds to 1 and is 0 beyond the query's position.
        positions: ``[queries]`` int64, of the queries.
        theta1: share of the mass to reach, above 0 and up to 1.
        block_size: tokens of a block; blocks begin at multiples of it.

    Returns:
        ``[queries, tokens]`` bool.
    """
    tokens = scores.shape[1]
    masses = torch.nn.functional.pad(scores, (0, -tokens % block_size)).unflatten(-1, (-1, block_size)).sum(-1)
    newest = (positions // block_size)[:, None]
    blocks = torch.arange(masses.shape[1], device=masses.device)
    held = blocks <= newest
    chosen, known = smallest_set(masses, held, masses.new_full(masses.shape[:1], theta1))
    kept = held & (chosen | (blocks == newest) | ~known[:, None])
    return kept.repeat_interleave(block_size, -1)[:, :tokens]


def _require_shared(captured: Captured, rope_dim: int) -> None:
    last = captured.key[-captured.query.shape[0] :, :, -rope_dim:]
    # NaN is the same as NaN: keys that overflowed are another trouble.
    if not torch.allclose(last, last[:, :1].expand_as(last), rtol=0, atol=0, equal_nan=True):
        raise CalibrationError(
            f"--model-path: the last {rope_dim} dimensions of the keys of layer {captured.layer} differ between heads: "
            "not the rotary key of MLA, which all heads share",
            field="--model-path",
        )
