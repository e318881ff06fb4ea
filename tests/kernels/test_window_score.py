"""Window scores: reference against loops, Triton against the reference, and what the scores promise."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_runs import replay_with

from sglang_sparse_kernels.window_score import reference, scratch_bytes, window_score
from sglang_sparse_kernels.window_score import triton as kernels
from sglang_sparse_kernels.window_score.cases import BF16, CASES, FP8, FP16, FP32, Case, make

NAN, INF, MOST = float("nan"), float("inf"), torch.finfo(torch.float32).max
# What no kernel writes.
UNWRITTEN = -7.0

SMALL = Case((90, 0, 20, 1), 8, 2, 2, 64, FP16, FP16, window=8, kernel_size=7, sharpness=2.0, width=15)


def unwritten(arguments: dict[str, Any]) -> torch.Tensor:
    q, k_cache, table = (arguments[name] for name in ("q", "k_cache", "page_table"))
    shape = len(q), k_cache.shape[1], table.shape[1] * arguments["page_size"]
    return torch.full(shape, UNWRITTEN, device=q.device)


def run_reference(arguments: dict[str, Any]) -> torch.Tensor:
    return reference.window_score(**arguments, out=unwritten(arguments))


def run_kernels(arguments: dict[str, Any], **options: Any) -> torch.Tensor:
    run = kernels.window_score if options else window_score
    return run(**arguments, out=unwritten(arguments), **options)


def held(arguments: dict[str, Any], width: int) -> torch.Tensor:
    """The entries of the result that are a row's tokens."""
    return (torch.arange(width, device=arguments["q"].device) < arguments["lengths"][:, None])[:, None]


def poisoned(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same rows in a table that holds anything beyond them, as memory that was never written does."""
    table, size = arguments["page_table"], arguments["page_size"]
    used = torch.arange(table.shape[1], device=table.device) * size < arguments["lengths"][:, None]
    return {**arguments, "page_table": table.masked_fill(~used, 2**31 - 1)}


def assert_scores(got: torch.Tensor, arguments: dict[str, Any]) -> None:
    """Close to the reference, and unwritten where no token is."""
    expected, mask = run_reference(arguments), held(arguments, got.shape[2]).expand_as(got)
    torch.testing.assert_close(got[mask], expected[mask], rtol=1e-4, atol=1e-5)
    assert (got[~mask] == UNWRITTEN).all()


def naive(arguments: dict[str, Any], row: int, head: int, without: int = -1) -> list[float]:
    """Scores of one row and head in float64, query by query; the token ``without`` has no weight."""
    length, window = arguments["lengths"][row].item(), arguments["q"].shape[1]
    size, group = arguments["page_size"], arguments["q"].shape[2] // arguments["k_cache"].shape[1]
    slots = [arguments["page_table"][row, token // size].item() * size + token % size for token in range(length)]
    keys = arguments["k_cache"][slots, head].double().cpu()
    importance = torch.zeros(length, dtype=torch.float64)
    first = length - min(arguments["n_window"][row].item(), window, length)
    for position in range(first, length):
        for member in range(group):
            query = arguments["q"][row, window - length + position, head * group + member].double().cpu()
            logits = keys[: position + 1] @ query * arguments["sm_scale"] * arguments["k_scale"]
            logits[without : without + 1] = -INF
            importance[: position + 1] += logits.softmax(dim=0)
    half = arguments["kernel_size"] // 2
    pooled = [importance[max(0, token - half) : min(first, token + half + 1)].max().item() for token in range(first)]
    return pooled + [INF] * (length - first)


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_reference_is_the_attention_of_the_window_pooled(case: Case) -> None:
    arguments = make(case, "cpu")
    got = run_reference(poisoned(arguments))
    for row, length in enumerate(case.lengths):
        assert (got[row, :, length:] == -INF).all()
        for head in range(case.heads):
            assert got[row, head, :length].tolist() == pytest.approx(naive(arguments, row, head), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_the_reference(case: Case, device: str) -> None:
    if case.dtype == FP32 and device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    arguments = make(case, device)
    got = run_kernels(poisoned(arguments))
    assert_scores(got, arguments)
    assert torch.equal(got, run_kernels(poisoned(arguments)))


@pytest.mark.parametrize("tile_tokens", [16, 128])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_take_turns_in_scratch_that_holds_anything(
    tile_tokens: int, rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = make(SMALL, device)
    expected = run_kernels(arguments)
    empty, sizes = torch.empty, []

    def allocate(*shape: int, **options: Any) -> torch.Tensor:
        sizes.append(empty(*shape, **options).nbytes)
        return torch.full(shape, NAN, **options)

    monkeypatch.setattr(torch, "empty", allocate)
    one_row = scratch_bytes(1, 8, 4, 2, 120)
    got = run_kernels(arguments, config=kernels.Config(tile_tokens=tile_tokens), limit=rows * one_row)
    assert sum(sizes) == rows * one_row == kernels.scratch_bytes(4, 8, 4, 2, 120, limit=rows * one_row)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_row_has_the_same_bits_in_any_batch(device: str) -> None:
    case = Case((1100, 300, 2), 16, 1, 2, 64, FP16, FP16, window=12)
    arguments = make(case, device)
    together = run_kernels(arguments)
    per_row = {name: arguments[name] for name in ("q", "n_window", "page_table", "lengths")}
    for row, length in enumerate(case.lengths):
        alone = {**arguments, **{name: tensor[row : row + 1] for name, tensor in per_row.items()}}
        alone["page_table"] = alone["page_table"][:, : -(-length // 16)]
        got = run_kernels(alone)
        assert torch.equal(got[0, :, :length], together[row, :, :length])


@pytest.mark.parametrize("implementation", [run_reference, run_kernels])
def test_windows_of_fewer_queries(implementation: Any, device: str) -> None:
    """None, fewer than the row has tokens, and more than it has: then as many as it has."""
    arguments = make(replace(SMALL, lengths=(40, 40, 3), width=0), device)
    arguments["n_window"] = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    # Nothing that is not read may matter.
    arguments["q"][1, :5] = NAN
    got = implementation(arguments)
    assert (got[0, :, :40] == 0).all()
    for head in range(2):
        assert got[1, head, :40].tolist() == pytest.approx(naive(arguments, 1, head), rel=1e-4, abs=1e-6)
    assert (got[2, :, :3] == INF).all()


@pytest.mark.parametrize("implementation", [run_reference, run_kernels])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_broken_key_is_kept_and_hides_no_other(value: float, implementation: Any, device: str) -> None:
    arguments = make(replace(SMALL, lengths=(90, 20), width=0), device)
    slot = arguments["page_table"][0, 5] * 8 + 4  # token 44
    arguments["q"][0, :, :2, 3] = 1.0
    arguments["k_cache"][slot, 0, 3] = value
    got = implementation(arguments)
    expected = naive(arguments, 0, 0, without=44)
    assert (got[0, 0, 41:48] == MOST).all()
    assert got[0, 0, :41].tolist() + got[0, 0, 48:90].tolist() == pytest.approx(expected[:41] + expected[48:90], 1e-4)
    assert got[0, 1, :90].tolist() == pytest.approx(naive(arguments, 0, 1), rel=1e-4, abs=1e-6)
    # In the window it changes what its queries give to others, and nothing else.
    arguments["k_cache"][slot, 0, 3] = 0.0
    arguments["k_cache"][arguments["page_table"][0, 10] * 8 + 7, 0, 3] = value
    got = implementation(arguments)
    assert got[0, 0, :90].tolist() == pytest.approx(naive(arguments, 0, 0, without=87), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("implementation", [run_reference, run_kernels])
def test_a_broken_query_keeps_what_it_sees(implementation: Any, device: str) -> None:
    arguments = make(replace(SMALL, lengths=(90, 20), width=0), device)
    arguments["q"][0, 2, 1, 0] = NAN
    got = implementation(arguments)
    assert (got[0, 0, :82] == MOST).all() and (got[0, :, 82:90] == INF).all()
    assert got[0, 1, :82].max() < 32 and got[1, :, :12].max() < 32


def test_a_narrower_result_and_none(device: str) -> None:
    arguments = make(SMALL, device)
    expected = run_kernels(arguments)
    out = torch.full((4, 2, 91), UNWRITTEN, device=device)
    assert torch.equal(window_score(**arguments, out=out), expected[:, :, :91])
    none = {name: arguments[name][:0] for name in ("q", "n_window", "page_table", "lengths")}
    assert window_score(**{**arguments, **none}).shape == (0, 2, 120)


@given(
    case=st.builds(
        Case,
        lengths=st.lists(st.integers(0, 120), min_size=1, max_size=3).map(tuple),
        page_size=st.sampled_from([1, 2, 8, 64]),
        heads=st.just(2),
        group=st.integers(1, 9),
        dim=st.sampled_from([16, 64, 72]),
        dtype=st.just(BF16),
        kv_dtype=st.sampled_from([BF16, FP8]),
        window=st.integers(1, 33),
        kernel_size=st.sampled_from([1, 3, 63]),
    ),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape(device: str, case: Case, seed: int) -> None:
    arguments = make(case, device, seed)
    assert_scores(run_kernels(poisoned(arguments)), arguments)


def test_wrong_arguments_are_refused() -> None:
    arguments = make(replace(SMALL, dtype=FP32, kv_dtype=FP32), "cpu")
    q, keys = arguments["q"], arguments["k_cache"]
    for change, message in [
        ({"q": q[:, :0]}, "q must have at least one query"),
        ({"q": q[:, :, :3]}, "query heads must be a multiple of KV heads, got 3 and 2"),
        ({"q": torch.zeros(4, 8, 4, 257)}, "the last dimension of q must be 1 to 256, got 257"),
        ({"k_cache": keys.half()}, "k_cache must have one of the dtypes"),
        ({"page_size": 24}, "page_size must be a power of two"),
        ({"sm_scale": -1.0}, r"sm_scale \* k_scale must be positive"),
        ({"kernel_size": 62}, "kernel_size must be odd and at least 1, got 62"),
        ({"out": torch.zeros(4, 2, 121)}, "out must have at most the 120 tokens of page_table, got 121"),
    ]:
        with pytest.raises(ValueError, match=message):
            window_score(**{**arguments, **change})


@pytest.mark.gpu
def test_replays_as_a_cuda_graph_with_other_lengths(device: str) -> None:
    case = Case((3000, 64, 0, 1), 16, 2, 4, 128, BF16, BF16, width=200)
    arguments = make(case, device)
    out = run_kernels(arguments)
    other = make(replace(case, lengths=(17, 0, 2000, 983)), device)
    replay_with(window_score, arguments, other, out, UNWRITTEN)
    assert_scores(out, other)
