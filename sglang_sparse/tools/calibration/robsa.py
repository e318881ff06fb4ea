"""Measure on your checkpoint in which layers of an MLA model RoBSA may select by the RoPE part of the scores.

No server: the checkpoint runs in this process through transformers with dense attention, on the GPU in bfloat16 if
there is one, and each layer's queries and keys are looked at before the next one runs. One GPU must hold the whole
model, unless accelerate is installed: then it is spread over all GPUs, and over CPU memory, slowly, if these cannot
hold it. Quantized checkpoints, such as DeepSeek-V3's own in fp8, need accelerate and what else transformers asks for
their format. Python code of a checkpoint runs with --trust-remote-code alone, where transformers has none for it; of
Kimi-K2 that is the tokenizer. Looked at are

- the cosine similarity between a layer's attention by the full score and that by its RoPE part alone (RoBSA, sections
  2.2.3 and 2.3.1; see ``tools/calibration/similarity.py``), mean and deviation over prompts, at the last --queries
  positions of each (of a short one its last quarter): of a conversation the end of the last message and what the
  template opens the answer with, of a text the end of the stretch. They see as much as decode's first tokens do and
  cost nothing in addition to the prompt;
- the share of the attention mass on the blocks that the RoPE part selects, at --theta1.

Layers above --theta2 are then "sensitive", the paper's word for those whose RoPE part is a reliable proxy. Unlike there
a layer must be above it twice: over all prompts, and over those of at least min_seq_len tokens (--sparse-config's, else
the server's default) alone. Shorter rows run dense on this server, yet 70 of the paper's 100 prompts are short, and in
these both scores are more alike. The file has all similarities, also by kind and length of prompts, so that --theta2
can be chosen later, too.

Without --data it runs the default mix: made-up prompts in the domains and proportions of the paper's table 8, the long
ones of --lengths tokens in turn; of the default lengths those that the model's context holds. With --data it runs
prompts from your files: first the lines of .jsonl as they are (those of 32 tokens and more), of lines that are longer
than the longest of --lengths the beginning and the end; then stretches of the .txt, as many of each of --lengths. It
goes on where it was interrupted, from NAME.partial.jsonl next to --out, and leaves a plot there if matplotlib is
installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shlex
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from tqdm import tqdm

from sglang_sparse.config.files import read_config
from sglang_sparse.config.settings import build
from sglang_sparse.methods.fingerprint import fingerprint
from sglang_sparse.methods.robsa.calibration_file import LayerSimilarity, RopeCalibration, Similarity
from sglang_sparse.tools.calibration.capture import (
    CalibrationError,
    Captured,
    ModelFacts,
    capture,
    device_and_dtype,
    load_model,
    model_facts,
    versions,
)
from sglang_sparse.tools.calibration.prompts import Prompts
from sglang_sparse.tools.calibration.robsa_prompts import (
    Prompt,
    draw_files,
    draw_mix,
    fitting,
    groups,
    long_places,
    notes,
)
from sglang_sparse.tools.calibration.robsa_report import plot, table
from sglang_sparse.tools.calibration.run import Partial, partial_path
from sglang_sparse.tools.calibration.similarity import agreement

if TYPE_CHECKING:
    from sglang_sparse.methods.robsa.decode import RobsaConfig

CONFIG_FLAG = "--sparse-config"
DEFAULT_N, DEFAULT_LENGTHS = 100, "8k,16k,32k"
MAX_QUERIES = 128
# Of a prompt at most one position in so many is looked at, its last ones: early ones see so little that any two
# attentions are alike.
QUERY_SHARE = 4
# Similarities are written with so many places after the point.
PLACES = 6
EMPTY = RopeCalibration.model_construct(layers=[])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of this method alone."""
    parser.add_argument("--n", type=int, default=DEFAULT_N, help="prompts in all (default: %(default)s)")
    parser.add_argument("--theta1", type=float, help="of the selection that is judged (default: the method's)")
    parser.add_argument("--theta2", type=float, help="above it a layer is sensitive (default: the method's)")
    parser.add_argument(
        "--queries", type=int, default=16, help="last positions to look at, at most (default: %(default)s)"
    )
    parser.add_argument(CONFIG_FLAG, help="the other fields, as for a server: JSON or a file")


def use(args: argparse.Namespace) -> str:
    """Flags of a server that take the file."""
    return f"--sparse-method robsa {CONFIG_FLAG} {shlex.quote(str(args.out))}"


def check(args: argparse.Namespace) -> None:
    """Complete the arguments.

    Raises:
        CalibrationError: names the argument, what it was and what is allowed.
    """
    if not 1 <= args.queries <= MAX_QUERIES:
        raise CalibrationError(field="--queries", got=args.queries, allowed=f"1 to {MAX_QUERIES}")
    if args.n < len(args.lengths):
        allowed = f"one for each of the {len(args.lengths)} --lengths, or more"
        raise CalibrationError(field="--n", got=args.n, allowed=allowed)
    if args.lengths[0] <= MAX_QUERIES:
        raise CalibrationError(field="--lengths", got=args.lengths[0], allowed=f"more than {MAX_QUERIES}")


def fields_of(args: argparse.Namespace) -> dict[str, object]:
    """Return the fields of the server's config that the user gave.

    Raises:
        SparseArgumentError: it cannot be read.
    """
    dropped = ("calibration", "allow_uncalibrated")
    given = read_config(args.sparse_config, CONFIG_FLAG)
    flags = {"theta1": args.theta1, "theta2": args.theta2}
    return {name: value for name, value in given.items() if name not in dropped} | {
        name: value for name, value in flags.items() if value is not None
    }


def base_config(fields: dict[str, object], model: ModelFacts) -> RobsaConfig:
    """The config whose selection is judged.

    Raises:
        SparseArgumentError: as the server refuses the fields.
        CalibrationError: the method does not fit the model.
    """
    if reason := build("robsa", {"allow_uncalibrated": True}).method.refuse(model):
        message = f"--method robsa does not fit {model.architecture}: {reason}"
        raise CalibrationError(message, field="--model-path", got=model.architecture)
    # Some fields are refused without a calibration; for the check an empty one will do.
    return cast("RobsaConfig", build("robsa", {**fields, "calibration": EMPTY}).config)


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measure.

    Returns:
        The config to write.

    Raises:
        CalibrationError: see the functions that this one calls; or a length is none of the model.
        SparseArgumentError: see `base_config`.
    """
    facts, fields = model_facts(args.model_path, args.trust_remote_code, args.revision), fields_of(args)
    config = base_config(fields, facts)
    lengths = fitting(args.lengths, facts.context_len, args.default_lengths)
    try:
        model_print = fingerprint(args.model_path, args.revision)
    except ValueError as error:
        raise CalibrationError(f"--model-path {error}", field="--model-path", got=args.model_path) from error
    source = Prompts(args.prompts, args.model_path, args.trust_remote_code, args.revision)
    prompts = (draw_files if args.prompts else draw_mix)(source, args.n, lengths, args.seed)
    left_out = [length for length in args.lengths if length not in lengths]
    longest = max(len(prompt.tokens) for prompt in prompts)
    remarks = notes(left_out, facts.context_len, longest, config.min_seq_len)
    for remark in remarks:
        print(f"sglang_sparse.calibrate: {remark}", file=sys.stderr)
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
        model = load_model(args.model_path, device, dtype, args.trust_remote_code, args.revision)
        measure(model, prompts, facts.rope_dim, partial, config.theta1, config.block_size, args.queries)
    about |= {"model": args.model_path, "architecture": facts.architecture, "notes": remarks}
    about["files"] = [file.name for file in args.prompts]
    return {**fields, "calibration": summary(prompts, partial.rows, config.min_seq_len, about).model_dump()}


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
        CalibrationError: see `capture` and `agreement`; or a layer's attention is not finite.
    """
    done, layers = len(partial.rows), model.config.get_text_config().num_hidden_layers
    total, desc = len(prompts) * layers, "sglang_sparse.calibrate"
    with tqdm(total=total, initial=done * layers, desc=desc, unit="layer") as bar:
        for number, prompt in enumerate(prompts[done:], done + 1):
            name = f"prompt {number} ({prompt.kind}, {len(prompt.tokens)} tokens)"
            row: dict[str, list[float]] = {"similarity": [], "recall": []}

            def visit(captured: Captured, row: dict[str, list[float]] = row, name: str = name) -> None:
                found = agreement(captured, rope_dim, theta1, block_size)
                if not all(map(math.isfinite, found)):
                    raise CalibrationError(
                        f"--model-path: layer {captured.layer} has a similarity of {found.similarity} and a recall of "
                        f"{found.recall} in {name}: its queries or keys are not finite in {captured.key.dtype}",
                        field="--model-path",
                    )
                row["similarity"].append(found.similarity)
                row["recall"].append(found.recall)
                bar.update()

            capture(model, prompt.tokens, max(1, min(queries, len(prompt.tokens) // QUERY_SHARE)), visit)
            partial.add(row)


def summary(
    prompts: Sequence[Prompt], rows: Sequence[dict[str, list[float]]], min_seq_len: int, about: dict[str, Any]
) -> RopeCalibration:
    """Summarise the rows of `measure`; ``about`` has the other fields of `RopeCalibration`."""
    grouped, long = groups(prompts), long_places(prompts, min_seq_len)

    def over(layer: int, places: Sequence[int]) -> dict[str, float]:
        similarity, recall = ([rows[place][name][layer] for place in places] for name in ("similarity", "recall"))
        # Rounding errors of perfect ones go beyond 1.
        return {
            "mean": min(1.0, round(statistics.fmean(similarity), PLACES)),
            "deviation": round(statistics.pstdev(similarity), PLACES),
            "recall": min(1.0, round(statistics.fmean(recall), PLACES)),
        }

    return RopeCalibration(
        method="robsa",
        prompts=[group.about for group in grouped],
        min_seq_len=min_seq_len,
        long_prompts=len(long),
        layers=[
            LayerSimilarity(
                layer=layer,
                **over(layer, range(len(rows))),
                long=Similarity(**over(layer, long)) if long else None,
                groups=[Similarity(**over(layer, group.places)) for group in grouped],
            )
            for layer in range(len(rows[0]["similarity"]))
        ],
        **about,
    )


def conclude(config: dict[str, object], args: argparse.Namespace) -> None:
    """Print and plot what was found; what an interruption would have needed goes."""
    found = cast("RobsaConfig", build("robsa", config).config)
    assert isinstance(found.calibration, RopeCalibration)
    table(found.calibration, found.theta2)
    plot(found.calibration, found.theta2, args.out.with_suffix(".png"))
    partial_path(args.out).unlink(missing_ok=True)
