"""Triton kernels compiled for GPUs that are not there, in a process of its own whose Triton does not interpret."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def printed(script: str, folder: Path) -> list[str]:
    """Lines that a script prints, for which ``compile_for`` and ``dump`` are imported.

    Args:
        script: Python source.
        folder: where Triton keeps what it compiles.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", "from compiled_kernels import compile_for, dump\n" + script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


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
    import triton
    from triton.backends.compiler import GPUTarget

    def kind(name: str) -> str:
        usual = pointers if name.endswith("_ptr") else "fp32" if name.endswith("scale") else "i32"
        return "constexpr" if name in constants else kinds.get(name, usual)

    signature = {name: kind(name) for name in kernel.arg_names}
    names = enumerate(kernel.arg_names)
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in names if name not in constants and aligned(name)}
    source = triton.compiler.ASTSource(kernel, signature, constexprs=dict(constants), attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def dump(compiled: Any, tool: str = "cuobjdump", *flags: str) -> str:
    """What a tool of CUDA's says of a compiled kernel, by default of its registers, stack and shared memory."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        flags = flags or (("--dump-resource-usage",) if tool == "cuobjdump" else ())
        return subprocess.run([path, *flags, file.name], capture_output=True, text=True, check=True).stdout
