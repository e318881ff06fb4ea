"""The benchmark of MLA layers: inputs, rows, quality, refusals and goals."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_interpreter import INTERPRETED

from eval import bench_mla
from eval.bench_mla import measure, parse
from eval.figures import report_tables
from eval.figures.goals import goals_table
from eval.figures.mla import ATTEND, COPY, DENSE, FULL, MASS, ROPE, TOPP, WHOLE
from eval.live.counters import EvaluationError
from eval.live.record import read_rows
from eval.parts import mla_peers
from eval.parts.kernel_machine import Machine
from eval.parts.kernel_table import Implementation
from eval.parts.mla_inputs import SM_SCALE, Shape, Step
from eval.parts.mla_quality import active, quality, samples
from eval.parts.mla_recipe import RECIPE, recipe_for, target_share
from eval.parts.mla_table import strongest, table, with_ratios
from eval.structured.generator import read_recipe
from eval.structured.structure import Recipe
from sglang_sparse_kernels.timing import Replay, Run

# The newest page and block are partly filled, and no two sizes are equal.
SHAPE = Shape(2, 1500, heads=6, latent=64, rope=32, page_size=32, block_size=16, target_share=0.2)
BASE = read_recipe({**RECIPE, "band_tokens": 64})
OWN = [one for one in table() if not one.peer]
TINY = ["--heads", "6", "--latent", "64", "--rope", "32", "--rounds", "2", "--recipe", '{"band_tokens": 64}']


@pytest.fixture(scope="module")
def step() -> Step:
    return Step(SHAPE, recipe_for(SHAPE, BASE), "cpu", 2)


def machine(*micros: float) -> Machine:
    """A machine on which the n-th graph that is captured takes so many microseconds; five where nothing is said."""
    times = iter(micros)

    def capture(runs: Sequence[Run]) -> Replay:
        for run in runs:
            run()
        one = next(times, 5.0)
        return lambda: one

    return Machine("a test", "cpu", 0, capture, lambda: True)


def exact(step: Step, scale: float = SM_SCALE) -> list[Run]:
    """Dense attention in plain torch."""

    def run(layer: Any) -> torch.Tensor:
        out = []
        for row, query in enumerate(layer.q.float()):
            keys = layer.cache[step.slots(row)].float()
            out.append((query @ keys.T * scale).softmax(-1) @ keys[:, : step.shape.latent])
        return torch.stack(out).bfloat16()

    return [lambda layer=layer: run(layer) for layer in step.layers]


def wrong(step: Step) -> list[Run]:
    return exact(step, 0.5 * SM_SCALE)


def missing(step: Step) -> list[Run]:
    raise ImportError("no module")


def dense(**prepare: Callable[[Step], list[Run]]) -> list[Implementation[Step]]:
    return [Implementation(DENSE, name.replace("_", "-"), one) for name, one in prepare.items()]


def test_inputs_need_as_many_blocks_as_they_were_made_for(step: Step) -> None:
    found = active(step, ROPE)
    assert abs(found["active_share"] - 0.2) < 0.02 and found["dense_rows"] == 0
    assert found["active_blocks"] <= found["active_blocks_max"] < SHAPE.capacity == 47
    # No two rows of any layer have the same keys.
    rows = [layer.cache[step.slots(row)] for layer in step.layers for row in range(2)]
    assert not any(rows[i].equal(rows[j]) for i in range(4) for j in range(i))
    assert all(sample.similarity > 0.99 for sample in samples(step))


def test_real_dimensions_and_the_concentration_of_the_paper() -> None:
    assert (
        target_share(Shape(8, 65536), "paper") == 320 / 4096 and target_share(Shape(1, 131072), "paper") == 500 / 8192
    )
    assert target_share(Shape(1, 100), "any") is None and target_share(Shape(1, 100), 0.1) == 0.1
    for shape in (Shape(1, 65536, block_size=32), Shape(1, 65536, theta1=0.95), Shape(1, 16384), Shape(1, 65537)):
        with pytest.raises(EvaluationError, match=r"the paper does not say how many are active: it does of 32k, 48k"):
            target_share(shape, "paper")
    shape = Shape(1, 32768, heads=2, target_share=target_share(Shape(1, 32768), "paper"))
    made = Step(shape, recipe_for(shape, read_recipe(dict(RECIPE))), "cpu", 1)
    assert 200 < active(made, ROPE)["active_blocks"] < 240 and samples(made)[0].similarity > 0.99


def test_recipes() -> None:
    assert recipe_for(replace(SHAPE, target_share=None), BASE) is BASE
    with pytest.raises(EvaluationError, match=r"2x1500: no number of stripes makes 0\.020 of the blocks hold 0\.9 of"):
        recipe_for(replace(SHAPE, target_share=0.02), BASE)


def test_least_work_of_a_v3_layer() -> None:
    shape = Shape(8, 65536, target_share=320 / 4096)
    assert shape.num_bytes(DENSE, ROPE, 320, 2) == 8 * 65536 * 576 * 2 == 2 * shape.num_bytes(DENSE, ROPE, 320, 1)
    assert shape.num_bytes(MASS, ROPE, 320, 2) == 8 * (65536 * 64 * 2 + 4096 * 4)
    assert shape.num_bytes(MASS, FULL, 320, 2) > 8 * shape.num_bytes(MASS, COPY, 320, 2)
    parts = [shape.num_bytes(op, ROPE, 320, 2) for op in (MASS, TOPP, ATTEND)]
    assert shape.num_bytes(WHOLE, ROPE, 320, 2) == sum(parts) and parts[2] == 8 * 320 * 16 * 576 * 2
    assert shape.flops(DENSE, ROPE, 320) == 8 * 65536 * 128 * 2 * (576 + 512)
    assert shape.flops(WHOLE, ROPE, 320) == shape.flops(MASS, ROPE, 320) + shape.flops(ATTEND, ROPE, 320)
    # Each layer's selected blocks are the least that any operation streams.
    assert shape.num_layers(60 * 2**20) * parts[2] >= 3 * 60 * 2**20 and shape.num_layers(0) == 2


def test_quality_against_float64(step: Step) -> None:
    over = samples(step)
    found = {(one.op, one.name): quality(step, over, one, one.prepare(step)[0]()) for one in OWN}
    whole = found[WHOLE, ROPE]
    assert whole["relative_l2"] < 5e-3 < whole["dense_l2"] < 0.2 and whole["target_sparsity"] == 0.8
    assert 0.85 < whole["recall"] < 0.97 and whole["recall"] == found[TOPP, ROPE]["recall"]
    assert whole == found[WHOLE, COPY] and 0.9 <= found[WHOLE, FULL]["recall"] < 0.93
    assert found[TOPP, ROPE]["agreement"] == 1 and found[MASS, COPY]["mass_error"] < 1e-5
    assert found[MASS, ROPE] == found[MASS, COPY] != found[MASS, FULL]


def test_what_is_wrong_is_refused(step: Step) -> None:
    over, by = samples(step), {(one.op, one.name): one for one in OWN}
    (good,) = dense(good=exact)
    assert quality(step, over, good, exact(step)[0]())["relative_l2"] < 5e-3
    with pytest.raises(ValueError, match=r"its output is wrong: relative L2 .* from float64 \(allowed: 0\.02\)"):
        quality(step, over, good, wrong(step)[0]())
    output = by[WHOLE, ROPE].prepare(step)[0]()
    assert output is not None
    for spoiled in (output.roll(1, 0), torch.full_like(output, torch.nan)):
        with pytest.raises(ValueError, match="its output is wrong"):
            quality(step, over, by[WHOLE, ROPE], spoiled)
    with pytest.raises(ValueError, match="its masses are off by"):
        quality(step, over, by[MASS, FULL], step.mass(ROPE, step.layers[0]))
    with pytest.raises(ValueError, match="there is no output"):
        quality(step, over, by[TOPP, ROPE], None)
    chosen = step.layers[0].selection(ROPE)
    kept = chosen.indices.clone()
    chosen.indices[0, 0, 0] = step.block_table[0, -2]
    with pytest.raises(ValueError, match=r"it shares 9\d\.\d% of its blocks with the reference"):
        quality(step, over, by[TOPP, ROPE], chosen.indices)
    chosen.indices.copy_(kept)


def test_another_share_of_active_blocks_is_refused(step: Step, capsys: pytest.CaptureFixture[str]) -> None:
    other = Step(replace(SHAPE, target_share=0.3), step.recipe, "cpu", 1)
    one = next(one for one in OWN if one.op == WHOLE)
    with pytest.raises(ValueError, match=r"19\.\d% .* were made for 30\.0%: more than two points off"):
        quality(other, samples(other), one, one.prepare(other)[0]())
    # By full scores this structure needs so many; RoPE scores are nothing like them.
    unlike = Recipe(**{**BASE.model_dump(), "rope_share": 0.3})
    rows = measure(replace(SHAPE, target_share=None), unlike, [one], machine(), 2)
    assert rows[0]["similarity"] < 0.9 and "us" in rows[0] and "target_sparsity" not in rows[0]
    capsys.readouterr()


def test_rows_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    peers = dense(flashmla=exact, fa3=exact, triton=exact, flashinfer=wrong, gone=missing)
    rows = measure(SHAPE, BASE, [*peers, *OWN], machine(60, 50, 20, 1, 2, 3, 4, 5, 10, 9, 40), 2)
    by = {(row["op"], row["implementation"]): row for row in rows}
    whole = by[WHOLE, ROPE]
    assert (whole["us"], whole["dense"], whole["dense_us"], whole["dense_ratio"]) == (10, "fa3", 50, 5)
    assert whole["flashmla_ratio"] == 6 and by[DENSE, "triton"]["dense_ratio"] == 2.5
    assert "dense_ratio" not in by[ATTEND, ROPE] and by[MASS, FULL]["bytes"] > 2 * by[MASS, ROPE]["bytes"]
    assert "output is wrong" in by[DENSE, "flashinfer"]["unavailable"] and "us" not in by[DENSE, "flashinfer"]
    assert by[DENSE, "gone"]["unavailable"] == "ImportError: no module" and whole["tflops"] >= 0
    assert 0 < whole["stripe_ratio"] < 0.1 and whole["layers"] == 2
    assert strongest([by[DENSE, "fa3"], by[DENSE, "triton"], whole]) is None
    assert with_ratios([by[ATTEND, ROPE]]) == [by[ATTEND, ROPE]]
    assert len({row["id"] for row in rows}) == len(rows)
    capsys.readouterr()


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
def test_the_kernels_that_a_gpu_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    plan = [one for one in OWN if one.op == WHOLE and one.name != COPY]
    rows = measure(replace(SHAPE, batch=1, length=200, target_share=None), BASE, plan, machine(), 2)
    assert all("us" in row for row in rows), [row.get("unavailable") for row in rows]
    capsys.readouterr()


def test_a_float8_cache() -> None:
    shape = replace(SHAPE, kv_dtype=mla_peers.FP8)
    own = [one for one in table(mla_peers.FP8) if not one.peer]
    rows = measure(shape, BASE, own, machine(), 2)
    assert all("us" in row and row["kv_dtype"] == "float8_e4m3fn" for row in rows)
    assert [one.name for one in table(mla_peers.FP8) if one.peer] == ["flashmla", "fa3", "flashinfer", "triton"]


def test_the_file_its_table_and_the_goals(tmp_path: Path) -> None:
    out = tmp_path / "mla.jsonl"
    args = parse(["--out", str(out), "--shapes", "2x1500,1x1024", "--page-size", "32", "--active", "0.2", *TINY])
    everybody = [*dense(flashmla=exact, gone=missing), *OWN]
    assert bench_mla.run(args, machine, lambda _: everybody) == 0
    header, *rows = read_rows(out)
    assert header["base_recipe"]["stripes"] == 0.5 and header["arguments"]["recipe"] == {"band_tokens": 64}
    assert header["arguments"]["peers"] == ["flashmla", "gone"] and header["ceiling_gbps"] is None
    assert [row["kind"] for row in rows] == ["item"] * 20 + ["summary"] * 16
    lines = report_tables.any_table(out).splitlines()
    assert (
        lines[0].startswith("| shape | heads | operation | by | µs a layer |")
        and "| ImportError: no module |" in lines[3]
    )
    (last,) = [row for row in rows if row["kind"] == "summary" and row["shape"] == "2x1500" and row["op"] == WHOLE][:1]
    sizes = {"heads": 128, "latent": 512, "rope": 64, "page_size": 64, "active_blocks": 331.0}

    def goal(part: str, blocks: int, asked: dict[str, Any] | None = None, **measured: Any) -> str:
        """K6, where the row had been measured so."""
        total = {"8x64k": 4096, "1x128k": 8192}[part]
        row = {**last, **sizes, "shape": part, "target_sparsity": 1 - blocks / total, "sparsity": 1 - blocks / total}
        arguments = header["arguments"] | {"active": "paper", "recipe": {}} | (asked or {})
        lines = [{**header, "arguments": arguments}, {**row, **measured}]
        out.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (found,) = [line for line in goals_table(tmp_path).splitlines() if line.startswith("| K6 ") and part in line]
        return found

    good = goal("8x64k", 320, dense_ratio=4.3)
    assert "| 4.3x | 4.2x | 5x |" in good and "| must | active blocks 331, mass kept" in good and "mla.jsonl" in good
    assert "| stretch |" in goal("8x64k", 320, dense_ratio=5.0) and "| missed |" in goal("8x64k", 320, dense_ratio=4.1)
    assert "| must |" in goal("1x128k", 500, dense_ratio=1.01) and "| missed |" in goal("1x128k", 500, dense_ratio=0.99)
    others = (
        goal("8x64k", 320, sparsity=0.95),
        goal("8x64k", 320, {"recipe": {"noise": 0.0}}),
        goal("8x64k", 320, {"active": 0.078125}),
        goal("8x64k", 250),
        goal("8x64k", 320, heads=16),
        goal("8x64k", 320, kv_dtype="float8_e4m3fn"),
        goal("8x64k", 320, implementation=COPY),
        goal("8x64k", 320, dense_ratio=None),
    )
    assert all("not measured" in line for line in others)


def test_an_operation_of_our_own_that_is_refused_is_a_failure(tmp_path: Path) -> None:
    args = parse(["--out", str(tmp_path / "k.jsonl"), "--shapes", "1x500", "--active", "any", *TINY])
    broken = [replace(one, prepare=missing) if one.op == TOPP else one for one in OWN]
    assert bench_mla.run(args, machine, lambda _: broken) == 1
    rows = read_rows(args.out)
    assert TOPP not in {row["op"] for row in rows if row["kind"] == "summary"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--shapes 8y64k", "--shapes: a shape is batch x tokens"),
        ("--shapes 8x16k", "--active: of 8x16k with blocks of 16 at theta1 0.9 the paper does not say"),
        ("--peers fa2", "--peers: there is no 'fa2', there are flashmla, fa3, flashinfer, triton, flashmla-fp8"),
        ("--ops dense", "--ops: there is no 'dense', there are dense_mla, block_mass"),
        ("--latent 100", "--latent must be 64, 128, 256 or 512, got 100"),
        ("--rope 16", "--rope must be 32 or 64, got 16"),
        ("--block-size 32 --page-size 16", "--block-size must be 16, 32 or 64, at most a page, got 32"),
        ("--theta1 0", "--theta1 must be more than 0 and at most 1, got 0.0"),
        ("--rounds 1", "--rounds must be 2 or more, got 1"),
        ("--recipe {}", "measured on a CUDA device, and torch finds none"),
        ('--recipe {"sink":0.5}', "--recipe: recipe: shares: Value error, sink, band, stripes and background must add"),
    ],
)
def test_bad_input(
    options: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "mla.jsonl"
    assert bench_mla.main(["--out", str(out), *options.split()]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("eval.bench_mla: ") and message in line and not out.exists()


def test_no_share_of_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    for text, message in (("most", "'most' is none of paper, any and no number"), ("1.5", "between 0 and 1, got 1.5")):
        with pytest.raises(SystemExit):
            parse(["--out", "x", "--active", text])
        assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "mla.jsonl"
    line = ["--out", str(out), "--shapes", "1x32k", "--rounds", "3", "--heads", "16", "--peers", "flashmla"]
    assert bench_mla.main(line) == 0
    rows = {(row["op"], row["implementation"]): row for row in read_rows(out) if row["kind"] == "item"}
    assert all("us" in row for row in rows.values())
    assert abs(rows[WHOLE, ROPE]["active_share"] - 220 / 2048) < 0.02 and rows[WHOLE, ROPE]["flashmla_ratio"] > 0
