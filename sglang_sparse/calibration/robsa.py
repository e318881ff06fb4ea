"""Which layers of an MLA model RoBSA may select by the RoPE part of their scores, measured on your own checkpoint.

No server: the checkpoint runs in this process through transformers with dense attention, on the GPU in bfloat16 if
there is one (which must hold all of it), and each layer's queries and keys are looked at before the next one runs:

- the cosine similarity between a layer's attention by the full score and that by its RoPE part alone (RoBSA, sections
  2.2.3 and 2.3.1; see ``similarity.py``), mean and deviation over prompts, at their last --queries positions: the end
  of the question and the beginning of the answer, which see as much as decode does and cost nothing beside the prompt;
- the share of the attention mass on the blocks that the RoPE part selects, at --theta1.

Layers above --theta2 are then "sensitive", the paper's word for those whose RoPE part is a reliable proxy. The file has
all similarities, so that --theta2 can be chosen later, too.

Without --data it runs the default mix: made-up prompts in the domains and proportions of the paper's table 8, the long
ones of --lengths tokens in turn. With it, prompts of --lengths tokens from your files, as many of each. It goes on
where it was interrupted, from NAME.partial.jsonl beside --out, and leaves a plot there if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tqdm import tqdm

from sglang_sparse.calibration.capture import (
    CalibrationError,
    Captured,
    ModelFacts,
    capture,
    device_and_dtype,
    load_model,
    model_facts,
    versions,
)
from sglang_sparse.calibration.mix import mix
from sglang_sparse.calibration.partial import Partial
from sglang_sparse.calibration.partition import LayerSimilarity, PromptGroup, RopeCalibration, fingerprint
from sglang_sparse.calibration.prompts import Prompts
from sglang_sparse.calibration.robsa_report import plot, table
from sglang_sparse.calibration.similarity import agreement
from sglang_sparse.config import build, read_config

if TYPE_CHECKING:
    from sglang_sparse.methods.robsa import Robsa

CONFIG_FLAG = "--sparse-config"
USE = f"--sparse-method robsa {CONFIG_FLAG}"
DEFAULT_N, DEFAULT_LENGTHS = 100, "4k,8k,16k"
MAX_QUERIES = 128
# Similarities are written with so many places after the point.
PLACES = 6


class Prompt(NamedTuple):
    """Token ids, and of which kind they are (see `PromptGroup`)."""

    kind: str
    tokens: list[int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of this method alone."""
    parser.add_argument("--n", type=int, default=DEFAULT_N, help="prompts in all (default: %(default)s)")
    parser.add_argument("--theta1", type=float, help="of the selection that is judged (default: the method's)")
    parser.add_argument("--theta2", type=float, help="above it a layer is sensitive (default: the method's)")
    parser.add_argument("--queries", type=int, default=16, help="last positions to look at (default: %(default)s)")
    parser.add_argument(CONFIG_FLAG, help="the other fields, as for a server: JSON or a file")


def check(args: argparse.Namespace) -> None:
    """Complete the arguments.

    Raises:
        CalibrationError: names the argument, what it was and what is allowed.
    """
    if not 1 <= args.queries <= MAX_QUERIES:
        raise CalibrationError(f"--queries {args.queries}: allowed is 1 to {MAX_QUERIES}")
    if args.n < len(args.lengths):
        raise CalibrationError(f"--n {args.n}: allowed is one for each of the {len(args.lengths)} --lengths, or more")
    if args.lengths[0] <= MAX_QUERIES:
        raise CalibrationError(f"--lengths {args.lengths[0]}: allowed is more than {MAX_QUERIES}")


def fields_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the user gave of the server's config.

    Raises:
        SparseArgumentError: it cannot be read.
    """
    dropped = ("calibration", "allow_uncalibrated")
    given = read_config(args.sparse_config, CONFIG_FLAG)
    flags = {"theta1": args.theta1, "theta2": args.theta2}
    return {name: value for name, value in given.items() if name not in dropped} | {
        name: value for name, value in flags.items() if value is not None
    }


def base_method(fields: dict[str, Any], model: ModelFacts) -> Robsa:
    """The method whose selection is judged.

    Raises:
        SparseArgumentError: as the server refuses the fields.
        CalibrationError: the method does not fit the model.
    """
    method = cast("Robsa", build("robsa", {**fields, "allow_uncalibrated": True}).method)
    if reason := method.refuse(model):
        raise CalibrationError(f"--method robsa does not fit {model.architecture}: {reason}")
    return method


def draw(args: argparse.Namespace) -> list[Prompt]:
    """The prompts of the user's files, or of the default mix.

    Raises:
        CalibrationError: the files have too few.
    """
    source = Prompts(args.prompts, args.model_path)
    if not args.prompts:
        made = mix(args.n, args.lengths, args.seed, lambda text: len(source.encode(text)))
        return [Prompt(one.kind, source.encode_messages(one.messages)) for one in made]
    found: list[Prompt] = []
    for i, length in enumerate(args.lengths):
        # As many of each length; the first ones get what is left over.
        wanted = (args.n + len(args.lengths) - 1 - i) // len(args.lengths)
        drawn = source.draw(length, wanted, args.seed)
        if len(drawn) < wanted:
            raise CalibrationError(
                f"--prompts: {wanted} prompts of {length} tokens are needed and the files have {len(drawn)}: give more "
                "texts, shorter --lengths or a smaller --n"
            )
        found += [Prompt("files", tokens) for tokens in drawn]
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure.

    Returns:
        The config to write.

    Raises:
        CalibrationError: see the functions that this one calls; or a length is none of the model.
        SparseArgumentError: see `base_method`.
    """
    facts, fields = model_facts(args.model_path), fields_of(args)
    config = base_method(fields, facts).config
    if args.lengths[-1] > facts.context_len:
        raise CalibrationError(f"--lengths {args.lengths[-1]}: the model's context is {facts.context_len} tokens")
    try:
        model_print = fingerprint(args.model_path)
    except ValueError as error:
        raise CalibrationError(f"--model-path {error}") from error
    prompts = draw(args)
    device, dtype = device_and_dtype()
    about: dict[str, Any] = {
        "fingerprint": model_print,
        "theta1": config.theta1,
        "block_size": config.block_size,
        "queries": args.queries,
        "seed": args.seed,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "versions": versions(),
    }
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    partial = Partial(partial_path(args.out), {**about, "prompts": digest})
    if len(partial.rows) < len(prompts):
        model = load_model(args.model_path, device, dtype)
        measure(model, prompts, facts.rope_dim, partial, config.theta1, config.block_size, args.queries)
    calibration = RopeCalibration(
        method="robsa",
        model=args.model_path,
        architecture=facts.architecture,
        prompts=groups(prompts),
        files=[file.name for file in args.prompts],
        layers=layer_rows(partial.rows, facts.num_hidden_layers),
        **about,
    )
    return {**fields, "calibration": calibration.model_dump()}


def measure(
    model: Any,
    prompts: Sequence[Prompt],
    rope_dim: int,
    partial: Partial,
    theta1: float,
    block_size: int,
    queries: int,
) -> None:
    """Run the prompts that are not in `partial` yet.

    Raises:
        CalibrationError: see `capture` and `agreement`.
    """
    done, layers = len(partial.rows), model.config.get_text_config().num_hidden_layers
    total, desc = len(prompts) * layers, "sglang_sparse.calibrate"
    with tqdm(total=total, initial=done * layers, desc=desc, unit="layer") as bar:
        for prompt in prompts[done:]:
            row: dict[str, list[float]] = {"similarity": [], "recall": []}

            def visit(captured: Captured, row: dict[str, list[float]] = row) -> None:
                found = agreement(captured, rope_dim, theta1, block_size)
                row["similarity"].append(found.similarity)
                row["recall"].append(found.recall)
                bar.update()

            capture(model, prompt.tokens, queries, visit)
            partial.add(row)


def layer_rows(rows: Sequence[dict[str, Any]], num_layers: int) -> list[LayerSimilarity]:
    """Mean and deviation over prompts, by layer."""
    found = []
    for layer in range(num_layers):
        similarity, recall = ([row[name][layer] for row in rows] for name in ("similarity", "recall"))
        found.append(
            LayerSimilarity(
                layer=layer,
                mean=min(1.0, round(statistics.fmean(similarity), PLACES)),
                deviation=round(statistics.pstdev(similarity), PLACES),
                recall=min(1.0, round(statistics.fmean(recall), PLACES)),
            )
        )
    return found


def groups(prompts: Sequence[Prompt]) -> list[PromptGroup]:
    """How many prompts there are of each kind, and how long."""
    by_kind: dict[str, list[int]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(len(prompt.tokens))
    return [
        PromptGroup(kind=kind, prompts=len(lengths), tokens=round(statistics.fmean(lengths)))
        for kind, lengths in by_kind.items()
    ]


def partial_path(out: Path) -> Path:
    """Where the results stand until all are there."""
    return out.with_suffix(".partial.jsonl")


def conclude(config: dict[str, Any], args: argparse.Namespace) -> None:
    """Print and plot what was found; what an interruption would have needed goes."""
    method = cast("Robsa", build("robsa", config).method)
    calibration = method.config.calibration
    assert isinstance(calibration, RopeCalibration)
    table(calibration, method.config.theta2)
    plot(calibration, method.config.theta2, args.out.with_suffix(".png"))
    partial_path(args.out).unlink(missing_ok=True)
