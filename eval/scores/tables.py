"""Markdown tables from result files: one function for each kind of file."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.lab.selection import recall_summary
from eval.lab.tables.weights import sensitive, weights
from eval.live.counters import EvaluationError
from eval.live.record import command_name, read_finished, read_rows, result_files
from eval.scores import long_summary, ppl_summary, summary
from eval.scores.verdicts import DEFINITION, NLL_MARGIN, RANDOM, read_folder
from eval.tasks.judge_rows import agreement
from eval.texts.lengths import short_length

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]


def table(rows: Iterable[Row], columns: Sequence[Column]) -> str:
    """A Markdown table with a line for each row; columns that are empty throughout are left out."""
    cells = [[write(row) for _, write in columns] for row in rows]
    kept = [i for i in range(len(columns)) if any(line[i] for line in cells)]
    lines = [[columns[i][0] for i in kept], ["---"] * len(kept), *([line[i] for i in kept] for line in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(name: str, places: int, scale: float = 1.0, sign: bool = False) -> Callable[[Row], str]:
    """Write a field with so many decimal places; nothing where it is missing."""

    def write(row: Row) -> str:
        value = row.get(name)
        return "" if value is None else f"{value * scale:{'+' if sign else ''}.{places}f}"

    return write


def text(name: str) -> Callable[[Row], str]:
    """Write a field as it is; nothing where it is missing."""
    return lambda row: "" if row.get(name) is None else str(row[name])


def bounds(name: str, places: int, sign: bool = True) -> Callable[[Row], str]:
    """Write an interval."""

    def write(row: Row) -> str:
        if row.get(name) is None:
            return ""
        low, high = row[name]
        form = f"{'+' if sign else ''}.{places}f"
        return f"{low:{form}} … {high:{form}}"

    return write


def length(row: Row) -> str:
    """Tokens, in k where they are a multiple of 1024."""
    return "" if row.get("length") is None else short_length(row["length"])


def percent(name: str) -> Callable[[Row], str]:
    """Write a share as a percentage."""
    write = number(name, 1, 100.0)
    return lambda row: f"{write(row)} %" if write(row) else ""


def gates(row: Row) -> str:
    """Whether a task of ``eval.compare`` decides: on the method, or on what its definition leaves of the task."""
    decides = {None: "", True: "yes", False: "no"}[row["gates"]]
    return "by definition" if decides == "yes" and row.get("definition_verdict") else decides


def comparison_table(rows: Sequence[Row]) -> str:
    """The table of ``eval.compare``: scores of 1 at best; perplexity as nats per token, where less is better."""
    columns: list[Column] = [
        ("task", lambda row: f"{row['suite']}: {row['task']}"),
        ("length", length),
        ("n", text("n")),
        ("of", text("unit")),
        ("dense", number("dense", 3)),
        ("sparse", number("sparse", 3)),
        ("difference", number("diff", 3, sign=True)),
        ("95 %", bounds("diff_interval", 3)),
        ("read", percent("density")),
        ("rows dense", percent("dense_rows")),
        ("left out of prefill", percent("sparsity")),
        ("by definition", number(DEFINITION, 3)),
        ("true mass", number("true_mass", 3)),
        ("random", number(RANDOM, 3)),
        ("gates", gates),
        ("verdict", text("verdict")),
        ("against the definition", text("definition_verdict")),
    ]
    return table(rows, columns)


def rectification(*paths: Path, judged: int | None = None) -> str:
    """Perplexity against the rectification interval.

    Args:
        *paths: files of ``eval.ppl_rectify``.
        judged: the interval at which the perplexity must stay within `NLL_MARGIN` of the dense one, by the upper end
            of its 95 % interval; None: no bound is set.
    """
    rows: list[Row] = []
    for path in paths:
        header, *found = read_rows(path)
        said = {"weights": weights(header), "sensitive": sensitive(header)}
        rows += [{**said, **row} for row in ppl_summary.summarise(found)]

    def verdict(row: Row) -> str:
        if row["setting"] != "rectified" or row["interval"] != judged:
            return ""
        return f"{'within' if row['diff_interval'][1] <= NLL_MARGIN else 'not within'} {NLL_MARGIN:.1%}"

    def every(row: Row) -> str:
        return {"dense": "dense", "off": "never", "bound": "only the scored step sparse"}.get(
            row["setting"], str(row["interval"])
        )

    columns: list[Column] = [
        ("weights", text("weights")),
        ("sparse layers", text("sensitive")),
        ("text", text("task")),
        ("ratio", text("ratio")),
        ("tokens between rectifications", every),
        ("n", text("windows")),
        ("perplexity", number("ppl", 3)),
        ("nats over dense", number("diff", 4, sign=True)),
        ("95 %", bounds("diff_interval", 4)),
        ("won back", lambda row: f"{row['closing']:.0%}" if row.get("closing_interval") and row["drifts"] else ""),
        ("read", percent("density")),
        ("verdict", verdict),
    ]
    return table(rows, columns)


def drift(path: Path) -> str:
    """Divergence from the dense server over the length of the output."""
    columns: list[Column] = [
        ("text", text("task")),
        ("setting", text("arm")),
        ("position", text("position")),
        ("n", text("n")),
        ("KL, nats", number("kl", 5)),
        ("95 %", bounds("kl_interval", 5, sign=False)),
        ("same best token", number("agreement", 3)),
        ("read", percent("density")),
    ]
    return table(long_summary.summarise(read_rows(path)), columns)


def recall(path: Path) -> str:
    """Attention mass kept, layer by layer."""
    columns: list[Column] = [
        ("length", length),
        ("layer", lambda row: "all" if row["layer"] is None else str(row["layer"])),
        ("mass kept", number("mass", 3)),
        ("5th percentile", number("mass_low", 3)),
        ("best possible", number("best", 3)),
        ("random", number("random", 3)),
        ("relative L2", number("error", 3)),
    ]
    rows = recall_summary.summarise(read_rows(path))
    return table([row for row in rows if row["head"] is None], columns)


def kernels(path: Path, only: str = "") -> str:
    """Microseconds a layer of the operations of a file, or of one, by whom, and what their outputs are worth."""
    header, *rows = read_finished(path)
    ceiling = header.get("ceiling_gbps")

    def of_ceiling(row: Row) -> str:
        return f"{row['gbps'] / ceiling:.0%}" if ceiling and "gbps" in row else ""

    columns: list[Column] = [
        ("shape", text("shape")),
        ("operation", text("op")),
        ("by", text("implementation")),
        ("µs a layer", number("us", 1)),
        ("spread", number("spread", 1)),
        ("GB/s", number("gbps", 0)),
        ("of the ceiling", of_ceiling),
        # Of a part of a step this ratio would say too much.
        ("times faster", lambda row: "" if row["op"] == "sparse_decode" else number("dense_ratio", 2)(row)),
        ("relative L2", number("relative_l2", 4)),
        ("to dense", number("dense_l2", 3)),
        ("skipped", percent("sparsity")),
        ("mass kept", number("recall", 3)),
        ("why not", text("unavailable")),
    ]
    shown = [row for row in rows if row["kind"] == "item" and only in ("", row["op"])]
    return table(shown, columns)


def questions(path: Path) -> str:
    """The summary of a suite of questions."""
    rows = read_finished(path)
    items, counters = ([row for row in rows if row["kind"] == kind] for kind in ("item", "counters"))
    columns: list[Column] = [
        ("task", text("task")),
        ("length", length),
        ("server", text("arm")),
        ("n", text("n")),
        ("failed", lambda row: str(row["failed"] or "")),
        ("score", number("score", 3)),
        ("95 %", bounds("score_interval", 3, sign=False)),
        ("answer, tokens", number("tokens", 1)),
        ("read", percent("density")),
        ("difference", number("diff", 3, sign=True)),
        ("95 % of it", bounds("diff_interval", 3)),
        ("verdict", text("verdict")),
    ]
    return table(summary.summarise(items, counters), columns)


def agreements(folder: Path) -> str:
    """Scores of ``eval.ruler`` beside those of lm-eval, from files ``ruler-SERVER`` and ``lm-eval-SERVER-...``."""
    rows, files = [], result_files(folder)
    for name, path in files.items():
        if name.startswith("lm-eval-"):
            server = name.split("-")[2]
            found = agreement(read_finished(files[f"ruler-{server}"]), read_finished(path))
            rows += [{"server": server, "verdict": "yes" if row["agrees"] else "no", **row} for row in found]
    columns: list[Column] = [
        ("server", text("server")),
        ("task", text("task")),
        ("length", length),
        ("n, ours", text("n_ours")),
        ("lm-eval's", text("n_theirs")),
        ("tokens, ours", number("tokens_ours", 0)),
        ("lm-eval's", number("tokens_theirs", 0)),
        ("score, ours", number("ours", 3)),
        ("lm-eval's", number("theirs", 3)),
        ("points", number("points", 1, sign=True)),
        ("95 %", bounds("points_interval", 1)),
        ("within two", text("verdict")),
    ]
    return table(rows, columns)


def backends(paths: Sequence[Path]) -> str:
    """The same questions on servers with several attention backends, those of sparse servers left out."""
    rows = []
    for path in paths:
        header, *found = read_finished(path)
        served = header["servers"]["base"]
        if served.get("sparse_method") or served.get("sparse_prefill_method"):
            continue
        place = {"served": f"{served['attention_backend']}, {served['device']}", "weights": weights(header)}
        rows += [place | row for row in found if row["kind"] == "summary" and row["arm"] == "base"]
    columns: list[Column] = [
        ("attention backend", text("served")),
        ("weights", text("weights")),
        ("task", text("task")),
        ("length", length),
        ("n", text("n")),
        ("score", number("score", 3)),
        ("95 %", bounds("score_interval", 3, sign=False)),
    ]
    return table(rows, columns)


def any_table(path: Path) -> str:
    """The table of a file or a folder of results, by the command that wrote it.

    Raises:
        EvaluationError: it is none.
    """
    if path.is_dir():
        return comparison_table(read_folder(path))
    rows = read_rows(path)
    command = rows[0].get("command") if rows else None
    if command is None:
        raise EvaluationError(f"{path} is no file of results: its first line is no header")
    known = {"ppl_rectify": rectification, "long_generation": drift, "recall": recall}
    known |= {"bench_kernels": kernels, "bench_framework": kernels}
    # Imported here, because their tables are made with this module's functions.
    modules = {"profile_decode": "lab.servers.profile", "bench_serving": "serving.report"}
    modules |= {f"bench_{name}": f"lab.kernels.{name}" for name in ("prefill", "mla", "dsa")}
    modules |= {f"bench_{name}": f"lab.servers.{name}" for name in ("decode", "throughput")}
    modules |= {"sanitize_kernels": "lab.toolchain.sanitizer", "agree_dsa": "lab.agreement.agreement"}
    if (name := command_name(command)) in modules:
        module = importlib.import_module(f"eval.{modules[name]}")
        return getattr(module, {"bench_serving": "serving"}.get(name, modules[name].rpartition(".")[2]))(path)
    return known.get(name, questions)(path)
