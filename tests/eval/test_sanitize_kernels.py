"""Kernels under compute-sanitizer: what is read from its output, and the command with a sanitizer that is none."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from eval import sanitize_kernels
from eval.compile_kernels import OPERATIONS
from eval.figures.sanitizer import sanitizer
from eval.live.record import read_rows
from eval.parts import sanitizer_inside
from eval.parts.sanitizer_output import FOUND_STATUS, Report, read, verdict

BEGIN = "========= COMPUTE-SANITIZER\n"
DONE = '\nsanitizer_inside: done {"device": "NVIDIA H200", "cases": 5, "kernels": ["_page_score_kernel"]}\n'
CLEAN = f"{BEGIN}{DONE}========= ERROR SUMMARY: 0 errors\n"
RACES_CLEAN = f"{BEGIN}{DONE}========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
OUT_OF_BOUNDS = """\
========= Invalid __global__ read of size 16 bytes
=========     at _page_score_kernel+0xec0 in triton.py:113
=========     by thread (18,0,0) in block (0,0,0)
=========     Access to 0x74505bcccca0 is out of bounds
=========     and is 161 bytes after the nearest allocation at 0x74505bccc800 of size 1,024 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: at::native::copy_kernel_cuda(at::TensorIterator&, bool) [0x9544e] in libtorch_cuda.so
=========
"""
OLD_OUT_OF_BOUNDS = """\
========= Invalid __global__ read of size 4 bytes
=========     at 0xda0 in kernels/sglang_sparse_kernels/page_score/triton.py:113:_page_score_kernel
=========     by thread (96,0,0) in block (44,0,0)
=========     Address 0x763995f9f000 is out of bounds
"""
MEMCHECK = f"""\
{BEGIN}{OUT_OF_BOUNDS}{OLD_OUT_OF_BOUNDS}\
========= Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) due to "unspecified launch failure" on CUDA API call to cuCtx
Traceback (most recent call last):
torch.AcceleratorError: CUDA error: unspecified launch failure
========= Target application returned an error
========= ERROR SUMMARY: 1,300 errors
========= ERROR SUMMARY: 300 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
RACE = f"""\
{BEGIN}========= Error: Race reported between Write access at page_topk+0x1200
=========     and Read access at page_topk+0x1c40 [496 hazards]
=========
========= Warning: Race reported between Write access at page_topk+0x90
=========     and Write access at page_topk+0x90 [32 hazards]
=========
{DONE}========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
THEIRS = """\
========= Uninitialized __global__ memory read of size 2 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>>(int)+0x70
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f2b3ba00000
=========
"""
OURS = """\
========= Uninitialized __global__ memory read of size 4 bytes
=========     at reduce+0x2d0 in standard.py:191
=========     by thread (3,0,0) in block (1,0,0)
=========     Address 0x7f2b3ba00200
=========         Device Frame: _merge_kernel+0x2d0 in triton.py:250
=========
"""
INITCHECK = f"{BEGIN}{THEIRS}{OURS}{THEIRS}{DONE}========= ERROR SUMMARY: 3 errors\n"
MEANT = """\
========= Uninitialized __global__ memory read of size 4 bytes
=========     at _combine_kernel+0x1f0 in triton.py:293
=========     by thread (1,0,0) in block (8,0,0)
=========     Address 0x7fa6bc800670
=========
"""
THEIRS_ALONE = f"{BEGIN}{THEIRS}{DONE}========= ERROR SUMMARY: 1 error\n"
NO_DEVICE = """\
========= COMPUTE-SANITIZER
========= Error: Device not supported. Please refer to the "Supported Devices" section of the sanitizer documentation
=========
RuntimeError: CUDA error: unknown error
========= Target application returned an error
========= ERROR SUMMARY: 1 error
"""
NO_TOOL = f"{BEGIN}========= Error: the racecheck tool is not supported on this device\n"
UNPLACED = f"{BEGIN}========= Uninitialized access by cudaMemcpy\n{DONE}========= ERROR SUMMARY: 2 errors\n"


def judged(text: str, status: int | None) -> tuple[Report, str, str | None]:
    report = read(text)
    return report, *verdict(report, status, text)


@pytest.mark.parametrize("text", [CLEAN, RACES_CLEAN], ids=["errors", "hazards"])
def test_clean(text: str) -> None:
    report, name, says = judged(text, 0)
    assert (name, says, report.errors, report.warnings, report.others, report.lines) == ("clean", None, 0, 0, 0, [])
    assert report.done == {"device": "NVIDIA H200", "cases": 5, "kernels": ["_page_score_kernel"]}


def test_errors_count_beyond_the_print_limit() -> None:
    report, name, says = judged(MEMCHECK, FOUND_STATUS)
    assert (name, says, report.errors) == ("errors", "Invalid __global__ read of size 16 bytes", 1300)
    assert report.lines[1].strip() == "at _page_score_kernel+0xec0 in triton.py:113" and report.done is None


def test_races_and_warnings() -> None:
    report, name, says = judged(RACE, FOUND_STATUS)
    assert (name, report.errors, report.warnings) == ("errors", 1, 1)
    assert says == "Error: Race reported between Write access at page_topk+0x1200"
    warned = RACE.replace("Error: Race", "Warning: Race").replace("(1 error, 1 warning)", "(0 errors, 2 warnings)")
    report, name, _ = judged(warned, FOUND_STATUS)
    assert (name, report.errors, report.warnings) == ("clean", 0, 2) and report.lines[0].startswith("Warning: Race")


def test_what_pytorch_does_is_counted_apart() -> None:
    report, name, _ = judged(INITCHECK, FOUND_STATUS)
    assert (name, report.errors, report.others) == ("errors", 1, 2)
    assert report.lines[-1].strip() == "Device Frame: _merge_kernel+0x2d0 in triton.py:250"
    report, name, _ = judged(THEIRS_ALONE, FOUND_STATUS)
    assert (name, report.errors, report.others, report.lines) == ("clean", 0, 1, [])


def test_what_a_combination_drops_is_counted_apart() -> None:
    """Of reads alone that nobody wrote, and as far as they were printed."""
    for meant in (MEANT * 2, THEIRS + MEANT):
        report, name, _ = judged(f"{BEGIN}{meant}{DONE}========= ERROR SUMMARY: 2 errors\n", FOUND_STATUS)
        assert (name, report.errors, report.others + report.meant, report.lines) == ("clean", 0, 2, [])
        assert report.meant == meant.count("_combine_kernel")
    for text in (MEANT.replace("Uninitialized __global__ memory read", "Invalid __global__ read"), OURS):
        report, name, _ = judged(f"{BEGIN}{MEANT}{text}{DONE}========= ERROR SUMMARY: 2 errors\n", FOUND_STATUS)
        assert (name, report.errors, report.meant) == ("errors", 1, 1) and report.lines[0] == text.split("\n")[0][10:]
    report, name, _ = judged(f"{BEGIN}{MEANT}{DONE}========= ERROR SUMMARY: 5 errors\n", FOUND_STATUS)
    assert (name, report.errors, report.meant) == ("errors", 4, 1)


def test_what_names_no_kernel_counts() -> None:
    report, name, says = judged(UNPLACED, FOUND_STATUS)
    assert (name, says, report.errors) == ("errors", "Uninitialized access by cudaMemcpy", 2)


@pytest.mark.parametrize(("text", "says"), [(NO_DEVICE, "Device not supported. Please"), (NO_TOOL, "the racecheck")])
def test_not_supported(text: str, says: str) -> None:
    _, name, said = judged(text, 1)
    assert name == "not supported" and said is not None and said.startswith(says)


@pytest.mark.parametrize(
    ("text", "status", "name", "says"),
    [
        (BEGIN, None, "timed out", "it was ended before it had done, and had found nothing until then"),
        (BEGIN + OUT_OF_BOUNDS, None, "errors", "Invalid __global__ read of size 16 bytes"),
        (f"{BEGIN}Traceback:\nValueError: no\n========= ERROR SUMMARY: 0 errors\n", 1, "failed", "ValueError: no"),
        (BEGIN + DONE, 0, "failed", "the sanitizer printed no summary"),
        ("", 127, "failed", "it printed nothing"),
        (CLEAN + "Segmentation fault\n", 139, "failed", "exit status 139: Segmentation fault"),
        (CLEAN, FOUND_STATUS, "failed", f"exit status {FOUND_STATUS}: {DONE.strip()}"),
        (CLEAN.replace("NVIDIA H200", "cpu"), 0, "not supported", "torch finds no CUDA device, so no kernel ran"),
    ],
)
def test_what_is_not_proven_is_not_clean(text: str, status: int | None, name: str, says: str) -> None:
    assert judged(text, status)[1:] == (name, says)


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
    assert [max(case.n_pages) for case in sanitizer_inside.long_rows("page_topk")] == [5000, 5000]


FAKE = """\
#!/bin/bash
case "$1 $2" in --version*) echo "NVIDIA (R) Compute Sanitizer"; echo "Version 2025.3.1.0 (build 1)"; exit;; esac
echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $SGLANG_SPARSE_REFERENCE $*" >> "$LINES"
echo "========= COMPUTE-SANITIZER"
if [ "$2" = synccheck ]; then echo "========= Error: Device not supported. Please refer to the manual"; exit 1; fi
while [ "$1" != -m ]; do python="$1"; shift; done
"$python" "$@" | sed s/cpu/$DEVICE/
if [ "$2 $3" = "eval.parts.sanitizer_inside page_table" -a -n "$BAD" ]; then cat "$BAD"; exit 86; fi
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


def test_every_operation_can_be_called(capsys: pytest.CaptureFixture[str]) -> None:
    """Here on the CPU, by the references."""
    assert os.environ.get("TRITON_INTERPRET") != "1"
    for operation in OPERATIONS:
        sanitizer_inside.call(operation, sanitizer_inside.chosen(operation, 2), "cpu")
    assert sanitizer_inside.main(["page_score", "--cases", "2"]) == 0
    said = json.loads(capsys.readouterr().out.split(sanitizer_inside.DONE)[1])
    assert said["cases"] == 4 and said["device"]
