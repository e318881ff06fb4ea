"""The comparison command: what it asks of its parts, and what it makes of their files; the parts are stand-ins."""

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai_stub import Server

from eval import compare
from eval.figures.stats import paired_interval
from eval.live.counters import COUNTED, EvaluationError
from eval.live.record import read_rows

COUNTS = dict.fromkeys(COUNTED, 0) | {"pages_attended": 10, "pages_held": 100, "decode_rows": 100}


def listen(method: str | None = None) -> Server:
    server = Server()
    if method:
        config = {"min_seq_len": 4096, "dense_fallback": "auto", "active_ratio": 0.1, "rectify_interval": 32}
        state = {"method": method, "config": config, **dict.fromkeys(COUNTED, 0)}
        server.info = {"version": "1", "internal_states": [{"sparse": state}]}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def sparse() -> Iterator[Server]:
    server = listen("resa")
    yield server
    server.shutdown()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines of the parts, each of which writes a file of 300 right answers; ruler always fails."""
    found: list[list[str]] = []

    def call(module: str, arguments: Sequence[object]) -> None:
        line = [module, *map(str, arguments)]
        found.append(line)
        if module == "eval.ruler":
            raise EvaluationError("eval.ruler failed")
        score = float("random_pages" not in line)
        arms = ("base", "compare") if "--compare-url" in line else ("base",)
        rows: list[dict[str, Any]] = [{"kind": "header", "command": module}]
        for arm in arms:
            place = {"arm": arm, "task": "single", "length": 8192}
            rows += [
                {"kind": "item", "id": str(i), "prompt_sha": str(i), "scores": {"score": score}, **place}
                for i in range(300)
            ]
        rows += [{"kind": "counters", "arm": "base", "task": "single", "length": 8192, "counters": COUNTS}]
        rows += [{"kind": "summary"}]
        Path(line[line.index("--out") + 1]).parent.mkdir(exist_ok=True)
        Path(line[line.index("--out") + 1]).write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(compare, "call", call)
    return found


def test_one_server_is_its_own_reference(
    sparse: Server, calls: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = listen("random_pages")
    control = ["--control", f"random_pages={random.url}"]
    arguments = ["--base-url", sparse.url, "--out", str(tmp_path), "--set", "niah", "--lengths", "8k", *control]
    assert compare.main([*arguments, "--n", "300", "--strict"]) == 0
    random.shutdown()
    first, second = calls
    assert first[first.index("--compare-url") + 1] == sparse.url
    assert first[first.index("--compare-custom-params") + 1] == '{"sparse": false}'
    # Three hundred questions over five depths.
    assert first[first.index("--n") + 1] == second[second.index("--n") + 1] == "60"
    assert second[second.index("--expect") + 1] == "random_pages" and "--compare-url" not in second
    assert "| niah: single | 8k | 300 |" in capsys.readouterr().out
    (line,) = [row for row in read_rows(tmp_path / "compare.jsonl") if row["kind"] == "summary"]
    assert line["gates"] and line["verdict"] == "same" and line["random_pages"] == 0 and line["density"] == 0.1


def test_a_stock_server_is_not_asked_for_anything(sparse: Server, calls: list[list[str]], tmp_path: Path) -> None:
    dense = listen()
    arguments = ["--base-url", sparse.url, "--compare-url", dense.url, "--out", str(tmp_path), "--lengths", "8k"]
    assert compare.main([*arguments, "--set", "niah", "--strict"]) == 1, "without a control nothing gates"
    assert "--compare-custom-params" not in calls[0] and dense.url in calls[0]
    dense.shutdown()


def test_a_part_that_fails_does_not_hide_the_others(
    sparse: Server, calls: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--base-url", sparse.url, "--out", str(tmp_path), "--set", "ruler,niah", "--lengths", "8k"]
    assert compare.main(arguments) == 1
    shown = capsys.readouterr()
    assert "eval.ruler failed" in shown.err and "niah: single" in shown.out and [c[0] for c in calls][1] == "eval.niah"


@pytest.mark.parametrize("name", compare.PARTS)
def test_the_parts_know_their_arguments(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://127.0.0.1:9"
    book = tmp_path / "book.txt"
    book.write_text("Call me Ishmael. " * 9)
    args = compare.parse(["--base-url", url, "--out", str(tmp_path), "--book", str(book), "--revision", "1"])
    args.texts = 9
    with pytest.raises(EvaluationError, match="failed"):
        compare.run_part(name, args, {"active_ratio": 0.1, "rectify_interval": 32}, url, ["--compare-url", url])
    assert f"no server answers at {url}" in capsys.readouterr().err


def test_texts_are_counted_by_the_servers_tokenizer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = compare.LiveServer("http://127.0.0.1:9")
    monkeypatch.setattr(server, "tokenize", lambda text: text.split())
    books = [tmp_path / name for name in ("a.txt", "b.txt")]
    for book in books:
        book.write_text("one two three four five")
    assert compare.count_texts(server, books, 2) == 4
    args = compare.parse(["--base-url", "u", "--out", str(tmp_path), "--lengths", "2"])
    args.texts = 4
    line = list(compare.PARTS["ppl"].arguments(args, {}))
    assert line[line.index("--windows") + 1] == 4 and "the books have 4 texts" in capsys.readouterr().err


def test_how_argparse_ends_a_part_ends_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EvaluationError, match=r"eval\.niah failed"):
        compare.call("eval.niah", ["--lengths", "many"])
    assert "--lengths" in capsys.readouterr().err


def test_a_control_of_another_method_is_refused_first(
    sparse: Server, calls: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control = f"true_mass={sparse.url}"
    arguments = ["--base-url", sparse.url, "--out", str(tmp_path), "--set", "niah", "--lengths", "8k"]
    assert compare.main([*arguments, "--control", control]) == 1 and not calls
    assert f"--control {control}: the server there runs resa" in capsys.readouterr().err


def test_texts_that_the_server_decodes_dense_are_refused_first(
    sparse: Server, calls: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["--base-url", sparse.url, "--out", str(tmp_path), "--lengths", "2k,8k"]) == 1
    assert "texts of 2048 tokens dense: its min_seq_len is 4096" in capsys.readouterr().err and not calls


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--base-url, or --model-path"),
        (["--base-url", "u", "--set", "nia"], "--set must be of niah"),
        (["--base-url", "u", "--control", "random_pages"], "NAME=URL"),
        (["--base-url", "u", "--n", "0"], "--n must be at least 1"),
    ],
)
def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare.main(["--out", str(tmp_path), *arguments])
    assert message in capsys.readouterr().err


def test_how_many_questions_decide() -> None:
    import numpy as np

    assert paired_interval(np.zeros(compare.DECIDED_BY))[0] >= -0.01 > paired_interval(np.zeros(275))[0]
