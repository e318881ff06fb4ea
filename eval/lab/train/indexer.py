"""DeepSeek-V3.2's lightning indexer (DeepSeek-V3.2-Exp report, section 2.1), as SGLang computes it on CUDA.

RoPE turns the first dimensions of queries and keys by halves, unlike the attention's own; then both are multiplied by
the Hadamard matrix and rounded to e4m3. SGLang gives a query a scale that is a power of two; the kernel that stores a
key takes the plain one, and only its fallback a power of two.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eval.lab.train.latent import MASKED

INDEX_HEADS, INDEX_DIM, INDEX_TOPK = 32, 128, 512
E4M3_MAX = 448.0


class _Round(torch.autograd.Function):
    """Rounds to e4m3 in float32; the gradient passes as if nothing had been rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def quantised(x: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """x (..., d) -> e4m3 values in float32 and the scale (..., 1) that makes them x again, without gradient."""
    scale = x.detach().float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / E4M3_MAX
    if power_of_two:
        scale = scale.log2().ceil().exp2()
    rounded = _Round.apply(x.float() / scale)
    assert isinstance(rounded, Tensor)
    return rounded, scale


def hadamard(size: int, device: torch.device | None = None) -> Tensor:
    """Sylvester's matrix (size, size) of ones and minus ones, size a power of two."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over the first dimensions of x (..., d) in float32; cos and sin (..., half of the rotated dimensions)."""
    half = cos.shape[-1]
    a, b, rest = x.float().split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


class Indexer(nn.Module):
    """The indexer of one layer, weights named as in the checkpoints of DeepSeek-V3.2."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.wq_b = nn.Linear(rank, INDEX_HEADS * INDEX_DIM, bias=False)
        self.wk = nn.Linear(hidden, INDEX_DIM, bias=False)
        self.k_norm = nn.LayerNorm(INDEX_DIM, eps=1e-6)
        self.weights_proj = nn.Linear(hidden, INDEX_HEADS, bias=False)
        for linear in (self.wq_b, self.wk, self.weights_proj):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """RoPE and Hadamard transform."""
        turned = rotate_halves(x, cos, sin)
        return (turned.float() @ hadamard(INDEX_DIM, x.device) * INDEX_DIM**-0.5).to(x.dtype)

    def queries(self, h: Tensor, latent: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rounded queries and the weights of their heads.

        Args:
            h: (..., hidden), the attention's input; latent: (..., rank), the normed low-rank query.
            cos, sin: (..., rotated / 2) in float32.

        Returns:
            (..., INDEX_HEADS, INDEX_DIM) and (..., INDEX_HEADS), both float32; the weights hold all scales but the
            keys'.
        """
        q = F.linear(latent, self.wq_b.weight.to(h.dtype)).unflatten(-1, (INDEX_HEADS, INDEX_DIM))
        q, scale = quantised(self._turned(q, cos.unsqueeze(-2), sin.unsqueeze(-2)), power_of_two=True)
        weights = F.linear(h.float(), self.weights_proj.weight.to(h.dtype).float()) * INDEX_HEADS**-0.5
        return q, weights * scale.squeeze(-1) * INDEX_DIM**-0.5

    def keys(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rounded keys (..., INDEX_DIM) and their scales (...), float32; arguments as in `queries`."""
        k = F.linear(h, self.wk.weight.to(h.dtype)).float()
        norm = self.k_norm
        k = F.layer_norm(k, (INDEX_DIM,), norm.weight.float(), norm.bias.float(), norm.eps).to(h.dtype)
        k, scale = quantised(self._turned(k, cos, sin), power_of_two=False)
        return k, scale.squeeze(-1)


def index_scores(q: Tensor, weights: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """Scores (B, R, T) of rows (B, R, heads, d) with weights (B, R, heads) for keys (B, T, d) with scales (B, T)."""
    b, r, h, d = q.shape
    products = (q.reshape(b, r * h, d) @ k.mT).relu_().view(b, r, h, -1)
    return (weights.unsqueeze(2) @ products).squeeze(2) * scale.unsqueeze(1)


@torch.no_grad()
def chosen(scores: Tensor, later: Tensor, topk: int) -> Tensor:
    """Mask (B, R, T) of the `topk` best scores (B, R, T) of each row, none of them `later` than the row."""
    best = scores.masked_fill(later, MASKED).topk(min(topk, scores.shape[-1]), -1, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & ~later


def lesson(scores: Tensor, full: Tensor, later: Tensor, picked: Tensor, restrict: bool) -> tuple[Tensor, Tensor]:
    """How far the indexer is from the attention, and how much of the attention its choice holds.

    Args:
        scores: (B, R, T) of the indexer; full: (B, H, R, T), the attention's scores; neither one masked.
        later: tokens after the row, broadcastable to (B, R, T); picked: (B, R, T), the indexer's choice.
        restrict: compare the chosen tokens alone.

    Returns:
        The mean over the rows of KL(mean of the heads' softmax || softmax of the indexer), and of the softmax's mass
        over the chosen tokens.
    """
    hidden = ~picked if restrict else later
    with torch.no_grad():
        dense = full.masked_fill(later.unsqueeze(1), MASKED).softmax(-1).mean(1)
        target = full.masked_fill(hidden.unsqueeze(1), MASKED).softmax(-1).mean(1) if restrict else dense
    guess = scores.masked_fill(hidden, MASKED).log_softmax(-1)
    divergence = (torch.xlogy(target, target) - target * guess).sum(-1).mean()
    return divergence, (dense * picked).sum(-1).mean()
