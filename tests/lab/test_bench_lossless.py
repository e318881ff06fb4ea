"""The benchmark of lossless decoding, on a real server with a tiny model, and the table of its files."""

import json
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from server_fixtures import serve  # noqa: F401

from eval.lab import bench_lossless
from eval.lab.bench_lossless import parse, reasoning, text_of
from eval.lab.tables.lossless import acceptance, speed
from eval.live.counters import EvaluationError
from eval.live.record import read_rows

TINY = Path(__file__).parents[2] / "eval" / "models" / "tiny-gqa"
ALWAYS = {"min_seq_len": 0, "crossover_tokens": 0, "min_pages": 4}


def test_the_command_measures_a_server_and_its_table_shows_it(serve: Callable, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "lossless-tiny.jsonl"
    with serve(TINY, "--speculative-algorithm", "SPARSE_SELF", config=ALWAYS) as server:
        asked = ["--texts", "book", "--ratios", ".05,.2", "--context", "1k", "--n", "2", "--tokens", "24"]
        assert bench_lossless.main(["--base-url", server.url, "--out", str(out), "--shape", "tiny", *asked]) == 0
    header, *cells = read_rows(out)
    assert header["texts"] == ["book"] and [cell["active_ratio"] for cell in cells] == [0.05, 0.2]
    for cell in cells:
        counts = cell["counters"]
        # Both drafted, and every answer is the dense one's.
        assert 0 < counts["accepted_tokens"] <= counts["judged_drafts"] <= counts["drafted_tokens"]
        assert cell["equal"] == 2 and cell["gaps"] == [] and cell["dense_ratio"] > 0
    assert acceptance([out]).count("2 of 2") == 2
    out.write_text("\n".join(json.dumps(row) for row in (header, cells[0])))
    with pytest.raises(EvaluationError, match="lacks cells"):
        acceptance([out])


def test_the_table_of_speeds_compares_with_the_fastest_dense_decode(tmp_path: Path) -> None:
    """Two backends of a shape, and a peer of the second: rounds of 4 drafts, of which 3 are kept."""
    header = {"server": {"model_path": "/models/m"}, "n": 2, "batch": 2, "context": 2048, "simulated": 0.9, "peers": []}
    header |= {"kind": "header", "texts": ["random"], "ratios": [0.1]}
    counts = {"verified_rounds": 10, "draft_steps": 40, "drafted_tokens": 80, "accepted_tokens": 60}
    paths = []
    for backend, dense, ratio in (("fa3", 0.008, 4.0), ("flashinfer", 0.006, 2.5)):
        own = {**header, "server": {**header["server"], "decode_backend": backend}}
        cell = {"shape": "m-2x2k", "text": "random", "acceptance": 0.9, "tpot": 0.002, "dense_tpot": dense}
        cell |= {"dense_ratio": ratio, "counters": counts}
        paths.append(tmp_path / f"{backend}.jsonl")
        paths[-1].write_text("\n".join(map(json.dumps, (own, cell))))
    _, _, *lines = speed(paths).splitlines()
    assert lines == [
        "| m | 2 | 2k | fa3 | random | 90.0 % | 4.0 | 4.0 | 8.0 | 2.0 | 5.0 | 2.50 |",
        "| m | 2 | 2k | flashinfer | random | 90.0 % | 4.0 | 4.0 | 8.0 | 2.0 | 5.0 | 2.50 |",
    ]
    assert speed(paths[:1]).endswith("| 8.0 | 4.00 |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "4", "--n", "6"], "--n 6 must be a multiple of --batch 4"),
        (["--simulated", ".9"], "--simulated and --texts random go together"),
        (["--texts", "random"], "--simulated and --texts random go together"),
        (["--texts", "poems"], "poems"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--base-url", "http://x", "--out", "x.jsonl", "--shape", "x", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_worked_problems_are_right() -> None:
    for problem in islice(reasoning(seed=3), 20):
        boxes, pens, sold = map(int, re.findall(r"has (\d+) boxes of (\d+) pens and sells (\d+)", problem)[0])
        assert problem.endswith(f"So the answer is {boxes * pens - sold}.\n\n")
    assert "class DecodeGroups" in text_of("code", 0) and len(text_of("reasoning", 0)) > 400_000
