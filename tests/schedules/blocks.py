"""Blocks of schedules, each in a process of its own: a scheduler cannot be started twice in one."""

from __future__ import annotations

import json
import logging
import multiprocessing
import multiprocessing.connection
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from checks import BrokenInvariantError, LostPageError
from compaction import DamagedCopyError
from engine import Engine, EngineOptions
from sabotage import SABOTAGES
from schedule import Counts, Schedule

from sglang_sparse.kv_check import InexactTreeError

FAILURES = (AssertionError, RuntimeError, ValueError, LookupError, TypeError, AttributeError)
MOST_FAILURES = 20
# Rows cross from dense to sparse on their own and by what else is in the batch, and back when neighbours leave.
CROSSING = {"rectify_interval": 4, "dense_fallback": "auto", "min_seq_len": 16, "crossover_tokens": 20}
# Sparse prefill in chunks of two groups; with a crossover above the chunk, dense chunks end and begin anywhere.
PREFILL_VARIANTS: tuple[dict[str, Any], ...] = (
    {
        "overlap": True,
        "slots": 480,
        "chunk": 64,
        "config": {"rectify_interval": 4, "rectify_on_finish": True},
        "prefill": {"dense_tail": 5},
    },
    {
        "overlap": False,
        "slots": 480,
        "chunk": 64,
        "config": {"rectify_interval": 5},
        "prefill": {"crossover_tokens": 96, "dense_fallback": "auto"},
    },
)
# Rows decode within the batches of prompts; beside them a chunk of one group has no room for a group.
MIXED_VARIANTS: tuple[dict[str, Any], ...] = (
    {"overlap": True, "slots": 480, "chunk": 64, "config": {"rectify_interval": 0}, "prefill": {}, "mixed": True},
    {
        "overlap": False,
        "slots": 480,
        "chunk": 32,
        "config": {"rectify_interval": 0},
        "prefill": {"dense_tail": 40},
        "mixed": True,
    },
)
# Requests let go of their prompts. Rows that a crossover would make dense are among them, pages of one token, windows
# within a page, prompts whose last group is not shared, and a server without a tree.
COMPACT: dict[str, Any] = {"method": "rocketkv", "slots": 200}
COMPACT_VARIANTS: tuple[dict[str, Any], ...] = (
    {**COMPACT, "overlap": True, "config": {"eviction": "compact"}},
    {
        **COMPACT,
        "overlap": False,
        "config": {"eviction": "compact", "dense_fallback": "auto", "min_seq_len": 30, "crossover_tokens": 60},
    },
    {**COMPACT, "overlap": True, "radix": False, "config": {"eviction": "compact"}},
    {**COMPACT, "overlap": False, "page_size": 1, "config": {"eviction": "compact", "kt_page_size": 1}},
    {
        **COMPACT,
        "overlap": True,
        "page_size": 8,
        "config": {"eviction": "compact", "window_size": 2, "prompt_budget": 10, "topk": 2},
    },
    {
        **COMPACT,
        "overlap": True,
        "slots": 480,
        "chunk": 64,
        "config": {"eviction": "compact"},
        "prefill": {"dense_tail": 5},
    },
)
# Blocks of keys are skipped in both phases; prompts are of several blocks, and shared by whole tiles of queries.
SKIP: dict[str, Any] = {"method": "skip_softmax", "slots": 900}
SKIP_VARIANTS: tuple[dict[str, Any], ...] = (
    {**SKIP, "overlap": True, "chunk": 256, "config": {"rectify_interval": 4}},
    {**SKIP, "overlap": False, "chunk": 128, "config": {"rectify_interval": 0}, "mixed": True},
    {**SKIP, "overlap": True, "chunk": 256, "page_size": 16, "config": {"rectify_interval": 0}},
    {**SKIP, "overlap": False, "chunk": 128, "page_size": 1, "config": {"rectify_interval": 5}},
)
# Layers of a method each, or of other fields: blocks and entries of two sizes, two windows, and one part that chooses
# where a prompt ends.
PARTS: dict[str, Any] = {"method": "rocketkv", "slots": 200}
OTHER_BUDGET = {"window_size": 10, "prompt_budget": 30, "kt_page_size": 2}
RESA_PART = {"method": "resa", "active_ratio": 0.1, "min_pages": 2}
SKIP_PART = {"method": "skip_softmax", "threshold_scale_factor": {"decode": 200}}
PARTS_VARIANTS: tuple[dict[str, Any], ...] = (
    {**PARTS, "overlap": True, "config": {"layers": {"0": {}, "1": OTHER_BUDGET}, "rectify_interval": 4}},
    {
        **PARTS,
        "overlap": False,
        "config": {"layers": {"0": {}, "1": RESA_PART}, "rectify_interval": 3, "rectify_on_finish": True},
    },
    {**PARTS, "overlap": True, "page_size": 8, "config": {"layers": {"0": SKIP_PART, "1": {}}, "rectify_interval": 0}},
    {
        **PARTS,
        "overlap": False,
        "config": {**CROSSING, "layers": {"0": RESA_PART, "1": OTHER_BUDGET | {"method": "rocketkv"}}},
    },
    {
        **PARTS,
        "overlap": True,
        "slots": 480,
        "chunk": 64,
        "config": {"layers": {"0": OTHER_BUDGET, "1": {}}, "rectify_interval": 4},
        "prefill": {"dense_tail": 5},
    },
)
# What ``--vary`` takes turns with: all kinds of page size and of finish, few and many due rows, no rectification.
VARIANTS: tuple[dict[str, Any], ...] = (
    {"overlap": True},
    {"overlap": False, "config": {"rectify_interval": 3, "rectify_on_finish": True, "layers": "0"}, "apart": True},
    {"overlap": True, "config": {"rectify_interval": 5, "rectify_on_finish": True, "rectify_max_batch": 1}},
    {"overlap": False, "config": CROSSING},
    *PREFILL_VARIANTS,
    *MIXED_VARIANTS,
    {"overlap": True, "page_size": 16, "config": {"rectify_interval": 12, "rectify_on_finish": True}},
    {"overlap": False, "config": {"rectify_interval": 0}},
    {"overlap": True, "config": {"rectify_interval": 0, "summary_dtype": "bf16"}},
    {"overlap": False, "page_size": 1, "config": {"rectify_interval": 4, "min_pages": 6}},
    {"overlap": True, "config": {**CROSSING, "rectify_on_finish": True}, "apart": True},
    {"overlap": False, "page_size": 16, "config": {"rectify_interval": 7}},
    *COMPACT_VARIANTS,
    *SKIP_VARIANTS,
    *PARTS_VARIANTS,
)


@dataclass(frozen=True)
class Block:
    """What one process runs.

    Attributes:
        first: the first seed.
        last: the last seed.
        steps: see ``Schedule``.
        options: of the engine.
        sabotage: a fault to put into it.
    """

    first: int
    last: int
    steps: int
    options: EngineOptions
    sabotage: str | None = None

    def replay(self, seed: int) -> str:
        """The command that runs one of its schedules."""
        options = self.options
        words = {
            "overlap": "on" if options.overlap else "off",
            "page-size": options.page_size,
            "slots": options.slots,
            "chunk": options.chunk,
            "config": f"'{json.dumps(options.config)}'",
            "prefill": f"'{json.dumps(options.prefill)}'",
            "mixed": "on" if options.mixed else "off",
            "method": options.method,
            "radix": "on" if options.radix else "off",
            "apart": "on" if options.apart else "off",
            "steps": self.steps,
            "first-seed": seed,
            "schedules": 1,
        }
        if self.sabotage:
            words["sabotage"] = self.sabotage
        return "python tests/schedules/run.py " + " ".join(f"--{name} {value}" for name, value in words.items())


def run_blocks(
    blocks: Sequence[Block], model: Path, workers: int, most_failures: int = MOST_FAILURES
) -> Iterator[dict[str, Any]]:
    """Run blocks in parallel, and what a failure left of one in another process.

    Args:
        blocks: in this order.
        model: what ``tiny_model`` made.
        workers: processes at a time.
        most_failures: failures after which no process is started any more.

    Yields:
        A row a process, as it ends.
    """
    todo = deque(blocks)
    context = multiprocessing.get_context("fork")
    running: dict[Any, tuple[Any, Block]] = {}
    failures = 0
    while (todo and failures < most_failures) or running:
        while todo and len(running) < workers and failures < most_failures:
            block = todo.popleft()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(block, model, sender))
            process.start()
            sender.close()
            running[receiver] = process, block
        for receiver in multiprocessing.connection.wait([*running]):
            process, block = running.pop(receiver)
            try:
                row, left = receiver.recv()
            except EOFError:
                process.join()
                row, left = _died(block, process.exitcode), None
            process.join()
            failures += len(row["failures"])
            if left:
                todo.appendleft(left)
            yield row


def _work(block: Block, model: Path, sender: Any) -> None:
    """Run a block up to its first failure; send its row and what is left of it."""
    began, cpu = time.monotonic(), time.process_time()
    try:
        engine = Engine(block.options, model)
    except FAILURES as error:
        sender.send((_row(block, block.last, [_failure(block, block.first, error)]), None))
        return
    logging.disable(logging.WARNING)
    if block.sabotage:
        SABOTAGES[block.sabotage](engine)
    total, failures, left = Counts(), [], None
    ready = time.monotonic()
    seed = block.first
    for seed in range(block.first, block.last + 1):
        schedule = Schedule(engine, seed, block.steps)
        try:
            schedule.run()
        except FAILURES as error:
            failures.append(_failure(block, seed, error))
            left = replace(block, first=seed + 1) if seed < block.last else None
        total.add(schedule.counts)
        if failures:
            break
    seconds = {
        "seconds": round(time.monotonic() - ready, 2),
        "start_seconds": round(ready - began, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
    }
    sender.send(({**_row(block, seed, failures), **vars(total), **seconds}, left))


def _failure(block: Block, seed: int, error: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    lines = [f"schedule {seed}: {type(error).__name__}: {error}"]
    lines += [f"  {Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    return {"seed": seed, "type": _kind(error), "message": "\n".join(lines), "replay": block.replay(seed)}


def _kind(error: BaseException) -> str:
    # SGLang's own checks raise a plain AssertionError or ValueError that says "leak" or names a double free.
    if isinstance(error, LostPageError) or any(word in str(error).lower() for word in ("leak", "free")):
        return "leak"
    return "mismatch" if isinstance(error, (BrokenInvariantError, InexactTreeError, DamagedCopyError)) else "error"


def _row(block: Block, last: int, failures: list[dict[str, Any]]) -> dict[str, Any]:
    types = [failure["type"] for failure in failures]
    return {
        "first_seed": block.first,
        "last_seed": last,
        "options": asdict(block.options),
        "sabotage": block.sabotage,
        "schedules": last - block.first + 1,
        "mismatches": types.count("mismatch"),
        "leaks": types.count("leak"),
        "errors": types.count("error"),
        "failures": failures,
    }


def _died(block: Block, exit_code: int | None) -> dict[str, Any]:
    error = RuntimeError(f"the process of schedules {block.first} to {block.last} ended with exit code {exit_code}")
    return _row(block, block.last, [_failure(block, block.first, error)])
