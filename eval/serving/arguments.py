"""The command line of ``eval.bench_serving``."""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.live.client import list_of
from eval.serving.first_token import LEAST_RUNS
from eval.serving.grid import ROBSA, methods
from eval.serving.inputs import Inputs
from eval.texts.lengths import length

PREFIX = 128 * 1024


def parse(
    arguments: list[str] | None, description: str | None = None, inputs: type[Inputs] = Inputs
) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog=inputs.command, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    inputs.add_arguments(parser)
    parser.add_argument("--out", required=True, type=Path, help="JSONL file to write; the logs go beside it")
    parser.add_argument("--contexts", type=list_of(length), default="4k,32k,128k,256k", help="tokens of a prompt")
    parser.add_argument("--batch", type=list_of(int), default="1,4", help="requests at once")
    parser.add_argument("--output-length", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--runs", type=int, default=1, help="times that each cell is measured")
    parser.add_argument("--warmup", type=int, default=1, help="the client's warm-up requests before each batch")
    parser.add_argument(
        "--prefix",
        type=_length_or_none,
        help="cached tokens of prefix_hit (default: 128k; with a prefill method or robsa 0: none)",
    )
    parser.add_argument("--tail", type=int, default=64, help="further tokens of such a prompt")
    parser.add_argument("--hits", type=int, default=10, help="such prompts")
    parser.add_argument("--cold-runs", type=int, default=LEAST_RUNS, help="times that a cold prefill is measured")
    parser.add_argument(
        "--chunked-prefill-size", type=list_of(length), default=[], help="tokens prefilled at once, one after the other"
    )
    _add_servers(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--label", help="kept in the file's header")
    parser.add_argument("--revision", help="of this code, where its git history is not at hand")
    args = parser.parse_args(arguments)
    if args.prefix is None:
        args.prefix = 0 if args.sparse_prefill_method or args.sparse_method == ROBSA else PREFIX
    _check(parser, args)
    inputs.check(parser, args)
    return args


def _add_servers(parser: argparse.ArgumentParser) -> None:
    """Which servers there are, and how they are started."""
    parser.add_argument("--sparse-method", default="resa", help="of the sparse server; none for a prefill method alone")
    parser.add_argument("--sparse-config", default="{}", help="of the sparse server: inline JSON or a file")
    parser.add_argument("--sparse-prefill-method", help="of the sparse server (default: none)")
    parser.add_argument("--sparse-prefill-config", default="{}", help="of the sparse server: inline JSON or a file")
    parser.add_argument("--server-args", default="", help="further arguments of all servers, as one string")
    parser.add_argument("--server", type=named, action="append", default=[], metavar="NAME=ARGS", help="see above")
    parser.add_argument("--both", action="store_true", help="all servers at once; they share the GPU's memory")
    parser.add_argument("--start-timeout", type=float, default=900.0, help="seconds until a server must be ready")


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the command where arguments do not fit together."""
    for name in ("output_length", "runs", "tail", "hits", *(["batch"] if args.batch else [])):
        if min([getattr(args, name)] if name != "batch" else args.batch) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not args.contexts or not args.batch:
        parser.error("--contexts and --batch must name something")
    if not methods(args):
        parser.error("--sparse-method none needs a --sparse-prefill-method")
    if args.cold_runs < LEAST_RUNS:
        parser.error(f"--cold-runs must be at least {LEAST_RUNS}, got {args.cold_runs}")


def _length_or_none(text: str) -> int:
    return 0 if text == "0" else length(text)


def named(text: str) -> tuple[str, str]:
    """``NAME=ARGS`` of a server."""
    name, found, flags = text.partition("=")
    if not found or not name.replace("-", "").isalnum():
        raise argparse.ArgumentTypeError(f"must be NAME=ARGS, got {text!r}")
    return name, flags
