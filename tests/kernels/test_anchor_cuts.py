"""Anchor attention where chunks end within groups: what the parts of a group hand on, and who sees it."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from anchor_runs import (
    BLOCK,
    BORDERLINE,
    STEP,
    TOLERANCE,
    chunked,
    cut_prompt,
    empty_means,
    put,
    relative_error,
    run_reference,
    run_triton,
    triton_active,
)

from sglang_sparse_kernels.anchor_prefill import GroupMeans, anchor_prefill, make_plan, means_bytes, plan, reference
from sglang_sparse_kernels.anchor_prefill.cases import Case, make
from sglang_sparse_kernels.anchor_prefill.means import carried_means
from sglang_sparse_kernels.anchor_prefill.plan import Slice

FP32, FP16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
GROUP = BLOCK * STEP
LARGE: dict[str, Any] = {"block_size": 128, "step": 16, "stripes": 1.0, "gpu_only": True}
SCALES: dict[str, Any] = {"k_scale": 0.5, "v_scale": 2.0}
# Prompts of one row in which chunks cut every group.
CUT = [
    Case((0,), (205,), 16, 1, 2, 64, FP16, FP16, step=4, stripes=1.0),
    Case((70,), (150,), 1, 1, 2, 128, BF16, BF16, step=4, stripes=1.0),
    Case((20,), (190,), 1, 1, 2, 64, BF16, FP8, step=4, stripes=1.0, **SCALES),
    Case((0,), (760,), 64, 1, 2, 64, BF16, FP8, block_size=64, step=4, stripes=1.0, **SCALES),
    Case((0,), (10_000,), 16, 2, 4, 64, FP16, FP16, **LARGE),
    Case((3001,), (9000,), 64, 2, 4, 128, BF16, BF16, **LARGE),
    Case((3001,), (9000,), 1, 2, 4, 64, BF16, FP8, **LARGE, **SCALES),
    Case((0,), (9000,), 64, 2, 4, 64, BF16, FP8, **LARGE, **SCALES),
]
# Rows of a schedule of passes: the prefix that each begins behind, and its tokens pass by pass.
PREFIXES = (0, 70, 45, 3)
PASSES = ((40, 7, 0, 1), (11, 22, 33, 0), (30, 0, 21, 80), (25, 40, 3, 4))
LENGTHS = tuple(map(sum, zip(*PASSES, strict=True)))


def prompts(prefixes: tuple[int, ...], lengths: tuple[int, ...], run: Any, device: str, step: int) -> dict[str, Any]:
    """Rows with keys of all strengths, and thresholds among them: of those of the last group most are left out."""
    dtype = FP32 if run is run_reference else FP16
    arguments = make(Case(prefixes, lengths, 16, 1, 2, 64, dtype, dtype, step=step, stripes=1.0), device)
    names = ("q", "k_cache", "page_table", "plan", "page_size", "sm_scale", "k_scale")
    thetas = []
    for row, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        last = (prefix + length - 1) // (BLOCK * step)
        gaps = reference.key_gaps(*(arguments[name] for name in names), row=row, group=last).amin(0)
        found = gaps[gaps.isfinite()].sort().values
        # Between two, so that rounding changes nothing.
        thetas.append(found[len(found) // 8 - 1 :][:2].mean())
    return {**arguments, "theta": torch.stack(thetas)}


@pytest.mark.parametrize(
    ("prefix", "carried", "blocks", "parts"),
    [
        # Of block 2 (positions 64 to 95) nothing, a part of it, or it and more of its group.
        (70, 0, [(2, 0, 0), (3, 1, 0), (4, 2, 0)], [(0, 2), (2, 1)]),
        (70, 6, [(2, 0, 6), (3, 1, 0), (4, 2, 0)], [(0, 2), (2, 1)]),
        (110, 13, [(3, 0, 13), (4, 1, 0)], [(0, 1), (1, 1)]),
        (110, 46, [(3, 1, 14), (4, 2, 0)], [(0, 2), (2, 1)]),
        (96, 17, [(3, 1, 0), (4, 2, 0)], [(0, 2), (2, 1)]),
    ],
)
def test_carried_means_come_before_those_of_a_part(prefix: int, carried: int, blocks: Any, parts: Any) -> None:
    (piece,) = make_plan([prefix], [140 - prefix], 32, 2, "cpu", carried=[carried]).slices
    assert [(block.block, block.mean, block.earlier) for block in piece.blocks] == blocks
    assert [(part.first_mean, part.num_means) for part in piece.parts] == parts


@pytest.mark.parametrize(
    ("prefix", "extend", "carried", "low", "means", "parts", "taken"),
    [
        # The group of position 512 on wants three blocks at least. It has one, two or more, and others of the pass, ...
        (256, 260, 0, 0, [*range(8), 8], [(0, 8), (6, 3)], 0),
        (256, 320, 0, 0, [*range(8), 8, 9], [(0, 8), (7, 3)], 0),
        (256, 330, 0, 0, [*range(8), 8, 9, 10], [(0, 8), (8, 3)], 0),
        # ... of earlier passes, ...
        (512, 10, 512, 0, [2], [(0, 3)], 2),
        (512, 10, 40, 0, [2], [(0, 3)], 2),
        (512, 10, 30, 0, [1], [(0, 2)], 1),
        (512, 10, 0, 0, [0], [(0, 1)], 0),
        (530, 10, 100, 0, [2], [(0, 3)], 3),
        (530, 20, 100, 0, [1, 2], [(0, 3)], 2),
        (530, 200, 100, 0, [0, 1, 2, 3, 4, 5, 6], [(0, 7)], 1),
        # ... or of a short pass and those before it.
        (480, 40, 480, 0, [7, 8], [(0, 8), (6, 3)], 7),
        (480, 40, 0, 0, [0, 1], [(0, 1), (0, 2)], 0),
        # Dense queries do not look for keys of others.
        (256, 260, 0, 512, [*range(8), 8], [(0, 8), (8, 1)], 0),
        (256, 260, 0, 480, [*range(7), 7, 8], [(0, 7), (7, 1), (7, 2)], 0),
        # The second group of a prompt has no keys to look for beyond the block before it, and the first none.
        (200, 10, 200, 0, [6], [(0, 7)], 7),
        (256, 10, 256, 0, [2], [(0, 3)], 2),
    ],
)
def test_a_cut_part_that_knows_little_of_its_group_takes_means_of_the_one_before(
    prefix: int, extend: int, carried: int, low: int, means: Any, parts: Any, taken: int
) -> None:
    def planned(high: int, carried: int) -> Slice:
        (piece,) = make_plan([prefix], [extend], 32, 8, "cpu", [(low, high)], carried=[carried]).slices
        return piece

    piece, whole = planned(1000, carried), planned(prefix + extend, carried)
    assert [block.mean for block in piece.blocks] == means
    assert [(part.first_mean, part.num_means) for part in piece.parts] == parts
    assert [carried_means(piece, number) for number in range(len(parts))] == [taken] + [0] * (len(parts) - 1)
    # A prompt that ends here is not cut.
    of_its_group = planned(prefix + extend, min(carried, prefix % 256))
    assert (whole.blocks, whole.parts) == (of_its_group.blocks, of_its_group.parts)


@pytest.mark.parametrize(("high", "means"), [(1000, 3), (768, 3), (672, 2), (600, 2), (577, 2), (576, 1), (530, 1)])
def test_of_the_last_group_of_a_prompt_fewer_are_enough(high: int, means: int) -> None:
    """Three eighths of the blocks that it will have, at most eight."""
    ((part,),) = (p.parts for p in make_plan([512], [10], 32, 8, "cpu", [(0, high)], carried=[512]).slices)
    assert part.num_means == means


@pytest.mark.parametrize(
    ("prefix", "ranges", "carried", "message"),
    [
        (70, None, [71], "row 0 may have 0 to 70 carried queries, got 71"),
        (70, None, [-1], "0 to 70 carried queries, got -1"),
        (70, [(68, 99)], [3], "0 to 2 carried queries, got 3"),
        (70, [(0, 60)], [6], "0 to 0 carried queries, got 6"),
        (70, None, [0, 0], "as many numbers of carried queries as rows are needed, got 2 and 1"),
    ],
)
def test_carried_queries_that_cannot_be_are_refused(prefix: int, ranges: Any, carried: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan([prefix], [40], 32, 2, "cpu", ranges, carried=carried)


def test_wrong_means_are_refused() -> None:
    arguments = make(Case((40,), (30,), 16, 1, 2, 64, FP32, FP32), "cpu")
    arguments["plan"] = make_plan([40], [30], BLOCK, STEP, "cpu", carried=[8])
    good = empty_means(arguments, STEP, run_reference)
    for means, message in [
        (None, "row 0 has means of earlier queries in the plan, and none are given"),
        ({1: good}, "row 0 has means of earlier queries"),
        (
            {0: GroupMeans.allocate(STEP + 1, 2, 64, FP32, "cpu")},
            r"the queries of the means of row 0 must be \(2, 2, 64\)",
        ),
        ({0: GroupMeans.allocate(STEP, 2, 64, FP16, "cpu")}, "must be .* torch.float32 on cpu, got .* torch.float16"),
        ({0: GroupMeans(good.queries, good.anchors[:, :1])}, r"anchors .* must be \(2, 2\) .* got \(2, 1\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            anchor_prefill(**arguments, means=means)


def test_means_take_what_is_said() -> None:
    for dtype in (FP32, BF16):
        means = GroupMeans.allocate(16, 32, 128, dtype, "meta")
        assert means.queries.nbytes + means.anchors.nbytes == means_bytes(16, 32, 128, dtype)
    # As AnchorAttention's page says.
    assert means_bytes(16, 32, 128, BF16) == 133_120


@pytest.mark.parametrize("chunks", [[40, 20, 45], [64, 16, 16, 9], [66, 1, 1, 37], [129, 2, 1]])
@pytest.mark.parametrize("step", [STEP, 4])
@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_a_chunk_sees_what_it_sees_behind_the_others_in_one_pass(
    run: Any, step: int, chunks: list[int], device: str
) -> None:
    """A part picks its keys by all queries of its group so far, and by some of the one before where the group is large.

    It does not matter which pass has had them.
    """
    length = sum(chunks)
    arguments = prompts((0,), (length,), run, device, step)
    got, end = chunked(arguments, chunks, run, step=step).split(chunks), 0
    for size, chunk in zip(chunks, got, strict=True):
        end += size
        made = make_plan([0], [end], BLOCK, step, device, [(0, length)])
        whole = run({**arguments, "q": arguments["q"][:end], "plan": made})[end - size :]
        assert relative_error(chunk, whole) < TOLERANCE[chunk.dtype]
        if not end % BLOCK and not size % BLOCK:
            assert torch.equal(chunk, whole)


@pytest.mark.parametrize("case", CUT, ids=str)
def test_parts_of_a_group_pick_what_the_definition_picks(case: Case, device: str) -> None:
    """And attend to it, and count it, with what each has handed on to the next."""
    arguments, chunk = cut_prompt(case, device)
    names = ("q", "k_cache", "page_table", "plan", "page_size", "sm_scale", "k_scale")
    (start,), end, alone, picked = case.prefixes, case.prefixes[0] + case.extends[0], 0, 0
    means, defined = ({0: empty_means(arguments, case.step, run)} for run in (run_triton, run_reference))
    for q in arguments["q"].split(chunk):
        carried = [start - case.prefixes[0]]
        made = make_plan([start], [len(q)], case.block_size, case.step, device, [(0, end)], carried=carried)
        one = {**arguments, "q": q, "plan": made}
        found = triton_active(one, deepcopy(means))
        for part, mask in found:
            if part.candidates:
                gaps, own = (
                    reference.key_gaps(*(one[name] for name in names), row=0, group=part.group, means=held).amin(0)
                    for held in (defined, None)
                )
                surely, possibly = (gaps <= arguments["theta"] + sign * BORDERLINE[case.dtype] for sign in (-1, 1))
                assert (mask | ~surely).all() and (~mask | possibly).all()
                alone, picked = alone + int((own <= arguments["theta"]).sum()), picked + int(mask.sum())
        stats = torch.zeros(2, dtype=torch.int64, device=device)
        got = run_triton({**one, "means": means, "stats": stats})
        # Over the kernel's own picks: those on the border may be others.
        masks = iter([mask for part, mask in found if part.candidates for _ in range(part.num_blocks)])
        same = run_reference({**one, "means": defined, "replace": partial(put, masks)})
        assert relative_error(got, same) < TOLERANCE[case.dtype]
        attended = made.anchor_pairs * q.shape[1] + sum(int(mask.sum()) * part.num_queries for part, mask in found)
        assert stats.tolist() == [attended, made.causal_pairs * q.shape[1]]
        start += len(q)
    # What is handed on decides.
    assert alone < 0.9 * picked


def passes(arguments: dict[str, Any], run: Any, step: int, carry: bool = True) -> list[torch.Tensor]:
    """A ragged batch pass by pass; returns each row's output."""
    rows = [[] for _ in PREFIXES]
    queries = [row.split([tokens[i] for tokens in PASSES]) for i, row in enumerate(arguments["q"].split(LENGTHS))]
    starts, means = list(PREFIXES), {row: empty_means(arguments, step, run) for row in range(len(PREFIXES))}
    ranges = [(prefix, prefix + length) for prefix, length in zip(PREFIXES, LENGTHS, strict=True)]
    for number, tokens in enumerate(PASSES):
        carried = [start - prefix if carry else 0 for prefix, start in zip(PREFIXES, starts, strict=True)]
        made = make_plan(starts, tokens, BLOCK, step, arguments["q"].device, ranges, carried=carried)
        q = torch.cat([row[number] for row in queries])
        for row, out in enumerate(run({**arguments, "q": q, "plan": made, "means": means}).split(tokens)):
            rows[row].append(out)
        starts = [start + count for start, count in zip(starts, tokens, strict=True)]
    return [torch.cat(row) for row in rows]


@pytest.mark.parametrize(
    ("run", "limits"),
    [(run_reference, {}), (run_triton, {"SLICE_QUERIES": 20, "SLICE_MEANS": 3})],
    ids=["reference", "triton"],
)
@pytest.mark.parametrize("step", [STEP, 4])
def test_rows_of_a_batch_keep_their_means_apart(
    run: Any, limits: dict[str, int], step: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever slices, and whatever the thresholds of the others."""
    for name, limit in limits.items():
        monkeypatch.setattr(plan, name, limit)
    arguments = prompts(PREFIXES, LENGTHS, run, device, step)
    got = passes(arguments, run, step)
    for row, (prefix, own) in enumerate(zip(PREFIXES, arguments["q"].split(LENGTHS), strict=True)):
        alone = {**arguments, "q": own, "page_table": arguments["page_table"][row : row + 1]}
        alone["theta"] = arguments["theta"][row : row + 1]
        chunks = [tokens[row] for tokens in PASSES if tokens[row]]
        assert relative_error(got[row], chunked(alone, chunks, run, prefix, step)) < 1e-5
    if run is run_reference:
        without = passes(arguments, run, step, carry=False)
        assert all(relative_error(*pair) > 0.005 for pair in zip(got, without, strict=True))


def test_only_rows_with_means_hand_them_on() -> None:
    arguments = make(Case((40, 40), (30, 30), 16, 1, 2, 64, FP32, FP32), "cpu")
    held = empty_means(arguments, STEP, run_reference)
    held.queries.fill_(7.0)
    run_reference({**arguments, "means": {1: held}})
    # The group of position 64 on has one block so far.
    assert (held.queries[-1] != 7.0).all() and (held.queries[:-1] == 7.0).all()
    expected = arguments["q"][30 + 24 :].mean(0)
    torch.testing.assert_close(held.queries[-1], expected)


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_a_broken_query_counts_in_later_parts_of_its_group(run: Any, device: str) -> None:
    """The anchor of its block is NaN, and so all keys count, in the parts that it is carried to, too."""
    arguments = make(Case((32,), (100,), 16, 1, 1, 64, FP16, FP16, theta=-1.0), device)
    chunks, second = [36, 40, 24], slice(36, 76)
    sound = chunked(arguments, chunks, run, 32)[second]
    arguments["q"][33, 0, 0] = float("nan")
    got = chunked(arguments, chunks, run, 32)
    assert got[33].isnan().all() and got.isnan().sum() == got[33].numel()
    infinite = {**arguments, "theta": torch.full_like(arguments["theta"], float("inf"))}
    everything = chunked(infinite, chunks, run, 32)[second]
    # Up to the end of the group.
    inside = slice(0, 3 * GROUP - 32 - 36)
    assert relative_error(got[second][inside], everything[inside]) < TOLERANCE[got.dtype]
    assert relative_error(sound[inside], everything[inside]) > 0.01
