"""What the outputs that ``eval.bench_kernels`` times are worth, against float64 over a sample of rows and KV heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eval.parts.kernel_inputs import Shape, Step
from sglang_sparse_kernels.page_topk import reference

SAMPLED = 8
ATTENTION_OVER_PAGES = ("sparse_decode", "score+topk+decode")


@dataclass(frozen=True)
class Sample:
    """One row and KV head of a layer, in float64.

    Attributes:
        row, head: which.
        pages: physical pages of the row, ``[n_pages]`` int64.
        best: which of them the reference of ``page_topk`` selects, ``[n_pages]`` bool.
        attended: which of them the layer's selection holds, ``[n_pages]`` bool.
        mass: share of the dense softmax that falls on each page, ``[G, n_pages]``.
        dense: output of attention over all tokens, ``[G, d]``.
        sparse: output of attention over the tokens of the attended pages, ``[G, d]``.
    """

    row: int
    head: int
    pages: torch.Tensor
    best: torch.Tensor
    attended: torch.Tensor
    mass: torch.Tensor
    dense: torch.Tensor
    sparse: torch.Tensor


def samples(step: Step) -> list[Sample]:
    """At most `SAMPLED` rows and KV heads of the first layer, spread evenly."""
    shape, layer = step.shape, step.layers[0]
    best = (torch.empty_like(layer.indices), torch.empty_like(layer.counts))
    pages = (step.batch.page_table, step.batch.n_pages, step.n_select, shape.n_select)
    reference.page_topk(layer.scores, *pages, best)
    return [_sample(step, best[0], *pair) for pair in sampled_pairs(shape)]


def sampled_pairs(shape: Shape) -> list[tuple[int, int]]:
    """At most `SAMPLED` rows, each with a KV head, spread evenly."""
    pairs = shape.batch * shape.kv_heads
    count = min(SAMPLED, pairs)
    return [divmod(i * (pairs - 1) // max(1, count - 1), shape.kv_heads) for i in range(count)]


def logits_and_values(step: Step, row: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a row and KV head of the first layer attends by and to, in float64.

    Returns:
        ``[G, length]`` and ``[length, d]``.
    """
    shape, layer = step.shape, step.layers[0]
    group = shape.q_heads // shape.kv_heads
    pages = step.batch.page_table[row].long()
    slots = (pages[:, None] * shape.page_size + torch.arange(shape.page_size, device=pages.device)).flatten()
    keys, values = (cache[slots[: shape.length], head].double() for cache in (layer.k_cache, layer.v_cache))
    return layer.q[row, head * group : (head + 1) * group].double() @ keys.T * step.sm_scale, values


def quality(op: str, output: torch.Tensor | None, over: list[Sample]) -> dict[str, float]:
    """The figures of quality that belong to an operation.

    Args:
        op: of `eval.parts.kernel_inputs.OPS`.
        output: what it gave for the first layer: ``[B, Hq, d]``, or for page_topk physical pages ``[B, Hkv, n]``.
        over: of `samples`.

    Returns:
        Of attention ``relative_l2``, the relative L2 error against float64 over the same tokens; over selected pages
        also ``recall``, the share of the dense softmax that the pages hold, mean over the query heads of the sample,
        and ``dense_l2``, the relative L2 distance from dense attention. Of a selection ``recall``, and ``agreement``,
        the share of the reference's pages that it selects too. Of the others nothing: tests hold them equal to their
        reference.
    """
    if output is None:
        return {}
    if op == "page_topk":
        masks = [torch.isin(s.pages, output[s.row, s.head].long()) for s in over]
        both = sum(int((mask & s.best).sum()) for mask, s in zip(masks, over, strict=True))
        return {"recall": _recall(masks, over), "agreement": both / sum(int(s.best.sum()) for s in over)}
    if op in ATTENTION_OVER_PAGES:
        return {
            "relative_l2": _relative_l2(output, over, [s.sparse for s in over]),
            "dense_l2": _relative_l2(output, over, [s.dense for s in over]),
            "recall": _recall([s.attended for s in over], over),
        }
    return {"relative_l2": _relative_l2(output, over, [s.dense for s in over])}


def _sample(step: Step, best: torch.Tensor, row: int, head: int) -> Sample:
    shape, layer = step.shape, step.layers[0]
    pages = step.batch.page_table[row].long()
    logits, values = logits_and_values(step, row, head)
    weights = logits.softmax(-1)
    chosen, attended = (torch.isin(pages, picked[row, head].long()) for picked in (best, layer.indices))
    tokens = attended.repeat_interleave(shape.page_size)[: shape.length]
    spread = torch.nn.functional.pad(weights, (0, shape.n_pages * shape.page_size - shape.length))
    mass = spread.unflatten(1, (shape.n_pages, shape.page_size)).sum(-1)
    sparse = logits.masked_fill(~tokens, float("-inf")).softmax(-1) @ values
    return Sample(row, head, pages, chosen, attended, mass, weights @ values, sparse)


def _recall(masks: list[torch.Tensor], over: list[Sample]) -> float:
    return torch.stack([s.mass[:, mask].sum(-1).mean() for mask, s in zip(masks, over, strict=True)]).mean().item()


def _relative_l2(output: torch.Tensor, over: list[Sample], expected: list[torch.Tensor]) -> float:
    wanted = torch.stack(expected)
    got = torch.stack([output[s.row].unflatten(0, (-1, wanted.shape[1]))[s.head].double() for s in over])
    return ((got - wanted).norm() / wanted.norm()).item()
