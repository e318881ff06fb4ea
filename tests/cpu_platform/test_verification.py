"""Tests of verifications of drafts on the CPU platform: noise, slots and attention equal SGLang's own."""

import importlib.util
import random

import pytest
import torch
import triton
from sglang.kernels.ops.sampling import murmur_hash
from sglang_cpu_platform import attention, patches

SEEDS = [0, 1, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 3, 2**62, 2**63 - 1, -1, -(2**40), -(2**63)]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform stays inactive next to CUDA")


def murmur3(blocks: list[int]) -> int:
    """MurmurHash3, x86, 32 bits, of four-byte blocks with seed 0; from its reference, in plain integers."""
    bits, found = 2**32 - 1, 0

    def rotated(value: int, by: int) -> int:
        return (value << by | value >> 32 - by) & bits

    for block in blocks:
        mixed = rotated((block & bits) * 0xCC9E2D51 & bits, 15) * 0x1B873593 & bits
        found = (rotated(found ^ mixed, 13) * 5 + 0xE6546B64) & bits
    found ^= 4 * len(blocks)
    found = (found ^ found >> 16) * 0x85EBCA6B & bits
    found = (found ^ found >> 13) * 0xC2B2AE35 & bits
    return found ^ found >> 16


@pytest.fixture(scope="module")
def noise() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seeds, positions and columns at the ends of their ranges and between, and what is returned for them."""
    rng = random.Random(3)
    seeds = torch.tensor([*SEEDS, *(rng.randrange(-(2**63), 2**63) for _ in range(50))])
    positions = torch.tensor([rng.choice([0, 1, 40960, 2**20, 2**31 - 1, rng.randrange(10**6)]) for _ in seeds])
    columns = torch.tensor([0, 1, 31, 4095, 151_935, *range(2000, 2100)])
    return seeds, positions, columns, patches.hash_noise(seeds, positions, columns)


def test_noise_is_murmur3(noise) -> None:
    seeds, positions, columns, found = noise
    assert found.shape == (len(seeds), len(columns)) and found.min() >= 0 and found.max() < 2**32
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        expected = [murmur3([seed, seed >> 32, position, column]) for column in columns.tolist()]
        assert found[row].tolist() == expected


def test_noise_is_that_of_sglangs_kernel(noise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = importlib.util.spec_from_file_location("interpreted_murmur_hash", murmur_hash.__file__)
    assert spec is not None and spec.loader is not None
    interpreted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(interpreted)
    seeds, positions, columns, found = noise
    hashed = torch.empty(len(seeds), len(columns), dtype=torch.uint32)
    grid = (len(seeds), triton.cdiv(len(columns), 64))
    arguments = (seeds.to(torch.uint64), positions, columns, hashed, *hashed.shape)
    interpreted.murmur_hash32_kernel[grid](*arguments, BLOCK_SIZE=64)
    assert hashed.long().tolist() == found.tolist()


def test_noise_of_a_seed_of_either_type_is_the_same(noise) -> None:
    seeds, positions, columns, found = noise
    assert torch.equal(patches.hash_noise(seeds.to(torch.uint64), positions.int(), columns.int()), found)


def test_slots_are_written_to_their_rows_and_nowhere_else() -> None:
    table = torch.full((4, 12), -1, dtype=torch.int32)
    rows, starts, ends = torch.tensor([3, 1, 2]), torch.tensor([4, 0, 5]), torch.tensor([8, 2, 5])
    patches.assign_slots(rows, table, starts, ends, torch.arange(100, 106), 3)
    expected = torch.full((4, 12), -1, dtype=torch.int32)
    expected[3, 4:8], expected[1, :2] = torch.arange(100, 104).int(), torch.tensor([104, 105]).int()
    assert torch.equal(table, expected)


@pytest.mark.parametrize(("kv_heads", "key_dim", "value_dim"), [(2, 64, 64), (1, 576, 512)])
def test_a_verification_attends_as_single_steps_do(kv_heads: int, key_dim: int, value_dim: int) -> None:
    """Of rows of unequal lengths, which are without the tokens that are verified."""
    torch.manual_seed(0)
    lengths, width, places = torch.tensor([700, 33, 1]), 5, torch.tensor([2, 0, 1])
    keys = torch.randn(3 * 720, kv_heads, key_dim)
    cache = (keys, keys[..., :value_dim], torch.randperm(3 * 720).view(3, 720))
    options = {"scaling": key_dim**-0.5, "enable_gqa": True, "causal": True, "sliding_window_size": None}
    query = torch.randn(3 * width, 8, key_dim)

    def stock(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("SGLang's own needs lengths of an extend pass")

    found = attention.extend(
        stock, None, query, torch.empty(3 * width, 8, value_dim), *cache, places, lengths, None, None, None, **options
    ).view(3, width, 8, value_dim)
    for step in range(width):
        own = query.view(3, width, 8, key_dim)[:, step]
        ones = torch.ones_like(lengths)
        steps = (places, lengths + step + 1, lengths + step, ones, None)
        single = attention.extend(stock, None, own, torch.empty(3, 8, value_dim), *cache, *steps, **options)
        torch.testing.assert_close(found[:, step], single, rtol=0.0, atol=1e-5)
