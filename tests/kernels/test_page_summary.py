"""Page summaries: reference against an exhaustive rounding table, Triton against the reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sparse_kernels.kt_select import reference as kt_reference
from sglang_sparse_kernels.kt_select import triton as kt_triton
from sglang_sparse_kernels.page_score import page_score
from sglang_sparse_kernels.page_summary import reference, update_page_summaries, update_page_summary
from sglang_sparse_kernels.page_summary.cases import BF16, CASES, E5M2, FP8, FP16, FP32, Case, make

FLOAT8 = [FP8, E5M2]
ROUNDED = [BF16, FP16, *FLOAT8]
INF = float("inf")


def representable(dtype: torch.dtype) -> torch.Tensor:
    """Every value of ``dtype`` but NaN, ascending, in float64."""
    codes = torch.arange(2 ** (8 * dtype.itemsize)).to(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
    values = codes.view(dtype).double()
    return values[~values.isnan()].unique()


def neighbours(x: torch.Tensor) -> torch.Tensor:
    """Float32 ``x`` and what lies next to each of them."""
    return torch.cat([x, x.nextafter(torch.tensor(INF)), x.nextafter(torch.tensor(-INF))])


def classes(dtype: torch.dtype) -> torch.Tensor:
    """Float32 of every class to float8: its numbers, the middle between them, their neighbours, and extremes."""
    numbers = representable(dtype).float()
    numbers = numbers[numbers.isfinite()]
    extremes = torch.tensor([0.0, 1e-40, torch.finfo(FP32).smallest_normal, torch.finfo(FP32).max, INF])
    return neighbours(torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, extremes, -extremes]))


def bounds_of(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of ``dtype`` above and the one below each of float64 ``x``, NaN outside float8, by table."""
    table = representable(dtype)
    above = table[torch.searchsorted(table, x).clamp(max=len(table) - 1)]
    below = table[(torch.searchsorted(table, x, right=True) - 1).clamp(min=0)]
    outside = (x.abs() > torch.finfo(dtype).max) & (dtype.itemsize == 1)
    return above.masked_fill(outside, float("nan")), below.masked_fill(outside, float("nan"))


def run_reference(arguments: dict[str, Any]) -> dict[str, Any]:
    expected: dict[str, Any] = {
        name: value.clone() if torch.is_tensor(value) else value for name, value in arguments.items()
    }
    reference.update_page_summary(**expected)
    return expected


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
@given(data=st.data())
@settings(max_examples=50)
def test_rounding_gives_the_nearest_bound(dtype: torch.dtype, data: st.DataObject) -> None:
    limit = torch.finfo(dtype).max
    floats = st.floats(-limit, limit, width=32)
    x = torch.tensor(data.draw(st.lists(floats, min_size=1, max_size=50)), dtype=torch.float32)
    above, below = bounds_of(x.double(), dtype)
    assert torch.equal(reference.round_up(x, dtype).double(), above)
    assert torch.equal(reference.round_down(x, dtype).double(), below)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_every_class_of_values_is_rounded_to_its_bound(dtype: torch.dtype) -> None:
    x = classes(dtype)
    both = reference.round_up(x, dtype), reference.round_down(x, dtype)
    for rounded, expected in zip(both, bounds_of(x.double(), dtype), strict=True):
        torch.testing.assert_close(rounded.double(), expected, rtol=0, atol=0, equal_nan=True)
        inside = ~expected.isnan()
        assert torch.equal(rounded.double()[inside].signbit(), x[inside].signbit())


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_values_outside_float8_become_nan(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    outside = [torch.tensor(largest).nextafter(torch.tensor(INF)).item(), 1.05 * largest, 2 * largest, INF]
    x = torch.tensor([largest, *outside, float("nan"), -largest, *(-value for value in outside)])
    for rounded in (reference.round_up(x, dtype), reference.round_down(x, dtype)):
        assert rounded.float().isnan().tolist() == [False, *[True] * 5, False, *[True] * 4]


def all_keys(kv_dtype: torch.dtype, summary_dtype: torch.dtype, device: str) -> torch.Tensor:
    """Every number of a narrow dtype, infinities too, and for float32 what ``classes`` gives."""
    if kv_dtype == FP32:
        return classes(summary_dtype)
    codes = torch.arange(2 ** (8 * kv_dtype.itemsize)).to(torch.uint8 if kv_dtype == FP8 else torch.uint16)
    keys = codes.view(kv_dtype).float()
    chosen = ~keys.isnan()
    if kv_dtype == BF16 and device == "cpu":
        # The interpreter takes subnormal bfloat16 for other numbers; some of the float32 are as small.
        chosen &= (keys == 0) | (keys.abs() >= torch.finfo(BF16).smallest_normal)
    return keys[chosen]


@pytest.mark.parametrize("kv_dtype", [BF16, FP16, FP32, FP8], ids=str)
@pytest.mark.parametrize("dtype", [E5M2, FP8], ids=str)
def test_triton_rounds_every_value_as_the_reference(dtype: torch.dtype, kv_dtype: torch.dtype, device: str) -> None:
    """As pages of one key each, so that the sign of a zero is its own."""
    keys, pages = all_keys(kv_dtype, dtype, device), 16
    padded = torch.zeros(-(-len(keys) // pages) * pages)
    padded[: len(keys)] = keys
    arguments: dict[str, Any] = {
        "k_cache": padded.view(pages, 1, -1).to(kv_dtype).to(device),
        "summary": torch.zeros(pages, 1, 2, len(padded) // pages, device=device).to(dtype),
        "last_slots": torch.arange(pages, device=device),
        "page_size": 1,
        "overflow": torch.zeros(1, dtype=torch.int32, device=device),
    }
    expected = run_reference(arguments)
    update_page_summary(**arguments)
    got, wanted = (result["summary"].float() for result in (arguments, expected))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    inside = ~wanted.isnan()
    assert torch.equal(got[inside].signbit(), wanted[inside].signbit())
    outside = 2 * int((keys.abs() > torch.finfo(dtype).max).sum())
    assert arguments["overflow"].item() == expected["overflow"].item() == outside
    assert (outside > 0) == (kv_dtype != FP8)


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_reference_is_the_maximum_and_minimum_of_the_written_slots(case: Case) -> None:
    arguments = make(case, "cpu")
    result = run_reference(arguments)
    touched = set()
    for last_slot in arguments["last_slots"].tolist():
        if last_slot < 0:
            continue
        page = last_slot // case.page_size
        touched.add(page)
        keys = arguments["k_cache"][page * case.page_size : last_slot + 1].double()
        k_max, k_min = keys.max(dim=0).values, keys.min(dim=0).values
        if case.summary_dtype != torch.float32:
            k_max, k_min = bounds_of(k_max, case.summary_dtype)[0], bounds_of(k_min, case.summary_dtype)[1]
        got, wanted = result["summary"][page].double(), torch.stack([k_max, k_min], dim=1)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
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


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_page_beyond_float8_e5m2_is_counted_and_always_selected(
    implementation: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation == "reference":
        monkeypatch.setenv("SGLANG_SPARSE_REFERENCE", "1")
    generator = torch.Generator(device).manual_seed(0)
    k_cache = torch.randn(24, 1, 64, device=device, generator=generator).to(BF16)
    k_cache[9, 0, 3], k_cache[13, 0, 5] = 60000.0, -60000.0
    summary = torch.zeros(6, 1, 2, 64, device=device).to(E5M2)
    overflow = torch.zeros(1, dtype=torch.int32, device=device)
    update_page_summary(k_cache, summary, torch.arange(3, 24, 4, device=device), 4, overflow)
    assert overflow.item() == 2
    assert summary.float().isnan().nonzero().tolist() == [[2, 0, 0, 3], [3, 0, 1, 5]]
    q = torch.randn(1, 1, 64, device=device, generator=generator)
    q[..., 3], q[..., 5] = 0.01, -0.01
    pages = torch.arange(6, dtype=torch.int32, device=device)
    count = torch.full((1, 1), 6, dtype=torch.int32, device=device)
    kernels = kt_reference if implementation == "reference" else kt_triton
    kernels.kt_score(q, summary, pages[None, None], count, 64, 0.125, scores := torch.zeros(1, 1, 6, device=device), 0)
    scores = scores[0, 0]
    assert (scores == torch.finfo(FP32).max).tolist() == [False, False, True, True, False, False]
    assert scores[[0, 1, 4, 5]].isfinite().all()
    with pytest.raises(ValueError, match=r"summary must have one of the dtypes .*, got torch\.float8_e5m2"):
        page_score(q, summary, pages[None], count[0])


def test_a_cache_of_float8_e5m2_is_refused() -> None:
    k_cache, summary = torch.zeros(8, 1, 64).to(E5M2), torch.zeros(2, 1, 2, 64).to(E5M2)
    with pytest.raises(ValueError, match=r"k_cache must have one of the dtypes .*, got torch\.float8_e5m2"):
        update_page_summary(k_cache, summary, torch.tensor([3]), 4)


@pytest.mark.parametrize("case", [CASES[0], CASES[6], CASES[9], CASES[13], CASES[17]], ids=str)
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
    with pytest.raises(ValueError, match="k_caches must be on cpu, got meta"):
        update_page_summaries([k_cache, k_cache.to("meta")], [summary, summary], **arguments)
    with pytest.raises(ValueError, match="summaries must be on cpu, got meta"):
        update_page_summaries([k_cache, k_cache], [summary, summary.to("meta")], **arguments)
