"""What is read from the output of compute-sanitizer."""

import pytest
from sanitizer_texts import (
    BEGIN,
    CLEAN,
    DONE,
    INITCHECK,
    MEANT,
    MEMCHECK,
    NO_DEVICE,
    NO_TOOL,
    OURS,
    OUT_OF_BOUNDS,
    RACE,
    RACES_CLEAN,
    THEIRS,
    THEIRS_ALONE,
    UNPLACED,
)

from eval.lab.toolchain.sanitizer_output import FOUND_STATUS, Report, read, verdict


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
