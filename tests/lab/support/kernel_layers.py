"""A small decode step and stand-ins of implementations, for the tests of ``eval.lab.bench_kernels``."""

from collections.abc import Sequence
from typing import Any

import torch

from eval.lab.kernels.harness import OURS, Machine
from eval.lab.kernels.kernel_inputs import Shape, Step
from eval.lab.kernels.kernel_table import TABLE
from sglang_sparse_kernels.common.timing import Replay, Run

# The newest page is partly filled, and no two sizes are equal.
SHAPE = Shape(2, 118, q_heads=6, kv_heads=3, dim=16, page_size=8, active_ratio=0.4, n_min=2, context_length=400)
OWN = [one for one in TABLE if one.name == OURS]


def machine(*micros: float) -> Machine:
    """A machine on which the n-th graph that is captured takes so many microseconds; five where nothing is said."""
    times = iter(micros)

    def capture(runs: Sequence[Run]) -> Replay:
        one, pending = next(times, 5.0), list(runs)

        def replay() -> float:
            # What a second replay would write is what the first did.
            while pending:
                pending.pop(0)()
            return one

        return replay

    return Machine("a test", "cpu", 0, capture, lambda: True, capture)


def exact(step: Step) -> list[Run]:
    """Dense attention in plain torch, row by row."""

    def run(layer: Any) -> torch.Tensor:
        out = []
        for row in range(SHAPE.batch):
            slots = (step.batch.page_table[row, :, None] * SHAPE.page_size + torch.arange(SHAPE.page_size)).flatten()
            keys, values = (
                cache[slots[: SHAPE.length]].float().repeat_interleave(2, 1).transpose(0, 1)
                for cache in (layer.k_cache, layer.v_cache)
            )
            weights = (layer.q[row].float()[:, None] @ keys.transpose(1, 2) * step.sm_scale).softmax(-1)
            out.append((weights @ values)[:, 0])
        return torch.stack(out).bfloat16()

    return [lambda layer=layer: run(layer) for layer in step.layers]


def missing(step: Step) -> list[Run]:
    raise ImportError("\n\nno module /opt/somebody/lib/fa9.so")


def refusing(step: Step) -> list[Run]:
    def run() -> torch.Tensor:
        raise AssertionError("takes 2048 only")

    return [run] * len(step.layers)
