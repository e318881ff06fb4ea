"""Triton's interpreter for the kernel tests, where there is no GPU.

Triton decides at import whether its functions are interpreted, so this is imported before any test is. The variable is
set for that moment and for the kernel tests alone: a server that another test starts must not inherit it.
"""

import importlib
import math
import os
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

OPERATIONS = (
    "page_summary",
    "page_score",
    "page_topk",
    "page_table",
    "sparse_decode",
    "anchor_prefill",
    "skip_softmax_prefill",
    "block_mass",
    "block_topp",
    "sparse_mla_decode",
    "index_keys",
    "index_logits",
    "latent_rows",
    "kt_select",
    "window_score",
    "skip_softmax_decode",
    "skip_softmax_mla_decode",
)
HAS_GPU = torch.cuda.is_available()
INTERPRETED = not HAS_GPU and "triton" not in sys.modules


def hasten() -> None:
    """Let the interpreter of Triton 3.8 do less around what kernels do, which takes most of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch_all, np_dtype, address = interpreter._patch_lang, cache(interpreter._get_np_dtype), np.dtype(np.uint64)

    def patch(function: Any) -> Any:
        # A kernel has replaced the functions of the language when it calls device functions, which do so anew.
        done = not any(tl.core.is_builtin(module.load) for module in (tl, tl.core))
        return interpreter._LangPatchScope() if done else patch_all(function)

    @cache
    def shape_of(*sizes: int) -> tuple[Any, Any]:
        return tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shape_of(*(kind.shape if kind.is_block() else ()))

    make_block = tl.block_type.__init__

    @cache
    def block_of(*sizes: int) -> tuple[Any, int, str]:
        made = object.__new__(tl.block_type)
        make_block(made, tl.int8, list(sizes))
        return made.shape, made.numel, str(made.shape)

    def block_type(self: Any, element: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
        self.element_ty, (self.shape, self.numel, name) = element, block_of(*sizes)
        self.name = f"<{name}, {element}>"

    interpreter._patch_lang, tl.tensor.__init__, tl.block_type.__init__ = patch, tensor, block_type
    interpreter._get_np_dtype = lambda kind: address if kind.scalar.is_ptr() else np_dtype(kind.scalar)
    # Overflows are computed, and asserted only in Triton's debug mode.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)


if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"
    hasten()
    for operation in OPERATIONS:
        importlib.import_module(f"sglang_sparse_kernels.{operation}.triton")
    del os.environ["TRITON_INTERPRET"]
