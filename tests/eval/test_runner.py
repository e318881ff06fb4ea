"""The runner against a small OpenAI-compatible server that fails on demand; real servers are in tests/server."""

import argparse
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from openai_stub import Server

from eval.live import client, runner
from eval.live.arms import Arm, require_proof
from eval.live.counters import COUNTED, PREFILL_COUNTED, EvaluationError
from eval.live.record import read_rows
from eval.live.suite import Case, Prompt, Suite

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
    monkeypatch.setattr("eval.live.completions.post", lambda c, p, r: original(c, p, r, pause=0.01))
    yield found
    found.shutdown()


def command(server: Server, out: Path, *more: str) -> list[str]:
    return ["--base-url", server.url, "--tokenizer", TOKENIZER, "--out", str(out), "--revision", "r", *more]


def test_any_openai_server_is_scored(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.busy = 2
    assert runner.main(Sums, command(server, tmp_path / "run.jsonl", "--custom-params", '{"sparse": false}')) == 0
    rows = read_rows(tmp_path / "run.jsonl")
    assert [row["kind"] for row in rows] == ["header", *["item"] * 4, "summary"]
    summary = rows[-1]
    assert summary["score"] == summary["digits"] == 1.0 and summary["n"] == 4 and summary["density"] is None
    assert all(request["custom_params"] == {"sparse": False} for request in server.asked)
    assert server.asked[0]["model"] == "tiny" and server.asked[0]["temperature"] == 0.0
    item = rows[1]
    assert item["prompt_tokens"] == 16 and item["completion_tokens"] == 1 and item["output"] in item["answers"]
    assert "1.0" in capsys.readouterr().out


def test_further_fields_are_arms_of_the_base_server(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.jsonl"
    more = ("--also", 'few={"active_ratio": 0.05}', "--custom-params", '{"rectify_interval": 0}', "--concurrency", "1")
    assert runner.main(Sums, command(server, out, *more)) == 0
    fields = [{"rectify_interval": 0}] * 4 + [{"rectify_interval": 0, "active_ratio": 0.05}] * 4
    assert [request["custom_params"] for request in server.asked] == fields
    rows = read_rows(out)
    assert [(row["arm"], row["n"]) for row in rows if row["kind"] == "summary"] == [("base", 4), ("few", 4)]
    for wrong in ("few", "few=0.05", 'base={"sparse": false}'):
        assert runner.main(Sums, command(server, tmp_path / "wrong.jsonl", "--also", wrong)) == 1
        assert (
            f"--also must be NAME=JSON, such as half={{\"active_ratio\": 0.5}}, got '{wrong}'"
            in capsys.readouterr().err
        )


class Turns(Sums):
    """The same after a turn of its own."""

    def build(self, case: Case) -> Prompt:
        prompt = super().build(case)
        return Prompt(prompt.tokens, prompt.answers, 4, before=[5, 6])


def test_a_turn_before_is_asked_first_and_does_not_count(server: Server, tmp_path: Path) -> None:
    assert runner.main(Turns, command(server, tmp_path / "run.jsonl", "--concurrency", "1")) == 0
    rows = [row for row in read_rows(tmp_path / "run.jsonl") if row["kind"] == "item"]
    # An estimate of the time is for more questions.
    assert [len(request["prompt"]) for request in server.asked] == [2, 16] * 4
    assert [row["scores"]["score"] for row in rows] == [1.0] * 4 and rows[0]["prompt_tokens"] == 16


class Lengths(Sums):
    """Questions of two lengths."""

    def cases(self) -> list[Case]:
        return [Case("last", length, None, i) for length in (20, 30) for i in range(self.args.n)]

    def build(self, case: Case) -> Prompt:
        number = case.rng(self.args.seed).randrange(1000, 2000)
        return Prompt([*[7] * ((case.length or 0) - 5), number], [str(number)], 4)


def test_lengths_are_asked_one_by_one_or_mixed(server: Server, tmp_path: Path) -> None:
    def asked(out: str, *more: str) -> tuple[list[int], list[dict[str, Any]]]:
        server.info = {"version": "1", "internal_states": [{"sparse": Prefilling()}]}
        server.asked.clear()
        given = ("--concurrency", "1", "--n", "8", *more)
        assert runner.main(Lengths, command(server, tmp_path / out, *given)) == 0
        rows = read_rows(tmp_path / out)
        assert len([row for row in rows if row["kind"] == "summary"]) == 2
        counts = [row for row in rows if row["kind"] == "counters"]
        return [len(request["prompt"]) for request in server.asked], counts

    lengths, counts = asked("a.jsonl")
    assert lengths == sorted(lengths) and [(row["length"], row["items"]) for row in counts] == [(20, 8), (30, 8)]
    lengths, counts = asked("b.jsonl", "--mixed")
    assert sorted(lengths) == [16] * 8 + [26] * 8 and lengths != sorted(lengths)
    assert [(row["task"], row["length"], row["items"]) for row in counts] == [(None, None, 16)]
    assert asked("c.jsonl", "--mixed")[0] == lengths, "the order is the seed's"


def test_mixed_lengths_have_no_sparsity_each(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        runner.main(Sums, command(server, tmp_path / "a.jsonl", "--mixed", "--least-sparsity", "0.5"))
    assert "--mixed counts all of them together" in capsys.readouterr().err


def test_two_servers_are_compared_question_by_question(server: Server, tmp_path: Path) -> None:
    other = Server()
    threading.Thread(target=other.serve_forever, args=(0.02,), daemon=True).start()
    server.error = 1
    more = ("--compare-url", other.url, "--expect", "any", "--n", "50")
    assert runner.main(Sums, command(server, tmp_path / "run.jsonl", *more)) == 0
    other.shutdown()
    base, compare = [row for row in read_rows(tmp_path / "run.jsonl") if row["kind"] == "summary"]
    assert (base["arm"], base["score"], base["verdict"], base["lost"]) == ("base", 0.0, "worse", 50)
    assert (compare["arm"], compare["score"]) == ("compare", 1.0) and "verdict" not in compare


def test_a_server_that_dies_loses_nothing(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.jsonl"
    server.dies_after = 3
    assert runner.main(Sums, command(server, out, "--n", "8", "--concurrency", "1")) == 1
    assert "the same command goes on with it" in capsys.readouterr().err
    kept = [row["id"] for row in read_rows(out) if row["kind"] == "item"]
    assert len(kept) == 3
    out.write_text(out.read_text()[:-30])
    server.dies_after = 10**9
    asked = len(server.asked)
    assert runner.main(Sums, command(server, out, "--n", "8", "--concurrency", "1")) == 0
    assert len(server.asked) - asked == 6
    assert read_rows(out)[-1]["n"] == 8
    # A finished run asks nothing again.
    assert runner.main(Sums, command(server, out, "--n", "8")) == 0 and len(server.asked) == asked + 6
    assert [row["kind"] for row in read_rows(out)].count("summary") == 1


def test_prompts_that_do_not_fit_fail_alone_and_void_the_run(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(Sums, command(server, tmp_path / "a.jsonl", "--size", "101")) == 1
    assert "a length of 101 tokens is wanted, the base server's context is 100" in capsys.readouterr().err
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--model", "huge"), "--model huge: http.* has tiny"),
        (("--tokenizer", "/nowhere"), "no tokenizer at '/nowhere'"),
        (("--expect", "resa"), "the base server runs no sparse method, expected resa"),
        (("--base-url", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9"),
        (("--base-url", "http://127.0.0.1:abc"), "Invalid port"),
    ],
)
def test_errors_are_one_line(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    assert runner.main(Sums, [*command(server, tmp_path / "run.jsonl"), *more]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error) and "Traceback" not in error


def test_a_method_must_be_confirmed_and_must_run(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"method": "resa", "config": {}, **dict.fromkeys(COUNTED, 0)}
    server.info = {"version": "1", "internal_states": [{"sparse": state}]}
    assert runner.main(Sums, command(server, tmp_path / "a.jsonl", "--expect", "dsa")) == 1
    assert "the base server runs resa, expected dsa" in capsys.readouterr().err
    assert runner.main(Sums, command(server, tmp_path / "b.jsonl")) == 1
    assert "nothing of it was decoded sparse" in capsys.readouterr().err
    # Nor is it proven by asking again.
    assert runner.main(Sums, command(server, tmp_path / "b.jsonl")) == 1
    assert runner.main(Sums, command(server, tmp_path / "c.jsonl", "--expect", "any")) == 0
    rows = read_rows(tmp_path / "c.jsonl")
    assert [row["counters"]["decode_rows"] for row in rows if row["kind"] == "counters"] == [4]


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
    """What a server with sparse prefill says: each request that it counts adds to its prefill."""

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
def test_sparse_prefill_alone_is_proven(server: Server, tmp_path: Path, expect: str) -> None:
    server.info = {"version": "1", "internal_states": [{"sparse": Prefilling()}]}
    assert runner.main(Sums, command(server, tmp_path / "a.jsonl", "--expect", expect)) == 0
    (row,) = [row for row in read_rows(tmp_path / "a.jsonl") if row["kind"] == "counters"]
    assert row["sparsity"] == 0.75 and row["density"] is None
    assert {name: row["counters"][f"prefill_{name}"] for name in PREFILLED} == {k: 4 * v for k, v in PREFILLED.items()}


def test_prefill_that_left_nothing_out_is_refused(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.info = {"version": "1", "internal_states": [{"sparse": Prefilling(attended=120)}]}
    assert runner.main(Sums, command(server, tmp_path / "a.jsonl")) == 1
    assert "prefill left nothing out of it" in capsys.readouterr().err
    assert runner.main(Sums, command(server, tmp_path / "b.jsonl", "--expect", "resa")) == 1
    assert "the base server runs anchor, expected resa" in capsys.readouterr().err


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


@pytest.mark.parametrize("flag", ["--least-sparsity", "--least-skipped"])
@pytest.mark.parametrize("least", ["0", "1", "-0.1", "nan"])
def test_a_share_that_is_none(
    server: Server, tmp_path: Path, flag: str, least: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        runner.main(Sums, command(server, tmp_path / "run.jsonl", flag, least))
    assert f"{flag} must be above 0 and below 1, got" in capsys.readouterr().err
