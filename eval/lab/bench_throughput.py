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
``--only`` measures some of the servers, where there is no time for all.

The summary sets each server's best batch beside the dense server's best one. ``eval.lab.documents FILE --out FOLDER``
draws tokens a second of the server over those of a user, for all batches: what a batch costs one and gives the other.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eval.bench_serving import named
from eval.lab.servers import model_shapes
from eval.lab.servers.server_facts import kept
from eval.lab.servers.throughput import COMMAND, DENSE, best_batches
from eval.lab.tables.files import measured
from eval.live.arms import MAX_DENSE_ROWS
from eval.live.client import LiveServer, command_line, list_of
from eval.live.counters import EvaluationError, moved, read_shares
from eval.live.record import Record, summarised, this_machine
from eval.serving.grid import batch_flags
from eval.tasks.judge_commands import Target, reach, run_judge, serving_command, serving_rows
from eval.texts.lengths import length
from launch.server import ServerProcess

# Of KV, behind a request's last token.
ROOM = 128
SERVED = ("attention_backend", "page_size", "max_total_num_tokens")
RATES = ("duration", "request_throughput", "output_throughput", "ttft_median", "tpot_median", "itl_p99")


def batches(args: argparse.Namespace, name: str) -> list[int]:
    """What a server is asked at once."""
    return dict(args.batch_of).get(name, args.batch)


def server_flags(args: argparse.Namespace, name: str) -> list[str]:
    """What a server is started with beside its own flags."""
    most = max(batches(args, name))
    flags = ["--context-length", str(args.input_length + args.output_length + ROOM), *batch_flags(most)]
    return flags + (["--load-format", "dummy"] if args.shape else []) + shlex.split(args.server_args)


def drive(args: argparse.Namespace, name: str, url: str, target: Target, batch: int, scratch: Path) -> dict[str, Any]:
    """Have SGLang's client send a batch, and prove what was measured.

    Args:
        args: the command line.
        name: of the server.
        url: where it is.
        target: what it says of itself.
        batch: prompts at once.
        scratch: folder for the client's files.

    Raises:
        EvaluationError: the client or a request failed, an answer is too short, or rows that were to run sparse ran
            dense.
    """
    sizes = {"output_length": args.output_length, "prompts": batch, "concurrency": batch}
    path = scratch / f"{name}-{batch}.jsonl"
    asked = argparse.Namespace(base_url=url, seed=args.seed, **sizes)
    command = [*serving_command(target, asked, args.input_length, path), "--warmup-requests", "1"]
    before = target.arm.server.counters() if target.arm.counted else None
    run_judge(command, scratch, args.out.with_suffix(".log"))
    items, summary = serving_rows(json.loads(path.read_text()))
    failed = [row["failed"] for row in items if "failed" in row]
    if failed:
        raise EvaluationError(f"{len(failed)} of {batch} requests failed, the first: {failed[0]}")
    short = [row["completion_tokens"] for row in items if row["completion_tokens"] < args.output_length]
    if short:
        raise EvaluationError(f"an answer has {short[0]} tokens, asked for were {args.output_length}")
    row: dict[str, Any] = {"id": f"{name}/{batch}", "arm": name, "batch": batch}
    row |= {field: summary[field] for field in RATES}
    if before is None:
        return row
    after = target.arm.server.counters()
    counts = moved(before, after)
    row |= read_shares(counts) | {"counters": counts} | kept(before, after, args.input_length)
    if (row["dense_rows"] or 0.0) > MAX_DENSE_ROWS:
        raise EvaluationError(
            f"{row['dense_rows']:.0%} of the rows were decoded dense, allowed are {MAX_DENSE_ROWS:.0%}: start the "
            "server with lower min_seq_len and crossover_tokens"
        )
    return row


def measure(
    args: argparse.Namespace, name: str, flags: list[str], folder: Path, record: Record, scratch: Path
) -> list[dict[str, Any]]:
    """Start a server and run every batch on it that the record lacks; the first one that it does not serve ends it.

    Returns:
        The rows, earlier ones included.

    Raises:
        EvaluationError: it does not start, or is not what it should be.
    """
    found = (row for row in record.earlier if row["kind"] == "item" and row["arm"] == name)
    rows = [{field: value for field, value in row.items() if field != "kind"} for row in found]
    todo = [batch for batch in batches(args, name) if batch not in {row["batch"] for row in rows}]
    if not todo:
        return rows
    log = args.out.with_suffix(f".{name}.log")
    with ExitStack() as stack:
        process = ServerProcess(folder, *server_flags(args, name), *flags, log_path=log, timeout=args.start_timeout)
        try:
            stack.enter_context(process)
        except (RuntimeError, TimeoutError) as error:
            raise EvaluationError(f"the {name} server did not start, see {log}") from error
        server = stack.enter_context(LiveServer(process.url))
        expect = "auto" if any(flag.startswith("--sparse") for flag in flags) else "dense"
        asked = argparse.Namespace(expect=expect, model=None, tokenizer=None, custom_params={})
        target = reach(asked, server, args.input_length + args.output_length)
        if expect != "dense" and not target.arm.counted:
            raise EvaluationError(f"the {name} server runs dense, although its flags ask for a method: {flags}")
        line = shlex.join(["python", *process.command[1:]])
        record.add("server", arm=name, facts=target.facts, command=line, start_seconds=process.start_seconds)
        served = {f"served_{field}": target.facts.get(field) for field in SERVED}
        for batch in tqdm(todo, desc=name):
            try:
                row = drive(args, name, process.url, target, batch, scratch) | served
            except EvaluationError as error:
                record.add("skipped", arm=name, batch=batch, reason=str(error))
                tqdm.write(f"{COMMAND}: {name}, {batch} at once: {error}", file=sys.stderr)
                break
            record.add("item", **row)
            rows.append(row)
    return rows


def run(args: argparse.Namespace) -> int:
    """Measure every server and write the file.

    Returns:
        The exit status: 1 where a server has no row, or not all of them.

    Raises:
        EvaluationError: see the functions that this one calls; or nothing can be compared.
    """
    servers = {DENSE: [], **{name: shlex.split(flags) for name, flags in args.server if name in args.only}}
    names = ("shape", "model_path", "input_length", "output_length", "batch", "server_args", "seed")
    asked = {name: getattr(args, name) for name in names}
    asked |= {"server": dict(args.server), "batch_of": dict(args.batch_of)}
    header = {"arguments": asked, "label": args.label, **this_machine()}
    rows: list[dict[str, Any]] = []
    record = Record(args.out, COMMAND, args.revision, resume=not summarised(args.out), **header)
    with tempfile.TemporaryDirectory() as name, record:
        folder = model_shapes.write(args.shape, Path(name)) if args.shape else Path(args.model_path)
        for server, flags in servers.items():
            rows += measure(args, server, flags, folder, record, Path(name))
        summary = best_batches(rows)
        if not summary:
            raise EvaluationError("nothing was measured on a dense and another server")
        for row in summary:
            record.add("summary", **row)
    return int(len(rows) < sum(len(batches(args, server)) for server in servers))


def _batches_of(text: str) -> tuple[str, list[int]]:
    name, numbers = named(text)
    return name, list_of(int)(numbers)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = command_line(COMMAND, __doc__)
    model_shapes.add_arguments(parser)
    parser.add_argument("--out", required=True, type=Path, help="JSONL file to write; the logs go beside it")
    parser.add_argument("--input-length", type=length, default="32k", help="tokens of a prompt")
    parser.add_argument("--output-length", type=length, default="4k", help="tokens of an answer")
    parser.add_argument("--batch", type=list_of(int), default="8,16,32", help="prompts at once, ascending")
    parser.add_argument(
        "--batch-of",
        type=_batches_of,
        action="append",
        default=[],
        metavar="NAME=LIST",
        help=f"the same of one server, or of {DENSE}: the best batch of one that keeps less KV is another one",
    )
    parser.add_argument("--server", type=named, action="append", default=[], metavar="NAME=ARGS", help="see above")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="NAMES",
        help="of the servers that --server names, for a run in parts: those beside the stock one that run now",
    )
    parser.add_argument("--server-args", default="", help="further arguments of all servers, as one string")
    parser.add_argument("--start-timeout", type=float, default=900.0, help="seconds until a server must be ready")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    args = parser.parse_args(arguments)
    for flag, asked in [("--batch", args.batch), *((f"--batch-of {name}", asked) for name, asked in args.batch_of)]:
        if not asked or min(asked) < 1 or sorted(set(asked)) != asked:
            parser.error(f"{flag} must be ascending numbers of 1 or more, got {asked}")
    known = [DENSE, *(name for name, _ in args.server)]
    if wrong := [name for name, _ in args.batch_of if name not in known]:
        parser.error(f"--batch-of {wrong[0]}: there is no such server; allowed: {', '.join(known)}")
    args.only = args.only or known[1:]
    if wrong := [name for name in args.only if name not in known[1:]]:
        parser.error(f"--only {wrong[0]}: there is no such server; allowed: {', '.join(known[1:])}")
    if not args.server or DENSE in dict(args.server) or len(dict(args.server)) < len(args.server):
        parser.error(f"--server must name servers, each once and none of them {DENSE}")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 where something was not measured."""
    return measured(COMMAND, lambda: parse(arguments), run)


if __name__ == "__main__":
    sys.exit(main())
