"""What runs under compute-sanitizer: one operation, called with the cases of its tests, and as a server calls it.

    python -m eval.lab.toolchain.sanitizer_inside page_topk --cases 4

The last line says what ran: ``DONE`` and JSON. Plain calls, no CUDA graph: what is launched is the same. Nothing reads
the results, since places that a kernel may leave unwritten are no fault of its.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from eval.lab.compile_kernels import OPERATIONS as IN_TRITON
from eval.lab.compile_kernels import cases_of
from sglang_sparse_kernels.common import nvrtc
from sglang_sparse_kernels.common.float8 import converts_float8
from sglang_sparse_kernels.skip_softmax_prefill import launch as skip_softmax_launch

DONE = "sanitizer_inside: done "
# By operation: the function that its cases are the arguments of; with the one that has no Triton kernel.
OPERATIONS = {**IN_TRITON, "index_topk": "index_topk"}
# Those that have a kernel in CUDA C++ and another one for devices that do not take it.
IN_CUDA = ("block_mass", "block_topp", "index_topk", "kt_select", "page_score", "page_topk", "page_vote")
# And the one with a kernel in Gluon.
IN_GLUON = "skip_softmax_prefill"


def is_float8(case: Any) -> bool:
    """Whether a case has tensors of float8."""
    kinds = [value for value in vars(case).values() if isinstance(value, torch.dtype)]
    return any("float8" in str(kind) for kind in kinds)


def spread(cases: Sequence[Any], number: int) -> list[Any]:
    """`number` of the cases, from first to last."""
    if number >= len(cases):
        return list(cases)
    last = len(cases) - 1
    return [cases[round(i * last / max(1, number - 1))] for i in range(number)]


def own_cases(operation: str) -> list[Any]:
    """Cases of this command's own, for what only large ones of the tests reach.

    Rows that a cluster of blocks divides, and the fewest tokens for which an H200 has deep programs.
    """
    cases = importlib.import_module(f"sglang_sparse_kernels.{operation}.cases")
    if operation == "page_topk":
        return [cases.Case((5000, 300), (500, 30), 500, heads=1, width=width) for width in (8192, 16384)]
    if operation == "index_topk":
        kinds = ("normal", "ties")
        return [
            cases.Case((9000, 300), 200, (1, 0), width=width, kind=kind) for width in (9001, 33000) for kind in kinds
        ]
    if operation == IN_GLUON:
        # A last block that is cut within a page, of a tile that is cut, behind whole ones.
        return [cases.Case((200, 0), (170, 63), 16, 1, 2, 128, *[torch.bfloat16] * 2, 128, 64, factor=50.0)]
    if operation == "sparse_decode":
        return [cases.Case((4300,), 16, 8, 4, 128, torch.bfloat16, torch.bfloat16, ratio=1.0)]
    return []


def chosen(operation: str, number: int, float8: bool = True) -> list[Any]:
    """What an operation is called with: few cases, since each takes 10 to 100 times its usual time.

    Args:
        operation: of `OPERATIONS`.
        number: how many, spread over those that are small; all small ones with float8 come on top.
        float8: whether the GPU takes float8.
    """
    small = [case for case in cases_of(operation) if not case.gpu_only and (float8 or not is_float8(case))]
    picked = spread(small, number)
    return [case for case in small if case in picked or is_float8(case)] + own_cases(operation)


@contextmanager
def other_kernel(operation: str) -> Iterator[bool]:
    """An operation runs by its kernel for devices that do not take the one here; whether it has two."""
    if operation in IN_CUDA:
        with mock.patch.object(nvrtc, "available", return_value=False):
            yield True
    elif operation == IN_GLUON:
        with mock.patch.object(skip_softmax_launch, "hopper_kernel", return_value=None):
            yield True
    else:
        yield False


@contextmanager
def launches() -> Iterator[set[str]]:
    """Names of the kernels that are launched, as they are."""
    found: set[str] = set()
    run, call = JITFunction.run, nvrtc.Kernel.__call__

    def run_triton(kernel: Any, *args: Any, **options: Any) -> Any:
        found.add(kernel.__name__)
        return run(kernel, *args, **options)

    def run_cuda(kernel: Any, *args: Any) -> None:
        found.add("CUDA C++")
        call(kernel, *args)

    with mock.patch.object(JITFunction, "run", run_triton), mock.patch.object(nvrtc.Kernel, "__call__", run_cuda):
        yield found


def store_keys(device: str) -> None:
    """The other function of ``index_keys``, which its cases do not reach."""
    module = importlib.import_module("sglang_sparse_kernels.index_keys")
    slots, pages = importlib.import_module("sglang_sparse_kernels.index_keys.cases").slots_of(100, 7, device)
    values, scales = module.quantize(torch.randn(100, 128, device=device, dtype=torch.bfloat16))
    buffer = torch.zeros(pages, module.PAGE_SIZE * 132, dtype=torch.uint8, device=device)
    module.store(values, scales, slots, buffer)


def summarise_layers(operation: str, case: Any, device: str, layers: int = 3) -> None:
    """Page summaries or centroids of several layers at once, as at the end of a step."""
    module = importlib.import_module(f"sglang_sparse_kernels.{operation}")
    make = importlib.import_module(f"sglang_sparse_kernels.{operation}.cases").make
    given = [make(case, device, seed) for seed in range(layers)]
    # One batch writes to the same slots of all layers.
    rows = {name: given[0][name] for name in ("last_slots", "page_size", "overflow")}
    if operation == "page_centroids":
        lists = {name: [layer[name][0] for layer in given] for name in ("k_caches", "records")}
        module.update_page_centroids(**lists, **rows)
    else:
        module.update_page_summaries(*([layer[name] for layer in given] for name in ("k_cache", "summary")), **rows)


def score_in_cuda(case: Any, device: str) -> None:
    """The kernel in CUDA C++ of the page scores, which serves float8 summaries alone."""
    module = importlib.import_module("sglang_sparse_kernels.page_score.cuda")
    given = importlib.import_module("sglang_sparse_kernels.page_score.cases").make(case, device)
    if module.takes(given["q"], given["summary"]):
        shape = len(given["q"]), given["summary"].shape[1], given["page_table"].shape[1]
        for ready in (False, True):
            module.page_score(**given, out=torch.empty(shape, device=device), summaries_ready=ready)


def as_served(operation: str, given: dict[str, Any]) -> dict[str, Any]:
    """What a server gives an operation beside the arguments of a case."""
    if operation in ("page_score", "page_vote"):
        return {"summaries_ready": True}
    if operation == "page_topk":
        stats = torch.zeros(3, dtype=torch.int64, device=given["scores"].device)
        return {"tables_ready": True, "stats": stats}
    if operation == "kt_select":
        return {"tables_ready": True, "stats": torch.zeros(3, dtype=torch.int64, device=given["q"].device)}
    if operation == "index_topk":
        return {"nothing": 0, "stats": torch.zeros(3, dtype=torch.int64, device=given["logits"].device)}
    if operation == "sparse_decode":
        return {"arrivals": torch.zeros_like(given["counts"])}
    return {}


def call(operation: str, cases: Sequence[Any], device: str) -> None:
    """Call an operation alone and as a server does; where it has two kernels, by the other one as well."""
    module = importlib.import_module(f"sglang_sparse_kernels.{operation}")
    make = importlib.import_module(f"sglang_sparse_kernels.{operation}.cases").make
    function: Callable[..., Any] = getattr(module, OPERATIONS[operation])

    def run(case: Any) -> None:
        given = make(case, device)
        function(**given)
        if served := as_served(operation, given):
            function(**given, **served)

    for case in cases:
        run(case)
        with other_kernel(operation) as is_there:
            if is_there:
                run(case)
        if operation == "page_score":
            score_in_cuda(case, device)
        if operation in ("page_centroids", "page_summary"):
            summarise_layers(operation, case, device)
    if operation == "index_keys":
        store_keys(device)
    if device == "cuda":
        torch.cuda.synchronize()


def main(arguments: list[str] | None = None) -> int:
    """Run the operation and say so."""
    parser = argparse.ArgumentParser(prog="python -m eval.lab.toolchain.sanitizer_inside", description=__doc__)
    parser.add_argument("operation", choices=OPERATIONS)
    parser.add_argument("--cases", type=int, required=True)
    args = parser.parse_args(arguments)
    gpu = torch.cuda.is_available()
    float8 = not gpu or converts_float8(torch.device("cuda"))
    cases = chosen(args.operation, args.cases, float8)
    with launches() as kernels:
        call(args.operation, cases, "cuda" if gpu else "cpu")
    said = {"device": torch.cuda.get_device_name() if gpu else "cpu", "cases": len(cases), "kernels": sorted(kernels)}
    # A line of its own, whatever the sanitizer writes at the same time.
    print(f"\n{DONE}{json.dumps(said)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
