"""CUDA kernels of this repository as C++, for a machine without a GPU: see ``cuda_on_cpu.h``."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from sglang_sparse_kernels import nvrtc


def build(folder: Path, kernels: Iterable[str]) -> ctypes.CDLL:
    """Compile kernels into one library, since reading the headers takes longest; skips without a C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source, target = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text("".join(['#include "cuda_on_cpu.h"\n', *kernels]))
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w"]
    options += [f"-I{Path(__file__).with_name('kernels')}", f"-I{nvrtc.HEADERS}"]
    subprocess.run([compiler, *options, str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))
