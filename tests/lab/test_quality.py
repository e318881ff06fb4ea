"""Real checkpoints: which servers and questions an arm is, and the table and points of what they answered."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from eval.lab import quality
from eval.lab.tables.quality import kept_over_read, plot, quality_tables, read_answers, thetas
from eval.live.record import Record
from sglang_sparse import calibrate

MODEL = "Qwen/Qwen2.5-Coder-0.5B-Instruct"


def parsed(*more: str) -> Any:
    return quality.parse(["--out", "measured", "--models", MODEL, "--n", "40", "--lengths", "8k,31k", *more])


def test_an_arm_is_a_server_and_a_file_for_each_suite_and_length() -> None:
    calibrate, resa, pair, control = quality.legs_of(parsed("--arms", "resa,resa+anchor,true_mass"))
    assert calibrate.server is None and calibrate.commands[0].arguments[1] == MODEL
    assert resa.server and resa.server.model == MODEL and resa.name == "qwen2.5-coder-0.5b-instruct-resa"
    files = [command.file.removeprefix(f"{resa.name}-") for command in resa.commands]
    sizes = [f"{suite}-{size}" for size in ("8k", "31k") for suite in ("ruler", "niah", "infinitebench")]
    assert files == [*(f"{name}.jsonl" for name in sizes), "ppl.jsonl", "drift.jsonl"]
    asked = resa.commands[1].arguments
    assert asked[asked.index("--n") + 1] == "8" and "--compare-url" in asked and asked.count("--also") == 2
    assert sum(map(quality.tokens_of, resa.commands[:2])) == 40 * 8192 * (11 + 5)
    # Its thresholds are those that the first leg writes, and its dense answers those of the first arm.
    flags = pair.servers[0].flags
    assert flags[flags.index("--sparse-prefill-config") + 1].endswith(f"measured/{calibrate.commands[0].file}")
    assert "--compare-url" not in pair.commands[0].arguments and "resa+anchor" in pair.commands[0].arguments
    assert control.servers[0].environment == (("PYTHONPATH", "eval/lab/controls"),)
    small = quality.legs_of(quality.parse(["--out", "m", "--models", "HuggingFaceTB/SmolLM2-135M-Instruct"]))
    assert all(quality.tokens_of(one) <= 200 * 11 * 8192 for leg in small for one in leg.commands)


def test_what_is_run_apart_takes_its_arguments(tmp_path: Path) -> None:
    """The book of the forced texts holds eleven windows of 8k."""
    asked = ["--out", str(tmp_path), "--models", MODEL, "--arms", "resa,anchor"]
    calibration, resa = quality.legs_of(quality.parse(asked))[:2]
    (command,) = calibration.commands
    assert calibrate.parse([*command.arguments, "--out", str(tmp_path / command.file)]).prompts
    forced = [one.arguments for one in resa.commands if one.file.endswith(("ppl.jsonl", "drift.jsonl"))]
    assert all("10" in arguments for arguments in forced) and len(forced) == 2


def test_a_base_model_answers_raw_prompts() -> None:
    asked = ["--out", "m", "--models", "google/gemma-3-270m", "--arms", "resa", "--lengths", "8k"]
    (leg,) = quality.legs_of(quality.parse(asked))
    everything = quality.legs_of(quality.parse(["--out", "m", "--models", "google/gemma-3-270m"]))
    assert not any("anchor" in one.name or "rocketkv" in one.name for one in everything)
    files = [one.file.removeprefix(f"{leg.name}-").removesuffix(".jsonl") for one in leg.commands]
    assert files == ["ruler-8k", "niah-8k", "ppl", "ppl-31k", "drift"]
    niah, longer = leg.commands[1].arguments, leg.commands[3].arguments
    assert niah[niah.index("--form") + 1] == "ruler"
    assert longer[longer.index("--length") + 1] == "31744" and longer[longer.index("--windows") + 1] == "2"


def test_checkpoints_of_a_folder() -> None:
    legs = quality.legs_of(parsed("--folder", "/models", "--arms", "resa,rocketkv", "--server-args", "--tp-size 2"))
    assert [leg.servers[0].model for leg in legs] == ["/models/Qwen2.5-Coder-0.5B-Instruct"] * 2
    assert legs[0].servers[0].flags[-2:] == ("--tp-size", "2")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--arms", "quest"), "--arms must be of resa, resa-paper, rocketkv, .* got 'quest'"),
        (("--suites", "mmlu"), "--suites must be of ruler, niah, infinitebench, ppl, drift, got 'mmlu'"),
        (("--n", "0"), "--n must be 1 or more, got 0"),
        (("--arms", "rocketkv"), "--arms: without resa, here or in measured already, nobody is asked to decode dense"),
    ],
)
def test_what_there_is_not(more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*more)
    assert re.search(message, capsys.readouterr().err)


def write(
    folder: Path, arm: str, scores: dict[str, tuple[str, list[float]]], density: int, suite: str = "ruler"
) -> None:
    """A file of answers to "easy" and "hopeless", by the names that a file gives its servers."""
    server = {"model_path": f"/models/{MODEL}", "version": "0.5.23"}
    path, servers = folder / f"m-{arm}-{suite}-8k.jsonl", {"base": server}
    with Record(path, f"eval.{suite}", "r", label=arm, servers=servers) as record:
        for told, (task, given) in scores.items():
            for index, score in enumerate(given):
                row = {"task": task, "length": 8192, "arm": told.split(":")[0], "id": f"{task}/{index}"}
                record.add("item", **row, prompt_sha=f"{task}{index}", scores={"score": score})
        counts = {"pages_attended": density, "pages_held": 100, "decode_rows": 1, "dense_fallback_rows": 0}
        record.add("counters", arm="base", task="hard", length=8192, counters=counts)
        record.add("summary", task="hard")


def test_the_table_pairs_every_arm_with_the_first_ones_dense_answers(tmp_path: Path) -> None:
    easy, hopeless = [1.0] * 40, [0.0] * 30 + [1.0] * 10
    dense = {"compare": ("easy", easy), "compare:": ("hopeless", hopeless)}
    write(tmp_path, "resa", {"base": ("easy", [0.0] * 8 + [1.0] * 32), "base:": ("hopeless", hopeless), **dense}, 10)
    write(tmp_path, "resa", {"base": ("easy", easy), "compare": ("easy", easy)}, 30, suite="niah")
    write(tmp_path, "rocketkv", {"base": ("easy", [1.0] * 20)}, 2)
    write(tmp_path, "true_mass", {"base": ("easy", easy)}, 10)
    write(tmp_path, "z", {"base": ("easy", easy)}, 10)
    (answers,) = read_answers(sorted(tmp_path.glob("*.jsonl"))).values()
    line, mean, *needles = answers.lines()
    assert [row["suite"] for row in needles] == ["needles", "needles"] and needles[1]["read:resa"] == 0.3
    # What dense attention does not do says nothing; fewer questions are held against the same ones.
    assert (line["task"], line["n"], line["diff:resa"], line["n:rocketkv"]) == ("easy", 40, pytest.approx(-0.2), 20)
    assert (mean["task"], mean["resa"], mean["diff:rocketkv"]) == ("mean", 0.8, 0.0)
    (table,) = quality_tables(tmp_path)
    # What no method can do is last.
    assert (
        "| suite | length | task | n | dense | resa | rocketkv | z | true_mass |" in table and "hopeless" not in table
    )
    assert "| RULER | 8k | easy | 40 | 100.0 | **-20.0** | +0.0 (n 20) | +0.0 | +0.0 |" in table
    assert "| RULER | 8k | mean |  | 100.0 | -20.0, 10% read | +0.0, 2% read |" in table
    # Of RULER alone.
    points = kept_over_read(answers)
    assert points["resa"] == (0.1, 0.8) and points["rocketkv"] == (0.02, 1.0)
    plot(answers, tmp_path / "chart")
    assert (tmp_path / "chart.svg").stat().st_size > 1000
    (tmp_path / "m-anchor-niah-8k.jsonl").write_text(json.dumps({"kind": "header", "command": "eval.niah"}) + "\n")
    assert quality_tables(tmp_path) == [table], "what is not finished is passed over"


def test_what_a_theta_keeps_of_several_models(tmp_path: Path) -> None:
    row = {"theta": 12.0, "length": 8192, "recall": 0.9234, "sparsity": 0.25}
    file = tmp_path / "m-anchor.json"
    file.write_text(json.dumps({"calibration": {"model": "hub/M", "same_theta_in_all_layers": [row]}}))
    assert "| M | 8k | 12 | 0.923 | 25.0 % |" in thetas([file])
