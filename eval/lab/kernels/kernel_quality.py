"""Quality of the outputs that ``eval.lab.bench_kernels`` times, against float64 over a sample of rows and KV heads.

An output further from float64 than roundings explain is refused, so that no wrong call is timed as a right one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from eval.lab.kernels import kernel_votes
from eval.lab.kernels.harness import Implementation
from eval.lab.kernels.kernel_inputs import WHOLE, Shape, Step

SAMPLED = 8
# Relative L2 by the element type of the cache: of float8 kernels some round queries and weights to it, too.
LARGEST_L2 = {torch.bfloat16: 0.02, torch.float8_e4m3fn: 0.2}
# Of a score, relative to the sum of its terms' sizes: float32 sums of 128 terms.
LARGEST_SCORE_ERROR = 1e-5


@dataclass(frozen=True)
class Sample:
    """One row and KV head of a layer, in float64.

    Attributes:
        row, head: which.
        pages: physical pages of the row, ``[n_pages]`` int64.
        attended: which of them the given selection holds, ``[n_pages]`` bool.
        scores: of the pages, the local ones +inf, ``[n_pages]``.
        terms: the largest sum of the sizes of a score's terms.
        mass: share of the dense softmax that falls on each page, ``[G, n_pages]``.
        dense: output of attention over all tokens, ``[G, d]``.
        sparse: output of attention over the tokens of the attended pages, ``[G, d]``.
    """

    row: int
    head: int
    pages: torch.Tensor
    attended: torch.Tensor
    scores: torch.Tensor
    terms: float
    mass: torch.Tensor
    dense: torch.Tensor
    sparse: torch.Tensor


def samples(step: Step) -> list[Sample]:
    """At most `SAMPLED` rows and KV heads of the first layer, spread evenly."""
    return [_sample(step, *pair) for pair in sampled_pairs(step.shape)]


def sampled_pairs(shape: Shape) -> list[tuple[int, int]]:
    """At most `SAMPLED` rows, each with a KV head, spread evenly."""
    pairs = shape.batch * shape.kv_heads
    count = min(SAMPLED, pairs)
    return [divmod(i * (pairs - 1) // max(1, count - 1), shape.kv_heads) for i in range(count)]


def logits_and_values(step: Step, row: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits and the values of a row and KV head of the first layer, in float64.

    Returns:
        ``[G, length]`` and ``[length, d]``.
    """
    shape, layer = step.shape, step.layers[0]
    group = shape.q_heads // shape.kv_heads
    pages = step.batch.page_table[row].long()
    slots = (pages[:, None] * shape.page_size + torch.arange(shape.page_size, device=pages.device)).flatten()
    keys, values = (cache[slots[: shape.length], head].double() for cache in (layer.k_cache, layer.v_cache))
    return layer.q[row, head * group : (head + 1) * group].double() @ keys.T * step.sm_scale, values


def quality(step: Step, over: list[Sample], one: Implementation[Step], output: torch.Tensor | None) -> dict[str, float]:
    """The figures of quality that belong to an operation.

    Args:
        step: the inputs.
        over: of `samples`.
        one: who did it.
        output: what it gave for the first layer: ``[B, Hq, d]``, of page_score ``[B, Hkv, max_pages]``, of page_topk
            physical pages ``[B, Hkv, n]``.

    Returns:
        Of attention ``relative_l2``, the relative L2 error against float64 over the same tokens; over selected pages
        also ``recall``, the share of the dense softmax that the pages hold, mean over the query heads of the sample,
        and ``dense_l2``, the relative L2 distance from dense attention. Of a selection ``recall``, and ``agreement``,
        the share of the given pages that it selects too; of a chain both. Of scores ``score_error``, see
        `LARGEST_SCORE_ERROR`. Of summaries nothing: tests hold them equal to their reference.

    Raises:
        ValueError: scores, attention, or what a chain selects are wrong.
    """
    if output is None:
        return {}
    largest = LARGEST_SCORE_ERROR
    if one.name in (kernel_votes.VOTES, kernel_votes.CENTROIDS):
        over, largest = _by_votes(step, over, one.name), kernel_votes.LARGEST_VOTE_ERROR
    if one.op == "page_score":
        return {"score_error": _score_error(output, over, largest)}
    if one.op == "page_topk":
        return _of_selection(over, [torch.isin(s.pages, output[s.row, s.head].long()) for s in over])
    if one.op not in ("sparse_decode", WHOLE):
        return {"relative_l2": require_near(_relative_l2(output, over, [s.dense for s in over]), one.kv_dtype)}
    found, expected = {"recall": _recall([s.attended for s in over], over)}, [s.sparse for s in over]
    if one.op == WHOLE:
        masks = [_selected(step, s) for s in over]
        for sample, mask in zip(over, masks, strict=True):
            _require_highest(sample, mask, largest)
        found = _of_selection(over, masks)
        expected = [_attention(step, sample, mask) for sample, mask in zip(over, masks, strict=True)]
    found["relative_l2"] = require_near(_relative_l2(output, over, expected), one.kv_dtype)
    return {**found, "dense_l2": _relative_l2(output, over, [s.dense for s in over])}


def _sample(step: Step, row: int, head: int) -> Sample:
    shape, layer = step.shape, step.layers[0]
    pages = step.batch.page_table[row].long()
    logits, values = logits_and_values(step, row, head)
    weights = logits.softmax(-1)
    attended = torch.isin(pages, step.given_pages(layer)[row, head].long())
    spread = torch.nn.functional.pad(weights, (0, shape.n_pages * shape.page_size - shape.length))
    mass = spread.unflatten(1, (shape.n_pages, shape.page_size)).sum(-1)
    query = layer.q[row].unflatten(0, (shape.kv_heads, -1))[head].double().mean(0)
    terms = query * layer.summary[pages, head].double()
    scores = terms.amax(1).sum(-1)
    scores[-shape.local_pages :] = torch.inf
    sparse = _over_pages(shape, attended, logits, values)
    return Sample(row, head, pages, attended, scores, terms.abs().sum(-1).max().item(), mass, weights @ values, sparse)


def _over_pages(shape: Shape, mask: torch.Tensor, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    tokens = mask.repeat_interleave(shape.page_size)[: shape.length]
    return logits.masked_fill(~tokens, float("-inf")).softmax(-1) @ values


def _selected(step: Step, sample: Sample) -> torch.Tensor:
    """Return a mask of the pages of a row that the last chain of kernels selected, ``[n_pages]`` bool."""
    indices, counts = (made[sample.row, sample.head] for made in step.view.selected)
    return torch.isin(sample.pages, indices[: int(counts)].long())


def _attention(step: Step, sample: Sample, mask: torch.Tensor) -> torch.Tensor:
    """Over the tokens of some pages, in float64, ``[G, d]``."""
    if torch.equal(mask, sample.attended):
        return sample.sparse
    return _over_pages(step.shape, mask, *logits_and_values(step, sample.row, sample.head))


def _by_votes(step: Step, over: list[Sample], name: str) -> list[Sample]:
    """The samples with the votes for their scores, which are logarithms, and the pages that these choose."""
    found = []
    for sample in over:
        scores = kernel_votes.expected_votes(name, step, sample.row, sample.head)
        attended = torch.zeros_like(sample.attended).index_fill(0, scores.topk(step.shape.n_select).indices, True)
        sparse = _over_pages(step.shape, attended, *logits_and_values(step, sample.row, sample.head))
        found.append(replace(sample, scores=scores, terms=1.0, attended=attended, sparse=sparse))
    return found


def _score_error(output: torch.Tensor, over: list[Sample], largest: float) -> float:
    errors = []
    for sample in over:
        got, local = output[sample.row, sample.head, : len(sample.pages)].double(), sample.scores.isinf()
        require(bool((got[local] == torch.inf).all()), "the newest pages do not score infinity")
        errors.append((got - sample.scores)[~local].abs() / sample.terms)
    # Python's max would pass over a NaN.
    found = torch.cat(errors).amax().item()
    require(found <= largest, f"its scores are off by {found:.2g} (allowed: {largest:g})")
    return found


def _require_highest(sample: Sample, mask: torch.Tensor, largest: float) -> None:
    """Refuse a selection that is not of the highest pages, but for those whose scores are equal up to roundings."""
    lowest = sample.scores[sample.attended].amin()
    others, allowed = mask ^ sample.attended, 2 * largest
    equal = (sample.scores[others] - lowest).abs() <= allowed * sample.terms
    require(
        bool(equal.all()) and int(mask.sum()) == int(sample.attended.sum()),
        f"it selects {int(mask.sum())} pages of which {int((mask & ~sample.attended).sum())} are not among the "
        f"{int(sample.attended.sum())} highest, and {int((~equal).sum())} are off by more than {allowed:g}",
    )


def _of_selection(over: list[Sample], masks: list[torch.Tensor]) -> dict[str, float]:
    both = sum(int((mask & s.attended).sum()) for mask, s in zip(masks, over, strict=True))
    return {"recall": _recall(masks, over), "agreement": both / sum(int(s.attended.sum()) for s in over)}


def _recall(masks: list[torch.Tensor], over: list[Sample]) -> float:
    return torch.stack([s.mass[:, mask].sum(-1).mean() for mask, s in zip(masks, over, strict=True)]).mean().item()


def require(good: bool, what: str) -> None:
    """Refuse an implementation.

    Raises:
        ValueError: not ``good``; the message is ``what``.
    """
    if not good:
        raise ValueError(what)


def require_near(relative_l2: float, kv_dtype: torch.dtype) -> float:
    """Refuse an output that is further from float64 than roundings explain.

    Returns:
        ``relative_l2``.

    Raises:
        ValueError: it is above `LARGEST_L2`, or NaN.
    """
    allowed = LARGEST_L2[kv_dtype]
    # Written so that NaN fails.
    require(
        relative_l2 <= allowed,
        f"its output is wrong: relative L2 {relative_l2:.2g} from float64 (allowed: {allowed:g})",
    )
    return relative_l2


def _relative_l2(output: torch.Tensor, over: list[Sample], expected: list[torch.Tensor]) -> float:
    wanted = torch.stack(expected)
    got = torch.stack([output[s.row].unflatten(0, (-1, wanted.shape[1]))[s.head].double() for s in over])
    return ((got - wanted).norm() / wanted.norm()).item()
