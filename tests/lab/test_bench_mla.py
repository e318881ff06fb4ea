"""The benchmark of MLA layers: rows, refusals and goals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_layers import machine
from mla_layers import BASE, OWN, SHAPE, TINY, dense, exact, missing, wrong
from triton_interpreter import INTERPRETED

from eval.lab import bench_mla
from eval.lab.bench_mla import measure, parse
from eval.lab.kernels import mla_peers
from eval.lab.kernels.mla import ATTEND, COPY, DENSE, FULL, MASS, ROPE, TOPP, WHOLE
from eval.lab.kernels.mla_inputs import Step
from eval.lab.kernels.mla_table import strongest, table, with_ratios
from eval.lab.structured.generator import near_active
from eval.lab.tables import files
from eval.lab.tables.goals import goals_table
from eval.live.record import read_rows
from sglang_sparse_kernels.common.timing import Run


def test_a_graph_that_is_wrong_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    def stale(step: Step) -> list[Run]:
        called: list[int] = []

        def run(first: Run) -> torch.Tensor | None:
            called.append(1)
            output = first()
            return output if len(called) == 1 or output is None else output.roll(1, 0)

        return [lambda first=first: run(first) for first in exact(step)]

    # One of our own whose graph does nothing at all.
    idle = replace(machine(), capture=lambda runs: lambda: 5.0)
    small = replace(SHAPE, length=500, target_share=None)
    (row,) = measure(small, BASE, dense(stale=stale), machine(), 2)
    assert "its output is wrong" in row["unavailable"] and "us" not in row
    (row,) = measure(small, BASE, [one for one in OWN if one.op == ATTEND], idle, 2)
    assert "its output is wrong" in row["unavailable"] and "us" not in row
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
    assert whole["id"] == "mla/2x1500/h6/l64/r32/p32/b16/t0.9/m0.5/bfloat16/mass+topp+attend/rope"
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
    lines = files.any_table(out).splitlines()
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

    good = goal("8x64k", 320, dense_ratio=3.6)
    assert "| 3.6x | 3.5x | 4.2x |" in good and "| must | active blocks 331, mass kept" in good and "mla.jsonl" in good
    assert "| stretch |" in goal("8x64k", 320, dense_ratio=4.3) and "| missed |" in goal("8x64k", 320, dense_ratio=3.4)
    assert "| must |" in goal("1x128k", 500, dense_ratio=1.01) and "| missed |" in goal("1x128k", 500, dense_ratio=0.99)
    others = (
        goal("8x64k", 320, sparsity=0.95),
        # Within two points, and more than a tenth of the active blocks fewer.
        goal("8x64k", 320, sparsity=0.931),
        goal("1x128k", 500, sparsity=0.946),
        goal("8x64k", 320, {"active": "paper"}, max_active_ratio=0.25),
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
    assert near_active(rows[WHOLE, ROPE]["active_share"], 220 / 2048) and rows[WHOLE, ROPE]["flashmla_ratio"] > 0
