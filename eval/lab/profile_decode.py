"""``python -m eval.lab.profile_decode``: where the time of one decode step goes, kernel by kernel, in microseconds.

    python -m eval.lab.profile_decode --base-url URL --arm sparse --batch 4 --context 262144 --out after.jsonl

A batch of prompts of random tokens is prefilled, then decoded twice. The first time checks the arm and times it on this
client's clock (``tpot_us``), which shows by how much the profiler slows a step down. The second time, once all requests
decode, SGLang's own profiler (``/start_profile``) traces some steps. Run this on the server's machine, because the
server writes the trace there: beside ``--out``, or into ``--trace-dir``. `eval.lab.servers.profile_trace` says what a
step is and how its time is charged, `eval.lab.servers.profile` which kernels make up which part of it.

Arm ``dense`` asks a sparse server with ``sparse: false``, ``sparse`` never rectifies, so that all steps are alike, and
of ``rectified`` the passes are profiled that encode the last ``--interval`` tokens of all requests again, not the steps
between them: with the attention's rate in TFLOP/s, where the model's config is at hand. Only rank 0 of a
tensor-parallel server is read. The header says what the server runs on, see `eval.lab.servers.server_facts`.
``--from FILE`` prints
the tables of a result file, or of a trace, again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from eval.lab.bench_decode import Arm, random_prompts, request_of, require_capacity, run_arm
from eval.lab.servers import profile
from eval.lab.servers.profile_trace import decode_steps, passes, read_trace
from eval.lab.servers.server_facts import machine_of
from eval.live.client import FAILURES, LiveServer, generate, stream
from eval.live.counters import EvaluationError, density
from eval.live.record import Record
from eval.serving.measurement import decode_figures

# Steps traced beyond those that count: the first ones may wait for the profiler, and the last one has no end.
SPARE_STEPS = 4
ARGUMENTS = ("arm", "batch", "context", "tokens", "steps", "interval", "active_ratio", "seed", "label")
ARMS = ("dense", "sparse", "rectified")
# Steps, or passes, that count.
STEPS = {"dense": 16, "sparse": 16, "rectified": 2}


def require_profiler(facts: dict[str, Any], url: str) -> None:
    """Refuse servers without a GPU to trace, before they are asked: SGLang's scheduler may end on such a question.

    Raises:
        EvaluationError: the server is none of SGLang's, or runs on another device.
    """
    if "device" not in facts:
        raise EvaluationError(f"{url} is no SGLang server (no /server_info): its steps cannot be profiled")
    if facts["device"] != "cuda":
        raise EvaluationError(f"{url} runs on {facts['device']}: only CUDA servers have GPU kernels to trace")


def make_arm(args: argparse.Namespace, facts: dict[str, Any], vocabulary: int) -> Arm:
    """Make the arm to profile.

    Raises:
        EvaluationError: another arm than dense on a dense server.
    """
    serves_sparse = facts["sparse"] is not None
    params: dict[str, Any] = {"sparse": False} if serves_sparse else {}
    if args.arm != "dense":
        if not serves_sparse:
            raise EvaluationError(f"{args.base_url} runs no sparse method: it has --arm dense alone")
        params = {"rectify_interval": args.interval if args.arm == "rectified" else 0}
        params |= {} if args.active_ratio is None else {"active_ratio": args.active_ratio}
    return Arm(args.arm, params, random_prompts(args.batch, args.context, vocabulary, args.seed))


def decode_untraced(server: LiveServer, arm: Arm, tokens: int, facts: dict[str, Any]) -> dict[str, Any]:
    """Decode the batch without the profiler, and check that it runs as the arm says.

    Returns:
        ``tpot_us``, microseconds a token on this client's clock, and ``density`` of a sparse server.

    Raises:
        EvaluationError: as `run_arm` and `decode_figures`.
    """
    if facts["sparse"] is not None:
        streams, counts, _ = run_arm(server, arm, tokens, facts["page_size"])
        read = {"density": density(counts)}
    else:
        requests = [request_of(prompt, tokens, arm.params) for prompt in arm.prompts]
        streams, read = server.each(stream, requests), {}
    return {"tpot_us": decode_figures(streams)["tpot_mean"] * 1e6, **read}


async def start_profiler(client: httpx.AsyncClient, order: dict[str, Any], begun: Sequence[asyncio.Event]) -> None:
    """Ask for the trace once all requests decode.

    Raises:
        EvaluationError: the server does not profile, or does so already.
    """
    for event in begun:
        await event.wait()
    answer = await client.post("/start_profile", json=order)
    if answer.is_error:
        raise EvaluationError(f"the server does not profile: /start_profile answers {answer.status_code} {answer.text}")


def traced(server: LiveServer, requests: Sequence[dict[str, Any]], steps: int, folder: Path, prefix: str) -> Path:
    """Decode a batch and have some of its steps traced.

    Args:
        server: one more connection than there are requests.
        requests: of the batch.
        steps: that the profiler sees.
        folder: absolute, where the server writes the trace.
        prefix: of the trace's file name.

    Returns:
        The trace of rank 0.

    Raises:
        EvaluationError: see `stream` and `start_profiler`, or the trace is not there.
    """
    identity = str(time.time_ns())
    order = {"output_dir": str(folder), "profile_prefix": prefix, "profile_id": identity, "num_steps": steps}
    order |= {"activities": ["GPU"], "with_stack": False, "record_shapes": False}
    begun = [asyncio.Event() for _ in requests]

    async def work(client: httpx.AsyncClient, number: int) -> None:
        if number < len(requests):
            await stream(client, requests[number], begun[number].set)
        else:
            await start_profiler(client, order, begun)

    def written() -> list[Path]:
        # The scheduler writes the trace between two steps, so it is whole before the last token comes.
        return sorted(folder.glob(f"*{identity}-TP-0*.trace.json.gz"))

    try:
        server.each(work, range(len(requests) + 1))
    finally:
        if not written():
            # After fewer steps than asked for the profiler would go on with those of later requests. Refused where off.
            server.ask(lambda client: client.post("/stop_profile"))
    if not written():
        raise EvaluationError(
            f"there is no trace in {folder}: the server writes it on its own machine, so this command must run there "
            "and see the same folders; see --trace-dir, and the server's log"
        )
    return written()[0]


def steps_traced(args: argparse.Namespace) -> int:
    """Decode steps that the profiler is to see."""
    return args.steps * (args.interval if args.arm == "rectified" else 1) + SPARE_STEPS


def pass_flops(args: argparse.Namespace, model_path: str) -> float | None:
    """Floating-point operations of the attention of a pass over all requests; None where the model is not at hand."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    heads = config["num_attention_heads"]
    width = heads * config.get("head_dim", config["hidden_size"] // heads)
    # The output grows by less than a hundredth of the context.
    pairs = args.batch * args.interval * (args.context + args.tokens / 2)
    return 4.0 * pairs * width * config["num_hidden_layers"]


def summarised(trace: Path, arm: str, steps: int) -> tuple[list[Any], list[Any]]:
    """The rows by kernel of the last ``steps`` steps, or passes, of a trace, and those by part of one.

    Raises:
        EvaluationError: see `read_trace`, `decode_steps` and `passes`.
    """
    read = passes if arm == "rectified" else decode_steps
    return profile.summarise(read(read_trace(trace), steps))


def add_rows(
    record: Record, path: Path, args: argparse.Namespace, flops: float | None = None, **measured: Any
) -> tuple[list[Any], list[Any]]:
    """Write the figures of a trace.

    Returns:
        The rows by kernel, and those by part of a step or of a pass.

    Raises:
        EvaluationError: see `summarised`.
    """
    kernels, parts = summarised(path, args.arm, args.steps)
    for row in parts:
        if flops is not None and row["part"] == "attention":
            row["tflops"] = flops / row["us"] / 1e6
    for row in kernels:
        record.add("item", arm=args.arm, **row)
    for row in parts:
        record.add("summary", arm=args.arm, **row, **(measured if row["part"] == "step" else {}))
    return kernels, parts


def run(args: argparse.Namespace) -> str:
    """Profile a server and write the file.

    Returns:
        The tables.

    Raises:
        EvaluationError: see the functions that this one calls.
    """
    folder = (args.trace_dir or args.out.parent).resolve()
    with LiveServer(args.base_url, args.batch + 1) as server:
        facts = server.facts()
        require_profiler(facts, args.base_url)
        require_capacity(facts, args.batch, args.context, 0, args.tokens)
        arm = make_arm(args, facts, server.vocabulary_size(args.vocab))
        asked = {name: getattr(args, name) for name in ARGUMENTS}
        header = {**machine_of(args.base_url, facts), "server": facts, "arguments": asked}
        with Record(args.out, "eval.lab.profile_decode", args.revision, **header) as record:
            server.each(generate, [request_of(prompt, 1, arm.params) for prompt in arm.prompts], "prefill")
            measured = decode_untraced(server, arm, args.tokens, facts)
            requests = [request_of(prompt, args.tokens, arm.params) for prompt in arm.prompts]
            trace = traced(server, requests, steps_traced(args), folder, args.out.name.split(".")[0])
            print(f"trace: {trace}", file=sys.stderr)
            flops = pass_flops(args, facts["model_path"]) if args.arm == "rectified" else None
            kernels, parts = add_rows(record, trace, args, flops, trace=trace.name, **measured)
    return profile.tables(kernels, parts)


def again(path: Path, arm: str, steps: int) -> str:
    """The tables of a result file or of a trace.

    Raises:
        EvaluationError: it is neither.
    """
    if path.name.endswith((".json", ".json.gz")):
        return profile.tables(*summarised(path, arm, steps))
    return profile.profile(path)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="eval.lab.profile_decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--base-url", help="the server, on this machine, with nothing else to do")
    source.add_argument("--from", dest="source", type=Path, help="result file or trace to print again")
    parser.add_argument("--out", type=Path, help="JSONL file to write")
    parser.add_argument("--arm", choices=ARMS, default="dense", help="how the server decodes, see above")
    parser.add_argument("--batch", type=int, default=1, help="concurrent requests")
    parser.add_argument("--context", type=int, default=131072, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, help=f"decode steps that count, or passes (default: {STEPS})")
    parser.add_argument("--interval", type=int, default=32, help="of --arm rectified: tokens between passes")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of a request")
    parser.add_argument("--active-ratio", type=float, help="share of the pages (default: the server's)")
    parser.add_argument("--trace-dir", type=Path, help="folder for the trace (default: that of --out)")
    parser.add_argument("--vocab", type=int, help="token ids to draw from (default: all that the server allows)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--label", help="kept with the figures")
    parser.add_argument("--revision", help="of this code, where its git history is not at hand")
    args = parser.parse_args(arguments)
    if args.steps is None:
        args.steps = STEPS[args.arm]
    for name in ("batch", "context", "steps", "interval"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.base_url and not args.out:
        parser.error("--base-url needs --out")
    # Of passes whole intervals are traced, so that less is left over at both ends.
    if args.tokens < (most := (2 if args.arm == "rectified" else 4) * steps_traced(args)):
        parser.error(f"--tokens must be at least {most} for {steps_traced(args)} traced steps, got {args.tokens}")
    if args.arm == "dense" and args.active_ratio is not None:
        parser.error("--active-ratio is of --arm sparse and rectified")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 when there is no profile."""
    args = parse(arguments)
    try:
        print(again(args.source, args.arm, args.steps) if args.source else run(args))
    except FAILURES as error:
        print(f"eval.lab.profile_decode: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
