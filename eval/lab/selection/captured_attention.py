"""The attention of a checkpoint, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from eval.live.counters import EvaluationError
from sglang_sparse.tools.calibration import capture as calibration_capture
from sglang_sparse.tools.calibration.capture import CalibrationError, Captured, ModelFacts


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
