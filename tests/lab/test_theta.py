"""Thresholds of AnchorAttention on structured attention: the measure against loops, the command, the figures."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eval.lab import theta
from eval.lab.documents import EVEN, RESULTS, SELECTORS, THETA
from eval.lab.selection.recall_attention import Captured
from eval.lab.selection.recall_planted import SHARE, Key, find, places, plant
from eval.lab.selection.recall_prefill import anchors, measure
from eval.lab.selection.theta_summary import PLANTED, SHARED, at_equal_sparsity, planted, spread, summarise
from eval.live.counters import EvaluationError
from eval.live.record import read_rows, result_files

BLOCK, STEP, TOKENS, HEADS = 16, 2, 90, 4
SMALL = ["--structured", "{}", "--lengths", "600", "--block-size", "64", "--step", "2", "--thetas", "2,6"]


@pytest.fixture(scope="module")
def captured() -> Captured:
    generator = torch.Generator().manual_seed(5)
    query, key = (3 * torch.randn(TOKENS, heads, 16, generator=generator) for heads in (HEADS, 2))
    return Captured(0, query, key, key, 0.25)


def loops(captured: Captured, limit: float, anchor: bool) -> tuple[torch.Tensor, ...]:
    """Sparsity, recall, and that of the best, of random and of the newest keys and of none by head, pair by pair."""
    kept_mass, left_out, oracle, random, window, always = torch.zeros(6, HEADS)
    for head in range(HEADS):
        logits = captured.query[:, head] @ captured.key[:, head // 2].T * captured.scaling
        causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        weights = logits.masked_fill(~causal, -torch.inf).softmax(1)
        kept = causal.clone()
        lost = by_chance = old = most = 0.0
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
            count = int((~hit[BLOCK:start]).sum())
            mass = weights[rows.start : rows.stop].sum(0)
            lost += mass[BLOCK:start].sort().values[:count].sum().item()
            optional = mass[BLOCK : start - BLOCK]
            by_chance += optional.mean().item() * count if len(optional) else 0.0
            old, most = old + optional[:count].sum().item(), most + optional.sum().item()
        kept_mass[head] = (weights * kept).sum() / TOKENS
        left_out[head] = 1 - kept.sum() / causal.sum()
        oracle[head], random[head] = 1 - lost / TOKENS, 1 - by_chance / TOKENS
        window[head], always[head] = 1 - old / TOKENS, 1 - most / TOKENS
    return left_out, kept_mass, oracle, random, window, always


def test_the_measure_is_what_it_says(captured: Captured) -> None:
    found = measure(captured, [5.0, 20.0, 30.0], BLOCK, STEP)
    assert [(kept.anchor, kept.theta) for kept in found] == [(a, t) for a in (True, False) for t in (5.0, 20.0, 30.0)]
    for kept in found:
        expected = loops(captured, kept.theta, kept.anchor)
        for got, one in zip((getattr(kept, name) for name in SHARED), expected, strict=True):
            torch.testing.assert_close(got, one, atol=1e-5, rtol=0)
        assert (kept.oracle >= kept.recall - 1e-5).all()
    assert 0 < found[1].sparsity.mean() < found[0].sparsity.mean()


def test_planted_keys_have_their_share_and_nothing_else_changes(captured: Captured) -> None:
    keys = [Key(torch.tensor([20, 25]), range(64, 80)), Key(torch.tensor([31, 16]), range(80, 83))]
    planted = plant(captured, keys)

    def weights(one: Captured, row: int, head: int) -> torch.Tensor:
        return (one.query[row, head] @ one.key[: row + 1, head // 2].T * one.scaling).softmax(0)

    for row in range(60, TOKENS):
        for head in range(HEADS):
            before, after = (weights(one, row, head) for one in (captured, planted))
            for one in keys:
                if row in one.queries:
                    at = int(one.positions[head // 2])
                    assert after[at].item() == pytest.approx(SHARE, abs=1e-4)
                    after[at] = before[at] = 0.0
            torch.testing.assert_close(after / after.sum(), before / before.sum(), atol=1e-5, rtol=1e-4)


def test_places_are_old_and_differ_by_prompt() -> None:
    keys, others = (places(700, 2, [64, 8, 1], 64, 2, seed) for seed in ("0 a", "0 b"))
    # The second group has no key that it may leave out, and the last one is cut.
    assert [one.queries for one in keys[:3]] == [range(256, 320), range(256, 264), range(320, 321)]
    assert keys[-1].queries == range(576, 577) and len(keys) == 9
    for one in keys:
        first = one.queries.start // 128 * 128
        assert ((one.positions >= 64) & (one.positions < 64 + (first - 128) // 2)).all()
    assert any((one.positions != other.positions).any() for one, other in zip(keys, others, strict=True))


def test_what_finds_planted_keys(captured: Captured) -> None:
    keys = [Key(torch.tensor([20, 47]), range(64, 80)), Key(torch.tensor([31, 16]), range(80, 83))]
    planted, optional = plant(captured, keys), 32
    for found in find(planted, keys, [0.0, 5.0, 20.0], BLOCK, STEP):
        (one,) = [one for one in keys if len(one.queries) == found.queries]
        for head in range(HEADS):
            logits = planted.query[:, head] @ planted.key[:, head // 2].T * planted.scaling
            hit = torch.zeros(TOKENS, dtype=torch.bool)
            for block in torch.arange(64, TOKENS).split(BLOCK):
                best = [logits[row, [*range(BLOCK), *range(64, row + 1)]].max() for row in block.tolist()]
                hit |= torch.stack(best).mean() - logits[block].mean(0) <= found.theta
            kept, at = int(hit[BLOCK : BLOCK + optional].sum()), int(one.positions[head // 2])
            by_window = at >= BLOCK + optional - kept
            got = [getattr(found, name)[head].item() for name in PLANTED]
            assert got == pytest.approx([float(hit[at]), kept / optional, float(by_window)])


def test_anchors_are_the_best_of_the_region(captured: Captured) -> None:
    found = anchors(captured, BLOCK, STEP)
    assert found.shape == (HEADS, 6)
    for head in range(HEADS):
        logits = captured.query[:, head] @ captured.key[:, head // 2].T * captured.scaling
        for block, rows in enumerate(torch.arange(TOKENS).split(BLOCK)):
            best = []
            for row in rows.tolist():
                start = row // (BLOCK * STEP) * BLOCK * STEP
                region = torch.cat([logits[row, : min(BLOCK, row + 1)], logits[row, start : row + 1]])
                best.append(region.max())
            assert found[head, block].item() == pytest.approx(float(torch.stack(best).mean()), abs=1e-4)


def test_inputs_have_names() -> None:
    for given, name in (("{}", "structured"), ('{"block_level": 1}', "structured, level")):
        assert theta.task_of(theta.parse(["--structured", given, "--out", "x"])) == name
    assert theta.task_of(theta.parse(["--model-path", "m", "--out", "x"])) == "needle"


def points(anchor: bool, *pairs: tuple[float, float]) -> list[dict[str, Any]]:
    place = {"task": "needle", "length": 8192, "anchor": anchor}
    return [{**place, "theta": float(i), "sparsity": s, "recall": r} for i, (s, r) in enumerate(pairs)]


def test_equal_sparsity_lies_on_straight_lines() -> None:
    summary = points(True, (0.8, 0.6), (0.8, 0.5), (0.4, 0.9), (0.0, 1.0))
    summary += points(False, (0.7, 0.5), (0.2, 0.9))
    found = at_equal_sparsity(summary, (0.1, 0.2, 0.6, 0.75))
    # What both reach; of equal sparsities the better recall counts.
    assert [(row["sparsity"], row["length"]) for row in found] == [(0.2, 8192), (0.6, 8192)]
    assert [row["recall"] for row in found] == pytest.approx([0.95, 0.75])
    assert [row["recall_without"] for row in found] == pytest.approx([0.9, 0.58])


def test_the_spread_of_anchors() -> None:
    row = {
        "kind": "anchors",
        "id": "0/0",
        "task": "needle",
        "length": 8192,
        "mean": [1.0, 2.0],
        "deviation": [0.1, 0.3],
    }
    other = {**row, "id": "0/1", "mean": [3.0, 4.0], "deviation": [0.5, 0.7]}
    (found,) = spread([{**row, "mean": [9.0, 9.0]}, other, row, {"kind": "item"}])
    assert found["n_heads"] == 4 and found["mean"] == 2.5
    assert found["heads"] == pytest.approx(1.25**0.5) and found["blocks"] == pytest.approx(0.4)


def test_the_command_writes_once_and_goes_on(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "theta.jsonl"
    command = [*SMALL, "--n", "2", "--planted", "64,8", "--out", str(out), "--revision", "test"]
    assert theta.main(command) == 0
    rows = read_rows(out)
    kinds = [row["kind"] for row in rows]
    assert kinds.count("item") == 2 * 2 * 2 and kinds.count("anchors") == 2
    assert kinds.count("planted") == 2 * 2 * 2
    summary = [row for row in rows if row["kind"] == "summary"]
    assert [(row["anchor"], row["theta"]) for row in summary] == [(True, 2.0), (True, 6.0), (False, 2.0), (False, 6.0)]
    assert summary[0]["sparsity"] > summary[1]["sparsity"] and summary[0]["recall"] < summary[1]["recall"] <= 1
    assert theta.main(["--from", str(out), "--plot", str(tmp_path / "picture")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"theta.jsonl", "picture.svg"}
    assert "structured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "2k", "--structured", "{}", "--out", "x"], "allowed is a list of lengths above a group of 2048"),
        (["--out", "x"], "one of --model-path and --structured is needed"),
        ([*SMALL], "--out is needed"),
        ([*SMALL, "--out", "x", "--n", "0"], "--n 0: allowed is 1 or more"),
        ([*SMALL, "--out", "x", "--planted", "65"], "--planted [65]: allowed are up to 2 numbers from 1 to 64"),
        ([*SMALL, "--out", "x", "--planted", "1,1,1"], "allowed are up to 2 numbers"),
        ([*SMALL[2:], "--structured", '{"sinks": 1}', "--out", "/tmp/never/x"], "sinks"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: Any) -> None:
    assert theta.main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize("name", EVEN)
def test_the_anchor_keeps_more_of_the_same_size(name: str) -> None:
    """What the paper's table 4 shows, in the files that the documents are made from."""
    rows = read_rows(result_files(RESULTS)[name])
    found = at_equal_sparsity(summarise(rows), [share / 20 for share in range(1, 20)])
    assert len(found) >= 13 * len(rows[0]["arguments"]["lengths"])
    assert all(row["recall"] > row["recall_without"] for row in found)


def test_planted_keys_tell_selectors_apart() -> None:
    """Of the file that the documents are made from, where few keys are kept: its mean hides a part of a block."""
    rows = read_rows(result_files(RESULTS)[SELECTORS])
    lines = [line for line in planted(rows) if line["random"] < 0.05]
    assert {line["length"] for line in lines} == {8192, 16384, 32768}
    for line in lines:
        assert line["anchor 128"] > 0.95 and line["window"] < 0.01 and line["n"] >= 48
        assert line["anchor 8"] < 0.05
    kept = [row for row in summarise(rows) if row["anchor"] and row["sparsity"] > 0.6]
    for row in kept:
        best, found, *others = (row[name] - row["always"] for name in ("oracle", "recall", "random", "window"))
        assert max(others) < 0.5 * found <= 0.5 * best + 1e-6
    assert len(kept) >= 15


def test_planted_keys_are_counted_once() -> None:
    row = {"kind": "planted", "id": "a", "task": "it", "length": 8192, "theta": 2.0, "queries": 8, "keys": 3}
    row |= {"anchor": [0.0, 0.5], "random": [0.1, 0.3], "window": [0.0, 0.0]}
    other = {**row, "id": "b", "queries": 128, "anchor": [1.0, 1.0], "window": [0.0, 1.0]}
    again = {**other, "id": "c", "window": [0.5, 0.5]}
    few = {**row, "id": "d", "anchor": [0.25, 0.25]}
    (line,) = planted([{**row, "anchor": [9.0, 9.0]}, row, few, other, again, {"kind": "item"}])
    assert (line["anchor 8"], line["anchor 128"], line["n"]) == (0.25, 1.0, 12)
    assert line["random"] == pytest.approx(0.2) and line["window"] == pytest.approx(0.25)
    with pytest.raises(EvaluationError, match="it, 8192: 6 keys are planted for some queries, 12 for others"):
        planted([row, other, again])


def test_the_planted_level_is_the_model_s() -> None:
    model, planted = (read_rows(result_files(RESULTS)[name]) for name in THETA)
    recipe = planted[0]["arguments"]["structured"]
    for found in spread(model):
        assert recipe["head_level"] == pytest.approx(found["heads"], abs=0.05)
        assert recipe["block_level"] == pytest.approx(found["blocks"], abs=0.01)


def test_a_file_without_items() -> None:
    with pytest.raises(EvaluationError, match="no items"):
        summarise([{"kind": "header"}])
