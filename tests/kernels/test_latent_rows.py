"""Rows of float8 latents: reference against the definition and SGLang's kernel, Triton against it byte for byte."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sglang_sparse_kernels.common.float8 import converts_float8
from sglang_sparse_kernels.latent_rows import reference, row_bytes, write_latents
from sglang_sparse_kernels.latent_rows.cases import BF16, CASES, FP16, FP32, Case, make
from sglang_sparse_kernels.latent_rows.reference import parts, read_latents

NAN, INF = float("nan"), float("inf")
FP8 = torch.float8_e4m3fn
SMALL = Case(5, 128, 16, FP32)


def written(arguments: dict[str, Any], by: Any = reference.write_latents) -> torch.Tensor:
    """The cache afterwards; the arguments stay."""
    rows = arguments["rows"].clone()
    by(**{**arguments, "rows": rows})
    return rows


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_reference_is_the_definition(case: Case) -> None:
    arguments = make(case, "cpu")
    rows = written(arguments)[arguments["slots"]]
    values, scales, rotated = parts(rows, case.latent_dim)
    assert torch.equal(rotated, arguments["rotated"].bfloat16())
    tiles = arguments["latent"].float().unflatten(-1, (-1, 128))
    for tile, codes, scale in zip(tiles.flatten(0, 1), values.flatten(0, 1), scales.flatten(), strict=True):
        assert scale == tile.abs().max() / torch.tensor(448.0)
        expected = tile * (1 / scale) if scale else tile
        assert torch.equal(codes.view(FP8), expected.to(FP8))
    read, given = read_latents(rows, case.latent_dim), torch.cat([arguments["latent"], arguments["rotated"]], 1).float()
    # Three bits of mantissa, and steps of 2^-9 of the scale.
    bound = given.abs() * 2**-4 * 1.01
    bound[:, : case.latent_dim] += scales.repeat_interleave(128, -1) * 2**-10 * 1.01
    assert bool(((read - given).abs() <= bound).all())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_the_reference(case: Case, device: str) -> None:
    """Byte for byte in the interpreter; a GPU divides a last bit less exactly, as it does in SGLang's kernel."""
    if case.dtype == FP32 and device == "cuda":
        pytest.skip("float32 is for the CPU")
    arguments = make(case, device)
    got, expected = written(arguments, write_latents), written(arguments)
    if device == "cpu":
        assert torch.equal(got, expected)
    untouched = torch.ones(len(got), dtype=torch.bool, device=device)
    untouched[arguments["slots"]] = False
    assert torch.equal(got[untouched], expected[untouched])
    got, expected = (parts(rows[arguments["slots"]], case.latent_dim) for rows in (got, expected))
    torch.testing.assert_close(got[1], expected[1], rtol=2**-22, atol=0.0)
    assert torch.equal(got[2], expected[2])
    # A value between two codes, as many of bfloat16 are, falls to either side then, and no further.
    assert (got[0] != expected[0]).float().mean() < 5e-3
    torch.testing.assert_close(got[0].view(FP8).float(), expected[0].view(FP8).float(), rtol=0.13, atol=2**-9)


def interpreted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """SGLang's module again, for Triton's interpreter."""
    # Its packages take long to import.
    package = importlib.util.find_spec("sglang")
    assert package is not None and package.origin is not None
    path = Path(package.origin).parent / "kernels/ops/quantization/dsa_quant_k_cache.py"
    spec = importlib.util.spec_from_file_location("interpreted_quant_k_cache", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec.loader.exec_module(module)
    return module


def by_sglang(latent: torch.Tensor, rotated: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Rows that SGLang's kernel makes.

    The interpreter rounds to float8 with an error at each power of two, so there the kernel hands out what it would
    round, and PyTorch rounds it.
    """
    if latent.is_cuda:
        from sglang.kernels.ops.quantization.dsa_quant_k_cache import quantize_k_cache_separate

        return torch.cat(quantize_k_cache_separate(latent, rotated), -1)[:, 0]
    entries, dim = latent.shape
    values, scales, keys = torch.empty(entries, dim), torch.empty(entries, dim // 128), torch.empty_like(rotated)
    tensors = values, scales, keys, latent, rotated
    sizes = {"NUM_NOPE_BLOCKS": dim // 128, "GROUP_SIZE": 128, "DIM_NOPE": dim, "DIM_ROPE": rotated.shape[1]}
    kernel: Any = interpreted(monkeypatch)._quantize_k_cache_fast_kernel
    kernel[entries, dim // 128 + 1](*tensors, *(one.stride(0) for one in tensors), **sizes, FP8_MIN=-448, FP8_MAX=448)
    return torch.cat([values.to(FP8).view(torch.uint8), scales.view(torch.uint8), keys.view(torch.uint8)], -1)


@pytest.mark.parametrize("tokens", [1, 33])
def test_the_bytes_are_sglangs(tokens: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = make(Case(tokens, 512, 64, BF16, spread=8.0), device)
    if device == "cuda" and not converts_float8(arguments["latent"].device):
        pytest.skip("SGLang's kernel does not compile for this GPU")
    # In a tile of zeros SGLang's kernel divides zero by zero.
    arguments["latent"][-1, :128] = 1.0
    theirs = by_sglang(arguments["latent"], arguments["rotated"], monkeypatch)
    assert torch.equal(written(arguments, write_latents)[arguments["slots"]], theirs)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_tiles_that_vanish_or_are_not_finite(dtype: torch.dtype, device: str) -> None:
    if dtype == FP32 and device == "cuda":
        pytest.skip("float32 is for the CPU")
    arguments = make(Case(5, 256, 16, dtype), device)
    latent = arguments["latent"]
    latent[:, :128] = 0.0
    latent[1, 3], latent[2, 3], latent[3, 3], latent[4, 3] = 1e-37, NAN, INF, -INF
    got = written(arguments, write_latents)
    assert torch.equal(got, written(arguments))
    values, scales, _ = parts(got[arguments["slots"]], 256)
    assert values[:2, 0].count_nonzero() == 0 and scales[0, 0] == 0.0
    assert bool((values[2:, 0] == 0x7F).all()) and bool(scales[2:, 0].isnan().all())
    assert bool(read_latents(got[arguments["slots"]], 256)[:, 128:].isfinite().all())


def test_nothing_else_is_written(device: str) -> None:
    arguments = make(Case(9, 128, 32, FP16), device)
    wide = torch.full((12, 2 * row_bytes(128, 32)), 0x55, dtype=torch.uint8, device=device)
    arguments["rows"] = wide[:, : row_bytes(128, 32)]
    write_latents(**arguments)
    untouched = torch.ones(12, dtype=torch.bool, device=device)
    untouched[arguments["slots"]] = False
    assert bool((wide[untouched] == 0x55).all()) and bool((wide[:, row_bytes(128, 32) :] == 0x55).all())
    for name in ("latent", "rotated", "slots"):
        arguments[name] = arguments[name][:0]
    before = wide.clone()
    write_latents(**arguments)
    assert torch.equal(wide, before)


@pytest.mark.parametrize("triton", [False, True])
def test_a_slot_of_minus_one_is_skipped(triton: bool, device: str) -> None:
    """The row before the cache and its last row, to which -1 could lead, stay as they were."""
    arguments = make(Case(9, 128, 16, BF16), device)
    around = torch.full((13, row_bytes(128, 16)), 0x55, dtype=torch.uint8, device=device)
    kept = torch.tensor([0, 3, 4, 8], device=device)
    slots = torch.full((9,), -1, device=device)
    slots[kept] = torch.tensor([5, 0, 7, 2], device=device)
    by = write_latents if triton else reference.write_latents
    by(arguments["latent"], arguments["rotated"], slots, around[1:])
    expected = torch.full_like(around, 0x55)
    by(arguments["latent"][kept], arguments["rotated"][kept], slots[kept], expected[1:])
    assert torch.equal(around, expected)
    assert bool((expected[1 + slots[kept]] != 0x55).any(dim=1).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent": torch.zeros(5, 384)}, "latent of float8 rows must have a dimension of 128, 256, 512, got 384"),
        ({"rotated": torch.zeros(5, 48)}, "rotated key of float8 rows must have a dimension of 16, 32, 64, got 48"),
        ({"rotated": torch.zeros(5, 16).bfloat16()}, "rotated must have one of the dtypes torch.float32, got"),
        ({"rows": torch.zeros(8, 164)}, "rows must have one of the dtypes torch.uint8"),
        ({"rows": torch.zeros(8, 165).byte()[:, :164]}, "rows must have its rows at multiples of 4 bytes, got the"),
        ({"rows": torch.zeros(8, 168).byte()[:, 2:166]}, "rows must have its rows at multiples of 4 bytes, got the"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_latents(**{**make(SMALL, "cpu"), **change})
