"""Skip-Softmax decode: reference against a loop over blocks, Triton against the reference, both against dense."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from anchor_runs import relative_error, row_slots
from skip_softmax_runs import FP16, FP32, INF, NAN, TOLERANCE, garbled_table, kept_keys, with_factor

from sglang_sparse_kernels.skip_softmax_decode import reference, skip_softmax_decode
from sglang_sparse_kernels.skip_softmax_decode import triton as kernels
from sglang_sparse_kernels.skip_softmax_decode.cases import CASES, Case, make

SMALL = [case for case in CASES if not case.gpu_only]
PLAIN = Case((500,), 16, 2, 2, 64, FP16, FP16, stripes=0.02)
BY_ROW = ("q", "page_table", "n_pages", "last_slots", "threshold_scale_factor")
# Programs aimed for: from no split to one for each block.
PROGRAMS = (0, 1, 2, 64)


def counts(device: str = "cpu") -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


def poisoned(arguments: dict[str, Any]) -> torch.Tensor:
    q = arguments["q"]
    return torch.full((*q.shape[:2], arguments["v_cache"].shape[2]), NAN, dtype=q.dtype, device=q.device)


def run_reference(arguments: dict[str, Any], stats: torch.Tensor | None = None) -> torch.Tensor:
    """The reference in float32, so that only the kernel under test rounds."""
    arguments = {**arguments, "q": arguments["q"].float()}
    return reference.skip_softmax_decode(reference.Inputs(**arguments), out=poisoned(arguments), stats=stats)


def run_triton(arguments: dict[str, Any], stats: torch.Tensor | None = None) -> torch.Tensor:
    return skip_softmax_decode(**arguments, out=poisoned(arguments), stats=stats)


def run_split(arguments: dict[str, Any], programs: int, narrow: bool, stats: torch.Tensor) -> torch.Tensor:
    config = kernels.Config(programs_per_processor=programs, narrow=narrow)
    return kernels.skip_softmax_decode(
        reference.Inputs(**arguments), out=poisoned(arguments), stats=stats, config=config
    )


RUNS = pytest.mark.parametrize("run", [run_reference, run_triton])


def tokens_of(arguments: dict[str, Any], row: int, length: int) -> list[torch.Tensor]:
    """Keys and values ``[length, Hkv, d]`` in float64."""
    slots = row_slots(arguments, row, length)
    return [arguments[f"{name}_cache"][slots].double() * arguments[f"{name}_scale"] for name in "kv"]


def dense(arguments: dict[str, Any], length: int) -> torch.Tensor:
    """Attention of one row to all keys by torch, in float64."""
    parts = (arguments["q"][0][None].double(), *tokens_of(arguments, 0, length))
    query, keys, values = (part.transpose(0, 1) for part in parts)
    scale, attention = arguments["sm_scale"], torch.nn.functional.scaled_dot_product_attention
    return attention(query, keys, values, scale=scale, enable_gqa=True).transpose(0, 1)


def assert_definition(arguments: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """The reference is what the loop gives, head by head, with the counts of the loop."""
    stats, expected = counts(), [0, 0]
    got = run_reference(arguments, stats)
    for row, (length, factor) in enumerate(zip(lengths, arguments["threshold_scale_factor"].tolist(), strict=True)):
        keys, values = tokens_of(arguments, row, length)
        queries, outputs = (x[row].double().unflatten(0, (keys.shape[1], -1)) for x in (arguments["q"], got))
        assert length or not outputs.any()
        for head in range(keys.shape[1] if length else 0):
            logits = queries[head] @ keys[:, head].T * arguments["sm_scale"]
            kept, skipped = kept_keys(logits, factor)
            output = logits[:, kept].softmax(-1) @ values[kept, head]
            torch.testing.assert_close(outputs[head], output, rtol=1e-4, atol=1e-5)
            if factor > 0:
                expected = [expected[0] + math.ceil(length / 64), expected[1] + skipped]
    assert stats.tolist() == expected


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_the_reference_and_that_the_definition(case: Case, device: str) -> None:
    if not case.gpu_only:
        assert_definition(make(case, "cpu"), case.lengths)
    if case.dtype == FP32 and device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    arguments = make(case, device)
    stats, expected = torch.tensor([5, 7], device=device), counts(device)
    got = run_triton(arguments, stats)
    assert relative_error(got, run_reference(arguments, expected)) < TOLERANCE[case.dtype]
    assert 0.05 * expected[0] < expected[1] < 0.95 * expected[0]
    visited, skipped = (stats - expected).tolist()
    # On a GPU, sums in another order may move a block across the threshold.
    assert visited == 5 and abs(skipped - 7) <= 2e-4 * expected[0] * (device == "cuda")
    assert got[torch.tensor(case.lengths) == 0].count_nonzero() == 0
    assert torch.equal(got, run_triton(arguments))


@pytest.mark.parametrize("seed", range(10))
def test_random_batches(seed: int, device: str) -> None:
    """Any lengths, thresholds, shapes and splits: the loop, the reference and the kernel agree."""
    rng = random.Random(seed)
    lengths = tuple(rng.choice([0, 1, 64, 65, 128, 129, 192, 193, rng.randint(1, 600)]) for _ in range(3))
    heads, group, page = rng.choice([1, 2]), rng.choice([1, 2, 3, 20]), rng.choice([1, 4, 16, 64])
    dim, v_dim = rng.choice([16, 40, 64]), rng.choice([16, 24, 32])
    arguments = make(Case(lengths, page, heads, group, dim, FP32, FP32, v_dim=v_dim), "cpu", seed)
    arguments["threshold_scale_factor"] = torch.tensor([rng.choice([0.0, 0.5, 30.0, 100.0, 1e9]) for _ in lengths])
    assert_definition(arguments, lengths)
    if device == "cpu":
        stats, expected = counts(), counts()
        got = run_split(arguments, rng.choice(PROGRAMS), rng.random() < 0.5, stats)
        assert relative_error(got, run_reference(arguments, expected)) < TOLERANCE[FP32]
        assert torch.equal(stats, expected)


def test_what_is_skipped_does_not_depend_on_the_splits(device: str) -> None:
    """Nor on the batch, the width of the page table, or what usual rows hold."""
    arguments, stats = make(replace(PLAIN, lengths=(500, 300, 0, 450), stripes=0.01), device), counts(device)
    expected = run_triton(arguments, stats)
    once = stats.clone()
    for programs in PROGRAMS:
        got = run_split(arguments, programs, programs == 1, again := counts(device))
        assert relative_error(got, expected) < TOLERANCE[FP16] and torch.equal(again, once)
    for row in range(4):
        alone = arguments | {name: arguments[name][row : row + 1] for name in BY_ROW}
        wide = torch.nn.functional.pad(alone["page_table"], (0, 3000), value=2**31 - 1)
        for change in ({}, {"usual_pages": 1}, {"page_table": wide}):
            got = skip_softmax_decode(**{**alone, **change}, stats=stats)
            assert relative_error(got, expected[row : row + 1]) < TOLERANCE[FP16]
    assert torch.equal(stats, 4 * once) and stats[1] > 0


@RUNS
@pytest.mark.parametrize(("group", "factor"), [(1, 0.0), (2, -3.0), (4, NAN), (8, 1e-30)])
@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64])
def test_without_a_threshold_it_is_dense_attention(
    run: Any, page_size: int, group: int, factor: float, device: str
) -> None:
    arguments, stats = make(Case((300,), page_size, 2, group, 64, FP16, FP16, factor=factor), device), counts(device)
    assert relative_error(run(arguments, stats), dense(arguments, 300)) < TOLERANCE[FP16]
    assert stats.tolist() == [10 * (factor > 0), 0]


@RUNS
def test_a_large_threshold_leaves_the_sink_and_local_blocks(run: Any, device: str) -> None:
    """These blocks hold the largest logits. Values of others are not read; one query head is enough to keep a block."""
    arguments, stats = with_factor(make(PLAIN, device), INF), counts(device)
    slots, q = row_slots(arguments, 0, 500), arguments["q"][0]
    arguments["k_cache"][slots] = 0.0
    arguments["k_cache"][slots[[0, 499]]] = q[::2] + q[1::2]
    arguments["v_cache"][slots[64:384]] = NAN
    got = run(arguments, stats)
    near = torch.cat([slots[:64], slots[384:]])[None].int()
    assert relative_error(got, dense({**arguments, "page_table": near, "page_size": 1}, 180)) < TOLERANCE[FP16]
    assert stats.tolist() == [16, 10]
    arguments["k_cache"][slots[130], 1] = 10 * q[3]
    assert run(arguments, stats)[0].isnan().any(-1).tolist() == [False, False, True, True]
    assert stats.tolist() == [32, 19]
    # All logits are equal, which does not skip: the threshold is at most one.
    q.zero_()
    assert run(arguments, stats).isnan().all() and stats.tolist() == [48, 19]


@RUNS
@pytest.mark.parametrize("broken", [NAN, INF])
@pytest.mark.parametrize("position", [3, 200, 499])
def test_broken_keys_show_and_leave_no_row_empty(run: Any, broken: float, position: int, device: str) -> None:
    """In the sink block, in the newest, and in one between; infinite for one query, not a number for another."""
    arguments, clean, stats = with_factor(make(PLAIN, device), INF), counts(device), counts(device)
    arguments["q"][..., 0] = torch.tensor([1.0, 0.0, 1.0, 1.0], device=device)
    expected = run(arguments, clean)
    arguments["k_cache"][row_slots(arguments, 0, 500)[position], 0, 0] = broken
    got = run(arguments, stats)
    assert got[0, :2].isnan().all() and torch.equal(got[0, 2:], expected[0, 2:])
    assert stats[0] == 16 and 0 < stats[1] < clean[1]


@RUNS
def test_keys_of_minus_infinity_have_no_weight(run: Any, device: str) -> None:
    arguments = with_factor(make(PLAIN, device), INF)
    arguments["q"][:] = arguments["q"].abs() + 0.1
    slots = row_slots(arguments, 0, 500)
    # The first and the newest blocks have no weight at all: nothing is skipped.
    arguments["k_cache"][slots[:64]] = arguments["k_cache"][slots[300:]] = -INF
    assert relative_error(run(arguments), dense(arguments, 500)) < TOLERANCE[FP16]
    arguments["k_cache"][slots] = -INF
    assert not run(arguments).any()


@RUNS
def test_strides_and_nothing_past_a_row_is_read(run: Any, device: str) -> None:
    """Slots behind the newest token are NaN in all cases; here page table entries behind it name no page."""
    arguments = make(SMALL[0], device)
    expected = run(arguments)
    for name in ("q", "k_cache", "v_cache"):
        arguments[name] = torch.cat([arguments[name], arguments[name]], dim=1)[:, : arguments[name].shape[1]]
    assert torch.equal(run({**arguments, "page_table": garbled_table(arguments)}), expected)


def test_a_batch_without_rows(device: str) -> None:
    arguments = make(SMALL[0], device)
    no_rows: dict[str, Any] = {name: arguments[name][:0] for name in BY_ROW}
    assert skip_softmax_decode(**{**arguments, **no_rows}).shape == (0, 8, 128)


def test_wrong_arguments_are_refused() -> None:
    arguments = make(PLAIN, "cpu")
    q = arguments["q"]
    for change, message in [
        ({"q": q[:, :3]}, "query heads must be a multiple of KV heads, got 3 and 2"),
        ({"k_cache": arguments["k_cache"].float()}, "k_cache must have one of the dtypes"),
        ({"page_size": 24}, "page_size must be a power of two"),
        ({"k_scale": -1.0}, r"sm_scale \* k_scale must be positive"),
    ]:
        with pytest.raises(ValueError, match=message):
            skip_softmax_decode(**{"out": None, **arguments, **change, "q": change.get("q", q)})


@pytest.mark.gpu
def test_replays_as_a_cuda_graph_with_other_lengths(device: str) -> None:
    arguments, graph = make(replace(PLAIN, lengths=(900, 0, 640)), device), torch.cuda.CUDAGraph()
    n_pages, stats, expected_stats = arguments["n_pages"].clone(), counts(device), counts(device)
    expected = run_triton(arguments, expected_stats)
    arguments["n_pages"].zero_()
    out = torch.full_like(expected, NAN)
    with torch.cuda.graph(graph):
        skip_softmax_decode(**arguments, out=out, stats=stats)
    arguments["n_pages"].copy_(n_pages)
    graph.replay()
    assert torch.equal(out, expected) and torch.equal(stats, expected_stats)
