"""CUDA kernels of this repository as C++, for a machine without a GPU: see ``cuda_on_cpu.h``."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_sparse_kernels.common import nvrtc

# A source, the name of its kernel, and what it is compiled with.
Kind = tuple[Path, str, dict[str, int]]

# The products are those of `products.cuh`.
KERNEL = """
namespace kernel_{number} {{
static unsigned pack(float first, float second) {{ return pack_as({bfloat16}, first, second); }}
static void multiply(float (&sums)[4], const unsigned (&rows)[4], uint2 columns) {{
    multiply_as({bfloat16}, sums, rows, columns);
}}
#include "{source}"
}}
extern "C" int run_{number}(unsigned columns, unsigned rows, unsigned threads, unsigned cluster,
                            const long long* arguments, unsigned count) {{
    return launch(kernel_{number}::{name}, columns, rows, threads, cluster, arguments, count);
}}
"""


class Library:
    """Compiled kernels, by what ``nvrtc.Kernel`` is called with: it takes that name's place on the CPU."""

    def __init__(self, folder: Path, kinds: list[Kind], float16: bool) -> None:
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("needs a C++ compiler")
        self._kinds = kinds
        source, target = folder / "kernels.cpp", folder / "kernels.so"
        # In one file, since reading the headers takes longest.
        texts = (self._text(number, *kind, float16) for number, kind in enumerate(kinds))
        source.write_text("\n".join(['#include "cuda_on_cpu.h"', *texts]))
        # The C library's fortified longjmp ends the process where threads switch stacks.
        options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", "-U_FORTIFY_SOURCE"]
        options += [f"-I{Path(__file__).parents[1] / 'kernels'}", f"-I{nvrtc.HEADERS}"]
        subprocess.run([compiler, *options, str(source), "-o", str(target)], check=True)
        self._library = ctypes.CDLL(str(target))

    def _text(self, number: int, source: Path, name: str, defines: dict[str, int], float16: bool) -> str:
        bfloat16 = "!KIND" if "KIND" in defines and not float16 else "false"
        defines = {**defines, name: f"{name}_{number}"}
        lines = [f"#define {macro} {value}" for macro, value in defines.items()]
        lines.append(KERNEL.format(number=number, source=source, name=name, bfloat16=bfloat16))
        text = "".join(path.read_text() for path in (source, *nvrtc.HEADERS.glob("*.cuh")))
        if "DYNAMIC_SHARED(Shared" in source.read_text():
            lines.append(f'extern "C" unsigned bytes_{number}() {{ return sizeof(kernel_{number}::Shared); }}')
        return "\n".join(lines + [f"#undef {macro}" for macro in {*defines, *re.findall(r"#define (\w+) ", text)}])

    def __call__(
        self,
        source: Path,
        name: str,
        _: torch.device,
        defines: dict[str, int],
        cluster: int = 1,
        shared_bytes: int = 0,
    ) -> Callable[..., None]:
        """See ``nvrtc.Kernel``."""
        number = self._kinds.index((source, name, defines))
        assert not shared_bytes or shared_bytes == self._library[f"bytes_{number}"]()

        def launch(grid: tuple[int, int], threads: int, *arguments: torch.Tensor | int | None) -> None:
            values = [x.data_ptr() if isinstance(x, torch.Tensor) else x or 0 for x in arguments]
            given = (ctypes.c_longlong * len(values))(*values)
            assert self._library[f"run_{number}"](*grid, threads, cluster, given, len(values))

        return launch


def emulated(kinds: Iterable[Kind], float16: bool = False) -> Any:
    """A fixture with which kernels run on CPU tensors; they are compiled once.

    Args:
        kinds: all that may be launched.
        float16: products are of float16, whatever the ``KIND``.
    """

    built: list[Library] = []

    @pytest.fixture
    def fixture(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        compiled = nvrtc.Kernel

        def kernel(source: Path, name: str, device: torch.device, *more: Any, **options: Any) -> Any:
            if device.type != "cpu":
                return compiled(source, name, device, *more, **options)
            if not built:
                built.append(Library(tmp_path_factory.mktemp("cuda"), list(kinds), float16))
            return built[0](source, name, device, *more, **options)

        monkeypatch.setattr(nvrtc, "Kernel", kernel)

    return fixture


def names(kind: Any) -> str:
    """Return the name that tests give a kind."""
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
