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
from twin import Answer, OtherAnswerError, Twin

from sglang_sparse.scheduler.inserted_keys import InexactTreeError

FAILURES = (AssertionError, RuntimeError, ValueError, LookupError, TypeError, AttributeError)
MISMATCHES = (BrokenInvariantError, InexactTreeError, DamagedCopyError, OtherAnswerError)
MOST_FAILURES = 20


@dataclass(frozen=True)
class Block:
    """The work of one process.

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
            "method": options.method or "resa",
            "radix": "on" if options.radix else "off",
            "apart": "on" if options.apart else "off",
            "core": options.core,
            "host": options.host,
            "pair": "on" if options.pair else "off",
            "sessions": "on" if options.sessions else "off",
            "drafts": options.drafts,
            "steps": self.steps,
            "first-seed": seed,
            "schedules": 1,
        }
        if options.drafter:
            words["drafter"] = options.drafter
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
    twin = Twin(block.options, model) if block.options.compared else None
    answers: dict[int, dict[str, Answer]] = {}
    try:
        engine = Engine(block.options, model)
    except FAILURES as error:
        if twin:
            twin.dismiss()
        sender.send((_row(block, block.last, [_failure(block, block.first, error)]), None))
        return
    # A transfer that is aborted is an error to SGLang.
    logging.disable(logging.ERROR if block.options.pair else logging.WARNING)
    if block.sabotage:
        SABOTAGES[block.sabotage](engine)
    total, failures, left = Counts(), [], None
    ready = time.monotonic()
    seed = block.first
    for seed in range(block.first, block.last + 1):
        schedule = Schedule(engine, seed, block.steps)
        try:
            schedule.run()
            if twin:
                answers[seed] = schedule.answers()
        except FAILURES as error:
            failures.append(_failure(block, seed, error))
            left = replace(block, first=seed + 1) if seed < block.last else None
        total.add(schedule.counts)
        if failures:
            break
    if twin:
        failures += _compare(block, twin, answers)
    seconds = {
        "seconds": round(time.monotonic() - ready, 2),
        "start_seconds": round(ready - began, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
    }
    sender.send(({**_row(block, seed, failures), **vars(total), **seconds}, left))


def _compare(block: Block, twin: Twin, answers: dict[int, dict[str, Answer]]) -> list[dict[str, Any]]:
    """Return a failure for each schedule that answered a request otherwise than the twin."""
    differing = twin.compare({rid: answer for one in answers.values() for rid, answer in one.items()})
    found = []
    for seed, one in answers.items():
        if texts := [f"{rid} {differing[rid]}" for rid in one if rid in differing]:
            found.append(_failure(block, seed, OtherAnswerError("; ".join(texts))))
    return found


def _failure(block: Block, seed: int, error: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    lines = [f"schedule {seed}: {type(error).__name__}: {error}"]
    lines += [f"  {Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    return {"seed": seed, "type": _kind(error), "message": "\n".join(lines), "replay": block.replay(seed)}


def _kind(error: BaseException) -> str:
    # SGLang's own checks raise a plain AssertionError or ValueError that says "leak" or names a double free.
    if isinstance(error, LostPageError) or any(word in str(error).lower() for word in ("leak", "free")):
        return "leak"
    return "mismatch" if isinstance(error, MISMATCHES) else "error"


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
