"""The tiny DSA model: the tiny MLA model, unchanged, and an indexer in each layer, as ``DeepseekV32ForCausalLM``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from eval.lab.train.indexer import (
    INDEX_DIM,
    INDEX_HEADS,
    INDEX_TOPK,
    Indexer,
    chosen,
    index_scores,
    lesson,
)
from eval.lab.train.layers import HIDDEN, LAYERS, ROPE_THETA, Heads, rms_norm
from eval.lab.train.mla_model import Q_RANK, ROPE, TinyMLA
from eval.lab.train.sparse import Rows

SELECTORS = ("dense", "random")
PRODUCTS = 2**30
"""Upper limit of the numbers of one product of all index heads."""


class TinyDSA(TinyMLA):
    """The model; every row attends to the `topk` tokens that the indexer of the layer chooses.

    Only the indexers learn. `Rows` replace the indexer for all rows: by all tokens ("dense") or by as many random ones
    ("random"); its other attributes mean nothing here.
    """

    selectors, native = SELECTORS, "indexer"
    name, architecture = "tiny-dsa", "DeepseekV32ForCausalLM"

    def __init__(self, compute: torch.dtype = torch.float32, compiled: bool = False) -> None:
        super().__init__(compute, compiled)
        self.requires_grad_(False)
        self.indexers = nn.ModuleList([Indexer(HIDDEN, Q_RANK) for _ in range(LAYERS)])
        self.topk = INDEX_TOPK

    def indexer(self, i: int) -> Indexer:
        """The indexer of layer `i`."""
        found = self.indexers[i]
        assert isinstance(found, Indexer)
        return found

    def trunk_weights(self) -> dict[str, Tensor]:
        """Weights of the model without its indexers, by their names in transformers."""
        return super().named_weights()

    def named_weights(self) -> dict[str, Tensor]:
        """Weights of the indexers alone: the others are the tiny MLA model's and are stored there."""
        return {
            f"model.layers.{i}.self_attn.indexer.{name}": weight.detach()
            for i in range(LAYERS)
            for name, weight in self.indexer(i).named_parameters()
        }

    def _angles(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin (length, ROPE / 2) for the indexers, in float32 as SGLang's."""
        powers = torch.arange(0, ROPE, 2, device=self.embed.device).float() / ROPE
        angle = torch.arange(length, device=self.embed.device)[:, None] * ROPE_THETA**-powers
        return angle.cos(), angle.sin()

    def _inputs(self, x: Tensor, w: list[Tensor], b: int) -> tuple[Tensor, Tensor]:
        """What the indexer of a layer sees (B, T, ...): the attention's input and the normed low-rank query."""
        norm, wq_a, q_norm = w[:3]
        h = rms_norm(x, norm).to(self.compute)
        latent = rms_norm(F.linear(h, wq_a.to(self.compute)), q_norm)
        return h.view(b, -1, HIDDEN), latent.view(b, -1, Q_RANK)

    def _sparse(self, i: int, inputs: tuple[Tensor, Tensor], qkv: Heads, random: bool) -> Tensor:
        """Attention of all rows to their `topk` tokens; q, k, v (B, T, heads, d) -> (B, T, heads, value d)."""
        (h, latent), (b, t) = inputs, qkv[0].shape[:2]
        cos, sin = self._angles(t)
        keys, scale = self.indexer(i).keys(h, cos, sin)
        q, k, v = (y.transpose(1, 2) for y in qkv)
        step = max(16, PRODUCTS // (b * INDEX_HEADS * t) // 16 * 16)
        pieces = []
        for start in range(0, t, step):
            end = min(t, start + step)
            part = slice(start, end)
            later = torch.arange(end, device=h.device) > torch.arange(start, end, device=h.device)[:, None]
            if random:
                scores = torch.rand(b, end - start, end, device=h.device)
            else:
                rows, weights = self.indexer(i).queries(h[:, part], latent[:, part], cos[part], sin[part])
                scores = index_scores(rows, weights, keys[:, :end], scale[:, :end])
            mask = chosen(scores, later, self.topk).unsqueeze(1)
            # The kernels that are fastest for dense attention take no mask.
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                pieces.append(F.scaled_dot_product_attention(q[:, :, part], k[:, :, :end], v[:, :, :end], mask))
        return torch.cat(pieces, 2).transpose(1, 2)

    def _teach(self, i: int, inputs: tuple[Tensor, Tensor], qkv: Heads, positions: Tensor, restrict: bool) -> Tensor:
        """`lesson` (2,) of layer `i` for the rows at positions (B, R)."""
        (h, latent), (q, k, _) = inputs, qkv
        t, heads, d = q.shape[1:]
        cos, sin = self._angles(t)
        at = positions[..., None]
        rows, weights = self.indexer(i).queries(
            h.gather(1, at.expand(-1, -1, HIDDEN)),
            latent.gather(1, at.expand(-1, -1, Q_RANK)),
            cos[positions],
            sin[positions],
        )
        scores = index_scores(rows, weights, *self.indexer(i).keys(h, cos, sin))
        later = torch.arange(t, device=h.device) > at
        with torch.no_grad():
            mine = q.gather(1, at[..., None].expand(-1, -1, heads, d)).transpose(1, 2).float()
            full = mine @ k.transpose(1, 2).float().mT * d**-0.5
        return torch.stack(lesson(scores, full, later, chosen(scores, later, self.topk), restrict))

    def _layers(self, tokens: Tensor, selector: str, lessons: list[Tensor], positions: Tensor | None = None) -> Tensor:
        """See `forward`; with positions (B, R) the lesson of each layer is appended to `lessons`."""
        b, t = tokens.shape
        sparse = selector != "dense" and t > self.topk

        def attend(i: int, x: Tensor, w: list[Tensor], qkv: Heads) -> Tensor:
            inputs = self._inputs(x, w, b)
            if positions is not None:
                with torch.enable_grad():
                    lessons.append(self._teach(i, inputs, qkv, positions, restrict=selector != "dense"))
            return self._sparse(i, inputs, qkv, selector == "random") if sparse else self.attend(*qkv, None)

        return self.through(tokens, attend, plain=True)

    @torch.no_grad()
    def forward(self, tokens: Tensor, rows: Rows | None = None, plain: bool = True) -> Tensor:
        """See TinyModel; without `rows` every row attends to the tokens of its indexer, so with up to `topk` to all.

        Raises:
            ValueError: if the selector is none of `selectors`.
        """
        if rows and rows.selector not in SELECTORS:
            raise ValueError(f"unknown selector: got {rows.selector!r}, allowed are {', '.join(SELECTORS)}")
        return self._layers(tokens, rows.selector if rows else self.native, [])

    def lessons(self, tokens: Tensor, positions: Tensor, sparse: bool) -> Tensor:
        """Divergence and mass (LAYERS, 2) of the rows at positions (B, R); the gradient reaches the indexers alone.

        Args:
            sparse: all rows attend sparsely, and the divergence is over the chosen tokens; else all of both is dense.
        """
        found: list[Tensor] = []
        with torch.no_grad():
            self._layers(tokens, self.native if sparse else "dense", found, positions)
        return torch.stack(found)

    @classmethod
    def shape_config(cls) -> dict[str, Any]:
        """See TinyModel."""
        return {
            **super().shape_config(),
            "model_type": "deepseek_v32",
            "index_n_heads": INDEX_HEADS,
            "index_head_dim": INDEX_DIM,
            "index_topk": INDEX_TOPK,
            "indexer_rope_interleave": False,
        }
