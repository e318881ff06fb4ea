"""Perplexity and answers of sparse prefill on a real server: its arms, what is refused, and where they differ."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval import niah, ppl_prefill
from eval.live.record import read_rows
from launch.server import ServerProcess

pytestmark = pytest.mark.long

MODEL = Path(__file__).parent.parent.parent / "eval" / "models" / "tiny-gqa"
BEGINS = 256
SPARSE = {"block_size": 32, "step": 4, "crossover_tokens": BEGINS, "dense_tail": 0, "theta": 1.0}


@pytest.fixture(scope="module")
def server(serve) -> Iterator[ServerProcess]:
    with serve(MODEL, "--dtype", "float32", "--context-length", "2048", prefill=SPARSE) as server:
        yield server


def run(server: ServerProcess, out: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    arguments = ["--base-url", server.url, "--out", str(out), "--length", "1024", "--windows", "3", *more]
    status = ppl_prefill.main(arguments)
    return status, [row for row in read_rows(out) if row["kind"] == "summary"]


def test_positions_behind_the_crossover_change(server: ServerProcess, tmp_path: Path) -> None:
    status, (book, before, behind, repeat) = run(server, tmp_path / "a.jsonl", "--kind", "book,repeat")
    assert status == 1 and not (book["passed"] and repeat["passed"])
    assert before["positions"] == f"0-{BEGINS}" and before["change"] < 1e-3 < behind["change"]
    assert 0.1 < book["sparsity"] < 0.9 and 1 < book["dense"] < 1000
    # What is repeated lies among the keys that are left out.
    assert repeat["relative"] > book["relative"] and repeat["sparse"] > repeat["dense"]
    assert run(server, tmp_path / "b.jsonl", "--bound", "1000")[0] == 0


def test_numbers_that_are_left_out_are_not_found(server: ServerProcess, tmp_path: Path) -> None:
    """Without a dense tail the question is prefilled sparse, and so is the answer that is judged."""
    asked = ("--kind", "records", "--apart", "200")
    status, (records,) = run(server, tmp_path / "a.jsonl", *asked)
    assert status == 1 and records["dense"] < 1.1 and records["sparse"] > 2 and records["windows"] == 3
    status, (records,) = run(server, tmp_path / "b.jsonl", *asked, "--custom-params", '{"theta": 15}')
    assert records["sparse"] < 1.1 and status == (0 if records["passed"] else 1)


@pytest.mark.parametrize(("theta", "found"), [(1.0, False), (15.0, True)])
def test_answers_that_prefill_reads(server: ServerProcess, tmp_path: Path, theta: float, found: bool) -> None:
    """Dense decode writes a number of which prefill found the beginning; prefill itself is to find all of it."""
    arguments = ["--base-url", server.url, "--compare-url", server.url, "--out", str(tmp_path / "niah.jsonl")]
    arguments += ["--compare-custom-params", '{"sparse": false}', "--custom-params", f'{{"theta": {theta}}}']
    arguments += ["--tasks", "single,multikey", "--lengths", "1k", "--depths", "40,60", "--n", "2"]
    assert niah.main([*arguments, "--form", "prefilled"]) == 0
    rows = read_rows(tmp_path / "niah.jsonl")
    items = [row for row in rows if row["kind"] == "item"]
    assert len(items) == 16 and all(len(row["output"]) == 7 and not row["completion_tokens"] for row in items)
    right = {(row["task"], row["arm"]): row["score"] for row in rows if row["kind"] == "summary"}
    assert all(right[task, "compare"] == 1 for task in ("single", "multikey"))
    assert all((right[task, "base"] >= 0.75) == found for task in ("single", "multikey")), right


def test_what_shows_nothing_is_refused(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, message in (
        (("--custom-params", '{"theta": 1e9}'), "prefill left nothing out of it"),
        (("--least-sparsity", "0.99"), "prefill left out less than 0.99 of the query-key pairs"),
    ):
        assert run(server, tmp_path / "a.jsonl", *more) == (1, [])
        assert message in capsys.readouterr().err
