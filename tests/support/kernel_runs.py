"""Code shared by tests of several kernels: replays in graphs, and scrambled scores to choose by."""

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sglang_sparse_kernels.common.testing import seeded


def assert_replays(step: Callable[[], Any], poisoned: Iterable[tuple[torch.Tensor, float]], same: Callable[[], bool]):
    """Assert that a hundred replays of a graph of ``step`` end as ``same`` wants it.

    Args:
        step: launches kernels; also runs once before it is captured.
        poisoned: tensors, and what they are filled with before each replay.
        same: whether the results are right.
    """
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(100):
        for tensor, value in poisoned:
            tensor.fill_(value)
        graph.replay()
        assert same()


def scramble(scores: torch.Tensor, pick: random.Random, seed: int) -> None:
    """Scale and move random scores; often, many of them are then equal, infinite, NaN or far out."""
    scores.mul_(10.0 ** pick.randint(-3, 3)).add_(pick.choice((0.0, 50.0)))
    if pick.random() < 0.5:
        scores.copy_((scores * pick.choice((0.1, 1.0))).round())
    generator = seeded("cpu", seed)
    for value in (math.inf, -math.inf, math.nan, 1e30, -1e30, 0.0, -0.0):
        chances = torch.rand(scores.shape, generator=generator)
        if pick.random() < 0.5:
            scores.masked_fill_(chances < pick.choice((0.01, 0.3)), value)


def replay_with(
    kernel: Callable[..., Any],
    arguments: dict[str, Any],
    other: dict[str, Any],
    out: torch.Tensor | tuple[torch.Tensor, ...],
    unwritten: float,
) -> None:
    """Capture a call in a graph and replay it with other numbers in its tensors.

    Args:
        kernel: has run before with these arguments.
        arguments: its tensors get the numbers of ``other``, which may be shorter.
        other: arguments of the same names.
        out: what it writes to; filled with ``unwritten`` before the replay.
        unwritten: see ``out``.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(**arguments, out=out)
    for name, tensor in other.items():
        if isinstance(tensor, torch.Tensor):
            arguments[name][: len(tensor)].copy_(tensor)
    for tensor in out if isinstance(out, tuple) else (out,):
        tensor.fill_(unwritten)
    graph.replay()
