"""The plan of anchor attention, the bound of its scratch memory, and the arguments that are refused."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_sparse_kernels.anchor_prefill import AnchorPlan, anchor_prefill, make_plan, plan, scratch_bound
from sglang_sparse_kernels.anchor_prefill.cases import CASES, make
from sglang_sparse_kernels.anchor_prefill.launch import default_config
from sglang_sparse_kernels.anchor_prefill.plan import Scratch
from sglang_sparse_kernels.common import launch as device_launch

BLOCK, STEP = 16, 2


def test_plan_lists_blocks_and_parts() -> None:
    made = make_plan([30, 7, 0], [37, 0, 17], BLOCK, STEP, "cpu")
    (piece,) = made.slices
    assert [tuple(block) for block in piece.blocks] == [
        (0, 1, 30, 0, 2, 0, 0, 0, 0),
        (0, 2, 32, 2, 16, 1, 32, 1, 0),
        (0, 3, 48, 18, 16, 1, 32, 2, 0),
        (0, 4, 64, 34, 3, 2, 64, 3, 0),
        (2, 0, 0, 37, 16, 3, 0, 4, 0),
        (2, 1, 16, 53, 1, 3, 0, 5, 0),
    ]
    assert [tuple(part) for part in piece.parts] == [
        (0, 0, 0, 1, 2, 0, 0, 0, 0, 1),
        (0, 1, 1, 2, 32, 16, 0, 0, 1, 2),
        (0, 2, 3, 1, 3, 48, 16, 1, 3, 1),
        (2, 0, 4, 2, 17, 0, 64, 2, 4, 2),
    ]
    assert piece.block_table.tolist() == [list(block) for block in piece.blocks]
    assert piece.part_table.tolist() == [list(part) for part in piece.parts]
    assert (made.num_rows, made.num_queries, made.max_length) == (3, 54, 67)


def test_dense_queries_have_a_window_of_all_keys_and_no_candidates() -> None:
    (piece,) = make_plan([40, 0], [50, 20], BLOCK, STEP, "cpu", [(64, 85), (0, 0)]).slices
    assert [(block.first_position, block.num_queries, block.part, block.window) for block in piece.blocks] == [
        (40, 8, 0, 0),
        (48, 16, 0, 0),
        (64, 16, 1, 64),
        (80, 5, 1, 64),
        (85, 5, 2, 0),
        (0, 16, 3, 0),
        (16, 4, 3, 0),
    ]
    assert [part.candidates for part in piece.parts] == [0, 48, 0, 0]
    with pytest.raises(ValueError, match="as many sparse ranges as rows are needed, got 1 and 2"):
        make_plan([0, 0], [1, 1], BLOCK, STEP, "cpu", [(0, 1)])


@dataclass(frozen=True)
class Pass:
    """Ragged rows, dense ranges among them, and bounds of the slices."""

    rows: list[tuple[int, int]]
    block_size: int
    step: int
    ranges: list[tuple[int, int]] | None
    limits: tuple[int, int, int]
    carries: bool

    def bounded(self, patch: pytest.MonkeyPatch) -> None:
        for name, limit in zip(("SLICE_QUERIES", "SLICE_MEANS", "SLICE_CANDIDATES"), self.limits, strict=True):
            patch.setattr(plan, name, limit)

    def plan(self, tile_keys: int) -> AnchorPlan:
        prefixes, extends = [prefix for prefix, _ in self.rows], [extend for _, extend in self.rows]
        carried = [self._carried(row) for row in range(len(self.rows))] if self.carries else None
        return make_plan(prefixes, extends, self.block_size, self.step, "cpu", self.ranges, tile_keys, carried)

    def _carried(self, row: int) -> int:
        """As much as there can be."""
        prefix = self.rows[row][0]
        low, high = self.ranges[row] if self.ranges else (0, prefix)
        return max(0, prefix - low) if prefix <= high else 0


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    rows = draw(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 90)), max_size=12))
    position = st.integers(0, 800)
    ranges = draw(st.none() | st.lists(st.tuples(position, position), min_size=len(rows), max_size=len(rows)))
    limits = draw(st.tuples(*[st.integers(1, 300)] * 3))
    return Pass(rows, draw(st.sampled_from([16, 32])), draw(st.integers(1, 4)), ranges, limits, draw(st.booleans()))


@given(passes(), st.sampled_from([16, 128]))
def test_tables_hold_each_tile_and_chunk_of_each_part_once(case: Pass, keys: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        case.bounded(patch)
        made = case.plan(keys)
    for piece in made.slices:
        tiles = []
        for first, count, tile in piece.tile_table.tolist():
            assert 0 < count <= 4 and len({part.row for part in piece.parts[first : first + count]}) == 1
            tiles += [(part, tile) for part in range(first, first + count)]
        for found, size in ((tiles, keys), (piece.chunk_table.tolist(), 8 * keys)):
            counts = [-(-part.candidates // size) for part in piece.parts]
            assert sorted(map(tuple, found)) == [(part, n) for part, count in enumerate(counts) for n in range(count)]
        assert [part.first_tile for part in piece.parts] == [
            sum(-(-part.candidates // keys) for part in piece.parts[:number]) for number in range(len(piece.parts))
        ]
        queries, candidates = (
            sum(getattr(part, name) for part in piece.parts) for name in ("num_queries", "candidates")
        )
        end = 0
        for number, part in enumerate(piece.parts):
            follows = number > 0 and piece.parts[number - 1].row == part.row
            assert part.first_mean == end - follows * (part.num_means - part.num_blocks)
            assert part.num_means <= case.step or not part.candidates
            assert not follows or part.first_mean >= piece.parts[number - 1].first_mean
            end = part.first_mean + part.num_means
            # Those of the part's own blocks come last.
            blocks = piece.blocks[part.first_block : part.first_block + part.num_blocks]
            assert [block.mean for block in blocks] == list(range(end - len(blocks), end))
        assert piece.size == (queries, end, len(piece.parts), candidates, len(tiles))
        assert len(tiles) <= candidates / keys + len(piece.parts)


def test_parts_of_a_row_share_the_tiles_that_they_have() -> None:
    (piece,) = make_plan([200, 64], [90, 10], BLOCK, STEP, "cpu", [(0, 270), (0, 74)], tile_keys=64).slices
    assert [(part.row, part.candidates) for part in piece.parts] == [
        (0, 176),
        (0, 208),
        (0, 240),
        (0, 0),
        (0, 0),
        (1, 48),
    ]
    assert piece.tile_table.tolist() == [[0, 3, 0], [0, 3, 1], [0, 3, 2], [1, 2, 3], [5, 1, 0]]
    assert piece.chunk_table.tolist() == [[0, 0], [1, 0], [2, 0], [5, 0]]


@given(passes(), st.integers(0, 50), st.integers(0, 500))
def test_scratch_bound_holds_for_any_batch(case: Pass, more_queries: int, more_context: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        case.bounded(patch)
        made = case.plan(plan.TILE_KEYS)
        limits = made.num_queries + more_queries, made.max_length + more_context
        assert made.scratch_bytes(4, 64, 96) <= scratch_bound(*limits, 4, 64, 96, case.block_size, case.step)


@pytest.mark.parametrize(("heads", "dim", "v_dim"), [(32, 128, 128), (8, 64, 96)])
def test_scratch_stays_within_its_bound(heads: int, dim: int, v_dim: int) -> None:
    for prefix, extend in ((131072 - 8192, 8192), (131072 - 16384, 16384), (0, 40000), (1000, 1)):
        made = make_plan([prefix], [extend], 128, 16, "cpu")
        bound = made.scratch_bytes(heads, dim, v_dim)
        assert bound <= scratch_bound(extend, prefix + extend, heads, dim, v_dim, 128, 16)
        for piece in made.slices:
            q = torch.empty(piece.num_queries, heads, dim, dtype=torch.bfloat16, device="meta")
            scratch = Scratch.allocate(piece, q, v_dim)
            assert sum(tensor.nbytes for tensor in vars(scratch).values()) <= bound


def test_scratch_of_a_chunk_at_a_long_context_is_modest() -> None:
    assert len(make_plan([131072 - 8192], [8192], 128, 16, "cpu").slices) == 1
    # As AnchorAttention's page says.
    assert scratch_bound(8192, 131072, 32, 128, 128, 128, 16) // 2**20 == 243
    assert scratch_bound(16384, 131072, 32, 128, 128, 128, 16) < 2**28 + 2**27
    # Longer passes are cut into more slices.
    assert scratch_bound(10**6, 131072, 32, 128, 128, 128, 16) == scratch_bound(16384, 131072, 32, 128, 128, 128, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [1], 8, 2), "block_size must be a power of two from 16 to 128, got 8"),
        (([0], [1], 48, 2), "got 48"),
        (([0], [1], 256, 2), "got 256"),
        (([0], [1], 16, 0), "step must be at least 1, got 0"),
        (([0, 0], [1], 16, 1), "as many prefix as extend lengths are needed, got 2 and 1"),
        (([-1], [1], 16, 1), "lengths must be at least 0"),
        (([0], [-2], 16, 1), "lengths must be at least 0"),
    ],
)
def test_make_plan_refuses_wrong_arguments(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(*arguments, device="cpu")


@pytest.mark.parametrize("keys", [8, 48])
def test_make_plan_refuses_tiles_that_are_no_power_of_two(keys: int) -> None:
    with pytest.raises(ValueError, match=f"tile_keys must be a power of two of at least 16, got {keys}"):
        make_plan([0], [1], 16, 2, "cpu", tile_keys=keys)


def test_wrong_arguments_are_refused() -> None:
    arguments = make(replace(CASES[2], page_size=16), "cpu")
    q, k_cache = arguments["q"], arguments["k_cache"]
    other = make_plan([0, 70], [96, 31], 16, 2, "cpu")
    for change, message in [
        ({"page_size": 5}, "power of two from 1 to 64, got 5"),
        ({"page_size": 32}, "block_size must be a multiple of page_size, got 16 and 32"),
        ({"q": q[:, [0, 1, 0]]}, "multiple of KV heads, got 3 and 2"),
        ({"q": q[1:]}, "the plan has 126 query tokens in 2 rows, got 125 in q"),
        ({"plan": other}, "the plan has 127 query tokens"),
        ({"plan": replace(arguments["plan"], device=torch.device("meta"))}, "plan must be on the device of q"),
        ({"k_cache": k_cache.half()}, "k_cache must have one of the dtypes"),
        ({"v_cache": arguments["v_cache"].half()}, "v_cache must have one of the dtypes"),
        ({"page_table": arguments["page_table"][:, :6]}, "page_table must hold 100 tokens a row, got 6 pages of 16"),
        ({"sm_scale": 0.0}, "sm_scale [*] k_scale must be positive"),
    ]:
        with pytest.raises(ValueError, match=message):
            anchor_prefill(**{**arguments, **change})


@pytest.mark.parametrize(("kibibytes", "stages"), [(99, 1), (163, 3)])
def test_heads_of_256_are_pipelined_where_shared_memory_holds_it(
    kibibytes: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_launch, "stand_in", device_launch.Properties((8, 9), 128, kibibytes * 1024))
    assert default_config(128, 256, torch.device("cpu")).num_stages == stages
    assert default_config(128, 128, torch.device("cpu")).num_stages == 3
