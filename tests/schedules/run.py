"""Random schedules on SGLang's real scheduler, checked after every step: ``python tests/schedules/run.py --help``."""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from variants import (
    COMPACT_VARIANTS,
    DRAFT_VARIANTS,
    DRAFTER_VARIANTS,
    FAMILIES,
    HOST_VARIANTS,
    MIXED_VARIANTS,
    PAIR_VARIANTS,
    SESSION_VARIANTS,
)

if TYPE_CHECKING:
    from blocks import Block

ROOT = Path(__file__).parents[2]
# Set before anything reads them: no GPU, one thread, SGLang's own count of all slots after every step.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
}
# Schedules within which each fault must show.
SELF_TEST_SCHEDULES = 6


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=300)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--block", type=int, default=100, help="schedules a process and a row")
    parser.add_argument("--steps", type=int, default=12, help="most steps with commands; sizes prompts and outputs")
    parser.add_argument("--overlap", choices=["both", "on", "off"], default="both", help="both: blocks take turns")
    parser.add_argument("--page-size", type=int, default=4)
    parser.add_argument("--slots", type=int, default=144, help="tokens of the KV pool")
    parser.add_argument("--chunk", type=int, default=16, help="chunked prefill size")
    parser.add_argument("--config", type=json.loads, default={"rectify_interval": 4}, help="more of --sparse-config")
    parser.add_argument("--prefill", type=json.loads, help="sparse prefill with this of --sparse-prefill-config")
    parser.add_argument("--mixed", choices=["on", "off"], default="off", help="rows decode within batches of prompts")
    parser.add_argument("--method", choices=["resa", "rocketkv", "skip_softmax"], default="resa", help="of decode")
    parser.add_argument("--radix", choices=["on", "off"], default="on", help="whether there is a radix tree")
    parser.add_argument("--apart", choices=["on", "off"], default="off", help="rectify each row in a pass of its own")
    parser.add_argument("--core", choices=["both", "rust", "python"], default="both", help="both: blocks take turns")
    parser.add_argument("--host", type=int, default=0, help="sizes of the KV pool that host memory has")
    parser.add_argument("--pair", choices=["on", "off"], default="off", help="prompts are prefilled elsewhere")
    parser.add_argument("--sessions", choices=["on", "off"], default="off", help="some requests are turns")
    parser.add_argument("--drafts", type=int, default=0, help="a round of lossless decoding")
    parser.add_argument("--drafter", choices=["STANDALONE", "EAGLE3"], help="SGLang's, with sparse prefill alone")
    parser.add_argument("--vary", choices=FAMILIES, help="blocks take turns with these variants of the above")
    parser.add_argument(
        "--sabotage",
        choices=[
            *("guard", "summary", "rectified", "leak", "groups", "match", "keys", "mixed", "tail"),
            *("copies", "insert", "dense", "unseen", "drafts", "pairs", "arrivals", "transfers", "turns"),
        ],
        help="break the product, to see it caught",
    )
    parser.add_argument("--self-test", action="store_true", help="afterwards, require that every sabotage is caught")
    parser.add_argument("--revision", help="of the code; asked of git by default")
    parser.add_argument("--out", type=Path, help="JSONL file, overwritten")
    return parser.parse_args(argv)


def main() -> int:
    """Run what the command line says; 0 if all schedules passed."""
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="schedules-", ignore_cleanup_errors=True) as directory:
        tempfile.tempdir = directory
        _prepare(Path(directory))
        from engine import tiny_model

        out = args.out.open("w") if args.out else None
        try:
            return 0 if _run(args, tiny_model(Path(directory) / "model"), out) else 1
        finally:
            if out:
                out.close()


def _prepare(directory: Path) -> None:
    """Import SGLang once, with the plugin and the CPU platform: the processes are forked from here."""
    os.environ.update(ENVIRONMENT)
    paths = [
        str(ROOT / folder) for folder in ("tests/schedules", "tests/support", "kernels", "", "launch/cpu_platform")
    ]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    _install_entry_points(directory)
    # What these imports make stays; collecting among it costs a tenth of the time.
    gc.disable()
    import torch

    torch.set_num_threads(1)
    # SGLang would import all its models.
    sglang = importlib.util.find_spec("sglang")
    assert sglang is not None and sglang.submodule_search_locations
    models = Path(sglang.submodule_search_locations[0]) / "srt" / "models"
    others = sorted({path.stem for path in models.iterdir()} - {"__init__", "qwen3", "llama", "llama_eagle3"})
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(others)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    importlib.import_module("sglang.srt.models.registry")
    importlib.import_module("blocks")
    gc.freeze()
    gc.enable()


def _install_entry_points(directory: Path) -> None:
    """Make SGLang find the plugin and the platform in a checkout that is only on the path."""
    for name, group, entry in (
        ("sglang_sparse", "sglang.srt.plugins", "sglang_sparse = sglang_sparse.plugin:register"),
        ("sglang_cpu_platform", "sglang.srt.platforms", "torch_cpu = sglang_cpu_platform:activate"),
    ):
        if not entry_points(group=group, name=entry.split(" ")[0]):
            info = directory / f"{name}-0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
            (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
            sys.path.append(str(directory))


def _run(args: argparse.Namespace, model: Path, out: TextIO | None) -> bool:
    from blocks import run_blocks

    def write(kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, **fields})
        print(line, flush=True)
        if out:
            out.write(line + "\n")
            out.flush()

    began = time.monotonic()
    write("header", command="schedules", revision=args.revision or _revision(), **_facts(args))
    rows = []
    for row in run_blocks(_blocks(args), model, args.workers):
        rows.append(row)
        write("block", **row)
        for failure in row["failures"]:
            print(f"\n{failure['message']}\nreplay: {failure['replay']}\n", file=sys.stderr, flush=True)
    passed = not any(row["failures"] for row in rows)
    missed = _self_test(args, model, write) if args.self_test else []
    write("summary", **_summary(rows), sabotages_missed=missed, wall_seconds=round(time.monotonic() - began, 1))
    return passed and not missed


def _blocks(args: argparse.Namespace) -> list[Block]:
    from blocks import Block
    from engine import EngineOptions

    variants = FAMILIES[args.vary] if args.vary else ()
    blocks = []
    end = args.first_seed + args.schedules
    for number, first in enumerate(range(args.first_seed, end, args.block)):
        overlap = number % 2 == 0 if args.overlap == "both" else args.overlap == "on"
        method = None if args.drafter else args.method
        options = EngineOptions(
            overlap, args.page_size, args.slots, args.chunk, args.config, args.prefill, args.mixed == "on", method
        )
        # Each core gets every variant, and both kinds of overlap.
        core = ("rust", "python")[number // (len(variants) or 2) % 2] if args.core == "both" else args.core
        options = replace(options, radix=args.radix == "on", apart=args.apart == "on", core=core, drafts=args.drafts)
        options = replace(
            options, drafter=args.drafter, host=args.host, pair=args.pair == "on", sessions=args.sessions == "on"
        )
        if variants:
            options = replace(options, **variants[number % len(variants)])
        blocks.append(Block(first, min(first + args.block, end) - 1, args.steps, options, args.sabotage))
    return blocks


def _self_test(args: argparse.Namespace, model: Path, write: Any) -> list[str]:
    """Break the product in each known way; returns the ways that nobody noticed."""
    from blocks import Block, run_blocks
    from engine import EngineOptions
    from sabotage import SABOTAGES

    missed = []
    for name in SABOTAGES:
        options = EngineOptions(True, config={"rectify_interval": 4})
        if name in ("groups", "match", "keys"):
            options = replace(options, slots=480, chunk=64, prefill={})
        if name == "tail":
            options = replace(options, slots=480, chunk=64, prefill={"dense_tail": 40})
        if name == "pairs":
            options = replace(options, **DRAFTER_VARIANTS[1])
        if name == "mixed":
            options = replace(options, **MIXED_VARIANTS[0])
        if name in ("copies", "insert", "dense", "unseen"):
            options = replace(options, **COMPACT_VARIANTS[1 if name == "dense" else 0])
        if name == "arrivals":
            options = replace(options, **HOST_VARIANTS[0])
        if name == "turns":
            options = replace(options, **SESSION_VARIANTS[0])
        if name == "transfers":
            options = replace(options, **PAIR_VARIANTS[0])
        if name == "drafts":
            options = replace(options, **DRAFT_VARIANTS[0])
        # The first schedule in which a prompt parts right behind a group that another one holds.
        first = args.first_seed + (25 if name == "pairs" else 0)
        block = Block(first, first + SELF_TEST_SCHEDULES - 1, 8, options, name)
        (row,) = run_blocks([block], model, workers=1, most_failures=1)
        write("sabotage", **row)
        if not row["failures"]:
            missed.append(name)
    return missed


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name, value in rows[0].items() if type(value) in (int, float) and not name.endswith("_seed")]
    total = {name: round(sum(row.get(name, 0) for row in rows), 2) for name in names}
    return {**total, "worst_difference": max(row.get("worst_difference", 0.0) for row in rows)}


def _facts(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from sglang.version import __version__

    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "sglang": __version__}
    versions["transformers"] = version("transformers")
    named = {name: value for name, value in vars(args).items() if name not in ("out", "revision")}
    return {"versions": versions, "arguments": named}


def _revision() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
    )
    return described.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
