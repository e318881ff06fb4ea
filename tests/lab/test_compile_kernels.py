"""Compiling kernels for GPUs that are not there, in a process whose kernels are not interpreted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eval.lab import compile_kernels
from eval.lab.toolchain.compiled import compiled
from eval.lab.toolchain.cuda_sources import BUILDS, Build


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "eval.lab.compile_kernels", "--out", str(out), *arguments]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, capture_output=True, text=True, env={**env, "TRITON_CACHE_DIR": str(out.parent)})


def test_every_operation_with_kernels_is_compiled() -> None:
    kernels = Path(compile_kernels.__file__).parents[2] / "kernels" / "sglang_sparse_kernels"
    assert set(compile_kernels.OPERATIONS) == {path.parent.name for path in kernels.glob("*/triton.py")}


def test_every_source_is_compiled(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    kernels = Path(compile_kernels.__file__).parents[2] / "kernels" / "sglang_sparse_kernels"
    builds = [build for made in BUILDS.values() for build in made(compile_kernels.TARGETS["9.0"])]
    assert {build.source for build in builds} == {path.resolve() for path in kernels.glob("*/*.cu")}
    assert set(BUILDS) == {build.source.parent.name for build in builds}
    done = run(out := tmp_path / "compiled.jsonl", "--targets", "7.5,8.0,9.0", "--operations", "index_topk")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()][1:]
    assert {(row["target"], row["operation"]) for row in rows} == {
        (name, "index_topk, CUDA") for name in ("8.0", "9.0")
    }
    (kernel,) = {kernel["kernel"] for row in rows for kernel in row["kernels"]}
    assert kernel == "index_topk" and not any(row["failed"] for row in rows)
    assert all(0 < kernel["registers"] < 256 and kernel["shared_bytes"] for row in rows for kernel in row["kernels"])
    assert any("CLUSTER=8" in row["id"] for row in rows) and all(row["kernels"] for row in rows)


def test_a_source_that_does_not_compile_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    broken = tmp_path / "broken.cu"
    broken.write_text("__global__ void broken() { nothing(); }")
    monkeypatch.setitem(BUILDS, "index_topk", lambda _: iter([Build(broken, {"A": 1})]))
    (row,) = compile_kernels.rows_of("8.9", "index_topk")
    assert row["kernels"] == [] and "nothing" in row["failed"] and row["id"] == "8.9/index_topk/broken.cu(A=1)"


def test_rows_say_what_a_kernel_takes(tmp_path: Path) -> None:
    done = run(out := tmp_path / "compiled.jsonl", "--targets", "8.0,12.0", "--operations", "page_table")
    assert done.returncode == 0, done.stderr
    header, *rows = map(json.loads, out.read_text().splitlines())
    assert header["targets"]["12.0"] == {"capability": [12, 0], "processors": 170, "shared_memory": 101376}
    assert {row["target"] for row in rows} == {"8.0", "12.0"} and not any(row["failed"] for row in rows)
    kernels = [kernel for row in rows for kernel in row["kernels"]]
    assert {kernel["kernel"] for kernel in kernels} == {"_page_table_kernel"}
    assert all(0 < kernel["registers"] < 256 and kernel["stack_bytes"] == 0 for kernel in kernels)


def test_what_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        compile_kernels.main(["--out", str(tmp_path / "x"), "--targets", "9.1"])
    assert "--targets: got 9.1, allowed: 7.5, 8.0, 8.6, 8.9, 9.0, 10.0, 12.0" in capsys.readouterr().err


def row(target: str, shared: int, stack: int = 0, failed: str | None = None, dtypes: tuple[str, ...] = ()) -> str:
    kernel = {"kernel": "k", "registers": 40, "stack_bytes": stack, "shared_bytes": shared}
    fields = {"id": "x", "operation": "op", "target": target, "dtypes": dtypes, "failed": failed}
    return json.dumps({"kind": "item", **fields, "kernels": [] if failed else [kernel]})


def test_the_table_says_where_kernels_do_not_run(tmp_path: Path) -> None:
    limits = {"8.0": 166912, "8.9": 101376}
    targets = {name: {"capability": [8, 0], "processors": 1, "shared_memory": limits[name]} for name in limits}
    header = {"kind": "header", "command": compile_kernels.COMMAND, "targets": targets}
    path = tmp_path / "compiled.jsonl"

    def cells(*rows: str) -> list[str]:
        path.write_text("\n".join([json.dumps(header), *rows]) + "\n")
        return [cell.strip() for cell in compiled(path).splitlines()[-1].split("|")[2:-1]]

    large = row("8.9", 102400)
    assert cells(row("8.0", 102400), row("8.0", 2048), large) == ["100 KiB", "1 of 1 cases need 100"]
    assert cells(row("8.0", 2048), row("8.9", 2048), large) == ["2 KiB", "2 KiB, 1 of 2 cases need 100"]
    fp8 = row("8.0", 0, failed="no such type", dtypes=("bfloat16", "float8_e4m3fn"))
    assert cells(row("8.0", 1024), fp8, row("8.9", 1024, stack=16)) == ["1 KiB, no float8", "1 KiB, spills"]
    assert cells(row("8.0", 0, failed="broken"), row("8.9", 0)) == ["no: broken", "0 KiB"]
