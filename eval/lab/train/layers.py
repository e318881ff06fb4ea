"""What the tiny models have in common: residual layers in plain functions around an attention of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eval.lab.train.sparse import Rows
from eval.lab.train.tokenizer import MAX_LENGTH, VOCAB_SIZE

HIDDEN, LAYERS, MLP = 256, 4, 640
ROPE_THETA, EPS = 1e6, 1e-6
MLP_SHAPES = {
    "post_attention_layernorm": (HIDDEN,),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
Heads = tuple[Tensor, Tensor, Tensor]
Project = Callable[[Tensor, list[Tensor], Tensor, Tensor, torch.dtype], Heads]


def initial(name: str, shape: tuple[int, ...]) -> Tensor:
    """First value of a weight; layers start as the identity, so that the small embedding is not drowned."""
    if len(shape) == 1:
        return torch.ones(shape)
    return (
        torch.zeros(shape) if name in ("self_attn.o_proj", "mlp.down_proj") else torch.randn(shape) * shape[1] ** -0.5
    )


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm over the last dimension, in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight.to(x.dtype)


def finish(x: Tensor, attended: Tensor, w: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Output projection, residual and MLP; x (n, HIDDEN), attended (n, heads * d)."""
    wo, norm, gate, up, down = w
    x = x + F.linear(attended, wo.to(dtype))
    h = rms_norm(x, norm).to(dtype)
    return x + F.linear(F.silu(F.linear(h, gate.to(dtype))) * F.linear(h, up.to(dtype)), down.to(dtype))


def losses(
    x: Tensor, norm: Tensor, embed: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Weighted means of the next-token loss; x (n, HIDDEN), targets (n,), weights (2, n): text, answers."""
    logits = F.linear(rms_norm(x, norm).to(dtype), embed.to(dtype)).float()
    loss = F.cross_entropy(logits, targets, reduction="none")
    text, answer = (weights * loss).sum(-1) / weights.sum(-1).clamp(min=1e-6)
    return text, answer


class TinyModel(nn.Module, ABC):
    """A decoder of `LAYERS` layers with a tied embedding.

    Attributes:
        shapes: weights of a layer by their names in transformers, first those of `project`, then those of `finish`.
        rope: head dimensions that are rotated.
        neox: whether the halves are rotated against each other rather than neighbours.
        selectors: what `Rows.selector` may be besides `native`, which is what all rows do without `Rows`.
        name, architecture: of the checkpoint.
    """

    shapes: ClassVar[dict[str, tuple[int, ...]]]
    rope: ClassVar[int]
    neox: ClassVar[bool]
    selectors: ClassVar[tuple[str, ...]]
    native: ClassVar[str] = "dense"
    name: ClassVar[str]
    architecture: ClassVar[str]

    def __init__(self, project: Project, compute: torch.dtype = torch.float32, compiled: bool = False) -> None:
        """Random weights in float32.

        Args:
            project: x (n, HIDDEN), weights, cos, sin (n, 1, rope), dtype -> q, k, v (n, heads, d).
            compute: type of matrix products.
            compiled: compile the functions for the forward passes that ask for it.
        """
        super().__init__()
        self.compute = compute
        self.embed = nn.Parameter(torch.randn(VOCAB_SIZE, HIDDEN) * 0.02)
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        self.layers = nn.ModuleList()
        for _ in range(LAYERS):
            made = {n.replace(".", "__"): nn.Parameter(initial(n, shape)) for n, shape in self.shapes.items()}
            self.layers.append(nn.ParameterDict(made))
        self.plain: tuple[Any, ...] = (project, finish, losses)
        self.functions = tuple(torch.compile(f, dynamic=False) for f in self.plain) if compiled else self.plain
        self._table: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows | None) -> Tensor:
        """Causal attention; q, k, v (B, T, heads, d) -> (B, T, query heads, value d)."""

    @classmethod
    @abstractmethod
    def shape_config(cls) -> dict[str, Any]:
        """What config.json says of this architecture alone."""

    def layer_weights(self, i: int) -> dict[str, Tensor]:
        """Weights of layer `i` by the names and in the order of `shapes`."""
        layer = cast(nn.ParameterDict, self.layers[i])
        return {name: layer[name.replace(".", "__")] for name in self.shapes}

    def matrices(self) -> list[nn.Parameter]:
        """Weights of the layers without norms and embedding."""
        return [w for layer in self.layers for w in layer.parameters() if w.ndim == 2]

    def others(self) -> list[nn.Parameter]:
        """Embedding and norms."""
        return [self.embed, *(w for w in self.parameters() if w.ndim == 1)]

    def _rope(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin (rows * length, 1, rope), the same for every row."""
        if self._table is None:
            powers = torch.arange(0, self.rope, 2, device=self.embed.device).float() / self.rope
            angle = torch.arange(MAX_LENGTH, device=self.embed.device)[:, None] * ROPE_THETA**-powers
            angle = torch.cat([angle, angle], -1) if self.neox else angle.repeat_interleave(2, -1)
            self._table = (angle[:, None].cos().to(self.compute), angle[:, None].sin().to(self.compute))
        cos, sin = (table[:length].repeat(rows, 1, 1) for table in self._table)
        return cos, sin

    def forward(self, tokens: Tensor, rows: Rows | None = None, plain: bool = True) -> Tensor:
        """tokens (B, T) -> hidden states before the last norm (B * T, HIDDEN).

        Args:
            rows: queries that attend to chosen blocks only; all others attend densely.
            plain: with the functions as they are rather than compiled.
        """
        return self.through(tokens, lambda i, x, w, qkv: self.attend(*qkv, rows), plain)

    def through(
        self, tokens: Tensor, attend: Callable[[int, Tensor, list[Tensor], Heads], Tensor], plain: bool
    ) -> Tensor:
        """`forward` with an attention of each layer's own.

        Args:
            tokens: (B, T).
            attend: layer, its input (B * T, HIDDEN), its weights, and q, k, v (B, T, heads, d) -> (B, T, heads, d_v).
            plain: see `forward`.
        """
        b, t = tokens.shape
        cos, sin = self._rope(b, t)
        project, finish, _ = self.plain if plain else self.functions
        split = len(self.shapes) - len(MLP_SHAPES) - 1
        x = F.embedding(tokens.flatten(), self.embed)
        for i in range(LAYERS):
            w = list(self.layer_weights(i).values())
            q, k, v = (y.view(b, t, *y.shape[1:]) for y in project(x, w[:split], cos, sin, self.compute))
            x = finish(x, attend(i, x, w, (q, k, v)).reshape(b * t, -1), w[split:], self.compute)
        return x

    def loss(
        self, tokens: Tensor, lm_weight: Tensor, answer_weight: Tensor, rows: Rows | None = None, plain: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Mean next-token loss of text and of answers; weights (B, T) belong to predicting the next token."""
        x = self(tokens, rows, plain)
        weights = torch.stack([lm_weight.flatten(), answer_weight.flatten()])
        function = (self.plain if plain else self.functions)[2]
        return function(x, self.norm, self.embed, tokens.flatten().roll(-1), weights, self.compute)

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states (..., HIDDEN) -> logits (..., VOCAB_SIZE)."""
        return F.linear(rms_norm(x, self.norm).to(self.compute), self.embed.to(self.compute))

    def named_weights(self) -> dict[str, Tensor]:
        """Weights by their names in transformers; the output layer shares the embedding."""
        named = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        for i in range(LAYERS):
            named |= {f"model.layers.{i}.{name}.weight": w for name, w in self.layer_weights(i).items()}
        return {name: weight.detach() for name, weight in named.items()}


def causal(q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
    """Dense causal attention (B, T, heads, d), the values padded with zeros to `width` for the kernels that want it."""
    size = v.shape[-1]
    padded: Sequence[Tensor] = (q, k, F.pad(v, (0, width - size)) if width > size else v)
    q, k, v = (x.transpose(1, 2) for x in padded)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)[..., :size]
