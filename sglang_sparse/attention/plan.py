"""Which rows of a decode batch run sparse: a pure function of their lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from sglang_sparse.methods.roles import AttendsItself

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_sparse.config.request_options import RequestOptions
    from sglang_sparse.methods.base import DecodeMethod


@dataclass(frozen=True)
class DecodePlan:
    """How a decode batch runs.

    Attributes:
        sparse: whether the batch takes the sparse path; False means the dense backend for all rows.
        n_pages: ``[rows]`` int32 on the CPU, pages held (of the selection: the method's blocks). Empty, as are
            ``n_select`` and ``row_thresholds``, where no row is sparse: nothing is selected.
        n_select: ``[rows]`` int32 on the CPU, pages to attend to, or at most; equal to ``n_pages`` for a dense row.
        covered: ``[rows]`` bool on the CPU, rows that attend to all their tokens, so that their new KV is as exact
            as what it attended to. With ``dense_fallback: never`` only rows that asked for it: whatever else runs is
            to be tested as sparse, even where it selects every page.
        row_thresholds: ``[rows]`` float32 on the CPU, each row's ``DecodeMethod.row_threshold``; with an
            ``AttendsItself`` 0 for a dense row.
        parts: of a method with parts the plan of each, in its own blocks; the whole one is the first's but for
            ``covered``.
    """

    sparse: bool
    n_pages: torch.Tensor
    n_select: torch.Tensor
    covered: torch.Tensor
    row_thresholds: torch.Tensor
    parts: tuple[DecodePlan, ...] = ()

    @property
    def selective(self) -> torch.Tensor:
        """``[rows]`` bool, rows that attend to less than everything in some layer as far as the host knows."""
        return (
            ~torch.stack([part.covered for part in self.parts]).all(0) if self.parts else self.n_select < self.n_pages
        )


def plan_decode(
    method: DecodeMethod, seq_lens: torch.Tensor, rows: Sequence[RequestOptions] = (), compacted: bool = False
) -> DecodePlan:
    """Decide a batch.

    Args:
        method: the server's decode method, with its limits.
        seq_lens: ``[rows]`` on the CPU, tokens of each row with the new one.
        rows: what each row's request asked for; empty where no request asked for anything.
        compacted: some row no longer holds all of its KV, see ``scheduler/compaction.py``: no crossover makes this
            batch dense. Such a row is sparse by its length and its request's options, which it was when it was
            compacted.
    """
    config = method.config
    crossover = 0 if compacted else method.crossover_tokens
    if config.dense_fallback != "never" and sum(seq_lens.tolist()) < crossover:
        # Whatever the rows are, and before anything else: a short batch waits for the host more than a long one.
        return dense_plan(len(seq_lens))
    asked_dense = (
        torch.tensor([not row.sparse for row in rows]) if rows else torch.zeros_like(seq_lens, dtype=torch.bool)
    )
    dense = asked_dense | (seq_lens < config.min_seq_len)
    if method.parts:
        owns = zip(*(row.method.parts for row in rows), strict=True) if rows else [()] * len(method.parts)
        plan = _merge_plans(
            [_of_rows(part, seq_lens, own, dense) for part, own in zip(method.parts, owns, strict=True)]
        )
    else:
        plan = _of_rows(method, seq_lens, [row.method for row in rows], dense)
    if config.dense_fallback == "never":
        return replace(plan, covered=asked_dense)
    sparse_tokens = int(seq_lens[~plan.covered].sum())
    if sparse_tokens == 0 or sparse_tokens < crossover:
        return dense_plan(len(seq_lens))
    return plan


def _of_rows(
    method: DecodeMethod, seq_lens: torch.Tensor, rows: Sequence[DecodeMethod], dense: torch.Tensor
) -> DecodePlan:
    """Decide how much rows attend to, each by the method of its request, in a batch that runs sparse."""
    n_pages = ((seq_lens + method.block_size - 1) // method.block_size).to(torch.int32)
    thresholds = torch.full(n_pages.shape, method.row_threshold, dtype=torch.float32)
    n_select = method.n_select(n_pages)
    others: dict[DecodeMethod, list[int]] = {}
    for i, row in enumerate(rows):
        if row is not method:
            others.setdefault(row, []).append(i)
    for own, mine in others.items():
        n_select[mine] = own.n_select(n_pages[mine])
        thresholds[mine] = own.row_threshold
    n_select = torch.where(dense, n_pages, torch.minimum(n_select, n_pages))
    by_value = isinstance(method, AttendsItself)
    if by_value:
        thresholds[dense] = 0.0
    return DecodePlan(True, n_pages, n_select, thresholds == 0 if by_value else n_select >= n_pages, thresholds)


def _merge_plans(parts: Sequence[DecodePlan]) -> DecodePlan:
    """One plan of those of a method's parts: a row is covered where it is in all of them."""
    return replace(parts[0], covered=torch.stack([part.covered for part in parts]).all(0), parts=tuple(parts))


@cache
def dense_plan(rows: int) -> DecodePlan:
    """Return the plan of a dense batch of so many rows, which selects nothing."""
    nothing = torch.empty(0, dtype=torch.int32)
    return DecodePlan(False, nothing, nothing, torch.ones(rows, dtype=torch.bool), torch.empty(0))


def usual_selection(method: DecodeMethod, max_pages: int) -> int:
    """Return the most pages that a sparse row attends to unless its request asks for more.

    Args:
        method: the decode method.
        max_pages: pages of the longest context.
    """
    n_pages = torch.arange(1, max_pages + 1, dtype=torch.int32)
    return int(torch.minimum(method.n_select(n_pages), n_pages).max())
