"""The time of a decode step by kernel and by part of the step: medians over the steps of a trace, and tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from eval.lab.servers.profile_trace import Step, Use
from eval.live.counters import EvaluationError
from eval.live.record import command_name, read_finished
from eval.scores.tables import Column, Row, number, percent, table, text

# Part of a step and what the names of its kernels have in them, upper or lower case; the first that matches counts.
# Our own stand first, then what is told by one word, such as a norm of FlashInfer's, then what takes the rest of a
# library. A kernel that does two things belongs to the first one that is named here.
PARTS: tuple[tuple[str, str], ...] = (
    ("page_table", r"page_table"),
    ("page_summary", r"page_summary"),
    ("page_score", r"page_score"),
    ("page_centroids", r"page_centroids"),
    ("page_vote", r"page_vote"),
    ("page_topk", r"page_topk"),
    ("kt_select", r"kt_select"),
    ("index_topk", r"index_topk"),
    ("sparse_decode, combine", r"^_combine_kernel|sparse_decode\w*combine"),
    ("sparse_decode, split", r"^_split_kernel|sparse_decode"),
    ("KV write", r"store_kv|rope_store|set_kv_buffer|set_mla_kv|append_?paged|reshape_and_cache|fused_qkv_kv_cache"),
    ("norms, rope, activation", r"(rms|layer|qk)_?norm|(?<!p)rope_|_rope|rotary|act_and_mul|act_kernel|silu|gelu"),
    (
        "attention",
        r"flash::|flash_?(fwd|attn|mla)|mla_(metadata|combine)|fmha|pagedattention|pageattention|kvcachekernel"
        r"|mergestate|attentionsum|persistentkerneltemplate|_fwd_(grouped_)?kernel",
    ),
    ("matmuls", r"nvjet|gemm|gemv|cublas|xmma|splitk|matmul|cutlass::kernel|fused_moe"),
)
REST = "other"
MEASURED = ("busy", "idle", "step")
LONGEST_NAME = 90
DROPPED = r"^void |\(anonymous namespace\)::|at::native::|cutlass::device_kernel<|flash::enable_\w+<"


def part_of(kernel: str) -> str:
    """The part of a step that a kernel belongs to, by `PARTS`."""
    return next((part for part, pattern in PARTS if re.search(pattern, kernel, re.IGNORECASE)), REST)


def short(kernel: str) -> str:
    """A kernel's name without what it returns and the namespaces in front, cut to a line of a table."""
    name = re.sub(DROPPED, "", kernel)
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def totals(uses: Iterable[Use | None]) -> Use:
    """Several uses as one."""
    found = [use for use in uses if use]
    return Use(sum(u.us for u in found), sum(u.duration_us for u in found), sum(u.calls for u in found))


def figures(uses: Sequence[Use], span: float) -> dict[str, Any]:
    """Medians over the steps.

    Args:
        uses: one a step.
        span: microseconds of a step, of which `share` is.

    Returns:
        ``us`` and ``duration_us`` (see `eval.lab.servers.profile_trace.Use`), ``us_range``, ``calls`` and ``share``.
    """
    times = [use.us for use in uses]
    return {
        "us": median(times),
        "us_range": (min(times), max(times)),
        "duration_us": median(use.duration_us for use in uses),
        "calls": median(use.calls for use in uses),
        "share": median(times) / span,
    }


def summarise(steps: Sequence[Step]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The figures of a step.

    Args:
        steps: as `eval.lab.servers.profile_trace.decode_steps` returns them.

    Returns:
        A row for each name of a kernel (``id``, ``part`` and `figures`), the longest first; and a row for each part of
        a step, then for ``busy`` (at least one kernel ran), ``idle`` (with ``gaps``, how many a step, and
        ``longest_gap_us``) and ``step``, the time from one to the next. Medians of parts need not add up to the
        median of the whole.
    """
    span = median(step.span_us for step in steps)
    names = sorted({name for step in steps for name in step.uses})
    kernels: list[dict[str, Any]] = [
        {"id": name, "part": part_of(name)} | figures([totals([step.uses.get(name)]) for step in steps], span)
        for name in names
    ]
    kernels.sort(key=lambda row: -row["us"])
    parts: list[dict[str, Any]] = []
    for part in [*(part for part, _ in PARTS), REST]:
        mine = [name for name in names if part_of(name) == part]
        if mine:
            parts.append({"part": part} | figures([totals(map(step.uses.get, mine)) for step in steps], span))
    whole = [totals(step.uses.values()) for step in steps]
    parts.append({"part": "busy"} | figures(whole, span))
    idle = figures([Use(sum(step.gaps_us), 0.0, 0) for step in steps], span)
    del idle["duration_us"], idle["calls"]
    idle |= {"gaps": median(len(step.gaps_us) for step in steps)}
    idle |= {"longest_gap_us": median(max(step.gaps_us, default=0.0) for step in steps)}
    parts.append({"part": "idle"} | idle)
    spans = figures([Use(step.span_us, 0.0, use.calls) for step, use in zip(steps, whole, strict=True)], span)
    del spans["duration_us"]
    parts.append({"part": "step", "steps": len(steps)} | spans)
    return kernels, parts


def part_name(row: Row) -> str:
    """Return the name of a part of a step in tables."""
    if "tflops" in row:
        return f"{row['part']} ({row['tflops']:.0f} TFLOP/s)"
    if row["part"] == "idle" and "gaps" in row:
        return f"idle ({row['gaps']:g} gaps, the longest {row['longest_gap_us']:.1f} µs)"
    return str(row["part"])


def calls(row: Row) -> str:
    """Launches a step; none for the time in which there are none."""
    return f"{row['calls']:g}" if "calls" in row else ""


def spread(row: Row) -> str:
    """Least and most of the steps."""
    low, high = row["us_range"]
    return f"{low:.1f} … {high:.1f}"


def tables(kernels: Sequence[Row], parts: Sequence[Row]) -> str:
    """Two Markdown tables: a step by its parts, and by its kernels."""
    columns: list[Column] = [
        ("part of a step", part_name),
        ("µs a step", number("us", 1)),
        ("of the steps", spread),
        ("calls", calls),
        ("share", percent("share")),
    ]
    return f"{table(parts, columns)}\n\n{kernel_table(kernels)}"


def kernel_table(kernels: Sequence[Row]) -> str:
    """A step by its kernels, as a Markdown table."""
    columns: list[Column] = [
        ("kernel", lambda row: f"`{short(row['id'])}`"),
        ("part", text("part")),
        ("µs a step", number("us", 1)),
        ("with overlap", number("duration_us", 1)),
        ("calls", calls),
        ("share", percent("share")),
    ]
    return table(kernels, columns)


def profile(path: Path) -> str:
    """The tables of a file of ``eval.lab.profile_decode``."""
    rows = of_profile(path)
    return tables(*([row for row in rows if row["kind"] == kind] for kind in ("item", "summary")))


def of_profile(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of ``eval.lab.profile_decode``.

    Raises:
        EvaluationError: it is none, or see `read_finished`.
    """
    rows = read_finished(path)
    if command_name(rows[0].get("command")) != "profile_decode":
        raise EvaluationError(f"{path} is no file of eval.lab.profile_decode, but of {rows[0].get('command')}")
    return rows


def compare(before: Path, after: Path) -> str:
    """A decode step before and after a change, side by side as one Markdown table; the revisions are in its first line.

    Args:
        before: a file of ``eval.lab.profile_decode``.
        after: another one.

    Raises:
        EvaluationError: as `of_profile`, or the files profile different batches or contexts.
    """
    both = [of_profile(path) for path in (before, after)]
    shapes = [tuple(rows[0]["arguments"].get(name) for name in ("batch", "context")) for rows in both]
    if shapes[0] != shapes[1]:
        names = [" x ".join(map(str, shape)) for shape in shapes]
        raise EvaluationError(f"{before} profiles {names[0]} tokens, {after} {names[1]}: there is nothing to compare")
    sides = [{row["part"]: row for row in rows if row["kind"] == "summary"} for rows in both]

    def of(side: int, write: Callable[[Row], str]) -> Callable[[Row], str]:
        return lambda row: write(sides[side][row["part"]]) if row["part"] in sides[side] else ""

    columns: list[Column] = [("part of a step", text("part"))]
    for side, when in enumerate(("before", "after")):
        columns += [
            (f"{when} ({both[side][0]['revision']}), µs", of(side, number("us", 1))),
            ("of the steps", of(side, spread)),
            ("calls", of(side, calls)),
        ]
    order = [*(part for part, _ in PARTS), REST, *MEASURED]
    return table([{"part": part} for part in sorted({*sides[0], *sides[1]}, key=order.index)], columns)


def before_and_after(before: Path, after: Path) -> str:
    """`compare` of two files of ``eval.lab.profile_decode``, and the kernels of the second one."""
    return f"{compare(before, after)}\n\n{kernel_table([row for row in of_profile(after) if row['kind'] == 'item'])}"
