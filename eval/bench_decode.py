"""``python -m eval.bench_decode``: time per output token of sparse decode against dense decode on one server.

A batch of prompts of random tokens is prefilled once, so that each arm finds it in the prefix cache. Then, in every
round, one arm after the other streams the same batch: ``dense`` (``sparse: false``), ``dense_short`` (prompts of
``--short`` tokens), ``sparse`` (never rectified) and ``rectified`` (every ``--interval`` tokens).

Time per output token (TPOT) counts in the window in which all requests of the batch decode: from when the last of them
has its first token until the first of them has its last. Of that it takes whole intervals between rectifications, in
every arm. Tokens are counted by ``completion_tokens``, so that chunks that the server merged are not taken for one
token. Times are of this client's clock, in seconds.

``bound_ratio`` compares the rectified arm with what it should cost: the sparse arm, and one pass of dense attention
every f tokens. That pass is the dense arm less the short one, which is the attention over the context alone.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from eval.figures.tpot import decode_figures, summarise
from eval.live.arms import decode_config
from eval.live.client import FAILURES, LiveServer, Stream, generate, stream
from eval.live.counters import EvaluationError, density, moved, require_dense, require_sparse
from eval.live.record import Record

INTERVALS_MEASURED = 8


@dataclass(frozen=True)
class Arm:
    """One thing to measure.

    Attributes:
        name: "dense", "dense_short", "sparse" or "rectified".
        params: the ``custom_params`` of its requests.
        prompts: token ids of its batch.
    """

    name: str
    params: dict[str, Any]
    prompts: list[list[int]]


def random_prompts(batch: int, context: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens, no two of which begin with the same one.

    Raises:
        EvaluationError: the vocabulary is smaller than the batch.
    """
    if vocabulary < batch:
        raise EvaluationError(f"a batch of {batch} needs as many first tokens, the vocabulary has {vocabulary}")
    rng = np.random.default_rng((seed, context))
    ids = rng.integers(vocabulary, size=(batch, context))
    ids[:, 0] = rng.choice(vocabulary, size=batch, replace=False)
    return ids.tolist()


def require_capacity(facts: dict[str, Any], batch: int, context: int, short: int, tokens: int) -> None:
    """Refuse a batch that the server cannot hold together with its cached prompts.

    Raises:
        EvaluationError: says how many tokens of KV are missing.
    """
    # The answers of all arms stay cached while the next round runs, and would push out what is older.
    needed = batch * (context + short + 2 * facts["page_size"] + 4 * tokens)
    if needed > facts["max_total_num_tokens"]:
        raise EvaluationError(
            f"a batch of {batch} x {context} needs {needed} tokens of KV, the server has "
            f"{facts['max_total_num_tokens']}"
        )
    if facts["disable_radix_cache"]:
        raise EvaluationError("the server has no prefix cache, so its prompts cannot be prefilled beforehand")


def request_of(prompt: list[int], tokens: int, params: dict[str, Any]) -> dict[str, Any]:
    """Body of a request for exactly `tokens` greedy tokens."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "custom_params": params}
    return {"input_ids": prompt, "sampling_params": sampling}


def run_arm(server: LiveServer, arm: Arm, tokens: int, page_size: int) -> tuple[list[Stream], dict[str, int]]:
    """Stream the batch of an arm once.

    Returns:
        The streams, and what the server counted.

    Raises:
        EvaluationError: a prompt was not cached, or the counters do not show the arm.
    """
    before = server.counters()
    streams = server.each(lambda client, prompt: stream(client, request_of(prompt, tokens, arm.params)), arm.prompts)
    counts = moved(before, server.counters())
    if arm.params.get("sparse") is False:
        require_dense(arm.name, counts)
        if counts["sparse_layer_rows"]:
            raise EvaluationError("dense requests went through the sparse kernels: start with dense_fallback: auto")
    else:
        require_sparse(arm.name, counts, rectifying=arm.params["rectify_interval"] > 0)
    cached = [s.cached_tokens for s in streams]
    if min(cached) < len(arm.prompts[0]) - 2 * page_size:
        raise EvaluationError(f"{arm.name}: of prompts of {len(arm.prompts[0])} tokens {cached} came from the cache")
    return streams, counts


def make_arms(args: argparse.Namespace, vocabulary: int) -> list[Arm]:
    """The arms, in the order of a round."""
    prompts = random_prompts(args.batch, args.context, vocabulary, args.seed)
    ratio = {} if args.active_ratio is None else {"active_ratio": args.active_ratio}
    arms = [Arm("dense", {"sparse": False}, prompts)]
    if args.short:
        short = random_prompts(args.batch, args.short, vocabulary, args.seed)
        arms.append(Arm("dense_short", {"sparse": False}, short))
    arms.append(Arm("sparse", {"rectify_interval": 0, **ratio}, prompts))
    arms.append(Arm("rectified", {"rectify_interval": args.interval, **ratio}, prompts))
    return arms


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all arms and write the file.

    Returns:
        The summary, see `summarise`.

    Raises:
        EvaluationError: see the functions that this one calls.
    """
    with LiveServer(args.base_url, args.batch) as server:
        decode_config(server)
        facts = server.facts()
        require_capacity(facts, args.batch, args.context, args.short, args.tokens)
        arms = make_arms(args, server.vocabulary_size(args.vocab))
        names = ("shape", "batch", "context", "tokens", "rounds", "interval", "short", "active_ratio", "seed", "label")
        with Record(
            args.out, "eval.bench_decode", args.revision, server=facts, **{n: getattr(args, n) for n in names}
        ) as record:
            for arm in (arm for arm in arms if arm.name.startswith("dense")):
                fill = [request_of(prompt, 1, arm.params) for prompt in arm.prompts]
                server.each(generate, fill, f"prefill of {arm.name}")
            # What an arm compiles or allocates at its first use is no part of any round.
            for arm in tqdm(arms, desc="warm-up"):
                run_arm(server, arm, 2 * args.interval + 2, facts["page_size"])
            rounds = []
            for number, arm in tqdm([(n, arm) for n in range(args.rounds) for arm in arms], desc="rounds"):
                streams, counts = run_arm(server, arm, args.tokens, facts["page_size"])
                row = {"arm": arm.name, "round": number, **decode_figures(streams, args.interval)}
                row |= {"density": density(counts), "counters": counts}
                record.add("round", shape=args.shape, **row)
                rounds.append(row)
            summary = summarise(rounds, args.interval)
            for row in summary:
                record.add("summary", shape=args.shape, label=args.label, **row)
    return summary


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="eval.bench_decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", required=True, help="the sparse server, with nothing else to do")
    parser.add_argument("--out", required=True, type=Path, help="JSONL file to write")
    parser.add_argument("--shape", required=True, help="name of what is measured, such as 1.7b-4x256k")
    parser.add_argument("--batch", type=int, default=4, help="concurrent requests")
    parser.add_argument("--context", type=int, default=262144, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of a request")
    parser.add_argument("--rounds", type=int, default=3, help="times that each arm is measured")
    parser.add_argument("--interval", type=int, default=32, help="tokens between rectifications")
    parser.add_argument("--short", type=int, default=1024, help="tokens of the short prompts; 0 for none")
    parser.add_argument("--active-ratio", type=float, help="share of the pages (default: the server's)")
    parser.add_argument("--vocab", type=int, help="token ids to draw from (default: all that the server allows)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--label", help="kept with the figures")
    parser.add_argument("--revision", help="of this code, where its git history is not at hand")
    args = parser.parse_args(arguments)
    for name in ("batch", "context", "rounds", "interval"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.tokens < INTERVALS_MEASURED * args.interval:
        parser.error(f"--tokens must be at least {INTERVALS_MEASURED} times --interval, got {args.tokens}")
    if not 0 <= args.short < args.context:
        parser.error(f"--short must be 0, or more and below --context, got {args.short}")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 when its figures would not show what they say."""
    args = parse(arguments)
    try:
        summary = run(args)
    except FAILURES as error:
        print(f"eval.bench_decode: {error}", file=sys.stderr)
        return 1
    print(pd.DataFrame(summary).to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
