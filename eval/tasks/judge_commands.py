"""Outside judges, lm-eval's tasks and SGLang's own benchmark client: their command lines, and what they write as rows.

Layouts: the samples of lm-eval 0.4.13 with ``--log_samples``, and the result of SGLang's ``benchmark.serving``
with ``--output-details --cache-report``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.reduction import DupFd
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

from eval.live.arms import Arm, make_arm, require_method
from eval.live.client import LiveServer
from eval.live.counters import EvaluationError
from eval.live.tokens import Tokens, tokens
from eval.scores.stats import Interval, mean_interval
from eval.scores.summary import score
from eval.tasks.local_data import TEXT, Rows

LM_EVAL = "0.4.13"
INSTALL = f'uv pip install "lm-eval[api,ruler]=={LM_EVAL}"'
TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_fwe", "ruler_cwe")
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
# With a small vocabulary lm-eval finds no room for the words of shorter ones, and asks for nothing.
LEAST_CWE = 8192
# SGLang's benchmark client.
CLIENT = "sglang.benchmark.serving"
# Its lengths leave out the beginning of the answer, and ruler_fwe takes some tokens too many.
ROOM = 512


@dataclass(frozen=True)
class Target:
    """The server under judgement: how it is asked, what it says about itself, and its tokenizer."""

    arm: Arm
    facts: dict[str, Any]
    folder: str
    tokens: Tokens


def reach(args: argparse.Namespace, server: LiveServer, least: int) -> Target:
    """Ask a server what it is; refused if it runs another method, or has no room for `least` tokens or no tokenizer."""
    facts = server.facts()
    require_method(args.expect, facts, False)
    arm = make_arm("base", server, facts, args.model, args.custom_params)
    if arm.context is not None and least > arm.context:
        raise EvaluationError(
            f"prompt and answer take up to {least} tokens, the server's context is {arm.context}: start it with a "
            "larger --context-length, or ask for shorter --lengths"
        )
    folder = args.tokenizer or facts.get("model_path")
    if not folder:
        raise EvaluationError("the server does not say where its model is: give --tokenizer")
    return Target(arm, facts, folder, tokens(folder))


def require_lm_eval() -> None:
    """Refuse to begin without the judge in the version wanted, and say how to install it."""
    missing = [name for name in ("lm_eval", "nltk", "wonderwords", "tenacity") if find_spec(name) is None]
    if missing:
        raise EvaluationError(f"{', '.join(missing)} not installed: {INSTALL}")
    found = importlib.metadata.version("lm_eval")
    if found != LM_EVAL:
        raise EvaluationError(f"lm-eval {found} is installed, the tasks wanted are those of {LM_EVAL}: {INSTALL}")


def ruler_groups(tasks: Sequence[str], lengths: Sequence[int]) -> list[tuple[str, int]]:
    """Pair tasks with lengths, the shortest first. Leave out ruler_cwe below ``LEAST_CWE``; refuse it if alone."""
    groups = [(task, length) for length in sorted(set(lengths)) for task in dict.fromkeys(tasks)]
    groups = [group for group in groups if group[0] != "ruler_cwe" or group[1] >= LEAST_CWE]
    if not groups:
        raise EvaluationError(f"ruler_cwe needs --lengths of {LEAST_CWE} or more, got {max(lengths)}")
    return groups


def lm_eval_command(target: Target, args: argparse.Namespace, task: str, length: int | None, folder: Path) -> list[str]:
    """The line that runs a task of lm-eval, at a length if it has any, with its files going to `folder`."""
    model_args = {
        "model": target.arm.model,
        "base_url": f"{args.base_url.rstrip('/')}/v1/completions",
        "tokenizer": target.folder,
        "tokenizer_backend": "huggingface",
        "tokenized_requests": False,
        "num_concurrent": args.concurrency,
        "max_length": target.arm.context or max(LENGTHS) + ROOM,
        "max_retries": 4,
        "timeout": int(args.timeout),
    }
    command = ["python", "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", json.dumps(model_args), "--tasks", task]
    command += ["--metadata", json.dumps({"max_seq_lengths": [length]})] if length else []
    command += ["--log_samples", "--output_path", str(folder)]
    command += ["--limit", str(args.limit)] if args.limit else []
    command += ["--seed", str(args.seed)] if args.seed is not None else []
    return command + (["--gen_kwargs", json.dumps(target.arm.options)] if target.arm.options else [])


def gsm8k_task(data: Path, train: Path | None) -> dict[str, Any]:
    """lm-eval's task gsm8k with the questions of local files, as the content of its YAML file."""
    for path in (data, train):
        if path is not None:
            Rows(path, {"question": TEXT, "answer": TEXT})
    files = {"test": str(data.resolve()), **({"train": str(train.resolve())} if train else {})}
    found = find_spec("lm_eval")
    folder = Path(found.origin).parent if found and found.origin else Path("lm_eval")
    return {
        "include": str(folder / "tasks" / "gsm8k" / "gsm8k.yaml"),
        "task": "gsm8k_local",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
        "training_split": "train" if train else None,
        "fewshot_split": "train" if train else "test",
    }


def serving_command(target: Target, args: argparse.Namespace, length: int, path: Path) -> list[str]:
    """The line that runs SGLang's benchmark client with prompts of `length` tokens, its result going to `path`."""
    prompts = ["--dataset-name", "random-ids", "--random-input-len", str(length), "--random-range-ratio", "1"]
    prompts += ["--random-output-len", str(args.output_length)]
    command = client_command(target, args.base_url, path, args.seed, *prompts)
    command += ["--num-prompts", str(args.prompts), "--max-concurrency", str(args.concurrency)]
    if target.arm.options:
        # The client's own sampling parameters go where any are given.
        sampling = {"temperature": 0.0, "max_new_tokens": args.output_length, "ignore_eos": True, **target.arm.options}
        command += ["--extra-request-body", json.dumps({"sampling_params": sampling})]
    return command


def client_command(target: Target, url: str, path: Path, seed: int | None, *prompts: str) -> list[str]:
    """The line that runs SGLang's benchmark client, its result going to `path`; `prompts` are flags that say which."""
    command = ["python", "-m", CLIENT, "--backend", "sglang", "--base-url", url]
    command += ["--model", target.folder, "--served-model-name", target.arm.model, "--tokenizer", target.folder]
    command += ["--tokenize-prompt", *prompts, "--flush-cache", "--cache-report"]
    command += ["--output-details", "--output-file", str(path)]
    return command + (["--seed", str(seed)] if seed is not None else [])


def run_judge(command: Sequence[str], scratch: Path, log: Path) -> None:
    """Run a judge without any network but the server's, everything that it prints going to the end of `log`.

    One that fails is refused with the last line of what it printed.
    """
    # Importing the tasks looks for these sentence rules and would download them; no task here splits sentences.
    (scratch / "nltk" / "tokenizers" / "punkt_tab").mkdir(parents=True, exist_ok=True)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_PROXY": "*", "no_proxy": "*"}
    offline |= {"NLTK_DATA": str(scratch / "nltk")}
    with log.open("a") as file:
        file.write(f"$ {shlex.join(command)}\n")
        file.flush()
        if list(command[1:3]) == ["-m", CLIENT]:
            status = _forked(command[3:], offline, file.fileno())
        else:
            line = [sys.executable, *command[1:]]
            ended = subprocess.run(line, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **offline})
            status = ended.returncode
    if status:
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise EvaluationError(f"{command[2]} ended with status {status}: {said[-1].strip()} (all of it: {log})")


def _forked(arguments: Sequence[str], environment: Mapping[str, str], output: int) -> int:
    """Run SGLang's client as a fork of a process that has imported it, which takes longer than a short benchmark.

    Its exit status is returned.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([CLIENT])
    # What it imports reads its environment then.
    with mock.patch.dict(os.environ, environment):
        multiprocessing.forkserver.ensure_running()
    process = context.Process(target=_run_client, args=(CLIENT, list(arguments), dict(environment), DupFd(output)))
    process.start()
    process.join()
    return process.exitcode or 0


def _run_client(module: str, arguments: list[str], environment: dict[str, str], output: Any) -> None:
    os.environ.update(environment)
    file = output.detach()
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


WITHIN = 0.02
GSM8K_SCORES = {"strict-match": "score", "flexible-extract": "flexible"}
STATISTICS = ("mean", "median", "p99")
TIMES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e_latency": "seconds"}

Row = Mapping[str, Any]
Sizes = Callable[[Sequence[str]], list[int]]


def read_samples(folder: Path, task: str) -> list[dict[str, Any]]:
    """The samples of a task that lm-eval wrote somewhere under a folder; refuses a folder without any."""
    found = sorted(folder.rglob(f"samples_{task}_*.jsonl"))
    samples = [json.loads(line) for path in found for line in path.read_text(encoding="utf-8").split("\n") if line]
    if not samples:
        raise EvaluationError(f"lm-eval left no samples of {task} under {folder}")
    return samples


def prompt_of(sample: Row) -> str:
    """The text that lm-eval sent."""
    return sample["arguments"]["gen_args_0"]["arg_0"]


def ruler_items(task: str, length: int, samples: Sequence[Row], sizes: Sizes) -> list[dict[str, Any]]:
    """Item rows of a RULER task; the score is lm-eval's: the share of the references that the output contains.

    Refused if a sample was made without references, or is of another length.
    """
    empty = sum(not sample["doc"]["outputs"] for sample in samples)
    if empty:
        raise EvaluationError(f"{task}: {empty} of {len(samples)} samples of {length} tokens have nothing to find")
    if any(sample["doc"]["max_length"] != length or str(length) not in sample for sample in samples):
        raise EvaluationError(f"{task}: lm-eval's samples are not those of {length} tokens")
    answers = [list(sample["doc"]["outputs"]) for sample in samples]
    # The other lengths stand there as -1, which means "not run".
    scores = [{"score": float(sample[str(length)])} for sample in samples]
    return _items(task, length, samples, answers, scores, sizes)


def gsm8k_items(samples: Sequence[Row], sizes: Sizes) -> list[dict[str, Any]]:
    """Item rows of GSM8K: ``score`` is lm-eval's strict match (``#### number``), ``flexible`` its match of the last
    number.
    """
    questions: dict[int, dict[str, Row]] = {}
    for sample in samples:
        questions.setdefault(sample["doc_id"], {})[sample["filter"]] = sample
    first = [next(iter(found.values())) for _, found in sorted(questions.items())]
    answers = [[sample["target"].split("####")[-1].strip()] for sample in first]
    scores = [
        {ours: float(found[theirs]["exact_match"]) for theirs, ours in GSM8K_SCORES.items()}
        for _, found in sorted(questions.items())
    ]
    return _items("gsm8k", None, first, answers, scores, sizes)


def _items(
    task: str,
    length: int | None,
    samples: Sequence[Row],
    answers: Sequence[list[str]],
    scores: Sequence[dict[str, float]],
    sizes: Sizes,
) -> list[dict[str, Any]]:
    prompts, outputs = [prompt_of(sample) for sample in samples], [sample["resps"][0][0] for sample in samples]
    asked, said = sizes(prompts), sizes(outputs)
    rows = []
    for i, sample in enumerate(samples):
        index = sample["doc_id"]
        name = "/".join(str(part) for part in (task, length, index) if part is not None)
        row = {"arm": "base", "id": name, "task": task, "length": length, "depth": None, "index": index}
        row |= {"prompt_tokens": asked[i], "prompt_sha": hashlib.sha256(prompts[i].encode()).hexdigest()[:16]}
        row |= {"answers": answers[i], "output": outputs[i], "completion_tokens": said[i], "scores": scores[i]}
        rows.append(row)
    return rows


def serving_rows(result: Row) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Item rows and the summary of a run of SGLang's benchmark client; seconds, and tokens a second.

    Returns:
        For each request its time to the first token, its mean time for each further one, and its tokens; where it
        failed or no text of it came, why. Of the run what the client computed: mean, median and 99th percentile of the
        time to the first token (ttft), per further token of a request (tpot), between two tokens (itl) and of the whole
        request (seconds), and what the server worked off.
    """
    length = result["random_input_len"]
    items = []
    names = ("input_lens", "output_lens", "ttfts", "itls", "errors")
    for i, (asked, said, ttft, gaps, error) in enumerate(zip(*(result[name] for name in names), strict=True)):
        row = {"arm": "base", "id": f"serving/{length}/{i}", "task": "serving", "length": length, "index": i}
        row |= {"prompt_tokens": asked, "completion_tokens": said}
        # The client leaves 0 where no text came, as when only special tokens were sampled.
        if error or not ttft:
            row["failed"] = error.strip().splitlines()[-1] if error else "no text came"
        else:
            row |= {"ttft": ttft, "tpot": fmean(gaps) if gaps else None}
        items.append(row)
    summary = {"task": "serving", "length": length, "arm": "base", "n": len(items)}
    summary |= {"failed": sum("failed" in row for row in items), "completion_length": result["random_output_len"]}
    summary |= {
        f"{ours}_{statistic}": result[f"{statistic}_{theirs}_ms"] / 1000
        for theirs, ours in TIMES.items()
        for statistic in STATISTICS
    }
    for name in ("duration", "request_throughput", "input_throughput", "output_throughput", "concurrency"):
        summary[name] = result[name]
    summary["cached_tokens"] = result["cache_report"]["total_cached_tokens"]
    return items, summary


def difference_interval(mine: Sequence[float], theirs: Sequence[float]) -> Interval:
    """95 % interval of the difference of two means of scores between 0 and 1, of different questions.

    Newcombe's: the distances of the two means from the ends of their Wilson intervals, added as squares (Newcombe 1998,
    method 10).
    """
    a, b = fmean(mine), fmean(theirs)
    (a_low, a_high), (b_low, b_high) = mean_interval(mine), mean_interval(theirs)
    return a - b - math.hypot(a - a_low, b_high - b), a - b + math.hypot(a_high - a, b - b_low)


def agreement(ours: Sequence[Row], theirs: Sequence[Row]) -> list[dict[str, Any]]:
    """Compare our RULER scores with the judge's, task by task and length by length.

    The questions differ (each draws its own), so the comparison is not paired. lm-eval's "ruler_vt" is our "vt". Of our
    rows the items of the server under judgement count.

    Returns:
        For each task and length in both: questions, mean tokens of their prompts (lm-eval fills a length in large steps
        and may stay far below it) and mean scores; the difference in points (hundredths, ours less the judge's) with
        its 95 % interval; and ``agrees``: whether it is at most two.

    Raises:
        EvaluationError: no task and length is in both.
    """
    mine, judged = _groups(ours), _groups(theirs)
    both = [key for key in mine if key in judged]
    if not both:
        raise EvaluationError(f"nothing to compare: ours has {_named(mine)}, theirs {_named(judged)}")
    rows = []
    for key in both:
        pair = {"ours": mine[key], "theirs": judged[key]}
        scores = {name: [score(item) for item in items] for name, items in pair.items()}
        row: dict[str, Any] = {"task": key[0], "length": key[1]}
        for name, items in pair.items():
            row |= {f"n_{name}": len(items), name: fmean(scores[name])}
            row[f"tokens_{name}"] = fmean(item.get("prompt_tokens", 0) for item in items)
        low, high = difference_interval(scores["ours"], scores["theirs"])
        difference = row["ours"] - row["theirs"]
        row |= {"points": 100 * difference, "points_interval": (100 * low, 100 * high)}
        rows.append(row | {"agrees": abs(difference) <= WITHIN + 1e-9})
    return rows


def unmatched(ours: Sequence[Row], theirs: Sequence[Row]) -> list[str]:
    """Tasks with their lengths that only one of the two has."""
    alone = _groups(ours).keys() ^ _groups(theirs).keys()
    return [f"{task} {length}" for task, length in sorted(alone, key=str)]


def _groups(rows: Sequence[Row]) -> dict[tuple[str, int | None], list[Row]]:
    found: dict[tuple[str, int | None], list[Row]] = {}
    # A question that failed and was asked again by a later run counts once.
    for row in {row["id"]: row for row in rows if row["kind"] == "item" and row["arm"] == "base"}.values():
        found.setdefault((row["task"].removeprefix("ruler_"), row["length"]), []).append(row)
    return found


def _named(groups: Mapping[tuple[str, int | None], Any]) -> str:
    return ", ".join(f"{task} {length}" for task, length in groups) or "no items"
