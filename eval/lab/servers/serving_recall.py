"""Recall of a sparse method over generated inputs, for ``eval.lab.bench_serving``: rows of other commands' files.

Recall is a matter of the inputs and of the threshold, and a server cannot tell it. It comes from a file that was
measured in process over the same inputs: of ``eval.lab.bench_prefill`` for a prefill method, of ``eval.lab.bench_mla``
for RoBSA's decode. A row counts only where it agrees with the server's report in everything that recall depends on.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.lab.kernels.mla import COMMAND as MLA_COMMAND
from eval.lab.kernels.mla import ROPE, WHOLE
from eval.lab.kernels.prefill import COMMAND as PREFILL_COMMAND
from eval.lab.structured.generator import read_recipe
from eval.live.counters import EvaluationError
from eval.scores.pictures import rows_of

Row = Mapping[str, Any]


def recalls(path: Path, command: str = PREFILL_COMMAND) -> list[dict[str, Any]]:
    """The summary rows of a file, with the seed and, as ``made``, the whole recipe of their inputs.

    Args:
        path: of the file.
        command: that wrote it: ``eval.lab.bench_prefill``, or ``eval.lab.bench_mla``, of which those rows count that do
            all that a sensitive layer does.

    Raises:
        EvaluationError: it is no such file, or has no such rows.
    """
    header, *rows = rows_of(path, command)
    # Fields that came later than the file were as they are by default.
    usual = read_recipe({}).model_dump()
    found = [row | {"seed": header["arguments"]["seed"]} for row in rows if row["kind"] == "summary"]
    if command == MLA_COMMAND:
        shared = {name: header["arguments"][name] for name in ("active", "recipe")}
        found = [row for row in found if (row["op"], row["implementation"]) == (WHOLE, ROPE)]
        made = usual | header["base_recipe"]
        found = [row | shared | {"made": made | {"stripe_ratio": row["stripe_ratio"]}} for row in found]
    else:
        found = [row | {"made": usual | header["recipe"]} for row in found]
    if not found:
        raise EvaluationError(f"--recall-from {path}: it has no summary, its run was refused or interrupted")
    return found


def inputs_of(path: Path) -> dict[str, Any]:
    """The inputs of a file of ``eval.lab.bench_mla``, as ``--structured`` takes them.

    Raises:
        EvaluationError: it is no such file, or its rows have several structures.
    """
    rows = recalls(path, MLA_COMMAND)
    recipes = [row["made"] for row in rows]
    if any(recipe != recipes[0] for recipe in recipes):
        raise EvaluationError(
            f"--structured {path}: its rows have several structures, and a server has one: run eval.lab.bench_mla with "
            "--positions"
        )
    return {"seed": rows[0]["seed"], "recipe": recipes[0]}


def command_of(args: argparse.Namespace) -> str:
    """The command whose files say what the sparse server's inputs are worth."""
    return PREFILL_COMMAND if args.sparse_prefill_method else MLA_COMMAND


def matching(path: Path, command: str, wanted: Row) -> dict[str, Any]:
    """The row of a file that has these fields.

    Raises:
        EvaluationError: there is none; names what differs in the nearest one.
    """
    near = min(recalls(path, command), key=lambda row: sum(row.get(name) != wanted[name] for name in wanted))
    differing = {name: value for name, value in wanted.items() if near.get(name) != value}
    if differing:
        asked = ", ".join(f"{_called(name)} {value!r}" for name, value in differing.items())
        found = ", ".join(f"{_called(name)} {near.get(name)!r}" for name in differing)
        raise EvaluationError(
            f"--recall-from {path}: wanted is a row with {asked}, the nearest has {found}; run {command} with it"
        )
    return near


def _called(name: str) -> str:
    return {"made": "recipe"}.get(name, name)
