"""Quality of the outputs that ``bench_dsa`` times: the tokens that each one chose, and whether always the same ones.

Two selections are compared over a sample of queries by ``overlap``, the least share of a query's tokens that both have,
and ``off_by``: of the tokens that one has and the other has not, the largest distance of a logit in float64 from that
of the last token chosen, relative to it. Tokens with that very logit are as good as each other, and do not differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eval.lab.kernels.dsa import ATTEND, NATIVE
from eval.lab.kernels.dsa_inputs import LOGITS, Layer, Step
from eval.lab.kernels.harness import First, Implementation
from eval.lab.kernels.kernel_quality import require_near
from eval.lab.kernels.mla_inputs import SM_SCALE
from eval.lab.kernels.mla_quality import SAMPLED
from sglang_sparse_kernels.common.timing import Replay, Run
from sglang_sparse_kernels.index_logits import reference

# Less is another computation, not another rounding: float8 products of tensor cores keep fewer bits than float64.
LEAST_OVERLAP = 0.99
# Tokens of a prompt whose selections are compared; of decode all rows are.
PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Sample:
    """One query of the first layer.

    Attributes:
        query: which.
        slots: of its tokens, ``[length]`` int64.
        logits: of these in float64, rounded to float32.
        best: ``[length]`` bool, the highest of them, ties to the earlier one.
    """

    query: int
    slots: torch.Tensor
    logits: torch.Tensor
    best: torch.Tensor

    def chosen(self, output: torch.Tensor) -> torch.Tensor:
        """Return a mask of its tokens that an output names, ``[length]`` bool.

        Raises:
            ValueError: it names too few of them, or other tokens.
        """
        named = output[self.query]
        found = torch.isin(self.slots, named)
        count, wanted = int(found.sum()), int(self.best.sum())
        if count != wanted or int((named >= 0).sum()) != wanted:
            raise ValueError(f"query {self.query} names {count} tokens of its own, expected {wanted}")
        return found

    def differ(self, one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
        """``overlap`` and ``off_by`` of two selections."""
        last = self.logits[self.best].min()
        apart = (self.logits - last).abs()
        differing = (one ^ other) & (apart > 0)
        # As many were taken by either, but one may have taken in their place what is as good as the last.
        overlap = 1 - max(int((one & differing).sum()), int((other & differing).sum())) / int(one.sum())
        return overlap, (apart[differing].max() / last.abs()).item() if differing.any() else 0.0


def samples(step: Step, most: int = PROMPT_TOKENS) -> list[Sample]:
    """All rows of the first layer in decode, in prefill at most so many queries, spread evenly; none for attention."""
    queries = step.shape.queries
    count = min(most, queries) if step.shape.chunk else queries
    places = [i * (queries - 1) // max(1, count - 1) for i in range(count)]
    slots = step.slots()
    return [] if step.op == ATTEND else [_sample(step, step.layers[0], query, slots) for query in places]


def _sample(step: Step, layer: Layer, query: int, slots: torch.Tensor) -> Sample:
    one, length = slice(query, query + 1), int(step.lengths[query])
    if step.op in LOGITS:
        logits = layer.logits[query]
    else:
        row = (layer.buffer, step.page_table, step.rows[one], step.lengths[one])
        out = torch.empty(1, step.width, device=step.device)
        logits = reference.index_logits(layer.q[one], layer.weights[one], *row, out)[0]
    best = torch.zeros(length, dtype=torch.bool, device=step.device)
    order = logits[:length].sort(descending=True, stable=True).indices
    best[order[: step.shape.topk]] = True
    return Sample(query, slots[int(step.rows[query]), :length], logits[:length].clone(), best)


@dataclass
class Judge:
    """Judges the outputs for one step, and remembers whom to compare with whom.

    Attributes:
        step: the inputs.
        over: of `samples`.
        replays: times that each selection is made again.
        native: what SGLang's default chose of each sample; empty until it was judged.
        repeatable: by implementation, whether all replays chose the same tokens.
    """

    step: Step
    over: Sequence[Sample]
    replays: int
    native: list[torch.Tensor] = field(default_factory=list)
    repeatable: dict[str, bool] = field(default_factory=dict)

    def quality(self, one: Implementation[Step], output: torch.Tensor | None) -> dict[str, Any]:
        """The figures of quality of one output for the first layer.

        Args:
            one: who made it.
            output: what it is.

        Returns:
            Of attention ``relative_l2``, the relative L2 error against float64 over the same tokens. Of a selection
            ``overlap`` and ``off_by`` against the highest logits in float64, and against SGLang's default selection
            as ``native_overlap`` and ``native_off_by``.

        Raises:
            ValueError: it is wrong.
        """
        if output is None:
            raise ValueError("there is no output")
        if one.op == ATTEND:
            return {"relative_l2": _relative_l2(self.step, one, output)}
        chosen = [sample.chosen(output) for sample in self.over]
        found = self._compared(chosen, [sample.best for sample in self.over])
        if found["overlap"] < LEAST_OVERLAP:
            raise ValueError(f"it shares {found['overlap']:.3%} of the tokens (allowed: {LEAST_OVERLAP:.0%})")
        if one.name == NATIVE:
            self.native = chosen
        elif self.native:
            found |= {f"native_{name}": value for name, value in self._compared(chosen, self.native).items()}
        return found

    def _anew(self, first: First[Step], again: Callable[[], object]) -> Any:
        """Empty the buffers, call `again` and return its output, so that no earlier output passes for it."""
        _empty(self.step.layers[0], first.output)
        again()
        return first.output

    def _compared(self, ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> dict[str, float]:
        pairs = [sample.differ(*both) for sample, *both in zip(self.over, ones, others, strict=True)]
        return {"overlap": min(overlap for overlap, _ in pairs), "off_by": max(off_by for _, off_by in pairs)}

    def capture(self, capture: Callable[[Sequence[Run]], Replay], runs: Sequence[Run]) -> Replay:
        """Capture runs; the output of the `First` of them is emptied, made again and judged, and a selection then
        compared with itself, emptied again before each time.

        Raises:
            ValueError: what the graph writes is wrong, or this project's selection is not always the same; or whatever
                `capture` raises.
        """
        replay, first = capture(runs), runs[0]
        if not isinstance(first, First):
            return replay
        # What is called without a graph is so one by one: the other layers say nothing of the first.
        again = first if self.step.shape.chunk else replay
        made = self._anew(first, again)
        self.quality(first.one, made)
        if first.one.op == ATTEND or made is None:
            return replay
        sets = made.sort(-1).values
        others = sum(not torch.equal(self._anew(first, again).sort(-1).values, sets) for _ in range(self.replays - 1))
        self.repeatable[first.one.name] = not others
        if others and not first.one.peer:
            raise ValueError(f"{others} of {self.replays} replays chose other tokens than the first")
        return replay


def clear(step: Step) -> None:
    """Empty the buffers, so that no output of one implementation passes for that of the next."""
    for layer in step.layers:
        _empty(layer)


def _empty(layer: Layer, output: torch.Tensor | None = None) -> None:
    for tensor in (layer.out, layer.chosen, layer.slots, *([] if output is None else [output])):
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)


def _relative_l2(step: Step, one: Implementation[Step], output: torch.Tensor) -> float:
    layer, latent, wrong, size = step.layers[0], step.shape.latent, 0.0, 0.0
    for row in range(0, step.shape.batch, max(1, step.shape.batch // SAMPLED)):
        keys = layer.cache[layer.given[row, : int(step.wanted[row])].long()].double()
        expected = (layer.attending[row].double() @ keys.T * SM_SCALE).softmax(-1) @ keys[:, :latent]
        wrong += (output[row].double() - expected).square().sum().item()
        size += expected.square().sum().item()
    return require_near((wrong / size) ** 0.5, one.kv_dtype)
