"""The servers of ``eval.lab.agree_dsa``: what they are started with, what they are asked, and what they must say."""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from eval.lab.agreement.agreement import NATIVE
from eval.lab.agreement.dsa_sets import WATCH, WATCH_REPLAYS
from eval.live.client import LiveServer, generate
from eval.live.counters import EvaluationError, moved, require_sparse
from eval.live.forced import forced_logprobs, forced_request
from eval.live.record import Record, read_rows
from eval.scores.stats import TopTokens, kl, same_best
from launch.server import ServerProcess

ROOT = Path(__file__).parents[3]
WATCHING = ROOT / "eval" / "lab" / "agreement" / "server"
# SGLang prefills short prompts dense with FA3 otherwise, which takes no values of 64 beside queries of 128.
BY_INDEX = {"SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0"}
PAGE = 64
NO_GRAPHS = ("--disable-decode-cuda-graph", "--disable-prefill-cuda-graph")


@dataclass(frozen=True)
class Asked:
    """The questions for both servers.

    Attributes:
        prompts: token ids.
        forced: of each prompt, the tokens that are decoded after it.
        vocabulary: number of token ids.
    """

    prompts: Sequence[list[int]]
    forced: Sequence[list[int]]
    vocabulary: int


def make_asked(args: argparse.Namespace, vocabulary: int) -> Asked:
    """Random tokens; no prompt shares a prefix with another one."""
    rng = random.Random(args.seed)
    # The first ids are those of special tokens, and the last one is not named as it is in log-probabilities.
    drawn = [[rng.randrange(2, vocabulary - 1) for _ in range(args.length + args.tokens)] for _ in range(args.prompts)]
    return Asked([row[: args.length] for row in drawn], [row[args.length :] for row in drawn], vocabulary)


def server_flags(args: argparse.Namespace, implementation: str) -> list[str]:
    """Return the flags that a server is started with, except its model."""
    config = {"implementation": implementation}
    row = -(-(args.length + args.tokens + PAGE) // PAGE) * PAGE
    most = str(args.prompts)
    flags = ["--sparse-method", "dsa", "--sparse-config", json.dumps(config), "--page-size", str(PAGE)]
    flags += ["--context-length", str(row + PAGE), "--max-total-tokens", str((args.prompts + 1) * row)]
    flags += ["--max-running-requests", most, "--chunked-prefill-size", str(args.chunk)]
    flags += ["--cuda-graph-max-bs-decode", most, "--mem-fraction-static", "0.5"]
    return flags + shlex.split(args.server_args)


def ask(server: LiveServer, asked: Asked, label: str) -> list[list[TopTokens]]:
    """The distributions of the next token, ``[prompts][tokens]``, of the whole vocabulary.

    Raises:
        EvaluationError: a request failed, was not forced, or has fewer tokens than the vocabulary.
    """

    async def work(client: httpx.AsyncClient, i: int) -> list[TopTokens]:
        request = forced_request(asked.prompts[i], asked.forced[i], {})
        answer = await generate(client, {**request, "top_logprobs_num": asked.vocabulary})
        forced_logprobs(answer, asked.forced[i])
        found = answer["meta_info"].get("output_top_logprobs") or []
        if [len(tokens) for tokens in found] != [asked.vocabulary] * len(asked.forced[i]):
            raise EvaluationError("the server left out log-probabilities of some tokens")
        return found

    before = server.counters()
    answers = server.each(work, range(len(asked.prompts)), label)
    counts = moved(before, server.counters())
    require_sparse(label, counts, rectifying=False)
    return answers


def distributions(
    arm: str, other: Sequence[Sequence[TopTokens]], against: str, native: Sequence[Sequence[TopTokens]]
) -> list[dict[str, Any]]:
    """A row for each prompt: KL(native, other) in nats at each position, and how often the best token is the same."""
    rows = []
    for i, (ones, others) in enumerate(zip(native, other, strict=True)):
        pairs = list(zip(ones, others, strict=True))
        found = [round(kl(*pair), 9) for pair in pairs]
        row = {"kind": "distribution", "arm": arm, "against": against, "prompt": i, "kl": found}
        best = fmean(same_best(*pair) for pair in pairs)
        rows.append(row | {"kl_mean": fmean(found), "kl_max": max(found), "same_best": best})
    return rows


def serve(
    stack: ExitStack,
    args: argparse.Namespace,
    arm: str,
    implementation: str,
    folder: Path,
    record: Record,
    more: Mapping[str, str],
) -> tuple[ServerProcess, LiveServer]:
    """Start a server that ends with `stack`, and prove that it runs as it was asked to.

    Args:
        stack: of what ends together.
        args: the command line.
        arm: name of the server.
        implementation: see DSA's config.
        folder: of the model.
        record: the result file.
        more: variables of its environment, for ``eval/lab/agreement/server``; with a file to write it has no CUDA
        graphs.

    Raises:
        EvaluationError: it does not start, or runs something else.
    """
    flags, log = server_flags(args, implementation), args.out.with_suffix(f".{arm}.log")
    env = {**BY_INDEX, **more}
    if more:
        paths = [str(WATCHING), str(ROOT), os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if WATCH in more:
        flags += NO_GRAPHS
    process = ServerProcess(folder, *flags, log_path=log, timeout=args.start_timeout, env=env)
    try:
        stack.enter_context(process)
    except (RuntimeError, TimeoutError) as error:
        raise EvaluationError(f"the {arm} server did not start, see {log}: {error}") from error
    server = stack.enter_context(LiveServer(process.url, args.concurrency))
    facts = server.facts()
    runs = ((facts["sparse"] or {}).get("config") or {}).get("implementation")
    if runs != implementation:
        raise EvaluationError(f"the {arm} server runs {runs}, asked for was {implementation}")
    line = shlex.join(["python", *process.command[1:]])
    record.add("server", arm=arm, facts=facts, command=line, start_seconds=process.start_seconds)
    return process, server


def watched_answers(
    args: argparse.Namespace, asked: Asked, implementation: str, folder: Path, record: Record, watch: Path
) -> tuple[list[dict[str, Any]], list[list[TopTokens]], list[list[TopTokens]]]:
    """Run the native server, ask it twice, and return the rows on its selections and both sets of answers.

    Raises:
        EvaluationError: see `serve`, `ask` and `watched`.
    """
    more = {WATCH: str(watch), WATCH_REPLAYS: str(args.replays)}
    with ExitStack() as stack:
        process, server = serve(stack, args, NATIVE, implementation, folder, record, more)
        native = ask(server, asked, NATIVE)
        rows = watched(watch, args.layers)
        process.flush_cache()
        return rows, native, ask(server, asked, f"{NATIVE}, again")


def watched(path: Path, layers: int) -> list[dict[str, Any]]:
    """Return the rows that a server wrote on its selections.

    Raises:
        EvaluationError: a layer or a phase has no row, or two selections cannot be compared.
    """
    rows = read_rows(path) if path.exists() else []
    if wrong := [row for row in rows if row["kind"] == "wrong"]:
        place = f"{wrong[0]['phase']}, layer {wrong[0]['layer']}"
        raise EvaluationError(f"{len(wrong)} selections cannot be compared, the first ({place}): {wrong[0]['reason']}")
    seen = {(row["layer"], row["phase"]) for row in rows}
    if missing := [(i, phase) for i in range(layers) for phase in ("prefill", "decode") if (i, phase) not in seen]:
        raise EvaluationError(f"nothing was said of the selections of {missing}: see the log of the native server")
    return rows
