"""Skip-Softmax decode over latents: reference against a loop over blocks, Triton against the reference, and dense."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from anchor_runs import relative_error, row_slots
from skip_softmax_runs import FP16, FP32, INF, NAN, TOLERANCE, garbled_table, kept_keys, with_factor

from sglang_sparse_kernels.common.launch import Properties
from sglang_sparse_kernels.skip_softmax_mla_decode import reference, scratch_bytes, skip_softmax_mla_decode
from sglang_sparse_kernels.skip_softmax_mla_decode import triton as kernels
from sglang_sparse_kernels.skip_softmax_mla_decode.cases import CASES, Case, make
from sglang_sparse_kernels.sparse_mla_decode import sparse_mla_decode

PLAIN = Case((500,), 16, 20, 64, FP16, FP16, rope_dim=16, stripes=0.02)
BY_ROW = ("q_nope", "q_rope", "page_table", "n_pages", "last_slots", "threshold_scale_factor")


def counts(device: str = "cpu") -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


def poisoned(arguments: dict[str, Any]) -> torch.Tensor:
    q = arguments["q_nope"]
    return torch.full(q.shape, NAN, dtype=q.dtype, device=q.device)


def run_reference(arguments: dict[str, Any], stats: torch.Tensor | None = None) -> torch.Tensor:
    """The reference in float32, so that only the kernel under test rounds."""
    arguments = {**arguments, **{name: arguments[name].float() for name in ("q_nope", "q_rope")}}
    return reference.skip_softmax_mla_decode(reference.Inputs(**arguments), out=poisoned(arguments), stats=stats)


def run_triton(arguments: dict[str, Any], stats: torch.Tensor | None = None) -> torch.Tensor:
    return skip_softmax_mla_decode(**arguments, out=poisoned(arguments), stats=stats)


def run_config(arguments: dict[str, Any], config: kernels.Config, stats: torch.Tensor) -> torch.Tensor:
    return kernels.skip_softmax_mla_decode(
        reference.Inputs(**arguments), out=poisoned(arguments), stats=stats, config=config
    )


RUNS = pytest.mark.parametrize("run", [run_reference, run_triton])


def logits_of(arguments: dict[str, Any], row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[H, length]`` of one row and its latents ``[length, R]``, in float64."""
    stored = arguments["kv_cache"][row_slots(arguments, row, length)].double() * arguments["kv_scale"]
    query = torch.cat([arguments["q_nope"][row], arguments["q_rope"][row]], -1).double()
    return query @ stored.T * arguments["sm_scale"], stored[:, : arguments["q_nope"].shape[2]]


def assert_definition(arguments: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """The reference is what the loop gives, in groups of sixteen heads, with the counts of the loop."""
    stats, expected = counts(), [0, 0]
    got = run_reference(arguments, stats)
    for row, (length, factor) in enumerate(zip(lengths, arguments["threshold_scale_factor"].tolist(), strict=True)):
        assert length or not got[row].any()
        logits, latents = logits_of(arguments, row, length)
        for first in range(0, len(logits) if length else 0, 16):
            group = logits[first : first + 16]
            kept, skipped = kept_keys(group, factor)
            output = group[:, kept].softmax(-1) @ latents[kept]
            torch.testing.assert_close(got[row, first : first + 16].double(), output, rtol=1e-4, atol=1e-5)
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
    assert visited == 5 and abs(skipped - 7) <= (1 + 2e-4 * expected[0]) * (device == "cuda")
    assert got[torch.tensor(case.lengths) == 0].count_nonzero() == 0
    assert torch.equal(got, run_triton(arguments))


@pytest.mark.parametrize("seed", range(8))
def test_random_batches(seed: int, device: str) -> None:
    """Any lengths, thresholds, shapes, tiles and splits: the loop, the reference and the kernel agree."""
    rng = random.Random(seed)
    lengths = tuple(rng.choice([0, 1, 64, 65, 129, 192, 193, rng.randint(1, 600)]) for _ in range(3))
    heads, page = rng.choice([1, 8, 20, 33, 70]), rng.choice([1, 16, 32, 64])
    arguments = make(Case(lengths, page, heads, 64, FP32, FP32, rope_dim=rng.choice([16, 32])), "cpu", seed)
    arguments["threshold_scale_factor"] = torch.tensor([rng.choice([0.0, 0.5, 30.0, 100.0, 1e9]) for _ in lengths])
    assert_definition(arguments, lengths)
    if device == "cpu":
        stats, expected = counts(), counts()
        config = kernels.Config(rng.choice([16, 32, 64]), programs_per_processor=rng.choice([0, 2, 64]), narrow=False)
        got = run_config(arguments, config, stats)
        assert relative_error(got, run_reference(arguments, expected)) < TOLERANCE[FP32]
        assert torch.equal(stats, expected)


def test_what_is_skipped_depends_neither_on_tiles_nor_on_splits(device: str) -> None:
    """Nor on the batch, the width of the page table, what usual rows hold, or how many ranks share the heads."""
    arguments, stats = make(replace(PLAIN, lengths=(500, 0, 450), heads=48, stripes=0.01), device), counts(device)
    expected = run_triton(arguments, stats)
    once = stats.clone()
    assert 0 < once[1] < once[0]
    for heads, programs in ((16, 0), (32, 64), (64, 2)):
        again = counts(device)
        got = run_config(arguments, kernels.Config(heads, num_warps=4, programs_per_processor=programs), again)
        assert relative_error(got, expected) < TOLERANCE[FP16] and torch.equal(again, once)
    for part in (slice(0, 32), slice(32, 48)):
        rank = {**arguments, **{name: arguments[name][:, part] for name in ("q_nope", "q_rope")}}
        assert relative_error(skip_softmax_mla_decode(**rank, stats=stats), expected[:, part]) < TOLERANCE[FP16]
    for row in range(3):
        alone = arguments | {name: arguments[name][row : row + 1] for name in BY_ROW}
        wide = torch.nn.functional.pad(alone["page_table"], (0, 3000), value=2**31 - 1)
        for change in ({"usual_pages": 1}, {"page_table": wide}):
            got = skip_softmax_mla_decode(**{**alone, **change}, stats=stats)
            assert relative_error(got, expected[row : row + 1]) < TOLERANCE[FP16]
    assert torch.equal(stats, 4 * once)


@RUNS
@pytest.mark.parametrize(("heads", "factor"), [(8, 0.0), (20, -3.0), (16, NAN), (40, 1e-30)])
@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
def test_without_a_threshold_it_is_dense_attention(
    run: Any, page_size: int, heads: int, factor: float, device: str
) -> None:
    """The output is that of ``sparse_mla_decode`` over all pages."""
    case = replace(PLAIN, lengths=(300,), page_size=page_size, heads=heads, factor=factor)
    arguments, stats = make(case, device), counts(device)
    pages = arguments["page_table"][:, None, : int(arguments["n_pages"][0])].contiguous()
    names = ("q_nope", "q_rope", "kv_cache", "last_slots", "sm_scale", "kv_scale")
    given = {name: arguments[name] for name in names}
    dense = sparse_mla_decode(**given, indices=pages, counts=arguments["n_pages"][:, None], block_size=page_size)
    assert relative_error(run(arguments, stats), dense.float()) < TOLERANCE[FP16]
    groups = -(-heads // 16)
    assert stats.tolist() == [5 * groups * (factor > 0), 0]


@RUNS
def test_a_large_threshold_leaves_the_sink_and_local_blocks(run: Any, device: str) -> None:
    """One head is enough to keep a block for the sixteen of its group, and not for the others."""
    arguments, stats = with_factor(make(PLAIN, device), INF), counts(device)
    slots, cache = row_slots(arguments, 0, 500), arguments["kv_cache"]
    arguments["q_nope"].fill_(1.0)
    arguments["q_rope"].zero_()
    arguments["q_rope"][0, 18, 0] = 100.0
    cache[slots] = 0.0
    cache[slots[[0, 499]], :64] = 1.0
    got, near = run(arguments, stats), torch.cat([slots[:64], slots[384:]])
    logits, latents = logits_of(arguments, 0, 500)
    kept = torch.isin(slots, near)
    expected = logits[:, kept].softmax(-1) @ latents[kept]
    assert relative_error(got[0], expected.float()) < TOLERANCE[FP16]
    assert stats.tolist() == [16, 10]
    cache[slots[130], 64] = 100.0
    assert not torch.equal(run(arguments, stats)[0, 16:], got[0, 16:])
    assert torch.equal(run(arguments, stats)[0, :16], got[0, :16])
    assert stats.tolist() == [48, 10 + 2 * 9]


@RUNS
@pytest.mark.parametrize("broken", [NAN, INF])
@pytest.mark.parametrize("position", [3, 200, 499])
def test_broken_keys_show(run: Any, broken: float, position: int, device: str) -> None:
    """In the sink block, in the newest, and in one between: no head skips such a block, or hides it."""
    arguments, stats = with_factor(make(PLAIN, device), INF), counts(device)
    clean = counts(device)
    run(arguments, clean)
    arguments["kv_cache"][row_slots(arguments, 0, 500)[position], 64] = broken
    arguments["q_rope"][..., 0] = 1.0
    assert run(arguments, stats).isnan().all()
    assert stats[0] == 16 and 0 <= stats[1] < clean[1]


@RUNS
def test_keys_of_minus_infinity_have_no_weight(run: Any, device: str) -> None:
    arguments, stats = with_factor(make(PLAIN, device), INF), counts(device)
    arguments["q_rope"][:] = arguments["q_rope"].abs() + 0.1
    slots = row_slots(arguments, 0, 500)
    # The first and the newest blocks have no weight at all: nothing is skipped.
    arguments["kv_cache"][slots[:64], 64:] = arguments["kv_cache"][slots[300:], 64:] = -INF
    logits, latents = logits_of(arguments, 0, 500)
    assert relative_error(run(arguments, stats)[0], (logits.softmax(-1) @ latents).float()) < TOLERANCE[FP16]
    assert stats.tolist() == [16, 0]
    arguments["kv_cache"][slots, 64:] = -INF
    assert not run(arguments).any()


@RUNS
def test_strides_and_nothing_past_a_row_is_read(run: Any, device: str) -> None:
    """Slots behind the newest token are NaN in all cases; here page table entries behind it name no page."""
    arguments = make(CASES[0], device)
    expected = run(arguments)
    cache = arguments["kv_cache"]
    arguments["kv_cache"] = torch.cat([cache, cache], dim=1)[:, : cache.shape[1]]
    arguments["q_nope"] = arguments["q_nope"].transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(run({**arguments, "page_table": garbled_table(arguments)}), expected)


@pytest.mark.parametrize("usual", [None, 1, 7])
def test_what_is_allocated_is_in_scratch_bytes(usual: int | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, sizes, empty = make(CASES[0], device), [], torch.empty
    out, q, pages = poisoned(arguments), arguments["q_nope"], usual or arguments["page_table"].shape[1]
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: sizes.append(empty(*size, **kind)) or sizes[-1])
    skip_softmax_mla_decode(**arguments, out=out, usual_pages=usual)
    assert sum(x.nbytes for x in sizes) == scratch_bytes(4, 16, 128, pages, 16, q.dtype, q.device)
    no_rows: dict[str, Any] = {name: arguments[name][:0] for name in BY_ROW}
    assert skip_softmax_mla_decode(**{**arguments, **no_rows}).shape == (0, 16, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_nope": torch.zeros(1, 20, 96).half()}, "of q_nope must be one of 64, 128, 256, 512, got 96"),
        ({"kv_cache": torch.zeros(8, 80).byte()}, "kv_cache must have one of the dtypes torch.float16, torch.float8"),
        ({"page_size": 24}, "page_size must be a power of two"),
        ({"kv_scale": -1.0}, r"sm_scale \* k_scale must be positive"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        skip_softmax_mla_decode(**{**make(PLAIN, "cpu"), **change})


@pytest.mark.parametrize(
    ("heads", "kibibytes", "tile"),
    [(128, 227, 64), (40, 227, 64), (20, 227, 32), (8, 227, 16), (128, 163, 32), (128, 99, 16)],
)
def test_default_tiles_fit_the_heads_and_the_device(heads: int, kibibytes: int, tile: int) -> None:
    assert kernels.default_config(heads, Properties((9, 0), 132, kibibytes * 1024)).block_heads == tile
    # Tiles of 64 do not compile for Blackwell.
    assert kernels.default_config(heads, Properties((10, 0), 148, kibibytes * 1024)).block_heads == min(tile, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("config", kernels.CONFIGS, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.gpu_only and case.heads >= 64], ids=str)
def test_every_default_on_the_gpu(case: Case, config: kernels.Config, device: str) -> None:
    arguments, stats, expected = make(case, device), counts(device), counts(device)
    got = run_config(arguments, config, stats)
    assert relative_error(got, run_reference(arguments, expected)) < TOLERANCE[case.dtype]
    assert stats[0] == expected[0] and abs(stats[1] - expected[1]) <= 1 + 2e-4 * expected[0]


@pytest.mark.gpu
def test_replays_as_a_cuda_graph_with_other_lengths(device: str) -> None:
    arguments, graph = make(replace(PLAIN, lengths=(900, 0, 640)), device), torch.cuda.CUDAGraph()
    n_pages, stats, expected_stats = arguments["n_pages"].clone(), counts(device), counts(device)
    expected = run_triton(arguments, expected_stats)
    arguments["n_pages"].zero_()
    out = torch.full_like(expected, NAN)
    with torch.cuda.graph(graph):
        skip_softmax_mla_decode(**arguments, out=out, stats=stats)
    arguments["n_pages"].copy_(n_pages)
    graph.replay()
    assert torch.equal(out, expected) and torch.equal(stats, expected_stats)
