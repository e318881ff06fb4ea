"""Tests of ``bench_dsa``'s report on selections: who agrees with whom; those wrong, stale or not always the same."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from dsa_libraries import PROMPT, SHAPE, install, machine, of
from mla_layers import missing

from eval.lab.bench_dsa import measure
from eval.lab.kernels.dsa import AUTO, DECODE, DECODE_TOPK, PORTABLE, PREFILL, PREFILL_TOPK
from eval.lab.kernels.dsa_inputs import Layer, Shape, Step
from eval.lab.kernels.dsa_quality import Judge, clear, samples
from eval.lab.kernels.dsa_table import TABLE, failed
from eval.lab.kernels.harness import Machine, gpu, kept
from sglang_sparse_kernels.common.timing import Run


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def wrong(step: Step) -> list[Run]:
    """Names the earliest tokens, which are not the best."""
    slots = step.slots()[step.rows.long(), : step.shape.topk].int()
    return [lambda layer=layer: slots for layer in step.layers]


def twice(step: Step) -> list[Run]:
    """Names one token twice."""
    return [lambda layer=layer: step.portable(layer).index_fill(1, torch.tensor([1]), 0) for layer in step.layers]


def fickle(step: Step) -> list[Run]:
    """Chooses the best tokens, and at every other time one other token."""
    called: list[int] = []

    def run(layer: Layer) -> torch.Tensor:
        called.append(1)
        slots = step.portable(layer).clone()
        if len(called) % 2 == 0:
            slots[0, 0] = next(slot for slot in step.slots()[0].tolist() if slot not in slots[0].tolist())
        return slots

    return [partial(run, layer) for layer in step.layers]


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (ours,) = of(DECODE, PORTABLE)
    plan = [replace(ours, name=one.__name__, prepare=one) for one in (wrong, twice, missing)]
    rows = measure(SHAPE, DECODE, plan, machine(), 2)
    said = [row["unavailable"] for row in rows]
    assert "of the tokens (allowed: 99%)" in said[0] and "names 6" in said[1] and "no module" in said[2]
    assert not any("us" in row for row in rows) and failed(rows)
    monkeypatch.setattr("eval.lab.kernels.dsa_quality.LEAST_OVERLAP", 0.9)
    plan = [replace(ours, prepare=fickle), replace(ours, name="theirs", peer=True, prepare=fickle)]
    mine, theirs = measure(SHAPE, DECODE, plan, machine(), 2, replays=5)
    assert mine["unavailable"] == "ValueError: 2 of 5 replays chose other tokens than the first"
    assert theirs["repeatable"] is False and theirs["us"] == 5 and theirs["overlap"] == 1
    capsys.readouterr()


def stale(step: Step) -> list[Run]:
    """Writes its choice once, and nothing in any replay."""
    called: list[int] = []

    def run(layer: Layer) -> torch.Tensor:
        called.append(1)
        return step.portable(layer) if len(called) == 1 else layer.slots

    return [partial(run, layer) for layer in step.layers]


def test_what_a_replay_does_not_write_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    (ours,) = of(DECODE, PORTABLE)
    (row,) = measure(SHAPE, DECODE, [replace(ours, prepare=stale)], machine(), 2)
    assert "names 0 tokens of its own, expected 70" in row["unavailable"]
    capsys.readouterr()


def test_all_rows_of_decode_are_judged_and_some_tokens_of_a_prompt() -> None:
    rows, tokens = (samples(Step(shape, op, "cpu", 1)) for shape, op in ((SHAPE, DECODE_TOPK), (PROMPT, PREFILL_TOPK)))
    assert [one.query for one in rows] == [0, 1]
    assert len({one.query for one in tokens}) == 64 and tokens[0].query == 0 and tokens[-1].query == 89
    assert len(samples(Step(replace(SHAPE, batch=70, length=80), DECODE_TOPK, "cpu", 1))) == 70


def test_how_two_selections_differ() -> None:
    step = Step(SHAPE, DECODE_TOPK, "cpu", 1)
    one = samples(step)[1]
    other = one.best.clone()
    kth, beyond = one.logits[one.best].min(), one.logits[~one.best].max()
    other[one.best & (one.logits == kth)] = False
    other[~one.best & (one.logits == beyond)] = True
    overlap, off_by = one.differ(one.best, other)
    assert overlap == 1 - 1 / 70 and off_by == pytest.approx(float((kth - beyond) / kth))
    one.logits[one.logits == beyond] = kth
    assert one.differ(one.best, other) == (1, 0)
    with pytest.raises(ValueError, match="there is no output"):
        Judge(step, [], 2).quality(TABLE[0], None)


def agreement(shape: Shape, op: str, found: Machine, most: int, replays: int) -> dict[str, Any]:
    """Return, by name, how each selection differs from SGLang's, and whether replays chose the same tokens."""
    step = Step(shape, op, found.device, 2)
    judge = Judge(step, samples(step, most), replays)
    rows = {}
    for one in of(op):
        runs = kept(one, clear).prepare(step)
        rows[one.name] = judge.quality(one, runs[0]())
        judge.capture(found.repeat if shape.chunk else found.capture, runs)
        rows[one.name]["repeatable"] = judge.repeatable[one.name]
    return rows


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("shape", "op"), [(SHAPE, DECODE), (PROMPT, PREFILL)])
def test_all_agree_on_every_query(shape: Shape, op: str) -> None:
    rows = agreement(shape, op, machine(), 100, 3)
    for name in (AUTO, PORTABLE):
        assert rows[name] == {"overlap": 1, "off_by": 0, "native_overlap": 1, "native_off_by": 0, "repeatable": True}


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU, for which SGLang's kernels are",
)
@pytest.mark.parametrize(
    ("shape", "op"), [(Shape(8, 8192), DECODE), (Shape(1, 8192, chunk=2048), PREFILL)], ids=["decode", "prefill"]
)
def test_native_and_portable_agree_on_a_gpu(shape: Shape, op: str) -> None:
    rows = agreement(shape, op, gpu(), 64, 100)
    for name in (AUTO, PORTABLE):
        assert rows[name]["native_overlap"] >= 0.999 and rows[name]["native_off_by"] <= 1e-4, (name, rows)
