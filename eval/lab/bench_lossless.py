"""``python -m eval.lab.bench_lossless``: what lossless decoding costs and gains, on one server with SPARSE_SELF.

For each text and share of pages, the same prompts are continued greedily by a dense arm (``sparse: false``, which
drafts nothing) and by the lossless one, ``--batch`` at a time, streamed. Both should give the same tokens: where they
do not, the row says how near the dense arm's two best tokens were at the first difference (``gaps``, in nats), which is
0 or a few steps of bfloat16. It has the acceptance (of the drafts that were judged, those that were right) and the time
per token.

Texts: ``book`` (the shipped novel), ``code`` (this repository's own Python), ``reasoning`` (worked steps of arithmetic)
and ``random`` (token ids, for models without weights, where SGLang's ``SGLANG_SIMULATE_ACC_LEN`` in the server's
environment says what is accepted, ``--simulated`` says so in the file, and tokens are not compared).

The dense arm runs on the same server; ``--dense-file`` takes a file of ``eval.lab.bench_decode --dense-only`` with
another attention backend as one more dense peer, and ratios are against the fastest.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from eval.lab.servers.decode_peers import Peer, against, decode_backend, read_peers, strongest
from eval.lab.servers.server_facts import machine_of
from eval.live.client import LiveServer, Stream, command_line, generate, list_of, positive, request_of, shown, stream
from eval.live.counters import DRAFTS_COUNTED, EvaluationError, moved
from eval.live.gpu_watch import SpeedRecord
from eval.live.tokens import random_prompts
from eval.serving.measurement import decode_figures
from eval.texts.lengths import length
from eval.texts.text import read_book
from eval.texts.windows import BOOK

COMMAND = "eval.lab.bench_lossless"
HEADER = ("shape", "batch", "context", "tokens", "n", "texts", "ratios", "simulated", "seed", "label")
DENSE = {"sparse": False}
SOURCES = Path(__file__).parents[2]


def reasoning(seed: int) -> Iterator[str]:
    """Yield problems of arithmetic, each with its steps written out."""
    rng = random.Random(seed)
    for number in count(1):
        a, b, c = (rng.randrange(12, 98) for _ in range(3))
        yield (
            f"Problem {number}: A shop has {a} boxes of {b} pens and sells {c} pens. How many pens are left?\n"
            f"Step 1: {a} boxes of {b} pens are {a} * {b}. {a} * {b // 10 * 10} = {a * (b // 10 * 10)} and "
            f"{a} * {b % 10} = {a * (b % 10)}, together {a * b}.\n"
            f"Step 2: {a * b} - {c} = {a * b - c}.\nSo the answer is {a * b - c}.\n\n"
        )


def text_of(kind: str, seed: int) -> str:
    """The text of a kind, as long as there is."""
    if kind == "book":
        return read_book(BOOK)
    if kind == "code":
        return "\n\n".join(path.read_text() for path in sorted((SOURCES / "sglang_sparse").rglob("*.py")))
    return "".join(islice(reasoning(seed), 4000))


def make_prompts(args: argparse.Namespace, server: LiveServer, kind: str) -> list[list[int]]:
    """Prompts of ``--context`` tokens: stretches of a text, evenly spread.

    Raises:
        EvaluationError: the text is too short for one.
    """
    if kind == "random":
        return random_prompts(args.n, args.context, server.vocabulary_size(), args.seed)
    ids = server.tokenize(text_of(kind, args.seed))
    if len(ids) < args.context + args.n:
        raise EvaluationError(f"the text {kind} has {len(ids)} tokens, --context asks for {args.context}")
    step = (len(ids) - args.context) // args.n
    return [ids[i * step : i * step + args.context] for i in range(args.n)]


def run_arm(
    args: argparse.Namespace, server: LiveServer, prompts: list[list[int]], params: dict[str, Any]
) -> tuple[list[Stream], dict[str, int]]:
    """Stream all prompts, ``--batch`` at a time, and say what was counted."""
    before = server.counters()
    asked = [request_of(prompt, args.tokens, params) for prompt in prompts]
    streams = server.each(stream, asked)
    return streams, moved(before, server.counters())


def figures(args: argparse.Namespace, streams: list[Stream]) -> float:
    """Seconds per token, the mean over the batches that ran together."""
    groups = [streams[first : first + args.batch] for first in range(0, len(streams), args.batch)]
    return fmean(decode_figures(group)["tpot_mean"] for group in groups)


def differences(
    args: argparse.Namespace, server: LiveServer, prompts: list[list[int]], params: dict[str, Any]
) -> dict[str, Any]:
    """Count the answers equal to the dense ones; at each first difference, list the gap of the best dense tokens."""

    def asked(own: dict[str, Any]) -> list[dict[str, Any]]:
        requests = [request_of(prompt, args.tokens, own) for prompt in prompts]
        return [{**request, "return_logprob": True, "top_logprobs_num": 2} for request in requests]

    dense, lossless = (server.each(generate, asked(own)) for own in (DENSE, params))
    gaps = []
    for one, other in zip(dense, lossless, strict=True):
        pairs = zip(one["output_ids"], other["output_ids"], strict=True)
        place = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if place is not None:
            best, second = one["meta_info"]["output_top_logprobs"][place][:2]
            gaps.append(best[0] - second[0])
    return {"equal": len(prompts) - len(gaps), "gaps": gaps}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every text and share, and write the file.

    Raises:
        EvaluationError: the server does not draft, or a figure would not show what it says.
    """
    with LiveServer(args.base_url, args.batch, timeout=900) as server:
        facts = server.facts()
        if "drafted_tokens" not in server.sparse_state():
            raise EvaluationError("the server drafts nothing: start it with --speculative-algorithm SPARSE_SELF")
        header = {**machine_of(args.base_url, facts), "server": facts | {"decode_backend": server.ask(decode_backend)}}
        header |= {name: getattr(args, name) for name in HEADER}
        peers = read_peers(args.dense_file, header)
        header["peers"] = [peer.file for peer in peers]
        rows = []
        here = header["server_command"] is not None
        with SpeedRecord(args.out, COMMAND, args.revision, watch=here, **header) as record:
            for kind in args.texts:
                prompts = make_prompts(args, server, kind)
                server.each(generate, [request_of(prompt, 1, DENSE) for prompt in prompts], f"prefill of {kind}")
                run_arm(args, server, prompts[: args.batch], DENSE)
                for ratio in tqdm(args.ratios, desc=kind):
                    rows.append(cell(args, server, kind, prompts, ratio, header["server"]["decode_backend"], peers))
                    record.add("cell", shape=args.shape, **rows[-1])
                    rows[-1] = {name: value for name, value in rows[-1].items() if name not in ("counters", "gaps")}
    return rows


def cell(
    args: argparse.Namespace,
    server: LiveServer,
    kind: str,
    prompts: list[list[int]],
    ratio: float,
    backend: str,
    peers: list[Peer],
) -> dict[str, Any]:
    """Measure one text and share: both arms in turn, ``--rounds`` times."""
    params = {"active_ratio": ratio}
    run_arm(args, server, prompts[: args.batch], params)
    dense, lossless, counts = [], [], dict.fromkeys(DRAFTS_COUNTED, 0)
    for _ in range(args.rounds):
        dense.append(figures(args, run_arm(args, server, prompts, DENSE)[0]))
        streams, found = run_arm(args, server, prompts, params)
        lossless.append(figures(args, streams))
        counts = {name: counts[name] + found[name] for name in DRAFTS_COUNTED}
    if not counts["verified_rounds"] and not counts["undrafted_steps"]:
        raise EvaluationError(f"{kind}: no round ran")
    row: dict[str, Any] = {"text": kind, "active_ratio": ratio}
    row |= {"acceptance": counts["accepted_tokens"] / counts["judged_drafts"] if counts["judged_drafts"] else None}
    row |= {"tpot": fmean(lossless), "dense_tpot": fmean(dense)}
    row |= against(*strongest(dense, backend, peers), lossless)
    if not args.simulated:
        row |= differences(args, server, prompts, params)
    return row | {"counters": counts}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = command_line(COMMAND, __doc__)
    parser.add_argument("--base-url", required=True, help="a server with SPARSE_SELF, with nothing else to do")
    parser.add_argument("--out", required=True, type=Path, help="JSONL file to write")
    parser.add_argument("--shape", required=True, help="name of what is measured, such as 1.7b-4x256k")
    parser.add_argument("--texts", type=list_of(str, ("book", "code", "reasoning", "random")), default=["book", "code"])
    parser.add_argument("--ratios", type=list_of(float), default=[0.1], help="shares of the pages")
    parser.add_argument("--context", type=length, default=8192, help="tokens of a prompt")
    parser.add_argument("--batch", type=positive, default=1, help="requests at once")
    parser.add_argument("--n", type=positive, default=8, help="prompts of a text, a multiple of --batch")
    parser.add_argument("--tokens", type=positive, default=256, help="output tokens of a request")
    parser.add_argument("--rounds", type=positive, default=1, help="times that both arms run")
    parser.add_argument("--simulated", type=float, help="acceptance that the server was told to simulate")
    parser.add_argument("--dense-file", type=Path, action="append", default=[], help="one more dense peer, see above")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.n % args.batch:
        parser.error(f"--n {args.n} must be a multiple of --batch {args.batch}")
    if (args.simulated is not None) != (args.texts == ["random"]):
        parser.error("--simulated and --texts random go together")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 where a figure would not show what it says."""
    args = parse(arguments)
    return shown(COMMAND, lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
