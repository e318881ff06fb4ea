"""Tensors of other strides than the kernels expect: taken as they are, or refused by name."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# Tensors of float32 are for the CPU, or for the reference.
QUERIES = (
    "anchor_prefill",
    "block_mass",
    "skip_softmax_decode",
    "skip_softmax_prefill",
    "sparse_decode",
    "window_score",
)
# Operations by their folder, and what the public function is called where its name is another one.
OPERATIONS = (
    *("anchor_prefill", "block_mass", "block_topp", "index_logits", "kt_score", "page_score", "page_summary"),
    *("page_table", "page_topk", "skip_softmax_decode", "skip_softmax_prefill", "sparse_decode", "sparse_mla_decode"),
    *("visible_blocks", "window_score"),
)
FUNCTIONS = {"page_summary": "update_page_summary", "page_table": "load_page_table"}


def arguments_of(operation: str, device: str) -> dict[str, Any]:
    cases = importlib.import_module(f"sglang_sparse_kernels.{operation}.cases")
    return cases.make(next(case for case in cases.CASES if not case.gpu_only), device)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers with a gap behind each."""
    found = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., ::2]
    found.copy_(tensor)
    return found


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers with a gap behind each last dimension."""
    found = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., : tensor.shape[-1]]
    found.copy_(tensor)
    return found


def results(operation: str, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """What the operation returns, and its arguments after it, some of which it writes."""
    module = importlib.import_module(f"sglang_sparse_kernels.{operation}")
    returned = getattr(module, FUNCTIONS.get(operation, operation))(**arguments)
    returned = returned if isinstance(returned, tuple) else (returned,)
    return [found for found in (*returned, *arguments.values()) if isinstance(found, torch.Tensor)]


def attempt(operation: str, arguments: dict[str, Any]) -> list[torch.Tensor] | str:
    """The results, or why the arguments are refused."""
    try:
        return results(operation, arguments)
    except ValueError as error:
        return str(error)


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """What an operation leaves as it was is the same in each run."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.parametrize("layout", [spread, apart])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_strides_are_followed_or_refused_by_name(
    operation: str, layout: Callable[[torch.Tensor], torch.Tensor], device: str
) -> None:
    arguments = arguments_of(operation, device)
    expected = results(operation, copied(arguments))
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    assert len(tensors) > 2
    refused = []
    for name, tensor in tensors.items():
        changed = layout(tensor)
        if changed.is_contiguous():
            continue
        found = attempt(operation, {**copied(arguments), name: changed})
        if isinstance(found, str):
            assert f"{name} must be contiguous" in found
            refused.append(name)
            continue
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine.float().nan_to_num(7), theirs.float().nan_to_num(7)), name
    # A gap behind each number no kernel reads past.
    assert refused or layout is apart


@pytest.mark.parametrize("operation", [*QUERIES, "sparse_mla_decode"])
def test_float32_queries_are_refused_on_a_gpu(operation: str) -> None:
    arguments = arguments_of(operation, "cpu")
    name = "q" if operation in QUERIES else "q_nope"
    arguments[name] = torch.empty(arguments[name].shape, device="meta")
    with pytest.raises(
        ValueError, match=f"{name} must have one of the dtypes torch.float16, torch.bfloat16, got torch"
    ):
        results(operation, arguments)
