"""Prompts of anchor attention at the sizes of a real server, in chunks, and what these keep of the attention."""

from collections.abc import Iterator
from typing import Any

import torch

from sglang_sparse_kernels.anchor_prefill import GroupMeans, cases, make_plan, reference
from sglang_sparse_kernels.anchor_prefill.cases import Case, make

BLOCK, STEP, GROUP = 128, 16, 2048
CHUNKS = (64, 100, 128, 200, 256, 300, 384, 512, 640, 777, 1000, 1024, 1500, 1536, 2049, 3000)
FP32 = torch.float32


def inputs(prefix: int, length: int, theta: float) -> dict[str, Any]:
    case = Case((prefix,), (length,), 16, 1, 2, 64, FP32, FP32, block_size=BLOCK, step=STEP)
    arguments = make(case, "cpu")
    return {**arguments, "theta": torch.full_like(arguments["theta"], theta), "k_scale": 1.0, "v_scale": 1.0}


def run(arguments: dict[str, Any], prefix: int, chunk: int) -> torch.Tensor:
    """A prompt in chunks behind a prefix."""
    outs = []
    for part in passes(arguments, prefix, chunk):
        out = torch.empty(*part["q"].shape[:2], arguments["v_cache"].shape[2])
        outs.append(reference.anchor_prefill(**part, out=out))
    return torch.cat(outs)


def passes(
    arguments: dict[str, Any], prefix: int, chunk: int, carries: bool = True, dense: int = 0
) -> Iterator[dict[str, Any]]:
    """Arguments of each pass of a prompt in chunks behind a prefix, which hand on their means.

    ``dense`` queries run densely.
    """
    start, q = prefix, arguments["q"]
    means = {0: GroupMeans.allocate(STEP, *q.shape[1:], FP32, "cpu")}
    prompt = [(prefix + dense, prefix + len(q))]
    for part in q.split(chunk):
        carried = max(0, start - prefix - dense) if carries else 0
        plan = make_plan([start], [len(part)], BLOCK, STEP, "cpu", prompt, carried=[carried])
        yield {**arguments, "q": part, "plan": plan, "means": means}
        start += len(part)


def least_gaps(
    arguments: dict[str, Any], chunk: int, carries: bool = True, dense: int = 0
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Of each part of a group that may leave out keys, the positions of its queries, and gaps ``[Hq, candidates]``."""
    start = 0
    # What a part hands on does not depend on what it attends to.
    nothing = {**arguments, "theta": torch.tensor([float("-inf")])}
    for one in passes(nothing, 0, chunk, carries, dense):
        end = start + len(one["q"])
        for group in range(max(1, start // GROUP, dense // GROUP), -(-end // GROUP)):
            names = ("q", "k_cache", "page_table", "plan", "page_size", "sm_scale", "k_scale")
            gaps = reference.key_gaps(*(one[name] for name in names), row=0, group=group, means=one["means"])
            yield max(start, group * GROUP), min(end, (group + 1) * GROUP), gaps.amin(0)
        if end < len(arguments["q"]):
            reference.anchor_prefill(**one, out=torch.empty_like(one["q"]))
        start = end


def masses(arguments: dict[str, Any], group: int) -> torch.Tensor:
    """Return the attention of a group's first n queries to each key that may be left out, for each n.

    ``[Hq, queries + 1, candidates]``.
    """
    first, end = group * GROUP, min((group + 1) * GROUP, len(arguments["q"]))
    slots = cases.row_slots(arguments["page_table"], 0, end, arguments["page_size"])
    logits = torch.einsum("qhd,kd->hqk", arguments["q"][first:end], arguments["k_cache"][slots, 0])
    later = torch.ones(end - first, end, dtype=torch.bool).triu(first + 1)
    weights = logits.mul_(arguments["sm_scale"]).masked_fill_(later, float("-inf")).softmax(-1)
    return torch.nn.functional.pad(weights[..., BLOCK:first], (0, 0, 1, 0)).cumsum(1)


class Measured:
    """Recall of a prompt in one piece and in chunks, by thresholds among its scores."""

    def __init__(self, arguments: dict[str, Any], dense: int = 0) -> None:
        self.length, self.arguments, self.dense = len(arguments["q"]), arguments, dense
        self.mass = {group: masses(arguments, group) for group in range(1, -(-self.length // GROUP))}
        self.whole = self.parts(self.length)
        scores = torch.cat([gaps[gaps.isfinite()] for _, _, gaps in self.whole])
        self.thetas = [scores.quantile(1 - share).item() for share in (0.95, 0.9, 0.8, 0.7, 0.55, 0.3)]

    def parts(self, chunk: int, carries: bool = True) -> list[tuple[int, int, torch.Tensor]]:
        return list(least_gaps(self.arguments, chunk, carries, self.dense))

    def recall(self, parts: list[tuple[int, int, torch.Tensor]], theta: float) -> tuple[float, float]:
        """And the share of candidates that are left out, over the queries that may leave out some."""
        lost = left_out = pairs = 0.0
        for start, end, gaps in parts:
            missed, first, mass = gaps > theta, start % GROUP, self.mass[start // GROUP]
            lost += (mass[:, first + end - start] - mass[:, first])[missed].sum().item()
            left_out += missed.sum().item() * (end - start)
            pairs += missed.numel() * (end - start)
        return 1 - lost / (2 * (self.length - GROUP)), left_out / pairs

    def differences(self, parts: list[tuple[int, int, torch.Tensor]]) -> list[float]:
        """Return the recall minus that in one piece, for each threshold."""
        return [self.recall(parts, theta)[0] - self.recall(self.whole, theta)[0] for theta in self.thetas]


def require_bit_equal_groups(prompt: dict[str, Any]) -> None:
    whole = run(prompt, 0, 4 * GROUP)
    for chunk in (GROUP, 2 * GROUP):
        assert torch.equal(run(prompt, 0, chunk), whole)


def require_nearly_as_much(prompt: dict[str, Any]) -> None:
    """Within half a point of recall, neither more nor less, for chunks of any size and thresholds among the scores."""
    measured = Measured(prompt)
    for theta in measured.thetas:
        whole, left_out = measured.recall(measured.whole, theta)
        assert 0.1 < left_out < 0.95 and 0.9 < whole < 1
    for chunk in CHUNKS:
        assert max(map(abs, measured.differences(measured.parts(chunk)))) < 0.005, f"chunks of {chunk}"
    # Without what is handed on they do not.
    assert min(measured.differences(measured.parts(512, carries=False))) < -0.015
