"""A row's bits with ``launch.fixed_rows``: the same alone, in any batch and at any place of it."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sglang_sparse_kernels.block_mass import block_mass, scratch_bytes
from sglang_sparse_kernels.block_mass import cases as masses
from sglang_sparse_kernels.common import launch
from sglang_sparse_kernels.kt_select import cases as blocks
from sglang_sparse_kernels.kt_select import kt_select
from sglang_sparse_kernels.page_score import cases as scores
from sglang_sparse_kernels.page_score import page_score
from sglang_sparse_kernels.page_vote import cases as votes
from sglang_sparse_kernels.page_vote import page_vote
from sglang_sparse_kernels.skip_softmax_decode import cases as skipping
from sglang_sparse_kernels.skip_softmax_decode import skip_softmax_decode
from sglang_sparse_kernels.skip_softmax_mla_decode import cases as latent_skipping
from sglang_sparse_kernels.skip_softmax_mla_decode import skip_softmax_mla_decode
from sglang_sparse_kernels.sparse_decode import cases as sparse
from sglang_sparse_kernels.sparse_decode import scratch_bytes as sparse_bytes
from sglang_sparse_kernels.sparse_decode import sparse_decode
from sglang_sparse_kernels.sparse_mla_decode import cases as latents
from sglang_sparse_kernels.sparse_mla_decode import fa3, sparse_mla_decode
from sglang_sparse_kernels.window_score import cases as windows
from sglang_sparse_kernels.window_score import window_score

BF16, FP16 = torch.bfloat16, torch.float16
MIXED = (
    blocks.Row(400, 40, 300, 120),
    blocks.Row(30, 9, 20, 0),
    blocks.Row(90, 200, 60, 20),
    blocks.Row(210, 20, 200, 60),
)
LENGTHS = (900, 33, 417, 130, 1)
PAGES = (700, 1, 33, 412)
# By name: the operation, its shapes, the case, and the arguments that have rows.
OPS: dict[str, tuple[Callable[..., Any], ModuleType, Any, tuple[str, ...]]] = {
    "sparse_decode": (
        sparse_decode,
        sparse,
        sparse.Case(LENGTHS, 16, 2, 4, 128, BF16, BF16, ratio=0.8),
        ("q", "indices", "counts", "last_slots"),
    ),
    "page_score": (page_score, scores, scores.Case(PAGES, 2, 4, 128, BF16, BF16), ("q", "page_table", "n_pages")),
    "page_vote": (page_vote, votes, votes.Case(PAGES, 2, 4, 128, BF16, BF16), ("q", "page_table", "n_pages")),
    "kt_select": (
        kt_select,
        blocks,
        blocks.Case(MIXED, width=410),
        ("q", "requests", "block_table", "n_blocks", "n_select"),
    ),
    "window_score": (
        window_score,
        windows,
        windows.Case((1100, 33, 200), 16, 2, 2, 64, FP16, FP16, window=12),
        ("q", "n_window", "page_table", "lengths"),
    ),
    "skip_softmax_decode": (
        skip_softmax_decode,
        skipping,
        skipping.Case(LENGTHS, 16, 2, 4, 128, BF16, BF16),
        ("q", "page_table", "n_pages", "last_slots", "threshold_scale_factor"),
    ),
    "skip_softmax_mla_decode": (
        skip_softmax_mla_decode,
        latent_skipping,
        latent_skipping.Case(LENGTHS, 16, 16, 128, BF16, BF16),
        ("q_nope", "q_rope", "page_table", "n_pages", "last_slots", "threshold_scale_factor"),
    ),
    "sparse_mla_decode": (
        sparse_mla_decode,
        latents,
        latents.Case(LENGTHS, 16, 16, 128, BF16, BF16, ratio=0.8),
        ("q_nope", "q_rope", "indices", "counts", "last_slots"),
    ),
    "block_mass": (
        block_mass,
        masses,
        masses.Case(LENGTHS, 16, 16, 64, BF16, BF16, stored=576),
        ("q", "block_table", "n_blocks", "last_slots"),
    ),
}
NAMES = pytest.mark.parametrize("name", OPS)


def of_rows(name: str, device: str, order: list[int]) -> dict[str, Any]:
    """Return the arguments of an operation for the rows of its case in this order."""
    _, module, case, by_row = OPS[name]
    arguments = module.make(case, device)
    return {**arguments, **{key: arguments[key][order].contiguous() for key in by_row}}


def results(name: str, device: str, order: list[int]) -> list[list[torch.Tensor]]:
    """Run an operation on the rows of its case in this order; return the results of each row."""
    arguments = of_rows(name, device, order)
    found = OPS[name][0](**arguments)
    held = arguments.get("n_pages", arguments.get("n_blocks", arguments.get("lengths")))
    parts = found if isinstance(found, tuple) else (found,)
    return [[_meant(name, part[row], parts, row, held) for part in parts] for row in range(len(order))]


def _meant(name: str, part: torch.Tensor, parts: tuple[torch.Tensor, ...], row: int, held: Any) -> torch.Tensor:
    """Return the part of a row's result that is written."""
    if name == "kt_select":
        return part[:, : int(parts[1][row].max())] if part.dim() == 2 else part
    return part[..., : int(held[row])] if name in ("page_score", "page_vote", "window_score", "block_mass") else part


def bits_differ(name: str, device: str) -> list[tuple[int, int]]:
    """Rows of some batch that are not, bit by bit, what they are alone, with the size of the batch."""
    rows = len(OPS[name][2].rows if name == "kt_select" else getattr(OPS[name][2], "lengths", None) or PAGES)
    alone = [results(name, device, [row])[0] for row in range(rows)]
    orders = [[0, 1], list(range(rows)), list(reversed(range(rows))), [*range(rows)] * 3, [0] * 17]
    return [
        (row, len(order))
        for order in orders
        for row, found in zip(order, results(name, device, order), strict=True)
        if not all(torch.equal(one, other) for one, other in zip(alone[row], found, strict=True))
    ]


def operations(name: str, order: list[int]) -> int:
    """Count the floating-point operations of a reference's matrix products."""
    arguments = of_rows(name, "cpu", order)
    with FlopCounterMode(display=False) as counter:
        OPS[name][0](**arguments)
    return counter.get_total_flops()


@NAMES
def test_a_row_of_a_kernel_does_not_depend_on_the_batch(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "fixed_rows", launch.FEW_ROWS)
    assert bits_differ(name, device) == []


@NAMES
def test_nor_one_of_a_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "fixed_rows", launch.FEW_ROWS)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert bits_differ(name, "cpu") == []


@pytest.mark.parametrize("name", ["page_score", "page_vote", "sparse_decode", "sparse_mla_decode", "block_mass"])
def test_without_fixed_rows_a_reference_pads_to_the_longest_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether padding changes a bit is for the processor's matrix library to say. Operations are counted instead.
    rows = range(len(getattr(OPS[name][2], "lengths", PAGES)))
    alone = [operations(name, [row]) for row in rows]
    assert operations(name, list(rows)) > sum(alone)
    monkeypatch.setattr(launch, "fixed_rows", launch.FEW_ROWS)
    assert operations(name, list(rows)) == sum(alone)


@pytest.mark.parametrize("name", ["sparse_decode", "skip_softmax_decode", "sparse_mla_decode", "block_mass"])
def test_without_fixed_rows_splits_and_sums_follow_the_batch(name: str, device: str) -> None:
    assert bits_differ(name, device)


def test_scratch_is_that_of_the_fixed_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(launch, "stand_in", launch.Properties((9, 0), 132, 227 * 1024))
    sizes = (32, 8, 128, 128, 800, 16, BF16, BF16, cpu)
    assert sparse_bytes(256, *sizes) == 0, "256 rows fill a GPU without splits"
    monkeypatch.setattr(launch, "fixed_rows", launch.FEW_ROWS)
    assert sparse_bytes(256, *sizes) == 64 * sparse_bytes(4, *sizes) > 0
    assert scratch_bytes(8, 16, 64, 40, 16, BF16, cpu) > 0


def test_fa3_which_balances_rows_against_each_other_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa3, "has_kernel", lambda *_: True)
    sizes = (24, 128, 512, 16, BF16, torch.device("cpu"))
    assert fa3.serves(*sizes)
    monkeypatch.setattr(launch, "fixed_rows", launch.FEW_ROWS)
    assert not fa3.serves(*sizes)
