"""``python -m sglang_sparse.tune``: measure the KV tokens from which sparse decode is faster on this GPU.

For every batch size and context it times the attention of one decode step in CUDA graphs, replayed in turn: dense, by
the faster of FA3 and FlashInfer (whichever are installed), and sparse: selection, attention over the selected pages,
and one refresh of the newest pages' summaries in all layers that are timed. Each layer has its own caches, so that
none finds its inputs in the L2 cache. The answer is the least number of KV tokens in a batch from which on the sparse
step was faster at every batch size, between two contexts by linear interpolation. ``--overhead-us`` is the
additional time of a sparse step: its share of rectification, loading the page table, and the gaps around it.

``--out FILE`` gets an entry for each shape and share of the pages, and replaces an older one. A server looks into the
``crossover.json`` of this package; elsewhere the printed number goes into its ``--sparse-config``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import ValidationError

from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.config import refused_value
from sglang_sparse.methods.resa import Resa, ResaConfig
from sglang_sparse.tools.tune_bench import (
    PEERS,
    Peer,
    Point,
    Step,
    Timer,
    TuneError,
    entry,
    graph_timer,
    measure,
    num_layers,
    write,
)

T = TypeVar("T")
KV_DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}


def tune(args: argparse.Namespace, timer: Timer, device: str, peers: Mapping[str, Peer] = PEERS) -> bool:
    """Measure every shape and share of the pages, print what was found, and put it into ``args.out``.

    Returns:
        Whether there was an answer for each.

    Raises:
        TuneError: a batch cannot be measured, or the file is no table.
    """
    answered = True
    for (q_heads, kv_heads, head_dim), ratio in itertools.product(args.shape, args.active_ratio):
        fields = {**args.sparse_config, "page_size": args.page_size, "active_ratio": ratio}
        method = Resa(ResaConfig.model_validate(fields))
        model = ModelShape(1, q_heads, kv_heads, head_dim, KV_DTYPES[args.kv_dtype])
        print(f"{q_heads}x{kv_heads}x{head_dim}, active ratio {ratio}", flush=True)
        points = []
        for batch, context in itertools.product(args.batches, args.contexts):
            if batch * context <= args.most_tokens:
                layers = num_layers(method, model, batch * context, device)
                step = Step(method, replace(model, num_layers=layers), batch, context, args.context_length, device)
                points.append(measure(step, timer, peers))
                print(_line(points[-1]), flush=True)
        try:
            found = entry(method, model, points, device, args.overhead_us)
        except TuneError as error:
            print(f"sglang_sparse.tune: {error}", file=sys.stderr)
            answered = False
            continue
        tokens = json.dumps({"crossover_tokens": found["crossover_tokens"]})
        print(f"faster sparse from {found['crossover_tokens']} tokens on: --sparse-config '{tokens}'", flush=True)
        if args.out:
            write(args.out, [found])
    return answered


def _line(point: Point) -> str:
    times = f"{point.dense} {point.dense_us:8.2f} us, sparse {point.sparse_us:8.2f} us a layer"
    return f"{point.batch:4} x {point.context:6} tokens: {times}, {point.dense_us / point.sparse_us:5.2f} times as fast"


def _shape(text: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    heads = tuple(map(int, found.groups())) if found else (0, 0, 0)
    if min(heads) < 1 or heads[0] % heads[1]:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, allowed: query heads x KV heads x head dimension of one rank, such as 32x8x128"
        )
    return heads[0], heads[1], heads[2]


def _list(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    def parse(text: str) -> list[T]:
        return [kind(part) for part in text.split(",")]

    parse.__name__ = "list"
    return parse


def _tokens(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser("sglang_sparse.tune", description=__doc__, formatter_class=_Formatter)
    found.add_argument("--out", type=Path, help="JSON file to put the entries into")
    found.add_argument("--shape", type=_shape, action="append", help="HQxHKVxD of one rank; repeat for more")
    found.add_argument("--active-ratio", type=_list(float), default="0.1", help="shares of the pages")
    found.add_argument("--page-size", type=int, default=16, help="tokens per page")
    found.add_argument("--sparse-config", type=json.loads, default={}, help="further fields of resa, as JSON")
    found.add_argument("--kv-dtype", choices=list(KV_DTYPES), default="bfloat16", help="of the KV cache")
    found.add_argument("--batches", type=_list(int), default="1,2,4,8,16", help="rows")
    found.add_argument("--contexts", type=_list(_tokens), default="4k,8k,16k,32k,64k,128k", help="tokens of each row")
    found.add_argument("--most-tokens", type=_tokens, default="128k", help="leave larger batches out")
    found.add_argument("--context-length", type=_tokens, default="128k", help="of the server; sizes its buffers")
    found.add_argument(
        "--overhead-us",
        type=float,
        # On an H200 a Qwen3-1.7B server's sparse step took 1.5 more, and its share of a pass every 32 steps 6.4: few
        # tokens are rectified in the time in which the weights are read, or the kernels launched.
        default=8.0,
        help="microseconds per layer of a sparse step outside its attention, with its share of rectification",
    )
    return found


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 where it cannot answer."""
    args = parser().parse_args(arguments)
    args.shape = args.shape or [(16, 8, 128), (32, 8, 128)]
    try:
        if not torch.cuda.is_available():
            raise TuneError("a crossover is measured on a GPU, and torch finds none")
        return 0 if tune(args, graph_timer, "cuda") else 1
    except ValidationError as error:
        for detail in error.errors():
            print(f"sglang_sparse.tune: {refused_value(detail, list(ResaConfig.model_fields))}", file=sys.stderr)
    except (TuneError, OSError, torch.OutOfMemoryError) as error:
        print(f"sglang_sparse.tune: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
