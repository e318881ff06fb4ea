"""Kernels under compute-sanitizer: the command, with a sanitizer that is none."""

import importlib
import json
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from sanitizer_texts import MEANT, OUT_OF_BOUNDS

from eval.lab import compile_kernels, sanitize_kernels
from eval.lab.toolchain import sanitizer_inside
from eval.lab.toolchain.sanitizer import sanitizer
from eval.lab.toolchain.sanitizer_inside import OPERATIONS
from eval.live.record import read_rows
from sglang_sparse_kernels.common import launch, nvrtc
from sglang_sparse_kernels.skip_softmax_prefill import launch as skip_softmax_launch
from sglang_sparse_kernels.sparse_decode.plan import combines, plan

CPU = torch.device("cpu")


def test_cases_are_few_and_have_float8() -> None:
    for operation in OPERATIONS:
        cases = sanitizer_inside.chosen(operation, 3)
        small = [case for case in sanitizer_inside.cases_of(operation) if not case.gpu_only]
        assert {small[0], small[-1]} <= set(cases)
        assert {case for case in small if sanitizer_inside.is_float8(case)} <= set(cases)
        assert not any(case.gpu_only for case in cases)
        assert not any(map(sanitizer_inside.is_float8, sanitizer_inside.chosen(operation, 99, float8=False)))
    assert sanitizer_inside.spread(range(10), 4) == [0, 3, 6, 9]
    assert sanitizer_inside.spread(range(10), 1) == [0]
    assert [max(case.n_pages) for case in sanitizer_inside.own_cases("page_topk")] == [5000, 5000]


def test_deep_programs_that_combine_themselves_are_among_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "stand_in", compile_kernels.TARGETS["9.0"])
    (case,) = sanitizer_inside.own_cases("sparse_decode")
    assert case in sanitizer_inside.chosen("sparse_decode", 1, float8=False)
    pages = -(-case.lengths[0] // case.page_size)
    sizes = (1, case.group, case.heads, case.dim, case.dim, pages, case.page_size, case.kv_dtype)
    config, _, splits = plan(*sizes, torch.device("cpu"))
    assert config.block_tokens == 128 and combines(splits, case.group, case.dim, config.num_warps)


FAKE = """\
#!/bin/bash
case "$1 $2" in --version*) echo "NVIDIA (R) Compute Sanitizer"; echo "Version 2025.3.1.0 (build 1)"; exit;; esac
echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $SGLANG_SPARSE_REFERENCE $*" >> "$LINES"
echo "========= COMPUTE-SANITIZER"
if [ "$2" = synccheck ]; then echo "========= Error: Device not supported. Please refer to the manual"; exit 1; fi
while [ "$1" != -m ]; do python="$1"; shift; done
"$python" "$@" | sed s/cpu/$DEVICE/
if [ "$2 $3" = "eval.lab.toolchain.sanitizer_inside page_table" -a -n "$BAD" ]; then cat "$BAD"; exit 86; fi
echo "========= ERROR SUMMARY: 0 errors"
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sanitizer that finds nothing, but what ``$BAD`` says, and says ``$DEVICE`` for the CPU."""
    path = tmp_path / "compute-sanitizer"
    path.write_text(FAKE)
    path.chmod(0o755)
    set_here = {"DEVICE": "H200", "LINES": str(tmp_path / "lines"), "SGLANG_SPARSE_REFERENCE": "1"}
    # On a machine with a GPU the same.
    for name, value in (set_here | {"CUDA_VISIBLE_DEVICES": ""}).items():
        monkeypatch.setenv(name, value)
    return path


def check(out: Path, binary: Path | str, *more: str) -> int:
    command = ["--out", str(out), "--binary", str(binary), "--revision", "r1", "--cases", "1", "--jobs", "2"]
    return sanitize_kernels.main([*command, "--operations", "page_table,index_keys", *more])


def items(out: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in read_rows(out) if row["kind"] == "item"}


def test_from_end_to_end(fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sanitizer.jsonl"
    assert check(out, fake, "--tools", "memcheck,synccheck") == 0
    header, *_, last = read_rows(out)
    assert (header["sanitizer"], header["revision"]) == ("2025.3.1.0", "r1")
    assert header["versions"].keys() == {"torch", "triton"} and header.keys() >= {"device", "driver"}
    verdicts = {"clean": 2, "errors": 0, "not supported": 2, "timed out": 0, "failed": 0}
    assert last == {"kind": "summary", **verdicts}
    found = items(out)
    assert found["memcheck/page_table"]["verdict"] == "clean" and found["memcheck/page_table"]["cases"] == 1
    assert found["synccheck/page_table"]["says"] == "Device not supported. Please refer to the manual"
    shown = capsys.readouterr()
    assert "| page_table | 1 | clean | not supported |" in shown.out
    assert "not supported here: synccheck: Device not supported" in shown.err
    lines = (tmp_path / "lines").read_text().splitlines()
    assert all(line.startswith("1  --tool ") for line in lines), "uncached memory, and no references"
    options = "--error-exitcode 86 --target-processes application-only --show-backtrace device --print-limit 100000"
    assert any(line.startswith(f"1  --tool memcheck {options} --report-api-errors no /") for line in lines)


def test_errors_are_found(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, out = tmp_path / "bad", tmp_path / "sanitizer.jsonl"
    bad.write_text(f"{OUT_OF_BOUNDS}========= ERROR SUMMARY: 1 error\n")
    monkeypatch.setenv("BAD", str(bad))
    assert check(out, fake, "--tools", "memcheck") == 1
    found = items(out)
    assert (found["memcheck/page_table"]["errors"], found["memcheck/index_keys"]["verdict"]) == (1, "clean")
    assert found["memcheck/page_table"]["lines"][0] == "Invalid __global__ read of size 16 bytes"
    assert sanitizer(out).splitlines()[-2:] == ["| page_table | 1 | 1 error |", "| index_keys | 1 | clean |"]
    bad.write_text(f"{MEANT}========= ERROR SUMMARY: 1 error\n")
    assert check(out, fake, "--tools", "initcheck") == 0
    assert (row := items(out)["initcheck/page_table"])["meant"] == 1 and row["errors"] == 0
    assert "| page_table | 1 | clean, 1 meant |" in sanitizer(out)


def test_a_refused_tool_is_not_started_again(
    fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "sanitizer.jsonl"
    assert check(out, fake, "--tools", "synccheck", "--jobs", "1") == 1
    said = "no kernel was checked, as no tool is supported here: synccheck: Device not supported. Please"
    assert said in capsys.readouterr().err
    assert len((tmp_path / "lines").read_text().splitlines()) == 1 and len(items(out)) == 2
    monkeypatch.setenv("DEVICE", "cpu")
    assert check(out, fake, "--tools", "memcheck") == 1
    assert "memcheck: torch finds no CUDA device, so no kernel ran" in capsys.readouterr().err


def test_time_is_limited_for_what_the_sanitizer_starts_too(tmp_path: Path) -> None:
    fake, pid, out = tmp_path / "slow", tmp_path / "pid", tmp_path / "sanitizer.jsonl"
    fake.write_text(f"#!/bin/bash\nif [ $1 = --version ]; then exit; fi\nsleep 60 &\necho $! > {pid}\nwait\n")
    fake.chmod(0o755)
    began = time.monotonic()
    assert check(out, fake, "--tools", "memcheck", "--limit", "1", "--operations", "page_table") == 1
    assert time.monotonic() - began < 30
    (row,) = items(out).values()
    assert row["verdict"] == "timed out" and row["seconds"] >= 1
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_missing_binary_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path / "x", "no-such-sanitizer") == 1
    assert "there is no 'no-such-sanitizer': it comes with the CUDA toolkit" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tools", "valgrind"), "--tools: got valgrind, allowed: memcheck, racecheck, initcheck, synccheck"),
        (("--operations", "page_scores"), "--operations: got page_scores, allowed: anchor_prefill, block_mass"),
        (("--operations", ""), "--operations: none is named"),
        (("--cases", "0"), "--cases must be more than 0, got 0"),
        (("--jobs", "-1"), "--jobs must be more than 0, got -1"),
        (("--limit", "0"), "--limit must be more than 0, got 0"),
    ],
)
def test_arguments_are_refused_by_name(
    arguments: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sanitize_kernels.parse(["--out", "x", *arguments])
    assert message in capsys.readouterr().err


def test_both_kernels_of_an_operation_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in CUDA C++ and in Gluon are put aside for the second call."""
    for operation in (*sanitizer_inside.IN_CUDA, sanitizer_inside.IN_GLUON):
        found: list[tuple[bool, bool]] = []
        monkeypatch.setattr(nvrtc, "available", lambda _: True)
        monkeypatch.setattr(skip_softmax_launch, "hopper_kernel", lambda _: "gluon")

        def note(found: list[tuple[bool, bool]] = found, **_: Any) -> None:
            found.append((nvrtc.available(CPU), skip_softmax_launch.hopper_kernel(CPU) is not None))

        module = importlib.import_module(f"sglang_sparse_kernels.{operation}")
        monkeypatch.setattr(module, OPERATIONS[operation], note)
        monkeypatch.setattr(sanitizer_inside, "score_in_cuda", Mock())
        sanitizer_inside.call(operation, sanitizer_inside.chosen(operation, 1)[:1], "cpu")
        expected = (True, False) if operation == sanitizer_inside.IN_GLUON else (False, True)
        assert found[0] == (True, True) and expected in found


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Mock]:
    """The operations' functions, which remember how they were called."""
    found = {}
    for operation, name in [*OPERATIONS.items(), ("page_summary", "update_page_summaries"), ("index_keys", "store")]:
        module = importlib.import_module(f"sglang_sparse_kernels.{operation}")
        found[name] = Mock(wraps=getattr(module, name))
        monkeypatch.setattr(module, name, found[name])
    return found


def test_every_operation_can_be_called(called: dict[str, Mock], capsys: pytest.CaptureFixture[str]) -> None:
    """Here on the CPU, by the references; with the arguments of the cases, and with those of a server."""
    assert os.environ.get("TRITON_INTERPRET") != "1"
    for operation in OPERATIONS:
        sanitizer_inside.call(operation, sanitizer_inside.chosen(operation, 2), "cpu")
    assert all(function.called for function in called.values())
    for name, more in (
        ("page_score", ["summaries_ready"]),
        ("page_topk", ["tables_ready", "stats"]),
        ("index_topk", ["nothing", "stats"]),
        ("sparse_decode", ["arrivals"]),
    ):
        for extra in more:
            given = [call.kwargs.get(extra) for call in called[name].call_args_list]
            assert [value is None for value in given] == [True, False] * (len(given) // 2), extra
            assert extra in ("stats", "arrivals", "nothing") or all(given[1::2])
    layers = [len(call.args[1]) for call in called["update_page_summaries"].call_args_list]
    assert layers == [1, 3] * len(sanitizer_inside.chosen("page_summary", 2))
    assert sanitizer_inside.main(["page_score", "--cases", "2"]) == 0
    said = json.loads(capsys.readouterr().out.split(sanitizer_inside.DONE)[1])
    assert said["cases"] == 4 and said["device"]
