r"""``python -m eval.lab.bench_goodput``: requests a second that servers answer in time, under a mixed load.

    python -m eval.lab.bench_goodput --shape qwen3-8b --requests 64 --groups 8 --longest 128k --output-length 1k \
        --rates .25,.5,1 --limits ttft:20000,tpot:40 --server flashinfer="--attention-backend flashinfer" \
        --server resa="--sparse-method resa --sparse-prefill-method anchor" --out goodput.jsonl

A stock server, called ``dense``, and those that ``--server`` names run one after the other on this machine, each with
the KV pool that SGLang gives it. SGLang's own client sends the requests one by one, ``--rates`` a second on average, at
random times, so that prompts are prefilled while answers are decoded. A prompt has a part that it shares with the
others of its group, and its own; each has a random length from a 128th of ``--longest`` tokens to half of it, and an
answer one from a 64th of ``--output-length`` to all of it. The same seed gives all servers the same requests and times.

A request is in time if its first token came within ``ttft`` milliseconds and its further ones took at most ``tpot`` on
average. The goodput of a rate is that rate times the share of its requests in time: unlike the client's own figure,
which divides by the whole run, it does not count the seconds in which the last answers end. The summary sets the best
goodput of each sparse server beside that of the best dense one, of all rates, once every server has every rate: a run
that was interrupted, or measured some of the servers by ``--only``, goes on with what its file lacks. ``--rates-of``
gives a server rates of its own: a dense one is at its best at lower ones. If that is its highest, it may do more, and
there is no ratio. Requests that ran dense by the server's choice are counted (``dense_rows``), not refused: short ones
are a part of the load.

Attention of dummy weights is flat, so ``--structured '{}'`` has all servers attend with generated inputs, as
`eval.lab.bench_serving` does. ``--host-times`` says how long the host is busy in a sparse server's hooks
(`eval.lab.servers.host_times`). Rows have seconds; the limits are in milliseconds.
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
from eval.lab.servers.in_turn import (
    Server,
    add_servers,
    add_steps,
    asked_servers,
    check_servers,
    check_steps,
    is_sparse,
    loads_of,
    measure,
    missing_loads,
    open_file,
    run_load,
)
from eval.lab.structured.generator import read_recipe
from eval.lab.structured.prefill import ATTEND, read_given
from eval.lab.tables.files import measured
from eval.live.client import command_line, positive
from eval.live.counters import EvaluationError
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


def read_limits(text: str) -> dict[str, float]:
    """Read limits such as ``ttft:20000,tpot:40``, in milliseconds."""
    found = {name: float(value) for name, _, value in (part.partition(":") for part in text.split(","))}
    if not set(found) <= set(METRICS) or min(found.values()) <= 0:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: {', '.join(METRICS)}, each with milliseconds above 0")
    return found


def drive(args: argparse.Namespace, scratch: Path, name: str, rate: float, target: Target, url: str) -> dict[str, Any]:
    """Have SGLang's client send the load at a rate, and return the row.

    Args:
        args: the command line.
        name: of the server.
        rate: requests a second.
        scratch: folder for the client's files.
        target: what the server says of itself.
        url: where it is.

    Raises:
        EvaluationError: the client or a request failed, or a plugin of the server was not loaded.
    """
    states = target.arm.server.info()["internal_states"]
    require_made(args.structured, states)
    timed = args.host_times and target.arm.counted
    if timed and HOST_TIMES not in states[0]:
        raise EvaluationError("--host-times: the server does not say them, see its log")
    half = str(args.longest // 2)
    prompts = ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", str(args.groups)]
    prompts += ["--gsp-prompts-per-group", str(args.requests // args.groups), "--gsp-range-ratio", str(SHORTEST)]
    prompts += ["--gsp-system-prompt-len", half, "--gsp-question-len", half]
    prompts += ["--gsp-output-len", str(args.output_length), "--num-prompts", str(args.requests)]
    prompts += ["--request-rate", str(rate), "--goodput", *(f"{key}:{value:g}" for key, value in args.limits.items())]
    path = scratch / f"{name}-{rate:g}.jsonl"
    found = run_load(client_command(target, url, path, args.seed, *prompts), target, path, args.out.with_suffix(".log"))
    row = {"rate": rate, "requests": len(found.items), "sparse": target.arm.counted}
    row |= {"prompt_tokens": sum(item["prompt_tokens"] for item in found.items)}
    row |= {field: found.summary[field] for field in FIGURES}
    row |= {f"within_{key}": share for key, share in found.summary["slo_attainment_by_metric"].items()}
    row |= {"goodput": rate * row["slo_attainment"]} | found.counts()
    return row | ({HOST_TIMES: target.arm.server.info()["internal_states"][0][HOST_TIMES]} if timed else {})


def run(args: argparse.Namespace) -> int:
    """Measure every server and write the file.

    Returns:
        The exit status.

    Raises:
        EvaluationError: see the functions that this one calls; or a load was not measured.
    """
    servers = asked_servers(args)
    names = ("shape", "model_path", "requests", "groups", "longest", "output_length", "rates", "limits", "server_args")
    names += ("seed", "structured", "host_times")
    asked = {name: getattr(args, name) for name in names}
    asked |= {"server": dict(args.server), "rates_of": dict(args.rates_of)}
    own = ["--context-length", str(args.longest + args.output_length + ROOM)]
    record, rows = open_file(args, COMMAND, asked)
    with tempfile.TemporaryDirectory() as name, record:
        folder, inputs, environment = served(args, Path(name))
        own += inputs + shlex.split(args.server_args)
        paths = (str(PLUGIN), environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH"))
        timed = {"PYTHONPATH": os.pathsep.join(filter(None, paths))} if args.host_times else {}
        for server, flags in servers.items():
            loads = loads_of(args, "rates", server, partial(drive, args, Path(name)))
            started = Server(server, folder, own + flags, environment | (timed if is_sparse(flags) else {}))
            rows += measure(args, COMMAND, started, record, loads, args.longest + args.output_length)
        if missing := missing_loads(args, "rates", (DENSE, *dict(args.server)), rows):
            raise EvaluationError(f"no ratio yet, {', '.join(missing)} not measured: run the same command for them")
        for row in best_rates(rows):
            record.add("summary", **row)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = command_line(COMMAND, __doc__)
    model_shapes.add_arguments(parser)
    parser.add_argument("--requests", type=positive, default=64, help="of each rate")
    parser.add_argument("--groups", type=positive, default=8, help="that share the first part of their prompts")
    parser.add_argument("--longest", type=length, default="128k", help="tokens of the longest prompt")
    parser.add_argument("--output-length", type=length, default="1k", help="tokens of the longest answer")
    add_steps(parser, "rates", float, ".25,.5,1", "requests a second")
    parser.add_argument("--limits", type=read_limits, default="ttft:20000,tpot:40", help="in milliseconds, see above")
    parser.add_argument("--structured", type=json.loads, help="inputs to generate: recipe and seed, {} for its own")
    parser.add_argument("--host-times", action="store_true", help="of the hooks of sparse servers, see above")
    add_servers(parser)
    args = parser.parse_args(arguments)
    check_steps(parser, args, "rates", check_servers(parser, args))
    try:
        given = read_given(args.structured or {})
        read_recipe(given["recipe"])
    except ValueError as error:
        parser.error(f"--structured: {error}")
    if given["prefill"] != ATTEND:
        parser.error("--structured: prefill is a part of the load, leave it out")
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
