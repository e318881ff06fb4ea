"""``python -m eval.judges``: judges from outside, so that nobody needs to trust the tasks and clocks of this project.

    python -m eval.judges ruler --base-url URL --lengths 4096,8192 --out judged.jsonl
    python -m eval.judges gsm8k --base-url URL --data gsm8k_test.jsonl --out gsm8k.jsonl
    python -m eval.judges serving --base-url URL --lengths 4096 --output-length 128 --out serving.jsonl
    python -m eval.judges agree --ours ruler.jsonl --theirs judged.jsonl

``ruler`` and ``gsm8k`` run the tasks of lm-eval, the Language Model Evaluation Harness, which is not installed with
this project: ``uv pip install "lm-eval[api,ruler]==0.4.13"``. What they run, for each task and length:

    HF_HUB_OFFLINE=1 python -m lm_eval run --model local-completions --model_args '{"model": NAME,
    "base_url": "URL/v1/completions", "tokenizer": FOLDER, "tokenizer_backend": "huggingface",
    "tokenized_requests": false, "num_concurrent": 8, "max_length": CONTEXT, "max_retries": 4, "timeout": 1800}'
    --tasks niah_single_1 --metadata '{"max_seq_lengths": [4096]}' --log_samples --output_path FOLDER [--limit N]

Only the six RULER tasks that need no network are there; all are raw prompts, without the chat template. lm-eval makes
500 questions for each, whatever ``--limit`` says. ``gsm8k`` is its five-shot task with the questions of a local file;
without ``--train`` the examples are other questions of the same file, where the official task has training questions.

``serving`` runs SGLang's own benchmark client with random token ids, the prefix cache flushed before:

    python -m sglang.benchmark.serving --backend sglang --base-url URL --dataset-name random-ids --tokenize-prompt
    --random-input-len LENGTH --random-output-len N --random-range-ratio 1 --num-prompts N --max-concurrency N
    --flush-cache --cache-report --output-details

``agree`` compares scores of ``eval.ruler`` (raw prompts, its default) with those of ``ruler`` here, and ends with
status 1 where they differ by more than two points. With few questions chance alone does that: see the interval.

The exact lines of a run stand in its file's header, what a judge printed in a .log beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eval.live.arms import MAX_FAILED, require_proof
from eval.live.client import HelpFormatter, LiveServer, list_of, positive, shown
from eval.live.counters import EvaluationError, moved, read_shares
from eval.live.record import Record, read_rows
from eval.live.runner import arguments_of
from eval.scores.summary import summarise
from eval.tasks import judge_commands as outside
from eval.texts.lengths import length

Rows = list[dict[str, Any]]


class Run:
    """State shared by the commands that ask a server: the file, and proof that a sparse server decoded sparse."""

    def __init__(
        self, args: argparse.Namespace, target: outside.Target, commands: Iterable[Sequence[str]], **header: Any
    ):
        self.args, self.target = args, target
        header |= {"arguments": arguments_of(args), "label": args.label, "servers": {"base": target.facts}}
        header["commands"] = [shlex.join(command) for command in commands]
        # What a clock says of two halves says nothing about the whole.
        resume = args.judge == "ruler"
        self.record = Record(args.out, f"eval.judges {args.judge}", args.revision, resume, **header)
        # The check is written after the last item of its task and length.
        self.finished = {(row["task"], row["length"]) for row in self.record.earlier if row["kind"] == "check"}
        items = [row for row in self.record.earlier if row["kind"] == "item"]
        self.items = [row for row in items if (row["task"], row["length"]) in self.finished]
        self.counts = [row for row in self.record.earlier if row["kind"] == "counters"]

    def judge(self, command: Sequence[str], scratch: Path, task: str, length: int | None) -> None:
        """Run a judge, keep what the server counted, and refuse a sparse one that did not decode sparse."""
        arm = self.target.arm
        before = arm.server.counters() if arm.counted else None
        outside.run_judge(command, scratch, self.args.out.with_suffix(".log"))
        if before is not None:
            counts = moved(before, arm.server.counters())
            row = {"arm": "base", "task": task, "length": length, **read_shares(counts), "counters": counts}
            self.counts.append(row)
            self.record.add("counters", **row)
            require_proof(f"{task} {length or ''}".strip(), arm, self.args.expect, [counts])

    def add_samples(self, rows: Rows, prompt: str) -> None:
        """Write the items of one task and length, and how many tokens the server counts in one of their prompts.

        A warning where other ones are counted here, as with a token that only the server adds.
        """
        self.items += rows
        for row in rows:
            self.record.add("item", **row)
        target, place = self.target, {name: rows[0][name] for name in ("id", "task", "length")}
        request = {"model": target.arm.model, "prompt": prompt, "max_tokens": 1}
        answer = target.arm.server.ask(lambda http: http.post("/v1/completions", json=request)).raise_for_status()
        served = answer.json()["usage"]["prompt_tokens"]
        here = len(target.tokens.start()) + rows[0]["prompt_tokens"]
        self.record.add("check", **place, prompt_tokens=served, counted_here=here)
        if served != here:
            print(f"{rows[0]['id']}: the server reads a prompt of {here} tokens as {served}", file=sys.stderr)

    def summary(self) -> Rows:
        """Judge what was measured, and write that too."""
        rows = summarise(self.items, self.counts)
        for row in rows:
            self.record.add("summary", **row)
        return rows


def ruler(args: argparse.Namespace) -> Rows:
    """Run lm-eval's RULER tasks, each at each length apart, so that one that fails takes no others with it."""
    outside.require_lm_eval()
    groups = outside.ruler_groups(args.tasks, args.lengths)
    if "ruler_cwe" in args.tasks and min(args.lengths) < outside.LEAST_CWE:
        print(f"ruler_cwe is left out below {outside.LEAST_CWE} tokens", file=sys.stderr)
    with LiveServer(args.base_url) as server, tempfile.TemporaryDirectory() as name:
        scratch, out = Path(name), Path(name) / "out"
        target = outside.reach(args, server, max(args.lengths) + outside.ROOM)
        lines = {group: outside.lm_eval_command(target, args, *group, out) for group in groups}
        run = Run(args, target, lines.values(), lm_eval=outside.LM_EVAL)
        with run.record:
            for task, length in tqdm([group for group in groups if group not in run.finished], desc="lm-eval"):
                run.judge(lines[task, length], scratch, task, length)
                samples = outside.read_samples(out, task)
                # As large as all prompts together.
                shutil.rmtree(out)
                run.add_samples(
                    outside.ruler_items(task, length, samples, target.tokens.sizes), outside.prompt_of(samples[0])
                )
            return run.summary()


def gsm8k(args: argparse.Namespace) -> Rows:
    """Run lm-eval's GSM8K with the questions of a file."""
    outside.require_lm_eval()
    task = outside.gsm8k_task(args.data, args.train)
    with LiveServer(args.base_url) as server, tempfile.TemporaryDirectory() as name:
        scratch, target = Path(name), outside.reach(args, server, 0)
        (scratch / "gsm8k_local.yaml").write_text(json.dumps(task))
        more = ["--include_path", name, "--num_fewshot", str(args.fewshot)]
        line = outside.lm_eval_command(target, args, "gsm8k_local", None, scratch / "out") + more
        digest = hashlib.sha256(args.data.read_bytes()).hexdigest()[:16]
        run = Run(args, target, [line], lm_eval=outside.LM_EVAL, data_sha=digest)
        with run.record:
            run.judge(line, scratch, "gsm8k", None)
            samples = outside.read_samples(scratch / "out", "gsm8k_local")
            run.add_samples(outside.gsm8k_items(samples, target.tokens.sizes), outside.prompt_of(samples[0]))
            return run.summary()


def serving(args: argparse.Namespace) -> Rows:
    """Run SGLang's benchmark client."""
    with LiveServer(args.base_url) as server, tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        target = outside.reach(args, server, max(args.lengths) + args.output_length)
        files = {length: scratch / f"{length}.jsonl" for length in sorted(set(args.lengths))}
        lines = {length: outside.serving_command(target, args, length, files[length]) for length in files}
        run = Run(args, target, lines.values(), sglang=importlib.metadata.version("sglang"))
        summary: Rows = []
        with run.record:
            for length, line in tqdm(lines.items(), desc="benchmark"):
                run.judge(line, scratch, "serving", length)
                items, row = outside.serving_rows(json.loads(files[length].read_text()))
                for item in items:
                    run.record.add("item", **item)
                run.record.add("summary", **row)
                summary.append(row)
                failed = [item["failed"] for item in items if "failed" in item]
                if len(failed) > MAX_FAILED * len(items):
                    raise EvaluationError(f"void: {len(failed)} of {len(items)} requests failed: {failed[0]}")
    return summary


def agree(args: argparse.Namespace) -> Rows:
    """Compare two files, without a server."""
    ours, theirs = read_rows(args.ours), read_rows(args.theirs)
    alone = outside.unmatched(ours, theirs)
    if alone:
        print(f"only in one of the files: {', '.join(alone)}", file=sys.stderr)
    return outside.agreement(ours, theirs)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser("eval.judges", description=__doc__, formatter_class=HelpFormatter)
    judges = found.add_subparsers(dest="judge", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--base-url", required=True, help="the server under judgement")
    common.add_argument("--out", required=True, type=Path, help="JSONL file; ruler goes on with one that was begun")
    common.add_argument("--model", help="its name at the server; the first one there by default")
    common.add_argument("--tokenizer", help="folder or name; the server's own model path by default")
    common.add_argument("--concurrency", type=positive, default=8, help="requests in flight")
    common.add_argument("--timeout", type=positive, default=1800, help="seconds of one request of lm-eval")
    common.add_argument("--seed", type=int, help="the judge's own by default")
    common.add_argument("--custom-params", type=json.loads, default={}, help="JSON, sent with each request")
    common.add_argument("--expect", default="auto", help="what the server must prove, as in eval.live.runner")
    common.add_argument("--label", help="kept in the file's header")
    common.add_argument("--revision", help="of this code, where its git history is not at hand")
    each = {}
    for function in (ruler, gsm8k, serving):
        each[function] = judges.add_parser(
            function.__name__,
            parents=[common],
            help=function.__doc__,
            description=__doc__,
            formatter_class=HelpFormatter,
        )
    for function in (ruler, gsm8k):
        each[function].add_argument("--limit", type=positive, help="questions of each task and length (default: all)")
    each[ruler].add_argument(
        "--tasks",
        type=list_of(str, outside.TASKS),
        default=",".join(outside.TASKS),
        help=f"of {', '.join(outside.TASKS)}",
    )
    each[ruler].add_argument(
        "--lengths",
        type=list_of(length, outside.LENGTHS),
        default="4096",
        help=f"of {', '.join(map(str, outside.LENGTHS))}",
    )
    each[gsm8k].add_argument("--data", type=Path, required=True, help="JSONL file with question and answer")
    each[gsm8k].add_argument("--train", type=Path, help="the same for the examples; --data by default")
    each[gsm8k].add_argument("--fewshot", type=int, default=5, help="examples before each question")
    each[serving].add_argument("--lengths", type=list_of(length, some=True), default="4096", help="tokens of a prompt")
    each[serving].add_argument("--output-length", type=positive, default=128, help="tokens of an answer")
    each[serving].add_argument("--prompts", type=positive, default=32, help="requests of each length")
    both = judges.add_parser("agree", help=agree.__doc__, description=__doc__, formatter_class=HelpFormatter)
    both.add_argument("--ours", type=Path, required=True, help="file of eval.ruler")
    both.add_argument("--theirs", type=Path, required=True, help="file of eval.judges ruler")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run a judge; exit status 1 where its figures would not show what they say, or do not agree with ours."""
    args = parser().parse_args(arguments)
    judge = {"ruler": ruler, "gsm8k": gsm8k, "serving": serving, "agree": agree}[args.judge]
    return shown("eval.judges", lambda: judge(args), "agrees")


if __name__ == "__main__":
    sys.exit(main())
