"""Tensors of other strides, dtypes, dimensions or devices than the kernels expect: taken, or refused by name."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from sglang_sparse_kernels.index_keys.cases import slots_of

INT32, INT64 = torch.int32, torch.int64


@dataclass(frozen=True)
class Operation:
    """A public function of the package.

    Attributes:
        name: of the function.
        folder: where it is.
        results: what errors call its results, each of which may be given to it.
        stats: how many numbers it counts, if asked to.
        query: what errors call its queries; empty if kernels take them in float32.
    """

    name: str
    folder: str = ""
    results: tuple[str, ...] = ("out",)
    stats: int = 0
    query: str = ""

    def __str__(self) -> str:
        return self.name


OPERATIONS = (
    Operation("anchor_prefill", stats=2, query="q"),
    Operation("block_mass", query="q"),
    Operation("block_topp", results=("indices", "counts"), stats=4),
    Operation("index_logits"),
    Operation("index_topk", results=("positions", "counts", "slots"), stats=3),
    Operation("kt_select", results=("indices", "counts"), stats=3),
    Operation("load_page_table", "page_table", ()),
    Operation("page_score"),
    Operation("page_vote"),
    Operation("page_topk", results=("indices", "counts"), stats=3),
    Operation("quantize", "index_keys", ("values", "scales"), query="x"),
    Operation("skip_softmax_decode", stats=2, query="q"),
    Operation("skip_softmax_mla_decode", stats=2, query="q_nope"),
    Operation("skip_softmax_prefill", stats=4, query="q"),
    Operation("sparse_decode", query="q"),
    Operation("sparse_mla_decode", query="q_nope"),
    Operation("store", "index_keys", ()),
    Operation("update_page_summary", "page_summary", ()),
    Operation("window_score", query="q"),
    Operation("write_latents", "latent_rows", (), query="latent"),
)
# Shorter rows than those of an operation's first case.
FEWER: dict[str, dict[str, Any]] = {
    "anchor_prefill": {"prefixes": (5, 0), "extends": (11, 20), "group": 2},
    "page_vote": {"n_pages": (70, 0, 33, 1), "width": 90},
    "skip_softmax_decode": {"lengths": (330, 0, 130, 1)},
    "skip_softmax_mla_decode": {"lengths": (330, 0, 130, 1)},
    "skip_softmax_prefill": {"prefixes": (5, 0), "extends": (11, 20), "group": 2},
    "window_score": {"lengths": (60, 0, 33, 1), "width": 7},
}
# Tensors that need not be dense, but for their last dimension.
STRIDED = {"q", "q_nope", "q_rope", "k_cache", "v_cache", "kv_cache", "page_table", "block_table", "req_to_token"}
STRIDED |= {"mass", "logits", "weights", "x", "latent", "rotated", "rows"}
# Numbers of int32 or int64.
EITHER = {("index_logits", "rows"), ("load_page_table", "req_pool_indices")}
# Dimensions that nothing else has to fit: heads of one latent, slots of a pool, what a row has room for.
FREE = {
    ("block_mass", "q", 1),
    ("block_mass", "k_cache", 0),
    ("index_logits", "buffer", 0),
    ("index_logits", "page_table", 0),
    ("index_logits", "out", 1),
    ("index_topk", "logits", 1),
    *(("index_topk", "page_table", dim) for dim in (0, 1)),
    ("kt_select", "summary", 0),
    ("kt_select", "kept", 2),
    *(("load_page_table", "req_to_token", dim) for dim in (0, 1)),
    ("load_page_table", "req_pool_indices", 0),
    ("page_score", "summary", 0),
    ("page_vote", "summary", 0),
    ("skip_softmax_decode", "page_table", 1),
    ("skip_softmax_mla_decode", "kv_cache", 0),
    ("skip_softmax_mla_decode", "page_table", 1),
    ("sparse_decode", "indices", 2),
    ("sparse_mla_decode", "kv_cache", 0),
    ("sparse_mla_decode", "indices", 2),
    ("store", "buffer", 0),
    *(("update_page_summary", name, 0) for name in ("k_cache", "summary", "last_slots")),
    ("window_score", "q", 1),
    ("window_score", "k_cache", 0),
    ("window_score", "out", 2),
    ("write_latents", "rows", 0),
}
QUERIES = [operation for operation in OPERATIONS if operation.query]


def run(operation: Operation, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors after the call, by name: results, what was counted, and the inputs, some of which it writes."""
    function = getattr(
        importlib.import_module(f"sglang_sparse_kernels.{operation.folder or operation.name}"), str(operation)
    )
    arguments = {name: value for name, value in given.items() if name not in operation.results}
    if out := tuple(given[name] for name in operation.results if name in given):
        arguments["out"] = out if len(out) > 1 else out[0]
    returned = function(**arguments)
    returned = returned if isinstance(returned, tuple) else (returned,)
    return {**tensors_of(given), **dict(zip(operation.results, returned, strict=False))}


def tensors_of(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in given.items()}


@cache
def inputs_of(operation: Operation, device: str) -> dict[str, Any]:
    cases = importlib.import_module(f"sglang_sparse_kernels.{operation.folder or operation.name}.cases")
    case = next(case for case in cases.CASES if not case.gpu_only)
    case = replace(case, **FEWER.get(operation.name, {}))
    given = cases.make(case, device)
    if operation.name == "store":
        slots, pages = slots_of(100, 3, device)
        given = {
            "values": torch.randn(100, 64, device=device).to(torch.float8_e4m3fn),
            "scales": torch.rand(100, device=device),
            "slots": slots,
            "buffer": torch.zeros(pages, 64 * (64 + 4), dtype=torch.uint8, device=device),
        }
    if operation.name == "sparse_decode":
        given["arrivals"] = torch.zeros_like(given["counts"])
    if operation.name == "skip_softmax_decode":
        given["arrivals"] = torch.zeros(len(given["q"]), given["k_cache"].shape[1], dtype=torch.int32, device=device)
    if operation.stats:
        given["stats"] = torch.zeros(operation.stats, dtype=INT64, device=device)
    return given


@cache
def arguments_of(operation: Operation, device: str) -> dict[str, Any]:
    """Inputs, and results of zeros to write to."""
    given = inputs_of(operation, device)
    after = run(operation, copied(given))
    return {**given, **{name: torch.zeros_like(after[name]) for name in operation.results}}


@cache
def expected_of(operation: Operation, device: str) -> dict[str, torch.Tensor]:
    return run(operation, copied(arguments_of(operation, device)))


def refused(operation: Operation, given: dict[str, Any], name: str, changed: torch.Tensor, device: str) -> bool:
    """Whether the tensor ``name`` must not be ``changed``, as the error then says; otherwise it makes no difference."""
    try:
        found = run(operation, {**copied(given), name: changed})
    except ValueError as error:
        if not str(error).startswith(f"{name} must "):
            raise
        return True
    for key, theirs in expected_of(operation, device).items():
        same = torch.equal(found[key].double().nan_to_num(7), theirs.double().nan_to_num(7))
        assert same, f"{key} is another one for another {name}"
    return False


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers with a gap behind each."""
    found = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., ::2]
    return found.copy_(tensor)


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers with a gap behind each last dimension."""
    found = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., : tensor.shape[-1]]
    return found.copy_(tensor)


def columns(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers with the last dimension before the one before it in memory."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers with the second dimension first in memory, as heads before tokens."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1) if tensor.dim() > 2 else tensor


@pytest.mark.parametrize("layout", [spread, apart, columns, turned])
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_strides_are_followed_or_refused_by_name(
    operation: Operation, layout: Callable[[torch.Tensor], torch.Tensor], device: str
) -> None:
    given = arguments_of(operation, device)
    assert len(tensors_of(given)) > 2
    for name, tensor in tensors_of(given).items():
        changed = layout(tensor.clone())
        if not changed.is_contiguous():
            taken = not refused(operation, given, name, changed, device)
            assert taken == (name in STRIDED and layout in (apart, turned)), name


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_other_dtypes_are_taken_or_refused_by_name(operation: Operation, device: str) -> None:
    given = arguments_of(operation, device)
    for name, tensor in tensors_of(given).items():
        assert refused(operation, given, name, tensor.double(), device)
        if tensor.dtype in (INT32, INT64):
            other = tensor.to(INT64 if tensor.dtype == INT32 else INT32)
            assert refused(operation, given, name, other, device) != ((operation.name, name) in EITHER), name


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_other_numbers_of_dimensions_are_refused_by_name(operation: Operation, device: str) -> None:
    given, inputs = arguments_of(operation, device), inputs_of(operation, device)
    for name, tensor in tensors_of(given).items():
        # Rows to quantise are of any shape.
        if name != "x":
            for changed in (tensor[None], tensor[0], tensor.flatten()[0]):
                # Results that are not given are made after the inputs, which have to be checked before.
                assert refused(operation, inputs if name in inputs else given, name, changed, device), name


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_other_sizes_are_refused(operation: Operation, device: str) -> None:
    """One less in a dimension: by the name of the tensor, or of one that no longer fits it."""
    given = arguments_of(operation, device)
    for name, tensor in tensors_of(given).items():
        for dim, size in enumerate(tensor.shape):
            if size > 1 and (operation.name, name, dim) not in FREE:
                with pytest.raises(ValueError, match=r" must (be|have|hold) |the plan has \d+ query tokens"):
                    run(operation, {**copied(given), name: tensor.narrow(dim, 0, size - 1).contiguous()})


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_other_devices_are_refused_by_name(operation: Operation, device: str) -> None:
    """One tensor says where the others have to be; if it is the one elsewhere, another one is refused."""
    given, leading = arguments_of(operation, device), []
    for name, tensor in tensors_of(given).items():
        with pytest.raises(ValueError, match=r" must be on ") as error:
            run(operation, {**copied(given), name: tensor.to("meta")})
        if str(error.value) != f"{name} must be on {tensor.device}, got meta":
            assert str(error.value).endswith(f" must be on meta, got {tensor.device}")
            leading.append(name)
    assert len(leading) == 1, leading


@pytest.mark.parametrize("operation", QUERIES, ids=str)
def test_float32_queries_are_refused_on_a_gpu(operation: Operation) -> None:
    given = inputs_of(operation, "cpu")
    changed = torch.empty(given[operation.query].shape, device="meta")
    message = f"{operation.query} must have one of the dtypes torch.float16, torch.bfloat16, got torch.float32"
    with pytest.raises(ValueError, match=message):
        run(operation, {**given, operation.query: changed})
