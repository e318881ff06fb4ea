"""``python -m eval.lab.bench_decode``: time per output token of sparse decode against dense decode on one server.

A batch of prompts of random tokens is prefilled once, so that each arm finds it in the prefix cache. Then, in every
round, one arm after the other streams the same batch: ``dense`` (``sparse: false``), ``dense_short`` (prompts of
``--short`` tokens), ``sparse`` (never rectified) and ``rectified`` (every ``--interval`` tokens).

Time per output token (TPOT) counts in the window in which all requests of the batch decode: from when the last of them
has its first token until the first of them has its last. Of that it takes whole intervals between rectifications, in
every arm. Tokens are counted by ``completion_tokens``, so that chunks that the server merged are not taken for one
token. Times are of this client's clock, in seconds.

``dense_ratio`` is against the fastest dense decode that is known of, and ``dense`` says whose that is. The attention
backend of this server may be slow at this shape, so its dense arm is not enough to judge by. ``--dense-only`` measures
the dense arm alone, on any server of SGLang, also a stock one with another attention backend; ``--peer FILE`` takes
what that wrote as one more dense peer. Two such servers do not fit into one GPU, so a peer's rounds are not these: the
range of a ratio takes the own dense arm round by round, but a peer's median against each round. ``--again FILE`` takes
the rounds of an earlier file of this command in the place of a server's and summarises them beside other peers: where a
peer was measured anew, or later. Header and revision stay those of the measurement; ``again`` in the header says which
file it was, with which peers, and by which revision it was summarised again.

The header says what the server runs on, see `eval.lab.servers.server_facts`.

``bound_ratio`` compares the rectified arm with what it should cost: the sparse arm, and one pass of dense attention
every f tokens. That pass is the dense arm less the short one, which is the attention over the context alone. Peers do
not count here: it is this server that pays for the pass.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from eval.lab.servers.decode_peers import COMMAND, Peer, backend_of, decode_backend, read_peers, summarise
from eval.lab.servers.server_facts import allocated, machine_of
from eval.live.arms import decode_config
from eval.live.client import FAILURES, LiveServer, Stream, generate, request_of, stream
from eval.live.counters import EvaluationError, density, moved, require_dense, require_sparse
from eval.live.gpu_watch import SpeedRecord
from eval.live.record import Record, command_name, git_revision, read_finished
from eval.live.tokens import random_prompts
from eval.serving.measurement import decode_figures

# What the header keeps of the command line.
HEADER = ("shape", "batch", "context", "tokens", "rounds", "interval", "short", "active_ratio", "seed", "label")
HEADER = (*HEADER, "dense_only")
INTERVALS_MEASURED = 8
SHORT = 1024
# All that goes with --again.
AGAIN = ("again", "peer", "out")


@dataclass(frozen=True)
class Arm:
    """One thing to measure.

    Attributes:
        name: "dense", "dense_short", "sparse" or "rectified".
        params: the ``custom_params`` of its requests.
        prompts: token ids of its batch.
        counted: whether the server counts what its sparse methods do.
    """

    name: str
    params: dict[str, Any]
    prompts: list[list[int]]
    counted: bool = True


def kv_tokens(batch: int, context: int, short: int, tokens: int, page_size: int) -> int:
    """Tokens of KV that a server must hold for a batch, its short prompts and the answers to both."""
    # The answers of all arms stay cached while the next round runs, and would push out what is older.
    return batch * (context + short + 2 * page_size + 4 * tokens)


def require_capacity(facts: dict[str, Any], batch: int, context: int, short: int, tokens: int) -> None:
    """Refuse a batch that the server cannot hold together with its cached prompts.

    Raises:
        EvaluationError: says how many tokens of KV are missing.
    """
    needed = kv_tokens(batch, context, short, tokens, facts["page_size"])
    if needed > facts["max_total_num_tokens"]:
        raise EvaluationError(
            f"a batch of {batch} x {context} needs {needed} tokens of KV, the server has "
            f"{facts['max_total_num_tokens']}"
        )
    if facts["disable_radix_cache"]:
        raise EvaluationError("the server has no prefix cache, so its prompts cannot be prefilled beforehand")


def run_arm(
    server: LiveServer, arm: Arm, tokens: int, page_size: int
) -> tuple[list[Stream], dict[str, int], dict[str, Any]]:
    """Stream the batch of an arm once.

    Returns:
        The streams, what the server counted, and what its GPU allocator did; nothing where it does not count.

    Raises:
        EvaluationError: a prompt was not cached, or the counters do not show the arm.
    """
    before = server.counters() if arm.counted else None
    streams = server.each(lambda client, prompt: stream(client, request_of(prompt, tokens, arm.params)), arm.prompts)
    counts, memory = {}, {}
    if before is not None:
        after = server.counters()
        counts, memory = moved(before, after), allocated(before, after)
        require_arm(arm, counts)
    cached = [s.cached_tokens for s in streams]
    if min(cached) < len(arm.prompts[0]) - 2 * page_size:
        raise EvaluationError(f"{arm.name}: of prompts of {len(arm.prompts[0])} tokens {cached} came from the cache")
    return streams, counts, memory


def require_arm(arm: Arm, counts: dict[str, int]) -> None:
    """Refuse counts that do not show the arm.

    Raises:
        EvaluationError: as said.
    """
    if arm.params.get("sparse") is False:
        require_dense(arm.name, counts)
        if counts["sparse_layer_rows"]:
            raise EvaluationError("dense requests went through the sparse kernels: start with dense_fallback: auto")
    else:
        require_sparse(arm.name, counts, rectifying=arm.params["rectify_interval"] > 0)


def make_arms(args: argparse.Namespace, vocabulary: int, counted: bool = True) -> list[Arm]:
    """The arms, in the order of a round.

    Args:
        args: the command line.
        vocabulary: token ids to draw from.
        counted: whether the server has a sparse method; one without it knows no ``sparse: false``.
    """
    prompts = random_prompts(args.batch, args.context, vocabulary, args.seed)
    if args.dense_only:
        return [Arm("dense", {"sparse": False} if counted else {}, prompts, counted)]
    ratio = {} if args.active_ratio is None else {"active_ratio": args.active_ratio}
    arms = [Arm("dense", {"sparse": False}, prompts)]
    if args.short:
        short = random_prompts(args.batch, args.short, vocabulary, args.seed)
        arms.append(Arm("dense_short", {"sparse": False}, short))
    arms.append(Arm("sparse", {"rectify_interval": 0, **ratio}, prompts))
    arms.append(Arm("rectified", {"rectify_interval": args.interval, **ratio}, prompts))
    return arms


def look(args: argparse.Namespace, server: LiveServer) -> dict[str, Any]:
    """Return the facts that the server reports about itself.

    Raises:
        EvaluationError: it is none of SGLang's, decodes dense although more than the dense arm is wanted, or has no
            room.
    """
    facts = server.facts()
    if "page_size" not in facts:
        raise EvaluationError(f"{args.base_url} is no SGLang server (no /server_info)")
    if not args.dense_only:
        decode_config(server)
    require_capacity(facts, args.batch, args.context, args.short, args.tokens)
    return facts | {"decode_backend": server.ask(decode_backend)}


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all arms and write the file.

    Returns:
        The summary, see `summarise`.

    Raises:
        EvaluationError: see the functions that this one calls.
    """
    with LiveServer(args.base_url, args.batch) as server:
        facts = look(args, server)
        header = {**machine_of(args.base_url, facts), "server": facts}
        header |= {name: getattr(args, name) for name in HEADER}
        peers = read_peers(args.peer, header)
        header["peers"] = [peer.file for peer in peers]
        arms = make_arms(args, server.vocabulary_size(args.vocab), facts["sparse"] is not None)
        here = header["server_command"] is not None
        with SpeedRecord(args.out, COMMAND, args.revision, watch=here, **header) as record:
            for arm in (arm for arm in arms if arm.name.startswith("dense")):
                # One by one: beside others a prompt's chunks end elsewhere, and there recurrent states are cached.
                for prompt in tqdm(arm.prompts, desc=f"prefill of {arm.name}"):
                    server.each(generate, [request_of(prompt, 1, arm.params)])
            # What an arm compiles or allocates at its first use is no part of any round.
            for arm in tqdm(arms, desc="warm-up"):
                run_arm(server, arm, 2 * args.interval + 2, facts["page_size"])
            rounds = []
            for number, arm in tqdm([(n, arm) for n in range(args.rounds) for arm in arms], desc="rounds"):
                streams, counts, memory = run_arm(server, arm, args.tokens, facts["page_size"])
                row = {"arm": arm.name, "round": number, **decode_figures(streams, args.interval), **memory}
                row |= {"density": density(counts) if arm.counted else None, "counters": counts}
                record.add("round", shape=args.shape, **row)
                rounds.append(row)
            return add_summary(record, header, rounds, peers)


def again(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Summarise the rounds of an earlier file beside other peers, into another file.

    Returns:
        The summary, see `summarise`.

    Raises:
        EvaluationError: the file is none of a finished run of this command, or has the dense arm alone; or see
            `read_peers`.
    """
    header, *rows = read_finished(args.again)
    if command_name(header.get("command")) != command_name(COMMAND) or header.get("dense_only"):
        raise EvaluationError(f"--again {args.again} is no file of {COMMAND} with a sparse arm")
    peers = read_peers(args.peer, header)
    rounds = [row for row in rows if row["kind"] == "round"]
    header |= {"again": {"file": args.again.name, "peers": header.get("peers", []), "revision": git_revision()}}
    header["peers"] = [peer.file for peer in peers]
    with Record(args.out, **{name: value for name, value in header.items() if name != "kind"}) as record:
        for row in rounds:
            record.add(**row)
        return add_summary(record, header, rounds, peers)


def add_summary(
    record: Record, header: dict[str, Any], rounds: list[dict[str, Any]], peers: list[Peer]
) -> list[dict[str, Any]]:
    """Write the summary of a file's rounds and return it."""
    summary = summarise(rounds, header["interval"], backend_of(header["server"]), peers)
    for row in summary:
        record.add("summary", shape=header["shape"], label=header["label"], **row)
    return summary


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--base-url", help="the server, with nothing else to do")
    source.add_argument("--again", type=Path, metavar="FILE", help="file of this command to summarise beside --peer")
    parser.add_argument("--out", required=True, type=Path, help="JSONL file to write")
    parser.add_argument("--shape", help="name of what is measured, such as 1.7b-4x256k")
    parser.add_argument("--batch", type=int, default=4, help="concurrent requests")
    parser.add_argument("--context", type=int, default=262144, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of a request")
    parser.add_argument("--rounds", type=int, default=3, help="times that each arm is measured")
    parser.add_argument("--interval", type=int, default=32, help="tokens between rectifications")
    parser.add_argument("--short", type=int, help=f"tokens of the short prompts; 0 for none (default: {SHORT})")
    parser.add_argument("--active-ratio", type=float, help="share of the pages (default: the server's)")
    parser.add_argument("--dense-only", action="store_true", help="the dense arm alone, on a server of any kind")
    parser.add_argument(
        "--peer",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="of --dense-only, with the same model, batch and context: one more dense peer; may be given again",
    )
    parser.add_argument("--vocab", type=int, help="token ids to draw from (default: all that the server allows)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--label", help="kept with the figures")
    parser.add_argument("--revision", help="of this code, where its git history is not at hand")
    args = parser.parse_args(arguments)
    if args.again:
        _check_again(parser, args)
    else:
        _check(parser, args)
    return args


def _check_again(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    of_a_run = [name for name in vars(args) if name not in AGAIN and getattr(args, name) != parser.get_default(name)]
    if of_a_run:
        parser.error(f"--{of_a_run[0].replace('_', '-')} is of a measurement: --again takes that of its file")
    if not args.peer:
        parser.error("--again needs --peer")
    if args.out.resolve() == args.again.resolve():
        parser.error(f"--out {args.out} is what --again reads: give another file")


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if not args.shape:
        parser.error("--base-url needs --shape")
    given = [name for name in ("short", "active_ratio", "peer") if getattr(args, name)]
    if args.dense_only and given:
        parser.error(f"--{given[0].replace('_', '-')} is of the arms that --dense-only leaves out")
    if args.short is None:
        args.short = 0 if args.dense_only else SHORT
    for name in ("batch", "context", "rounds", "interval"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.tokens < INTERVALS_MEASURED * args.interval:
        parser.error(f"--tokens must be at least {INTERVALS_MEASURED} times --interval, got {args.tokens}")
    if not 0 <= args.short < args.context:
        parser.error(f"--short must be 0, or more and below --context, got {args.short}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 when its figures would not show what they say."""
    args = parse(arguments)
    try:
        summary = again(args) if args.again else run(args)
    except FAILURES as error:
        print(f"eval.lab.bench_decode: {error}", file=sys.stderr)
        return 1
    print(pd.DataFrame(summary).to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
