"""Skip-Softmax: reference against a flash-attention loop, Triton against the reference, both against dense."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from anchor_runs import dense, garbled, relative_error, row_slots
from skip_softmax_runs import (
    FP16,
    FP32,
    INF,
    NAN,
    PLAIN,
    TOLERANCE,
    counts,
    run_reference,
    run_triton,
    with_factor,
)

from sglang_sparse_kernels.skip_softmax_prefill import Span, make_plan, reference, skip_softmax_prefill
from sglang_sparse_kernels.skip_softmax_prefill import triton as kernels
from sglang_sparse_kernels.skip_softmax_prefill.cases import CASES, Case, make

SMALL = [case for case in CASES if not case.gpu_only]
# Sums in another order may move a block across the threshold; so many of all blocks, at most.
BORDERLINE = 2e-4


def naive_tile(
    logits: torch.Tensor, values: torch.Tensor, first: int, log_lambda: float, size: int
) -> tuple[torch.Tensor, list[int]]:
    """One tile and query head in float64, block by block as a kernel would; its output and the skipped blocks.

    ``logits`` ``[n, T]`` are of the queries from position ``first`` on.
    """
    n, length = logits.shape
    maximum, total = torch.full((n,), -INF).double(), torch.zeros(n).double()
    output, skipped = torch.zeros(n, values.shape[1]).double(), []
    blocks = math.ceil(length / size)
    for block in [0, *range(blocks - 1, 0, -1)]:
        keys = torch.arange(block * size, min(length, (block + 1) * size))
        seen = logits[:, keys].masked_fill(keys > first + torch.arange(n)[:, None], -INF)
        largest = seen.amax(1)
        if all(own - running < log_lambda for own, running in zip(largest.tolist(), maximum.tolist(), strict=True)):
            skipped.append(block)
            continue
        new = torch.maximum(maximum, largest)
        decay, weights = (maximum - new).exp(), (seen - new[:, None]).exp()
        maximum, total = new, total * decay + weights.sum(1)
        output = output * decay[:, None] + weights @ values[keys]
    return output / total[:, None], skipped


def assert_definition(arguments: dict[str, Any], case: Case, factors: list[float]) -> None:
    """The reference is what the loop gives, tile by tile and head by head, with the counts of the loop."""
    stats, expected_stats = counts(), [0, 0, 0, 0]
    got = run_reference(arguments, stats)
    for tile in arguments["plan"].tiles:
        end, size = tile.first_position + tile.num_queries, case.block_keys
        slots = row_slots(arguments, tile.row, end)
        window = slice(tile.first_query, tile.first_query + tile.num_queries)
        context = (tile.first_position // case.tile_queries + 1) * case.tile_queries
        ratio = min(1.0, factors[tile.row] / context) if tile.context else 0.0
        log_lambda = math.log(ratio) if ratio else -INF
        positions = range(tile.first_position, end)
        for head in range(case.heads * case.group):
            keys = arguments["k_cache"][slots, head // case.group].double() * case.k_scale
            values = arguments["v_cache"][slots, head // case.group].double() * case.v_scale
            logits = arguments["q"][window, head].double() @ keys.T * arguments["sm_scale"]
            output, skipped = naive_tile(logits, values, tile.first_position, log_lambda, size)
            torch.testing.assert_close(got[window, head].double(), output, rtol=1e-4, atol=1e-5)
            causal = sum(position + 1 for position in positions)
            lost = sum(min(size, max(0, position + 1 - block * size)) for position in positions for block in skipped)
            visited = math.ceil(end / size) if tile.context else 0
            for i, count in enumerate((causal - lost, causal, len(skipped), visited)):
                expected_stats[i] += count
    assert stats.tolist() == expected_stats


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_reference_is_the_definition(case: Case) -> None:
    assert_definition(make(case, "cpu"), case, [case.factor] * len(case.prefixes))


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_cases_skip_some_blocks_and_keep_some(case: Case) -> None:
    stats = counts()
    run_reference(make(case, "cpu"), stats)
    assert 0.05 * stats[3] < stats[2] < 0.95 * stats[3]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_the_reference(case: Case, device: str) -> None:
    if case.dtype == FP32 and device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    arguments = make(case, device)
    stats, expected = torch.tensor([5, 7, 9, 11], device=device), counts(device)
    got = run_triton(arguments, stats)
    assert got.dtype == case.dtype
    assert relative_error(got, run_reference(arguments, expected)) < TOLERANCE[case.dtype]
    differences = (stats - expected).tolist()
    assert differences[1] == 7 and differences[3] == 11
    if device == "cpu":
        assert differences == [5, 7, 9, 11]
    assert abs(differences[2] - 9) <= BORDERLINE * expected[3]


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int, device: str) -> None:
    """Any lengths, spans, thresholds and sizes: the loop, the reference and the kernel agree."""
    rng = random.Random(seed)
    rows = rng.randint(1, 3)
    prefixes, extends = ([rng.randint(low, 60) for _ in range(rows)] for low in (0, 1))
    heads, group, page = rng.choice([1, 2]), rng.choice([1, 2, 3]), rng.choice([1, 4, 16, 64])
    sizes = {"tile_queries": rng.choice([16, 32]), "block_keys": rng.choice([16, 32])}
    dims = {"dim": rng.choice([16, 40, 64]), "v_dim": rng.choice([16, 24, 32])}
    shape: dict[str, Any] = {**dims, **sizes, "dtype": FP32, "kv_dtype": FP32}
    case = Case(tuple(prefixes), tuple(extends), page, heads, group, **shape)
    arguments = make(case, "cpu", seed)
    factors = [rng.choice([0.0, 0.5, 8.0, 30.0, 1e9]) for _ in range(rows)]
    spans = []
    for row in range(rows):
        end = prefixes[row] + extends[row]
        cuts = sorted({prefixes[row], end, *(rng.randint(prefixes[row], end) for _ in range(2))})
        spans += [Span(row, a, b, rng.random() < 0.8) for a, b in itertools.pairwise(cuts)]
    arguments["plan"] = make_plan(spans, rows, "cpu", **sizes)
    arguments = with_factor(arguments, *factors)
    assert_definition(arguments, case, factors)
    if device == "cpu":
        stats, expected = counts(), counts()
        got = run_triton(arguments, stats)
        assert relative_error(got, run_reference(arguments, expected)) < TOLERANCE[FP32]
        assert torch.equal(stats, expected)


@pytest.mark.parametrize(("case", "factor"), [*((case, 0.0) for case in SMALL), (PLAIN, -3.0), (PLAIN, NAN)], ids=str)
def test_without_a_threshold_it_is_dense_attention(case: Case, factor: float, device: str) -> None:
    if device == "cuda" and case.dtype == FP32:
        pytest.skip("float32 caches are for the CPU")
    arguments, stats = with_factor(make(case, device), factor), counts(device)
    got = run_triton(arguments, stats)
    expected = dense(arguments, case)
    assert relative_error(got, expected) < TOLERANCE[case.dtype]
    assert relative_error(run_reference(arguments), expected) < 1e-5
    assert stats[0] == stats[1] > 0 and stats[2] == 0 < stats[3]


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_page_table_entries_past_a_row_are_not_read(run: Any, device: str) -> None:
    arguments = make(SMALL[1], device)
    assert torch.equal(run(garbled(arguments, SMALL[1])), run(arguments))


def test_results_are_equal_from_run_to_run_and_for_other_launch_parameters(device: str) -> None:
    arguments = make(PLAIN, device)
    expected = run_triton(arguments)
    assert torch.equal(run_triton(arguments), expected)
    out = torch.empty_like(expected)
    kernels.skip_softmax_prefill(reference.Inputs(**arguments), out, config=kernels.Config(num_warps=8, num_stages=1))
    assert relative_error(out, expected) < TOLERANCE[FP16]


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_a_pass_without_queries_is_empty(run: Any, device: str) -> None:
    assert run(make(Case((20, 0), (0, 0), 16, 1, 2, 64, FP16, FP16), device)).shape == (0, 2, 64)


def test_wrong_arguments_are_refused() -> None:
    arguments = make(PLAIN, "cpu")
    q, k_cache = arguments["q"], arguments["k_cache"]
    for change, message in [
        ({"q": q[1:]}, "the plan has 90 query tokens in 1 rows, got 89 in q"),
        ({"k_cache": k_cache.float()}, "k_cache must have one of the dtypes"),
        ({"page_table": arguments["page_table"][:, :3]}, "page_table must hold 90 tokens a row, got 3 pages of 16"),
        ({"page_size": 24}, "page_size must be a power of two"),
        ({"sm_scale": 0.0}, r"sm_scale \* k_scale must be positive"),
    ]:
        with pytest.raises(ValueError, match=message):
            skip_softmax_prefill(**{**arguments, **change})
    for given, message in [
        (([Span(0, 0, 5)], 1, "cpu", 24), "tile_queries must be a power of two from 16 to 128, got 24"),
        (([Span(0, 0, 5)], 1, "cpu", 16, 8), "block_keys must be a power of two from 16 to 128, got 8"),
        (([Span(1, 0, 5)], 1, "cpu"), "spans must have tokens, of the rows 0 to 0, got"),
        (([Span(0, 5, 5)], 1, "cpu"), "spans must have tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_plan(*given)
