"""The kernel benchmark: plan, rows, ratios, quality, and peers that are not there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_layers import OWN, SHAPE, exact, machine, missing, refusing

from eval.lab import bench_kernels
from eval.lab.bench_kernels import measure, parse, parse_shape
from eval.lab.kernels import kernel_selection
from eval.lab.kernels.harness import OURS, Implementation, chosen, reason, timing
from eval.lab.kernels.kernel_inputs import OPS, WHOLE, Shape, num_layers
from eval.lab.kernels.kernel_table import TABLE, summarise
from eval.lab.tables import files
from eval.live.counters import EvaluationError
from eval.live.record import read_rows


def test_shapes_of_the_command_line() -> None:
    assert parse_shape("8x64k") == (8, 65536) and parse_shape("1x100") == (1, 100)
    for wrong in ("8", "0x4k", "8x", "x4k", "8x64m", "8x-1", "8 x 64k"):
        with pytest.raises(EvaluationError, match="batch x tokens, such as 8x64k"):
            parse_shape(wrong)


def test_bytes_of_an_8b_layer() -> None:
    shape = Shape(8, 65536)
    assert shape.num_bytes("dense_decode") == 2 * shape.num_bytes("dense_decode", 1) == 8 * 65536 * 8 * 128 * 2 * 2
    assert shape.n_select == 410 and shape.name == "8x64k"
    assert shape.num_bytes(WHOLE) == sum(shape.num_bytes(op) for op in ("page_score", "page_topk", "sparse_decode"))
    layers = num_layers(Shape(1, 32768), 60 * 2**20)
    assert layers * Shape(1, 32768).num_bytes("page_score") >= 3 * 60 * 2**20
    assert num_layers(shape, 0) == 2 and num_layers(Shape(1, 64), 60 * 2**20) == 128


def test_median_and_spread() -> None:
    row = timing([float(value) for value in range(1, 20)], 1000)
    assert row == {"us": 10.0, "spread": 16.0, "us_range": [2.0, 18.0], "bytes": 1000, "gbps": 0.1}


def test_rows_ratios_and_missing_peers(capsys: pytest.CaptureFixture[str]) -> None:
    table = [
        Implementation("dense_decode", "slow", exact),
        Implementation("dense_decode", "fast", exact),
        Implementation("dense_decode", "fp8", exact, kv_dtype=torch.float8_e4m3fn),
        Implementation("dense_decode", "absent", missing),
        Implementation("page_topk", "picky", refusing),
        Implementation("page_topk", "torch", kernel_selection.torch_topk),
        *OWN,
    ]
    rows = measure(SHAPE, table, machine(50, 40, 20, 3, 1, 2, 4, 5, 10), 2)
    by = {(row["op"], row["implementation"]): row for row in rows}
    assert [row["implementation"] for row in rows] == [one.name for one in table]
    assert [by["dense_decode", name]["dense_ratio"] for name in ("slow", "fast", "fp8")] == [0.8, 1.0, 2.0]
    assert by["dense_decode", "fp8"]["bytes"] * 2 == by["dense_decode", "fast"]["bytes"]
    assert by[WHOLE, OURS]["dense_ratio"] == 4.0 and "dense_ratio" not in by["page_topk", OURS]
    assert by["dense_decode", "absent"]["unavailable"] == "ImportError: no module fa9.so"
    assert by["page_topk", "picky"]["unavailable"] == "AssertionError: takes 2048 only"
    assert "us" not in by["page_topk", "picky"]
    # A bar stands between them.
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eval.lab.bench_kernels")]
    assert said == [
        "eval.lab.bench_kernels: 2x118, dense_decode: no absent: ImportError: no module fa9.so",
        "eval.lab.bench_kernels: 2x118, page_topk: no picky: AssertionError: takes 2048 only",
    ]
    summary = {row["op"]: row for row in summarise(rows)}
    assert set(summary) == set(OPS) and summary["dense_decode"]["implementation"] == "fast"
    assert (summary[WHOLE]["dense"], summary[WHOLE]["dense_us"], summary[WHOLE]["dense_ratio"]) == ("fast", 40, 4.0)
    topk = summary["page_topk"]
    assert (topk["implementation"], topk["us"], topk["best_peer"], topk["best_peer_ratio"]) == (
        OURS,
        4.0,
        "torch",
        0.75,
    )
    assert topk["agreement"] == 1.0 and summary[WHOLE]["recall"] == topk["recall"]


def test_without_a_dense_peer_there_is_no_ratio() -> None:
    rows = measure(SHAPE, [Implementation("dense_decode", "absent", missing), *OWN], machine(), 2)
    assert not any("dense_ratio" in row for row in rows)
    assert {row["op"] for row in summarise(rows)} == set(OPS) - {"dense_decode"}


def test_inputs_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench_kernels, "Step", full)
    with pytest.raises(EvaluationError, match="2 layers of 2x118 do not fit into the memory of a test"):
        measure(SHAPE, OWN, machine(), 2)


def test_context_lengths_of_the_command_line() -> None:
    def contexts(*options: str) -> list[int]:
        return [shape.context_length for shape in bench_kernels.shapes(parse(["--out", "k.jsonl", *options]))]

    assert contexts("--shapes", "1x128k,8x64k") == [131072 + 2048, 65536 + 2048]
    assert contexts("--shapes", "1x128k,8x64k", "--context-length", "256k") == [262144] * 2
    fp8 = ("--shapes", "6x128k,4x256k", "--active-ratio", "0.05", "--summary-dtype", "float8_e4m3fn")
    found = bench_kernels.shapes(parse(["--out", "k.jsonl", *fp8]))
    assert [(shape.name, shape.n_select, shape.summary_dtype) for shape in found] == [
        ("6x128k", 410, torch.float8_e4m3fn),
        ("4x256k", 820, torch.float8_e4m3fn),
    ]


def test_inputs_with_a_structure(tmp_path: Path) -> None:
    line = ["--out", str(tmp_path / "k.jsonl"), "--shapes", "1x2k", "--rounds", "2", "--ops", WHOLE]
    kept, distance = {}, {}
    for name, options in (
        ("normal", []),
        ("structured", ["--recipe", "{}"]),
        ("fewer", ["--recipe", '{"stripes": 0.1, "background": 0.3}', "--summary-dtype", "float8_e4m3fn"]),
    ):
        args = parse([*line, *options])
        assert bench_kernels.run(args, machine, OWN) == 0
        header, *rows = read_rows(args.out)
        whole = next(row for row in rows if row["kind"] == "summary" and row["op"] == WHOLE)
        kept[name], distance[name] = whole["recall"], whole["dense_l2"]
        assert whole["relative_l2"] < 1e-2 and header["arguments"]["recipe"] == args.recipe
        assert header["arguments"]["inputs"] == ("normal" if name == "normal" else "structured")
        assert (header.get("recipe") or {}).get("stripes") == {"structured": 0.3, "fewer": 0.1}.get(name)
    assert 0.1 < kept["normal"] < 0.2 and 0.3 < kept["structured"] < kept["fewer"] < 1
    assert (
        distance["fewer"] < 1 < distance["normal"] and distance["fewer"] < distance["structured"] < distance["normal"]
    )


def test_what_is_measured() -> None:
    everyone = [one.name for one in TABLE]
    assert [one.op for one in chosen(OPS, [], TABLE, OPS)] == [
        *["page_summary"] * 2,
        *["page_score"] * 5,
        "page_topk",
        "sparse_decode",
        *[WHOLE] * 4,
    ]
    assert {one.name for one in chosen(["sparse_decode"], ["fa3", "torch"], TABLE, OPS)} == {OURS, "fa3"}
    assert len({(one.op, one.name) for one in TABLE}) == len(everyone)
    for ops, peers, message in (
        (["dense"], [], "--ops: there is no 'dense', there are dense_decode, page_summary"),
        (["page_topk"], ["fa4"], "--peers: there is no 'fa4', there are fa3, "),
        (["dense_decode"], ["torch"], "none of the peers torch does dense_decode"),
    ):
        with pytest.raises(EvaluationError, match=message):
            chosen(ops, peers, TABLE, OPS)


def test_the_file_and_its_table(tmp_path: Path) -> None:
    args = parse(["--out", str(tmp_path / "k.jsonl"), "--shapes", "1x40,1x40,2x24", "--n-min", "1", "--rounds", "2"])
    table = [Implementation("dense_decode", "absent", missing), *OWN]
    assert bench_kernels.run(args, machine, table) == 0
    header, *rows = read_rows(args.out)
    assert header["command"] == "eval.lab.bench_kernels" and header["device"] == "a test" and header["started"]
    assert header["arguments"]["shapes"] == ["1x40", "2x24"] and header["arguments"]["peers"] == ["absent"]
    assert header["versions"]["torch"] == torch.__version__.split("+")[0] and header["ceiling_gbps"] is None
    assert [row["kind"] for row in rows] == ["item"] * 12 + ["summary"] * 10
    assert len({row["id"] for row in rows if row["kind"] == "item"}) == 12
    lines = files.any_table(args.out).splitlines()
    assert lines[0].endswith("| relative L2 | to dense | mass kept | why not |") and "times faster" not in lines[0]
    assert lines[2].endswith("| ImportError: no module fa9.so |")


def test_an_operation_of_our_own_that_fails_is_a_failure(tmp_path: Path) -> None:
    table = [replace(one, prepare=refusing) if one.op == "page_topk" else one for one in OWN]
    args = parse(["--out", str(tmp_path / "k.jsonl"), "--shapes", "1x40", "--rounds", "2"])
    assert bench_kernels.run(args, machine, table) == 1
    rows = [json.loads(line) for line in args.out.read_text().splitlines()]
    assert [row["op"] for row in rows if row["kind"] == "summary"] == [one.op for one in OWN if one.op != "page_topk"]


def test_a_peer_that_ends_the_cuda_context_is_named() -> None:
    broken = replace(machine(), usable=lambda: False)
    with pytest.raises(EvaluationError, match=r"page_topk: no somebody: .*2048 only; nothing can be measured after"):
        measure(SHAPE, [*OWN[:1], Implementation("page_topk", "somebody", refusing)], broken, 2)


def test_reasons_name_no_paths() -> None:
    assert reason(OSError("/usr/lib/x/libfa.so: cannot open\nmore")) == "OSError: libfa.so: cannot open"
    assert reason(ValueError("see https://docs/a/b, 1/2 of a/b")) == "ValueError: see https://docs/a/b, 1/2 of a/b"
    assert reason(AssertionError()) == "AssertionError"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "kernels.jsonl"
    assert bench_kernels.main(["--out", str(out), "--shapes", "1x4k", "--rounds", "3", "--peers", "torch"]) == 0
    summary = {row["op"]: row for row in read_rows(out) if row["kind"] == "summary"}
    assert summary[WHOLE]["relative_l2"] < 1e-2 and summary["page_topk"]["agreement"] == 1.0
    assert all(row["us"] > 0 for row in summary.values())
