"""Page summaries: reference against an exhaustive rounding table, Triton against the reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sparse_kernels.page_summary import reference, update_page_summaries, update_page_summary
from sglang_sparse_kernels.page_summary.cases import CASES, Case, make

ROUNDED = [torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def representable(dtype: torch.dtype) -> torch.Tensor:
    """Every value of ``dtype`` but NaN, ascending, in float64."""
    codes = torch.arange(2 ** (8 * dtype.itemsize)).to(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
    values = codes.view(dtype).double()
    return values[~values.isnan()].unique()


def run_reference(arguments: dict[str, Any]) -> dict[str, Any]:
    expected = {name: value.clone() if torch.is_tensor(value) else value for name, value in arguments.items()}
    reference.update_page_summary(**expected)
    return expected


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
@given(data=st.data())
@settings(deadline=None, max_examples=50)
def test_rounding_gives_the_nearest_bound(dtype: torch.dtype, data: st.DataObject) -> None:
    limit = 448.0 if dtype == torch.float8_e4m3fn else 60000.0
    floats = st.floats(-limit, limit, width=32)
    x = torch.tensor(data.draw(st.lists(floats, min_size=1, max_size=50)), dtype=torch.float32)
    table = representable(dtype)
    assert torch.equal(reference.round_up(x, dtype).double(), table[torch.searchsorted(table, x.double())])
    below = table[torch.searchsorted(table, x.double(), right=True) - 1]
    assert torch.equal(reference.round_down(x, dtype).double(), below)


def test_values_outside_float8_become_nan() -> None:
    x = torch.tensor([448.0, 448.5, -448.0, -1000.0, float("inf")])
    for rounded in (reference.round_up(x, torch.float8_e4m3fn), reference.round_down(x, torch.float8_e4m3fn)):
        assert rounded.float().isnan().tolist() == [False, True, False, True, True]


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_reference_is_the_maximum_and_minimum_of_the_written_slots(case: Case) -> None:
    arguments = make(case, "cpu")
    result = run_reference(arguments)
    table = representable(case.summary_dtype) if case.summary_dtype != torch.float32 else None
    touched = set()
    for last_slot in arguments["last_slots"].tolist():
        if last_slot < 0:
            continue
        page = last_slot // case.page_size
        touched.add(page)
        keys = arguments["k_cache"][page * case.page_size : last_slot + 1].double()
        k_max, k_min = keys.max(dim=0).values, keys.min(dim=0).values
        if table is not None:
            k_max = table[torch.searchsorted(table, k_max).clamp(max=len(table) - 1)]
            k_min = table[(torch.searchsorted(table, k_min, right=True) - 1).clamp(min=0)]
        got = result["summary"][page].double()
        inside = ~got.isnan()
        assert torch.equal(got[inside], torch.stack([k_max, k_min], dim=1)[inside])
    untouched = [page for page in range(result["summary"].shape[0]) if page not in touched]
    assert result["summary"][untouched].float().count_nonzero() == 0
    assert result["overflow"].item() == result["summary"].float().isnan().sum()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_the_reference_bit_for_bit(case: Case, device: str) -> None:
    arguments = make(case, device)
    expected = run_reference(arguments)
    update_page_summary(**arguments)
    torch.testing.assert_close(
        arguments["summary"].float(), expected["summary"].float(), rtol=0, atol=0, equal_nan=True
    )
    assert arguments["overflow"].item() == expected["overflow"].item()


def test_overflow_is_counted_on_top(device: str) -> None:
    k_cache = torch.zeros(32, 2, 64, device=device, dtype=torch.bfloat16)
    k_cache[16, 0, 0], k_cache[17, 1, 5] = 1000.0, -452.0
    summary = torch.zeros(2, 2, 2, 64, device=device).to(torch.float8_e4m3fn)
    overflow = torch.tensor([5], dtype=torch.int32, device=device)
    update_page_summary(k_cache, summary, torch.tensor([18, -1], device=device), 16, overflow)
    assert overflow.item() == 7


def test_strided_cache(device: str) -> None:
    case = CASES[0]
    arguments = make(case, device)
    expected = run_reference(arguments)
    k_cache = arguments["k_cache"]
    wide = torch.randn(k_cache.shape[0], k_cache.shape[1] + 2, k_cache.shape[2], device=device).to(k_cache.dtype)
    wide[:, 1:-1] = k_cache
    update_page_summary(**{**arguments, "k_cache": wide[:, 1:-1]})
    assert torch.equal(arguments["summary"], expected["summary"])


@pytest.mark.parametrize("case", [CASES[0], CASES[6], CASES[9], CASES[13]], ids=str)
def test_all_layers_in_one_launch(case: Case, device: str) -> None:
    layers = [make(case, device, seed) for seed in range(3)]
    # One batch writes to the same slots of all layers.
    rows = {name: layers[0][name] for name in ("last_slots", "page_size", "overflow")}
    layers = [{**layer, **rows} for layer in layers]
    overflow = rows["overflow"].clone()
    expected = [run_reference({**layer, "overflow": overflow}) for layer in layers]
    update_page_summaries([layer["k_cache"] for layer in layers], [layer["summary"] for layer in layers], **rows)
    for layer, wanted in zip(layers, expected, strict=True):
        got, expect = (side["summary"].float() for side in (layer, wanted))
        torch.testing.assert_close(got, expect, rtol=0, atol=0, equal_nan=True)
    assert rows["overflow"].item() == sum(wanted["overflow"].item() for wanted in expected)


def test_layers_that_differ_are_refused() -> None:
    arguments = make(CASES[0], "cpu")
    k_cache, summary = arguments.pop("k_cache"), arguments.pop("summary")
    with pytest.raises(ValueError, match="as many, got 2 and 1"):
        update_page_summaries([k_cache, k_cache], [summary], **arguments)
    strided = torch.zeros(k_cache.shape[0], k_cache.shape[1] * 2, k_cache.shape[2], dtype=k_cache.dtype)[:, ::2]
    with pytest.raises(ValueError, match="k_caches must have the same dtype, shape and strides"):
        update_page_summaries([k_cache, strided], [summary, summary], **arguments)
