"""The comparison command: what it asks of its parts, and what it makes of their files; the parts are stand-ins."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai_stub import Server

from eval import compare
from eval.live import arms
from eval.live.counters import COUNTED, PREFILL_COUNTED, EvaluationError
from eval.live.record import read_rows
from eval.scores.stats import paired_interval

COUNTS = dict.fromkeys(COUNTED, 0) | {"pages_attended": 10, "pages_held": 100, "decode_rows": 100}
PREFILLED = {"prefill_sparse_tokens": 64, "prefill_dense_tokens": 0, "prefill_pairs_attended": 3}
PREFILLED |= {"prefill_pairs_causal": 12}


Listen = Callable[..., Server]
Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Starts servers with a decode and a prefill method."""
    with contextlib.ExitStack() as stack:

        def start(method: str | None = None, prefill: str | None = None) -> Server:
            server = Server()
            if method or prefill:
                config = {"min_seq_len": 4096, "dense_fallback": "auto", "active_ratio": 0.1, "rectify_interval": 32}
                state = {"method": method, "config": config if method else None, **dict.fromkeys(COUNTED, 0)}
                if prefill:
                    counts = dict.fromkeys(PREFILL_COUNTED, 0)
                    state["prefill"] = {"method": prefill, "config": {"crossover_tokens": 8192}, **counts}
                server.info = {"version": "1", "internal_states": [{"sparse": state}]}
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            stack.callback(server.shutdown)
            return server

        yield start


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Compares a server: exit status, and what was printed."""

    def compared(server: Server, *arguments: str) -> tuple[int, Any]:
        return compare.main(["--base-url", server.url, "--out", str(tmp_path), *arguments]), capsys.readouterr()

    return compared


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
        counts = COUNTS | (PREFILLED if "8192,16384" in line else {})
        arms = ("base", "compare") if "--compare-url" in line else ("base",)
        rows: list[dict[str, Any]] = [{"kind": "header", "command": module}]
        for arm in arms:
            place = {"arm": arm, "task": "single", "length": 8192}
            rows += [
                {"kind": "item", "id": str(i), "prompt_sha": str(i), "scores": {"score": score}, **place}
                for i in range(300)
            ]
        rows += [{"kind": "counters", "arm": "base", "task": "single", "length": 8192, "counters": counts}]
        rows += [{"kind": "summary"}]
        Path(line[line.index("--out") + 1]).parent.mkdir(exist_ok=True)
        Path(line[line.index("--out") + 1]).write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(compare, "call", call)
    return found


def test_one_server_is_its_own_reference(listen: Listen, run: Run, calls: list[list[str]], tmp_path: Path) -> None:
    sparse, control = listen("resa"), f"random_pages={listen('random_pages').url}"
    status, said = run(sparse, "--set", "niah", "--lengths", "8k", "--control", control, "--n", "300", "--strict")
    assert status == 0
    first, second = calls
    assert first[first.index("--compare-url") + 1] == sparse.url
    assert first[first.index("--compare-custom-params") + 1] == '{"sparse": false}'
    # Three hundred questions over five depths.
    assert first[first.index("--n") + 1] == second[second.index("--n") + 1] == "60"
    assert second[second.index("--expect") + 1] == "random_pages" and "--compare-url" not in second
    assert "| niah: single | 8k | 300 |" in said.out
    (line,) = [row for row in read_rows(tmp_path / "compare.jsonl") if row["kind"] == "summary"]
    assert line["gates"] and line["verdict"] == "same" and line["random_pages"] == 0 and line["density"] == 0.1


def test_a_stock_server_is_not_asked_for_anything(listen: Listen, run: Run, calls: list[list[str]]) -> None:
    dense = listen()
    status, _ = run(listen("resa"), "--compare-url", dense.url, "--lengths", "8k", "--set", "niah", "--strict")
    assert status == 1, "without a control nothing gates"
    assert "--compare-custom-params" not in calls[0] and dense.url in calls[0]


def test_a_part_that_fails_does_not_hide_the_others(listen: Listen, run: Run, calls: list[list[str]]) -> None:
    status, said = run(listen("resa"), "--set", "ruler,niah", "--lengths", "8k")
    assert status == 1 and "eval.ruler failed" in said.err and "niah: single" in said.out and calls[1][0] == "eval.niah"


def test_quick_asks_little_unless_more_is_asked_for() -> None:
    quick = compare.parse(["--quick", "--model-path", "m"])
    assert quick.set == ["niah", "ruler"] and quick.lengths == [4096] and quick.n == 5
    assert quick.server_args == "--mem-fraction-static 0.4" and quick.out == Path("compare-quick")
    given = compare.parse(["--quick", "--model-path", "m", "--n", "9", "--set", "ppl", "--set", "niah,ruler"])
    assert given.n == 9 and given.set == ["ppl", "niah", "ruler"]
    usual = compare.parse(["--model-path", "m"])
    assert (
        usual.set is None and usual.lengths == [2048, 8192] and usual.n == 20 and usual.out == Path("compare-results")
    )


def test_an_interrupted_run_says_what_is_left(
    listen: Listen, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part is done, one has begun, one is left."""

    def niah(_: list[str]) -> int:
        (tmp_path / "niah.jsonl").write_text('{"kind": "header"}\n{"kind": "summary"}\n')
        return 0

    def ruler(_: list[str]) -> int:
        """As a suite ends that is stopped: it has said so."""
        (tmp_path / "ruler.jsonl").write_text('{"kind": "header"}\n{"kind": "answer"}\n')
        return 130

    monkeypatch.setattr("eval.niah.main", niah)
    monkeypatch.setattr("eval.ruler.main", ruler)
    status, said = run(listen("resa"), "--set", "niah,ruler,infinitebench", "--lengths", "8k")
    assert status == 130 and "niah: done\n  ruler: begun, 1 rows\n  infinitebench: left" in said.err


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


def test_a_control_of_another_method_is_refused_first(listen: Listen, run: Run, calls: list[list[str]]) -> None:
    sparse = listen("resa")
    control = f"true_mass={sparse.url}"
    status, said = run(sparse, "--set", "niah", "--lengths", "8k", "--control", control)
    assert status == 1 and not calls and f"--control {control}: the server there runs resa" in said.err


def test_texts_that_the_server_decodes_dense_are_refused_first(
    listen: Listen, run: Run, calls: list[list[str]]
) -> None:
    status, said = run(listen("resa"), "--lengths", "2k,8k")
    assert status == 1 and "texts of 2048 tokens dense: its min_seq_len is 4096" in said.err and not calls


SAME_BOOKS = ["--book", "a/x.txt", "--book", "b/x.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--base-url, or --model-path"),
        (["--base-url", "u", "--set", "nia"], "--set: got nia, allowed: niah"),
        (["--base-url", "u", "--control", "random_pages"], "NAME=URL"),
        (["--base-url", "u", "--n", "0"], "--n: must be at least 1, got 0"),
        (["--base-url", "u", "--lengths", ","], "--lengths: got none, allowed: one or more"),
        (["--base-url", "u", "--concurrency", "0"], "--concurrency: must be at least 1, got 0"),
        (["--model-path", "m", *SAME_BOOKS], "--book: two files have the same name, a/x.txt and b/x.txt"),
        (["--model-path", "m", "--sparse-method", "none"], "--sparse-method none needs a --sparse-prefill-method"),
        (["--base-url", "u", "--sparse-prefill-method", "anchor"], "is for the servers that --model-path starts"),
    ],
)
def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare.main(["--out", str(tmp_path), *arguments])
    assert message in capsys.readouterr().err


def test_suites_alone_take_books_of_the_same_name() -> None:
    assert len(compare.parse(["--base-url", "u", "--set", "niah,ruler", *SAME_BOOKS]).book) == 2


LONG = ["--lengths", "8k,16k", "--text-length", "16k"]


def test_prefill_alone_is_judged_by_its_suites(
    listen: Listen, run: Run, calls: list[list[str]], tmp_path: Path
) -> None:
    prefilling = listen(None, "anchor")
    assert prefilling.info
    prefilling.info["internal_states"][0]["sparse"]["prefill"]["config"]["crossover_tokens"] = 0
    # ruler always fails.
    status, shown = run(prefilling, *LONG)
    assert status == 1 and [line[0] for line in calls] == ["eval.niah", "eval.ruler", "eval.infinitebench"]
    first = calls[0]
    assert first[first.index("--compare-custom-params") + 1] == '{"sparse": false}'
    assert "| left out of prefill |" in shown.out and shown.out.count("| 75.0 % |") == 2
    assert "anchor is a prefill method: long_generation and ppl judge decode, and are left out" in shown.err
    lines = [row for row in read_rows(tmp_path / "compare.jsonl") if row["kind"] == "summary"]
    assert [(line["suite"], line["sparsity"], line["gates"]) for line in lines] == [
        ("infinitebench", 0.75, None),
        ("niah", 0.75, None),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "prefills texts of 2048 tokens dense: its anchor begins at position 8192"),
        ([*LONG, "--set", "niah"], "prefills texts of 8192 tokens dense"),
        (["--set", "niah,ppl"], "--set ppl: judges decode by forced tokens"),
        (["--lengths", "16k", "--strict"], "--strict: the server runs anchor alone, and here controls are of decode"),
        (["--lengths", "16k", "--control", "random_pages=u"], "--control: the server runs anchor alone"),
    ],
)
def test_what_does_not_fit_prefill_is_refused_first(
    listen: Listen, run: Run, calls: list[list[str]], arguments: list[str], message: str
) -> None:
    status, said = run(listen(None, "anchor"), *arguments)
    assert status == 1 and not calls and message in said.err


def test_a_control_has_the_prefill_of_the_judged_server(listen: Listen, run: Run, calls: list[list[str]]) -> None:
    both, control, other = listen("resa", "anchor"), listen("random_pages", "anchor"), listen("random_pages")
    arguments = ["--set", "niah", "--lengths", "16k", "--control"]
    assert run(both, *arguments, f"random_pages={other.url}")[0] == 1 and not calls
    assert run(both, *arguments, f"random_pages={control.url}")[0] == 0
    assert calls[1][calls[1].index("--expect") + 1] == "random_pages+anchor"


def test_servers_are_started_with_their_methods_and_confirm_them(
    listen: Listen,
    calls: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: dict[str, list[str]] = {}
    runs: dict[str, Server] = {"sparse": listen(None, "anchor"), "dense": listen()}

    class Process(contextlib.nullcontext[Any]):
        def __init__(self, model: str, *flags: str, log_path: Path) -> None:
            super().__init__(self)
            started[log_path.stem], self.url = [model, *flags], runs[log_path.stem].url

    monkeypatch.setattr(arms, "ServerProcess", Process)
    arguments = ["--model-path", "m", "--server-args=--tp 2", "--out", str(tmp_path), "--set", "niah"]
    arguments += ["--lengths", "16k", "--sparse-prefill-method", "anchor", "--sparse-prefill-config", "a.json"]
    assert compare.main([*arguments, "--sparse-method", "none"]) == 0
    prefill = ["--sparse-prefill-method", "anchor", "--sparse-prefill-config", "a.json"]
    assert started == {"sparse": ["m", "--tp", "2", *prefill], "dense": ["m", "--tp", "2"]}
    assert runs["dense"].url in calls[0] and "--compare-custom-params" not in calls[0]
    assert compare.main(arguments) == 1
    assert "the base server runs anchor, expected resa+anchor" in capsys.readouterr().err
    decode = ["--sparse-method", "resa", "--sparse-config", '{"dense_fallback": "never"}']
    assert started["sparse"] == ["m", "--tp", "2", *decode, *prefill]


def test_how_many_questions_decide() -> None:
    import numpy as np

    assert paired_interval(np.zeros(compare.DECIDED_BY))[0] >= -0.01 > paired_interval(np.zeros(275))[0]
