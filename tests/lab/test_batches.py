"""The table of needles in batches of mixed lengths, from hand-made files."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.lab.tables.batches import batches, pooled
from eval.live.counters import COUNTED

LENGTHS = (10240, 32768)


def write(path: Path, wrong: int, computed: int, **header: Any) -> Path:
    """A file of 300 questions of two lengths, `wrong` of which the base server alone gets wrong."""
    asked = {"lengths": LENGTHS, "form": "second_turn", "mixed": True} | header
    server = {"device": "cuda", "disable_cuda_graph": False, "sparse_prefill_method": "anchor"}
    rows: list[dict[str, Any]] = [{"kind": "header", "arguments": asked, "servers": {"base": server}}]
    for arm in ("base", "compare"):
        for i in range(300):
            score = float(arm == "compare" or i >= wrong)
            row = {"kind": "item", "arm": arm, "task": "single", "length": LENGTHS[i % 2], "id": str(i)}
            rows.append(row | {"prompt_sha": str(i), "prompt_tokens": 100, "scores": {"score": score}})
        counts = dict.fromkeys(COUNTED, 0) | {"prefill_sparse_tokens": computed, "prefill_dense_tokens": 3000}
        counts |= {"prefill_pairs_attended": 40, "prefill_pairs_causal": 100}
        rows.append({"kind": "counters", "arm": arm, "task": None, "length": None, "counters": counts})
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"kind": "summary"}]))
    return path


def test_all_questions_of_a_file_are_judged_together(tmp_path: Path) -> None:
    found = pooled(write(tmp_path / "a.jsonl", 0, 30000))
    assert (found["n"], found["score"], found["dense"], found["verdict"]) == (300, 1.0, 1.0, "same")
    assert found["prefilled"] == pytest.approx(33000 / 30000) and found["sparsity"] == pytest.approx(0.6)
    worse = pooled(write(tmp_path / "b.jsonl", 15, 57000))
    assert (worse["lost"], worse["won"], worse["verdict"]) == (15, 0, "worse") and worse["prefilled"] == 2.0


def test_a_table_says_what_stood_in_a_batch(tmp_path: Path) -> None:
    older = write(tmp_path / "b.jsonl", 0, 30000, mixed=False, form="chat")
    lines = batches([write(tmp_path / "a.jsonl", 3, 30000), older]).splitlines()
    assert lines[2].startswith(
        "| a | anchor | yes | cuda | in a second turn | 10k … 32k | mixed | 300 | 1.000 | 0.990 | 3, 0 |"
    )
    assert lines[3].startswith(
        "| b | anchor | yes | cuda | with the text | 10k … 32k | one | 300 | 1.000 | 1.000 | 0, 0 |"
    )
    assert batches([]) == "Not measured yet."


def test_decode_has_its_own_figures(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 0, 0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["servers"]["base"] = {"device": "cuda", "disable_cuda_graph": True, "sparse_method": "robsa"}
    for row in rows:
        if row["kind"] == "counters":
            counts = {name: count for name, count in row["counters"].items() if not name.startswith("prefill_")}
            row["counters"] = counts | {"pages_attended": 30, "pages_held": 400, "rectified_tokens": 64}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    header, _, line = batches([path]).splitlines()
    assert line.startswith("| a | robsa | no | cuda |") and line.endswith("| 7.5 % | 64 | same |")
    assert "prefilled" not in header and "left out" not in header
