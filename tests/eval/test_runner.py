"""The runner against a small OpenAI-compatible server that fails on demand; real servers are in tests/server."""

import argparse
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from openai_stub import Server

from eval.infinitebench import InfiniteBenchSuite
from eval.live import client, runner
from eval.live.arms import Arm, require_proof
from eval.live.counters import COUNTED, PREFILL_COUNTED, EvaluationError
from eval.live.record import read_rows
from eval.live.suite import Case, Prompt, Suite
from eval.longbench import LongBenchSuite
from eval.math import MathSuite
from eval.niah import NeedleSuite
from eval.ruler import RulerSuite

TOKENIZER = str(Path(__file__).parent.parent.parent / "eval" / "models" / "tiny-gqa")


class Sums(Suite):
    """Asks for the last token; even cases come out right if the server answers it."""

    command: ClassVar[str] = "eval.sums"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--n", type=int, default=4)
        parser.add_argument("--size", type=int, default=20)

    def cases(self) -> list[Case]:
        return [Case("last", self.args.size, None, i) for i in range(self.args.n)]

    def build(self, case: Case) -> Prompt:
        number = case.rng(self.args.seed).randrange(1000, 2000)
        return Prompt([*[7] * (self.args.size - 5), number], [str(number)], 4)

    def score(self, case: Case, prompt: Prompt, output: str) -> dict[str, float]:
        return {"score": float(output == prompt.answers[0]), "digits": float(output.isdigit())}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    found = Server()
    threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True).start()
    original = client.post
    monkeypatch.setattr("eval.live.client.post", lambda c, p, r: original(c, p, r, pause=0.01))
    yield found
    found.shutdown()


Ask = Callable[..., tuple[int, list[dict[str, Any]], Any]]


@pytest.fixture
def ask(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs a suite against the server: exit status, rows of its file, and what it printed."""

    def run(*more: str, suite: type[Suite] = Sums, out: str = "run.jsonl") -> tuple[int, list[dict[str, Any]], Any]:
        path = tmp_path / out
        needed = ["--base-url", server.url, "--tokenizer", TOKENIZER, "--out", str(path), "--revision", "r"]
        status = runner.main(suite, [*needed, *more])
        return status, read_rows(path) if path.exists() else [], capsys.readouterr()

    return run


def kind(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == name]


@pytest.mark.parametrize(
    ("suite", "option"),
    [
        (InfiniteBenchSuite, "--templates"),
        (LongBenchSuite, "--version"),
        (MathSuite, "--samples"),
        (NeedleSuite, "the text around the needles (default: books)"),
        (RulerSuite, "of vt and cwe, see above (default: lm-eval)"),
    ],
)
def test_the_command_line_has_help(suite: type[Suite], option: str) -> None:
    assert option in " ".join(runner.parser_of(suite).format_help().split())


def test_any_openai_server_is_scored(server: Server, ask: Ask) -> None:
    server.busy = 2
    status, rows, said = ask("--custom-params", '{"sparse": false}')
    assert status == 0 and [row["kind"] for row in rows] == ["header", *["item"] * 4, "summary"]
    summary = rows[-1]
    assert summary["score"] == summary["digits"] == 1.0 and summary["n"] == 4 and summary["density"] is None
    assert all(request["custom_params"] == {"sparse": False} for request in server.asked)
    assert server.asked[0]["model"] == "tiny" and server.asked[0]["temperature"] == 0.0
    item = rows[1]
    assert item["prompt_tokens"] == 16 and item["completion_tokens"] == 1 and item["output"] in item["answers"]
    assert "1.0" in said.out


def test_further_fields_are_arms_of_the_base_server(server: Server, ask: Ask) -> None:
    more = ("--also", 'few={"active_ratio": 0.05}', "--custom-params", '{"rectify_interval": 0}', "--concurrency", "1")
    status, rows, _ = ask(*more)
    fields = [{"rectify_interval": 0}] * 4 + [{"rectify_interval": 0, "active_ratio": 0.05}] * 4
    assert status == 0 and [request["custom_params"] for request in server.asked] == fields
    assert [(row["arm"], row["n"]) for row in kind(rows, "summary")] == [("base", 4), ("few", 4)]
    for wrong in ("few", "few=0.05", 'base={"sparse": false}'):
        status, _, said = ask("--also", wrong)
        message = f"--also must be NAME=JSON, such as half={{\"active_ratio\": 0.5}}, got '{wrong}'"
        assert status == 1 and message in said.err


class Turns(Sums):
    """The same after a turn of its own."""

    def build(self, case: Case) -> Prompt:
        prompt = super().build(case)
        return Prompt(prompt.tokens, prompt.answers, 4, before=[5, 6])


def test_a_turn_before_is_asked_first_and_does_not_count(server: Server, ask: Ask) -> None:
    status, rows, _ = ask("--concurrency", "1", suite=Turns)
    # An estimate of the time is for more questions.
    assert status == 0 and [len(request["prompt"]) for request in server.asked] == [2, 16] * 4
    items = kind(rows, "item")
    assert [row["scores"]["score"] for row in items] == [1.0] * 4 and items[0]["prompt_tokens"] == 16


class Lengths(Sums):
    """Questions of two lengths."""

    def cases(self) -> list[Case]:
        return [Case("last", length, None, i) for length in (20, 30) for i in range(self.args.n)]

    def build(self, case: Case) -> Prompt:
        number = case.rng(self.args.seed).randrange(1000, 2000)
        return Prompt([*[7] * ((case.length or 0) - 5), number], [str(number)], 4)


def test_lengths_are_asked_one_by_one_or_mixed(server: Server, ask: Ask) -> None:
    def asked(out: str, *more: str) -> tuple[list[int], list[dict[str, Any]]]:
        server.info = {"version": "1", "internal_states": [{"sparse": Prefilling()}]}
        server.asked.clear()
        status, rows, _ = ask("--concurrency", "1", "--n", "8", *more, suite=Lengths, out=out)
        assert status == 0 and len(kind(rows, "summary")) == 2
        return [len(request["prompt"]) for request in server.asked], kind(rows, "counters")

    lengths, counts = asked("a.jsonl")
    assert lengths == sorted(lengths) and [(row["length"], row["items"]) for row in counts] == [(20, 8), (30, 8)]
    lengths, counts = asked("b.jsonl", "--mixed")
    assert sorted(lengths) == [16] * 8 + [26] * 8 and lengths != sorted(lengths)
    assert [(row["task"], row["length"], row["items"]) for row in counts] == [(None, None, 16)]
    assert asked("c.jsonl", "--mixed")[0] == lengths, "the order is the seed's"


def test_two_servers_are_compared_question_by_question(server: Server, ask: Ask) -> None:
    other = Server()
    threading.Thread(target=other.serve_forever, args=(0.02,), daemon=True).start()
    server.error = 1
    status, rows, _ = ask("--compare-url", other.url, "--expect", "any", "--n", "50")
    other.shutdown()
    base, compare = kind(rows, "summary")
    assert (status, base["arm"], base["score"], base["verdict"], base["lost"]) == (0, "base", 0.0, "worse", 50)
    assert (compare["arm"], compare["score"]) == ("compare", 1.0) and "verdict" not in compare


def test_a_server_that_dies_loses_nothing(server: Server, ask: Ask, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    server.dies_after = 3
    status, rows, said = ask("--n", "8", "--concurrency", "1")
    assert status == 1 and "the same command goes on with it" in said.err and len(kind(rows, "item")) == 3
    out.write_text(out.read_text()[:-30])
    server.dies_after = 10**9
    asked = len(server.asked)
    status, rows, _ = ask("--n", "8", "--concurrency", "1")
    assert status == 0 and len(server.asked) - asked == 6 and rows[-1]["n"] == 8
    # A finished run asks nothing again.
    status, rows, _ = ask("--n", "8")
    assert status == 0 and len(server.asked) == asked + 6 and len(kind(rows, "summary")) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--model", "huge"), "--model huge: http.* has tiny"),
        (("--tokenizer", "/nowhere"), "no tokenizer at '/nowhere'"),
        (("--expect", "resa"), "the base server runs no sparse method, expected resa"),
        (("--base-url", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9"),
        (("--base-url", "http://127.0.0.1:abc"), "Invalid port"),
        (("--size", "101"), "a length of 101 tokens is wanted, the base server's context is 100"),
    ],
)
def test_errors_are_one_line_before_anything_is_written(ask: Ask, more: tuple[str, ...], message: str) -> None:
    status, rows, said = ask(*more)
    assert status == 1 and not rows and re.search(message, said.err) and "Traceback" not in said.err


def test_a_method_must_be_confirmed_and_must_run(server: Server, ask: Ask) -> None:
    state = {"method": "resa", "config": {}, **dict.fromkeys(COUNTED, 0)}
    server.info = {"version": "1", "internal_states": [{"sparse": state}]}
    status, _, said = ask("--expect", "dsa", out="a.jsonl")
    assert status == 1 and "the base server runs resa, expected dsa" in said.err
    # Nor is it proven by asking again.
    for _ in range(2):
        status, _, said = ask(out="b.jsonl")
        assert status == 1 and "nothing of it was decoded sparse" in said.err
    status, rows, _ = ask("--expect", "any", out="c.jsonl")
    assert status == 0 and [row["counters"]["decode_rows"] for row in kind(rows, "counters")] == [4]


def test_scores_of_rows_that_ran_dense_are_refused(server: Server) -> None:
    arm = Arm("base", client.LiveServer(server.url), "tiny", 100, {}, counted=True)
    counts = dict.fromkeys(COUNTED, 0) | {"decode_rows": 100, "sparse_layer_rows": 80, "pages_attended": 1}
    counts |= {"pages_held": 10, "dense_fallback_rows": 10}
    require_proof("single", arm, "auto", [counts])
    with pytest.raises(EvaluationError, match="20% of the rows were decoded dense, allowed are 10%"):
        require_proof("single", arm, "auto", [counts | {"dense_fallback_rows": 20}])
    dense = Arm("compare", arm.server, "tiny", 100, {"custom_params": {"sparse": False}}, counted=True)
    with pytest.raises(EvaluationError, match="attended to 1 of 10 pages although the requests said"):
        require_proof("single", dense, "auto", [counts])


PREFILLED = {"sparse_tokens": 64, "dense_tokens": 32, "pairs_attended": 30, "pairs_causal": 120}


class Prefilling(dict[str, Any]):
    """Stub of the state that a server with sparse prefill reports: each request that it counts adds to its prefill."""

    def __init__(self, attended: int = 30) -> None:
        none = dict.fromkeys(COUNTED, 0)
        prefill = {"method": "anchor", "config": {}, **dict.fromkeys(PREFILL_COUNTED, 0)}
        super().__init__(method=None, config=None, prefill=prefill, **none)
        self.step = PREFILLED | {"pairs_attended": attended}

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        for counter, more in self.step.items():
            self["prefill"][counter] += more


@pytest.mark.parametrize("expect", ["auto", "anchor"])
def test_sparse_prefill_alone_is_proven(server: Server, ask: Ask, expect: str) -> None:
    server.info = {"version": "1", "internal_states": [{"sparse": Prefilling()}]}
    status, rows, _ = ask("--expect", expect)
    (row,) = kind(rows, "counters")
    assert status == 0 and row["sparsity"] == 0.75 and row["density"] is None
    assert {name: row["counters"][f"prefill_{name}"] for name in PREFILLED} == {k: 4 * v for k, v in PREFILLED.items()}


@pytest.mark.parametrize(
    ("expect", "message"),
    [("auto", "prefill left nothing out of it"), ("resa", "the base server runs anchor, expected resa")],
)
def test_prefill_that_left_nothing_out_is_refused(server: Server, ask: Ask, expect: str, message: str) -> None:
    server.info = {"version": "1", "internal_states": [{"sparse": Prefilling(attended=120)}]}
    status, _, said = ask("--expect", expect)
    assert status == 1 and message in said.err


def test_each_phase_proves_its_method(server: Server) -> None:
    def arm(decodes: bool, **params: Any) -> Arm:
        options = {"custom_params": params} if params else {}
        return Arm("base", client.LiveServer(server.url), "tiny", 100, options, True, decodes, prefills=True)

    dense = dict.fromkeys(COUNTED, 0) | {"decode_rows": 100}
    decoded = dense | {"sparse_layer_rows": 80, "pages_attended": 1, "pages_held": 10}
    prefilled = {f"prefill_{name}": value for name, value in PREFILLED.items()}
    require_proof("single", arm(False), "auto", [dense | prefilled])
    require_proof("single", arm(True), "resa+anchor", [decoded | prefilled])
    # A group that was interrupted while the file did not count prefill yet.
    require_proof("single", arm(True), "auto", [decoded, decoded | prefilled])
    with pytest.raises(EvaluationError, match="nothing of it was decoded sparse"):
        require_proof("single", arm(True), "auto", [dense | prefilled])
    none = dict.fromkeys(prefilled, 0)
    with pytest.raises(EvaluationError, match="prefill left nothing out of it"):
        require_proof("single", arm(True), "auto", [decoded | none])
    for params in ({"sparse": False}, {"exact_prefix": True}):
        require_proof("single", arm(False, **params), "auto", [dense | none])
        with pytest.raises(EvaluationError, match="single base: the server prefilled 64 tokens sparse although"):
            require_proof("single", arm(False, **params), "auto", [dense | prefilled])


def test_counters_are_summed_over_ranks(server: Server) -> None:
    first, second = Prefilling(), Prefilling()
    first["decode_rows"], second["decode_rows"] = 3, 4
    server.info = {"internal_states": [{"sparse": first}, {"sparse": second}]}
    with client.LiveServer(server.url) as live:
        state = live.counters()
    assert state["decode_rows"] == 7 and state["method"] is None
    assert {name: state["prefill"][name] for name in PREFILLED} == {k: 2 * v for k, v in PREFILLED.items()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ([flag, least], f"{flag} must be above 0 and below 1, got")
            for flag in ("--least-sparsity", "--least-skipped")
            for least in ("0", "1", "-0.1", "nan")
        ),
        (["--mixed", "--least-sparsity", "0.5"], "--mixed counts all of them together"),
    ],
)
def test_shares_that_are_none(ask: Ask, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ask(*arguments)
    assert message in capsys.readouterr().err
