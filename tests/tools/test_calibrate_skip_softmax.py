"""Factors for a share of blocks: how they are measured and fitted, and the file."""

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from anchor_runs import with_sinks
from safetensors.torch import load_file, save_file
from window_checkpoints import random_windowed

from sglang_sparse import calibrate
from sglang_sparse.config.settings import build
from sglang_sparse.methods.fingerprint import fingerprint
from sglang_sparse.methods.skip_softmax.calibration_file import Point, SkipCalibration, fit, resolved_fields
from sglang_sparse.tools.calibration import skip_softmax, skipping
from sglang_sparse.tools.calibration.capture import Captured, capture
from sglang_sparse.tools.calibration.skipping import Skipped, skipped_in_decode, skipped_in_prefill
from sglang_sparse_kernels.skip_softmax_decode import skip_softmax_decode
from sglang_sparse_kernels.skip_softmax_prefill import Span, make_plan, skip_softmax_prefill

MODELS = Path(__file__).parents[2] / "eval" / "models"
MODEL = str(MODELS / "tiny-gqa")
TOKENS, HEADS, KV_HEADS, DIM, BLOCK, DENSE_BELOW = 700, 4, 2, 16, 64, 128
BLOCKS = -(-TOKENS // BLOCK)
SCALE, PAGE = 0.25, 16
FACTORS = (0.01, 1.0, 10.0, 100.0, 5000.0)
PAGES = torch.arange(-(-TOKENS // PAGE), dtype=torch.int32)[None]


@pytest.fixture(scope="module", params=[None, [6.0, 2.0, 12.0, 9.0]], ids=["plain", "sinks"])
def captured(request: pytest.FixtureRequest) -> Captured:
    generator = torch.Generator().manual_seed(5)
    query, key = (1.7 * torch.randn(TOKENS, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS))
    # A token that all queries share, and every third block.
    query[..., 0] += 5
    key[0, :, 0] += 8
    key[torch.arange(TOKENS) // BLOCK % 3 == 1] *= 2
    return Captured(0, query, key, key, SCALE, None if request.param is None else torch.tensor(request.param))


def cache(captured: Captured) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys in pages; and values that show which blocks were attended to: of each block a dimension of its own."""
    key = torch.zeros(PAGES.numel() * PAGE, KV_HEADS, DIM)
    key[:TOKENS] = captured.key
    blocks = torch.nn.functional.one_hot(torch.arange(len(key)) // BLOCK, 16).float()
    return key, blocks[:, None].expand(-1, KV_HEADS, -1).contiguous()


def recall(captured: Captured, out: torch.Tensor) -> float:
    """Share of the dense mass on sinks, and on the blocks that have a weight in what an op gave the last queries."""
    keys = captured.key.repeat_interleave(HEADS // KV_HEADS, 1)
    positions = torch.arange(TOKENS)
    logits = torch.einsum("qhd,khd->qhk", captured.query[-len(out) :], keys).double() * SCALE
    later = positions > positions[-len(out) :, None]
    weights = with_sinks(logits.masked_fill(later[:, None], -math.inf).transpose(0, 1), captured.sinks).transpose(0, 1)
    return 1 - float((weights * (out == 0)[..., positions // BLOCK]).sum(-1).mean())


@pytest.mark.parametrize("logits", [1, 1 << 27])
def test_prefill_is_judged_as_the_op_does(captured: Captured, logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipping, "LOGITS", logits)
    found = skipped_in_prefill(captured, DENSE_BELOW, TOKENS, FACTORS)
    query, plan = captured.query[DENSE_BELOW:], make_plan([Span(0, DENSE_BELOW, TOKENS)], 1, "cpu")
    for factor, skipped, mass in zip(FACTORS, found.skipped, found.mass, strict=True):
        stats = torch.zeros(4, dtype=torch.int64)
        out = skip_softmax_prefill(
            query,
            *cache(captured),
            PAGES,
            plan,
            torch.tensor([factor]),
            PAGE,
            SCALE,
            stats=stats,
            sinks=captured.sinks,
        )
        assert stats[2:].tolist() == [skipped, found.visited]
        assert mass == pytest.approx(recall(captured, out), abs=1e-5)
    assert found.skipped[0] == 0 < found.skipped[2] < found.skipped[4] < found.visited
    assert found.queries == (TOKENS - DENSE_BELOW) * HEADS and found.mass == sorted(found.mass, reverse=True)


def test_decode_is_judged_as_the_op_does(captured: Captured) -> None:
    found = skipped_in_decode(captured, 3, FACTORS)
    lengths = torch.arange(TOKENS - 2, TOKENS + 1)
    rows = PAGES.expand(3, -1).contiguous(), ((lengths + PAGE - 1) // PAGE).int(), lengths - 1
    for factor, skipped, mass in zip(FACTORS, found.skipped, found.mass, strict=True):
        stats, factors = torch.zeros(2, dtype=torch.int64), torch.full((3,), factor)
        given = captured.query[-3:], *cache(captured), *rows, factors, PAGE, SCALE
        out = skip_softmax_decode(*given, stats=stats, sinks=captured.sinks)
        assert stats.tolist() == [found.visited, skipped]
        assert mass == pytest.approx(recall(captured, out), abs=1e-5)
    assert found.visited == 3 * KV_HEADS * BLOCKS and found.skipped[0] < found.skipped[2] < found.skipped[4]
    # What was captured may be those alone.
    assert skipped_in_decode(replace(captured, query=captured.query[-3:]), 3, FACTORS) == found


def test_of_a_long_prompt_some_tiles_are_judged(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipping, "MOST_TILES", 2)
    found = skipped_in_prefill(captured, 0, TOKENS, FACTORS)
    # The second and the fifth of six tiles, of 4 and 10 blocks.
    assert (found.visited, found.queries) == (HEADS * (4 + 10), HEADS * 256)
    # Of what does not attend densely at the end.
    found = skipped_in_prefill(captured, 0, TOKENS - 300, FACTORS)
    assert (found.visited, found.queries) == (HEADS * (4 + 7), HEADS * (128 + 16))


def point(factor: float, share: float, length: int = 4096) -> Point:
    return Point(threshold_scale_factor=factor, length=length, sparsity=share, recall=1.0, worst_layer_recall=1.0)


def test_a_formula_is_found_again() -> None:
    shares = [0.02, 0.15, 0.3015, 0.5, 0.7, 0.8525, 0.95]
    points = [point(3 * math.exp(7 * share), share) for share in shares]
    # Neither an end nor a factor at which every threshold is 1 tells anything of the others.
    points += [point(1e9, 0.85), point(1e-9, 0.05), point(1e9, 0.99)]
    formula, found = fit("decode", points)
    assert formula == pytest.approx((3, 7)) and formula.share(3 * math.exp(3.5)) == pytest.approx(0.5)
    assert (found.lowest, found.highest) == (0.15, 0.852) and found.points == points
    assert found.r_squared == pytest.approx(1) and found.error == pytest.approx(0, abs=1e-9)
    off = [point(one.threshold_scale_factor * 1.3, one.sparsity, 8192) for one in points]
    _, both = fit("decode", [*points, *off])
    assert both.error == pytest.approx(math.log(1.3) / 2 / 7, rel=0.05) and 0.99 < both.r_squared < 1


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([point(2.0**i, 0.0) for i in range(10)], "skip 0.0% to 0.0% of the blocks, and 0 of them a share from 10% to"),
        ([point(1, 0.2), point(2, 0.4), point(4, 0.6)], "and 3 of them a share from 10% to 90%; needed are 4"),
        (
            [point(8, 0.2 + i / 10) for i in range(4)],
            "needed are 4 of two factors",
        ),
        ([point(2.0**i, 0.3 + i / 100) for i in range(9)], "30.0% to 38.0% of the blocks, and 9"),
        (
            [point(2.0**i, 0.8 - i / 10) for i in range(6)],
            "fit what was measured: a share is off by up to 100",
        ),
        ([point(2.0**i, 0.2 + 0.6 * (i % 2)) for i in range(8)], "a share is off by up to"),
    ],
)
def test_what_is_no_formula(points: list[Point], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        fit("prefill", points)
    assert str(caught.value).startswith("prefill: ") and said in str(caught.value)


def command(out: Path, *more: str) -> list[str]:
    given = ["--method", "skip_softmax", "--model-path", MODEL, "--lengths", "800,1k", "--n", "1", "--queries", "4"]
    return [*given, "--sparse-config", '{"dense_fallback": "never"}', "--out", str(out), *more]


def test_an_interrupted_run_goes_on_and_the_file_is_read_as_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole.json", tmp_path / "out.json"
    assert calibrate.main(command(whole)) == 0
    printed = capsys.readouterr().out
    used = json.loads(printed.split("--sparse-method skip_softmax --sparse-config '")[1].split("'")[0])
    assert used["calibration_file"] == str(whole) and min(
        resolved_fields(used, dict)["threshold_scale_factor"].values()
    )
    assert "decode: threshold_scale_factor = " in printed and whole.with_suffix(".png").stat().st_size > 1000
    runs = 0

    def once(*arguments: Any, **more: Any) -> None:
        nonlocal runs
        runs += 1
        if runs == 2:
            raise KeyboardInterrupt
        capture(*arguments, **more)

    monkeypatch.setattr(skip_softmax, "capture", once)
    assert calibrate.main(command(out)) == 130 and not out.exists()
    assert calibrate.main(command(out, "--queries", "8")) == 1
    assert "is of an interrupted run with other queries" in capsys.readouterr().err
    assert calibrate.main(command(out)) == 0 and runs == 3
    assert out.read_text() == whole.read_text() and not list(tmp_path.glob("*.partial.jsonl"))
    file = json.loads(out.read_text())
    found = SkipCalibration.model_validate(file["calibration"])
    assert found.fingerprint == fingerprint(MODEL) and found.prompts == {"800": 1, "1024": 1}
    assert (found.queries, found.first_position, found.files) == (4, 0, [])
    # The same table in the place of a checkpoint's own, which says nothing of a range.
    fields = resolved_fields({"target_sparsity": {"prefill": 0.3, "decode": 0.5}}, lambda: file)
    for phase, one in found.phases.items():
        share = {"prefill": 0.3, "decode": 0.5}[phase]
        assert one.lowest < share < one.highest and one.error < 0.1 and one.r_squared > 0.8
        factor = fields["threshold_scale_factor"][phase]
        near = [point for point in one.points if factor / 2 < point.threshold_scale_factor < factor * 2]
        assert len(near) == 4 and all(abs(point.sparsity - share) < 0.2 for point in near)
        assert all(0.9 < point.worst_layer_recall <= point.recall <= 1 for point in near)
    assert fields["calibration"]["producer"]["name"] == "sglang-sparse"


def test_the_users_own_prompts_and_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "user's out.json"
    text.write_text(" ".join(f"{i} times {i % 7} is {i * (i % 7)}." for i in range(300)))
    config = ["--sparse-config", '{"layers": "1-2", "min_seq_len": 0, "target_sparsity": 0.3}']
    given = command(out, "--data", str(text), "--lengths", "800", *config)
    assert calibrate.main([*given, "--sparse-prefill-config", '{"crossover_tokens": 200}']) == 0
    found = SkipCalibration.model_validate(json.loads(out.read_text())["calibration"])
    # What was calibrated is what is printed, as a shell reads it.
    words = shlex.split(capsys.readouterr().out.split("use it: ")[1])
    decode, prefill = json.loads(words[3]), json.loads(words[7])
    settings = build("skip_softmax", decode, words[5], prefill, dict)
    assert words[::2] == ["--sparse-method", "--sparse-config", "--sparse-prefill-method", "--sparse-prefill-config"]
    assert (settings.config.layers, decode["min_seq_len"], prefill["crossover_tokens"]) == ("1-2", 0, 200)
    assert decode["calibration_file"] == prefill["calibration_file"] == str(out)
    assert list(decode["target_sparsity"]) == ["decode"] and settings.prefill is not None
    # Rounded up to whole tiles.
    assert (found.files, found.prompts, found.first_position) == (["text.txt"], {"800": 1}, 256)
    assert found.layers == {"prefill": [0, 1, 2, 3], "decode": [1, 2]}
    assert calibrate.main([*given, "--sparse-prefill-config", '{"layers": "9"}']) == 1
    assert "--sparse-prefill-config: layers '9': the model has layers 0 to 3" in capsys.readouterr().err


def test_a_model_with_sinks_skips_the_share_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of queries that look at what is near: the biases of queries and keys are the same, before RoPE."""
    model, out, seen = random_windowed(tmp_path / "model", "GptOss"), tmp_path / "out.json", list[Captured]()
    weights = load_file(model / "model.safetensors")
    weights |= {name: of.fill_(1.5) for name, of in weights.items() if name.endswith(("q_proj.bias", "k_proj.bias"))}
    weights |= {name: of + 8 for name, of in weights.items() if name.endswith(".sinks")}
    save_file(weights, model / "model.safetensors", {"format": "pt"})

    def noted(*given: Any, **more: Any) -> None:
        *others, visit = given
        capture(*others, lambda captured: (seen.append(captured), visit(captured)), **more)

    monkeypatch.setattr(skip_softmax, "capture", noted)
    assert calibrate.main([*command(out), "--model-path", str(model), "--lengths", "2k", "--queries", "16"]) == 0
    assert "decode: attention sinks hold" in capsys.readouterr().out and [one.layer for one in seen] == [2, 5]
    found = SkipCalibration.model_validate(json.loads(out.read_text())["calibration"])
    assert found.sinks is not None and all(0.05 < share < 0.5 for share in found.sinks.values())
    asked = {"prefill": 0.4, "decode": 0.5}
    fields = resolved_fields({"calibration_file": str(out), "target_sparsity": asked}, dict)
    factors = fields["threshold_scale_factor"]
    counts = {phase: [served(phase, one, factors[phase]) for one in seen] for phase in asked}
    for phase, fitted in found.phases.items():
        skipped, visited = map(sum, zip(*counts[phase], strict=True))
        assert abs(skipped / visited - asked[phase]) < fitted.error + 0.02


def served(phase: str, captured: Captured, factor: float) -> tuple[int, int]:
    """The blocks that the op of a phase skips, and those that it visits, over a whole prompt or its last 16 tokens."""
    tokens, (kv_heads, dim) = len(captured.key), captured.key.shape[1:]
    pages, stats = torch.arange(-(-tokens // PAGE), dtype=torch.int32)[None], torch.zeros(4, dtype=torch.int64)
    cache = torch.zeros(2, pages.numel() * PAGE, kv_heads, dim)
    cache[:, :tokens] = torch.stack([captured.key, captured.value])
    more = {"page_size": PAGE, "sm_scale": captured.scaling, "sinks": captured.sinks}
    if phase == "prefill":
        plan = make_plan([Span(0, 0, tokens)], 1, "cpu")
        skip_softmax_prefill(captured.query, *cache, pages, plan, torch.tensor([factor]), stats=stats, **more)
        return int(stats[2]), int(stats[3])
    lengths = torch.arange(tokens - 15, tokens + 1)
    rows = pages.expand(16, -1).contiguous(), ((lengths + PAGE - 1) // PAGE).int(), lengths - 1
    skip_softmax_decode(captured.query[-16:], *cache, *rows, torch.full((16,), factor), stats=stats[:2], **more)
    return int(stats[1]), int(stats[0])


def test_what_is_not_finite_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Skipped(1, [0] * 28, 1, [math.nan] * 28)
    monkeypatch.setattr(skip_softmax, "skipped_in_decode", lambda *given: broken)
    assert calibrate.main(command(tmp_path / "out.json")) == 1
    assert "the attention of layer 0 is not finite in torch.float32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--lengths", "64k"], "the model's context is 40960 tokens"),
        (
            ["--sparse-config", "{}"],
            "dense up to position 8192 of prefill (crossover_tokens), in its last 0 (dense_tail) and below 4096 tokens",
        ),
        (
            ["--sparse-prefill-config", '{"crossover_tokens": 512, "dense_tail": 600}'],
            "in its last 600 (dense_tail) and below 0 tokens",
        ),
        (
            [
                *("--sparse-config", '{"min_seq_len": 1500, "crossover_tokens": 0}'),
                *("--sparse-prefill-config", '{"crossover_tokens": 0}'),
            ],
            "allowed is 1503 or more, with --queries 4",
        ),
        (["--sparse-config", '{"page": 16}'], "unknown field 'page'"),
        (["--model-path", str(MODELS / "tiny-mla")], "skip_softmax prefills MHA and GQA models; this one uses MLA"),
    ],
)
def test_wrong_command_lines(
    given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate.main(command(tmp_path / "x.json", *given)) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error and "sglang_sparse.calibrate: " in error and message in error
