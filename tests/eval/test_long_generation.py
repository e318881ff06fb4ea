"""The drift command without a server: outputs, settings, comparisons, proofs, resume, refusals and figures."""

import argparse
import asyncio
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from eval import long_generation
from eval.live.counters import COUNTED, EvaluationError
from eval.live.record import Record, read_rows
from eval.long_generation import Run, distributions, divergences, require_forcing
from eval.scores.long_summary import plot, proven, summarise
from eval.scores.stats import kl
from eval.tasks.long_outputs import NOISE, Checkpoint, Output, Setting, checkpoints_of, make_outputs, make_settings

BEST = [[math.log(0.6), 1, None], [math.log(0.3), 2, None], [math.log(0.1), 3, None]]
DRIFTED = [[math.log(0.5), 2, None], [math.log(0.4), 1, None], [math.log(0.1), 3, None]]


class FakeServer:
    """Counts what is asked of it; a sparse answer that was never rectified drifts from position 2 on."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(COUNTED, 0)
        self.asked: list[dict[str, Any]] = []
        self.broken = ""
        self.rectifies_anyway = False

    def counters(self) -> dict[str, int]:
        return dict(self.counts)

    def each(self, work: Any, items: Sequence[Any], label: str = "") -> list[Any]:
        async def all_of_them() -> list[Any]:
            return [await work(None, item) for item in items]

        return asyncio.run(all_of_them())

    async def generate(self, client: None, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        sampling = request["sampling_params"]
        params = sampling["custom_params"]
        sparse = params.get("sparse", True)
        if sparse and self.broken == str(params["rectify_interval"]):
            raise EvaluationError("interrupted")
        output = params.get("forced_tokens") or [9] * sampling["max_new_tokens"]
        self.counts["decode_rows"] += len(output)
        if sparse:
            self.counts["sparse_layer_rows"] += len(output)
            self.counts["pages_attended"] += len(output)
            self.counts["pages_held"] += 10 * len(output)
            self.counts["rectified_tokens"] += params["rectify_interval"] or self.rectifies_anyway
        drifts = sparse and not params["rectify_interval"]
        tops = [DRIFTED if drifts and position >= 2 else BEST for position in range(len(output))]
        logprobs = [[-1.0, token, None] for token in output]
        meta = {"output_token_logprobs": logprobs, "output_top_logprobs": tops}
        return {"output_ids": output, "meta_info": meta}


OUTPUTS = [Output(i, (5, 6), (7, 8, 9, 7), (Checkpoint(2, 2), Checkpoint(4, 2))) for i in range(3)]
SETTINGS = [NOISE, Setting("off", interval=0), Setting("every 3", interval=3)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    found = FakeServer()
    monkeypatch.setattr(long_generation, "generate", found.generate)
    return found


def run_on(server: FakeServer, path: Path) -> Run:
    with Record(path, long_generation.COMMAND, "x", resume=True, arguments={}) as record:
        work = Run(server, server, record)  # type: ignore[arg-type]
        work.compare("book", OUTPUTS, SETTINGS)
    return work


def test_drift_is_measured(server: FakeServer, tmp_path: Path) -> None:
    work = run_on(server, tmp_path / "x.jsonl")
    # Dense, noise and two sparse settings.
    assert len(server.asked) == 4 * len(OUTPUTS)
    assert all(request["top_logprobs_num"] == 50 for request in server.asked)
    figures = {(row["arm"], row["position"]): row for row in summarise(work.rows)}
    expected = kl(BEST, DRIFTED)
    for (arm, position), row in figures.items():
        drifted = arm == "off" and position == 4
        assert row["n"] == 3 and row["kl"] == pytest.approx(expected if drifted else 0, abs=1e-8)
        assert row["agreement"] == (0 if drifted else 1)
        assert row["density"] == (None if arm == "noise" else 0.1)
    assert figures["every 3", 4]["kl_change"] == pytest.approx(-expected, abs=1e-8)
    assert figures["every 3", 4]["kl_change_interval"] == pytest.approx((-expected, -expected), abs=1e-8)
    assert "kl_change" not in figures["off", 4]


def test_an_interrupted_run_goes_on(server: FakeServer, tmp_path: Path) -> None:
    server.broken = "3"
    with pytest.raises(EvaluationError, match="interrupted"):
        run_on(server, tmp_path / "x.jsonl")
    server.broken, server.asked = "", []
    work = run_on(server, tmp_path / "x.jsonl")
    # The dense reference anew, and the setting that was missing.
    assert [r["sampling_params"]["custom_params"].get("rectify_interval") for r in server.asked] == [None] * 3 + [3] * 3
    assert len(summarise(read_rows(tmp_path / "x.jsonl"))) == len(summarise(work.rows)) == 6
    server.asked = []
    run_on(server, tmp_path / "x.jsonl")
    assert not server.asked


def test_items_without_proof_are_measured_again(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    run_on(server, path)
    rows = read_rows(path)
    cut = rows[: next(i for i, row in enumerate(rows) if row["kind"] == "counters" and row["arm"] == "off")]
    kept = proven(cut)
    assert {row["arm"] for row in cut if row["kind"] == "item"} == {"noise", "off"}
    assert {row["arm"] for row in kept if row["kind"] == "item"} == {"noise"}


def test_settings_without_proof_are_refused(server: FakeServer, tmp_path: Path) -> None:
    server.rectifies_anyway = True
    with pytest.raises(EvaluationError, match="book off: the server rectified 3 tokens, wanted none"):
        run_on(server, tmp_path / "x.jsonl")
    assert {row["arm"] for row in proven(read_rows(tmp_path / "x.jsonl")) if row["kind"] == "item"} == {"noise"}


def test_generated_outputs_are_kept(server: FakeServer, tmp_path: Path) -> None:
    for _ in range(2):
        with Record(tmp_path / "x.jsonl", long_generation.COMMAND, "x", resume=True, arguments={}) as record:
            work = Run(server, server, record)  # type: ignore[arg-type]
            assert work.generated([[1], [2]], 5) == [[9] * 5] * 2
    assert len(server.asked) == 2
    sampling = server.asked[0]["sampling_params"]
    assert sampling["ignore_eos"] and sampling["custom_params"] == {"sparse": False}


def test_answers_are_checked() -> None:
    meta: dict[str, Any] = {"output_token_logprobs": [[-1.0, token, None] for token in OUTPUTS[0].tokens]}
    with pytest.raises(EvaluationError, match="best tokens of 0 of 4"):
        distributions({"meta_info": meta}, OUTPUTS[0])
    tops = [BEST, BEST, DRIFTED, BEST]
    found = distributions({"meta_info": meta | {"output_top_logprobs": tops}}, OUTPUTS[0])
    assert found == dict(enumerate(tops))
    first, second = divergences(OUTPUTS[0], dict.fromkeys(range(4), BEST), found)
    assert (first["position"], second["position"]) == (2, 4)
    assert first["scores"]["agreement"] == 1 and second["scores"]["agreement"] == 0.5
    assert second["scores"]["kl"] == pytest.approx(kl(BEST, DRIFTED) / 2, abs=1e-8)
    meta["output_token_logprobs"][0][1] = 0
    with pytest.raises(EvaluationError, match="does not know `forced_tokens`"):
        distributions({"meta_info": meta}, OUTPUTS[0])


def test_a_server_that_decodes_dense_is_refused() -> None:
    server = SimpleNamespace(sparse_state=lambda: {"config": None, "prefill": {"method": "anchor"}})
    with pytest.raises(EvaluationError, match="the server runs anchor alone and decodes dense"):
        require_forcing(server, "http://x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "failure", [EvaluationError("no method"), httpx.HTTPStatusError("404", request=None, response=None)]
)  # type: ignore[arg-type]
def test_other_servers_are_refused(failure: Exception) -> None:
    class Other:
        def sparse_state(self) -> dict[str, Any]:
            raise failure

    with pytest.raises(EvaluationError, match=r"http://x cannot be forced along an output: .*--sparse-method"):
        require_forcing(Other(), "http://x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--base-url and --out are needed"),
        (["--n", "0"], "--n: must be at least 1, got 0"),
        (["--prompt-length", "0"], "--prompt-length: must be at least 1, got 0"),
        (["--kind", "poem"], "--kind: got poem, allowed: book, records"),
        (["--ratios", "0.1,1"], "between 0 and 1"),
        (["--book", "a/x.txt", "--book", "b/x.txt"], "--book: two files have the same name, a/x.txt and b/x.txt"),
    ],
)
def test_wrong_command_lines(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        long_generation.parse(given and ["--base-url", "u", "--out", "x.jsonl", *given])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--from", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["--checkpoints", "2048"], "from 1 to 1024"),
        ([], "no server answers"),
    ],
)
def test_failures_are_one_line(
    given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["--base-url", "http://127.0.0.1:9", "--out", str(tmp_path / "x.jsonl")]
    whole = given if message.startswith("cannot") else [*needed, *given]
    assert long_generation.main(whole) == 1
    error = capsys.readouterr().err
    assert error.startswith("eval.long_generation: ") and message in error and error.count("\n") == 1


def test_files_of_other_commands_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"kind": "header", "command": "eval.niah"}))
    assert long_generation.main(["--from", str(tmp_path / "x.jsonl")]) == 1
    assert "no file of eval.long_generation: its header names eval.niah" in capsys.readouterr().err


CONFIG = {"active_ratio": 0.1, "rectify_interval": 32, "page_size": 16, "min_pages": 1, "dense_fallback": "never"}


def test_checkpoints() -> None:
    assert checkpoints_of("book", None, 1024) == [64, 128, 256, 512, 1024]
    assert checkpoints_of("book", None, 300) == [64, 128, 256, 300]
    assert checkpoints_of("records", None, 1024) == [256, 512, 1024]
    assert checkpoints_of("book", None, 40) == [40]
    assert checkpoints_of("book", [512, 32, 32], 1024) == [32, 512]
    for wrong in ([0], [2000], []):
        with pytest.raises(EvaluationError, match="from 1 to 1024"):
            checkpoints_of("book", wrong, 1024)


def test_settings() -> None:
    found = make_settings(CONFIG, [], [128, 32], 1024)
    assert [s.name for s in found] == ["noise", "off", "every 32", "every 128"]
    assert [s.params for s in found] == [{"sparse": False}, *({"rectify_interval": f} for f in (0, 32, 128))]
    found = make_settings(CONFIG, [0.05, 0.1], [], 1024)[1:]
    assert [s.name for s in found] == [f"{s}, ratio {r}" for r in ("0.05", "0.1") for s in ("off", "every 32")]
    assert found[1].params == {"active_ratio": 0.05, "rectify_interval": 32}
    assert [s.params for s in make_settings({}, [], [], 1024)] == [{"sparse": False}, {}]
    assert len(make_settings({**CONFIG, "rectify_interval": 0}, [], [], 1024)) == 2


@pytest.mark.parametrize(
    ("config", "ratios", "intervals", "message"),
    [
        ({"rectify_interval": 32}, [0.1], [], "no active_ratio"),
        ({"active_ratio": 0.1}, [], [8], "never rectified"),
        (CONFIG, [], [1], r"every \[1\] tokens"),
        (CONFIG, [], [-8], r"every \[-8\] tokens"),
        (CONFIG, [], [200], r"every \[200\] tokens.*shorter than the output of 200"),
        ({**CONFIG, "rectify_interval": 512}, [], [], r"the server's own 512"),
    ],
)
def test_wrong_settings(config: dict[str, Any], ratios: list[float], intervals: list[int], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        make_settings(config, ratios, intervals, 200)


def test_outputs_of_a_book() -> None:
    args = argparse.Namespace(n=3, prompt_length=50, seed=1)
    said = make_outputs("book", {"one": range(1000)}, args, [16, 64], list, lambda p, n: [[len(q)] * n for q in p])
    assert [output.index for output in said] == [0, 1, 2]
    for output in said:
        start = output.facts["start"]
        assert output.prompt == tuple(range(start, start + 50)) and output.tokens == (50,) * 64
        # The 32 positions before each checkpoint, as far as there are so many.
        assert output.positions() == [*range(16), *range(32, 64)]
        assert output.ids("book") == [f"book/{output.index}/16", f"book/{output.index}/64"]


def test_outputs_of_records() -> None:
    args = argparse.Namespace(n=2, prompt_length=200, seed=1)
    texts: list[str] = []

    def encode(text: str) -> list[int]:
        texts.append(text)
        return [10_000 + ord(letter) for letter in text]

    found = make_outputs("records", {"one": range(9000)}, args, [1000, 1500], encode, lambda p, n: [])
    assert [(output.index, output.checkpoints[0].end) for output in found] == [
        (0, 1000),
        (0, 1500),
        (1, 1000),
        (1, 1500),
    ]
    for output in found:
        (checkpoint,) = output.checkpoints
        assert len(output.prompt) == 200 and len(output.tokens) == checkpoint.end
        answer = "".join(chr(output.tokens[p] - 10_000) for p in output.positions())
        text = "".join(chr(token - 10_000) for token in output.tokens if token >= 10_000)
        # Told in the output and asked for at its end.
        assert answer.removesuffix("<|im_end|>").isdigit() and text.count(answer.removesuffix("<|im_end|>")) == 2
        assert 0.1 < output.facts["depth"] < 1
    # Both lengths of a prompt tell and ask the same.
    assert len(set(texts)) == len(texts)


def hand_made(settings: Sequence[tuple[str, float | None, int | None, float]]) -> list[dict[str, Any]]:
    rng = random.Random(0)
    rows: list[dict[str, Any]] = [{"kind": "header", "command": long_generation.COMMAND}]
    for name, ratio, every, level in settings:
        for index in range(8):
            for position in (64, 256, 1024):
                scores = {"kl": level * position / 64 * rng.uniform(0.5, 1.5), "agreement": 1 - level}
                row = {"task": "book", "arm": name, "ratio": ratio, "interval": every, "index": index}
                rows.append({"kind": "item", **row, "position": position, "scores": scores})
    return rows


HAND_MADE = hand_made([("noise", None, None, 0.0), ("off", None, 0, 0.02), ("every 32", None, 32, 0.01)])


def test_figures_of_hand_made_rows() -> None:
    summary = summarise(HAND_MADE, seed=3)
    assert summary == summarise(HAND_MADE, seed=3) and len(summary) == 9
    off = [row for row in summary if row["arm"] == "off"]
    assert all(row["kl_interval"][0] < row["kl"] < row["kl_interval"][1] for row in off)
    assert off[0]["kl"] < off[1]["kl"] < off[2]["kl"] and off[0]["agreement"] == pytest.approx(0.98)
    for row in summary:
        if row["arm"] == "every 32":
            assert row["kl_change_interval"][0] < row["kl_change"] < row["kl_change_interval"][1] < 0


def test_unfinished_files_are_refused() -> None:
    with pytest.raises(EvaluationError, match=r"every 32 has 23 items where noise has 24.*not finished"):
        summarise(HAND_MADE[:-1])
    with pytest.raises(EvaluationError, match="no items"):
        summarise(HAND_MADE[:1])


def test_plot_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in HAND_MADE))
    assert long_generation.main(["--from", str(file), "--plot", str(tmp_path / "new" / "drift")]) == 0
    assert "every 32" in capsys.readouterr().out
    drawn = (tmp_path / "new" / "drift.svg").read_text()
    for text in ("dense again (noise)", "off", "every 32", "KL(dense, sparse), nats", "1024"):
        assert f"<!-- {text} -->" in drawn


def test_plot_has_a_column_for_each_text(tmp_path: Path) -> None:
    both = [*summarise(HAND_MADE), *({**row, "task": "records"} for row in summarise(HAND_MADE))]
    plot(both, tmp_path / "drift")
    drawn = (tmp_path / "drift.svg").read_text()
    assert "<!-- book -->" in drawn and "<!-- records -->" in drawn
