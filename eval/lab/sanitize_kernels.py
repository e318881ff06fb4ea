"""``python -m eval.lab.sanitize_kernels``: NVIDIA's compute-sanitizer over every kernel, on this machine's GPU.

    python -m eval.lab.sanitize_kernels --out sanitizer.jsonl --tools memcheck,racecheck,initcheck,synccheck

For each tool and each operation one process runs under compute-sanitizer and calls the operation with cases of its
tests (`eval.lab.toolchain.sanitizer_inside`): ``--cases`` of the small ones, spread over the list, and all small ones
with float8. Where a server gives it more than a case has, it is called once more with that: what the splits of sparse
decode combine themselves by, tables that are ready, several layers. Both kernels of an operation with CUDA C++ run. A
row has what was found in this project's kernels and, apart from it, in PyTorch's own, which make the inputs, and what
is meant (`eval.lab.toolchain.sanitizer_output`), the kernels that were launched, and a verdict: "clean", "errors", "not
supported" with the sanitizer's message, "timed out" (``--limit``), "failed". A tool that the device refused once is not
started again.

PyTorch's caching allocator is off in these processes: with it an access beyond a tensor falls into the same large block
of memory, and memory of an earlier tensor counts as written; memcheck and initcheck would see neither. Only the process
itself is watched, not the compilers that Triton starts.

The exit status is 0 where all that was checked is clean; a tool that is not supported is named and does not change
that, unless nothing could be checked at all.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from eval.lab.tables.files import measured
from eval.lab.toolchain.sanitizer_inside import OPERATIONS
from eval.lab.toolchain.sanitizer_output import FOUND_STATUS, read, verdict
from eval.live.client import list_of
from eval.live.counters import EvaluationError
from eval.live.record import Record, versions

COMMAND = "eval.lab.sanitize_kernels"
# What is not printed counts, and an operation has had 12,224 reads that are meant.
PRINT_LIMIT = "100000"
ROOT = Path(__file__).parent.parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
COUNTS = ("errors", "warnings", "others", "meant")
VERDICTS = ("clean", "errors", "not supported", "timed out", "failed")
# They would run something else than the kernels.
LEFT_OUT = ("TRITON_INTERPRET", "SGLANG_SPARSE_REFERENCE")


def child_line(binary: str, tool: str, operation: str, cases: int) -> list[str]:
    """The command line of a tool and an operation."""
    line = [binary, "--tool", tool, "--error-exitcode", str(FOUND_STATUS), "--target-processes", "application-only"]
    line += ["--show-backtrace", "device", "--print-limit", PRINT_LIMIT]
    # PyTorch asks CUDA for what is not there and copes; a launch that fails raises, and is seen by the exit status.
    line += ["--report-api-errors", "no"] if tool == "memcheck" else []
    return [*line, sys.executable, "-m", "eval.lab.toolchain.sanitizer_inside", operation, "--cases", str(cases)]


def run_line(line: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Run a program and what it starts.

    Returns:
        Its exit status, None where it had to be ended after `limit` seconds; and what it printed.
    """
    env = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            line, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # The program itself too, not only the sanitizer that started it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read().decode(errors="replace")


class Checks:
    """Runs tools over operations.

    Args:
        args: the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        # By tool: why the device does not take it.
        self.refused: dict[str, str] = {}

    def row(self, tool: str, operation: str) -> dict[str, Any]:
        """What a tool says of an operation."""
        row: dict[str, Any] = {"id": f"{tool}/{operation}", "tool": tool, "operation": operation}
        empty = {"cases": 0, "kernels": [], **dict.fromkeys(COUNTS, 0), "lines": [], "seconds": 0.0}
        if tool in self.refused:
            return row | empty | {"verdict": "not supported", "says": self.refused[tool]}
        began = time.monotonic()
        status, text = run_line(child_line(self.args.binary, tool, operation, self.args.cases), self.args.limit)
        report = read(text)
        judged, says = verdict(report, status, text)
        if judged == "not supported":
            self.refused[tool] = says or ""
        done = report.done or {"cases": 0, "kernels": []}
        return row | {
            **{name: done[name] for name in ("cases", "kernels")},
            **{name: getattr(report, name) for name in (*COUNTS, "lines")},
            "seconds": round(time.monotonic() - began, 1),
            "verdict": judged,
            "says": says,
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """All of them, as they are ready; one tool after the other, so that later ones find kernels compiled."""
        wanted = [(tool, operation) for tool in self.args.tools for operation in self.args.operations]
        pool = ThreadPoolExecutor(self.args.jobs)
        try:
            for future in as_completed([pool.submit(self.row, *one) for one in wanted]):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def printed(line: Sequence[str]) -> str | None:
    """What a program prints; None where it is not there or fails."""
    try:
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def facts(binary: str) -> dict[str, Any]:
    """The machine and the tools, for the header."""
    driver = printed(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    version = re.search(r"version (\d\S*)", printed([binary, "--version"]) or "", re.I)
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": driver.splitlines()[0] if driver else None,
        "sanitizer": version[1] if version else None,
        "versions": versions(("torch", "triton")),
    }


def run(args: argparse.Namespace) -> int:
    """Check, and write a row for each tool and operation.

    Returns:
        The exit status.

    Raises:
        EvaluationError: there is no such binary, or nothing could be checked.
    """
    if shutil.which(args.binary) is None:
        raise EvaluationError(f"there is no {args.binary!r}: it comes with the CUDA toolkit, --binary says where it is")
    names = ("tools", "operations", "cases", "limit", "jobs")
    arguments = {name: getattr(args, name) for name in names}
    found: list[dict[str, Any]] = []
    with Record(args.out, COMMAND, args.revision, arguments=arguments, **facts(args.binary)) as record:
        for row in Checks(args).rows():
            record.add("item", **row)
            said = f": {row['says']}" if row["says"] else ""
            print(f"{row['id']}: {row['verdict']}, {row['seconds']} s{said}", flush=True)
            found.append(row)
        record.add("summary", **{name: sum(row["verdict"] == name for row in found) for name in VERDICTS})
    refused = {row["tool"]: row["says"] for row in found if row["verdict"] == "not supported"}
    said = "; ".join(f"{tool}: {why}" for tool, why in refused.items())
    if all(row["verdict"] == "not supported" for row in found):
        raise EvaluationError(f"no kernel was checked, as no tool is supported here: {said}")
    if refused:
        print(f"{COMMAND}: not supported here: {said}", file=sys.stderr)
    return int(any(row["verdict"] not in ("clean", "not supported") for row in found))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--tools", type=list_of(str), default=list(TOOLS), help=f"of {', '.join(TOOLS)} (default: all)")
    parser.add_argument("--operations", type=list_of(str), default=list(OPERATIONS), help="default: all")
    parser.add_argument("--cases", type=int, default=4, metavar="N", help="of each operation, float8 on top")
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="for each process")
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="processes at a time")
    parser.add_argument("--binary", default="compute-sanitizer", help="name or path")
    parser.add_argument("--revision", help="of this code, where its git history is not at hand")
    args = parser.parse_args(arguments)
    for flag, known in (("tools", TOOLS), ("operations", OPERATIONS)):
        given = list(dict.fromkeys(getattr(args, flag)))
        if unknown := [name for name in given if name not in known]:
            parser.error(f"--{flag}: got {', '.join(unknown)}, allowed: {', '.join(known)}")
        if not given:
            parser.error(f"--{flag}: none is named, allowed: {', '.join(known)}")
        setattr(args, flag, given)
    for flag in ("cases", "limit", "jobs"):
        if not getattr(args, flag) > 0:
            parser.error(f"--{flag} must be more than 0, got {getattr(args, flag):g}")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 where something is not clean, or nothing could be checked."""
    return measured(COMMAND, lambda: parse(arguments), run)


if __name__ == "__main__":
    sys.exit(main())
