"""Thresholds by layer: how they are measured and chosen, the file, and what a server makes of it."""

import json
import lzma
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from anchor_runs import with_sinks
from model_configs import write_config
from refusals import refused
from transformers import AutoModelForCausalLM
from window_checkpoints import random_windowed

from sglang_sparse import calibrate
from sglang_sparse.config.files import read_config
from sglang_sparse.config.request_options import parse_options
from sglang_sparse.config.settings import build
from sglang_sparse.methods.anchor import ALL_KEYS, Anchor
from sglang_sparse.methods.prefill import PrefillInputs, PrefillSpan
from sglang_sparse.tools.calibration import anchor as anchor_calibration
from sglang_sparse.tools.calibration import recall as calibration_recall
from sglang_sparse.tools.calibration.anchor import choose
from sglang_sparse.tools.calibration.capture import CalibrationError, Captured, capture, load_model
from sglang_sparse.tools.calibration.prompts import Prompts
from sglang_sparse.tools.calibration.recall import Kept, Tally, candidates, thetas
from sglang_sparse.tools.calibration.report import layer_rows, report, same_theta_rows
from sglang_sparse_kernels.anchor_prefill import anchor_prefill, make_plan
from sglang_sparse_kernels.anchor_prefill.reference import key_gaps

BLOCK, STEP, TOKENS, HEADS = 16, 2, 90, 4
GROUP = BLOCK * STEP
SIZES = {"block_size": BLOCK, "step": STEP, "crossover_tokens": 0}
CPU = torch.device("cpu")
MODEL = str(Path(__file__).parents[2] / "eval" / "models" / "tiny-gqa")
WORDS = " ".join(f"{i} times {i % 7} is {i * (i % 7)}." for i in range(900))


@pytest.fixture(scope="module", params=[None, [5.0, 1.0, 9.0, -2.0]], ids=["plain", "sinks"])
def captured(request: pytest.FixtureRequest) -> Captured:
    generator = torch.Generator().manual_seed(5)
    query, key = (2 * torch.randn(TOKENS, heads, 16, generator=generator) for heads in (HEADS, 2))
    return Captured(0, query, key, key, 0.25, None if request.param is None else torch.tensor(request.param))


def gaps_of(captured: Captured, group: int) -> torch.Tensor:
    """By the reference of the kernels."""
    pages = torch.arange(-(-TOKENS // BLOCK), dtype=torch.int32)[None]
    plan = make_plan([0], [TOKENS], BLOCK, STEP, "cpu")
    return key_gaps(captured.query, captured.key, pages, plan, BLOCK, captured.scaling, 1.0, 0, group).amin(0)


def weights_of(captured: Captured) -> torch.Tensor:
    keys = captured.key.repeat_interleave(HEADS // captured.key.shape[1], 1)
    logits = torch.einsum("qhd,khd->hqk", captured.query, keys) * captured.scaling
    return with_sinks(logits.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf), captured.sinks)


@pytest.mark.parametrize("logits", [1, 1500, 1 << 24])
def test_candidates_are_those_of_the_definition(
    captured: Captured, logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_recall, "LOGITS", logits)
    weights = weights_of(captured)
    for first in range(0, TOKENS, GROUP):
        end = min(first + GROUP, TOKENS)
        found = candidates(captured, first, end, BLOCK)
        torch.testing.assert_close(found.gaps, gaps_of(captured, first // GROUP), atol=1e-4, rtol=0)
        torch.testing.assert_close(found.mass, weights[:, first:end, BLOCK : max(BLOCK, first)].sum(1))
        torch.testing.assert_close(found.sinks, (1 - weights[:, first:end].sum(2)).sum(1), atol=1e-4, rtol=1e-4)


def test_each_theta_keeps_what_the_definition_keeps(captured: Captured) -> None:
    tally, weights = Tally(HEADS), weights_of(captured)
    tally.add(captured, GROUP, BLOCK, STEP)
    kept = tally.kept()
    for theta in (0.0, 3.125, 7.5, 64.0):
        place = thetas().tolist().index(theta)
        missed, left_out = torch.zeros(HEADS), torch.zeros(HEADS)
        for first in range(GROUP, TOKENS, GROUP):
            end = min(first + GROUP, TOKENS)
            out = gaps_of(captured, first // GROUP) > theta
            missed += (weights[:, first:end, BLOCK:first].sum(1) * out).sum(1)
            left_out += out.sum(1) * (end - first)
        pairs = sum(range(GROUP + 1, TOKENS + 1))
        torch.testing.assert_close(kept.recall[:, place].float(), 1 - missed / (TOKENS - GROUP), atol=1e-5, rtol=0)
        torch.testing.assert_close(kept.sparsity[:, place].float(), left_out / pairs, atol=1e-6, rtol=0)
    if captured.sinks is None:
        assert kept.sinks is None
    else:
        assert kept.sinks is not None and 0.3 < kept.sinks[2] < 1
        torch.testing.assert_close(kept.sinks.float(), 1 - weights[:, GROUP:].sum(2).mean(1), atol=1e-5, rtol=0)
    assert 0.1 < kept.recall[:, 0].mean() < 0.9 < kept.recall[:, 200].mean() and kept.sparsity[:, -1].sum() == 0
    assert (kept.recall.diff(dim=1) >= 0).all() and (kept.sparsity.diff(dim=1) <= 0).all()


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_key_is_always_kept(captured: Captured, broken: float) -> None:
    key = captured.key.clone()
    key[20] = broken
    tally = Tally(HEADS)
    tally.add(Captured(0, captured.query, key, key, 0.25), GROUP, BLOCK, STEP)
    whole = Tally(HEADS)
    whole.add(captured, GROUP, BLOCK, STEP)
    # All but the one key in the first group.
    assert (tally._pairs[:, 0] >= whole._pairs[:, 0]).all() and tally._pairs.sum() == whole._pairs.sum()


def some_kept(*recalls: list[float]) -> Kept:
    recall = torch.tensor(recalls, dtype=torch.float64)
    return Kept(recall, 1 - recall)


def test_the_smallest_theta_that_serves_the_mean_the_worst_head_and_all_lengths() -> None:
    short = some_kept([0.5, 0.8, 0.92, 1.0], [0.9, 1.0, 1.0, 1.0])
    assert choose([short], 0.9, 0.0) == 1
    assert choose([short], 0.9, 0.85) == 2
    assert choose([short, some_kept([0.2, 0.3, 0.4, 0.95], [0.2, 0.3, 0.4, 0.95])], 0.9, 0.0) == 3
    assert choose([some_kept([0.5, 0.6])], 0.9, 0.0) is None


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt.xz"
    file.write_bytes(lzma.compress(WORDS.encode()))
    return file


def test_prompts_of_texts_do_not_overlap_and_those_of_lines_begin_them(text: Path, tmp_path: Path) -> None:
    source = Prompts([text], MODEL)
    found = source.draw(500, 100, 0)
    assert found == source.draw(500, 100, 0) != source.draw(500, 100, 1) and all(len(one) == 500 for one in found)
    whole = list(source._texts[0].tokens)
    assert sorted(found) == sorted(whole[i : i + 500] for i in range(0, len(whole) - 499, 500))
    assert len(source.draw(500, 3, 0)) == 3
    lines = [{"text": WORDS[100:]}, {"messages": [{"role": "user", "content": WORDS}]}, {"text": "short"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prompts = Prompts([tmp_path / "a.jsonl"], MODEL)
    chat = prompts._tokenizer.apply_chat_template(lines[1]["messages"], tokenize=False)
    starts = {prompts._tokenizer.decode(one)[:20] for one in prompts.draw(500, 100, 0)}
    assert starts == {WORDS[100:120], chat[:20]}
    prompts._tokenizer.chat_template = None
    with refused("--data/--prompts", json.dumps(lines[1]), CalibrationError):
        prompts._prompt("line 2", json.dumps(lines[1]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pdf", "", "a.pdf: allowed is .txt, .jsonl, or either of them with .xz"),
        ("a.txt.xz", "no xz", "a.txt.xz: cannot be read"),
        ("a.jsonl", '{"text": "a"}\n{', "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", '{"prompt": "a"}', 'line 1: allowed is an object with "text"'),
        ("a.jsonl", '{"messages": "a"}', 'line 1: allowed is an object with "text"'),
        ("a.txt", "short", "a prompt of 500 tokens is needed and the longest of 1 texts has"),
    ],
)
def test_bad_prompts(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CalibrationError) as caught:
        Prompts([tmp_path / name], MODEL).draw(500, 1, 0)
    assert message in str(caught.value)


def test_the_file_is_a_config(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(out: Path, *more: str) -> list[str]:
        given = ["--model-path", MODEL, "--prompts", str(text), "--lengths", "300,700", "--n", "2", "--out", str(out)]
        return ["--method", "anchor", *given, "--sparse-prefill-config", json.dumps(SIZES), *more]

    one, two = tmp_path / "one.json", tmp_path / "two.json"
    for out in (one, two):
        assert calibrate.main(command(out, "--target-recall", "0.9")) == 0
    assert one.read_text() == two.read_text()
    assert f"--sparse-prefill-config {one}" in capsys.readouterr().out
    prefill = build(None, {}, "anchor", read_config(str(one), "--sparse-prefill-config")).prefill
    assert prefill is not None
    (method,) = prefill.methods
    assert isinstance(method, Anchor) and method.group_tokens == method.dense_below == GROUP
    calibration = method.config.calibration
    assert calibration is not None and calibration["target_recall"] == 0.9 and calibration["head_floor"] == 0.7
    rows = calibration["layers"]
    assert [(row["layer"], row["length"]) for row in rows] == [(i, n) for i in range(4) for n in (300, 700)]
    assert all(row["recall"] >= 0.9 and row["worst_head_recall"] >= 0.7 and row["sparsity"] > 0 for row in rows)
    assert method.config.theta == [row["theta"] for row in rows[::2]] == [row["theta"] for row in rows[1::2]]
    # Anew, with the other fields of the file.
    assert calibrate.main([*command(two)[:-1], str(one), "--target-recall", "1"]) == 0
    again = json.loads(two.read_text())
    assert again["block_size"] == BLOCK and again["calibration"]["head_floor"] == 1
    assert all(row["recall"] == 1 for row in again["calibration"]["layers"])


@pytest.mark.parametrize("served", [[0, 2, 3], []])
def test_layers_that_no_theta_serves_stay_dense(
    served: list[int], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = iter(range(4))
    monkeypatch.setattr(anchor_calibration, "choose", lambda *_: 8 if next(found) in served else None)
    out = tmp_path / "x.json"
    given = ["--model-path", MODEL, "--prompts", str(text), "--lengths", "300", "--n", "1", "--out", str(out)]
    status = calibrate.main([*given, "--sparse-prefill-config", json.dumps(SIZES)])
    if served:
        config = json.loads(out.read_text())
        assert status == 0 and config["layers"] == served and config["theta"] == [1.0, ALL_KEYS, 1.0, 1.0]
        assert "reaches the target in layers 1: dense there" in capsys.readouterr().out
        assert build(None, {}, "anchor", config).prefill is not None
    else:
        assert status == 1 and "reaches a recall of 0.95 in any layer" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["Gemma3", "GptOss"])
def test_layers_with_windows_are_not_measured(
    family: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt longer than the window: what the layers before pass on is that of the model itself, with its sinks."""
    folder = random_windowed(tmp_path, family)
    model = load_model(str(folder), "cpu", torch.float32)
    tokens, seen = torch.arange(150) % 97, list[Captured]()
    capture(model, tokens.tolist(), 1, seen.append, sinks=True)
    assert [one.layer for one in seen] == [2, 5] and (seen[0].sinks is not None) == (family == "GptOss")
    own: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    shown: list[torch.Tensor] = []
    own.base_model.layers[5].self_attn.v_proj.register_forward_hook(lambda *call: shown.append(call[2]))
    with torch.inference_mode():
        own(tokens[None])
    torch.testing.assert_close(seen[1].value.flatten(1), shown[0][0], atol=1e-4, rtol=1e-4)
    out = tmp_path / "out.json"
    given = ["--model-path", str(folder), "--prompts", str(text), "--lengths", "300", "--n", "1", "--out", str(out)]
    assert calibrate.main([*given, "--sparse-prefill-config", json.dumps(SIZES | {"layers": "1-2"})]) == 1
    assert "layer 1 does not attend to all earlier tokens" in capsys.readouterr().err
    assert calibrate.main([*given, "--sparse-prefill-config", json.dumps(SIZES)]) == 0
    calibration = json.loads(out.read_text())["calibration"]
    assert [row["layer"] for row in calibration["layers"]] == [2, 5]
    assert (calibration["sinks"] or 0) > 0.1 if family == "GptOss" else calibration["sinks"] is None
    printed = capsys.readouterr().out
    assert ("of the mass, which counts as kept" in printed) == (family == "GptOss")
    if family == "GptOss":
        with pytest.raises(CalibrationError, match="layer 2 has attention sinks, which is not measured"):
            capture(model, tokens.tolist(), 1, seen.append)


def test_a_layer_that_no_theta_serves_keeps_all() -> None:
    kept = some_kept([0.5] * len(thetas()))
    rows = layer_rows({100: {3: kept}}, {3: None})
    assert rows == [
        {"layer": 3, "length": 100, "theta": ALL_KEYS, "recall": 1, "worst_head_recall": 1, "sparsity": 0},
    ]
    found = {"sinks": None, "layers": rows, "number_of_prompts": [{"length": 100, "prompts": 1}]}
    found["same_theta_in_all_layers"] = same_theta_rows({100: {3: kept}})
    report({"calibration": found})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--lengths", "20"], "prompt tokens before position 32 attend densely"),
        (["--lengths", "64k"], "the model's context is 40960 tokens"),
        (["--lengths", "30k"], "the longest of 1 texts has"),
        (["--model-path", "/dev/null"], "--model-path /dev/null: "),
        (["--sparse-prefill-config", '{"stepp": 2}'], "did you mean 'step'?"),
        (["--sparse-prefill-config", '{"layers": "7-", "crossover_tokens": 0}'], "the model has layers 0 to 3"),
    ],
)
def test_wrong_command_lines(
    text: Path, tmp_path: Path, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["--model-path", MODEL, "--prompts", str(text), "--out", str(tmp_path / "x.json"), "--lengths", "300"]
    assert calibrate.main([*needed, "--sparse-prefill-config", json.dumps(SIZES), *given]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error and "sglang_sparse.calibrate: " in error and message in error


def test_mla_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model-path", write_config(tmp_path, "mla"), "--out", str(tmp_path / "x.json")]
    assert calibrate.main([*given, "--prompts", "a.txt"]) == 1
    assert "does not fit DeepseekV3ForCausalLM: anchor needs an MHA or GQA model" in capsys.readouterr().err


def anchor(theta: Any) -> Anchor:
    prefill = build(None, {}, "anchor", {**SIZES, "theta": theta}).prefill
    assert prefill is not None and isinstance(prefill.methods[0], Anchor)
    return prefill.methods[0]


def test_each_layer_and_each_row_has_its_theta(captured: Captured) -> None:
    given = [0.0, 4, ALL_KEYS]
    method, stats = anchor(given), torch.zeros(2, dtype=torch.int64)
    spans = [PrefillSpan(0, 0, TOKENS, method), PrefillSpan(1, 0, TOKENS, anchor(2.0)), PrefillSpan(2, 0, 9, None)]
    plan = method.plan(spans, CPU)
    assert plan.theta.tolist() == [[0, 2, 0], [4, 2, 0], [ALL_KEYS, 2, 0]]
    assert anchor(3.0).plan(spans[1:2], CPU).theta.tolist() == [[0, 2]]
    plan = method.plan(spans[:1], CPU)
    pages = torch.arange(-(-TOKENS // BLOCK), dtype=torch.int32)[None]
    pairs = []
    for layer, theta in enumerate(given):
        arguments = (captured.query, captured.key, captured.value, pages)
        out = torch.zeros(TOKENS, HEADS, 16)
        stats.zero_()
        method.attend(plan, layer, PrefillInputs(*arguments, BLOCK, 0.25, 1.0, 1.0, out, stats))
        ranges = [(method.dense_below, TOKENS)]
        op = make_plan([0], [TOKENS], BLOCK, STEP, "cpu", ranges)
        expected = anchor_prefill(*arguments, op, torch.tensor([float(theta)]), BLOCK, 0.25)
        torch.testing.assert_close(out, expected, atol=0, rtol=0)
        pairs.append(int(stats[0]))
    assert pairs[0] < pairs[1] < pairs[2] == int(stats[1])


def test_a_requests_theta_is_that_of_all_layers() -> None:
    settings = build(None, {}, "anchor", {**SIZES, "theta": [12.0, 5.0], "calibration": {"target_recall": 0.9}})
    assert parse_options(settings, {}).prefill is settings.prefill
    options = parse_options(settings, {"theta": 12})
    assert options.prefill is not None and options.namespace
    assert options.prefill.config.model_dump()["theta"] == 12.0
