"""A hook: a function of SGLang, and what the plugin puts after it or around it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal


@dataclass(frozen=True)
class Hook:
    """One hooked function of SGLang.

    Attributes:
        target: dotted path in SGLang.
        parameters: the function's parameters when its hook was written.
        kind: SGLang's hook type.
        function: ``module:function`` of this package, imported at its first call: a server without a sparse flag
            loads only the tables of hooks and the flags.
        purpose: its purpose, for ``patches/README.md``.
        method: the only method that needs it; None for several. On a GPU it is hooked in servers of that method
            alone.
        gpu: True to act with a GPU only, False without one only, None in both cases.
        process: the process that it changes.
    """

    target: str
    parameters: str
    kind: Literal["AFTER", "AROUND"]
    function: str
    purpose: str
    method: str | None = None
    gpu: bool | None = None
    process: Literal["main", "controller", "scheduler", "both"] = "scheduler"

    @property
    def here(self) -> bool:
        """Whether it is for this machine."""
        import torch

        return self.gpu is None or self.gpu == torch.cuda.is_available()

    def lazy(self) -> Callable[..., Any]:
        """Return its function, which is imported when SGLang first calls it."""

        def hook(*args: object, **kwargs: object) -> Any:
            return _resolve(self.function)(*args, **kwargs)

        hook.__name__ = self.function
        return hook


@cache
def _resolve(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(f"sglang_sparse.{module}"), name)
