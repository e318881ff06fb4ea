"""The command of a training run: its arguments, its files and the order of its stages."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from eval.lab.train import accuracy
from eval.lab.train.checkpoint import load, load_weights, save, save_weights
from eval.lab.train.layers import LAYERS, causal
from eval.lab.train.mla_model import TinyMLA
from eval.lab.train.schedule import next_stage
from eval.lab.train.trainer import Trainer
from eval.texts.text import read_books

RESUME, LOG, ACCURACY = "resume.safetensors", "training.jsonl", "accuracy.jsonl"
PROMPTS = 64
"""Per task and length in the accuracy at the end; half of it above 8k tokens and if sparse."""
Line = dict[str, Any]


def arguments(
    description: str, budget: float, evaluation: float, trunk: bool = False, proxies: Sequence[float] = ()
) -> argparse.Namespace:
    """Parses the command line; defaults are in seconds.

    Args:
        trunk: the model is built on a finished one, whose folder takes the place of the tokenizer's.
        proxies: defaults of ``--proxy-weights``, one a layer; without any there is no such argument.

    Returns:
        The arguments, with `train_seconds`: what the budget leaves for the stages.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True, help="folder with books/train and books/heldout")
    if trunk:
        parser.add_argument("--trunk", type=Path, required=True, help="folder of the finished tiny model")
    else:
        parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint and of training.jsonl")
    parser.add_argument("--resume", type=Path, help="output folder of an earlier run to go on from")
    parser.add_argument("--from-stage", help="where to begin; by default where the earlier run ran out of time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=131072, help="tokens per step")
    parser.add_argument("--steps", type=int, default=10**9, help="upper limit of the steps of every stage")
    parser.add_argument("--max-length", type=int, default=32768, help="upper limit of the length of every stage")
    parser.add_argument("--budget-seconds", type=float, default=budget, help="for the whole run, from its start")
    parser.add_argument("--evaluate-seconds", type=float, default=evaluation, help="of these, for the accuracy")
    parser.add_argument("--revision", default="unknown", help="of the code; goes into the log")
    if proxies:
        parser.add_argument(
            "--proxy-weights", type=weights_by_layer, default=proxies, help="of RoPE-only scores, by layer"
        )
    args = parser.parse_args()
    if trunk:
        args.tokenizer = args.trunk
    args.train_seconds = args.budget_seconds - args.evaluate_seconds
    return args


def weights_by_layer(text: str) -> tuple[float, ...]:
    """Comma-separated numbers, one a layer.

    Raises:
        argparse.ArgumentTypeError: not as many, or one that is negative or no number.
    """
    try:
        weights = tuple(map(float, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed are {LAYERS} numbers with commas") from error
    if len(weights) != LAYERS or not all(0 <= weight < math.inf for weight in weights):
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed are {LAYERS} numbers from 0 on")
    return weights


def attention_backends(device: torch.device, size: int, widths: tuple[int, ...]) -> tuple[list[SDPBackend], int]:
    """The width of padded values and the fused attention backends that this GPU is fastest with.

    Args:
        size: head dimension of queries and keys.
        widths: head dimensions that values may have, the first one known to all backends.

    Returns:
        Backends, the faster first, and the width; a pair whose gradients are off is left out.
    """
    if device.type == "cpu":
        return [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], widths[0]
    shapes = [(2, 8192, 8, size), (2, 8192, 8, size), (2, 8192, 8, min(widths))]
    inputs = [torch.randn(s, device=device, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    results: dict[tuple[SDPBackend, int], tuple[float, tuple[torch.Tensor, ...]]] = {}
    for width in widths:
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            try:
                with sdpa_kernel(backend):
                    for _ in range(3):
                        torch.cuda.synchronize()
                        start = time.perf_counter()
                        out = causal(inputs[0], inputs[1], inputs[2], width)
                        grads = torch.autograd.grad(out.float().square().sum(), inputs)
                        torch.cuda.synchronize()
                        results[backend, width] = (time.perf_counter() - start, grads)
            except RuntimeError as error:
                print(f"attention: {backend.name} is not usable with values of {width}: {str(error)[:200]}")
    expected = results[SDPBackend.FLASH_ATTENTION, widths[0]][1]
    for (backend, width), (seconds, grads) in list(results.items()):
        off = max(float((g - e).float().norm() / e.float().norm()) for g, e in zip(grads, expected, strict=True))
        print(f"attention: {backend.name}, values of {width}: {seconds * 1e3:.2f} ms, gradients differ by {off:.1e}")
        if not off <= 0.02:
            del results[backend, width]
    ranked = sorted(results, key=lambda pair: results[pair][0])
    return [backend for backend, width in ranked if width == ranked[0][1]], ranked[0][1]


def read_log(folder: Path | None) -> list[Line]:
    """Lines of an earlier run, if there is one."""
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()] if folder else []


def header(trainer: Trainer) -> Line:
    """First line of a run in the log."""
    args = trainer.args
    device = torch.cuda.get_device_name() if trainer.device.type == "cuda" else "CPU"
    parameters = sum(w.numel() for w in trainer.model.parameters())
    line: Line = {"model": trainer.model.name, "revision": args.revision, "seed": args.seed}
    line |= {"tokens_per_step": args.tokens, "device": device, "parameters": parameters}
    line |= {"budget_seconds": args.budget_seconds, "resumed": args.resume is not None}
    return line | ({"proxy_weights": args.proxy_weights} if hasattr(args, "proxy_weights") else {})


def train(trainer: Trainer, size: int, widths: tuple[int, ...]) -> None:
    """Runs the stages, writes checkpoint and log after each, and measures the accuracy at the end.

    Args:
        size, widths: head dimensions, see `attention_backends`.

    Raises:
        ValueError: if --from-stage names no stage.
    """
    args, last = trainer.args, trainer.stages[-1]
    log = [line for line in read_log(args.resume) if line.get("stage") != last.name]
    first = next_stage(trainer.stages, log)
    if args.from_stage:
        names = [stage.name for stage in trainer.stages]
        if args.from_stage not in names:
            raise ValueError(f"--from-stage is no stage: got {args.from_stage}, allowed are {', '.join(names)}")
        first = names.index(args.from_stage)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.resume:
        load_weights(trainer.model, args.resume / RESUME)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        # A model on a trunk links to its files.
        if (args.out / name).resolve() != (args.tokenizer / name).resolve():
            shutil.copy(args.tokenizer / name, args.out / name)
    log.append(header(trainer))
    backends, width = attention_backends(trainer.device, size, widths)
    if isinstance(trainer.model, TinyMLA):
        trainer.model.value_width = width
    with sdpa_kernel(backends, set_priority=True):
        for stage in trainer.stages[first:]:
            log.append(trainer.run(stage))
            save(trainer.model, args.out)
            if stage is not last:
                # In bfloat16: the rounding is less than a step, and files of 14 MiB travel more easily.
                save_weights(trainer.model, args.out / RESUME)
            (args.out / LOG).write_text("".join(json.dumps(line) + "\n" for line in log))
            # A stage that --steps cuts short is not meant to learn.
            if stage.required and log[-1]["ended"] != "gate" and args.steps >= stage.steps:
                raise SystemExit(f"the stage {stage.name} ended before its gate opened: try another seed")
    if args.evaluate_seconds:
        evaluate(trainer)


def evaluate(trainer: Trainer) -> None:
    """Measures the checkpoint as it was saved, until the budget is spent."""
    args = trainer.args
    model = load(args.out, trainer.device, trainer.model.compute)
    sampler = accuracy.Sampler(trainer.tokenizer, read_books(trainer.books("eval")), args.seed + 1)
    left = args.budget_seconds - trainer.seconds()
    jobs = [job for job in accuracy.jobs(model, args.max_length) if accuracy.is_brief(job)]
    accuracy.write(model, sampler, jobs, args.out / ACCURACY, PROMPTS, seconds=left)
