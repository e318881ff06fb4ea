"""The command lines of outside judges: lm-eval's tasks, and SGLang's own benchmark client."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any
from unittest import mock

from eval.live.arms import Arm, make_arm, require_method
from eval.live.client import LiveServer
from eval.live.counters import EvaluationError
from eval.live.tokens import Tokens, tokens
from eval.tasks.local_data import TEXT, Rows
from eval.texts.haystacks import chosen

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
    """Ask a server what it is, and whether it has room for `least` tokens of prompt and answer.

    Raises:
        EvaluationError: nobody answers, it runs another method than expected, has no room, or no tokenizer is found.
    """
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
    """Which tasks to run at which lengths, the shortest first; ruler_cwe not below ``LEAST_CWE``.

    Raises:
        EvaluationError: a task or a length is none of those that can be run here, or nothing is left.
    """
    wrong = [length for length in lengths if length not in LENGTHS]
    if wrong or not lengths:
        raise EvaluationError(f"--lengths: got {wrong or 'none'}, allowed are {', '.join(map(str, LENGTHS))}")
    groups = [(task, length) for length in sorted(set(lengths)) for task in chosen(tasks, TASKS)]
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
    command = ["python", "-m", CLIENT, "--backend", "sglang", "--base-url", args.base_url]
    command += ["--model", target.folder, "--served-model-name", target.arm.model, "--tokenizer", target.folder]
    command += ["--dataset-name", "random-ids", "--tokenize-prompt", "--random-input-len", str(length)]
    command += ["--random-output-len", str(args.output_length), "--random-range-ratio", "1"]
    command += ["--num-prompts", str(args.prompts), "--max-concurrency", str(args.concurrency)]
    command += ["--flush-cache", "--cache-report", "--output-details", "--output-file", str(path)]
    command += ["--seed", str(args.seed)] if args.seed is not None else []
    if target.arm.options:
        # The client's own sampling parameters go where any are given.
        sampling = {"temperature": 0.0, "max_new_tokens": args.output_length, "ignore_eos": True, **target.arm.options}
        command += ["--extra-request-body", json.dumps({"sampling_params": sampling})]
    return command


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
