"""Tests of the calibration of MLA layers by their RoPE part: measured, written, resumed, refused for other weights."""

import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file

from sglang_sparse import calibrate
from sglang_sparse.config.files import read_config
from sglang_sparse.config.settings import build
from sglang_sparse.methods.fingerprint import fingerprint
from sglang_sparse.methods.robsa.calibration_file import RopeCalibration
from sglang_sparse.methods.robsa.decode import RobsaConfig
from sglang_sparse.tools.calibration import robsa, similarity
from sglang_sparse.tools.calibration.capture import CalibrationError, Captured, capture, load_model, model_facts
from sglang_sparse.tools.calibration.mix import shares
from sglang_sparse.tools.calibration.robsa_prompts import Prompt
from sglang_sparse.tools.calibration.run import Partial
from sglang_sparse.tools.calibration.similarity import agreement, select

MODELS = Path(__file__).parents[2] / "eval" / "models"
MODEL = str(MODELS / "tiny-mla")
TOKENS, HEADS, NOPE, ROPE, BLOCK, QUERIES = 75, 3, 8, 16, 16, 5


@pytest.fixture(scope="module")
def captured() -> Captured:
    generator = torch.Generator().manual_seed(3)
    query = 2 * torch.randn(QUERIES, HEADS, NOPE + ROPE, generator=generator)
    own, shared = (torch.randn(TOKENS, heads, size, generator=generator) for heads, size in ((HEADS, NOPE), (1, ROPE)))
    key = torch.cat([own, shared.expand(-1, HEADS, -1)], -1)
    return Captured(2, query, key, key, 0.3)


@pytest.mark.parametrize("logits", [1, 1 << 24])
@pytest.mark.parametrize("theta1", [0.5, 0.9, 1.0])
def test_similarity_and_recall_are_those_of_the_definition(
    captured: Captured, theta1: float, logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(similarity, "LOGITS", logits)
    cosines, recalls = [], []
    for i, position in enumerate(captured.positions.tolist()):
        full, rope = (
            [
                (captured.scaling * (captured.key[: position + 1, h, first:] @ captured.query[i, h, first:])).softmax(0)
                for h in range(HEADS)
            ]
            for first in (0, NOPE)
        )
        cosines += [(s @ r / s.norm() / r.norm()).item() for s, r in zip(full, rope, strict=True)]
        mean_full, mean_rope = (torch.stack(several).mean(0).split(BLOCK) for several in (full, rope))
        masses = [part.sum().item() for part in mean_rope]
        kept, reached = {len(masses) - 1}, 0.0
        for block in sorted(range(len(masses)), key=lambda block: -masses[block]):
            if theta1 == 1 or reached < theta1:
                kept.add(block)
                reached += masses[block]
        recalls.append(sum(mean_full[block].sum().item() for block in kept))
    found = agreement(captured, ROPE, theta1, BLOCK)
    assert found.similarity == pytest.approx(sum(cosines) / len(cosines), abs=1e-5) and 0.1 < found.similarity < 0.99
    assert found.recall == pytest.approx(sum(recalls) / len(recalls), abs=1e-5)
    assert (found.recall > 0.9999) == (theta1 == 1)


def test_ties_go_to_the_lower_block_and_the_newest_is_always_kept() -> None:
    scores = torch.full((1, 8), 0.125)
    for theta1, blocks in ((0.25, [0, 3]), (0.3, [0, 1, 3]), (0.75, [0, 1, 2, 3]), (1e-9, [0, 3]), (1.0, [0, 1, 2, 3])):
        kept = select(scores, torch.tensor([7]), theta1, 2)
        assert kept[0, ::2].nonzero().flatten().tolist() == blocks and torch.equal(kept[:, ::2], kept[:, 1::2])


def test_keys_that_heads_do_not_share_are_refused(captured: Captured) -> None:
    with refused("--model-path", None, CalibrationError):
        agreement(captured, ROPE + 1, 0.9, BLOCK)


YARN = {"type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(("version", "q_lora"), [("V2", None), ("V3", 24)])
def test_the_scores_are_those_of_the_latent_cache(version: str, q_lora: int | None, tmp_path: Path) -> None:
    import transformers

    config = getattr(transformers, f"Deepseek{version}Config")(
        **dict(vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4),
        **dict(num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=q_lora, qk_nope_head_dim=8, qk_rope_head_dim=16),
        **dict(v_head_dim=8, first_k_dense_replace=1, max_position_embeddings=256, rope_scaling=YARN),
    )
    torch.manual_seed(0)
    getattr(transformers, f"Deepseek{version}ForCausalLM")(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), "cpu", torch.float32)
    attention, outputs, seen = model.model.layers[0].self_attn, {}, []
    for name in ("kv_a_proj_with_mqa", "q_proj" if q_lora is None else "q_b_proj"):
        module = getattr(attention, name)
        module.register_forward_hook(lambda module, inputs, output, name=name: outputs.update({name: output[0]}))
    capture(model, list(range(60)), 60, seen.append)
    (found,) = seen
    mscale = 0.1 * 0.7 * math.log(4.0) + 1
    assert found.scaling == pytest.approx(24**-0.5 * mscale * mscale)
    compressed = outputs.pop("kv_a_proj_with_mqa")
    (query,) = (output.view(60, 4, 24) for output in outputs.values())
    with torch.inference_mode():
        latent = attention.kv_a_layernorm(compressed[:, :32])
        absorbed = torch.einsum("qhd,hdr->qhr", query[..., :8], attention.kv_b_proj.weight.view(4, 16, 32)[:, :8])
    turns = torch.polar(torch.ones(60, 8), torch.arange(60.0)[:, None] * model.model.rotary_emb.inv_freq)
    asked, keys = (
        torch.view_as_complex(part.reshape(60, -1, 8, 2)) * turns[:, None]
        for part in (query[..., 8:], compressed[:, 32:])
    )
    rope = torch.einsum("qhd,kd->hqk", asked, keys[:, 0].conj()).real
    full = rope + torch.einsum("qhr,kr->hqk", absorbed, latent)
    for expected, first in ((full, 0), (rope, 8)):
        scores = torch.einsum("qhd,khd->hqk", found.query[..., first:], found.key[..., first:])
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)


def command(out: Path, *more: str) -> list[str]:
    return ["--method", "robsa", "--model-path", MODEL, "--lengths", "256", "--n", "5", "--out", str(out), *more]


def facts(path: str) -> Any:
    return SimpleNamespace(**vars(model_facts(path)), model_path=path)


def test_the_file_is_a_config_for_these_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, more = (
        tmp_path / "one.json",
        tmp_path / "two.json",
        ("--theta2", "0.5", "--sparse-config", '{"page_size": 32}'),
    )
    for out in (one, two):
        assert calibrate.main(command(out, *more)) == 0
    assert one.read_text() == two.read_text() and not list(tmp_path.glob("*.partial.jsonl"))
    printed, warned = capsys.readouterr()
    assert warned.count("no prompt has 4096 tokens (min_seq_len), from which rows run sparse; the longest has") == 2
    assert f"--sparse-method robsa --sparse-config {one}" in printed and "insensitive: " in printed
    assert one.with_suffix(".png").stat().st_size > 1000
    fields = read_config(str(one))
    method: Any = build("robsa", fields).method
    found = method.config.calibration
    assert isinstance(found, RopeCalibration) and found.fingerprint == fingerprint(MODEL)
    assert (fields["theta2"], fields["page_size"], "theta1" in fields) == (0.5, 32, False)
    assert [(group.kind, group.prompts) for group in found.prompts] == [
        (kind, number) for kind, number in shares(5).items() if number
    ]
    assert all(0.3 < row.mean < 1 and 0 < row.deviation < 0.3 and 0.8 < (row.recall or 0) <= 1 for row in found.layers)
    assert found.sensitive(0) == (0, 1, 2, 3)
    assert found.sensitive(RobsaConfig().theta2) == (0, 1, 2), "the partition that the model's card has"
    assert found.min_seq_len == 4096 and found.long_prompts == 0 and found.notes[0].startswith("no prompt has 4096")
    assert all(row.long is None and len(row.groups) == len(found.prompts) for row in found.layers)
    assert method.refuse(facts(MODEL)) is None and method.refuse_weights(facts(MODEL)) is None
    changed = tmp_path / "changed"
    shutil.copytree(MODEL, changed)
    tensors = load_file(changed / "model.safetensors")
    tensors["model.layers.2.self_attn.kv_b_proj.weight"][5, 7] *= 2
    save_file(tensors, changed / "model.safetensors")
    assert "the calibration was made on other weights" in method.refuse_weights(facts(str(changed)))
    assert method.refuse(facts(str(changed))) is None, "a config alone does not tell them apart"
    assert "robsa needs an MLA model" in method.refuse(facts(str(MODELS / "tiny-gqa")))


def test_an_interrupted_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole.json", tmp_path / "out.json"
    assert calibrate.main(command(whole)) == 0
    lengths: list[int] = []

    def counted(model: Any, tokens: list[int], *more: Any) -> None:
        if len(lengths) == 2:
            lengths.clear()
            raise KeyboardInterrupt
        lengths.append(len(tokens))
        capture(model, tokens, *more)

    monkeypatch.setattr(robsa, "capture", counted)
    assert calibrate.main(command(out)) == 130 and not out.exists()
    partial = tmp_path / "out.partial.jsonl"
    with partial.open("a") as file:
        file.write('{"similarity": [0.5, ')
    assert calibrate.main(command(out, "--queries", "8", "--seed", "3")) == 1
    error = capsys.readouterr().err
    assert f"{partial}: is of an interrupted run with other prompts, queries, seed; remove it, or" in error
    assert len(partial.read_text().splitlines()) == 4
    assert calibrate.main(command(out)) == 130 and len(partial.read_text().splitlines()) == 5
    assert calibrate.main(command(out)) == 0 and len(lengths) == 1
    assert out.read_text() == whole.read_text() and not partial.exists()


def test_what_is_not_finite_ends_the_run_and_is_not_kept(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = captured.key.clone()
    key[3, :, -1] = math.nan
    overflowed = agreement(Captured(2, captured.query, key, key, 0.3), ROPE, 0.9, BLOCK)
    assert math.isnan(overflowed.similarity) and math.isnan(overflowed.recall)
    calls = 0

    def sometimes(captured: Captured, *more: Any) -> similarity.Agreement:
        nonlocal calls
        calls += 1
        return overflowed if calls == 7 else agreement(captured, *more)

    monkeypatch.setattr(robsa, "agreement", sometimes)
    out = tmp_path / "out.json"
    assert calibrate.main(command(out)) == 1 and not out.exists()
    error = capsys.readouterr().err
    assert "layer 2 has a similarity of nan and a recall of nan in prompt 2 (" in error and "Traceback" not in error
    assert len((tmp_path / "out.partial.jsonl").read_text().splitlines()) == 2

    # Once the file is written its plot is no reason for a traceback.
    def full(*arguments: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(robsa, "plot", full)
    assert calibrate.main(command(out)) == 1 and out.exists()
    error = capsys.readouterr().err
    assert "no space left on device" in error and "Traceback" not in error


def test_early_positions_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(robsa, "capture", lambda model, tokens, queries, visit: asked.append(queries))
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=4)))
    prompts = [Prompt("files", [1] * size, None) for size in (3, 40, 4096)]
    robsa.measure(model, prompts, ROPE, Partial(tmp_path / "x.jsonl", {}), 0.9, BLOCK, 16)
    assert asked == [1, 10, 16]


def test_the_users_own_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text(" ".join(f"{i} times {i % 7} is {i * (i % 7)}." for i in range(120)))
    # A module that is None cannot be imported.
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    sparse = ("--sparse-config", '{"min_seq_len": 300}')
    given = command(out, "--data", str(text), "--lengths", "200,300", "--theta1", "0.95", *sparse)
    assert calibrate.main([*given, "--n", "3"]) == 0
    printed = capsys.readouterr().out
    assert "no plot: matplotlib is not installed" in printed and not out.with_suffix(".png").exists()
    assert "over 3 prompts; long: over the 1 of at least 300 tokens (min_seq_len)" in printed
    fields = json.loads(out.read_text())
    assert fields["theta1"] == fields["calibration"]["theta1"] == 0.95
    assert fields["calibration"]["files"] == ["text.txt"]
    assert fields["calibration"]["prompts"] == [
        {"kind": "files", "prompts": 2, "tokens": 200, "length": 200},
        {"kind": "files", "prompts": 1, "tokens": 300, "length": 300},
    ]
    calibration = fields["calibration"]
    assert (fields["min_seq_len"], calibration["min_seq_len"], calibration["long_prompts"]) == (300, 300, 1)
    assert calibration["notes"] == []
    for row in calibration["layers"]:
        short, long = row["groups"]
        assert row["long"] == long and long["deviation"] == 0
        assert row["mean"] == pytest.approx((2 * short["mean"] + long["mean"]) / 3, abs=2e-6)
    assert calibrate.main([*given, "--n", "40"]) == 1
    assert "20 prompts of 200 tokens are needed and the files have" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--lengths", "130"], "--lengths 130: the default mix needs at least 192 tokens"),
        (["--lengths", "64k"], "the model's context is 40960 tokens"),
        (["--theta1", "1.5"], "theta1: got 1.5"),
        (["--theta2", "2"], "theta2: got 2"),
        (["--sparse-config", '{"blocksize": 16}'], "did you mean 'block_size'?"),
        (["--model-path", str(MODELS / "tiny-gqa")], "does not fit Qwen3ForCausalLM: robsa needs an MLA model"),
        (["--data", "/nowhere.txt"], "/nowhere.txt: cannot be read"),
    ],
)
def test_wrong_command_lines(
    given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate.main(command(tmp_path / "x.json", *given)) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error and "sglang_sparse.calibrate: " in error and message in error
