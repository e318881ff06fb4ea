r"""``python -m eval.lab.bench_throughput``: requests a second of servers at one workload, each at its best batch.

    python -m eval.lab.bench_throughput --shape qwen3-8b --input-length 32k --output-length 4k --batch 8,16,32,64 \
        --server resa="--sparse-method resa" --out throughput.jsonl

A stock server, called ``dense``, and those that ``--server`` names run one after the other on this machine, each with
the KV pool that SGLang gives it. For each batch size SGLang's own benchmark client sends as many prompts at once (ids
in a row from random starts, no two with a common prefix, the cache flushed before); requests that do not fit wait, as
on any server. A row has what the client says of the whole run, prefill and waiting included: requests and tokens a
second, and the time to the first token and per further one. Seconds everywhere. Of a method that keeps a part of a
prompt it has what became of the prompts (``kept`` of ``/server_info``), and of requests that let go of theirs how many
tokens of its KV they held from then on. A run that was interrupted goes on with the batches that its file lacks;
``--only`` measures some of the servers; a later run adds others.

The summary sets each server's best batch beside the dense server's best one. ``eval.lab.documents FILE --out FOLDER``
draws tokens a second of the server over those of a user, for all batches: what a batch costs one and gives the other.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from eval.lab.servers import model_shapes
from eval.lab.servers.in_turn import (
    Server,
    add_servers,
    add_steps,
    asked_servers,
    check_servers,
    check_steps,
    loads_of,
    measure,
    missing_loads,
    open_file,
    run_load,
    steps_of,
)
from eval.lab.servers.server_facts import kept
from eval.lab.servers.throughput import COMMAND, best_batches
from eval.lab.tables.files import measured
from eval.live.arms import MAX_DENSE_ROWS
from eval.live.client import command_line
from eval.live.counters import EvaluationError
from eval.serving.grid import batch_flags
from eval.tasks.judge_commands import Target, serving_command
from eval.texts.lengths import length

# Of KV, behind a request's last token.
ROOM = 128
RATES = ("duration", "request_throughput", "output_throughput", "ttft_median", "tpot_median", "itl_p99")


def server_flags(args: argparse.Namespace, name: str) -> list[str]:
    """Return the flags that a server is started with in addition to its own."""
    most = max(steps_of(args, "batch", name))
    flags = ["--context-length", str(args.input_length + args.output_length + ROOM), *batch_flags(most)]
    return [*flags, *model_shapes.load_flags(args), *shlex.split(args.server_args)]


def drive(args: argparse.Namespace, scratch: Path, name: str, batch: int, target: Target, url: str) -> dict[str, Any]:
    """Have SGLang's client send a batch, and prove what was measured.

    Args:
        args: the command line.
        name: of the server.
        batch: prompts at once.
        scratch: folder for the client's files.
        target: what the server says of itself.
        url: where it is.

    Raises:
        EvaluationError: the client or a request failed, an answer is too short, or rows that were to run sparse ran
            dense.
    """
    sizes = {"output_length": args.output_length, "prompts": batch, "concurrency": batch}
    path = scratch / f"{name}-{batch}.jsonl"
    asked = argparse.Namespace(base_url=url, seed=args.seed, **sizes)
    command = [*serving_command(target, asked, args.input_length, path), "--warmup-requests", "1"]
    found = run_load(command, target, path, args.out.with_suffix(".log"))
    short = [row["completion_tokens"] for row in found.items if row["completion_tokens"] < args.output_length]
    if short:
        raise EvaluationError(f"an answer has {short[0]} tokens, asked for were {args.output_length}")
    row = {"batch": batch} | {field: found.summary[field] for field in RATES} | found.counts()
    row |= kept(found.before, found.after, args.input_length)
    if (row.get("dense_rows") or 0.0) > MAX_DENSE_ROWS:
        raise EvaluationError(
            f"{row['dense_rows']:.0%} of the rows were decoded dense, allowed are {MAX_DENSE_ROWS:.0%}: start the "
            "server with lower min_seq_len and crossover_tokens"
        )
    return row


def run(args: argparse.Namespace) -> int:
    """Measure every server and write the file.

    Returns:
        The exit status: 1 where a server has no row, or not all of them.

    Raises:
        EvaluationError: see the functions that this one calls; or nothing can be compared.
    """
    servers = asked_servers(args)
    names = ("shape", "model_path", "input_length", "output_length", "batch", "server_args", "seed")
    asked = {name: getattr(args, name) for name in names}
    asked |= {"server": dict(args.server), "batch_of": dict(args.batch_of)}
    record, rows = open_file(args, COMMAND, asked)
    with tempfile.TemporaryDirectory() as name, record:
        folder = model_shapes.folder_of(args, Path(name))
        for server, flags in servers.items():
            loads = loads_of(args, "batch", server, partial(drive, args, Path(name)))
            started = Server(server, folder, server_flags(args, server) + flags)
            rows += measure(args, COMMAND, started, record, loads, args.input_length + args.output_length)
        summary = best_batches(rows)
        if not summary:
            raise EvaluationError("nothing was measured on a dense and another server")
        for row in summary:
            record.add("summary", **row)
    return int(bool(missing_loads(args, "batch", servers, rows)))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = command_line(COMMAND, __doc__)
    model_shapes.add_arguments(parser)
    parser.add_argument("--input-length", type=length, default="32k", help="tokens of a prompt")
    parser.add_argument("--output-length", type=length, default="4k", help="tokens of an answer")
    add_steps(parser, "batch", int, "8,16,32", "prompts at once")
    add_servers(parser)
    args = parser.parse_args(arguments)
    check_steps(parser, args, "batch", check_servers(parser, args))
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 where something was not measured."""
    return measured(COMMAND, lambda: parse(arguments), run)


if __name__ == "__main__":
    sys.exit(main())
