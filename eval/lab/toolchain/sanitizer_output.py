"""Reads what compute-sanitizer prints.

A finding is a line ``========= WHAT`` and indented lines with places: ``at KERNEL+0x120 in FILE:LINE`` (older versions:
``at 0x120 in FILE:LINE:KERNEL``), of a race two of them, and ``Device Frame:`` where functions are inlined. Findings of
which every place is in PyTorch's own C++ kernels, by their namespaces, are counted apart: the inputs are made with
these. So are reads of memory that nobody wrote in `MEANT`. All others count as this project's, those without a place or
beyond the print limit too.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from eval.lab.toolchain.sanitizer_inside import DONE

PREFIX = re.compile(r"^={9}(?: |$)")
SUMMARY = re.compile(r"^={9} ERROR SUMMARY: ([\d,]+) errors?\s*$", re.M)
RACES = re.compile(r"^={9} RACECHECK SUMMARY: [\d,]+ hazards? displayed \(([\d,]+) errors?, ([\d,]+) warnings?\)", re.M)
PLACE = re.compile(r"^(?:at | {4,}at | *Device Frame: ?)(.*)|(?:^|\s)(?:access|Thread \([\d,]+\)) at (.*)")
THEIRS = re.compile(r"\b(at|c10|cub|thrust|at_cuda_detail)::")
# They load the results of all splits of a row before they know how many there are, and drop what unused ones hold, as
# tests/kernels/test_scratch.py shows: to wait for the count first would cost a trip to memory in each layer.
MEANT = re.compile(r"\b_combine_kernel\b")
UNWRITTEN = "Uninitialized __global__ memory read"
REFUSED = re.compile(r"^={9}.*?(Device not supported.*)$", re.M)
# Of a part of the GPU or of the tool alone, after which the program may have run on.
REFUSED_TOOL = re.compile(r"^={9} (?:Error: )?(.*\b(?:tool|device|GPU)\b.*not supported.*)$", re.M | re.I)
# No findings, though they look like some.
FRAME = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY")
# Of a finding, in the file.
KEPT_LINES = 12
# Exit status of compute-sanitizer where it found something.
FOUND_STATUS = 86


@dataclass
class Finding:
    """One error or warning: its lines, without the sanitizer's mark."""

    lines: list[str] = field(default_factory=list)

    @property
    def places(self) -> list[str]:
        """Where in which kernel."""
        found = [PLACE.search(line) for line in self.lines if "Host Frame" not in line]
        return [match[1] or match[2] for match in found if match]

    @property
    def warning(self) -> bool:
        """Whether it is no error."""
        return self.lines[0].lower().startswith("warn")

    @property
    def theirs(self) -> bool:
        """Whether it is in kernels of PyTorch alone."""
        places = self.places
        return bool(places) and all(THEIRS.search(place) for place in places)

    @property
    def meant(self) -> bool:
        """Whether it is a read of memory that nobody wrote, in kernels that drop it."""
        places = self.places
        return self.lines[0].startswith(UNWRITTEN) and bool(places) and all(MEANT.search(place) for place in places)


@dataclass(frozen=True)
class Report:
    """What one run found.

    Attributes:
        errors: of this project.
        warnings: of this project; racecheck alone has such.
        others: errors in PyTorch's kernels.
        meant: reads of memory that nobody wrote in `MEANT`.
        complete: whether the sanitizer came to its summary.
        unsupported: its message where it cannot check on this device.
        done: what the program said at its end; None where it did not get there.
        lines: of the first finding of this project.
    """

    errors: int
    warnings: int
    others: int
    meant: int
    complete: bool
    unsupported: str | None
    done: dict[str, Any] | None
    lines: list[str]


def findings(text: str) -> list[Finding]:
    """What the sanitizer said between its first line and its summary."""
    found: list[Finding] = []
    for line in text.splitlines():
        if not PREFIX.match(line):
            continue
        rest = line[10:].rstrip()
        if rest and not rest.startswith(" "):
            found.append(Finding([rest]))
        elif rest and found:
            found[-1].lines.append(rest)
    return [one for one in found if not one.lines[0].startswith(FRAME)]


def number(text: str) -> int:
    """With commas or without."""
    return int(text.replace(",", ""))


def program_end(text: str) -> dict[str, Any] | None:
    """What the program under the sanitizer said at its end, if it did."""
    said = [line.removeprefix(DONE) for line in text.splitlines() if line.startswith(DONE)]
    return json.loads(said[-1]) if said else None


def read(text: str) -> Report:
    """What compute-sanitizer and the program under it printed."""
    found = findings(text)
    meant = sum(one.meant for one in found)
    mine = [one for one in found if one.places and not one.theirs and not one.meant]
    counts = {kind: sum(one.warning == kind for one in mine) for kind in (False, True)}
    theirs = {kind: sum(one.warning == kind and one.theirs for one in found) for kind in (False, True)}
    totals = [(number(match[1]), 0) for match in SUMMARY.finditer(text)]
    totals += [(number(match[1]), number(match[2])) for match in RACES.finditer(text)]
    if totals:
        errors, warnings = (sum(part) for part in zip(*totals, strict=True))
        # What was not printed names no kernel, and counts.
        errors, warnings = errors - theirs[False] - meant, warnings - theirs[True]
        counts = {False: max(errors, counts[False]), True: max(warnings, counts[True])}
    done = program_end(text)
    refused = REFUSED.search(text) or (REFUSED_TOOL.search(text) if done is None else None)
    counted = mine or [one for one in found if not one.places and (counts[False] or counts[True])]
    first = sorted(counted, key=lambda one: one.warning)
    return Report(
        errors=counts[False],
        warnings=counts[True],
        others=theirs[False],
        meant=meant,
        complete=bool(totals),
        unsupported=refused[1].strip() if refused else None,
        done=done,
        lines=first[0].lines[:KEPT_LINES] if first else [],
    )


def last_line(text: str) -> str:
    """The last line of the program itself; where it has none, of the sanitizer."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" =")]
    own = [line for line in lines if not PREFIX.match(line)]
    return (own or lines or ["it printed nothing"])[-1]


def verdict(report: Report, status: int | None, text: str) -> tuple[str, str | None]:
    """What to say of a run, and why it is not clean.

    Args:
        report: of what was printed.
        status: exit status; None where it ran out of time.
        text: what was printed.

    Returns:
        "clean", "errors", "not supported", "timed out" or "failed"; and a sentence, or None.
    """
    ended = status in (0, FOUND_STATUS if report.others or report.meant or report.warnings else 0)
    on_gpu = report.done is not None and report.done["device"] != "cpu"
    judged = [
        (report.unsupported, "not supported", report.unsupported),
        (report.errors, "errors", report.lines[0] if report.lines else "what was found was not printed"),
        (status is None, "timed out", "it was ended before it had done, and had found nothing until then"),
        (report.done is None, "failed", last_line(text)),
        (not report.complete, "failed", "the sanitizer printed no summary"),
        (not ended, "failed", f"exit status {status}: {last_line(text)}"),
        (not on_gpu, "not supported", "torch finds no CUDA device, so no kernel ran"),
        (True, "clean", None),
    ]
    return next((name, why) for holds, name, why in judged if holds)
