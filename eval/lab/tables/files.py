"""Tables and pictures of result files, by the command that wrote them: those of users, and the lab's."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eval import report
from eval.lab.agreement import agreement as dsa_agreement
from eval.lab.kernels import dsa, framework, mla, prefill
from eval.lab.servers import decode, deployments, goodput, latency_limit, profile, throughput
from eval.lab.tables import crossover
from eval.lab.tables.weights import weights
from eval.live.client import FAILURES
from eval.live.record import read_finished, read_rows, result_files
from eval.scores.tables import Column, Row, bounds, length, number, percent, table, text
from eval.tasks.judge_commands import agreement


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


def _plotted(module: Any) -> Any:
    return lambda path, stem: module.plot(read_rows(path), stem)


TABLES: report.Tables = {
    **report.TABLES,
    "agree_dsa": dsa_agreement.agreement,
    "bench_decode": decode.decode,
    "bench_deployments": deployments.deployments,
    "bench_dsa": dsa.dsa,
    "bench_framework": kernels,
    "bench_goodput": goodput.goodput,
    "bench_kernels": kernels,
    "bench_mla": mla.mla,
    "bench_prefill": prefill.prefill,
    "bench_throughput": throughput.throughput,
    "profile_decode": profile.profile,
    "tune": crossover.crossover_table,
}
PICTURES: report.Pictures = {
    **report.PICTURES,
    "bench_framework": _plotted(framework),
    "bench_goodput": _plotted(goodput),
    "bench_prefill": _plotted(prefill),
    "bench_serving": latency_limit.draw,
    "bench_throughput": _plotted(throughput),
    "tune": crossover.draw,
}


def any_table(path: Path) -> str:
    """See `eval.report.any_table`."""
    return report.any_table(path, TABLES)


def draw(path: Path, stem: Path) -> None:
    """See `eval.report.draw`."""
    report.draw(path, stem, PICTURES)


def measured(command: str, parse: Callable[[], argparse.Namespace], run: Callable[[argparse.Namespace], int]) -> int:
    """Run a command that writes a file, and print the table of the file.

    Args:
        command: its name.
        parse: reads its command line; ``out`` is the file.
        run: writes the file.

    Returns:
        The exit status that `run` returns; 1 where there is nothing to measure on, and stderr says why.
    """
    try:
        args = parse()
        status = run(args)
        print(any_table(args.out))
    except FAILURES as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 1
    return status
