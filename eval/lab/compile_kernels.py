"""``python -m eval.lab.compile_kernels``: what the kernels take on GPUs that are not at hand.

    python -m eval.lab.compile_kernels --out compiled.jsonl --targets 8.0,8.6,8.9,12.0

Each operation is called with the cases of its tests, on CPU tensors, and whatever it would launch on a GPU of such a
compute capability is compiled by Triton and ptxas instead; sources in CUDA C++ are compiled by NVRTC with what their
launches may define (`eval/lab/toolchain/cuda_sources.py`). Nothing runs, and no GPU is needed. A row has the registers
of a thread, the bytes that spill and the shared memory of each kernel, or why one does not compile. Sequences are cut
to ``LONGEST`` tokens, which changes how many programs share one, not what a program is.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.errors import PTXASError
from triton.runtime.jit import JITFunction

from eval.lab.toolchain import cuda_sources
from eval.live.client import list_of
from eval.live.counters import EvaluationError
from eval.live.record import Record, versions
from sglang_sparse_kernels.common import checks, launch, nvrtc

COMMAND = "eval.lab.compile_kernels"
LONGEST = 1000
PASSES = "PassManager::run failed"
# By compute capability: multiprocessors of a usual GPU, and what a program may have of shared memory (CUDA C++
# Programming Guide, "Technical Specifications per Compute Capability").
TARGETS = {
    "7.5": launch.Properties((7, 5), 40, 65536),
    "8.0": launch.Properties((8, 0), 108, 166912),
    "8.6": launch.Properties((8, 6), 84, 101376),
    "8.9": launch.Properties((8, 9), 128, 101376),
    "9.0": launch.Properties((9, 0), 132, 232448),
    "10.0": launch.Properties((10, 0), 148, 232448),
    "12.0": launch.Properties((12, 0), 170, 101376),
}
# By operation: the function that its cases are the arguments of.
OPERATIONS = {
    "anchor_prefill": "anchor_prefill",
    "block_mass": "block_mass",
    "block_topp": "block_topp",
    "index_keys": "quantize",
    "index_logits": "index_logits",
    "kt_select": "kt_select",
    "latent_rows": "write_latents",
    "page_centroids": "update_page_centroids",
    "page_score": "page_score",
    "page_summary": "update_page_summary",
    "page_vote": "page_vote",
    "page_table": "load_page_table",
    "page_topk": "page_topk",
    "skip_softmax_decode": "skip_softmax_decode",
    "skip_softmax_mla_decode": "skip_softmax_mla_decode",
    "skip_softmax_prefill": "skip_softmax_prefill",
    "sparse_decode": "sparse_decode",
    "sparse_mla_decode": "sparse_mla_decode",
    "window_score": "window_score",
}
ALL = tuple(sorted({*OPERATIONS, *cuda_sources.BUILDS}))
# Fields of cases that count tokens of a sequence.
TOKENS = ("lengths", "prefixes", "extends")


class Target:
    """Triton's driver of a GPU that is not there."""

    def __init__(self, capability: tuple[int, int]):
        self.number = 10 * capability[0] + capability[1]

    def get_current_device(self) -> int:
        """Return the number by which Triton keeps compiled kernels."""
        return self.number

    def get_current_stream(self, device: int) -> int:
        """Of no consequence: nothing is launched."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return the target that Triton compiles for."""
        return GPUTarget("cuda", self.number, 32)


@contextmanager
def compiling(name: str) -> Iterator[list[Any]]:
    """Compile what is launched on CPU tensors for a compute capability, and launch nothing.

    Args:
        name: of ``TARGETS``.

    Yields:
        What was compiled so far, Triton's ``CompiledKernel`` objects; the same one again for an equal launch.
    """
    found: list[Any] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found.append(run(kernel, *args, grid=grid, warmup=True, **options))
        return found[-1]

    with (
        mock.patch.object(driver, "_active", Target(TARGETS[name].capability)),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(checks, "use_reference", return_value=False),
        mock.patch.object(launch, "stand_in", TARGETS[name]),
    ):
        yield found


def shortened(case: Any) -> Any:
    """A case whose sequences have at most ``LONGEST`` tokens."""
    fields = {field.name for field in dataclasses.fields(case)}
    tokens = {name: tuple(min(n, LONGEST) for n in getattr(case, name)) for name in TOKENS if name in fields}
    return dataclasses.replace(case, **tokens)


def usage(cubin: bytes) -> dict[str, Any]:
    """The name of a kernel, registers of a thread, bytes of local memory (spills among them) and of shared memory."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack, shared = (
        int(re.findall(rf"{name}:(\d+)", text.stdout)[0]) for name in ("REG", "STACK", "SHARED")
    )
    name = re.findall(r"Function (\w+):", text.stdout)[0]
    return {"kernel": name, "registers": registers, "stack_bytes": stack, "shared_bytes": shared}


def resources(kernel: Any) -> dict[str, Any]:
    """The same of a kernel of Triton's, which asks for its shared memory when it is launched."""
    return {**usage(kernel.asm["cubin"]), "kernel": kernel.name, "shared_bytes": kernel.metadata.shared}


def cases_of(operation: str) -> list[Any]:
    """Those for GPUs: float32 queries and caches are for the CPU."""
    cases = importlib.import_module(f"sglang_sparse_kernels.{operation}.cases").CASES
    kinds = ("dtype", "kv_dtype")
    return [case for case in cases if torch.float32 not in [getattr(case, name, None) for name in kinds]]


def compile_operation(name: str, operation: str) -> Iterator[dict[str, Any]]:
    """Rows of an operation's cases for a compute capability."""
    module = importlib.import_module(f"sglang_sparse_kernels.{operation}")
    cases = importlib.import_module(f"sglang_sparse_kernels.{operation}.cases")
    call: Callable[..., Any] = getattr(module, OPERATIONS[operation])
    importlib.import_module(f"sglang_sparse_kernels.{operation}.triton")
    seen: dict[str, dict[str, Any]] = {}
    for case in cases_of(operation):
        arguments, failed = cases.make(shortened(case), "cpu"), None
        with compiling(name) as compiled:
            try:
                call(**arguments)
            except (CompilationError, PTXASError, RuntimeError) as error:
                # A pass of Triton's that gives up says so by the last of these alone.
                if not isinstance(error, (CompilationError, PTXASError)) and PASSES not in str(error):
                    raise
                failed = str(error).strip().splitlines()[-1]
        new = {kernel.hash: kernel for kernel in compiled if kernel.hash not in seen}
        seen |= {key: resources(kernel) for key, kernel in new.items()}
        kinds = {str(value).removeprefix("torch.") for value in vars(case).values() if isinstance(value, torch.dtype)}
        yield {
            "id": f"{name}/{operation}/{case}",
            "operation": operation,
            "target": name,
            "dtypes": sorted(kinds),
            "kernels": [seen[key] for key in dict.fromkeys(kernel.hash for kernel in compiled)],
            "failed": failed,
        }


def compile_sources(name: str, operation: str) -> Iterator[dict[str, Any]]:
    """Rows of an operation's sources in CUDA C++, where NVRTC serves the compute capability at all."""
    gpu = TARGETS[name]
    for build in cuda_sources.BUILDS[operation](gpu) if gpu.capability >= nvrtc.LEAST_CAPABILITY else ():
        kernels, failed = [], None
        try:
            kernels.append(usage(nvrtc.compile_file(build.source, gpu.capability, build.defines)))
        except RuntimeError as error:
            failed = next((line for line in str(error).splitlines() if "error" in line), str(error))
        defines = ", ".join(f"{define}={value}" for define, value in build.defines.items())
        yield {
            "id": f"{name}/{operation}/{build.source.name}({defines})",
            "operation": f"{operation}, CUDA",
            "target": name,
            "dtypes": sorted(str(dtype).removeprefix("torch.") for dtype in set(build.dtypes)),
            "kernels": kernels,
            "failed": failed,
        }


def rows_of(name: str, operation: str) -> Iterator[dict[str, Any]]:
    """Rows of an operation for a compute capability, Triton's kernels first."""
    if operation in OPERATIONS:
        yield from compile_operation(name, operation)
    if operation in cuda_sources.BUILDS:
        yield from compile_sources(name, operation)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, and write a row for each operation, case and compute capability; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {COMMAND}", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--targets", type=list_of(str), default=tuple(TARGETS), help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--operations", type=list_of(str), default=ALL, help="all by default")
    args = parser.parse_args(argv)
    for flag, given, known in (("targets", args.targets, TARGETS), ("operations", args.operations, ALL)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"--{flag}: got {', '.join(unknown)}, allowed: {', '.join(known)}")
    facts = {name: dataclasses.asdict(TARGETS[name]) for name in args.targets}
    with Record(args.out, COMMAND, versions=versions(("torch", "triton")), targets=facts, arguments={}) as record:
        for name in args.targets:
            for operation in args.operations:
                for row in rows_of(name, operation):
                    record.add("item", **row)
                    print(row["id"][:110], "|", row["failed"] or ", ".join(map(str, row["kernels"])), flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EvaluationError as error:
        sys.exit(f"{COMMAND}: {error}")
