"""Anchor attention at the sizes of a real server, blocks of 128 and groups of 2,048, by the reference."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from eval.lab.structured.generator import make_qkv
from eval.lab.structured.structure import Recipe
from sglang_sparse_kernels.anchor_prefill import GroupMeans, cases, make_plan, reference
from sglang_sparse_kernels.anchor_prefill.cases import Case, make

LENGTHS = [1, 127, 128, 129, 2047, 2048, 2049, 4096, 10_000]
BLOCK, STEP, GROUP = 128, 16, 2048
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


def dense(arguments: dict[str, Any], prefix: int, rows: list[int]) -> torch.Tensor:
    """Causal attention of some queries in float64."""
    slots = cases.row_slots(arguments["page_table"], 0, prefix + len(arguments["q"]), arguments["page_size"])
    keys, values = (arguments[name][slots, 0].double() for name in ("k_cache", "v_cache"))
    found = []
    for row in rows:
        seen = prefix + row + 1
        logits = arguments["q"][row].double() @ keys[:seen].T * arguments["sm_scale"]
        found.append(logits.softmax(-1) @ values[:seen])
    return torch.stack(found)


def some(length: int) -> list[int]:
    """Rows around the edges of blocks and groups, and the last one."""
    edges = (0, 1, 126, 127, 128, 2047, 2048, 2049, 4095, 4096, 6143, 6144)
    return sorted({row for row in (*edges, length - 1) if row < length})


@pytest.mark.parametrize("prefix", [0, 2048, 3001])
@pytest.mark.parametrize("length", LENGTHS)
def test_infinite_theta_is_dense_attention(length: int, prefix: int) -> None:
    arguments = inputs(prefix, length, float("inf"))
    rows = some(length)
    got, expected = run(arguments, prefix, length)[rows].double(), dense(arguments, prefix, rows)
    assert (got - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("chunk", [512, 777, 2048, 8192])
def test_chunks_of_any_size_are_dense_attention(chunk: int) -> None:
    arguments = inputs(130, 6200, float("inf"))
    rows = some(6200)
    got, expected = run(arguments, 130, chunk)[rows].double(), dense(arguments, 130, rows)
    assert (got - expected).norm() < 1e-5 * expected.norm()


@pytest.fixture(scope="module", params=["recipe", "spread"])
def prompt(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Three groups and a part of one, with stripes of one strength and an uneven background, or of many strengths."""
    length = 3 * GROUP + 500
    return with_stripes(length) if request.param == "recipe" else inputs(0, length, 7.0)


def with_stripes(length: int) -> dict[str, Any]:
    """A prompt with stripes of one strength and an uneven background."""
    arguments = inputs(0, length, 7.0)
    q, k, _ = make_qkv(length, 2, 1, 64, Recipe(), 0, "cpu")
    slots = cases.row_slots(arguments["page_table"], 0, length, arguments["page_size"])
    arguments["q"], arguments["k_cache"][slots] = q.float(), k.float()
    return arguments


def test_chunks_of_whole_groups_are_bit_equal(prompt: dict[str, Any]) -> None:
    whole = run(prompt, 0, 4 * GROUP)
    for chunk in (GROUP, 2 * GROUP):
        assert torch.equal(run(prompt, 0, chunk), whole)


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


CHUNKS = (64, 100, 128, 200, 256, 300, 384, 512, 640, 777, 1000, 1024, 1500, 1536, 2049, 3000)


def masses(arguments: dict[str, Any], group: int) -> torch.Tensor:
    """What each query of a group attends to of the keys that may be left out, ``[Hq, queries, candidates]``."""
    first, end = group * GROUP, min((group + 1) * GROUP, len(arguments["q"]))
    slots = cases.row_slots(arguments["page_table"], 0, end, arguments["page_size"])
    logits = torch.einsum("qhd,kd->hqk", arguments["q"][first:end], arguments["k_cache"][slots, 0])
    later = torch.ones(end - first, end, dtype=torch.bool).triu(first + 1)
    weights = logits.mul_(arguments["sm_scale"]).masked_fill_(later, float("-inf")).softmax(-1)
    return weights[..., BLOCK:first]


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
            missed, group = gaps > theta, start // GROUP
            lost += (self.mass[group][:, start % GROUP : start % GROUP + end - start] * missed[:, None]).sum().item()
            left_out += missed.sum().item() * (end - start)
            pairs += missed.numel() * (end - start)
        return 1 - lost / (2 * (self.length - GROUP)), left_out / pairs

    def differences(self, parts: list[tuple[int, int, torch.Tensor]]) -> list[float]:
        """How much more than in one piece is kept, for each threshold."""
        return [self.recall(parts, theta)[0] - self.recall(self.whole, theta)[0] for theta in self.thetas]


def test_chunks_that_cut_groups_keep_nearly_as_much_attention(prompt: dict[str, Any]) -> None:
    """Within half a point of recall, neither more nor less, for chunks of any size and thresholds among the scores."""
    measured = Measured(prompt)
    for theta in measured.thetas:
        whole, left_out = measured.recall(measured.whole, theta)
        assert 0.1 < left_out < 0.95 and 0.9 < whole < 1
    for chunk in CHUNKS:
        assert max(map(abs, measured.differences(measured.parts(chunk)))) < 0.005, f"chunks of {chunk}"
    # Without what is handed on they do not.
    assert min(measured.differences(measured.parts(512, carries=False))) < -0.015


@pytest.mark.parametrize(
    ("length", "dense", "bound"),
    [
        *((length, 0, 0.005) for length in (GROUP + 750, GROUP + 1000, 2 * GROUP, 2 * GROUP + 700)),
        # As by default, and less, behind which the first sparse group is a larger part of a short prompt.
        (5 * GROUP + 1000, 4 * GROUP, 0.005),
        (3 * GROUP, 2 * GROUP, 0.005),
        (2 * GROUP + 1000, GROUP, 0.0075),
    ],
)
def test_shorter_prompts_and_those_that_begin_dense(length: int, dense: int, bound: float) -> None:
    """Within half a point over all queries of the prompt; dense ones lend the first sparse group nothing."""
    measured = Measured(with_stripes(length), dense)
    for chunk in (64, 80, 128, 300, 777, 1500):
        found = measured.differences(measured.parts(chunk))
        lost = max(map(abs, found)) * (length - GROUP)
        assert lost / length < bound and lost / (length - dense) < 0.015 + (not dense), f"chunks of {chunk}: {found}"
