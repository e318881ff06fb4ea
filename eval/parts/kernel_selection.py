"""Page selection by other libraries, for ``eval.bench_kernels``: physical pages as ``page_topk`` gives them.

They differ in the order of the pages, in how ties are broken, and in the number of pages that they can select.
"""

from __future__ import annotations

import importlib
from functools import partial

import torch

from eval.parts.kernel_inputs import Layer, Step
from sglang_sparse_kernels.timing import Run

DEEPSEEK_V4 = "sglang.kernels.ops.attention.dsv4.topk"


def torch_topk(step: Step) -> list[Run]:
    """The highest, in ascending order, as physical pages."""
    table = step.batch.page_table[:, None].expand(-1, step.shape.kv_heads, -1)

    def run(layer: Layer) -> torch.Tensor:
        return table.gather(2, layer.scores.topk(step.shape.n_select, sorted=False).indices.sort().values)

    return [partial(run, layer) for layer in step.layers]


def _scored_rows(step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For top-k by rows, a row for each row and KV head: its row of the batch, its length and its page table."""
    heads = step.shape.kv_heads
    rows = torch.arange(step.shape.batch, dtype=torch.int32, device=step.n_select.device).repeat_interleave(heads)
    return rows, step.batch.n_pages[rows], step.batch.page_table[rows]


def flashinfer_topk(step: Step) -> list[Run]:
    """Top-k and the page table in one kernel; any order, ties as they fall."""
    flashinfer = importlib.import_module("flashinfer.topk")
    rows, lengths, _ = _scored_rows(step)

    def run(layer: Layer) -> torch.Tensor:
        pages = (step.batch.page_table, lengths, step.shape.n_select)
        chosen = flashinfer.top_k_page_table_transform(layer.scores.flatten(0, 1), *pages, row_to_batch=rows)
        return chosen.view_as(layer.indices)

    return [partial(run, layer) for layer in step.layers]


def sgl_kernel_topk(step: Step) -> list[Run]:
    """Written for DSA: takes a selection of 2048 only; any order."""
    sgl_kernel = importlib.import_module("sgl_kernel.top_k")
    _, lengths, table = _scored_rows(step)

    def run(layer: Layer) -> torch.Tensor:
        logical = sgl_kernel.fast_topk_v2(layer.scores.flatten(0, 1), lengths, step.shape.n_select)
        return table.gather(1, logical.long()).view_as(layer.indices)

    return [partial(run, layer) for layer in step.layers]


def deepseek_v4_topk(step: Step) -> list[Run]:
    """SGLang's top-k and page table in one kernel; an entry of the table is a page here, so its page size is 1."""
    topk = importlib.import_module(DEEPSEEK_V4)
    _, lengths, table = _scored_rows(step)
    plan = topk.plan_topk_v2(lengths)

    def run(layer: Layer) -> torch.Tensor:
        chosen = torch.empty_like(layer.indices)
        topk.topk_transform_512_v2(layer.scores.flatten(0, 1), lengths, table, chosen.flatten(0, 1), 1, plan)
        return chosen

    return [partial(run, layer) for layer in step.layers]
