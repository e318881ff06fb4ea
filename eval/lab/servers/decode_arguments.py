"""The command line of ``eval.lab.bench_decode``."""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.lab.servers.decode_peers import COMMAND

INTERVALS_MEASURED = 8
SHORT = 1024
# All that goes with --again.
AGAIN = ("again", "peer", "out")


def parse(arguments: list[str] | None, description: str | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
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
