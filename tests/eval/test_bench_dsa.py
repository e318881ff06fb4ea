"""The benchmark of DSA's stages: what SGLang's kernels are given, seen by stand-ins; rows, refusals and goals."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dsa_libraries import PROMPT, SHAPE, install
from dsa_passes import no_original
from mla_layers import machine, missing
from triton_interpreter import INTERPRETED

from eval import bench_dsa
from eval.bench_dsa import measure, parse
from eval.figures import goals, report_tables
from eval.figures.dsa import ATTEND, AUTO, DECODE, DECODE_TOPK, NATIVE, OPS, PORTABLE, PREFILL, PREFILL_TOPK
from eval.live.record import read_rows
from eval.parts.dsa_inputs import FP8, Layer, Shape, Step
from eval.parts.dsa_quality import Judge, kept, samples
from eval.parts.dsa_table import TABLE, failed, floor, summarise, with_ratios
from eval.parts.kernel_machine import Machine, gpu
from eval.parts.kernel_table import Implementation
from sglang_sparse import native_indexer
from sglang_sparse_kernels.timing import Run

TINY = "--heads 6 --latent 64 --rope 16 --index-heads 4 --topk 70 --rounds 2 --replays 3 --chunk 90"


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def of(op: str, *names: str) -> list[Implementation[Step]]:
    return [one for one in TABLE if one.op == op and (not names or one.name in names)]


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("op", OPS)
def test_everybody_does_the_same(op: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("eval.parts.dsa_inputs.MOST_SLOTS", 256)
    shape = PROMPT if op in (PREFILL, PREFILL_TOPK) else SHAPE
    rows = measure(shape, op, of(op), machine(), 2, 3)
    assert all("us" in row for row in rows), [row.get("unavailable") for row in rows]
    assert len({row["id"] for row in rows}) == len(rows) and rows[0]["implementation"] == NATIVE
    if op == ATTEND:
        assert all(row["relative_l2"] < 0.01 for row in rows) and rows[0]["bytes"] > rows[2]["bytes"]
    else:
        assert all(row["repeatable"] and row["overlap"] == 1 and row["off_by"] == 0 for row in rows)
        assert all(row["native_overlap"] == 1 and row["native_off_by"] == 0 for row in rows[1:])
    capsys.readouterr()


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("op", [DECODE, PREFILL, ATTEND])
def test_the_kernels_that_a_gpu_runs(
    op: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    shape = replace(PROMPT, chunk=9) if op == PREFILL else replace(SHAPE, length=150)
    (row,) = measure(shape, op, of(op, PORTABLE), machine(), 2)
    assert "us" in row, row.get("unavailable")
    capsys.readouterr()


def test_what_stands_behind_logits_is_what_a_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = SimpleNamespace(use_fused_topk=True)
    served = SimpleNamespace(method=SimpleNamespace(native=lambda _: False), dense=dense)
    monkeypatch.setattr(native_indexer, "served_backend", lambda: served)
    for shape, op in ((SHAPE, DECODE_TOPK), (PROMPT, PREFILL_TOPK)):
        step = Step(shape, op, "cpu", 1)
        rows = step.rows if shape.chunk else None
        batch = SimpleNamespace(real_page_table=step.page_table, token_to_batch_idx=rows, topk_indices_offset=None)
        metadata = SimpleNamespace(attn_metadata=batch, get_seqlens_expanded=lambda step=step: step.lengths)
        logits = step.layers[0].logits
        first = torch.zeros_like(step.lengths) if shape.chunk else None
        expected = native_indexer.choose(no_original, metadata, logits.clone(), shape.topk, first)
        assert torch.equal(step.behind(logits.clone()), expected)
        assert torch.equal(step.portable(step.layers[0]), expected)


def wrong(step: Step) -> list[Run]:
    """Names the earliest tokens, which are not the best."""
    slots = step.slots()[step.rows.long(), : step.shape.topk].int()
    return [lambda layer=layer: slots for layer in step.layers]


def twice(step: Step) -> list[Run]:
    """Names one token twice."""
    return [lambda layer=layer: step.portable(layer).index_fill(1, torch.tensor([1]), 0) for layer in step.layers]


def fickle(step: Step) -> list[Run]:
    """Chooses the best tokens, and at every other time one other token."""
    called: list[int] = []

    def run(layer: Layer) -> torch.Tensor:
        called.append(1)
        slots = step.portable(layer).clone()
        if len(called) % 2 == 0:
            slots[0, 0] = next(slot for slot in step.slots()[0].tolist() if slot not in slots[0].tolist())
        return slots

    return [partial(run, layer) for layer in step.layers]


def again(runs: Any) -> Any:
    """A capture whose replays call again."""

    def replay() -> float:
        runs[0]()
        return 5.0

    return replay


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (ours,) = of(DECODE, PORTABLE)
    plan = [replace(ours, name=one.__name__, prepare=one) for one in (wrong, twice, missing)]
    rows = measure(SHAPE, DECODE, plan, machine(), 2)
    said = [row["unavailable"] for row in rows]
    assert "of the tokens (allowed: 99%)" in said[0] and "names 6" in said[1] and "no module" in said[2]
    assert not any("us" in row for row in rows) and failed(rows)
    monkeypatch.setattr("eval.parts.dsa_quality.LEAST_OVERLAP", 0.9)
    unsteady = replace(machine(), capture=again)
    plan = [replace(ours, prepare=fickle), replace(ours, name="theirs", peer=True, prepare=fickle)]
    mine, theirs = measure(SHAPE, DECODE, plan, unsteady, 2, replays=5)
    assert mine["unavailable"] == "ValueError: 2 of 5 replays chose other tokens than the first"
    assert theirs["repeatable"] is False and theirs["us"] == 5 and theirs["overlap"] == 1
    capsys.readouterr()


def test_how_two_selections_differ() -> None:
    step = Step(SHAPE, DECODE_TOPK, "cpu", 1)
    one = samples(step)[1]
    other = one.best.clone()
    kth, beyond = one.logits[one.best].min(), one.logits[~one.best].max()
    other[one.best & (one.logits == kth)] = False
    other[~one.best & (one.logits == beyond)] = True
    overlap, off_by = one.differ(one.best, other)
    assert overlap == 1 - 1 / 70 and off_by == pytest.approx(float((kth - beyond) / kth))
    one.logits[one.logits == beyond] = kth
    assert one.differ(one.best, other) == (1, 0)
    with pytest.raises(ValueError, match="there is no output"):
        Judge(step, [], 2).quality(TABLE[0], None)


def test_floors_and_ratios() -> None:
    chip = {"ceiling_gbps": 4800, "ceiling_tflops": 790, "ceiling_fp8_tflops": 1979}
    decode, prompt = Shape(32, 131072), Shape(1, 131072, chunk=8192)
    (native,), (portable,) = of(DECODE, NATIVE), of(PREFILL, PORTABLE)
    read = decode.num_bytes(DECODE, torch.bfloat16)
    assert 132 * 32 * 131072 < read < 1.002 * 132 * 32 * 131072
    row = floor(decode, native, {"us": 300.0, "bytes": read}, chip)
    assert row["floor_us"] == pytest.approx(read / 4.8e6, abs=1e-3) and row["over_floor"] == 300 / (read / 4.8e6)
    # Prefill is bound by the products: 8,192 queries of 64 heads, each over all tokens up to its own.
    pairs = sum(range(131072 - 8191, 131073))
    row = floor(prompt, portable, {"us": 1.0, "bytes": 1}, chip)
    assert row["flops"] == pairs * 64 * 128 * 2 and row["floor_us"] == pytest.approx(row["flops"] / 1979e6, rel=1e-3)
    assert floor(prompt, portable, {"us": 1.0, "bytes": 1}, {**chip, "ceiling_gbps": None}) == {"flops": row["flops"]}
    assert floor(prompt, portable, {"unavailable": "x"}, chip) == {}
    assert decode.num_bytes(ATTEND, torch.bfloat16) - decode.num_bytes(ATTEND, FP8) == 32 * 2048 * (1152 - 656)
    rows = [
        {"op": DECODE, "implementation": NATIVE, "peer": True, "us": 30.0, "over_floor": 1.2, "repeatable": False},
        {"op": DECODE, "implementation": "native-v1", "peer": True, "us": 40.0},
        {"op": DECODE, "implementation": AUTO, "peer": False, "us": 25.0},
        {"op": DECODE, "implementation": PORTABLE, "peer": False, "us": 20.0},
        {"op": ATTEND, "implementation": "native-fp8", "peer": True, "us": 9.0, "kv_dtype": "float8_e4m3fn"},
        {"op": ATTEND, "implementation": PORTABLE, "peer": False, "us": 20.0, "kv_dtype": "bfloat16"},
    ]
    found = with_ratios(rows)
    beside = {"native": NATIVE, "native_us": 30, "native_over_floor": 1.2, "native_repeatable": False}
    assert found[3] == {**rows[3], **beside, "native_ratio": 1.5} and found[0] == rows[0] and found[5] == rows[5]
    assert [row["implementation"] for row in summarise(found)] == [PORTABLE, PORTABLE]
    # Without SGLang's logits there is nothing to choose behind.
    gone = [{**row, "unavailable": "x"} for row in rows[:3]]
    gone = [{name: value for name, value in row.items() if name != "us"} for row in gone]
    assert not failed([*gone, rows[3]]) and failed([rows[0], gone[2]]) and failed([{**gone[2], "op": DECODE_TOPK}])


@pytest.mark.usefixtures("libraries")
def test_the_file_its_table_and_the_goals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "dsa.jsonl"
    args = parse(["--out", str(out), "--shapes", "2x300", "--prefill", "1x200", *TINY.split()])
    assert bench_dsa.run(args, machine) == 0
    header, *rows = read_rows(out)
    assert header["arguments"]["shapes"] == ["2x300", "1x200"] and header["ceiling_fp8_tflops"] is None
    assert [row["kind"] for row in rows] == ["item"] * 18 + ["summary"] * 5
    lines = report_tables.any_table(out).splitlines()
    assert lines[0].startswith("| shape | chunk | operation | by | KV | µs a layer |") and len(lines) == 2 + 18
    capsys.readouterr()
    sizes = {"heads": 128, "latent": 512, "rope": 64, "index_heads": 64, "topk": 2048}

    def goal(name: str, op: str, shape: str, chunk: int, **measured: Any) -> str:
        """A goal, where its row had been measured so."""
        (row,) = [row for row in rows if row["kind"] == "summary" and row["op"] == op]
        row = {**row, **sizes, "shape": shape, "chunk": chunk, **measured}
        lines = [header, row]
        out.write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = goals.goals_table(tmp_path).splitlines()
        (line,) = [line for line in found if line.startswith(f"| {name} ") and f": {shape}" in line]
        return line

    far, near = {"native_over_floor": 3.0}, {"native_over_floor": 1.3}
    assert "| 1.31x | 1.3x | 2x |  | must | same" in goal("K7", DECODE, "32x128k", 0, native_ratio=1.31, **far)
    assert "native at 3.00 of its floor" in goal("K7", DECODE, "1x128k", 0, native_ratio=2.1, **far)
    assert "| missed |" in goal("K7", DECODE, "1x128k", 0, native_ratio=1.0, **far)
    assert "| 0.95x | 0.91x |  |  | must | same" in goal("K7", DECODE, "1x128k", 0, native_ratio=0.95, **near)
    assert "| missed |" in goal("K7", DECODE, "1x128k", 0, native_ratio=0.9, **near)
    assert "| 1.2x |" in goal("K8", PREFILL, "1x32k", 8192, native_ratio=1.25, **far)
    assert "| must |" in goal("K12", ATTEND, "32x128k", 0, native_ratio=0.63)
    assert "| missed |" in goal("K13", DECODE_TOPK, "32x128k", 0, native_ratio=0.99)
    assert "not measured" in goal("K8", PREFILL, "1x32k", 4096, native_ratio=1.25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--shapes 8y64k", "--shapes: a shape is batch x tokens"),
        ("--prefill 2x32k", "--prefill must be one row of at least the 8192 tokens of --chunk, got 2x32k"),
        ("--prefill 1x4k", "--prefill must be one row of at least the 8192 tokens of --chunk, got 1x4k"),
        ("--shapes= --prefill=", "--shapes and --prefill are both empty; allowed: one shape at least"),
        ("--peers trtllm", "--peers: there is no 'trtllm', there are native, native-v1, native-flashmla-sparse"),
        ("--ops topk", "--ops: there is no 'topk', there are dsa_decode_selection, dsa_prefill_selection"),
        ("--topk 0", "--topk must be 1 or more, got 0"),
        ("--latent 100", "--latent must be 64, 128, 256 or 512, got 100"),
        ("--rope 20", "--rope must be 16, 32 or 64, got 20"),
        ("--heads 0", "--heads must be 1 or more, got 0"),
        ("--index-heads 65", "--index-heads must be 1 to 64, got 65"),
        ("--rounds 1", "--rounds must be 2 or more, got 1"),
        ("--replays 1", "--replays must be 2 or more, got 1"),
        ("--seed 1", "measured on a CUDA device, and torch finds none"),
    ],
)
def test_bad_input(
    options: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "dsa.jsonl"
    assert bench_dsa.main(["--out", str(out), *options.split()]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("eval.bench_dsa: ") and message in line and not out.exists()


def agreement(shape: Shape, op: str, found: Machine, most: int, replays: int) -> dict[str, Any]:
    """How the selections of all differ from SGLang's, by who made them; whether replays chose the same tokens."""
    step = Step(shape, op, found.device, 2)
    judge = Judge(step, samples(step, most), replays)
    rows = {}
    for one in of(op):
        runs = kept(one).prepare(step)
        rows[one.name] = judge.quality(one, runs[0]())
        judge.capture(found.repeat if shape.chunk else found.capture, runs)
        rows[one.name]["repeatable"] = judge.repeatable[one.name]
    return rows


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("shape", "op"), [(SHAPE, DECODE), (PROMPT, PREFILL)])
def test_all_agree_on_every_query(shape: Shape, op: str) -> None:
    rows = agreement(shape, op, replace(machine(), capture=again, repeat=again), 100, 3)
    for name in (AUTO, PORTABLE):
        assert rows[name] == {"overlap": 1, "off_by": 0, "native_overlap": 1, "native_off_by": 0, "repeatable": True}


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU, for which SGLang's kernels are",
)
@pytest.mark.parametrize(
    ("shape", "op"), [(Shape(8, 8192), DECODE), (Shape(1, 8192, chunk=2048), PREFILL)], ids=["decode", "prefill"]
)
def test_native_and_portable_agree_on_a_gpu(shape: Shape, op: str) -> None:
    rows = agreement(shape, op, gpu(), 64, 100)
    for name in (AUTO, PORTABLE):
        assert rows[name]["repeatable"], (name, rows)
        assert rows[name]["native_overlap"] >= 0.999 and rows[name]["native_off_by"] <= 1e-4, (name, rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "dsa.jsonl"
    line = ["--out", str(out), "--shapes", "2x8k", "--prefill", "1x8k", "--chunk", "1k", "--rounds", "3"]
    assert bench_dsa.main([*line, "--replays", "5"]) == 0
    rows = [row for row in read_rows(out) if row["kind"] == "item" and not row["peer"]]
    assert {row["op"] for row in rows if "us" in row} == set(OPS)
