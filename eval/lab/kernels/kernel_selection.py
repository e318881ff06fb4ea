"""Page selection by other libraries, for ``eval.lab.bench_kernels``: physical pages as ``page_topk`` gives them.

They differ in the order of the pages, in how ties are broken, and in the number of pages that they can select. They get
tables and scores as wide as the rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import torch

from eval.lab.kernels.kernel_inputs import Step
from sglang_sparse_kernels.common.timing import Run

DEEPSEEK_V4 = "sglang.kernels.ops.attention.dsv4.topk"


def torch_topk(step: Step) -> list[Run]:
    """The highest, in ascending order, as physical pages."""
    table = step.batch.page_table[:, None].expand(-1, step.shape.kv_heads, -1)

    def run(scores: torch.Tensor) -> torch.Tensor:
        return table.gather(2, scores.topk(step.shape.n_select, sorted=False).indices.sort().values)

    return [partial(run, step.given_scores(layer)) for layer in step.layers]


def _scored_rows(step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For top-k by rows, a row for each row and KV head: its row of the batch, its length and its page table."""
    heads = step.shape.kv_heads
    rows = torch.arange(step.shape.batch, dtype=torch.int32, device=step.view.n_pages.device).repeat_interleave(heads)
    return rows, step.batch.n_pages[rows], step.batch.page_table[rows]


def _runs(step: Step, select: Callable[[torch.Tensor], torch.Tensor]) -> list[Run]:
    """A call for each layer of what selects from ``[B * Hkv, n_pages]`` scores."""
    shape = (step.shape.batch, step.shape.kv_heads, step.shape.n_select)
    rows = [step.given_scores(layer).flatten(0, 1) for layer in step.layers]
    return [lambda scores=scores: select(scores).view(shape) for scores in rows]


def flashinfer_topk(step: Step) -> list[Run]:
    """Top-k and the page table in one kernel; any order, ties as they fall."""
    flashinfer = importlib.import_module("flashinfer.topk")
    rows, lengths, _ = _scored_rows(step)

    pages = (step.batch.page_table, lengths, step.shape.n_select)
    return _runs(step, lambda scores: flashinfer.top_k_page_table_transform(scores, *pages, row_to_batch=rows))


def sgl_kernel_topk(step: Step) -> list[Run]:
    """Written for DSA: takes a selection of 2048 only; any order."""
    sgl_kernel = importlib.import_module("sgl_kernel.top_k")
    _, lengths, table = _scored_rows(step)
    chosen = step.shape.n_select
    return _runs(step, lambda scores: table.gather(1, sgl_kernel.fast_topk_v2(scores, lengths, chosen).long()))


def deepseek_v4_topk(step: Step) -> list[Run]:
    """SGLang's top-k and page table in one kernel; an entry of the table is a page here, so its page size is 1."""
    topk = importlib.import_module(DEEPSEEK_V4)
    _, lengths, table = _scored_rows(step)
    plan = topk.plan_topk_v2(lengths)

    def select(scores: torch.Tensor) -> torch.Tensor:
        chosen = torch.empty(len(scores), step.shape.n_select, dtype=torch.int32, device=scores.device)
        topk.topk_transform_paged_v2(scores, lengths, table, chosen, 1, plan)
        return chosen

    return _runs(step, select)
