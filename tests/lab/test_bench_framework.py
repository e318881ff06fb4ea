"""The benchmark of RocketKV's and Skip-Softmax's decode steps: inputs, quality, rows, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_layers import machine

from eval.lab import bench_framework
from eval.lab.bench_framework import COMMAND, OWN, RECIPE, measure, parse, quality
from eval.lab.kernels.framework_inputs import OPS, PREDICT, ROCKET, SKIP, FrameworkStep, Settings
from eval.lab.kernels.harness import Implementation
from eval.lab.kernels.kernel_inputs import Shape
from eval.lab.structured.generator import read_recipe
from eval.lab.tables import files
from eval.live.record import read_rows
from sglang_sparse_kernels.common.timing import Run

# The newest page, and the newest block of four tokens, are partly filled.
SHAPE = Shape(2, 2027, q_heads=4, kv_heads=2, dim=64)
SETTINGS = Settings(prompt_budget=512, topk=40, skipped=0.6)
STRIPES = read_recipe({**RECIPE, "stripe_ratio": 0.004})


@pytest.fixture(scope="module")
def step() -> FrameworkStep:
    return FrameworkStep(SHAPE, "cpu", 1, STRIPES, SETTINGS)


def dense(step: FrameworkStep) -> list[Run]:
    """FA3's stand-in: over all pages."""
    shape, rows = step.shape, range(step.shape.batch)

    def run() -> torch.Tensor:
        layer, out = step.layers[0], []
        for row in rows:
            keys, values = (
                pages[step.batch.page_table[row].long()].flatten(0, 1)[: shape.length].float().transpose(0, 1)
                for pages in (layer.k_pages, layer.v_pages)
            )
            attend = torch.nn.functional.scaled_dot_product_attention
            query = layer.q[row].float()[:, None]
            out.append(attend(query, keys, values, scale=step.sm_scale, enable_gqa=True)[:, 0])
        return torch.stack(out).bfloat16()

    return [run] * len(step.layers)


def test_rocketkv_reads_its_budget_and_finds_the_stripes(step: FrameworkStep) -> None:
    layer, own = step.layers[0], step.rockets[id(step.layers[0])]
    found = quality(step, ROCKET, step.rocket(layer))
    # 160 of 2,027 tokens: of random ones 8 % of the mass.
    assert own.counts.tolist() == [[40, 40], [40, 40]] and int(own.n_kept[0]) == 120
    assert found["relative_l2"] < 1e-2 < found["dense_l2"] and found["recall"] > 0.25
    logical = {int(block): place for place, block in enumerate(own.table[0])}
    chosen = [logical[int(block)] for block in own.indices[0, 0, :40]]
    kept = set(own.kept[0, 0].tolist())
    assert chosen == sorted(chosen) and all(block in kept or block >= int(own.first[0]) for block in chosen)
    assert quality(step, PREDICT, step.predict(layer)) == {"recall": found["recall"]}


def test_skip_softmax_skips_what_is_asked_for(step: FrameworkStep) -> None:
    assert abs(step.skipped - 0.6) < 0.02
    found = quality(step, SKIP, step.skip(step.layers[0]))
    # The rule that the judge writes out once more is the kernel's, or the tokens would differ, and the output too.
    assert found["relative_l2"] < 1e-2 and 0.8 < found["recall"] < 0.9999
    step.require_share()


def test_a_share_that_no_factor_skips_is_refused() -> None:
    every = FrameworkStep(replace(SHAPE, batch=1), "cpu", 1, STRIPES, replace(SETTINGS, skipped=0.99))
    with pytest.raises(ValueError, match=r"no factor skips 0\.99 of the blocks, the nearest 0\.\d+ "):
        every.require_share()


def test_rows_and_ratios() -> None:
    table = [Implementation("dense_decode", "fast", dense), *OWN]
    rows = measure(SHAPE, STRIPES, SETTINGS, table, machine(50, 2, 5, 25), 2)
    by = {row["op"]: row for row in rows}
    assert [by[op]["us"] for op in OPS] == [50, 2, 5, 25]
    assert [by[op].get("dense_ratio") for op in OPS] == [1, None, 10, 2] and by[SKIP]["dense"] == "fast"
    assert by["dense_decode"]["relative_l2"] < 1e-2 and "recall" not in by["dense_decode"]
    assert by[SKIP]["target_sparsity"] == 0.6 and abs(by[SKIP]["sparsity"] - 0.6) < 0.02
    assert by[ROCKET]["topk"] == 40 and "topk" not in by[SKIP] and "target_sparsity" not in by[ROCKET]
    # K is read whole, V but for what is skipped.
    dense_bytes = by["dense_decode"]["bytes"]
    assert by[SKIP]["bytes"] == pytest.approx(dense_bytes * (2 - by[SKIP]["sparsity"]) / 2, rel=0.01)
    assert by[PREDICT]["bytes"] < by[ROCKET]["bytes"] < dense_bytes / 4


def test_the_file_and_its_table(tmp_path: Path) -> None:
    options = ["--shapes", "1x600", "--ops", "rocketkv_predict+attend,skip_softmax_decode", "--skipped", "0.95"]
    args = parse(
        ["--out", str(tmp_path / "f.jsonl"), *options, "--topk", "8", "--prompt-budget", "128", "--rounds", "2"]
    )
    assert bench_framework.run(args, machine, OWN) == 1
    header, *rows = read_rows(args.out)
    assert header["command"] == COMMAND and header["arguments"]["topk"] == 8 and header["base_recipe"]["sink"] == 0.3
    assert [(row["kind"], row["op"]) for row in rows] == [("item", ROCKET), ("item", SKIP), ("summary", ROCKET)]
    assert "no factor skips 0.95" in rows[1]["unavailable"]
    assert "| rocketkv_predict+attend | sglang_sparse |" in files.any_table(args.out)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "framework.jsonl"
    assert bench_framework.main(["--out", str(out), "--shapes", "1x32k", "--rounds", "3", "--peers", ""]) == 0
    summary = {row["op"]: row for row in read_rows(out) if row["kind"] == "summary"}
    assert all(summary[op]["relative_l2"] < 1e-2 and summary[op]["us"] > 0 for op in (ROCKET, SKIP))
