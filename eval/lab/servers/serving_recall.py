"""What generated inputs are worth to a sparse method, for ``eval.bench_serving``: rows of other commands' files.

Recall is a matter of the inputs and of the threshold, which a server cannot tell. It comes from a file of what was
measured in process over the same inputs: of ``eval.lab.bench_prefill`` for a prefill method, of ``eval.lab.bench_mla``
for RoBSA's decode. A row counts only where everything that recall depends on is what the server says of itself.
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
from eval.lab.tables.targets import SPARSITY_TOLERANCE, near_target
from eval.live.counters import EvaluationError
from eval.scores.pictures import rows_of
from eval.serving.grid import QUALITY, Cell, dense_by_limits

ROBSA = "robsa"
KV_DTYPES = {"fp8_e4m3": "float8_e4m3fn"}

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


def decode_quality(args: argparse.Namespace, cell: Cell, config: Row, inputs: Row | None, facts: Row) -> dict[str, Any]:
    """What a cell's rows attend to is worth, of a server that decodes by RoBSA.

    Args:
        args: the command line.
        cell: the batch.
        config: of the decode method, resolved; empty for a dense server.
        inputs: what the server says of its generated inputs, None where it has none.
        facts: what it says of itself.

    Returns:
        `QUALITY`; nothing for a cell that is decoded dense, or where no file is given.

    Raises:
        EvaluationError: the file has no row for this cell; names what differs in the nearest one.
    """
    if args.recall_from is None or args.sparse_prefill_method or inputs is None or dense_by_limits(cell, config):
        return {}
    shape = inputs["shape"]
    wanted = {"length": cell.context, "made": inputs["recipe"], "seed": inputs["seed"]}
    # Where stripes lie depends on how many positions there are.
    wanted |= {"positions": inputs["positions"], "heads": shape["q_heads"], "latent": shape["v_head_dim"]}
    wanted |= {"rope": shape["head_dim"] - shape["v_head_dim"]}
    wanted |= {"kv_dtype": KV_DTYPES.get(facts.get("kv_cache_dtype", "auto"), "bfloat16")}
    wanted |= {name: config.get(name) for name in ("block_size", "theta1", "max_active_ratio")}
    found = matching(args.recall_from, MLA_COMMAND, wanted)
    return {name: found.get(name) for name in QUALITY}


def decode_sparsity(config: Row, counts: Mapping[str, int]) -> dict[str, Any]:
    """What RoBSA left out in the layers that ran sparse; nothing of another method, or where none did.

    Args:
        config: of the decode method, resolved.
        counts: of `eval.live.counters.moved`.

    Returns:
        ``active_blocks``, the mean over rows, steps and sparse layers, and ``sparsity``, the share of the others.
    """
    if "theta1" not in config or not counts["sparse_layer_rows"]:
        return {}
    shares = counts["pages_attended"] / counts["pages_held"]
    return {"active_blocks": counts["pages_attended"] / counts["sparse_layer_rows"], "sparsity": 1 - shares}


def require_sparsity(row: Row, advice: str) -> None:
    """Refuse a run that left out another share of the query-key pairs than its inputs were made for.

    Args:
        row: with ``sparsity``, ``target_sparsity`` and the threshold.
        advice: what to do about it.

    Raises:
        EvaluationError: names both.
    """
    target, found = row.get("target_sparsity"), row.get("sparsity")
    if target is None or (found is not None and near_target(found, target, row.get("active"))):
        return
    names = ("theta", "threshold_scale_factor", "theta1")
    (threshold,) = [f"{name} {row[name]:g}" for name in names if row.get(name) is not None]
    share = found if found is None else f"{found:.3f}"
    raise EvaluationError(
        f"{share} of the query-key pairs were left out at {threshold}, allowed are {target:.4g} ± {SPARSITY_TOLERANCE}"
        f"{'' if row.get('active') is None else ' and a tenth of the rest'}: {advice}"
    )
