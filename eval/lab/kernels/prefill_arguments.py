"""The command line of ``eval.lab.bench_prefill``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eval.lab.kernels.length_shares import shares
from eval.lab.kernels.prefill import COMMAND
from eval.lab.kernels.prefill_table import OWN, TABLE, Implementation
from eval.live.client import list_of
from eval.live.counters import EvaluationError
from eval.texts.lengths import length


def parse(arguments: list[str] | None, description: str | None = None) -> argparse.Namespace:
    """The command line, checked.

    Raises:
        EvaluationError: names the argument and what is allowed.
    """
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [one.name for one in TABLE if one.peer]
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--lengths", type=list_of(length), default="32k,64k,128k", help="tokens of the prompt")
    parser.add_argument("--chunk", type=length, default="8k", help="tokens that are prefilled at once")
    methods = [one.name for one in OWN]
    parser.add_argument("--method", choices=methods, default=methods[0], help="this project's op that is measured")
    values = "; ".join(f"{one.setting} of {one.name} {_listed(one)}" for one in OWN)
    parser.add_argument("--values", type=list_of(float), help=f"of its setting (default: {values})")
    parser.add_argument(
        "--sparsity",
        type=shares,
        default={},
        help="also the value that leaves out this share, such as 0.89,32k=0.78",
    )
    parser.add_argument(
        "--dense-below", type=length, default=0, help="for --sparsity: a server's crossover_tokens, dense there"
    )
    parser.add_argument("--peers", type=list_of(str), default=",".join(known), help=f"of {', '.join(known)}")
    parser.add_argument("--heads", type=list_of(int), default="32,8,128", help="query heads, KV heads, head dimension")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--recipe", type=json.loads, default={}, help="of the structure, as JSON (eval/lab/structured)")
    parser.add_argument("--positions", type=length, help="tokens of which a prompt is the first, as on a server")
    parser.add_argument("--rounds", type=int, default=7, help="times that each is measured")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--revision", help="of this code, where its git history is not at hand")
    args = parser.parse_args(arguments)
    _check(args, known)
    return args


def _check(args: argparse.Namespace, known: list[str]) -> None:
    if args.values is None:
        args.values = list(next(one for one in OWN if one.name == args.method).values)
    for name in args.peers:
        if name not in known:
            raise EvaluationError(f"--peers: there is no {name!r}, there are {', '.join(known)}")
    for name, good, allowed in (
        ("lengths", bool(args.lengths) and min(args.lengths) > 128, "lengths above 128"),
        ("values", bool(args.values) and min(args.values) > 0, "one at least, above 0"),
        ("dense_below", args.dense_below % args.chunk == 0, f"a multiple of --chunk, which is {args.chunk}"),
        (
            "positions",
            args.positions is None or args.positions >= max(args.lengths, default=0),
            "as many as a prompt has",
        ),
        ("heads", len(args.heads) == 3 and min(args.heads) > 0, "three numbers, such as 32,8,128"),
        ("page_size", args.page_size in (1, 2, 4, 8, 16, 32, 64), "a power of two up to 64"),
        ("rounds", args.rounds >= 2, "2 or more"),
    ):
        if not good:
            raise EvaluationError(f"--{name.replace('_', '-')} must be {allowed}, got {getattr(args, name)}")


def _listed(one: Implementation) -> str:
    return ",".join(f"{value:g}" for value in one.values)
