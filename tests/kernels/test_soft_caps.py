"""Soft caps of logits: dense attention where nothing is left out, and blocks that are judged by what was capped.

The operations run as the reference and as the kernels.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from anchor_runs import TOLERANCE, by_row, dense, relative_error

from sglang_sparse_kernels import skip_softmax_decode, skip_softmax_prefill, sparse_decode
from sglang_sparse_kernels.skip_softmax_decode import cases as skip_decode_cases
from sglang_sparse_kernels.skip_softmax_prefill import cases as skip_prefill_cases
from sglang_sparse_kernels.sparse_decode import cases as decode_cases

CAP = 0.5
OPS: dict[str, tuple[Any, Any]] = {
    "sparse_decode": (sparse_decode.sparse_decode, decode_cases),
    "skip_softmax_decode": (skip_softmax_decode.skip_softmax_decode, skip_decode_cases),
    "skip_softmax_prefill": (skip_softmax_prefill.skip_softmax_prefill, skip_prefill_cases),
}
CASES = [(name, case) for name, (_, cases) in OPS.items() for case in cases.CASES if not case.gpu_only]
SKIPS = [(name, case) for name, case in CASES if name != "sparse_decode"]


def make(name: str, case: Any, device: str) -> dict[str, Any]:
    if case.dtype == torch.float32 and device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    return OPS[name][1].make(case, device)


@pytest.mark.parametrize("implementation", ["reference", "kernels"])
@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_dense_attention_of_capped_logits(
    name: str, case: Any, implementation: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation == "reference":
        monkeypatch.setenv("SGLANG_SPARSE_REFERENCE", "1")
    arguments = make(name, replace(case, ratio=1.0) if name == "sparse_decode" else case, device)
    if name != "sparse_decode":
        arguments["threshold_scale_factor"] = torch.zeros_like(arguments["threshold_scale_factor"])
    expected = (by_row if hasattr(case, "lengths") else dense)({**arguments, "soft_cap": CAP}, case)
    assert relative_error(OPS[name][0](**arguments, soft_cap=CAP), expected) < TOLERANCE[case.dtype]
    assert relative_error(OPS[name][0](**arguments), expected) > 0.05, "without it that is something else"


def both(
    name: str, arguments: dict[str, Any], device: str, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Output and counts of the reference and of the kernels."""
    found = []
    for reference in ("1", "0"):
        monkeypatch.setenv("SGLANG_SPARSE_REFERENCE", reference)
        stats = torch.zeros(4 if name == "skip_softmax_prefill" else 2, dtype=torch.int64, device=device)
        found.append((OPS[name][0](**arguments, soft_cap=cap, stats=stats), stats))
    return found


@pytest.mark.parametrize(("name", "case"), SKIPS, ids=str)
def test_capped_logits_are_compared(name: str, case: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cap that hardly bends, the same blocks are skipped as without; with a lower one, fewer."""
    arguments, skipped = make(name, case, device), []
    for cap in (None, 1e4, 2.0):
        (expected, counts), (found, others) = both(name, arguments, device, cap, monkeypatch)
        # A tanh is rounded to a part of 1, which the cap multiplies.
        rounding = 1e-7 * (cap or 0.0)
        assert torch.equal(counts, others) and relative_error(found, expected) < TOLERANCE[case.dtype] + rounding
        skipped.append(int(counts[2 if name == "skip_softmax_prefill" else 1]))
    assert skipped[0] == skipped[1] > skipped[2]


@pytest.mark.parametrize("case", [case for case in decode_cases.QUERIES if not case.gpu_only], ids=str)
def test_several_queries_have_the_cap(case: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = make("sparse_decode", case, device)
    kernels = sparse_decode.sparse_decode(**arguments, soft_cap=CAP)
    monkeypatch.setenv("SGLANG_SPARSE_REFERENCE", "1")
    assert relative_error(kernels, sparse_decode.sparse_decode(**arguments, soft_cap=CAP)) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("name", OPS)
def test_a_cap_of_zero_is_refused(name: str, device: str) -> None:
    op, cases = OPS[name]
    with pytest.raises(ValueError, match="soft_cap must be positive, got 0"):
        op(**cases.make(cases.CASES[0], device), soft_cap=0.0)
