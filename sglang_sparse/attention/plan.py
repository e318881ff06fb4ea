"""The plan of a decode batch, the rows that run sparse: a pure function of their lengths."""

from __future__ import annotations

import math
from functools import cache, reduce
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from sglang_sparse.methods.roles import AttendsItself

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_sparse.config.request_options import RequestOptions
    from sglang_sparse.methods.base import DecodeMethod
    from sglang_sparse.methods.groups import DecodeGroups

# The attribute of SGLang's ForwardBatch that has the plan of its pass.
PLAN = "sparse_plan"


class GroupPlan(NamedTuple):
    """The blocks that the rows of a sparse batch attend to in the layers of one method.

    Attributes:
        n_pages: ``[rows]`` int32 on the CPU, pages held (of the selection: the method's blocks).
        n_select: ``[rows]`` int32 on the CPU, pages to attend to, or at most; equal to ``n_pages`` for a dense row.
        covered: ``[rows]`` bool on the CPU, rows that attend to all their tokens as far as the host knows.
        row_thresholds: ``[rows]`` float32 on the CPU, each row's ``DecodeMethod.row_threshold``; with an
            ``AttendsItself`` 0 for a dense row.
    """

    n_pages: torch.Tensor
    n_select: torch.Tensor
    covered: torch.Tensor
    row_thresholds: torch.Tensor


class DecodePlan(NamedTuple):
    """The plan of a decode batch.

    Attributes:
        covered: ``[rows]`` bool on the CPU, rows that attend to all their tokens in all layers, so that their new KV is
            as exact as what it attended to. With ``dense_fallback: never`` only rows that asked for it: whatever else
            runs is to be tested as sparse, even where it selects every page.
        selective: ``[rows]`` bool on the CPU, rows that attend to less than everything in some layer as far as the host
            knows.
        groups: the plan of each method; none where the batch is dense.
        bounded: made from bounds of the lengths; how many pages there are less, the device knows.
        later: of a draft behind the first one of its round, which may share that one's selection.
    """

    covered: torch.Tensor
    selective: torch.Tensor
    groups: tuple[GroupPlan, ...] = ()
    bounded: bool = False
    later: bool = False

    @property
    def sparse(self) -> bool:
        """Whether the batch takes the sparse path; False means the dense backend for all rows."""
        return bool(self.groups)


def plan_decode(
    groups: DecodeGroups, seq_lens: torch.Tensor, rows: Sequence[RequestOptions] = (), compacted: bool = False
) -> DecodePlan:
    """Decide a batch.

    Args:
        groups: the server's decode methods, with their limits.
        seq_lens: ``[rows]`` on the CPU, tokens of each row with the new one.
        rows: what each row's request asked for; empty where no request asked for anything.
        compacted: some row no longer holds all of its KV, see ``scheduler/compaction.py``: no crossover makes this
            batch dense. Such a row is sparse by its length and its request's options, which it was when it was
            compacted.
    """
    config, lengths = groups.config, seq_lens.tolist()
    crossover = 0 if compacted else groups.crossover_tokens
    if config.dense_fallback != "never" and sum(lengths) < crossover:
        # Whatever the rows are, and before anything else: a short batch waits for the host more than a long one.
        return dense_plan(len(lengths))
    block = math.gcd(*(method.block_size for method in groups.methods))
    held = [(-(-length // block), length < config.min_seq_len) for length in lengths]
    # Most steps of few rows fill no block.
    facts = (groups.deterministic, held, [(row.sparse, row.decode) for row in rows])
    known = groups.planned
    if known is None or known[0] != facts:
        known = groups.planned = facts, _plan_rows(groups, seq_lens, rows)
    plan = cast(DecodePlan, known[1])
    if groups.deterministic or config.dense_fallback == "never":
        return plan
    sparse_tokens = sum(length for length, dense in zip(lengths, plan.covered.tolist(), strict=True) if not dense)
    return plan if sparse_tokens and sparse_tokens >= crossover else dense_plan(len(lengths))


def _plan_rows(groups: DecodeGroups, seq_lens: torch.Tensor, rows: Sequence[RequestOptions]) -> DecodePlan:
    """Decide a batch that is long enough to run sparse."""
    asked_dense = (
        torch.tensor([not row.sparse for row in rows]) if rows else torch.zeros_like(seq_lens, dtype=torch.bool)
    )
    dense = asked_dense | (seq_lens < groups.config.min_seq_len)
    others: dict[DecodeGroups, list[int]] = {}
    for i, row in enumerate(rows):
        if row.decode is not groups:
            others.setdefault(row.decode, []).append(i)
    plans = tuple(
        _of_method(method, seq_lens, [(own.methods[place], mine) for own, mine in others.items()], dense)
        for place, method in enumerate(groups.methods)
    )
    covered = reduce(torch.logical_and, (plan.covered for plan in plans))
    if groups.deterministic:
        # The dense backend rounds otherwise than the sparse kernels over all pages. A row alone must take the same
        # kernels as in company, and what it writes must not be shared as if a prefill had written it.
        return DecodePlan(torch.zeros_like(covered), ~covered, plans)
    return DecodePlan(asked_dense if groups.config.dense_fallback == "never" else covered, ~covered, plans)


def _of_method(
    method: DecodeMethod, seq_lens: torch.Tensor, others: Sequence[tuple[DecodeMethod, list[int]]], dense: torch.Tensor
) -> GroupPlan:
    """Decide how much rows attend to by a method, or by those of ``others``, in a batch that runs sparse."""
    n_pages = ((seq_lens + method.block_size - 1) // method.block_size).to(torch.int32)
    thresholds = torch.full(n_pages.shape, method.row_threshold, dtype=torch.float32)
    n_select = method.n_select(n_pages)
    for own, mine in others:
        n_select[mine] = own.n_select(n_pages[mine])
        thresholds[mine] = own.row_threshold
    n_select = torch.where(dense, n_pages, torch.minimum(n_select, n_pages))
    by_value = isinstance(method, AttendsItself)
    if by_value:
        thresholds[dense] = 0.0
    return GroupPlan(n_pages, n_select, thresholds == 0 if by_value else n_select >= n_pages, thresholds)


@cache
def dense_plan(rows: int) -> DecodePlan:
    """Return the plan of a dense batch of so many rows, which selects nothing."""
    return DecodePlan(torch.ones(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool))


def usual_selection(method: DecodeMethod, max_pages: int) -> int:
    """Return the most pages that a sparse row attends to unless its request asks for more.

    Args:
        method: the decode method.
        max_pages: pages of the longest context.
    """
    n_pages = torch.arange(1, max_pages + 1, dtype=torch.int32)
    return int(torch.minimum(method.n_select(n_pages), n_pages).max())
