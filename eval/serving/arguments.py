"""The command line of ``eval.bench_serving``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from eval.lab.servers import model_shapes
from eval.lab.servers.serving_recall import ROBSA, inputs_of
from eval.lab.structured.generator import read_recipe
from eval.lab.structured.prefill import SKIP, read_given
from eval.live.client import list_of
from eval.live.counters import EvaluationError
from eval.serving.first_token import LEAST_RUNS
from eval.serving.grid import methods
from eval.texts.lengths import length, shares

PREFIX = 128 * 1024


def parse(arguments: list[str] | None, description: str | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="eval.bench_serving", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=list(model_shapes.SHAPES), help="a public model's shape, without its weights")
    model.add_argument("--model-path", help="a checkpoint")
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
    _add_inputs(parser)
    parser.add_argument(
        "--recall-from", type=Path, help="file of eval.lab.bench_prefill, or for robsa of eval.lab.bench_mla"
    )
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
    if isinstance(args.structured, Path):
        _read_structured(parser, args)
    _check(parser, args)
    return args


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    """What the servers attend with, and how much of it they leave out."""
    parser.add_argument(
        "--structured",
        type=_structured,
        help="inputs to generate: recipe and seed as JSON, {} for its own, or a file of eval.lab.bench_mla",
    )
    parser.add_argument(
        "--skip-prefill",
        action="store_true",
        help="over --structured inputs prefill writes KV and little else: for decode alone",
    )
    parser.add_argument(
        "--sparsity",
        type=shares,
        default={},
        help="share of the pairs to be left out, such as 0.89,32k=0.78; see above",
    )


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
    if args.skip_prefill:
        _skip_prefill(parser, args)
    if args.structured is not None:
        _check_structured(parser, args.structured)
    if not methods(args):
        parser.error("--sparse-method none needs a --sparse-prefill-method")
    if args.cold_runs < LEAST_RUNS:
        parser.error(f"--cold-runs must be at least {LEAST_RUNS}, got {args.cold_runs}")
    known = args.sparse_prefill_method or args.sparse_method == ROBSA
    if args.recall_from is not None and (args.structured is None or not known):
        parser.error(
            "--recall-from is the recall of a --sparse-prefill-method, or of robsa, over --structured inputs: give both"
        )
    if args.sparsity and args.recall_from is None:
        parser.error("--sparsity needs --recall-from, which has the threshold that leaves out so much")
    if args.sparsity and not args.sparse_prefill_method:
        parser.error("--sparsity is of a --sparse-prefill-method: what decode leaves out is a matter of the inputs")


def _structured(text: str) -> object:
    return Path(text) if text.endswith((".jsonl", ".jsonl.xz")) else json.loads(text)


def _read_structured(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Put the inputs of a file in its place, and take the recall from it, too."""
    path = args.structured
    try:
        args.structured = inputs_of(path)
    except EvaluationError as error:
        parser.error(str(error))
    args.recall_from = args.recall_from or path


def _skip_prefill(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Put it among the inputs, where the servers look."""
    if not isinstance(args.structured, dict) or args.sparse_prefill_method or args.prefix:
        parser.error(
            "--skip-prefill needs --structured inputs, which KV is made of anyway, and measures decode alone: "
            "leave out --sparse-prefill-method and --prefix"
        )
    args.structured = {**args.structured, "prefill": SKIP}


def _check_structured(parser: argparse.ArgumentParser, given: Any) -> None:
    try:
        read_recipe(read_given(given)["recipe"])
    except ValueError as error:
        parser.error(f"--structured: {error}")


def _length_or_none(text: str) -> int:
    return 0 if text == "0" else length(text)


def named(text: str) -> tuple[str, str]:
    """``NAME=ARGS`` of a server.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    name, found, flags = text.partition("=")
    if not found or not name.replace("-", "").isalnum():
        raise argparse.ArgumentTypeError(f"must be NAME=ARGS, got {text!r}")
    return name, flags
