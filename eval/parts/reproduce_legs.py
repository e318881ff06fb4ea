"""The legs of ``eval.reproduce``: which server each needs, which commands it runs, and which goals these measure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.figures.goals import Goal
from eval.parts.model_shapes import SHAPES

# In the arguments of a command: the URL of its leg's server, and the folder of the results.
URL, FOLDER = "{url}", "{folder}"
MODELS = "models"


@dataclass(frozen=True)
class Server:
    """A server of SGLang that the commands of a leg ask.

    Attributes:
        model: of `eval.parts.model_shapes.SHAPES`, which gets dummy weights, or the path of a checkpoint.
        flags: further arguments of its command line.
    """

    model: str
    flags: tuple[str, ...] = ()

    def model_path(self, folder: Path) -> Path:
        """Where the model is: that of a shape is written into the folder of the results."""
        return folder / MODELS / self.model if self.model in SHAPES else Path(self.model)

    def arguments(self) -> list[str]:
        """Of its command line, but for model and port."""
        return [*(["--load-format", "dummy"] if self.model in SHAPES else []), *self.flags]


@dataclass(frozen=True)
class Command:
    """One command, which writes one file.

    Attributes:
        module: what ``python -m`` runs.
        file: name of what it writes in the folder of the results: JSONL with a summary, where it is one of ``eval``.
        arguments: but for ``--out`` and ``--revision``; ``{url}`` and ``{folder}`` stand for what is known later.
        goals: of ``eval/goals.json`` that its file has: ids, or "id: part" for one part alone.
    """

    module: str
    file: str
    arguments: tuple[str, ...] = ()
    goals: tuple[str, ...] = ()

    def line(self, folder: Path, url: str, revision: str | None = None) -> list[str]:
        """Module and arguments."""
        filled = [argument.replace(URL, url).replace(FOLDER, str(folder)) for argument in self.arguments]
        # Only commands of eval keep the revision in their files.
        known = ["--revision", revision] if revision and self.module.startswith("eval.") else []
        return [self.module, *filled, "--out", str(folder / self.file), *known]

    def needs(self, other: Command) -> bool:
        """Whether it reads the file of another one."""
        return f"{FOLDER}/{other.file}" in self.arguments

    def claims(self, goal: Goal) -> bool:
        """Whether its file is to have the row of a goal."""
        return goal.id in self.goals or f"{goal.id}: {goal.part}" in self.goals


@dataclass(frozen=True)
class Leg:
    """What is measured together, on one server if any.

    Attributes:
        name: on the command line.
        commands: in their order.
        server: that is started for them; None where they need none or start their own.
    """

    name: str
    commands: tuple[Command, ...]
    server: Server | None = None

    def claims(self, goals: Iterable[Goal]) -> str:
        """The goals that it measures, as ``--list`` prints them."""
        mine = [goal for goal in goals if any(command.claims(goal) for command in self.commands)]
        return "; ".join(f"{goal.id}: {goal.part}" for goal in mine)

    def starts(self) -> str:
        """What it starts beside its commands, as ``--list`` prints it."""
        if self.server:
            return f"a server of {self.server.model}"
        return "servers of its own" if any(one.module == "eval.bench_serving" for one in self.commands) else "nothing"


def _resa(
    model: str, context: int, kv_tokens: int, memory: float, batch: int, config: Mapping[str, Any] | None = None
) -> Server:
    """A server of ReSA with room for one batch of long prompts, its short ones and its answers, and hardly more.

    Args:
        model: name of the shape.
        context: tokens of the longest request.
        kv_tokens: that the KV pool holds.
        memory: share of the GPU's memory for weights, KV and page summaries.
        batch: requests of the largest batch.
        config: of the method, as far as it is not its defaults.
    """
    flags = ["--attention-backend", "fa3", "--context-length", str(context), "--max-total-tokens", str(kv_tokens)]
    flags += ["--mem-fraction-static", str(memory), "--cuda-graph-max-bs-decode", str(batch)]
    flags += ["--max-running-requests", str(batch + 2), "--sparse-method", "resa"]
    flags += ["--sparse-config", json.dumps(config)] if config else []
    return Server(model, tuple(flags))


def _decode(shape: str, batch: int, context: int, goal: str, *more: str) -> Command:
    arguments = ("--base-url", URL, "--shape", shape, "--batch", str(batch), "--context", str(context), *more)
    return Command("eval.bench_decode", f"bench-decode-{shape}.jsonl", arguments, (goal,))


def _serving(shape: str, *arguments: str, file: str = "", goals: tuple[str, ...] = ()) -> Command:
    return Command("eval.bench_serving", file or f"serving-{shape}.jsonl", ("--shape", shape, *arguments), goals)


_1_7B = ("qwen3-1.7b", 264192, 1056000, 0.95, 4)
_8B = ("qwen3-8b", 133120, 797696, 0.97, 6)
# Summaries of half the size leave room for answers of twice the length.
_8B_FP8 = ("qwen3-8b", 133120, 807936, 0.97, 6)
_FP8 = {"summary_dtype": "fp8", "active_ratio": 0.05, "rectify_interval": 64}
# Eight intervals of 64 tokens; with short prompts of 1,024 the largest batch would not fit.
_EVERY_64 = ("--interval", "64", "--tokens", "512", "--short", "256")
_FA3 = "--attention-backend fa3 --page-size 16 --mem-fraction-static"
_PROFILE = ("--base-url", URL, "--arm", "sparse", "--batch", "1", "--context", "262144")
# Tokens of the generated inputs of servers whose longest context is 128k, as their /server_info says.
_POSITIONS = ("--positions", "131460")
_LENGTHS = ("--lengths", "32k,64k,128k", *_POSITIONS)
# A server prefills the first 8k of 32k densely: there 89 % would cost far more of the attention mass than elsewhere.
_LEFT_OUT = ("--sparsity", "0.89,32k=0.78")
_SERVED = (*_LENGTHS, *_LEFT_OUT, "--dense-below", "8k", "--peers", "")
_ROBSA = {"page_size": 64, "allow_uncalibrated": True}
_HALF = f"--sparse-method robsa --sparse-config '{json.dumps({**_ROBSA, 'layers': '14-'})}'"
_MLA_INPUTS, _PREFILL_RECALL = "mla-v2-lite.jsonl", "prefill-qwen3-8b.jsonl"

LEGS: tuple[Leg, ...] = (
    Leg("kernels", (Command("eval.bench_kernels", "bench_kernels.jsonl", goals=("K1", "K2", "K3", "K4")),)),
    Leg(
        "tune",
        # What rectification costs a request of few tokens: a pass, which reads the weights, every 32 steps.
        (
            Command(
                "sglang_sparse.tune",
                "crossover.json",
                ("--shape", "32x8x128", "--shape", "16x8x128", "--overhead-us", "4"),
            ),
        ),
    ),
    Leg(
        "e1",
        (
            _decode("qwen3-1.7b-4x256k", 4, 262144, "E1: 4x256k"),
            _decode("qwen3-1.7b-1x256k", 1, 262144, "E1: 1x256k"),
            Command("eval.profile_decode", "profile-qwen3-1.7b-1x256k.jsonl", _PROFILE),
        ),
        _resa(*_1_7B),
    ),
    Leg(
        "e2",
        (
            _decode("qwen3-8b-6x128k", 6, 131072, "E2: 6x128k", "--short", "256"),
            _decode("qwen3-8b-1x128k", 1, 131072, "E2: 1x128k", "--tokens", "512", "--rounds", "5"),
        ),
        _resa(*_8B),
    ),
    Leg(
        "e3-1.7b",
        (_decode("qwen3-1.7b-4x256k-fp8-r.05", 4, 262144, "E3: Qwen3-1.7B, 4x256k", *_EVERY_64),),
        _resa(*_1_7B, _FP8),
    ),
    Leg(
        "e3-8b",
        (_decode("qwen3-8b-6x128k-fp8-r.05", 6, 131072, "E3: Qwen3-8B, 6x128k", *_EVERY_64),),
        _resa(*_8B_FP8, _FP8),
    ),
    Leg(
        "serving-8b",
        (
            _serving(
                "qwen3-8b",
                *("--both", "--contexts", "2k,4k,8k,32k,64k,128k", "--batch", "1", "--output-length", "257"),
                *("--server-args", f"{_FA3} 0.9"),
                goals=("R1", "R2"),
            ),
        ),
    ),
    Leg(
        "serving-1.7b",
        # One after the other: 4x256k fills the memory.
        (
            _serving(
                "qwen3-1.7b", "--contexts", "4k,32k,128k,256k", "--prefix", "0", "--server-args", f"{_FA3} {_1_7B[3]}"
            ),
        ),
    ),
    Leg("mla", (Command("eval.bench_mla", "bench_mla.jsonl", ("--shapes", "8x64k,24x128k,1x128k"), ("K6",)),)),
    Leg(
        "mla-serving",
        (
            Command(
                "eval.bench_mla",
                _MLA_INPUTS,
                (
                    *("--shapes", "1x32k,1x64k,1x96k,1x128k", *_POSITIONS, "--heads", "16"),
                    *("--recipe", '{"sink_tokens": 1792}', "--ops", "mass+topp+attend", "--peers", ""),
                ),
            ),
            _serving(
                "v2-lite",
                *("--sparse-method", "robsa", "--structured", f"{FOLDER}/{_MLA_INPUTS}"),
                *("--contexts", "32k,64k,96k,128k", "--batch", "1,24", "--runs", "3"),
                *("--server-args", "--attention-backend flashmla --page-size 64 --mem-fraction-static 0.9"),
                *("--sparse-config", json.dumps(_ROBSA), "--server", f"half-dense={_HALF}"),
                goals=("E5",),
            ),
        ),
    ),
    Leg("prefill", (Command("eval.bench_prefill", "bench_prefill.jsonl", (*_LENGTHS, "--sparsity", "0.89"), ("K9",)),)),
    Leg(
        "prefill-serving",
        (
            Command("eval.bench_prefill", _PREFILL_RECALL, _SERVED),
            _serving(
                "qwen3-8b",
                *("--both", "--contexts", "4k,8k,32k,64k,128k", "--chunked-prefill-size", "8k,16k"),
                *("--sparse-method", "none", "--sparse-prefill-method", "anchor", "--structured", "{}"),
                *("--server-args", "--page-size 16", *_LEFT_OUT),
                *("--recall-from", f"{FOLDER}/{_PREFILL_RECALL}"),
                file="first-token-qwen3-8b.jsonl",
                goals=("E6",),
            ),
        ),
    ),
)
