"""References that compute a batch row by row, where a row's bits must not depend on the others.

The references pad all rows to the longest one. That changes no value, but it changes the order of sums. Kernels split a
row by sizes that are fixed at launch, and need ``launch.fixed_rows`` alone.
"""

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from . import launch

P = ParamSpec("P")
R = TypeVar("R")


def row_by_row(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a reference that writes its argument ``out``, ``[B, ...]``, and returns it.

    Where ``launch.fixed_rows`` is set, it is called for each row.

    Args:
        names: arguments, or fields of an argument that is a dataclass, that have rows, in addition to ``out``.
    """

    def decorate(reference: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(reference)

        @wraps(reference)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            given = signature.bind(*args, **kwargs).arguments
            if launch.fixed_rows is None or len(given["out"]) < 2:
                return reference(*args, **kwargs)
            for row in range(len(given["out"])):
                part = slice(row, row + 1)
                reference(**{name: _rows(name, value, part, names) for name, value in given.items()})  # type: ignore[call-arg]
            return given["out"]

        return run

    return decorate


def _rows(name: str, value: Any, part: slice, names: tuple[str, ...]) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field: getattr(value, field)[part] for field in names})
    return value[part] if isinstance(value, torch.Tensor) and name in (*names, "out") else value
