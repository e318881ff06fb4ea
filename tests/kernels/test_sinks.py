"""Attention sinks in every operation: the denominator of a head's softmaxes has one more term, and nothing else moves.

Each runs as the reference and as the kernels.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from anchor_runs import TOLERANCE, by_row, dense, relative_error

from sglang_sparse_kernels import anchor_prefill, skip_softmax_decode, skip_softmax_prefill, sparse_decode
from sglang_sparse_kernels.anchor_prefill import cases as anchor_cases
from sglang_sparse_kernels.skip_softmax_decode import cases as skip_decode_cases
from sglang_sparse_kernels.skip_softmax_prefill import cases as skip_prefill_cases
from sglang_sparse_kernels.sparse_decode import cases as decode_cases
from sglang_sparse_kernels.sparse_decode import reference
from sglang_sparse_kernels.sparse_decode import triton as kernels
from sglang_sparse_kernels.sparse_decode.plan import Config

BF16 = torch.bfloat16
# By the operation: its cases, and what makes it leave nothing out.
OPS: dict[str, tuple[Any, Any, dict[str, float]]] = {
    "sparse_decode": (sparse_decode.sparse_decode, decode_cases, {}),
    "skip_softmax_decode": (skip_softmax_decode.skip_softmax_decode, skip_decode_cases, {"threshold_scale_factor": 0}),
    "skip_softmax_prefill": (
        skip_softmax_prefill.skip_softmax_prefill,
        skip_prefill_cases,
        {"threshold_scale_factor": 0},
    ),
    "anchor_prefill": (anchor_prefill.anchor_prefill, anchor_cases, {"theta": float("inf")}),
}
CASES = [(name, case) for name, (_, cases, _) in OPS.items() for case in cases.CASES if not case.gpu_only]
DENSE = [
    (name, replace(case, ratio=1.0) if name == "sparse_decode" else case, (torch.float32, BF16)[number % 2])
    for number, (name, case) in enumerate(CASES)
]


@pytest.fixture(params=["reference", "kernels"], autouse=True)
def implementation(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setenv("SGLANG_SPARSE_REFERENCE", "1")
    return request.param


def sinks_of(q: torch.Tensor, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Some as large as the logarithms of the sums of weights, some larger and some smaller."""
    heads = q.shape[-2]
    return (torch.arange(heads, device=q.device) * 5 % 7 + 7.5).to(dtype)


def make(name: str, case: Any, device: str) -> dict[str, Any]:
    if case.dtype == torch.float32 and device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    return OPS[name][1].make(case, device)


@pytest.mark.parametrize(("name", "case", "dtype"), DENSE, ids=str)
def test_dense_attention_has_one_more_column(name: str, case: Any, dtype: torch.dtype, device: str) -> None:
    op, _, nothing_left_out = OPS[name]
    arguments = make(name, case, device)
    for field, value in nothing_left_out.items():
        arguments[field] = torch.full_like(arguments[field], value)
    arguments["sinks"] = sinks_of(arguments["q"], dtype)
    expected = (by_row if hasattr(case, "lengths") else dense)(arguments, case)
    got = op(**arguments)
    assert relative_error(got, expected) < TOLERANCE[case.dtype]
    assert relative_error(op(**{**arguments, "sinks": None}), expected) > 0.05, "without them it is something else"


@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_what_is_selected_stays_the_same(name: str, case: Any, device: str) -> None:
    """The output is that without sinks times the share of the selected keys, which values of one show."""
    op, _, _ = OPS[name]
    arguments = make(name, case, device)
    counted = name != "sparse_decode"
    stats = [torch.zeros(4 if name == "skip_softmax_prefill" else 2, dtype=torch.int64, device=device) for _ in "ab"]
    plain, found = (
        op(**arguments, sinks=sinks, **({"stats": count} if counted else {}))
        for sinks, count in zip((None, sinks_of(arguments["q"])), stats, strict=True)
    )
    assert torch.equal(*stats)
    arguments["v_cache"] = torch.ones_like(arguments["v_cache"], dtype=torch.float32).to(case.kv_dtype)
    share = op(**arguments, sinks=sinks_of(arguments["q"]))[..., :1].float() / case.v_scale
    assert share.min() >= 0 and share.max() <= 1 and share.mean() < 0.95
    assert relative_error(found, plain.float() * share) < 2 * TOLERANCE[case.dtype]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_splits_count_a_sink_once(narrow: bool, together: bool, device: str) -> None:
    """Of a row with many tiles, none, some and one: combined apart, by the last split, or by the only one."""
    case = decode_cases.Case((150, 0, 33, 1), 16, 2, 4, 64, BF16, BF16, ratio=1.0)
    arguments = decode_cases.make(case, device)
    arguments["sinks"] = sinks_of(arguments["q"])
    arrivals = torch.zeros_like(arguments["counts"]) if together else None
    config = Config(block_tokens=16, programs_per_processor=64, narrow=narrow)
    inputs = reference.Inputs(**arguments)
    got = kernels.sparse_decode(inputs, torch.empty_like(arguments["q"]), config, arrivals=arrivals)
    assert relative_error(got, by_row(arguments, case)) < TOLERANCE[BF16]
    assert got[1].count_nonzero() == 0


def test_a_sink_far_from_the_logits_hides_all_or_nothing(device: str) -> None:
    for name, (op, cases, _) in OPS.items():
        arguments = cases.make(cases.CASES[0], device)
        plain, sinks = op(**arguments), sinks_of(arguments["q"])
        assert relative_error(op(**arguments, sinks=sinks - 1e4), plain) < 1e-6, name
        assert op(**arguments, sinks=sinks + 1e4).count_nonzero() == 0, name


@pytest.mark.parametrize("name", OPS)
def test_other_sinks_are_refused(name: str, device: str) -> None:
    op, cases, _ = OPS[name]
    arguments = cases.make(cases.CASES[0], device)
    heads = arguments["q"].shape[1]
    for sinks, message in (
        (torch.zeros(heads, dtype=torch.float16), "sinks must have one of the dtypes"),
        (torch.zeros(heads + 1), "sinks must have the shape"),
        (torch.zeros(3, heads), "sinks must have 1 dimensions"),
        (torch.zeros(2 * heads)[::2], "sinks must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            op(**arguments, sinks=sinks.to(device))
