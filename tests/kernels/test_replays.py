"""Every kernel gives the same bits a hundred times, over results and scratch that hold anything."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from triton_interpreter import HAS_GPU

from sglang_sparse_kernels.anchor_prefill import cases as anchor_cases
from sglang_sparse_kernels.block_mass import cases as mass_cases
from sglang_sparse_kernels.block_mass import cuda as mass_cuda
from sglang_sparse_kernels.index_keys import PAGE_SIZE, quantize
from sglang_sparse_kernels.index_keys import cases as key_cases
from sglang_sparse_kernels.index_logits import cases as logit_cases
from sglang_sparse_kernels.index_topk import cases as token_cases
from sglang_sparse_kernels.kt_select import TABLES
from sglang_sparse_kernels.kt_select import cases as selection_cases
from sglang_sparse_kernels.latent_rows import cases as row_cases
from sglang_sparse_kernels.page_centroids import cases as centroid_cases
from sglang_sparse_kernels.page_summary import cases as summary_cases
from sglang_sparse_kernels.page_table import cases as table_cases
from sglang_sparse_kernels.page_vote import cases as vote_cases
from sglang_sparse_kernels.skip_softmax_decode import cases as skip_decode_cases
from sglang_sparse_kernels.skip_softmax_mla_decode import cases as skip_mla_cases
from sglang_sparse_kernels.skip_softmax_prefill import BLOCK_KEYS, TILE_QUERIES
from sglang_sparse_kernels.skip_softmax_prefill import cases as skip_prefill_cases
from sglang_sparse_kernels.skip_softmax_prefill import launch as skip_prefill_launch
from sglang_sparse_kernels.sparse_decode import cases as decode_cases
from sglang_sparse_kernels.sparse_mla_decode import cases as mla_cases
from sglang_sparse_kernels.sparse_mla_decode import fa3
from sglang_sparse_kernels.window_score import cases as window_cases

PACKAGE = "sglang_sparse_kernels"
SOURCES, HERE = Path(fa3.__file__).parent.parent, Path(__file__).parent
REPLAYS = 100 if HAS_GPU else 2
# NaN in every float, -1 in integers.
POISON = 0xFF
# Of the scratch, in turn: also zeros, and what is huge or NaN.
SCRATCH = (POISON, 0, 0x7F)
# Replayed as often where their clusters, distributions and plans are tested.
ELSEWHERE = {
    ("page_score", "triton"): "test_page_score.py",
    ("page_score", "cuda"): "test_page_score.py",
    ("page_vote", "cuda"): "test_page_vote.py",
    ("page_topk", "triton"): "test_page_topk.py",
    ("page_topk", "cuda"): "test_page_topk.py",
    ("block_topp", "triton"): "test_block_topp.py",
    ("block_topp", "cuda"): "test_block_topp.py",
    ("index_topk", "cuda"): "test_index_topk.py",
    ("kt_select", "cuda"): "test_kt_select.py",
    ("sparse_decode", "triton"): "test_sparse_decode_plan.py",
    ("sparse_decode", "cuda"): "test_sparse_decode_cuda.py",
    ("skip_softmax_decode", "cuda"): "test_skip_softmax_decode_cuda.py",
}
NO_KERNELS = {"__init__", "cases", "choose", "hopper_loads", "hopper_softmax", "launch", "means", "plan", "reference"}
BF16 = torch.bfloat16
LATENT = mla_cases.Case((150, 0, 33, 1, 96, 512), 16, 16, 512, BF16, BF16, ratio=0.4, max_select=40, gpu_only=True)

FLOAT8_ROWS = mla_cases.Case((90, 0, 33), 1, 16, 128, BF16, mla_cases.ROWS, ratio=0.6)


def with_result(operation: "Operation", case: Any, device: str) -> dict[str, Any]:
    """Arguments with a result to write to, shaped as the public function makes it, and counters."""
    arguments = operation.cases.make(case, device)
    public = getattr(importlib.import_module(f"{PACKAGE}.{operation.folder}"), operation.function)
    counters = {"stats": torch.zeros(operation.counts, dtype=torch.int64, device=device)} if operation.counts else {}
    return {**arguments, "out": public(**arguments), **counters}


def with_names(operation: "Operation", case: Any, device: str) -> dict[str, Any]:
    arguments = with_result(operation, case, device)
    names = arguments.pop("page_table"), arguments.pop("rows"), None
    return {"first": None, "wanted": None, **arguments, "names": names}


def with_tables(operation: "Operation", case: Any, device: str) -> dict[str, Any]:
    arguments = with_result(operation, case, device)
    return {"tables": tuple(map(arguments.pop, TABLES)), "scale": arguments.pop("sm_scale"), **arguments}


def of_layers(operation: "Operation", case: Any, device: str) -> dict[str, Any]:
    arguments = operation.cases.make(case, device)
    layers = {"k_caches": [arguments.pop("k_cache")], "summaries": [arguments.pop("summary")]}
    return {**arguments, **layers}


def in_place(operation: "Operation", case: Any, device: str) -> dict[str, Any]:
    return operation.cases.make(case, device)


def to_be_stored(operation: "Operation", case: Any, device: str) -> dict[str, Any]:
    keys = operation.cases.make(case, device)["x"].flatten(0, -2)
    entries, dim = keys.shape
    values, scales = quantize(keys)
    slots, pages = key_cases.slots_of(entries, 3, device)
    buffer = torch.empty(pages, PAGE_SIZE * (dim + 4), dtype=torch.uint8, device=device)
    return {"values": values, "scales": scales, "slots": slots, "buffer": buffer}


@dataclass(frozen=True)
class Operation:
    """An implementation of an operation, and which of its arguments it writes and counts in.

    A small case is for the interpreter too; the others are those that need a GPU, and ``more``.
    """

    folder: str
    cases: ModuleType
    small: Any
    implementation: str = "triton"
    function: str = ""
    counts: int = 0
    written: tuple[str, ...] = ("out",)
    counted: tuple[str, ...] = ("stats",)
    arguments: Callable[["Operation", Any, str], dict[str, Any]] = with_result
    serves: Callable[[Any], bool] = lambda _: True
    in_graphs: bool = True
    more: tuple[Any, ...] = ()

    def params(self) -> Iterator[Any]:
        marks = [pytest.mark.gpu] if self.implementation in ("cuda", "fa3", "hopper") else []
        large = (case for case in self.cases.CASES if case.gpu_only)
        for case in filter(self.serves, (self.small, *large, *self.more)):
            yield pytest.param(self, case, marks=marks, id=f"{self.function}-{self.implementation}-{case}")


def operation(folder: str, cases: ModuleType, **options: Any) -> Operation:
    """By default the function has the name of its folder, and the small case is the first one, with changes to it."""
    small = replace(cases.CASES[0], **options.pop("small", {}))
    return Operation(folder, cases, small, **{"function": folder, **options})


SHORT = {"prefixes": (70, 0), "extends": (20, 1), "heads": 1}
FULL = {"tile_queries": TILE_QUERIES, "block_keys": BLOCK_KEYS}
OPERATIONS = [
    operation("anchor_prefill", anchor_cases, small=SHORT, counts=2, in_graphs=False),
    operation("skip_softmax_prefill", skip_prefill_cases, small=SHORT, counts=4, in_graphs=False),
    operation(
        "skip_softmax_prefill",
        skip_prefill_cases,
        small={**SHORT, **FULL},
        implementation="hopper",
        counts=4,
        # Those that end within a tile.
        more=tuple(case for case in skip_prefill_cases.CASES if not case.gpu_only),
        serves=lambda case: (
            {name: getattr(case, name) for name in FULL} == FULL
            and case.page_size >= 16
            and case.group % 2 == 0
            and case.kv_dtype == case.dtype
            and {case.dim, case.v_dim or case.dim} <= {64, 128}
        ),
        in_graphs=False,
    ),
    operation("skip_softmax_decode", skip_decode_cases, small={"lengths": (200, 0, 1), "heads": 1}, counts=2),
    operation("skip_softmax_mla_decode", skip_mla_cases, small={"lengths": (200, 0, 1)}, counts=2),
    operation("sparse_decode", decode_cases, small={"heads": 1}),
    operation("block_mass", mass_cases),
    operation(
        "block_mass",
        mass_cases,
        implementation="cuda",
        serves=lambda case: case.dim == mass_cuda.DIM and case.kv_dtype == case.dtype,
    ),
    operation("kt_select", selection_cases, counts=3, arguments=with_tables),
    operation("page_vote", vote_cases, small={"n_pages": (70, 0, 3), "width": 80, "heads": 1}),
    operation("window_score", window_cases, small={"lengths": (60, 0, 5), "width": 5, "heads": 1}),
    operation("sparse_mla_decode", mla_cases, more=(LATENT, FLOAT8_ROWS)),
    operation(
        "sparse_mla_decode",
        mla_cases,
        implementation="fa3",
        more=(LATENT,),
        serves=lambda case: (
            case.latent_dim == fa3.LATENT_DIM and case.block_size in fa3.BLOCK_SIZES and case.kv_dtype == BF16
        ),
    ),
    operation(
        "index_logits", logit_cases, small={"queries": (*logit_cases.decode(65, 0), *logit_cases.chunk(2, 3, 6))}
    ),
    operation(
        "index_topk",
        token_cases,
        implementation="portable",
        counts=3,
        arguments=with_names,
        serves=lambda case: len(case.lengths) < 100,
        in_graphs=False,
    ),
    operation("index_keys", key_cases, function="quantize"),
    operation("index_keys", key_cases, function="store", written=("buffer",), arguments=to_be_stored),
    operation("latent_rows", row_cases, function="write_latents", written=("rows",), arguments=in_place),
    operation("page_table", table_cases, function="load_page_table", written=("page_table",), arguments=in_place),
    operation(
        "page_centroids",
        centroid_cases,
        function="update_page_centroids",
        written=("records",),
        counted=("overflow",),
        arguments=in_place,
    ),
    operation(
        "page_summary",
        summary_cases,
        function="update_page_summaries",
        written=("summaries",),
        counted=("overflow",),
        arguments=of_layers,
    ),
]


def require(operation: Operation, arguments: dict[str, Any]) -> None:
    """Skip where an implementation is not there for this GPU."""

    def taken(takes: Callable[..., bool], *names: str) -> bool:
        return takes(*(arguments[name] for name in names))

    if operation.implementation == "cuda" and not taken(mass_cuda.takes, "q", "k_cache", "block_size"):
        pytest.skip("needs a GPU for which NVRTC compiles the CUDA kernels")
    if operation.implementation == "hopper":
        hopper = skip_prefill_launch.hopper_kernel(arguments["q"].device)
        if hopper is None:
            pytest.skip("needs a Hopper GPU")
        assert taken(hopper.takes, "q", "k_cache", "v_cache", "plan", "page_size")
    if operation.implementation == "fa3":
        if not fa3.installed(arguments["q_nope"].device):
            pytest.skip("FA3 is not installed for this GPU")
        assert taken(fa3.takes, "q_nope", "q_rope", "kv_cache", "indices", "block_size", "kv_scale", "out")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def tensors(arguments: dict[str, Any], names: tuple[str, ...]) -> list[torch.Tensor]:
    """The bits of the arguments with these names, each of which may be several tensors."""
    given = [arguments[name] for name in names]
    return [bits(tensor) for one in given for tensor in ([one] if torch.is_tensor(one) else one)]


def poisoned(empty: Callable[..., torch.Tensor], byte: int, *shape: Any, **options: Any) -> torch.Tensor:
    tensor = empty(*shape, **options)
    bits(tensor).fill_(byte)
    return tensor


@pytest.mark.parametrize(("operation", "case"), [param for one in OPERATIONS for param in one.params()])
def test_the_same_bits_each_time(operation: Operation, case: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred calls over scratch that holds something else each time, and as many replays of a graph."""
    arguments = operation.arguments(operation, case, device)
    require(operation, arguments)
    module = importlib.import_module(f"{PACKAGE}.{operation.folder}.{operation.implementation}")
    given = dict(arguments)
    if inputs := getattr(importlib.import_module(f"{PACKAGE}.{operation.folder}.reference"), "Inputs", None):
        given["inputs"] = inputs(
            **{field.name: given.pop(field.name) for field in fields(inputs) if field.name in given}
        )
    kernel = partial(getattr(module, operation.function), **given)
    counters = tuple(name for name in operation.counted if name in arguments)
    written, counted = tensors(arguments, operation.written), tensors(arguments, counters)

    def over(byte: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", partial(poisoned, torch.empty, byte))
            kernel()

    def result(run: Callable[[], Any]) -> list[torch.Tensor]:
        for tensor in written:
            tensor.fill_(POISON)
        for tensor in counted:
            tensor.zero_()
        run()
        return [*written, *counted]

    first = [tensor.clone() for tensor in result(partial(over, SCRATCH[0]))]
    assert all((tensor != POISON).any() for tensor in first[: len(written)])

    def same(run: Callable[[], Any]) -> bool:
        return all(torch.equal(*pair) for pair in zip(result(run), first, strict=True))

    for number in range(1, REPLAYS + 1):
        assert same(partial(over, SCRATCH[number % len(SCRATCH)])), f"call {number}"
    if device == "cuda" and operation.in_graphs:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel()
        assert all(same(graph.replay) for _ in range(REPLAYS))


def test_no_kernel_is_left_out() -> None:
    found = {(path.parent.name, path.stem) for path in SOURCES.glob("*/*.py") if path.stem not in NO_KERNELS}
    found = {(folder, name) for folder, name in found if folder != "common"}
    assert found == {(one.folder, one.implementation) for one in OPERATIONS} | ELSEWHERE.keys()
    texts = [(HERE / name).read_text() for name in ELSEWHERE.values()]
    assert all("assert_replays(" in text or "range(100)" in text for text in texts)
