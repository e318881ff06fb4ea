"""Anchor attention: reference against loops, Triton against the reference, chunks and slices against one pass."""

from typing import Any

import pytest
import torch
from anchor_runs import (
    BLOCK,
    BORDERLINE,
    STEP,
    TOLERANCE,
    chunked,
    garbled,
    relative_error,
    row_slots,
    run_reference,
    run_triton,
    triton_active,
)

from sglang_sparse_kernels.anchor_prefill import anchor_prefill, make_plan, plan, reference
from sglang_sparse_kernels.anchor_prefill import triton as kernels
from sglang_sparse_kernels.anchor_prefill.cases import CASES, Case, make
from sglang_sparse_kernels.anchor_prefill.plan import GroupPart

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
SMALL = [case for case in CASES if not case.gpu_only]
GROUP = BLOCK * STEP


def parts(arguments: dict[str, Any]) -> list[GroupPart]:
    return [part for piece in arguments["plan"].slices for part in piece.parts]


def reference_active(arguments: dict[str, Any], part: GroupPart) -> torch.Tensor:
    names = ("q", "k_cache", "page_table", "plan", "theta", "page_size", "sm_scale", "k_scale")
    return reference.active_keys(*(arguments[name] for name in names), row=part.row, group=part.group)


def naive_head(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prefix: int, sizes: tuple[int, int], theta: float
) -> tuple[torch.Tensor, dict[int, list[int]], int]:
    """One row and query head in float64, query by query: output, active positions by group, attended pairs.

    ``q`` has the softmax scale in it already.
    """
    block_size, step = sizes
    span, length = block_size * step, prefix + len(q)
    logits = q @ keys.T
    anchors = {}
    for p in range(prefix, length):
        start = p // span * span
        anchors[p] = sorted(set(range(min(block_size, p + 1))) | set(range(start, p + 1)))
    active: dict[int, list[int]] = {}
    for group in range(prefix // span, (length - 1) // span + 1):
        hits = set()
        for index in range(group * step, (group + 1) * step):
            block = [p for p in range(index * block_size, (index + 1) * block_size) if prefix <= p < length]
            if block:
                query = q[[p - prefix for p in block]].mean(dim=0)
                anchor = torch.stack([logits[p - prefix, anchors[p]].max() for p in block]).mean()
                gaps = anchor - keys[block_size : group * span] @ query
                hits |= {block_size + c for c in (gaps <= theta).nonzero().flatten().tolist()}
        # The block before the group.
        hits |= {p for p in range(group * span - block_size, group * span) if p >= block_size}
        active[group] = sorted(hits)
    out, pairs = [], 0
    for p in range(prefix, length):
        chosen = anchors[p] + active[p // span]
        pairs += len(chosen)
        out.append(logits[p - prefix, chosen].softmax(dim=0) @ values[chosen])
    return torch.stack(out), active, pairs


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_reference_is_the_definition(case: Case) -> None:
    arguments = make(case, "cpu")
    stats = torch.zeros(2, dtype=torch.int64)
    got = run_reference(arguments, stats)
    pairs, first = 0, 0
    for row, (prefix, extend) in enumerate(zip(case.prefixes, case.extends, strict=True)):
        slots = row_slots(arguments, row, prefix + extend)
        own = [part for part in parts(arguments) if part.row == row]
        masks = {part.group: reference_active(arguments, part) for part in own}
        for head in range(case.heads * case.group if extend else 0):
            keys = arguments["k_cache"][slots, head // case.group].double() * case.k_scale
            values = arguments["v_cache"][slots, head // case.group].double() * case.v_scale
            q = arguments["q"][first : first + extend, head].double() * arguments["sm_scale"]
            expected, active, count = naive_head(q, keys, values, prefix, (case.block_size, case.step), case.theta)
            torch.testing.assert_close(got[first : first + extend, head].double(), expected, rtol=1e-4, atol=1e-5)
            for group, mask in masks.items():
                assert (case.block_size + mask[head].nonzero().flatten()).tolist() == active[group]
            pairs += count
        first += extend
    causal = sum(
        extend * prefix + extend * (extend + 1) // 2 for prefix, extend in zip(case.prefixes, case.extends, strict=True)
    )
    assert stats.tolist() == [pairs, causal * case.heads * case.group]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_cases_have_active_and_inactive_keys(case: Case) -> None:
    arguments = make(case, "cpu")
    # The block before a group is always active.
    found = [(part, reference_active(arguments, part)) for part in parts(arguments) if part.candidates]
    masks = [mask[:, : max(0, part.candidates - case.block_size)].flatten() for part, mask in found]
    fraction = torch.cat(masks).float().mean().item()
    assert 0.02 < fraction < 0.5
    assert not all(part.group == 0 for part in parts(arguments))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_the_reference(case: Case, device: str) -> None:
    if case.dtype == FP32 and device == "cuda":
        pytest.skip("float32 caches are for the CPU")
    arguments = make(case, device)
    stats = torch.tensor([5, 7], device=device)
    got = anchor_prefill(**arguments, stats=stats)
    assert got.dtype == case.dtype
    assert relative_error(got, run_reference(arguments)) < TOLERANCE[case.dtype]
    names = ("q", "k_cache", "page_table", "plan", "page_size", "sm_scale", "k_scale")
    attended = arguments["plan"].anchor_pairs * got.shape[1]
    for part, mask in triton_active(arguments):
        attended += int(mask.sum()) * part.num_queries
        gaps = reference.key_gaps(*(arguments[name] for name in names), row=part.row, group=part.group)
        surely = (gaps <= case.theta - BORDERLINE[case.dtype]).any(0)
        possibly = (gaps <= case.theta + BORDERLINE[case.dtype]).any(0)
        assert (mask | ~surely).all()
        assert (~mask | possibly).all()
    assert stats.tolist() == [5 + attended, 7 + arguments["plan"].causal_pairs * got.shape[1]]


@pytest.mark.parametrize("case", [SMALL[1], *(case for case in CASES if case.gpu_only)], ids=str)
def test_results_are_equal_from_run_to_run(case: Case, device: str) -> None:
    arguments = make(case, device)
    assert torch.equal(anchor_prefill(**arguments), anchor_prefill(**arguments))


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_chunks_of_whole_groups_equal_one_piece(run: Any, device: str) -> None:
    arguments = make(Case((0,), (3 * GROUP + 5,), 16, 1, 2, 64, BF16, BF16), device)
    whole = run(arguments)
    assert torch.equal(chunked(arguments, [GROUP, 2 * GROUP, 5], run), whole)
    assert torch.equal(chunked(arguments, [2 * GROUP, GROUP + 5], run), whole)


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_page_table_entries_past_a_row_are_not_read(run: Any, device: str) -> None:
    arguments = make(SMALL[1], device)
    assert torch.equal(run(garbled(arguments, SMALL[1])), run(arguments))


def test_other_launch_parameters_give_the_same_active_keys(device: str) -> None:
    """Several tiles and chunks, shared by a row's parts, and query blocks that take several products."""
    arguments = make(Case((80,), (130,), 16, 1, 4, 64, FP16, FP16, step=3), device)
    arguments["plan"] = make_plan([80], [130], BLOCK, 3, device, tile_keys=16)
    assert len(arguments["plan"].slices[0].chunk_table) > 4
    config = kernels.Config(block_keys=16, num_warps=4, max_registers=128)
    got = kernels.anchor_prefill(**arguments, out=torch.empty_like(arguments["q"]), config=config)
    assert relative_error(got, run_reference(arguments)) < TOLERANCE[FP16]


def test_identification_in_several_products(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = make(Case((0,), (5 * 4 * BLOCK + 3,), 16, 1, 4, 64, FP16, FP16, step=5), device)
    arguments["q"] = arguments["q"][-83:]
    arguments["plan"] = make_plan([4 * 4 * BLOCK - 16], [83], BLOCK, 5, device)
    expected = run_reference(arguments)
    monkeypatch.setattr(kernels, "_MAX_POOLED", 16)
    assert relative_error(anchor_prefill(**arguments), expected) < TOLERANCE[FP16]


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_slices_give_what_one_pass_gives(run: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = SMALL[1]
    arguments = make(case, device)
    expected = run(arguments)
    monkeypatch.setattr(plan, "SLICE_QUERIES", 40)
    monkeypatch.setattr(plan, "SLICE_CANDIDATES", 50)
    arguments["plan"] = make_plan(case.prefixes, case.extends, case.block_size, case.step, device)
    assert len(arguments["plan"].slices) > 2
    assert torch.equal(run(arguments), expected)


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_a_pass_without_queries_is_empty(run: Any, device: str) -> None:
    arguments = make(Case((20, 0), (0, 0), 16, 1, 2, 64, FP16, FP16), device)
    assert run(arguments).shape == (0, 2, 64)
    assert arguments["plan"].scratch_bytes(2, 64, 64) == 0
    with pytest.raises(ValueError, match="row 0 has no sparse query of group 0"):
        reference_active(arguments, GroupPart(0, 0, 0, 0, 0, 0, 0, 0, 0, 0))
