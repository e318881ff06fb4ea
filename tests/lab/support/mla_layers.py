"""Small MLA layers and stand-ins of implementations, for the tests of their benchmark."""

from collections.abc import Callable
from typing import Any

import torch

from eval.lab.kernels.harness import Implementation
from eval.lab.kernels.mla import DENSE
from eval.lab.kernels.mla_inputs import RECIPE, SM_SCALE, Shape, Step
from eval.lab.kernels.mla_table import table
from eval.lab.structured.generator import read_recipe
from sglang_sparse_kernels.common.timing import Run

# The newest page and block are partly filled, and no two sizes are equal.
SHAPE = Shape(2, 1500, heads=6, latent=64, rope=32, page_size=32, block_size=16, target_share=0.2)
BASE = read_recipe({**RECIPE, "band_tokens": 64})
OWN = [one for one in table() if not one.peer]
TINY = ["--heads", "6", "--latent", "64", "--rope", "32", "--rounds", "2", "--recipe", '{"band_tokens": 64}']


def exact(step: Step, scale: float = SM_SCALE) -> list[Run]:
    """Dense attention in plain torch."""

    def run(layer: Any) -> torch.Tensor:
        out = []
        for row, query in enumerate(layer.q.float()):
            keys = layer.cache[step.slots(row)].float()
            out.append((query @ keys.T * scale).softmax(-1) @ keys[:, : step.shape.latent])
        return torch.stack(out).bfloat16()

    return [lambda layer=layer: run(layer) for layer in step.layers]


def wrong(step: Step) -> list[Run]:
    return exact(step, 0.5 * SM_SCALE)


def missing(step: Step) -> list[Run]:
    raise ImportError("no module")


def dense(**prepare: Callable[[Step], list[Run]]) -> list[Implementation[Step]]:
    return [Implementation(DENSE, name.replace("_", "-"), one) for name, one in prepare.items()]
