"""Runs a suite of questions against one server, or against two and compares them question by question.

Greedy answers of a server depend a little on what else is in its batch; ``--concurrency 1`` is for equality. What one
run measured is kept: the same command with the same ``--out`` goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pandas as pd

from eval.live.arms import (
    LEAST,
    Arm,
    make_arm,
    require_answers,
    require_least,
    require_method,
    require_proof,
    require_reference,
    require_room,
)
from eval.live.client import FAILURES, HelpFormatter, LiveServer, command_line, complete, positive
from eval.live.counters import EvaluationError, Unreachable, moved, read_shares
from eval.live.forced import prefilled_answer
from eval.live.record import Record
from eval.live.suite import Case, Group, Prompt, Suite, groups_of
from eval.live.tokens import Tokens, tokens
from eval.scores.summary import summarise

ESTIMATED = 20
# Tokens of the answer to a turn that is asked before the question: some decode steps.
FIRST_TURN = 8
# Not what the results depend on, or told in their own place.
NOT_ARGUMENTS = (
    *("base_url", "compare_url", "out", "concurrency", "timeout", "revision", "label", "plot"),
    *(f"least_{field}" for field in LEAST),
)


def parser_of(suite: type[Suite]) -> argparse.ArgumentParser:
    """The command line of a suite: what every command takes, and the suite's own arguments."""
    parser = command_line(suite.command, sys.modules[suite.__module__].__doc__, HelpFormatter)
    common = parser.add_argument_group("every command of its kind")
    common.add_argument("--base-url", required=True, help="the server under judgement")
    common.add_argument("--compare-url", help="another server, such as a dense one, to compare it with")
    common.add_argument("--out", required=True, type=Path, help="JSONL file; a run that was interrupted goes on")
    common.add_argument("--plot", type=Path, help="path without a suffix, for pictures as SVG")
    common.add_argument("--model", help="its name at the server; the first one there by default")
    common.add_argument("--tokenizer", help="folder or name; the server's own model path by default")
    common.add_argument("--concurrency", type=positive, default=8, help="questions in flight")
    common.add_argument(
        "--mixed", action="store_true", help="tasks and lengths at once, in an order that is drawn, not one by one"
    )
    common.add_argument("--timeout", type=float, default=1800.0, help="seconds of one request")
    common.add_argument("--seed", type=int, default=0, help="of the questions")
    common.add_argument("--custom-params", type=json.loads, default={}, help="JSON, sent with each request")
    common.add_argument("--compare-custom-params", type=json.loads, default={}, help="the same for --compare-url")
    common.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="put the questions to the base server once more with these custom parameters, as an arm of this name; "
        "its prefix cache has the prompts of a task then",
    )
    common.add_argument(
        "--expect",
        default="auto",
        help="what the base server must prove by its counters: its methods (such as resa, anchor or resa+anchor), "
        "dense, any (nothing), or auto: the methods it says it runs, and with --compare-url some method",
    )
    common.add_argument(
        "--least-sparsity",
        type=float,
        help="share of the query-key pairs that prefill of the base server must leave out, of each task and length",
    )
    common.add_argument(
        "--least-skipped", type=float, help="the same of the blocks that its decode visits, of Skip-Softmax"
    )
    suite.add_arguments(parser)
    return parser


class Run:
    """One run of a suite."""

    def __init__(self, suite: Suite, record: Record, arms: Sequence[Arm], expect: str) -> None:
        self.suite, self.record, self.arms, self.expect = suite, record, arms, expect
        self.rows = [row for row in record.earlier if row["kind"] == "item" and not row.get("failed")]
        self.counts = [row for row in record.earlier if row["kind"] == "counters"]
        # Of the group that is asked: each arm gets the same ones, and long ones take a while to fit.
        self.prompts: dict[str, Prompt] = {}

    def all_groups(self, groups: Sequence[Group]) -> None:
        """Ask everything that was not asked before; what was asked is kept where a server gives no answer."""
        for group in groups:
            self.prompts.clear()
            for arm in self.arms:
                done = {row["id"] for row in self.rows if row["arm"] == arm.name}
                left = [case for case in group.cases if case.id not in done]
                if not left and arm.counted and not self._counted(arm, group):
                    # Interrupted between the last answer and its counters.
                    left = list(group.cases[-1:])
                if left:
                    self._group(group, arm, left)
                if arm.counted:
                    require_proof(group.label, arm, self.expect, self._counted(arm, group))

    def _counted(self, arm: Arm, group: Group) -> list[dict[str, int]]:
        """Return the server's counters of a group, run by run."""
        wanted = (arm.name, group.task, group.length)
        return [row["counters"] for row in self.counts if (row["arm"], row["task"], row["length"]) == wanted]

    def _group(self, group: Group, arm: Arm, cases: Sequence[Case]) -> None:
        async def work(client: httpx.AsyncClient, case: Case) -> None:
            await self._item(client, arm, case)

        before = arm.server.counters() if arm.counted else None
        arm.server.each(work, cases, f"{group.label} {arm.name}")
        if before is None:
            return
        counts = moved(before, arm.server.counters())
        row = {"arm": arm.name, "task": group.task, "length": group.length, "items": len(cases)}
        row |= read_shares(counts)
        self.counts.append({"kind": "counters", **row, "counters": counts})
        self.record.add(**self.counts[-1])

    async def _item(self, client: httpx.AsyncClient, arm: Arm, case: Case) -> None:
        row: dict[str, Any] = {"kind": "item", "arm": arm.name, "id": case.id, "task": case.task}
        row |= {"length": case.length, "depth": case.depth, "index": case.index}
        try:
            prompt = self.prompts.get(case.id) or await asyncio.to_thread(self.suite.build, case)
            self.prompts[case.id] = prompt
            row |= _asked(prompt)
            room = len(prompt.tokens) + max(prompt.max_new_tokens, len(prompt.given))
            if arm.context is not None and room > arm.context:
                raise EvaluationError(f"prompt and answer take {room} tokens, the server's context is {arm.context}")
            options = {**prompt.sampling, **arm.options}
            if prompt.before:
                await complete(client, arm.model, prompt.before, FIRST_TURN, options)
            if prompt.given:
                params = arm.options.get("custom_params", {})
                found = await prefilled_answer(client, prompt.tokens, prompt.given, params)
                row |= {"output": self.suite.tokens.decode(found), "completion_tokens": 0}
            else:
                answer = await complete(client, arm.model, prompt.tokens, prompt.max_new_tokens, options)
                row |= {"output": answer.text, "finish": answer.finish, "seconds": round(answer.seconds, 4)}
                row["completion_tokens"] = answer.completion_tokens
            row["scores"] = self.suite.score(case, prompt, row["output"])
        except Unreachable:
            raise
        except EvaluationError as error:
            row["failed"] = str(error)
        self.rows.append(row)
        self.record.add(**row)


def _asked(prompt: Prompt) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(list(prompt.tokens)).encode()).hexdigest()[:16]
    answers = [answer if len(answer) <= 400 else answer[:400] + "…" for answer in prompt.answers]
    return {"prompt_tokens": len(prompt.tokens), "prompt_sha": digest, "answers": answers, "facts": dict(prompt.facts)}


def estimate(suite: Suite, arms: Sequence[Arm], cases: Sequence[Case]) -> None:
    """Say on stderr how much is to be asked and how long reading it will take, by reading one of the longest prompts.

    Short runs are not worth it.
    """
    if len(cases) < ESTIMATED:
        return
    longest = max(cases, key=lambda case: case.length or 0)
    prompt = suite.build(longest)
    sizes = sum(case.length or len(prompt.tokens) for case in cases)
    print(
        f"{len(cases)} questions for each of {len(arms)} arm(s), about {sizes / 1e6:.2f} M tokens to read each",
        file=sys.stderr,
    )
    for arm in arms:
        if arm.context is not None and len(prompt.tokens) + prompt.max_new_tokens > arm.context:
            continue

        async def read(client: httpx.AsyncClient, asked: Prompt, arm: Arm = arm) -> float:
            return (await complete(client, arm.model, asked.tokens, 1, arm.options)).seconds

        (seconds,) = arm.server.each(read, [prompt])
        minutes = seconds * sizes / len(prompt.tokens) / 60
        print(f"{arm.name}: reading takes at most about {minutes:.1f} min, answering comes on top", file=sys.stderr)


def arguments_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a command line that its results depend on, as JSON keeps them."""
    kept = {name: value for name, value in vars(args).items() if name not in NOT_ARGUMENTS}
    return json.loads(json.dumps(kept, default=str))


def run(suite_class: type[Suite], args: argparse.Namespace) -> tuple[Suite, list[dict[str, Any]], list[dict[str, Any]]]:
    """Ask everything, write the file, and judge; refused as void if too many requests failed.

    Returns:
        The suite, the item rows, and the summary (see `eval.scores.summary.summarise`).
    """
    urls = [args.base_url, *([args.compare_url] if args.compare_url else [])]
    with ExitStack() as stack:
        servers = [stack.enter_context(LiveServer(url, args.concurrency, args.timeout)) for url in urls]
        names = ("base", "compare")[: len(servers)]
        facts = [server.facts() for server in servers]
        require_method(args.expect, facts[0], bool(args.compare_url))
        if args.compare_url:
            require_reference(args.expect, facts, args.compare_custom_params)
        suite = suite_class(args, _tokens(args.tokenizer, facts[0]))
        cases = suite.cases()
        params = (args.custom_params, args.compare_custom_params)
        arms = [make_arm(n, s, f, args.model, p) for n, s, f, p in zip(names, servers, facts, params, strict=False)]
        for name, fields in map(_also, args.also):
            if name in (arm.name for arm in arms):
                raise EvaluationError(f"--also: two are called {name!r}")
            arms.append(make_arm(name, servers[0], facts[0], args.model, {**args.custom_params, **fields}))
        require_room(cases, arms)
        header = {"arguments": arguments_of(args), "label": args.label, "servers": dict(zip(names, facts, strict=True))}
        with Record(args.out, suite.command, args.revision, resume=True, **header) as record:
            work = Run(suite, record, arms, args.expect)
            if not work.rows:
                estimate(suite, arms, cases)
            began = time.monotonic()
            work.all_groups(groups_of(cases, args.seed if args.mixed else None))
            print(f"{len(work.rows)} answers in {time.monotonic() - began:.0f} s", file=sys.stderr)
            for arm in arms:
                require_answers(arm.name, [row for row in work.rows if row["arm"] == arm.name])
            # Written last: a file without a summary is of a run that was refused or interrupted.
            summary = summarise(work.rows, work.counts)
            for row in summary:
                record.add("summary", **row)
        for field in LEAST:
            if (least := getattr(args, f"least_{field}")) is not None:
                require_least(summary, field, least)
        return suite, work.rows, summary


def _also(text: str) -> tuple[str, dict[str, Any]]:
    name, found, fields = text.partition("=")
    try:
        parsed = json.loads(fields)
    except json.JSONDecodeError:
        parsed = None
    if not found or not isinstance(parsed, dict) or name in ("", "base", "compare", "dense"):
        raise EvaluationError(f"""--also must be NAME=JSON, such as half={{"active_ratio": 0.5}}, got {text!r}""")
    return name, parsed


def _tokens(path: str | None, facts: dict[str, Any]) -> Tokens:
    found = path or facts.get("model_path") or next(iter(facts.get("models", [])), None)
    if found is None:
        raise EvaluationError("the server does not say what model it has: give --tokenizer")
    return tokens(found)


def main(suite_class: type[Suite], arguments: list[str] | None = None) -> int:
    """Run a suite's command; exit status 1 where its figures would not show what they say."""
    parser = parser_of(suite_class)
    args = parser.parse_args(arguments)
    for field in LEAST:
        least = getattr(args, f"least_{field}")
        if least is not None and not 0 < least < 1:
            parser.error(f"--least-{field} must be above 0 and below 1, got {least}")
        if least is not None and args.mixed:
            parser.error(f"--least-{field} is of each task and length, and --mixed counts all of them together")
    try:
        suite, rows, summary = run(suite_class, args)
        if args.plot:
            suite.plot([row for row in rows if row["arm"] == "base" and not row.get("failed")], str(args.plot))
    except Unreachable as error:
        kept = f" (what was measured is in {args.out}: the same command goes on with it)" if args.out.exists() else ""
        print(f"{suite_class.command}: {error}{kept}", file=sys.stderr)
        return 1
    except FAILURES as error:
        print(f"{suite_class.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{suite_class.command}: interrupted; the same command goes on with {args.out}", file=sys.stderr)
        return 130
    print(pd.DataFrame(summary).to_string(index=False))
    return 0
