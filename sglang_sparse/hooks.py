"""Hands the table of seams to SGLang, and proves that each change took hold."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from sglang_sparse.limits import WITHOUT_GPU_PATH
from sglang_sparse.seams import SEAMS, Seam
from sglang_sparse.versions import UnsupportedSGLangError, installed_sglang


@cache
def _resolve(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(f"sglang_sparse.{module}"), name)


def _lazy(function: str) -> Callable[..., Any]:
    def hook(*args: Any, **kwargs: Any) -> Any:
        return _resolve(function)(*args, **kwargs)

    hook.__name__ = function
    return hook


@cache
def active() -> tuple[Seam, ...]:
    """The seams that are hooked on this machine: not those of a method that it refuses.

    What they are in would be imported by every server: for DSA that is SGLang's backend for it, with DeepGEMM.
    """
    import torch

    refused = WITHOUT_GPU_PATH if torch.cuda.is_available() else ()
    return tuple(seam for seam in SEAMS if seam.method not in refused)


def register() -> None:
    """Hand the table to SGLang, which applies it when all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for seam in active():
        HookRegistry.register(seam.target, _lazy(seam.function), HookType[seam.kind])


def verify() -> None:
    """Prove that every seam is hooked in this process.

    SGLang only logs a hook that it cannot apply, and a server would then run dense or, worse, half sparse.

    Raises:
        UnsupportedSGLangError: a seam is missing; names it and the SGLang version.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [seam.target for seam in active() if seam.target not in HookRegistry._patched]
    if missing:
        raise UnsupportedSGLangError(
            f"SGLang {installed_sglang()} has moved what sglang_sparse hooks: {', '.join(missing)}; "
            "see patches/README.md for what each is for"
        )
