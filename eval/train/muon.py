"""Muon with all matrices of one shape in one product: a tiny model's time would go to launching kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Coefficients, number of steps and scaling as in Muon's definition (Jordan et al., 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest matrices with singular values of about 1, by Newton-Schulz; (n, rows, columns) -> bfloat16."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Momentum of Nesterov's kind, made orthogonal; weight decay is decoupled. For matrices only."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update; all weights must have gradients."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for weight in group["params"]:
                by_shape.setdefault(weight.shape, []).append(weight)
            for (rows, columns), weights in by_shape.items():
                gradients = torch.stack([w.grad for w in weights if w.grad is not None])
                state = self.state[weights[0]]
                average = state.setdefault("average", torch.zeros_like(gradients))
                average.lerp_(gradients, 1 - group["momentum"])
                update = orthogonal(gradients.lerp(average, group["momentum"])).to(weights[0].dtype)
                scale = max(1.0, rows / columns) ** 0.5
                for weight, turned in zip(weights, update, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(turned, alpha=-group["lr"] * scale)
