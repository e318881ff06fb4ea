"""Thresholds of AnchorAttention on structured attention: the measure against loops, the command, the figures."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eval import theta
from eval.figures.theta_summary import summarise
from eval.live.counters import EvaluationError
from eval.live.record import read_rows
from eval.parts.recall_attention import Captured
from eval.parts.recall_prefill import measure

BLOCK, STEP, TOKENS, HEADS = 16, 2, 90, 4
SMALL = ["--structured", "{}", "--lengths", "600", "--block-size", "64", "--step", "2", "--thetas", "2,6"]


@pytest.fixture(scope="module")
def captured() -> Captured:
    generator = torch.Generator().manual_seed(5)
    query, key = (3 * torch.randn(TOKENS, heads, 16, generator=generator) for heads in (HEADS, 2))
    return Captured(0, query, key, key, 0.25)


def loops(captured: Captured, limit: float, anchor: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparsity and recall by head, pair by pair."""
    kept_mass, left_out = torch.zeros(HEADS), torch.zeros(HEADS)
    for head in range(HEADS):
        logits = captured.query[:, head] @ captured.key[:, head // 2].T * captured.scaling
        causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        kept = causal.clone()
        for start in range(BLOCK * STEP, TOKENS, BLOCK * STEP):
            rows = range(start, min(start + BLOCK * STEP, TOKENS))
            region = causal.clone()
            region[:, BLOCK:start] = False
            best = logits.masked_fill(~region, -torch.inf).amax(1)
            hit = torch.zeros(TOKENS, dtype=torch.bool)
            for block in torch.tensor(rows).split(BLOCK):
                score = logits[block].mean(0)
                hit |= (best[block].mean() if anchor else 0.0) - score <= limit
            hit[start - BLOCK :] = True
            kept[rows.start : rows.stop, BLOCK:start] &= hit[BLOCK:start]
        weights = logits.masked_fill(~causal, -torch.inf).softmax(1)
        kept_mass[head] = (weights * kept).sum() / TOKENS
        left_out[head] = 1 - kept.sum() / causal.sum()
    return left_out, kept_mass


def test_the_measure_is_what_it_says(captured: Captured) -> None:
    found = measure(captured, [5.0, 20.0, 30.0], BLOCK, STEP)
    assert [(kept.anchor, kept.theta) for kept in found] == [(a, t) for a in (True, False) for t in (5.0, 20.0, 30.0)]
    for kept in found:
        sparsity, recall = loops(captured, kept.theta, kept.anchor)
        torch.testing.assert_close(kept.sparsity, sparsity, atol=1e-5, rtol=0)
        torch.testing.assert_close(kept.recall, recall, atol=1e-5, rtol=0)
    assert 0 < found[1].sparsity.mean() < found[0].sparsity.mean()


def test_the_command_writes_once_and_goes_on(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "theta.jsonl"
    command = [*SMALL, "--n", "2", "--out", str(out), "--revision", "test"]
    assert theta.main(command) == 0
    rows = read_rows(out)
    assert [row["kind"] for row in rows].count("item") == 2 * 2 * 2
    summary = [row for row in rows if row["kind"] == "summary"]
    assert [(row["anchor"], row["theta"]) for row in summary] == [(True, 2.0), (True, 6.0), (False, 2.0), (False, 6.0)]
    assert summary[0]["sparsity"] > summary[1]["sparsity"] and summary[0]["recall"] < summary[1]["recall"] <= 1
    assert theta.main(["--from", str(out), "--plot", str(tmp_path / "picture")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"theta.jsonl", "picture.png", "picture.svg"}
    assert "structured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "2k", "--structured", "{}", "--out", "x"], "allowed is a list of lengths above a group of 2048"),
        (["--out", "x"], "one of --model-path and --structured is needed"),
        ([*SMALL], "--out is needed"),
        ([*SMALL, "--out", "x", "--n", "0"], "--n 0: allowed is 1 or more"),
        ([*SMALL[2:], "--structured", '{"sinks": 1}', "--out", "/tmp/never/x"], "sinks"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: Any) -> None:
    assert theta.main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_file_without_items() -> None:
    with pytest.raises(EvaluationError, match="no items"):
        summarise([{"kind": "header"}])
