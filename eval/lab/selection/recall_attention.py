"""The attention of a checkpoint, one layer at a time, and how much of it a selection of tokens keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eval.live.counters import EvaluationError
from sglang_sparse.tools.calibration import capture as calibration_capture
from sglang_sparse.tools.calibration.capture import CalibrationError, Captured, ModelFacts

SELECTORS = ("method", "best", "random")


@dataclass(frozen=True)
class Selection:
    """What each query attends to: each KV head alone, or all of MLA's, whose keys are one in the pool, together.

    Attributes:
        kept: ``[queries, selections, tokens]`` bool, a selection for each KV head, or one for all.
        counts: ``[queries, selections]`` int64, how many units that is.
        unit: tokens of a unit, which begin at its multiples: the page size, the method's block, or 1.
    """

    kept: Tensor
    counts: Tensor
    unit: int


@dataclass(frozen=True)
class Judged:
    """How well each query head of a layer was served, by selector (see `judge`).

    Attributes:
        mass: ``[q_heads, queries]``, share of the attention mass that was kept.
        error: ``[q_heads, queries]``, relative L2 distance of the attention output to that of all tokens.
    """

    mass: dict[str, Tensor]
    error: dict[str, Tensor]


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except CalibrationError as error:
        raise EvaluationError(str(error)) from error


def load_model(path: str, device: str, dtype: torch.dtype) -> Any:
    """See `sglang_sparse.tools.calibration.capture.load_model`.

    Raises:
        EvaluationError: the checkpoint cannot be loaded.
    """
    with _errors():
        return calibration_capture.load_model(path, device, dtype)


def capture(model: Any, tokens: Sequence[int], queries: int, visit: Callable[[Captured], None]) -> None:
    """See `sglang_sparse.tools.calibration.capture.capture`.

    Raises:
        EvaluationError: the model's attention is none that a sparse server serves.
    """
    with _errors():
        calibration_capture.capture(model, tokens, queries, visit)


def model_facts(path: str) -> ModelFacts:
    """The facts of the checkpoint at `path`.

    Raises:
        EvaluationError: there is none.
    """
    with _errors():
        return calibration_capture.model_facts(path)


def judge(captured: Captured, selection: Selection, seed: int) -> Judged:
    """What a selection keeps, beside the best one of the same size and a random one.

    Both are made for each query and selection alone. The best one has the units with the most attention mass, summed
    over the query heads that share it. The random one has the newest unit, which holds the query's own token, and any
    others.

    Args:
        captured: of a layer.
        selection: of the method under judgement ("method"); "best" and "random" have as many units.
        seed: of the random units.
    """
    generator = torch.Generator().manual_seed(seed)
    mass: dict[str, list[Tensor]] = {name: [] for name in SELECTORS}
    error: dict[str, list[Tensor]] = {name: [] for name in SELECTORS}
    several = selection.kept.shape[1]
    for which, heads in enumerate(torch.arange(captured.key.shape[1]).chunk(several)):
        weights = {head: head_weights(captured, head) for head in heads.tolist()}
        total = torch.stack([part.sum(1) for part in weights.values()]).sum(0)
        for name, kept in _selections(captured, selection, which, total, generator).items():
            for head, part in weights.items():
                chosen, value = part * kept[:, None], captured.value[:, head].float()
                held, dense = chosen.sum(-1), part @ value
                # Without any mass the output is taken as 0, and the error is 1.
                output = chosen @ value / held[..., None].clamp_min(torch.finfo(held.dtype).tiny)
                mass[name].append(held)
                error[name].append((output - dense).norm(dim=-1) / dense.norm(dim=-1))
    return Judged(*({name: torch.cat(parts, 1).T for name, parts in found.items()} for found in (mass, error)))


def head_weights(captured: Captured, head: int) -> Tensor:
    """Attention weights ``[queries, group, tokens]`` float32 of the query heads of a KV head."""
    key = captured.key[:, head].float()
    group = captured.query.shape[1] // captured.key.shape[1]
    query = captured.query[:, head * group : (head + 1) * group].float()
    later = torch.arange(key.shape[0], device=key.device) > captured.positions[:, None]
    return (query @ key.T * captured.scaling).masked_fill(later[:, None], -torch.inf).softmax(-1)


def _selections(
    captured: Captured, selection: Selection, which: int, weights: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """``[queries, tokens]`` bool of every selector, by the sum ``[queries, tokens]`` of the heads' weights."""
    unit, counts, positions = selection.unit, selection.counts[:, which], captured.positions
    tokens = weights.shape[-1]
    padded = torch.nn.functional.pad(weights, (0, -tokens % unit))
    masses = padded.unflatten(-1, (-1, unit)).sum(-1)
    own = (positions // unit)[:, None]
    place = torch.arange(masses.shape[1], device=masses.device)
    drawn = torch.rand(masses.shape, generator=generator).to(masses.device).masked_fill(place == own, torch.inf)
    found = {"best": masses, "random": drawn}
    seen = torch.arange(tokens, device=masses.device) <= positions[:, None]
    return {"method": selection.kept[:, which]} | {
        name: _highest(scores.masked_fill(place > own, -torch.inf), counts).repeat_interleave(unit, 1)[:, :tokens]
        & seen
        for name, scores in found.items()
    }


def _highest(scores: Tensor, counts: Tensor) -> Tensor:
    """Mask of the ``counts[i]`` highest scores of each row i."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    first = torch.arange(scores.shape[1], device=scores.device) < counts[:, None]
    return torch.zeros_like(first).scatter(-1, order, first)
