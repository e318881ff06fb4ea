"""Index keys: reference against the definition written out, Triton against it bit for bit, and the cache's bytes."""

import math
from typing import Any

import pytest
import torch

from sglang_sparse_kernels.index_keys import PAGE_SIZE, quantize, reference, store
from sglang_sparse_kernels.index_keys.cases import BF16, CASES, FP16, FP32, Case, make, slots_of

NAN, INF = float("nan"), float("inf")
FP8 = torch.float8_e4m3fn


def run_reference(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    x = arguments["x"]
    values, scales = torch.empty(x.shape, dtype=FP8, device=x.device), torch.empty(x.shape[:-1], device=x.device)
    return reference.quantize(**arguments, out=(values, scales))


def run_poisoned(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The public function on a result that nothing has written to."""
    x = arguments["x"]
    values = torch.full(x.shape, 0x55, dtype=torch.uint8, device=x.device).view(FP8)
    return quantize(**arguments, out=(values, torch.full(x.shape[:-1], -1.0, device=x.device)))


def assert_same_bits(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(got[1].view(torch.int32), expected[1].view(torch.int32))


def sylvester(dim: int) -> torch.Tensor:
    """+1 where the two positions have an even number of bits in common, else -1."""
    signs = [[(-1.0) ** (row & column).bit_count() for column in range(dim)] for row in range(dim)]
    return torch.tensor(signs, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_rotation_is_sylvesters_matrix(dim: int, dtype: torch.dtype) -> None:
    # Integers and a power of two as the factor: all is exact, for 128 but the factor.
    x = torch.randint(-8, 9, (20, dim), generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = x.double() @ sylvester(dim)
    expected = (exact.float() * dim**-0.5).to(dtype)
    assert torch.equal(reference.hadamard(x), expected)


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_reference_is_the_definition(case: Case) -> None:
    arguments = make(case, "cpu")
    values, scales = run_reference(arguments)
    rows = (reference.hadamard(arguments["x"]) if case.rotate else arguments["x"]).double().flatten(0, -2)
    for row, got, scale in zip(rows, values.flatten(0, -2), scales.flatten().tolist(), strict=True):
        amax = max(1e-4, row.abs().max().item())
        if not case.powers:
            assert scale == (torch.tensor(amax) / 448).item()
            assert torch.equal(got, (row.float() * (1 / torch.tensor(scale))).to(FP8))
            # Once more by the definition, but for what two more roundings move.
            assert torch.allclose(got.double() * scale, row, rtol=2**-4 * 1.001, atol=2**-10 * scale * 1.001)
            continue
        assert math.log2(scale).is_integer()
        # The smallest power of two that holds the largest value.
        assert amax <= 448 * scale
        assert scale == 2.0**-22 or amax > 224 * scale
        scaled = row / scale
        # Three bits of mantissa, or steps of 2^-9.
        step = torch.clamp(torch.floor(torch.log2(scaled.abs().clamp(min=1e-300))), min=-6) - 3
        expected = torch.round(scaled / 2**step) * 2**step
        assert torch.equal(got.double(), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_the_reference_bit_for_bit(case: Case, device: str) -> None:
    if case.dtype == FP32 and device == "cuda":
        pytest.skip("float32 is for the CPU")
    arguments = make(case, device)
    assert_same_bits(run_poisoned(arguments), run_reference(arguments))
    assert_same_bits(quantize(**arguments), run_reference(arguments))


@pytest.mark.parametrize("powers", [True, False])
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_every_finite_number_and_every_rounding(dtype: torch.dtype, powers: bool, device: str) -> None:
    """All values of the dtype in the place of one of a row, beside a largest one that decides the scale."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite()].to(device)
    rows = every[: len(every) // 64 * 64].view(-1, 64).clone()
    rows[::3, 0] = 448.0
    rows[1::3, 0] = 1.0
    arguments = {"x": rows, "rotate": False, "powers": powers}
    assert_same_bits(quantize(**arguments), run_reference(arguments))


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(448.0, 1.0), (449.0, 2.0), (447.0, 1.0), (896.0, 2.0), (1.75, 2.0**-8), (0.0, 2.0**-22), (2.0**-20, 2.0**-22)],
)
def test_scales_at_the_borders(amax: float, scale: float, device: str) -> None:
    x = torch.zeros(1, 128, dtype=FP16, device=device)
    x[0, 77] = -amax
    assert quantize(x, rotate=False)[1].item() == scale
    assert run_reference({"x": x, "rotate": False})[1].item() == scale
    assert quantize(x, rotate=False)[0][0, 77].float().item() == pytest.approx(-amax / scale, rel=2**-4)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("rotate", [False, True])
def test_what_is_not_finite_makes_its_row_nan(
    rotate: bool, powers: bool, dtype: torch.dtype, implementation: str, device: str
) -> None:
    run = run_reference if implementation == "reference" else run_poisoned
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    clean = run({"x": x, "rotate": rotate, "powers": powers})
    for row, value in ((0, NAN), (1, INF), (3, -INF)):
        x[row, 9] = value
    values, scales = run({"x": x, "rotate": rotate, "powers": powers})
    assert (values[[0, 1, 3]].view(torch.uint8) == 0x7F).all()
    assert torch.equal(scales[[0, 1, 3]].view(torch.int32), torch.full((3,), 0x7FC00000, device=device).int())
    for row in (2, 4):
        assert torch.equal(values[row].view(torch.uint8), clean[0][row].view(torch.uint8))
        assert scales[row] == clean[1][row]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_rotation_beyond_float16_is_nan(implementation: str, device: str) -> None:
    run = run_reference if implementation == "reference" else run_poisoned
    values, scales = run({"x": torch.full((2, 128), 60000.0, dtype=FP16, device=device), "rotate": True})
    assert scales.isnan().all()
    assert values.float().isnan().all()


def test_rows_of_any_stride(device: str) -> None:
    arguments = make(Case((6, 10, 128), BF16), device)
    expected = quantize(**arguments)
    x = arguments["x"]
    for strided in (torch.cat([x, x + 1], dim=-1)[..., :128], x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert not strided.is_contiguous()
        assert_same_bits(quantize(strided), expected)


def test_without_rows(device: str) -> None:
    values, scales = quantize(torch.zeros(0, 16, 128, device=device, dtype=BF16))
    assert (values.shape, scales.shape) == ((0, 16, 128), (0, 16))
    buffer = torch.full((2, PAGE_SIZE * 132), 3, dtype=torch.uint8, device=device)
    store(values[:, 0], scales[:, 0], torch.zeros(0, dtype=torch.int64, device=device), buffer)
    assert (buffer == 3).all()


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize(("entries", "skipped", "dim"), [(150, 7, 128), (1, 0, 128), (64, 64, 128), (33, 3, 64)])
def test_store_writes_its_slots_and_nothing_else(
    entries: int, skipped: int, dim: int, implementation: str, device: str
) -> None:
    values, scales = run_reference(make(Case((entries, dim), BF16), device))
    slots, pages = slots_of(entries, skipped, device)
    noise = torch.randint(0, 256, (pages, PAGE_SIZE * (dim + 4)), generator=torch.Generator().manual_seed(1))
    buffer = noise.to(torch.uint8).to(device)
    expected = [list(page) for page in buffer.tolist()]
    for value, scale, slot in zip(values.view(torch.uint8).tolist(), scales, slots.tolist(), strict=True):
        if slot >= 0:
            page, token = expected[slot // 64], slot % 64
            page[token * dim : (token + 1) * dim] = value
            start = 64 * dim + 4 * token
            page[start : start + 4] = scale[None].view(torch.uint8).tolist()
    (reference.store if implementation == "reference" else store)(values, scales, slots, buffer)
    assert buffer.tolist() == expected


def test_parts_are_views_of_the_layout() -> None:
    buffer = torch.zeros(3, PAGE_SIZE * 132, dtype=torch.uint8)
    keys, scales = reference.parts(buffer)
    assert (keys.shape, scales.shape) == ((3, 64, 128), (3, 64))
    keys[1, 5, 7] = 9
    scales[2, 63] = 1.0
    assert buffer[1, 5 * 128 + 7] == 9
    assert buffer[2, -4:].tolist() == [0, 0, 128, 63]


def test_wrong_arguments_are_refused() -> None:
    x = torch.zeros(4, 128)
    values, scales = torch.zeros(4, 128).to(FP8), torch.zeros(4)
    for arguments, message in [
        ((x[0],), "x must have at least 2 dimensions"),
        ((x[:, :96],), "last dimension of x must be one of 64, 128, 256, got 96"),
        ((x, True, (x, scales)), "values must have one of the dtypes torch.float8_e4m3fn"),
    ]:
        with pytest.raises(ValueError, match=message):
            quantize(*arguments)
    slots, buffer = torch.zeros(4, dtype=torch.int64), torch.zeros(2, PAGE_SIZE * 132, dtype=torch.uint8)
    shifted = torch.zeros(2 * PAGE_SIZE * 132 + 1, dtype=torch.uint8)[1:].view(2, -1)
    for arguments, message in [
        ((values[:, :96], scales, slots, buffer), "last dimension of values must be one of 64, 128, 256, got 96"),
        ((values, scales, slots, buffer.view(torch.int8)), "buffer must have one of the dtypes torch.uint8"),
        ((values, scales, slots, shifted), "buffer must begin at a multiple of 16 bytes"),
    ]:
        with pytest.raises(ValueError, match=message):
            store(*arguments)
