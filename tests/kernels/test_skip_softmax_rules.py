"""Skip-Softmax: what each row and tile is promised, chunks, and keys, values and queries that are broken."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from anchor_runs import dense, relative_error, row_slots
from skip_softmax_runs import BF16, FP16, INF, NAN, PLAIN, TOLERANCE, run_reference, run_triton, with_factor

from sglang_sparse_kernels.skip_softmax_prefill import Span, make_plan
from sglang_sparse_kernels.skip_softmax_prefill.cases import Case, make


def add_faint_block(arguments: dict[str, Any], tile: slice) -> None:
    """Let the first head's queries of ``tile`` see the keys 32 to 47 with a logit of -3, all others with 0.

    What is skipped then does not depend on the numbers drawn, which are others on a GPU.
    """
    arguments["q"][:, :, 0] = arguments["k_cache"][:, :, 0] = 0.0
    arguments["q"][tile, 0] = 0.0
    arguments["q"][tile, 0, 0] = 1.0
    arguments["k_cache"][row_slots(arguments, 0, 48)[32:], 0, 0] = -3.0 / arguments["sm_scale"]


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_each_row_has_its_threshold_and_dense_spans_have_none(run: Any, device: str) -> None:
    case = Case((40, 40, 0), (30, 30, 90), 16, 1, 2, 64, FP16, FP16)
    arguments = with_factor(make(case, device), 1e9, 0.0, 1e9)
    spans = [Span(0, 40, 70), Span(1, 40, 70), Span(2, 0, 50), Span(2, 50, 90, sparse=False)]
    got = run({**arguments, "plan": make_plan(spans, 3, device, 16, 16)})
    expected = dense(arguments, case)
    for tokens, exact in (
        (slice(0, 30), False),
        (slice(30, 60), True),
        (slice(60, 110), False),
        (slice(110, 150), True),
    ):
        assert (relative_error(got[tokens], expected[tokens]) < TOLERANCE[FP16]) == exact


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_a_threshold_of_one_or_more_keeps_every_maximum(run: Any, device: str) -> None:
    """Values are one-hot blocks: the block of a query's largest logit has weight, and so has the first."""
    case = replace(PLAIN, extends=(96,), stripes=0.1)
    arguments = with_factor(make(case, device), 1e30)
    slots = row_slots(arguments, 0, 96)
    arguments["v_cache"][slots] = 0.0
    arguments["v_cache"][slots, 0, torch.arange(96, device=device) // 16] = 1.0
    got = run(arguments)
    logits = torch.einsum("qhd,kd->qhk", arguments["q"].float(), arguments["k_cache"][slots, 0].float())
    seen = torch.arange(96) <= torch.arange(96)[:, None]
    largest = logits.masked_fill(~seen.to(device)[:, None], -INF).argmax(-1) // 16
    assert (got.gather(2, largest[..., None]) > 0).all() and (got[..., 0] > 0).all()
    assert (got[..., :6] == 0).any()


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_equality_does_not_skip(run: Any, device: str) -> None:
    """All logits are equal, and the threshold is at most one."""
    arguments = with_factor(make(PLAIN, device), INF)
    arguments["q"].zero_()
    assert relative_error(run(arguments), dense(arguments, PLAIN)) < TOLERANCE[FP16]


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_chunks_of_whole_tiles_equal_one_piece(run: Any, device: str) -> None:
    arguments = make(Case((0,), (101,), 16, 1, 2, 64, BF16, BF16), device)
    whole = run(arguments)
    for chunks in ([16, 48, 37], [96, 5]):
        outs, first = [], 0
        for size in chunks:
            plan = make_plan([Span(0, first, first + size)], 1, device, 16, 16)
            outs.append(run({**arguments, "q": arguments["q"][first : first + size], "plan": plan}))
            first += size
        assert torch.equal(torch.cat(outs), whole)


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_a_tile_is_a_function_of_the_tokens_before_its_end(run: Any, device: str) -> None:
    """Not of how long the prompt is: the threshold goes by the position. And it does depend on the rest of the tile."""
    arguments = make(Case((0,), (112,), 16, 1, 2, 64, FP16, FP16), device)
    add_faint_block(arguments, slice(80, 96))
    # To the last queries it is the largest: a tile that has them reads it.
    arguments["q"][90:96, 0, 0] = -1.0
    whole = run(arguments)
    equal = []
    for length in (96, 90):
        plan = make_plan([Span(0, 0, length)], 1, device, 16, 16)
        short = run({**arguments, "q": arguments["q"][:length], "plan": plan})
        assert torch.equal(short[:80], whole[:80])
        equal.append(torch.equal(short[80:], whole[80:length]))
    assert equal == [True, False]


@pytest.mark.parametrize("run", [run_reference, run_triton])
@pytest.mark.parametrize("broken", [NAN, INF])
def test_broken_keys_show_and_leave_no_row_empty(run: Any, broken: float, device: str) -> None:
    """A key that breaks one query's logit shows in it, while the others of its tile keep all their blocks."""
    arguments = with_factor(make(PLAIN, device), 1e9)
    slots = row_slots(arguments, 0, 90)
    arguments["q"][:, :, 0] = 0.0
    arguments["q"][70, 0, 0] = 1.0
    clean = dense(with_factor(arguments, 0.0), PLAIN)
    arguments["k_cache"][slots[20], 0, 0] = broken
    if math.isinf(broken):
        # Zero times infinity is not a number for any query.
        arguments["q"][:, :, 0] = 2.0**-10
    got = run(arguments)
    affected = got.isnan().any(-1)
    expected = torch.zeros_like(affected)
    expected[20:] = True
    assert torch.equal(affected, expected)
    assert not clean.isnan().any()


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_a_query_that_is_broken_keeps_the_blocks_of_its_tile(run: Any, device: str) -> None:
    arguments = with_factor(make(PLAIN, device), 1e9)
    add_faint_block(arguments, slice(64, 80))
    clean = dense(arguments, PLAIN)
    sparse = run(arguments)
    arguments["q"][70, 0] = NAN
    got = run(arguments)
    assert got[70, 0].isnan().all() and not got[:70].isnan().any() and not got[71:].isnan().any()
    others = [64, 65, 69, 71, 79]
    assert relative_error(got[others, 0], clean[others, 0]) < TOLERANCE[FP16]
    assert relative_error(sparse[others, 0], clean[others, 0]) > TOLERANCE[FP16]
    assert torch.equal(got[:64], sparse[:64]) and torch.equal(got[:, 1], sparse[:, 1])


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_keys_of_minus_infinity_have_no_weight(run: Any, device: str) -> None:
    arguments = with_factor(make(PLAIN, device), 0.0)
    arguments["q"][:] = arguments["q"].abs() + 0.1
    slots = row_slots(arguments, 0, 90)
    arguments["k_cache"][slots[1:32]] = -INF
    got = run(arguments)
    assert not got.isnan().any()
    assert relative_error(got, dense(arguments, PLAIN)) < TOLERANCE[FP16]


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_broken_values_show_where_their_block_is_read(run: Any, device: str) -> None:
    arguments = make(PLAIN, device)
    slots = row_slots(arguments, 0, 90)
    # Of all queries, only those from 32 to 47 look for the keys there.
    for name, at in (("q", torch.arange(32, 48)), ("k_cache", slots[32:48])):
        arguments[name].zero_()
        arguments[name][:, :, 0] = 1.0 if name == "q" else 0.0
        arguments[name][at, :, 0] = -20.0
    arguments = with_factor(arguments, 20.0)
    arguments["v_cache"][slots[40]] = NAN
    got = run(arguments)
    assert not got[80:].isnan().any() and got[40:48].isnan().all()
