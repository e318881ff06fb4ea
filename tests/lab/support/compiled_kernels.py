"""Triton kernels compiled for GPUs that are not there, in a process of its own whose Triton does not interpret."""

import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from eval.lab.compile_kernels import usage


def compile_for(
    capability: int,
    kernel: Any,
    kinds: Mapping[str, str],
    constants: Mapping[str, Any],
    pointers: str = "*i32",
    aligned: Callable[[str], bool] = lambda name: name.endswith("_ptr"),
    **options: Any,
) -> Any:
    """Triton's ``CompiledKernel`` for a compute capability such as 90.

    Args:
        capability: ten times the major number and the minor one.
        kernel: a function of Triton's.
        kinds: of arguments by name; else pointers are ``pointers``, scales float32, and others int32.
        constants: compile-time values by name.
        pointers: see ``kinds``.
        aligned: whether an argument is a multiple of 16, by its name.
        options: of the launch, such as ``num_warps``.
    """

    def kind(name: str) -> str:
        usual = pointers if name.endswith("_ptr") else "fp32" if name.endswith("scale") else "i32"
        return "constexpr" if name in constants else kinds.get(name, usual)

    signature = {name: kind(name) for name in kernel.arg_names}
    names = enumerate(kernel.arg_names)
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in names if name not in constants and aligned(name)}
    source = triton.compiler.ASTSource(kernel, signature, constexprs=dict(constants), attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack(compiled: Any) -> int:
    """Bytes of a thread's stack, spills among them."""
    return usage(compiled.asm["cubin"])["stack_bytes"]


def disassembled(compiled: Any) -> str:
    """Instructions of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([tool, file.name], capture_output=True, text=True, check=True).stdout
