"""Servers of this machine that run in turn, each asked by SGLang's benchmark client; a row for each load."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eval.bench_serving import named
from eval.live.client import LiveServer, list_of
from eval.live.counters import EvaluationError, moved, read_shares
from eval.live.gpu_watch import SpeedRecord
from eval.live.record import Record, read_rows, summarised, this_machine
from eval.serving.grid import DENSE
from eval.tasks.judge_commands import Target, reach, run_judge, serving_rows
from launch.server import ServerProcess

GOODPUT = ("slo_attainment", "slo_attainment_by_metric")
SERVED = ("attention_backend", "page_size", "max_total_num_tokens")

Row = Mapping[str, Any]
# What asks a server for a load, given what it says of itself and its address; returns fields of its row, in seconds.
Drive = Callable[[Target, str], dict[str, Any]]


def add_servers(parser: argparse.ArgumentParser) -> None:
    """The arguments of a benchmark that runs servers in turn."""
    parser.add_argument("--out", required=True, type=Path, help="JSONL file to write; the logs go beside it")
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


def check_servers(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """Return the names of all servers; end the command where they do not fit together."""
    known = [DENSE, *(name for name, _ in args.server)]
    args.only = args.only or known[1:]
    if wrong := [name for name in args.only if name not in known[1:]]:
        parser.error(f"--only {wrong[0]}: there is no such server; allowed: {', '.join(known[1:])}")
    if not args.server or DENSE in dict(args.server) or len(dict(args.server)) < len(args.server):
        parser.error(f"--server must name servers, each once and none of them {DENSE}")
    return known


def add_steps(
    parser: argparse.ArgumentParser, name: str, kind: Callable[[str], float], default: str, what: str
) -> None:
    """The argument that says at which steps of a load servers are measured, and its form for one server alone."""

    def of_one(text: str) -> tuple[str, list[float]]:
        server, numbers = named(text)
        return server, list_of(kind)(numbers)

    parser.add_argument(f"--{name}", type=list_of(kind), default=default, help=f"{what}, ascending")
    parser.add_argument(
        f"--{name}-of",
        type=of_one,
        action="append",
        default=[],
        metavar="NAME=LIST",
        help=f"the same of one server, or of {DENSE}: the best of one that does less lies elsewhere",
    )


def steps_of(args: argparse.Namespace, name: str, server: str) -> list[Any]:
    """At which steps a server is measured, see `add_steps`."""
    return dict(getattr(args, f"{name}_of")).get(server, getattr(args, name))


def loads_of(args: argparse.Namespace, name: str, server: str, drive: Callable[..., Any]) -> dict[str, Drive]:
    """The loads of a server by the ids of their rows; `drive` takes a server and a step, then what a `Drive` takes."""
    return {f"{server}/{step:g}": partial(drive, server, step) for step in steps_of(args, name, server)}


def missing_loads(args: argparse.Namespace, name: str, servers: Iterable[str], rows: Iterable[Row]) -> list[str]:
    """The ids that servers should have rows of, and have not."""
    known = {row["id"] for row in rows}
    wanted = (f"{server}/{step:g}" for server in servers for step in steps_of(args, name, server))
    return [load for load in wanted if load not in known]


def check_steps(parser: argparse.ArgumentParser, args: argparse.Namespace, name: str, servers: Sequence[str]) -> None:
    """End the command where steps are none, or of a server that is none."""
    apart = getattr(args, f"{name}_of")
    for flag, asked in [(f"--{name}", getattr(args, name)), *((f"--{name}-of {of}", asked) for of, asked in apart)]:
        if not asked or min(asked) <= 0 or sorted(set(asked)) != asked:
            parser.error(f"{flag} must be ascending numbers above 0, got {asked}")
    if wrong := [of for of, _ in apart if of not in servers]:
        parser.error(f"--{name}-of {wrong[0]}: there is no such server; allowed: {', '.join(servers)}")


def asked_servers(args: argparse.Namespace) -> dict[str, list[str]]:
    """The flags of each server to run but those of all servers, by name; the stock one first."""
    return {DENSE: [], **{name: shlex.split(flags) for name, flags in args.server if name in args.only}}


def is_sparse(flags: list[str]) -> bool:
    """Whether a server's flags ask for a method."""
    return any(flag.startswith("--sparse") for flag in flags)


@dataclass(frozen=True)
class Server:
    """One to be started.

    Attributes:
        name: of its rows.
        folder: of its model.
        flags: all of them.
        environment: variables beside those of this process.
    """

    name: str
    folder: Path
    flags: list[str]
    environment: dict[str, str] | None = None


@dataclass(frozen=True)
class LoadResult:
    """The result of a load.

    Attributes:
        items: the requests, as `serving_rows` has them.
        summary: of all, likewise; and the client's shares in time, where asked for.
        before: counts of a sparse server before the load, empty of a dense one.
        after: the same after the load.
    """

    items: list[dict[str, Any]]
    summary: dict[str, Any]
    before: dict[str, Any]
    after: dict[str, Any]

    def counts(self) -> dict[str, Any]:
        """Return the shares that a sparse server read, and its counters; empty for a dense one."""
        if not self.after:
            return {}
        counts = moved(self.before, self.after)
        return read_shares(counts) | {"counters": counts}


def run_load(command: list[str], target: Target, path: Path, log: Path) -> LoadResult:
    """Have SGLang's client run a command.

    Args:
        command: which writes its result to `path`.
        target: the server that it asks.
        path: of the client's file.
        log: what the client prints goes to its end.

    Raises:
        EvaluationError: the client or a request failed.
    """
    counters = target.arm.server.counters if target.arm.counted else dict
    before = counters()
    run_judge(command, path.parent, log)
    result = json.loads(path.read_text())
    items, summary = serving_rows(result)
    failed = [row["failed"] for row in items if "failed" in row]
    if failed:
        raise EvaluationError(f"{len(failed)} of {len(items)} requests failed, the first: {failed[0]}")
    return LoadResult(items, summary | {name: result[name] for name in GOODPUT if name in result}, before, counters())


def open_file(
    args: argparse.Namespace, command: str, asked: Mapping[str, Any]
) -> tuple[SpeedRecord, list[dict[str, Any]]]:
    """Open the file of a benchmark, which goes on with one that is not complete.

    It is complete with a summary, once every server of ``--server`` has rows; ``--server`` is the same in each run.

    Args:
        args: the command line.
        command: the name of the benchmark.
        asked: the arguments that the results depend on.

    Returns:
        The file, and the rows of the servers that ``--only`` leaves out.

    Raises:
        EvaluationError: the file holds other results, or a GPU is busy.
    """
    arms = {row.get("arm") for row in read_rows(args.out)} if summarised(args.out) else set()
    header = {"arguments": asked, "label": args.label, **this_machine()}
    record = SpeedRecord(args.out, command, args.revision, resume=not arms >= dict(args.server).keys(), **header)
    others = dict(args.server).keys() - set(args.only)
    return record, [row for other in others for row in measured_before(record, other)]


def measured_before(record: Record, name: str) -> list[dict[str, Any]]:
    """The rows of a server that an earlier part of the run has measured."""
    found = (row for row in record.earlier if row["kind"] == "item" and row["arm"] == name)
    return [{field: value for field, value in row.items() if field != "kind"} for row in found]


def measure(
    args: argparse.Namespace,
    command: str,
    server: Server,
    record: Record,
    loads: Mapping[str, Drive],
    least: int,
) -> list[dict[str, Any]]:
    """Start a server and run every load on it that the record lacks; the first one that it does not serve ends it.

    Args:
        args: the command line: ``out`` and ``start_timeout``.
        command: the name of the benchmark.
        server: which.
        record: the file, whose ``item`` rows have the names of loads as ``id``.
        loads: by name, what asks for each.
        least: tokens of the longest request.

    Returns:
        The rows, earlier ones included.

    Raises:
        EvaluationError: it does not start, or is not what it should be.
    """
    name = server.name
    rows = measured_before(record, name)
    todo = {load: drive for load, drive in loads.items() if load not in {row["id"] for row in rows}}
    if not todo:
        return rows
    log = args.out.with_suffix(f".{name}.log")
    with ExitStack() as stack:
        process = ServerProcess(
            server.folder, *server.flags, log_path=log, timeout=args.start_timeout, env=server.environment
        )
        try:
            stack.enter_context(process)
        except (RuntimeError, TimeoutError) as error:
            raise EvaluationError(f"the {name} server did not start, see {log}") from error
        live = stack.enter_context(LiveServer(process.url))
        expect = "auto" if is_sparse(server.flags) else "dense"
        asked = argparse.Namespace(expect=expect, model=None, tokenizer=None, custom_params={})
        target = reach(asked, live, least)
        if expect != "dense" and not target.arm.counted:
            raise EvaluationError(f"the {name} server runs dense, although its flags ask for a method: {server.flags}")
        line = shlex.join(["python", *process.command[1:]])
        record.add("server", arm=name, facts=target.facts, command=line, start_seconds=process.start_seconds)
        served = {f"served_{field}": target.facts.get(field) for field in SERVED}
        for load, drive in tqdm(todo.items(), desc=name):
            try:
                row = {"id": load, "arm": name} | drive(target, process.url) | served
            except EvaluationError as error:
                record.add("skipped", id=load, arm=name, reason=str(error))
                tqdm.write(f"{command}: {load}: {error}", file=sys.stderr)
                break
            record.add("item", **row)
            rows.append(row)
    return rows
