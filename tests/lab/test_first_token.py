"""Cold prefills of the serving benchmark: flushed, counted, beside their recall, and drawn; servers are stand-ins."""

import json
from pathlib import Path
from typing import Any

import pytest
from generated_stubs import HEADS, goals_of, install, made, parse
from serving_stubs import PREFILL, FakeServer, after

from eval.lab import bench_serving, documents
from eval.lab.servers.generated_inputs import GeneratedInputs
from eval.lab.structured.generator import read_recipe
from eval.lab.tables import files
from eval.live.counters import EvaluationError
from eval.live.record import read_rows

K = 1024
RECIPE = read_recipe({}).model_dump()
ANCHOR = ["--sparse-method", "none", "--sparse-prefill-method", "anchor", "--structured", "{}", "--both"]
TTFT = {"sparse": [9.0, 1.0, 1.2, 1.1, 1.0, 1.6], "dense": [9.0, 2.0, 2.6, 2.5, 2.4, 3.0]}


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(FakeServer, "ttft", TTFT)


def prefill_file(folder: Path, *changes: dict[str, Any], recipe: dict[str, Any] = RECIPE) -> Path:
    """A file of ``eval.lab.bench_prefill`` with a row for each length."""
    path = folder / "prefill.jsonl"
    header = {"kind": "header", "command": "eval.lab.bench_prefill", "recipe": recipe, "arguments": {"seed": 0}}
    row = {"kind": "summary", "implementation": "anchor", "q_heads": 32, "kv_heads": 8, "dim": 128, "block_size": 128}
    row |= {"step": 16, "setting": "theta", "target_sparsity": 0.89}
    rows = [{**row, "length": n * K, "value": 9 + n / 100, "recall": 0.9 + n / 10000} for n in (32, 64, 128)]
    rows = [row | change for row in rows for change in changes or ({},)]
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *rows)))
    return path


def run_status(folder: Path, *arguments: str) -> int:
    out = str(folder / "serving.jsonl")
    return bench_serving.main(["--shape", "qwen3-8b", "--out", out, *ANCHOR, *arguments])


def run(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    return run_status(folder, *arguments), read_rows(folder / "serving.jsonl")


def summary(rows: list[dict[str, Any]], task: str = "first_token") -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == "summary" and row["task"] == task]


def test_goal_e6(tmp_path: Path) -> None:
    arguments = ["--contexts", "4k,8k,32k,64k,128k", "--chunked-prefill-size", "8k,16k", "--sparsity", "0.89"]
    status, rows = run(tmp_path, *arguments, "--recall-from", str(prefill_file(tmp_path)))
    assert status == 0
    assert rows[0]["arguments"]["recall_from"] == "prefill.jsonl"
    cells = summary(rows)
    assert len(cells) == 2 * 5 and cells[2]["id"] == "sparse/first_token/32k@8k"
    for row in cells:
        assert row["runs"] == row["dense_runs"] == 5, "the run that compiles does not count"
        assert (row["ttft"], row["ttft_range"]) == (pytest.approx(1.1), pytest.approx([1.0, 1.6]))
        assert (row["dense_ttft"], row["dense_ttft_range"]) == (pytest.approx(2.5), pytest.approx([2.0, 3.0]))
        assert row["ttft_ratio"] == pytest.approx(2.5 / 1.1)
    assert [row["sparsity"] for row in cells[:5]] == pytest.approx([0, 0, 0.89, 0.89, 0.89])
    assert [row["theta"] for row in cells[:5]] == [None, None, 9.32, 9.64, 10.28]
    assert [row["recall"] for row in cells[2:5]] == pytest.approx([0.9032, 0.9064, 0.9128])
    (below, _) = summary(rows, "first_token_below")
    assert below["context"] == 8192 and set(below["ratios"]) == {"4k", "8k"}
    found = goals_of(tmp_path, "E6")
    assert (
        found["128k, chunks of 8k"]
        == found["128k, chunks of 16k"]
        == ["2.273x", "missed", "mass kept 0.913, sparsity 89.0%"]
    )
    assert found["64k, chunks of 8k"][1] == found["64k, chunks of 16k"][1] == "stretch"
    assert "32k, chunks of 16k" not in found, "at 32k less is to be left out"
    assert found["8k and less"] == ["2.273x", "beyond the limit", "sparsity 0.0%"]
    shown = files.any_table(tmp_path / "serving.jsonl")
    assert (
        "| sparse/first_token/64k@16k | 1.100 | 1.000 … 1.600 | 2.500 | 2.000 … 3.000 | 2.273 | 89.0 % | 0.906 | 9.64 |"
        in shown
    )


def test_servers_take_turns_and_serve_all_lengths(tmp_path: Path) -> None:
    extra = ["--server", "sparse=--mem-fraction-static 0.4", "--chunked-prefill-size", "16k"]
    file = str(prefill_file(tmp_path))
    _, rows = run(tmp_path, "--contexts", "8k,32k", *extra, "--sparsity", "0.89", "--recall-from", file)
    sparse, dense = FakeServer.started
    for server in (sparse, dense):
        assert after(server.flags, "--chunked-prefill-size") == "16384"
        assert after(server.flags, "--max-running-requests") == "2" and len(server.asked) == 2 * 6
        assert int(after(server.flags, "--max-total-tokens")) < 33 * K + 256
        assert all(request["sampling_params"]["max_new_tokens"] == 1 for request in server.asked)
    assert [request["sampling_params"]["custom_params"] for request in sparse.asked] == [{}] * 6 + [{"theta": 9.32}] * 6
    assert {json.dumps(request["sampling_params"]["custom_params"]) for request in dense.asked} == {"{}"}
    assert [row["arm"] for row in rows if row["kind"] == "item"] == ["sparse", "dense"] * 10
    assert [ours["input_ids"] for ours in sparse.asked] == [theirs["input_ids"] for theirs in dense.asked]


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("flushes", False, "32736 tokens of a prompt were cached although the cache was flushed"),
        ("left_out", 0.84, "0.840 of the query-key pairs were left out at theta 9.32, allowed are 0.89 ± 0.02"),
        ("left_out", 0.0, "no token was prefilled sparse, although anchor begins at 8192"),
        ("made", {"seed": 1, "recipe": RECIPE}, "--structured {}: the server attends with other inputs, {'seed': 1"),
    ],
)
def test_what_is_no_result(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    attribute: str,
    value: Any,
    message: str,
) -> None:
    if attribute == "made":
        monkeypatch.setattr(FakeServer, attribute, lambda server: made(server, value))
    else:
        monkeypatch.setattr(FakeServer, attribute, value)
    file = str(prefill_file(tmp_path))
    status, rows = run(tmp_path, "--contexts", "32k", "--sparsity", "0.89", "--recall-from", file)
    assert status == 1 and message in capsys.readouterr().err
    assert summary(rows) == []


def test_recall_of_other_inputs_is_refused(tmp_path: Path) -> None:
    def wanted(file: Path, *given: str) -> dict[str, Any]:
        args = parse(["--shape", "qwen3-8b", "--out", "x", *ANCHOR, "--recall-from", str(file), *given])
        return GeneratedInputs(args).of_prompt(32 * K, PREFILL, {"seed": 0, "recipe": RECIPE, "shape": HEADS})

    target = ("--sparsity", "0.89")
    assert wanted(prefill_file(tmp_path), *target)["theta"] == 9.32
    for change, given, message in (
        ({"target_sparsity": 0.8}, target, "a row with target_sparsity 0.89, the nearest has target_sparsity 0.8"),
        ({"kv_heads": 32}, target, "a row with kv_heads 8, the nearest has kv_heads 32"),
        ({"step": 8}, target, "a row with step 16, the nearest has step 8"),
        ({"value": 11.0}, (), "a row with value 12.0, the nearest has value 11.0"),
    ):
        with pytest.raises(EvaluationError, match=message):
            wanted(prefill_file(tmp_path, change), *given)
    # A file from before a field was there has its default.
    before = {name: value for name, value in RECIPE.items() if name not in ("head_level", "block_level")}
    assert wanted(prefill_file(tmp_path, recipe=before), *target)["theta"] == 9.32
    with pytest.raises(EvaluationError, match=r"a row with recipe \{'sink': 0\.3"):
        wanted(prefill_file(tmp_path, recipe={**RECIPE, "noise": 0.0}), *target)


def test_skip_softmax_has_a_factor(tmp_path: Path) -> None:
    """Its recall depends on no blocks of the config."""
    row = {"setting": "threshold_scale_factor", "implementation": "skip_softmax", "value": 700.0}
    file = prefill_file(tmp_path, row | {"target_sparsity": 0.7, "block_size": 64})
    chosen = ["--sparse-prefill-method", "skip_softmax", "--recall-from", str(file), "--sparsity", "0.7"]
    args = parse(["--shape", "qwen3-8b", "--out", "x", *ANCHOR, *chosen])
    config = {"crossover_tokens": 8 * K, "threshold_scale_factor": 250.0}
    found = GeneratedInputs(args).of_prompt(64 * K, config, {"seed": 0, "recipe": RECIPE, "shape": HEADS})
    assert found == {"threshold_scale_factor": 700.0, "recall": pytest.approx(0.9064), "target_sparsity": 0.7}
    other = GeneratedInputs(parse(["--shape", "qwen3-8b", "--out", "x", *chosen, *ANCHOR]))
    with pytest.raises(EvaluationError, match="a row with setting 'theta', "):
        other.of_prompt(64 * K, PREFILL | config, {"seed": 0, "recipe": RECIPE, "shape": HEADS})


def test_without_a_target_the_threshold_is_the_servers(tmp_path: Path) -> None:
    file = prefill_file(tmp_path, {"value": PREFILL["theta"], "target_sparsity": None})
    status, rows = run(tmp_path, "--contexts", "32k", "--recall-from", str(file))
    (row,) = summary(rows)
    assert status == 0 and (row["theta"], row["recall"], row["target_sparsity"]) == (12.0, pytest.approx(0.9032), None)
    assert FakeServer.started[0].asked[0]["sampling_params"]["custom_params"] == {}


def test_only_e6_is_e6(tmp_path: Path) -> None:
    arguments = ["--contexts", "4k,64k", "--chunked-prefill-size", "8k", "--sparsity", "0.89"]
    run(tmp_path, *arguments, "--recall-from", str(prefill_file(tmp_path)))
    path = tmp_path / "serving.jsonl"
    header, *rows = read_rows(path)
    assert list(goals_of(tmp_path, "E6")) == ["64k, chunks of 8k"], "4k alone is not all that is below the crossover"

    def with_changes(asked: dict[str, Any], measured: dict[str, Any]) -> dict[str, list[str]]:
        changed = {**header, "arguments": header["arguments"] | asked}
        path.write_text("".join(json.dumps(row) + "\n" for row in (changed, *(row | measured for row in rows))))
        return goals_of(tmp_path, "E6")

    for asked in (
        {"structured": None},
        {"structured": {"recipe": {"stripes": 0.5, "band": 0.1}}},
        {"shape": "qwen3-1.7b"},
        {"both": False},
        {"sparse_prefill_method": "another"},
    ):
        assert with_changes(asked, {}) == {}, asked
    for measured in (
        {"chunked_prefill_size": 4096},
        {"dense_prefill_graphs": False},
        {"dense_attention_backend": "triton"},
        {"dense_page_size": 1},
        {"target_sparsity": None},
        {"target_sparsity": 0.84},
        {"sparsity": 0.84},
        {"sparsity": None},
    ):
        assert with_changes({}, measured) == {}, measured
    assert list(with_changes({}, {"sparsity": 0.875})) == ["64k, chunks of 8k"]


def test_a_file_without_recall_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = prefill_file(tmp_path)
    file.write_text(file.read_text().splitlines()[0] + "\n")
    assert run_status(tmp_path, "--recall-from", str(file)) == 1
    assert run_status(tmp_path, "--recall-from", str(tmp_path / "none.jsonl")) == 1
    said = capsys.readouterr().err
    assert "it has no summary, its run was refused or interrupted" in said and "cannot read" in said
    assert FakeServer.started == []


def test_picture(tmp_path: Path) -> None:
    arguments = ["--contexts", "8k,32k,128k", "--chunked-prefill-size", "8k,16k", "--sparsity", "0.89"]
    run(tmp_path, *arguments, "--recall-from", str(prefill_file(tmp_path)))
    assert documents.main([str(tmp_path / "serving.jsonl"), "--out", str(tmp_path / "drawn")]) == 0
    drawn = sorted((tmp_path / "drawn").iterdir())
    assert [path.name for path in drawn] == ["serving.svg"]
    labels = ("dense, chunks of 8k", "dense, chunks of 16k", "sparse, chunks of 8k", "sparse, chunks of 16k", "128k")
    for label in (*labels, "time to first token, s", "left out 0.89 to 0.89, attention mass kept 0.90 to 0.91"):
        assert label in drawn[0].read_text(), label


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cold-runs", "4"], "--cold-runs must be at least 5, got 4"),
        (["--sparsity", "0.89"], "--sparsity needs --recall-from"),
        (["--sparsity", "0.8,32k=89"], "'32k=89' of '0.8,32k=89': allowed are shares between 0 and 1"),
        (
            ["--sparsity", "0.8,0.9"],
            "'0.9' of '0.8,0.9': allowed are shares between 0 and 1, one for all",
        ),
        (
            ["--structured", '{"noise": 1}'],
            "got {'noise': 1}, allowed is an object with an integer seed, a recipe and prefill",
        ),
        (["--structured", '{"recipe": {"noise": -1}}'], "--structured: recipe: noise: Input should be greater"),
        (["--structured", "3"], "got 3, allowed is an object"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--shape", "qwen3-8b", "--out", "x", *ANCHOR, *arguments])
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--shape", "qwen3-8b", "--out", "x", "--recall-from", "f"])
    assert "is the recall of a --sparse-prefill-method, or of robsa, over --structured" in capsys.readouterr().err
