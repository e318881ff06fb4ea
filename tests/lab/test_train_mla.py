"""The tiny MLA model and its training at toy size: mathematics, stages, budget, resume, checkpoint."""

import argparse
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import lively, write_books
from tokenizers import Tokenizer
from torch import Tensor

from eval.lab.tables import cards
from eval.lab.train import accuracy, mla, run, trainer
from eval.lab.train.batches import Batch
from eval.lab.train.checkpoint import WEIGHTS, load, save
from eval.lab.train.latent import MASKED, divergence, latent_rows
from eval.lab.train.layers import causal
from eval.lab.train.mla_model import ROPE, TinyMLA
from eval.lab.train.schedule import Stage, next_stage, passed, progress, rate_at
from eval.lab.train.sparse import Rows
from eval.texts import text

EVAL = Path(__file__).parent.parent.parent / "eval"
MODELS, RESULTS = EVAL / "models", EVAL / "lab" / "results"
TOKENIZER = MODELS / "tiny-gqa"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_books(tmp_path_factory.mktemp("data"), 200)


def command(monkeypatch: pytest.MonkeyPatch, data: Path, *flags: str) -> list[dict[str, Any]]:
    """Runs the training command on rows of 256 tokens; returns its log."""
    fixed = ["--data", str(data), "--tokenizer", str(TOKENIZER), "--out", str(data / "out"), "--revision", "r1"]
    fixed += ["--tokens", "512", "--max-length", "256"]
    monkeypatch.setattr(sys, "argv", ["mla", *fixed, *flags])
    monkeypatch.setattr(mla.MLATrainer, "ahead", 2)
    monkeypatch.setattr(mla.MLATrainer, "groups", 2)
    mla.main()
    return run.read_log(data / "out")


def test_checkpoint_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    from transformers import DeepseekV3ForCausalLM

    save(lively(TinyMLA()), tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 15 * 2**20
    assert sum(w.numel() for w in TinyMLA().parameters()) == 7_214_080
    theirs: Any = DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load(tmp_path, CPU, torch.float32)
    tokens = torch.randint(4, 4096, (2, 96))
    with torch.no_grad():
        mine, logits = ours.logits(ours(tokens)).view(2, 96, -1), theirs(tokens).logits
    assert logits.std() > 0.5
    torch.testing.assert_close(logits, mine, atol=1e-4, rtol=0)
    assert torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)


def qkv(t: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, t, 8, 128), torch.randn(2, t, 8, 128), torch.randn(2, t, 8, 64)


@pytest.mark.parametrize("selector", ["rope", "mass", "random"])
def test_all_blocks_chosen_is_dense_attention(selector: str) -> None:
    q, k, v = qkv()
    out = causal(q, k, v, 128)
    torch.testing.assert_close(out, causal(q, k, v, 64))
    rows = Rows(torch.tensor([[5, 40, 63], [16, 17, 31]]), selector, ratio=1.0, least=1)
    torch.testing.assert_close(latent_rows(out, q, k, v, rows, ROPE), out, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="multiple of the block size 16: got 60"):
        latent_rows(out[:, :60], q[:, :60], k[:, :60], v[:, :60], rows, ROPE)


@pytest.mark.parametrize("selector", ["rope", "mass"])
def test_blocks_are_chosen_by_the_mean_mass_of_the_heads(selector: str) -> None:
    q, k, v = qkv(160)
    position = 150
    seen = torch.arange(position + 1)
    first = slice(64, None) if selector == "rope" else slice(None)
    scores = torch.einsum("hd,thd->ht", q[0, position, :, first], k[0, seen, :, first]) * 128**-0.5
    mass = scores.softmax(-1).mean(0)
    blocks = torch.nn.functional.pad(mass, (0, 160 - len(seen))).view(10, 16).sum(1)
    blocks[position // 16] = 2.0
    kept = torch.zeros(10, dtype=torch.bool).scatter(0, blocks.topk(3).indices, True).repeat_interleave(16)[seen]
    full = torch.einsum("hd,thd->ht", q[0, position], k[0, seen]) * 128**-0.5
    expected = torch.einsum("ht,thd->hd", full.masked_fill(~kept, -torch.inf).softmax(-1), v[0, seen])
    rows = Rows(torch.full((2, 1), position), selector, ratio=0.3, least=2)
    mine = latent_rows(torch.zeros(2, 160, 8, 64), q, k, v, rows, ROPE)
    torch.testing.assert_close(mine[0, position], expected, atol=1e-5, rtol=1e-4)
    assert not mine[:, :position].any()
    with pytest.raises(ValueError, match="got 'quest', allowed are rope, mass, random"):
        latent_rows(mine, q, k, v, Rows(rows.positions, "quest", 0.3), ROPE)


def test_divergence_draws_both_distributions_together() -> None:
    torch.manual_seed(0)
    later = torch.arange(20) > 11
    full, proxy = (torch.randn(2, 8, 3, 20).masked_fill(later, MASKED).requires_grad_() for _ in range(2))
    loss = divergence(full, proxy)
    p, g = (x[..., :12].softmax(-1) for x in (full, proxy))
    both = (p * (p / g).log()).sum(-1) + (g * (g / p).log()).sum(-1)
    torch.testing.assert_close(loss, both.mean())
    torch.testing.assert_close(divergence(proxy, full), loss)
    expected = torch.autograd.grad(both.mean(), (full, proxy))
    loss.backward()
    for scores, gradient in zip((full, proxy), expected, strict=True):
        assert scores.grad is not None and scores.grad[..., :12].abs().sum() > 0 and not scores.grad[..., 12:].any()
        torch.testing.assert_close(scores.grad, gradient)
    with torch.no_grad():
        for scores in (full, proxy):
            assert scores.grad is not None
            scores -= 20 * scores.grad
    assert divergence(full, proxy) < 0.9 * loss and divergence(full, full).abs() < 1e-6


def test_rows_collect_one_divergence_per_layer_and_leave_dense_rows_alone() -> None:
    model = lively(TinyMLA())
    tokens = torch.randint(4, 4096, (2, 64))
    rows = Rows(torch.tensor([[20, 40], [50, 63]]), "dense", 0.1, divergence=[])
    torch.testing.assert_close(model(tokens, rows), model(tokens))
    assert rows.divergence is not None and len(rows.divergence) == 4
    torch.stack(rows.divergence).sum().backward()
    gradient = model.layer_weights(3)["self_attn.q_b_proj"].grad
    assert gradient is not None
    for part in gradient.view(8, 128, 192).split(64, 1):
        assert part.abs().sum() > 0


@pytest.mark.parametrize("selector", ["rope", "dense"])
def test_extra_rows_count_for_the_divergence_alone(selector: str) -> None:
    q, k, v = qkv(160)
    positions, extra = torch.tensor([[150, 70], [159, 90]]), torch.tensor([[3, 31, 100], [0, 64, 155]])
    zeros = torch.zeros(2, 160, 8, 64)
    found = {}
    for name, at, further in (("both", positions, extra), ("own", positions, None), ("extra", extra, None)):
        rows = Rows(at, selector, 0.3, 2, divergence=[], extra=further)
        out = latent_rows(zeros, q, k, v, rows, ROPE)
        assert rows.divergence is not None and len(rows.divergence) == 1
        found[name] = (out, rows.divergence[0])
    torch.testing.assert_close(found["both"][1], (2 * found["own"][1] + 3 * found["extra"][1]) / 5)
    torch.testing.assert_close(found["both"][0], found["own"][0])
    unjudged = latent_rows(zeros, q, k, v, Rows(positions, selector, 0.3, 2, extra=extra), ROPE)
    torch.testing.assert_close(unjudged, found["own"][0])


class Bare(mla.MLATrainer):
    """Without data: what it draws and weighs."""

    def __init__(self) -> None:
        self.device, self.rng = CPU, random.Random(0)
        self.args = argparse.Namespace(proxy_weights=(4.0, 3.0, 0.0, 0.0))


def test_random_rows_count_and_layers_are_weighed_as_asked() -> None:
    torch.manual_seed(0)
    weight = torch.zeros(2, 128)
    weight[:, 40:110] = 1.0
    tokens = torch.randint(4, 4096, (2, 128))
    bare = Bare()
    batch = Batch(tokens, weight.long(), weight, weight)
    rows = bare.rows(batch)
    assert rows.extra is not None and rows.extra.shape == (2, 64) and rows.divergence == []
    assert rows.extra.min() < 40 and rows.extra.max() >= 110 and rows.extra.max() < 128
    assert rows.positions.shape == (2, 64) and rows.positions.min() >= 40 and rows.positions.max() < 110

    model = lively(TinyMLA())
    model(tokens, rows)
    loss = bare.auxiliary(batch, rows)
    assert rows.divergence is not None and len(rows.divergence) == 4
    torch.testing.assert_close(loss, 4.0 * rows.divergence[0] + 3.0 * rows.divergence[1])
    loss.backward()
    gradients = [model.layer_weights(i)["self_attn.q_b_proj"].grad for i in range(4)]
    assert [gradient is not None and bool(gradient.any()) for gradient in gradients] == [True, True, False, False]


def test_gate_wants_every_form_and_all_looks() -> None:
    stage = Stage("s", 256, 1000, 0.5, ("a", "b"), at_least=300, threshold=0.95, looks=2)
    good, poor = {"a": 0.96, "b": 0.97}, {"a": 0.97, "b": 0.9}
    assert passed(stage, 300, [poor, good, good])
    assert not passed(stage, 200, [good, good])
    assert not passed(stage, 300, [good])
    assert not passed(stage, 300, [good, poor])
    assert passed(stage, 300, [{"a": 0.94, "b": 1.0}, good])
    assert not passed(Stage("s", 256, 1000, 0.5), 900, [{}])


def test_stage_is_over_by_steps_or_by_time() -> None:
    stage = Stage("s", 256, 1000, 0.5, rate=(0.3, 0.0))
    assert progress(stage, 50, 100, 1.0, 10.0) == 0.5
    assert progress(stage, 10, 100, 9.0, 10.0) == 0.9
    assert progress(stage, 0, 100, 11.0, 10.0) == progress(stage, 0, 100, 0.0, -1.0) == progress(stage, 0, 0, 0, 1) == 1
    assert rate_at(stage, 0.0) == 0.3 and rate_at(stage, 1.0) == 0.0 and rate_at(stage, 0.5) == 0.15


def test_later_run_goes_on_where_the_time_ran_out() -> None:
    stages = [Stage(name, 256, 10, 0.5) for name in "abc"]
    line = {"a": {"stage": "a", "ended": "gate"}, "b": {"stage": "b", "ended": "time"}}
    assert next_stage(stages, []) == 0
    assert next_stage(stages, [{"seed": 0}, line["a"]]) == 1
    assert next_stage(stages, [line["a"], line["b"]]) == 1
    assert next_stage(stages, [line["a"], line["b"], line["b"] | {"ended": "steps"}]) == 2
    assert next_stage(stages, [line["a"] | {"ended": "time"}, line["b"] | {"ended": "gate"}]) == 0


def test_last_stage_has_time_and_ends_at_rate_zero() -> None:
    left = 1.0
    for stage in mla.STAGES[:-1]:
        left *= 1 - stage.share
    last = mla.STAGES[-1]
    assert left > 0.04 and last.share == 1.0 and last.sparse and last.steps == 3000
    assert [rate_at(stage, 1.0) for stage in mla.STAGES[-2:]] == pytest.approx([0.3, 0.0])
    assert rate_at(last, 0.0) == 1.0
    assert all(stage.threshold >= 0.92 and stage.looks == 2 for stage in mla.STAGES if "records" in stage.gate)


def test_training_goes_through_all_stages_and_resumes(monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    monkeypatch.setattr(accuracy, "BRIEF_TASKS", ("needle",))
    monkeypatch.setattr(run, "PROMPTS", 2)
    monkeypatch.setattr(trainer, "REPORT_FORMS", ("records",))
    log = command(monkeypatch, data, "--steps", "1", "--budget-seconds", "1e6")
    settings, stages = log[0], log[1:]
    assert settings["revision"] == "r1" and settings["parameters"] == 7_214_080 and not settings["resumed"]
    assert [line["stage"] for line in stages] == [stage.name for stage in mla.STAGES]
    assert all(line["steps"] == 1 and line["ended"] == "steps" and line["exact_match"] for line in stages)
    measured = cards.read(data / "out" / run.ACCURACY)
    assert [line["selector"] for line in measured] == ["dense", "rope", "mass", "random"]
    assert "| needle | 0.000 |" in cards.as_served(data / "out" / run.ACCURACY)

    flags = ("--resume", str(data / "out"), "--evaluate-seconds", "0", "--seed", "1")
    log = command(monkeypatch, data, "--steps", "1", "--from-stage", "32k", "--budget-seconds", "0.001", *flags)
    assert [line.get("stage", "run") for line in log[9:]] == ["run", "32k", "sparse"]
    assert [line["ended"] for line in log if "stage" in line][-2:] == ["time", "time"]
    log = command(monkeypatch, data, "--steps", "1", "--budget-seconds", "1e6", *flags)
    assert [line.get("stage", "run") for line in log[11:]] == ["run", "32k", "sparse"]
    assert [line["resumed"] for line in log if "seed" in line] == [False, True, True]
    assert json.loads((data / "out" / "config.json").read_text())["architectures"] == ["DeepseekV3ForCausalLM"]


def test_finished_weights_go_on_at_the_last_stage(monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(trainer, "REPORT_FORMS", ("records",))
    shutil.copy(MODELS / "tiny-mla" / WEIGHTS, tmp_path / run.RESUME)
    shutil.copy(RESULTS / "tiny-mla-training.jsonl", tmp_path / run.LOG)
    flags = ("--resume", str(tmp_path), "--from-stage", "sparse", "--evaluate-seconds", "0", "--budget-seconds", "1e6")
    log = command(monkeypatch, data, "--steps", "3", *flags)
    assert log[-2]["resumed"] and log[-1]["stage"] == "sparse" and log[-1]["steps"] == 3
    names = [stage.name for stage in mla.STAGES]
    assert [line["stage"] for line in log if line.get("stage") in names] == names
    before, after = (load_file(folder / WEIGHTS) for folder in (MODELS / "tiny-mla", data / "out"))
    changes = [float((after[name] - weight).float().abs().max()) for name, weight in before.items()]
    assert before.keys() == after.keys() and 0 < max(changes) < 0.05


def test_unknown_stage_is_refused(monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    with pytest.raises(ValueError, match="--from-stage is no stage: got 2k, allowed are short"):
        command(monkeypatch, data, "--from-stage", "2k")


def test_samples_are_judged_sparsely_too(data: Path, tmp_path: Path) -> None:
    save(lively(TinyMLA()), tmp_path)
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    sampler = accuracy.Sampler(tokenizer, text.read_books(data / "books" / "heldout"), seed=1)
    model = load(tmp_path, CPU, torch.float32)
    lines = [accuracy.measure(model, sampler, accuracy.TASKS[0], 256, 2, rows) for rows in (None, ("rope", 0.1))]
    assert [line["selector"] for line in lines] == ["dense", "rope"]
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ValueError, match="got LlamaForCausalLM, allowed are Qwen3ForCausalLM, DeepseekV3ForCausalLM"):
        load(tmp_path, CPU, torch.float32)


def test_parser_leaves_time_for_the_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["mla", "--data", "d", "--tokenizer", "t", "--out", "o", "--budget-seconds", "500"]
    monkeypatch.setattr(sys, "argv", flags)
    args: argparse.Namespace = run.arguments("", 400.0, 60.0)
    assert args.train_seconds == 440.0 and not hasattr(args, "proxy_weights")


def test_weights_of_rotary_scores_are_one_a_layer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["mla", "--data", "d", "--tokenizer", "t", "--out", "o"]
    monkeypatch.setattr(sys, "argv", flags)
    assert run.arguments("", 400.0, 60.0, proxies=mla.PROXY_WEIGHTS).proxy_weights == (4.0, 4.0, 0.0, 0.0)
    monkeypatch.setattr(sys, "argv", [*flags, "--proxy-weights", "4,4,.3,0"])
    assert run.arguments("", 400.0, 60.0, proxies=mla.PROXY_WEIGHTS).proxy_weights == (4.0, 4.0, 0.3, 0.0)
    for wrong in ("4,4", "4,4,-1,0", "4,4,inf,0", "4,4,nan,0", "all"):
        monkeypatch.setattr(sys, "argv", [*flags, f"--proxy-weights={wrong}"])
        with pytest.raises(SystemExit):
            run.arguments("", 400.0, 60.0, proxies=mla.PROXY_WEIGHTS)
        assert f"got '{wrong}', allowed are 4 numbers" in capsys.readouterr().err
