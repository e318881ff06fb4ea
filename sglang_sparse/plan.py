"""Which rows of a decode batch run sparse: a pure function of their lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang_sparse.method import DecodeMethod


@dataclass(frozen=True)
class DecodePlan:
    """How a decode batch runs.

    Attributes:
        sparse: whether the batch takes the sparse path; False means the dense backend for all rows.
        n_pages: ``[rows]`` int32 on the CPU, pages held.
        n_select: ``[rows]`` int32 on the CPU, pages to attend to; equal to ``n_pages`` for a dense row.
        covered: ``[rows]`` bool on the CPU, rows that attend to all their tokens, so that their new KV is as exact
            as what it attended to.
    """

    sparse: bool
    n_pages: torch.Tensor
    n_select: torch.Tensor
    covered: torch.Tensor


def plan_decode(method: DecodeMethod, page_size: int, seq_lens: torch.Tensor) -> DecodePlan:
    """Decide a batch.

    Args:
        method: the decode method, with its limits in ``method.config``.
        page_size: tokens per page.
        seq_lens: ``[rows]`` on the CPU, tokens of each row with the new one.
    """
    config = method.config
    n_pages = ((seq_lens + page_size - 1) // page_size).to(torch.int32)
    n_select = torch.minimum(method.n_select(n_pages), n_pages)
    n_select = torch.where(seq_lens < config.min_seq_len, n_pages, n_select)
    covered = n_select >= n_pages
    if config.dense_fallback == "never":
        return DecodePlan(True, n_pages, n_select, covered)
    sparse_tokens = int(seq_lens[~covered].sum())
    if sparse_tokens == 0 or sparse_tokens < config.crossover_tokens:
        return DecodePlan(False, n_pages, n_pages, torch.ones_like(covered))
    return DecodePlan(True, n_pages, n_select, covered)


def widest_selection(method: DecodeMethod, page_size: int, max_pages: int) -> int:
    """Return the most pages that a row of any batch attends to.

    Args:
        method: the decode method.
        page_size: tokens per page.
        max_pages: pages of the longest context.
    """
    n_pages = torch.arange(1, max_pages + 1, dtype=torch.int32)
    sparse = int(torch.minimum(method.n_select(n_pages), n_pages).max())
    longest_dense = -(-(method.config.min_seq_len - 1) // page_size)
    return max(sparse, min(longest_dense, max_pages))
