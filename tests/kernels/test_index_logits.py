"""Index logits: reference against loops in float64, Triton against the reference, and the selection that follows."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_runs import replay_with

from sglang_sparse_kernels.index_keys import PAGE_SIZE
from sglang_sparse_kernels.index_keys.reference import parts
from sglang_sparse_kernels.index_logits import index_logits, reference
from sglang_sparse_kernels.index_logits import triton as kernels
from sglang_sparse_kernels.index_logits.cases import CASES, Case, chunk, decode, make
from sglang_sparse_kernels.index_logits.triton import Config
from sglang_sparse_kernels.page_topk import page_topk

NAN = float("nan")
UNWRITTEN = -7.0
# Relative to the sum of all products' magnitudes. Tensor cores for FP8 may keep as few as 13 bits of a sum.
TOLERANCE = {"cpu": 1e-6, "cuda": 2**-12}
SMALL = Case((*decode(65, 0, 130), *chunk(2, 120, 130), *chunk(0, 61, 65)))
# One program for each tile, and one for everything; tiles of one page too.
VARIANTS = [
    Config(programs_per_processor=64),
    Config(programs_per_processor=1, queries=2, block_heads=16),
    Config(tile_tokens=64, queries=8),
]


def unwritten(arguments: dict[str, Any]) -> torch.Tensor:
    shape = (len(arguments["q"]), arguments["page_table"].shape[1] * PAGE_SIZE)
    return torch.full(shape, UNWRITTEN, device=arguments["q"].device)


def run_reference(arguments: dict[str, Any]) -> torch.Tensor:
    return reference.index_logits(**arguments, out=unwritten(arguments))


def held(arguments: dict[str, Any]) -> torch.Tensor:
    """The entries of the result that a query sees."""
    token = torch.arange(arguments["page_table"].shape[1] * PAGE_SIZE, device=arguments["q"].device)
    return token < arguments["lengths"][:, None]


def poisoned(arguments: dict[str, Any]) -> dict[str, Any]:
    """Anything in the table beyond a row's pages, and for the row of a query that sees nothing."""
    table, rows = arguments["page_table"], arguments["rows"].clone()
    rows[arguments["lengths"] == 0] = 2**31 - 1
    return {**arguments, "page_table": table.masked_fill(table < 0, 2**31 - 1), "rows": rows}


def naive(arguments: dict[str, Any], query: int) -> list[float]:
    """The logits of one query in float64, token by token."""
    keys, scales = parts(arguments["buffer"])
    q, weights = arguments["q"][query].double(), arguments["weights"][query].double()
    table = arguments["page_table"][arguments["rows"][query]].tolist()
    logits = []
    for token in range(arguments["lengths"][query]):
        page, place = table[token // 64], token % 64
        key = keys[page, place].view(torch.float8_e4m3fn).double()
        logits.append((weights @ (q @ key).relu()).item() * scales[page, place].item())
    return logits


def magnitudes(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same without signs, so that nothing cancels and no head is cut off."""
    buffer = arguments["buffer"].clone()
    parts(buffer)[0].bitwise_and_(0x7F)
    q = (arguments["q"].view(torch.uint8) & 0x7F).view(torch.float8_e4m3fn)
    return {**arguments, "q": q, "weights": arguments["weights"].abs(), "buffer": buffer}


def assert_logits(got: torch.Tensor, arguments: dict[str, Any]) -> None:
    """Close to the reference where a query sees a token, and unwritten elsewhere."""
    mask = held(arguments)
    magnitude = run_reference(magnitudes(arguments))[mask]
    error = (got[mask] - run_reference(arguments)[mask]).abs()
    assert (error <= TOLERANCE[got.device.type] * magnitude).all()
    assert (got[~mask] == UNWRITTEN).all()


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only and len(case.queries) < 20], ids=str)
def test_reference_is_the_definition(case: Case) -> None:
    arguments = make(case, "cpu")
    got = run_reference(poisoned(arguments))
    for query, (_, length) in enumerate(case.queries):
        expected = torch.tensor(naive(arguments, query)).float()
        torch.testing.assert_close(got[query, :length], expected, rtol=1e-5, atol=1e-7)
        assert (got[query, length:] == UNWRITTEN).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_the_reference(case: Case, device: str) -> None:
    arguments = make(case, device)
    got = index_logits(**poisoned(arguments), out=unwritten(arguments))
    assert_logits(got, arguments)
    assert torch.equal(got, index_logits(**poisoned(arguments), out=unwritten(arguments)))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_any_tiles_and_both_ways_to_multiply(config: Config, fp8: bool, device: str) -> None:
    if fp8 and device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("tensor cores without FP8")
    arguments = make(replace(SMALL, heads=33), device)
    got = kernels.index_logits(**poisoned(arguments), out=unwritten(arguments), config=config, fp8=fp8)
    assert_logits(got, arguments)


def test_every_byte_becomes_its_number(device: str) -> None:
    """All 256 values of float8_e4m3fn, in the key and in the query, without tensor cores for FP8."""
    every = torch.arange(256, dtype=torch.uint8, device=device)
    arguments = make(Case(decode(256), heads=16), device)
    keys, scales = parts(arguments["buffer"])
    pages = arguments["page_table"][0].long()
    for axis in range(2):
        keys.zero_()
        queries = 1 if axis else 256
        q = torch.zeros(queries, 16, 128, dtype=torch.uint8, device=device)
        q[:, 0, 3] = 0x38 if axis else every  # 1.0
        keys[pages, :, 3] = every.view(4, 64) if axis else 0x38
        scales[pages] = 1.0
        weights = torch.zeros(queries, 16, device=device)
        weights[:, 0] = 1.0
        lengths = torch.full((queries,), 256, dtype=torch.int32, device=device)
        changed = {"q": q.view(torch.float8_e4m3fn), "weights": weights, "lengths": lengths, "rows": lengths * 0}
        out = torch.zeros(queries, 256, device=device)
        got = kernels.index_logits(**{**arguments, **changed}, out=out, fp8=False)
        expected = every.view(torch.float8_e4m3fn).float().relu()
        along = got[0] if axis else got[:, 0]
        torch.testing.assert_close(along, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("heads", [16, 64])
def test_a_query_has_the_same_bits_in_decode_and_in_prefill(heads: int, device: str) -> None:
    arguments = make(Case((*chunk(0, 120, 136), *chunk(1, 0, 3)), heads=heads), device)
    expected = index_logits(**arguments, out=unwritten(arguments))
    # One alone as in decode, tiles that begin elsewhere, and too few queries to share keys.
    for queries in (slice(7, 8), slice(3, 14), slice(13, 19)):
        some = {name: arguments[name][queries] for name in ("q", "weights", "rows", "lengths")}
        assert torch.equal(
            index_logits(**{**arguments, **some}, out=unwritten({**arguments, **some})), expected[queries]
        )
    # Alternating rows: each query of a tile by itself.
    order = torch.tensor([0, 16, 1, 17, 2, 18, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], device=device)
    mixed = {name: arguments[name][order] for name in ("q", "weights", "rows", "lengths")}
    assert torch.equal(index_logits(**{**arguments, **mixed}, out=unwritten(arguments)), expected[order])


@pytest.mark.parametrize("implementation", ["reference", "fp16", "fp8"])
def test_nan_is_passed_on(implementation: str, device: str) -> None:
    """Of a key, of a key's scale alone, of a query, and of a weight: to the logits that it enters, and to no other."""

    def run(arguments: dict[str, Any]) -> torch.Tensor:
        if implementation == "reference":
            return run_reference(arguments)
        return kernels.index_logits(**arguments, out=unwritten(arguments), fp8=implementation == "fp8")

    if implementation == "fp8" and (device == "cpu" or torch.cuda.get_device_capability() < (8, 9)):
        pytest.skip("no tensor cores for FP8, and the interpreter takes its NaN for a number")
    arguments = make(SMALL, device)
    clean = run(arguments)
    keys, scales = parts(arguments["buffer"])
    pages = arguments["page_table"].tolist()
    keys[pages[0][0], 60, 2] = 0xFF
    scales[pages[2][1], 3] = NAN
    arguments["q"].view(torch.uint8)[2, 1, 5] = 0x7F
    arguments["weights"][9, 4] = NAN
    row, token = arguments["rows"][:, None], torch.arange(clean.shape[1], device=device)
    expected = ((row == 0) & (token == 60)) | ((row == 2) & (token == 67))
    expected[[2, 9]] = True
    got = run(arguments)
    assert torch.equal(got.isnan(), expected & held(arguments))
    assert torch.equal(got[~expected], clean[~expected])


def test_without_queries_or_pages_and_in_a_narrow_result(device: str) -> None:
    arguments = make(SMALL, device)
    none = {name: arguments[name][:0] for name in ("q", "weights", "rows", "lengths")}
    assert index_logits(**{**arguments, **none}).shape == (0, 192)
    empty = {"page_table": arguments["page_table"][:, :0], "lengths": arguments["lengths"] * 0}
    assert index_logits(**{**arguments, **empty}).shape == (17, 0)
    narrow = index_logits(**arguments, out=unwritten(arguments)[:, :131].contiguous())
    assert torch.equal(narrow, index_logits(**arguments, out=unwritten(arguments))[:, :131])


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("k", [64, 4096])
def test_page_topk_selects_the_tokens_of_a_stable_sort(
    k: int, implementation: str, request: pytest.FixtureRequest
) -> None:
    """With one head, and a table of token slots that the queries of a row share; equal keys make ties."""
    device = request.getfixturevalue("device") if implementation == "triton" else "cpu"
    arguments = make(Case(((0, 5000), (0, 4096), (0, 4097), (0, 0), (0, 65)), heads=16), device)
    keys, scales = parts(arguments["buffer"])
    pages = arguments["page_table"][0].long()
    keys[pages[1:]] = keys[pages[:1]]
    scales[pages[1:]] = scales[pages[:1]]
    logits = index_logits(**arguments, out=torch.full((5, 5056), NAN, device=device))
    slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)).flatten().int()
    table = slots.expand(5, -1)
    assert table.stride() == (0, 1)
    wanted = torch.full((5,), k, dtype=torch.int32, device=device)
    indices, counts = page_topk(logits[:, None], table, arguments["lengths"], wanted, k)
    for query, length in enumerate(arguments["lengths"].tolist()):
        chosen = logits[query, :length].sort(descending=True, stable=True).indices[:k].sort().values
        assert counts[query, 0] == len(chosen) == min(k, length)
        assert torch.equal(indices[query, 0, : len(chosen)], slots[chosen])


def test_wrong_arguments_are_refused() -> None:
    arguments = make(SMALL, "cpu")
    q, weights = arguments["q"], arguments["weights"]
    for change, message in [
        ({"q": q.float()}, "q must have one of the dtypes torch.float8_e4m3fn"),
        ({"q": q[..., :64]}, "the last dimension of q must be 128, got 64"),
        ({"q": q[:, :0]}, "q must have 1 to 64 heads, got 0"),
        ({"q": q.expand(17, 16, 128).repeat(1, 5, 1)}, "q must have 1 to 64 heads, got 80"),
        ({"weights": weights.half()}, "weights must have one of the dtypes torch.float32"),
        ({"out": torch.zeros(17, 193)}, "out must have at most 192 columns, got 193"),
    ]:
        with pytest.raises(ValueError, match=message):
            index_logits(**{**arguments, **change})


@pytest.mark.gpu
def test_replays_as_a_cuda_graph_with_other_lengths(device: str) -> None:
    case = Case(decode(3000, 64, 0, 1), heads=64, width=64)
    arguments = make(case, device)
    out = index_logits(**arguments, out=unwritten(arguments))
    other = make(replace(case, queries=decode(17, 0, 2000, 983)), device)
    replay_with(index_logits, arguments, other, out, UNWRITTEN)
    assert_logits(out, other)
