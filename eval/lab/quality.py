"""Measure the cost of sparse attention on real checkpoints, on the GPU of this machine.

    python -m eval.lab.quality --out measured
    python -m eval.lab.quality --out measured --models Qwen/Qwen2.5-Coder-0.5B-Instruct --lengths 8k

Every checkpoint answers the generated tasks of RULER and of InfiniteBench, if it is instructed, and needles at each
length, by each arm: a way to serve it. The server of resa is also asked to decode dense, and all arms are held against
these dense answers, question by question. ReSA's servers force texts through decode as well, for perplexity against the
ratio and the rectification interval, and for drift.

An arm has a server, a suite and length a file. The same command goes on where it was interrupted. When it begins it
says how many tokens are left to read, and after each arm how long the rest will take at the pace so far. At the end it
prints the table of each model.

Checkpoints are those of the hub; ``--folder`` has them on machines without one, by the last part of their names.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.lab.legs.leg import URL, Command, Leg, Server
from eval.lab.legs.runner import ended, refuse_folder, run_legs
from eval.lab.tables.quality import quality_tables
from eval.live.client import list_of
from eval.live.record import git_revision
from eval.niah import TASKS as NEEDLES
from eval.tasks.infinitebench_tasks import TASKS as GENERATED
from eval.texts.lengths import length, short_length
from eval.texts.windows import BOOK

FORCED = 8192


@dataclass(frozen=True)
class Checkpoint:
    """Settings of the measurements of a checkpoint.

    Attributes:
        longest: tokens of the longest question, its answer included.
        chat: whether it is instructed; others are asked for needles without a chat template, and nothing of
            InfiniteBench.
        arms: what serves it; all where it is empty.
        forced: lengths of texts that are forced through decode.
        terms: those of its weights, where they ask for more than a licence of open source.
    """

    longest: int
    chat: bool = True
    arms: tuple[str, ...] = ()
    forced: tuple[int, ...] = (FORCED,)
    terms: str = ""


MODELS = {
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": Checkpoint(31744),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": Checkpoint(31744),
    "HuggingFaceTB/SmolLM2-135M-Instruct": Checkpoint(8192),
    # Its thresholds have not been calibrated, and RocketKV has no kernel for its heads.
    "google/gemma-3-270m": Checkpoint(
        31744,
        chat=False,
        arms=("resa", "resa-paper", "skip_softmax", "true_mass", "random_pages"),
        forced=(FORCED, 31744),
        terms="https://ai.google.dev/gemma/terms",
    ),
}
LENGTHS = ("4k", "8k", "16k", "31k")
SUITES = ("ruler", "niah", "infinitebench", "ppl", "drift")
# Tasks and depths of the suites of questions: a cell of each has so many questions as ``--n`` says.
TASKS = {"ruler": (11, 1), "niah": (len(NEEDLES), 5), "infinitebench": (len(GENERATED), 5)}
COMMAND = "eval.lab.quality"
BESIDE_DENSE = ("--base-url", URL, "--compare-url", URL, "--compare-custom-params", '{"sparse": false}')
AT_ONCE = "32"
# The shortest text holds so many windows of that length.
BOOK_WINDOWS = 10
# Every length is decoded sparse, whatever else is in the batch.
_DECODE: Mapping[str, Any] = {"page_size": 16, "min_seq_len": 1024, "crossover_tokens": 0}
# Logits in bfloat16 would round perplexities, of large vocabularies by more than `eval.ppl_rectify` lets pass.
_FLAGS = ("--page-size", "16", "--cuda-graph-max-bs-decode", AT_ONCE, "--enable-fp32-lm-head")


@dataclass(frozen=True)
class Way:
    """A way to serve a checkpoint.

    Attributes:
        name: of the arm, and in the names of its files.
        decode: decode method and config; None: dense.
        prefill: prefill method and config; None: dense.
        fields: further settings of its requests by their names, each an arm of its own on the same server.
        beside_dense: whether its server is asked to decode dense as well.
        control: of ``eval/lab/controls``.
        forces: whether texts are forced through its decode.
    """

    name: str
    decode: tuple[str, Mapping[str, Any]] | None = None
    prefill: tuple[str, Mapping[str, Any]] | None = None
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    beside_dense: bool = False
    control: bool = False
    forces: bool = False

    def server(self, model: str, calibration: Path, more: Sequence[str]) -> Server:
        """Its server; the thresholds of a sparse prefill are those of `calibration`."""
        flags = list(_FLAGS)
        if self.decode:
            flags += ["--sparse-method", self.decode[0], "--sparse-config", json.dumps({**_DECODE, **self.decode[1]})]
        if self.prefill:
            config = str(calibration) if self.prefill[0] == "anchor" else json.dumps(self.prefill[1])
            flags += ["--sparse-prefill-method", self.prefill[0], "--sparse-prefill-config", config]
        return Server(model, (*flags, *more), (("PYTHONPATH", "eval/lab/controls"),) if self.control else ())

    @property
    def methods(self) -> str:
        """The methods that its server must prove to run."""
        return "+".join(phase[0] for phase in (self.decode, self.prefill) if phase)


_OURS = {"summary": "centroids", "group": "vote"}
_PAPER = {"summary": "minmax", "group": "mean_query"}
_SKIP = ("skip_softmax", {"threshold_scale_factor": 1000})
_SKIP_PREFILL = ("skip_softmax", {"threshold_scale_factor": 350, "crossover_tokens": 2048})
_RATIOS = {f"resa-{ratio}": {"active_ratio": ratio} for ratio in (0.05, 0.2)}
_ANCHOR = ("anchor", {"crossover_tokens": 2048})
WAYS = (
    Way("resa", ("resa", _OURS), fields=_RATIOS, beside_dense=True, forces=True),
    Way("resa-paper", ("resa", _PAPER), fields={f"resa-paper-{k[5:]}": v for k, v in _RATIOS.items()}, forces=True),
    Way("rocketkv", ("rocketkv", {})),
    Way("skip_softmax", _SKIP, _SKIP_PREFILL),
    Way("anchor", prefill=_ANCHOR),
    Way("resa+anchor", ("resa", _OURS), _ANCHOR),
    Way("rocketkv+anchor", ("rocketkv", {}), _ANCHOR),
    Way("true_mass", ("true_mass", {}), control=True),
    Way("random_pages", ("random_pages", {}), control=True),
)


def legs_of(args: argparse.Namespace) -> list[Leg]:
    """The legs of a command line, models outermost: before the first that prefills sparse the calibration."""
    found = []
    for model in args.models:
        path = str(args.folder / model.split("/")[-1]) if args.folder else model
        short = model.split("/")[-1].lower()
        calibration = args.out.absolute() / f"{short}-anchor.json"
        arms = [way for way in args.arms if way.name in (MODELS[model].arms or [way.name])]
        if any(way.prefill == _ANCHOR for way in arms):
            lengths = "8k,16k" if MODELS[model].longest > FORCED else "6k"
            config = json.dumps(_ANCHOR[1])
            asked = ("--model-path", path, "--data", str(BOOK), "--lengths", lengths, "--sparse-prefill-config", config)
            found.append(Leg(f"{short}-calibrate", (Command("sglang_sparse.calibrate", calibration.name, asked),)))
        for way in arms:
            server = way.server(path, calibration, shlex.split(args.server_args))
            found.append(Leg(f"{short}-{way.name}", tuple(commands_of(way, short, MODELS[model], args)), server))
    return found


def commands_of(way: Way, short: str, checkpoint: Checkpoint, args: argparse.Namespace) -> list[Command]:
    """Return the commands that ask an arm's server, shorter lengths first; see the module."""
    found = []
    suites = [suite for suite in TASKS if suite in args.suites and (checkpoint.chat or suite != "infinitebench")]
    for size in sorted({min(size, checkpoint.longest) for size in args.lengths}):
        for suite in suites:
            count = max(1, -(-args.n // TASKS[suite][1]))
            asked = ["--label", way.name, "--lengths", str(size), "--n", str(count), "--concurrency", AT_ONCE]
            asked += ["--expect", way.methods]
            asked += ["--form", "ruler"] if suite == "niah" and not checkpoint.chat else []
            for name, fields in way.fields.items():
                asked += ["--also", f"{name}={json.dumps(fields)}"]
            servers = BESIDE_DENSE if way.beside_dense else ("--base-url", URL)
            file = f"{short}-{way.name}-{suite}-{short_length(size)}.jsonl"
            found.append(Command(f"eval.{suite}", file, (*servers, *asked)))
    if way.forces:
        windows = min(BOOK_WINDOWS, max(2, args.n // 5))
        sizes = ("--base-url", URL, "--kind", "book,records", "--concurrency", AT_ONCE)
        for size in checkpoint.forced if "ppl" in args.suites else ():
            asked = (*sizes, "--length", str(size), "--suffix", "512")
            asked += ("--windows", str(max(2, windows * FORCED // size)))
            asked += ("--ratios", "0.05,0.1,0.2,0.4", "--intervals", "0,8,32,128")
            name = f"{short}-{way.name}-ppl" + (f"-{short_length(size)}" if size != FORCED else "")
            found.append(Command("eval.ppl_rectify", f"{name}.jsonl", asked))
        if "drift" in args.suites:
            asked = (*sizes, "--prompt-length", str(FORCED - 1024), "--tokens", "1024", "--n", str(windows))
            found.append(Command("eval.long_generation", f"{short}-{way.name}-drift.jsonl", asked))
    return found


def tokens_of(command: Command) -> int:
    """Tokens that a server reads for a command's prompts, 0 where it forces texts; the cache's share included."""
    suite = command.module.removeprefix("eval.")
    if suite not in TASKS:
        return 0
    given = dict(zip(command.arguments, command.arguments[1:], strict=False))
    tasks, depths = TASKS[suite]
    return tasks * depths * int(given["--n"]) * int(given["--lengths"])


def run(args: argparse.Namespace) -> int:
    """Measure what is left, arm by arm, and print the tables.

    Returns:
        The exit status: 1 where an arm failed.

    Raises:
        EvaluationError: the folder is none, or a file in it is none of results.
    """
    refuse_folder(args.out)
    for model in (model for model in args.models if MODELS[model].terms):
        print(f"{model}: its weights are under {MODELS[model].terms}")
    legs = legs_of(args)

    def tables(folder: Path) -> str:
        return "\n\n".join(quality_tables(folder))

    return run_legs(COMMAND, args.out, args.revision or git_revision(), legs, legs, tables, tokens=tokens_of)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {way.name: way for way in WAYS}
    parser.add_argument("--out", type=Path, metavar="FOLDER", required=True, help="where results and logs go")
    parser.add_argument("--folder", type=Path, help="of checkpoints, where no hub is reached")
    parser.add_argument("--models", type=list_of(str), default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--arms", type=list_of(str), default=",".join(known), help=f"of {', '.join(known)}")
    parser.add_argument("--suites", type=list_of(str), default=",".join(SUITES), help=f"of {', '.join(SUITES)}")
    parser.add_argument("--lengths", type=list_of(length), default=",".join(LENGTHS), help="tokens of the questions")
    parser.add_argument("--n", type=int, default=200, help="questions of each task and length")
    parser.add_argument("--server-args", default="", help="further arguments of all servers, as one string")
    parser.add_argument("--revision", help="of this code, where its git history is not at hand")
    args = parser.parse_args(arguments)
    for option, given, allowed in (
        ("models", args.models, MODELS),
        ("arms", args.arms, known),
        ("suites", args.suites, SUITES),
    ):
        if not given or not set(given) <= set(allowed):
            parser.error(f"--{option} must be of {', '.join(allowed)}, got {','.join(given)!r}")
    if not args.lengths:
        parser.error("--lengths must be one or more, got none")
    if args.n < 1:
        parser.error(f"--n must be 1 or more, got {args.n}")
    args.arms = [known[name] for name in args.arms]
    reference = next(way.name for way in WAYS if way.beside_dense)
    if not any(way.beside_dense for way in args.arms) and not any(args.out.glob(f"*-{reference}-*.jsonl")):
        parser.error(f"--arms: without {reference}, here or in {args.out} already, nobody is asked to decode dense")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 where an arm failed."""
    args = parse(arguments)
    return ended(COMMAND, args.out, lambda: run(args))


if __name__ == "__main__":
    # Ended like that, it would leave servers behind that hold the GPU's memory.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
