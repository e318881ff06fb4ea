"""Recipes: what they say is what SGLang and the plugin take, and what would be refused does not start."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from sglang.srt.plugins import load_plugins
from skip_calibrations import calibration_file

load_plugins()

from resolved import prepare_server_args

from sglang_sparse import serve
from sglang_sparse.tools import dry_run, recipes

ROOT = Path(__file__).parent.parent.parent
MODELS = ROOT / "eval" / "models"
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="asks about the CPU platform")
NAMES = recipes.names()
OWN = """
title = "tiny"
model_path = "{model}"
attention = "MHA/GQA"
gpu = "none"
gpus = 1
context_length = 4096
mem_fraction_static = 0.5

[decode]
method = "resa"
config = {{ active_ratio = 0.25 }}
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Return the commands that would have taken the place of this process."""
    calls: list[Sequence[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: calls.append((path, *words)))
    return calls


def own(folder: Path, text: str = OWN.format(model=MODELS / "tiny-gqa")) -> str:
    path = folder / "own.toml"
    path.write_text(text)
    return str(path)


def test_the_recipes_are_those_of_launch() -> None:
    assert sorted(path.stem for path in (ROOT / "sglang_sparse" / "recipes").iterdir()) == NAMES
    assert {"qwen3-8b-long", "deepseek-v3.2"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_served_but_for_the_kernels_that_are_not_measured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipes.load(name)
    words = recipe.arguments()
    args = dry_run.parse(words)
    assert (args.model_path, args.tp_size, args.context_length) == (
        recipe.model_path,
        recipe.gpus,
        recipe.context_length,
    )
    methods = [asked.method for asked in (recipe.decode, recipe.prefill) if asked]
    assert methods == [method for method in (args.sparse_method, args.sparse_prefill_method) if method]
    if "robsa" in methods:
        assert "needs a calibration" in str(dry_run.refusal(words, recipe.attention, gpu=True))
        assert any("--method robsa" in step and recipe.model_path in step for step in recipe.before)
        words += ["--sparse-config", '{"page_size": 64, "allow_uncalibrated": true}']
    assert dry_run.refusal(words, recipe.attention, True, recipe.config) is None


@pytest.mark.parametrize("name", NAMES)
def test_measured_figures_are_those_of_the_result_files(name: str) -> None:
    recipe = recipes.load(name)
    assert recipe.run != "not run" or not recipe.measured
    for figure in recipe.measured:
        rows = [json.loads(line) for line in (ROOT / figure.file).read_text().splitlines()]
        found = [row[figure.field] for row in rows if row["kind"] == "summary" and figure.row.items() <= row.items()]
        assert [round(value, 2) for value in found] == [figure.value], f"{name}: {figure.what}"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("[decode]", "[decode"), "not valid TOML"),
        (("gpus = 1", "gpus = 1\ngpu_count = 2"), "unknown key 'gpu_count', allowed: title, model_path, attention"),
        (('method = "resa"', 'method = "resa"\nname = "a"'), "unknown key 'decode.name', allowed: method, config"),
        (('method = "resa"', ""), "missing key 'decode.method', allowed: method, config"),
        (('title = "tiny"', ""), "missing key 'title'"),
        (("gpus = 1", 'gpus = "one"'), "gpus: got 'one'; Input should be a valid integer"),
        (("gpus = 1", "gpus = 0"), "gpus: got 0; Input should be greater than 0"),
        (("MHA/GQA", "GQA"), "attention: got 'GQA'; must be one of MHA/GQA, MLA, DSA"),
        (("[decode]", "[flags]\ntp-size = 2\n[decode]"), "tp-size has its own field"),
        (("[decode]", "[flags]\nsparse-method = 'dsa'\n[decode]"), "sparse-method has its own field"),
        (("[decode]", "[flags]\ndisable-cuda-graph = false\n[decode]"), "disable-cuda-graph is false; allowed: true"),
        (("[decode]", "[flags]\nno-such-flag = 1\n[decode]"), "unrecognized arguments: --no-such-flag 1"),
    ],
)
def test_what_is_no_recipe_is_named(
    changed: tuple[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], started: list[object]
) -> None:
    text = OWN.format(model=MODELS / "tiny-gqa").replace(*changed, 1)
    assert serve.main(["--recipe", own(tmp_path, text)]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and not printed.out and not started


def test_a_share_to_skip_is_refused_where_the_model_is_at_hand_and_has_no_calibration(tmp_path: Path) -> None:
    flags = ["--sparse-method", "skip_softmax", "--sparse-config", '{"target_sparsity": 0.5}']
    folder = str(MODELS / "tiny-gqa")
    assert dry_run.refusal(["--model-path", "some/model", *flags], "MHA/GQA", gpu=False) is None
    said = dry_run.refusal(["--model-path", folder, *flags], "MHA/GQA", gpu=False)
    assert said is not None and "target_sparsity: needs one sparse_attention_config" in said
    # Nor are weights compared that are not there.
    fields = {"target_sparsity": 0.5, "calibration_file": calibration_file(tmp_path)}
    flags = [*flags[:2], "--sparse-config", json.dumps(fields)]
    for model in ("some/model", folder):
        assert dry_run.refusal(["--model-path", model, *flags], "MHA/GQA", gpu=False) is None


def test_unknown_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--recipe", "qwen3-8b-lon", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "got 'qwen3-8b-lon', allowed: deepseek-r1, " in said and "did you mean 'qwen3-8b-long'?" in said
    assert serve.main(["--recipe", str(tmp_path / "none.toml"), "--dry-run"]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_dry_run_prints_a_command_and_where_figures_come_from(
    capsys: pytest.CaptureFixture[str], started: list[object]
) -> None:
    assert serve.main(["--recipe", "qwen3-8b-long", "--dry-run", "--tp-size", "2", "--port", "8000"]) == 0
    printed = capsys.readouterr()
    (line,) = printed.out.splitlines()
    assert line.startswith("python -m sglang.launch_server --model-path Qwen/Qwen3-8B ")
    args = dry_run.parse(shlex.split(line)[3:])
    assert (args.tp_size, args.port, args.sparse_method, args.attention_backend) == (2, 8000, "resa", "fa3")
    assert json.loads(args.json_model_override_args)["rope_scaling"]["factor"] == 4.0
    assert "/bench-decode-qwen3-8b-1x128k.jsonl" in printed.err
    assert not started


def test_a_start_takes_the_place_of_the_process(monkeypatch: pytest.MonkeyPatch, started: list[Sequence[str]]) -> None:
    monkeypatch.setattr(serve, "_has_gpu", lambda: True)
    assert serve.main(["--recipe", "llama-3.1-8b-long", "--port=1234"]) == 0
    (words,) = started
    assert words[:4] == (sys.executable, sys.executable, "-m", "sglang.launch_server")
    assert list(words[4:]) == [*recipes.load("llama-3.1-8b-long").arguments(), "--port=1234"]


@pytest.mark.parametrize(
    ("further", "status", "said"),
    [
        (["--enable-pdmux"], 1, "--sparse-method resa cannot run with PD multiplexing"),
        (["--page-size", "64"], 1, "the server's page size is 64 and the config's is 16"),
        (["--sparse-config", '{"active_ratio": 2}'], 1, "active_ratio: got 2; Input should be less than or equal to 1"),
        (["--sparse-config", "none.json"], 1, "cannot read 'none.json'"),
        (["--sparse-method", "anchor"], 1, "--sparse-method: got 'anchor', allowed: "),
        (["--config", "flags.yaml"], 2, "--config is not read here"),
        (["--tp-sise", "2"], 2, "unrecognized arguments: --tp-sise 2"),
        (["--tp-size", "two"], 2, "argument --tp-size/--tensor-parallel-size: invalid int value: 'two'"),
    ],
)
def test_further_flags_are_judged(
    further: list[str],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    started: list[object],
) -> None:
    monkeypatch.setattr(serve, "_has_gpu", lambda: True)
    assert serve.main(["--recipe", "qwen3-8b-long", *further]) == status
    assert said in capsys.readouterr().err and not started


@WITHOUT_GPU
def test_a_recipe_for_a_gpu_is_refused_without_one(capsys: pytest.CaptureFixture[str], started: list[object]) -> None:
    assert serve.main(["--recipe", "qwen3-8b-long"]) == 1
    assert "--attention-backend fa3 needs a GPU and this machine has none" in capsys.readouterr().err
    assert not started


@WITHOUT_GPU
def test_a_recipe_of_ones_own_is_what_a_start_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], started: list[Sequence[str]]
) -> None:
    path = own(tmp_path)
    assert serve.main(["--recipe", path, "--dry-run"]) == 0
    args = prepare_server_args(shlex.split(capsys.readouterr().out)[3:])
    assert json.loads(str(getattr(args, "sparse_config")))["active_ratio"] == 0.25  # noqa: B009
    assert serve.main(["--recipe", path]) == 0 and len(started) == 1
    # The model's own config is asked where it is at hand.
    assert serve.main(["--recipe", path, "--model-path", str(MODELS / "tiny-mla")]) == 1
    assert "resa needs an MHA or GQA model" in capsys.readouterr().err
    assert serve.main(["--recipe", path, "--context-length", "99999999"]) == 1
    assert "is greater than the derived context_length" in capsys.readouterr().err
    assert len(started) == 1


def test_the_list_says_what_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    for name, line in zip(NAMES, lines, strict=True):
        recipe = recipes.load(name)
        reason = dry_run.refusal(recipe.arguments(), recipe.attention, gpu=True)
        assert recipe.model_path in line and line.endswith(f"refused: {reason}" if reason else "  served")
    assert serve.main(["--list", "--port", "1"]) == 2
    assert "--list: got --port 1" in capsys.readouterr().err
