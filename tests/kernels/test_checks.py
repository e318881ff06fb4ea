"""The choice of implementation, the argument checks, and the examples in the docstrings."""

import doctest
import importlib
import re

import pytest
import torch
from triton_interpreter import OPERATIONS

from sglang_sparse_kernels.common import checks
from sglang_sparse_kernels.page_score import page_score
from sglang_sparse_kernels.page_summary import update_page_summary
from sglang_sparse_kernels.page_topk import page_topk
from sglang_sparse_kernels.sparse_decode import sparse_decode
from sglang_sparse_kernels.sparse_decode.cases import Case, make


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_docstring_example_runs(operation: str) -> None:
    result = doctest.testmod(importlib.import_module(f"sglang_sparse_kernels.{operation}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_cpu_tensors_run_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("SGLANG_SPARSE_REFERENCE", raising=False)
    assert checks.use_reference(torch.zeros(1))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not checks.use_reference(torch.zeros(1))


def test_reference_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not checks.use_reference(torch.zeros(1, device="meta"))
    monkeypatch.setenv("SGLANG_SPARSE_REFERENCE", "1")
    assert checks.use_reference(torch.zeros(1, device="meta"))


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(1, 2, 2), "x must have 2 dimensions, got shape (1, 2, 2)"),
        (torch.zeros(2, 2).double(), "x must have one of the dtypes torch.float32, got torch.float64"),
        (torch.zeros(2, 3), "x must have the shape (2, 2), got (2, 3)"),
        (torch.zeros(2, 4)[:, ::2], "x must be contiguous, got the strides (4, 2) for (2, 2)"),
    ],
)
def test_errors_say_what_a_tensor_must_be(tensor: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        checks.check_exactly("x", tensor, (2, 2), torch.float32)
    with pytest.raises(ValueError, match=r"x must be contiguous along its last dimension, got the strides \(4, 2\)"):
        checks.check_last(x=torch.zeros(2, 4)[:, ::2])


@pytest.mark.parametrize("page_size", [0, 3, 48, 128, -16])
def test_page_size_must_be_a_power_of_two_up_to_64(page_size: int) -> None:
    with pytest.raises(ValueError, match=f"power of two from 1 to 64, got {page_size}"):
        checks.check_page_size(page_size)


def test_update_page_summary_refuses_a_finer_summary_than_the_cache() -> None:
    arguments = {"k_cache": torch.zeros(8, 1, 64).half(), "last_slots": torch.tensor([3]), "page_size": 4}
    with pytest.raises(ValueError, match="summary must have one of the dtypes"):
        update_page_summary(summary=torch.zeros(2, 1, 2, 64), **arguments)
    with pytest.raises(ValueError, match=r"summary must have the shape \(2, 1, 2, 64\)"):
        update_page_summary(summary=torch.zeros(2, 1, 2, 32).half(), **arguments)


def test_page_score_refuses_wrong_arguments() -> None:
    q, summary, table = torch.zeros(1, 4, 64), torch.zeros(3, 2, 2, 64), int32(1, 2)[None]
    with pytest.raises(ValueError, match="multiple of KV heads, got 3 and 2"):
        page_score(q[:, :3], summary, table, int32(2))
    with pytest.raises(ValueError, match="local_pages must be at least 0"):
        page_score(q, summary, table, int32(2), local_pages=-1)


def test_page_topk_refuses_wrong_arguments() -> None:
    scores, table = torch.zeros(1, 1, 2), int32(1, 2)[None]
    with pytest.raises(ValueError, match="max_select must be at least 1"):
        page_topk(scores, table, int32(2), int32(2), max_select=0)
    with pytest.raises(ValueError, match="scores must have one of the dtypes"):
        page_topk(scores.half(), table, int32(2), int32(2), max_select=1)


def test_sparse_decode_refuses_wrong_arguments() -> None:
    arguments = make(Case((32,), 16, 1, 4, 64, torch.float32, torch.float32), "cpu")
    for change, message in [
        ({"page_size": 5}, "power of two"),
        ({"k_cache": arguments["k_cache"].half()}, "k_cache must have one of the dtypes"),
    ]:
        with pytest.raises(ValueError, match=message):
            sparse_decode(**{**arguments, **change})
