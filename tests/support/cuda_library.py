"""CUDA kernels of this repository as C++, for a machine without a GPU: see ``cuda_on_cpu.h``."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sglang_sparse_kernels.common import nvrtc

# What sources with ``products.cuh`` are given in its place, each in a namespace of its own.
PRODUCTS = """
static unsigned pack(float first, float second) { return pack_as(!KIND, first, second); }
static void multiply(float (&sums)[4], const unsigned (&rows)[4], uint2 columns) {
    multiply_as(!KIND, sums, rows, columns);
}
"""


def build(folder: Path, kernels: Iterable[str], macros: str = "") -> ctypes.CDLL:
    """Compile kernels into one library, since reading the headers takes longest; skips without a C++ compiler.

    Args:
        folder: for the library and its source.
        kernels: sources.
        macros: names that each of them defines anew.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source, target = folder / "kernels.cpp", folder / "kernels.so"
    undefined = "".join(f"#undef {name}\n" for name in macros.split())
    source.write_text("".join(['#include "cuda_on_cpu.h"\n', *(kernel + undefined for kernel in kernels)]))
    # The C library's fortified longjmp ends the process where threads switch stacks.
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", "-U_FORTIFY_SOURCE"]
    options += [f"-I{Path(__file__).parents[1] / 'kernels'}", f"-I{nvrtc.HEADERS}"]
    subprocess.run([compiler, *options, str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def build_kinds(
    folder: Path, cuda: ModuleType, kernel: str, kinds: Iterable[Sequence[Any]], macros: str = ""
) -> ctypes.CDLL:
    """The library of a kernel's kinds.

    Args:
        folder: for the library and its source.
        cuda: the operation's module, with its ``SOURCE`` and the ``defines`` of a kind.
        kernel: source of one kind, to be formatted with these, ``products`` and its ``number``.
        kinds: the arguments of ``defines``.
        macros: names that each of them defines anew.
    """
    given = {"source": cuda.SOURCE, "products": PRODUCTS}
    kernels = (kernel.format(**given, number=i, **cuda.defines(*kind)) for i, kind in enumerate(kinds))
    return build(folder, kernels, macros)


class OnCpu:
    """One of its functions as ``nvrtc.Kernel``; it gets blocks in x and y, threads, and the kernel's arguments."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, grid: tuple[int, int], threads: int, *arguments: torch.Tensor | int | None) -> None:
        pointers = (
            ctypes.c_longlong(value)
            if isinstance(value, int)
            else ctypes.c_void_p(None if value is None else value.data_ptr())
            for value in arguments
        )
        self._function(*grid, threads, *pointers)


def names(kind: Any) -> str:
    """What tests call a kind."""
    return "-".join(map(str, kind)) if isinstance(kind, tuple) else str(kind)


def assert_takes(served: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """That a kernel of decode attention serves 16-bit caches of the type of the queries, and no others."""
    bf16, fp16, fp8, fp32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32

    def takes(dim: int, group: int, dtype: torch.dtype, kv: torch.dtype, first: int = 0, v_dim: int = 0) -> bool:
        q, keys = torch.zeros(1, 2 * group, dim, dtype=dtype), torch.zeros(16 * 2 * dim + first, dtype=kv)
        values = torch.zeros(16, 2, v_dim or dim, dtype=kv)
        return served(q, keys[first:].view(16, 2, dim), values, torch.empty_like(q))

    monkeypatch.setattr(nvrtc, "available", lambda _: True)
    assert takes(128, 4, bf16, bf16) and takes(64, 8, fp16, fp16)
    assert not takes(128, 9, bf16, bf16) and not takes(96, 4, bf16, bf16) and not takes(128, 4, bf16, fp8)
    assert not takes(128, 4, fp32, fp32) and not takes(128, 4, bf16, bf16, v_dim=64)
    assert not takes(128, 4, bf16, bf16, first=4)
    monkeypatch.setattr(nvrtc, "available", lambda _: False)
    assert not takes(128, 4, bf16, bf16)
