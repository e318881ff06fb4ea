r"""``python -m eval.lab.bench_goodput``: requests a second that servers answer in time, under a mixed load.

    python -m eval.lab.bench_goodput --shape qwen3-8b --requests 64 --groups 8 --longest 128k --output-length 1k \
        --rates .25,.5,1 --limits ttft:20000,tpot:40 --server flashinfer="--attention-backend flashinfer" \
        --server resa="--sparse-method resa --sparse-prefill-method anchor" --out goodput.jsonl

A stock server, called ``dense``, and those that ``--server`` names run one after the other on this machine, each with
the KV pool that SGLang gives it. SGLang's own client sends the requests one by one, ``--rates`` a second on average, at
random times, so that prompts are prefilled while answers are decoded. A prompt has a part that it shares with the
others of its group, and its own; the length of each is random, evenly between a 64th of half of ``--longest`` and half
of it, and so is the length of an answer up to ``--output-length``. The same seed gives all servers the same requests
and times.

The goodput is what the client calls so: requests a second whose first token came within ``ttft`` milliseconds and whose
further ones took at most ``tpot`` on average. The summary sets the best goodput of each sparse server beside that of
the best dense one, of all rates. A run that was interrupted goes on with the rates that its file lacks; ``--only``
measures some of the servers, where there is no time for all, and there is no summary until all dense ones are measured.
Requests that ran dense by the server's choice are counted (``dense_rows``), not refused: short ones are a part of the
load.

What sparse prefill leaves out of dummy weights says nothing: ``--structured '{}'`` has all servers attend with
generated inputs, as `eval.lab.bench_serving` does. ``--host-times`` says how long the host is busy in a sparse server's
hooks (`eval.lab.servers.host_times`), since the server began. Seconds everywhere but in the limits.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from eval.lab.servers import model_shapes
from eval.lab.servers.generated_inputs import require_made, served
from eval.lab.servers.goodput import COMMAND, best_rates
from eval.lab.servers.in_turn import add_servers, ask, asked_servers, check_servers, is_sparse, measure, measured_before
from eval.lab.tables.files import measured
from eval.live.client import command_line, list_of, positive
from eval.live.counters import EvaluationError
from eval.live.record import Record, summarised, this_machine
from eval.serving.grid import DENSE
from eval.tasks.judge_commands import Target, client_command
from eval.texts.lengths import length

PLUGIN = Path(__file__).parent / "servers" / "host_times"
HOST_TIMES = "host_times"
# Of KV, behind a request's last token.
ROOM = 128
# The shortest part of a prompt, and the shortest answer, over the longest.
SHORTEST = 1 / 64
METRICS = ("ttft", "tpot", "e2el")
FIGURES = ("duration", "request_throughput", "output_throughput", "cached_tokens", "slo_attainment")
FIGURES += tuple(f"{name}_{statistic}" for name in ("ttft", "tpot") for statistic in ("median", "p99"))


def limits(text: str) -> dict[str, float]:
    """Read limits such as ``ttft:20000,tpot:40``, in milliseconds."""
    found = {name: float(value) for name, _, value in (part.partition(":") for part in text.split(","))}
    if not found or not set(found) <= set(METRICS) or min(found.values()) <= 0:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: {', '.join(METRICS)}, each with milliseconds above 0")
    return found


def internal_states(target: Target) -> list[dict[str, Any]]:
    """What the schedulers of a server say of themselves."""
    return target.arm.server.ask(lambda http: http.get("/server_info").raise_for_status().json())["internal_states"]


def drive(args: argparse.Namespace, name: str, rate: float, scratch: Path, target: Target, url: str) -> dict[str, Any]:
    """Have SGLang's client send the load at a rate.

    Args:
        args: the command line.
        name: of the server.
        rate: requests a second.
        scratch: folder for the client's files.
        target: what the server says of itself.
        url: where it is.

    Raises:
        EvaluationError: the client or a request failed.
    """
    require_made(args.structured, internal_states(target))
    half = str(args.longest // 2)
    prompts = ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", str(args.groups)]
    prompts += ["--gsp-prompts-per-group", str(args.requests // args.groups), "--gsp-range-ratio", str(SHORTEST)]
    prompts += ["--gsp-system-prompt-len", half, "--gsp-question-len", half]
    prompts += ["--gsp-output-len", str(args.output_length), "--num-prompts", str(args.requests)]
    prompts += ["--request-rate", str(rate), "--goodput", *(f"{key}:{value:g}" for key, value in args.limits.items())]
    path = scratch / f"{name}-{rate:g}.jsonl"
    found = ask(client_command(target, url, path, args.seed, *prompts), target, path, args.out.with_suffix(".log"))
    row = {"rate": rate, "requests": len(found.items), "sparse": target.arm.counted}
    row |= {"prompt_tokens": sum(item["prompt_tokens"] for item in found.items)}
    row |= {field: found.summary[field] for field in FIGURES}
    row |= {f"within_{key}": share for key, share in found.summary["slo_attainment_by_metric"].items()}
    row |= {"goodput": found.summary["request_goodput"]} | found.counts()
    return row | ({HOST_TIMES: internal_states(target)[0][HOST_TIMES]} if args.host_times and row["sparse"] else {})


def run(args: argparse.Namespace) -> int:
    """Measure every server and write the file.

    Returns:
        The exit status: 1 where a server has no row, or not all of them.

    Raises:
        EvaluationError: see the functions that this one calls; or nothing can be compared.
    """
    servers = asked_servers(args)
    names = ("shape", "model_path", "requests", "groups", "longest", "output_length", "rates", "limits", "server_args")
    asked = {name: getattr(args, name) for name in (*names, "seed", "structured")} | {"server": dict(args.server)}
    header = {"arguments": asked, "label": args.label, **this_machine()}
    own = ["--context-length", str(args.longest + args.output_length + ROOM)]
    record = Record(args.out, COMMAND, args.revision, resume=not summarised(args.out), **header)
    others = {name for name, _ in args.server} - servers.keys()
    rows = [row for name in others for row in measured_before(record, name)]
    with tempfile.TemporaryDirectory() as name, record:
        folder, inputs, environment = served(args, Path(name))
        own += inputs + shlex.split(args.server_args)
        if args.host_times:
            paths = (str(PLUGIN), environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        for server, flags in servers.items():
            loads = {f"{server}/{rate:g}": partial(drive, args, server, rate, Path(name)) for rate in args.rates}
            rows += measure(args, COMMAND, server, own + flags, folder, record, loads, environment)
        known = [DENSE, *(name for name, flags in args.server if not is_sparse(shlex.split(flags)))]
        if missing := [name for name in known if name not in {row["arm"] for row in rows}]:
            raise EvaluationError(f"no ratio without the dense server {missing[0]}: measure it, too")
        summary = best_rates(rows)
        if not summary:
            raise EvaluationError("nothing was answered in time by a dense and a sparse server: allow more")
        for row in summary:
            record.add("summary", **row)
    return int(len(rows) < (1 + len(args.server)) * len(args.rates))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = command_line(COMMAND, __doc__)
    model_shapes.add_arguments(parser)
    parser.add_argument("--requests", type=positive, default=64, help="of each rate")
    parser.add_argument("--groups", type=positive, default=8, help="that share the first part of their prompts")
    parser.add_argument("--longest", type=length, default="128k", help="tokens of the longest prompt")
    parser.add_argument("--output-length", type=length, default="1k", help="tokens of the longest answer")
    parser.add_argument("--rates", type=list_of(float), default=".25,.5,1", help="requests a second, ascending")
    parser.add_argument("--limits", type=limits, default="ttft:20000,tpot:40", help="in milliseconds, see above")
    parser.add_argument("--structured", type=json.loads, help="inputs to generate: recipe and seed, {} for its own")
    parser.add_argument("--host-times", action="store_true", help="of the hooks of sparse servers, see above")
    add_servers(parser)
    args = parser.parse_args(arguments)
    args.input_length = args.longest
    check_servers(parser, args)
    if min(args.rates) <= 0 or sorted(set(args.rates)) != args.rates:
        parser.error(f"--rates must be ascending numbers above 0, got {args.rates}")
    if args.requests % args.groups:
        parser.error(f"--requests must be a multiple of --groups ({args.groups}), got {args.requests}")
    if not any(is_sparse(shlex.split(flags)) for _, flags in args.server):
        parser.error("--server must name a sparse server: the gain is over the best dense one")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 where something was not measured."""
    return measured(COMMAND, lambda: parse(arguments), run)


if __name__ == "__main__":
    sys.exit(main())
