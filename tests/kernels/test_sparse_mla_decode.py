"""Sparse MLA decode attention: reference against loops in float64, Triton against the reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from anchor_runs import relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mla_decode import TOLERANCE, poisoned, run_reference, stored

from sglang_sparse_kernels.common.launch import Properties, properties
from sglang_sparse_kernels.latent_rows.reference import read_latents
from sglang_sparse_kernels.sparse_decode import sparse_decode
from sglang_sparse_kernels.sparse_mla_decode import sparse_mla_decode
from sglang_sparse_kernels.sparse_mla_decode import triton as kernels
from sglang_sparse_kernels.sparse_mla_decode.cases import CASES, ROWS, Case, make
from sglang_sparse_kernels.sparse_mla_decode.reference import Inputs
from sglang_sparse_kernels.sparse_mla_decode.triton import Config

FP32, FP16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
# Many splits of one small tile each.
SPLIT = Config(16, 16, num_warps=4, num_stages=2, programs_per_processor=64)
SMALL = Case((90, 0, 33), 16, 20, 64, BF16, BF16, rope_dim=16)


def naive(arguments: dict[str, Any], row: int) -> torch.Tensor:
    """All heads of one row in float64, token by token."""
    block_size, last_slot = arguments["block_size"], arguments["last_slots"][row].item()
    q_nope, q_rope = arguments["q_nope"][row].double(), arguments["q_rope"][row].double()
    tokens = []
    for block in arguments["indices"][row, 0, : arguments["counts"][row, 0]].tolist():
        slots = range(block * block_size, (block + 1) * block_size)
        tokens += [slot for slot in slots if block != last_slot // block_size or slot <= last_slot]
    latent, rotated = (stored(arguments, tokens) * arguments["kv_scale"]).split([q_nope.shape[1], q_rope.shape[1]], -1)
    logits = arguments["sm_scale"] * (q_nope @ latent.T + q_rope @ rotated.T)
    return logits.softmax(dim=-1) @ latent


def expect(arguments: dict[str, Any]) -> torch.Tensor:
    rows = range(arguments["q_nope"].shape[0])
    empty = torch.zeros(arguments["q_nope"].shape[1:], dtype=torch.float64)
    return torch.stack([naive(arguments, row) if arguments["counts"][row, 0] else empty for row in rows])


def run_config(arguments: dict[str, Any], config: Config, usual_blocks: int | None = None) -> torch.Tensor:
    out = torch.full_like(arguments["q_nope"], float("nan"), memory_format=torch.contiguous_format)
    return kernels.sparse_mla_decode(Inputs(**arguments), out=out, config=config, usual_blocks=usual_blocks)


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_reference_is_softmax_attention_over_the_selected_tokens(case: Case) -> None:
    arguments = poisoned(make(case, "cpu"))
    torch.testing.assert_close(run_reference(arguments).double(), expect(arguments), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_the_reference(case: Case, device: str) -> None:
    if case.dtype == FP32 and device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    arguments = poisoned(make(case, device))
    got = sparse_mla_decode(**arguments)
    assert got.dtype == case.dtype
    assert got.is_contiguous()
    assert relative_error(got, run_reference(arguments)) < TOLERANCE[case.dtype]
    padded = [row for row, length in enumerate(case.lengths) if length == 0]
    assert got[padded].count_nonzero() == 0
    assert torch.equal(got, sparse_mla_decode(**arguments))


def test_one_kv_head_of_sparse_decode_gives_the_same_result(device: str) -> None:
    """Latent and rotated key as the key, the latent alone as the value, for both of its implementations."""
    arguments = make(CASES[0], device)
    q = torch.cat([arguments["q_nope"], arguments["q_rope"]], dim=-1)
    cache = arguments["kv_cache"][:, None]
    names = ("indices", "counts", "last_slots", "sm_scale")
    common = {name: arguments[name] for name in names} | {"page_size": arguments["block_size"]}
    latent_dim = CASES[0].latent_dim
    by_gqa = sparse_decode(q, cache, cache[..., :latent_dim], **common)
    assert relative_error(sparse_mla_decode(**arguments), by_gqa.float()) < TOLERANCE[BF16]


@pytest.mark.parametrize("case", [case for case in CASES if case.kv_dtype == ROWS], ids=str)
def test_rows_of_float8_latents_are_read_as_what_they_hold(case: Case, device: str) -> None:
    if case.dtype == FP32 and device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    arguments = poisoned(make(case, device))
    got = sparse_mla_decode(**arguments)
    plain = read_latents(arguments["kv_cache"], case.latent_dim).to(case.dtype)
    assert relative_error(got, sparse_mla_decode(**{**arguments, "kv_cache": plain}).float()) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64])
def test_all_blocks_is_dense_attention(block_size: int, device: str) -> None:
    length = 90
    arguments = make(Case((length,), block_size, 8, 64, FP16, FP16, rope_dim=16, ratio=1.0), device)
    slots = arguments["indices"][0, 0].long()[:, None] * block_size + torch.arange(block_size, device=device)
    stored = arguments["kv_cache"][slots.flatten()[:length]].float()
    q = torch.cat([arguments["q_nope"], arguments["q_rope"]], dim=-1)[0].float()
    dense = (q @ stored.T * arguments["sm_scale"]).softmax(dim=-1) @ stored[:, :64]
    assert relative_error(sparse_mla_decode(**arguments), dense[None]) < TOLERANCE[FP16]


@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(0, 100), min_size=1, max_size=3),
    heads=st.integers(1, 40),
    block_size=st.sampled_from([1, 8, 16]),
    newest=st.integers(0, 15),
)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_selection(device: str, seed: int, lengths: list[int], heads: int, block_size: int, newest: int) -> None:
    """The newest slot anywhere in the cache: within a selected block, or in none of them."""
    arguments = poisoned(make(Case(tuple(lengths), block_size, heads, 64, FP16, FP16, rope_dim=16), device, seed))
    cache = arguments["kv_cache"]
    arguments["kv_cache"] = torch.where(cache.isnan(), 1.0, cache)
    slots = [(newest + 7 * row) % len(cache) for row in range(len(lengths))]
    arguments["last_slots"] = torch.tensor(slots, device=device)
    got = sparse_mla_decode(**arguments, usual_blocks=2)
    assert relative_error(got, run_reference(arguments)) < TOLERANCE[FP16]


def test_large_logits_do_not_overflow(device: str) -> None:
    arguments = make(SMALL, device)
    arguments["q_nope"] = arguments["q_nope"] * 100
    got = sparse_mla_decode(**arguments)
    assert got.isfinite().all()
    assert relative_error(got, run_reference(arguments)) < TOLERANCE[BF16]


@pytest.mark.parametrize(("usual_blocks", "narrow"), [(1, False), (3, True), (None, False)])
def test_counts_of_any_size_are_served(usual_blocks: int | None, narrow: bool, device: str) -> None:
    """Nothing, less than a tile, one tile, and more than the work was split for; two tiles of heads."""
    case = replace(SMALL, lengths=(80, 0, 5, 16), dtype=FP16, kv_dtype=FP16, ratio=1.0)
    arguments = poisoned(make(case, device))
    got = run_config(arguments, replace(SPLIT, narrow=narrow), usual_blocks)
    assert relative_error(got, run_reference(arguments)) < TOLERANCE[FP16]
    assert got[1].count_nonzero() == 0


def test_float32_is_exact_in_splits(device: str) -> None:
    if device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    arguments = poisoned(make(replace(SMALL, dtype=FP32, kv_dtype=FP32), device))
    assert relative_error(run_config(arguments, SPLIT), expect(arguments).float()) < TOLERANCE[FP32]


def test_batches_without_any_block_give_zeros(device: str) -> None:
    arguments = poisoned(make(SMALL, device))
    arguments["counts"] = torch.zeros_like(arguments["counts"])
    assert torch.equal(run_config(arguments, SPLIT), torch.zeros_like(arguments["q_nope"]))
    arguments["indices"] = arguments["indices"][:, :, :0].contiguous()
    assert torch.equal(sparse_mla_decode(**arguments), torch.zeros_like(arguments["q_nope"]))


def test_batches_of_no_rows(device: str) -> None:
    arguments = make(SMALL, device)
    for name in ("q_nope", "q_rope", "indices", "counts", "last_slots"):
        arguments[name] = arguments[name][:0]
    assert sparse_mla_decode(**arguments).shape == (0, 20, 64)


@pytest.mark.parametrize(
    ("heads", "block_size", "kibibytes", "tile"),
    [
        (128, 16, 227, (64, 32)),
        (128, 64, 227, (64, 64)),
        (40, 1, 227, (64, 32)),
        (32, 16, 227, (32, 32)),
        (20, 64, 227, (32, 64)),
        (16, 16, 227, (16, 32)),
        (8, 64, 227, (16, 64)),
        (128, 16, 163, (32, 32)),
        (128, 16, 99, (16, 32)),
        (128, 64, 99, (16, 64)),
        (128, 16, 48, (16, 64)),
    ],
)
def test_default_tiles_fit_the_heads_the_blocks_and_the_device(
    heads: int, block_size: int, kibibytes: int, tile: tuple[int, int]
) -> None:
    config = kernels.default_config(heads, block_size, Properties((9, 0), 132, kibibytes * 1024))
    assert (config.block_heads, config.block_tokens) == tile
    # What takes more on Blackwell is not for it.
    other = kernels.default_config(heads, block_size, Properties((10, 0), 148, kibibytes * 1024))
    assert (other.block_heads, other.block_tokens) == (min(tile[0], 32), tile[1])


@pytest.mark.parametrize("config", kernels.CONFIGS, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.gpu_only and case.heads >= 64], ids=str)
def test_every_default_on_the_gpu(case: Case, config: Config, device: str) -> None:
    arguments = poisoned(make(case, device))
    if config.shared_memory > properties(arguments["q_nope"].device).shared_memory:
        pytest.skip("more shared memory than this device has")
    if config.block_tokens < case.block_size:
        pytest.skip("for smaller blocks")
    got = run_config(arguments, config)
    assert relative_error(got, run_reference(arguments)) < TOLERANCE[case.dtype]
    assert torch.equal(got, run_config(arguments, config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 48}, "block_size must be one of 1, 2, 4, 8, 16, 32, 64, got 48"),
        ({"q_nope": torch.zeros(3, 20, 96).bfloat16()}, "of q_nope must be one of 64, 128, 256, 512, got 96"),
        ({"q_rope": torch.zeros(3, 20, 8).bfloat16()}, "of q_rope must be one of 16, 32, 64, got 8"),
        ({"q_rope": torch.zeros(3, 20, 16)}, "q_rope must have one of the dtypes torch.bfloat16, got torch.float32"),
        ({"kv_cache": torch.zeros(8, 80)}, "kv_cache must have one of the dtypes torch.bfloat16, torch.float8_e4m3fn"),
        (
            {"kv_cache": torch.zeros(8, 100).byte()},
            "kv_cache: the latent of float8 rows must have a dimension of 128, 256, 512",
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparse_mla_decode(**{**make(SMALL, "cpu"), **change})
