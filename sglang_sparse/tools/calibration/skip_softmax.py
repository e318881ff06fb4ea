"""Factors of Skip-Softmax for a share of blocks to skip, measured on your own checkpoint, in both phases.

No server: the checkpoint runs in this process through transformers with dense attention, on the GPU in bfloat16 if
there is one, and each layer's queries and keys are looked at before the next one runs. For factors from 2^-10 to 2^17
it is counted, by the kernels' own definition, which share of the blocks of keys a server would skip, and how much of
the attention mass lies on the others,

- in prefill for the tiles of queries from crossover_tokens on (up to 64 of a prompt, evenly spaced);
- in decode for the last --queries positions of each prompt, each as the newest token of a row.

Then threshold_scale_factor = a * exp(b * share) is fitted for each phase, over all lengths together. It is valid for
the measured shares, up to the printed error; a formula that is off by more than 15 hundredths is refused. Its form is
that of NVIDIA Model Optimizer; that tool's own factors follow other rules (see its page in docs). The factor that skips
a share differs by kind of text: with --data it is measured on yours.

Without --data it runs made-up prompts with something to be found in them, --n of each of --lengths; of the default
lengths those that the model's context holds. With --data it runs beginnings of the lines of .jsonl and stretches of
.txt. It goes on where it was interrupted, from NAME.partial.jsonl next to --out, and leaves a plot there if matplotlib
is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from sglang_sparse.config.files import read_config
from sglang_sparse.config.settings import Settings, build
from sglang_sparse.errors import within
from sglang_sparse.methods.fingerprint import fingerprint
from sglang_sparse.methods.groups import PrefillGroups
from sglang_sparse.methods.skip_softmax.calibration_file import FORMULA, PHASES, TABLE, Point, SkipCalibration, fit
from sglang_sparse.tools.calibration.capture import (
    CalibrationError,
    Captured,
    ModelFacts,
    capture,
    device_and_dtype,
    load_model,
    model_facts,
    shown_layers,
    versions,
)
from sglang_sparse.tools.calibration.mix import long_mix
from sglang_sparse.tools.calibration.prompts import Prompts
from sglang_sparse.tools.calibration.robsa_prompts import fitting
from sglang_sparse.tools.calibration.run import Partial, partial_path
from sglang_sparse.tools.calibration.skip_report import plot, table
from sglang_sparse.tools.calibration.skipping import Skipped, skipped_in_decode, skipped_in_prefill

CONFIG_FLAG, PREFILL_FLAG = "--sparse-config", "--sparse-prefill-config"
DEFAULT_LENGTHS = "16k,32k"
FACTORS = tuple(2.0**exponent for exponent in range(-10, 18))
MAX_QUERIES = 128
# Fields that say what is measured here.
MEASURED = ("threshold_scale_factor", "target_sparsity", "calibration_file", "calibration")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of this method alone."""
    parser.add_argument("--n", type=int, default=8, help="prompts of each length, if there are (default: %(default)s)")
    parser.add_argument("--queries", type=int, default=16, help="last positions for decode (default: %(default)s)")
    parser.add_argument(CONFIG_FLAG, help="the other fields, as for a server: JSON or a file")
    parser.add_argument(PREFILL_FLAG, help="those of prefill, if it has a separate config")


def check(args: argparse.Namespace) -> None:
    """Judge the arguments.

    Raises:
        CalibrationError: names the argument, what it was and what is allowed.
    """
    if not 1 <= args.queries <= MAX_QUERIES:
        raise CalibrationError(field="--queries", got=args.queries, allowed=f"1 to {MAX_QUERIES}")
    if args.n < 1:
        raise CalibrationError(field="--n", got=args.n, allowed="1 or more")


def use(args: argparse.Namespace) -> str:
    """Flags of a server that take the file, with shares in the middle of what was measured and the fields given."""
    phases = json.loads(args.out.read_text())["calibration"]["phases"]
    shares = {phase: round((fit["lowest"] + fit["highest"]) / 2, 2) for phase, fit in phases.items()}
    fields, of_prefill = _given(args)
    file = {"calibration_file": str(args.out)}
    # Each of two configs has the share of its phase.
    target = {"decode": shares["decode"]} if of_prefill else shares
    words = ["--sparse-method", "skip_softmax", CONFIG_FLAG, json.dumps({**fields, **file, "target_sparsity": target})]
    if of_prefill:
        own = {**of_prefill, **file, "target_sparsity": shares["prefill"]}
        words += ["--sparse-prefill-method", "skip_softmax", PREFILL_FLAG, json.dumps(own)]
    return shlex.join(words)


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measure and fit.

    Returns:
        What to write.

    Raises:
        CalibrationError: see the functions that this one calls; or a length is none of the model.
        SparseArgumentError: as the server refuses the configs.
    """
    facts, settings = model_facts(args.model_path, args.trust_remote_code, args.revision), _settings(args)
    layers = _layers(settings, facts)
    lengths = fitting(args.lengths, facts.context_len, args.default_lengths)
    try:
        model_print = fingerprint(args.model_path, args.revision)
    except ValueError as error:
        raise CalibrationError(f"--model-path {error}", field="--model-path", got=args.model_path) from error
    source = Prompts(args.prompts, args.model_path, args.trust_remote_code, args.revision)
    prompts = {length: _draw(source, length, args) for length in lengths}
    _require_lengths(settings, prompts, args.queries)
    assert settings.prefill is not None
    device, dtype = device_and_dtype()
    about: dict[str, Any] = {
        "fingerprint": model_print,
        "first_position": settings.prefill.dense_below,
        "queries": args.queries,
        "seed": args.seed,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "versions": versions(),
    }
    flat = [tokens for several in prompts.values() for tokens in several]
    digest = hashlib.sha256(
        json.dumps([flat, FACTORS, layers, settings.prefill.config.dense_tail]).encode()
    ).hexdigest()
    partial = Partial(partial_path(args.out), {**about, "prompts": digest})
    if len(partial.rows) < len(flat):
        model = load_model(args.model_path, device, dtype, args.trust_remote_code, args.revision)
        measure(model, flat, layers, partial, settings.prefill, args.queries)
    about |= {"method": "skip_softmax", "model": args.model_path, "architecture": facts.architecture}
    about["prompts"] = {str(length): len(several) for length, several in prompts.items()}
    about["files"] = [file.name for file in args.prompts]
    about["layers"] = layers
    of_length = [length for length, several in prompts.items() for _ in several]
    return summary(of_length, partial.rows, about)


def _given(args: argparse.Namespace) -> tuple[dict[str, object], dict[str, object]]:
    """The fields of both configs, but for what is measured."""
    both = read_config(args.sparse_config, CONFIG_FLAG), read_config(args.sparse_prefill_config, PREFILL_FLAG)
    decode, prefill = ({name: one[name] for name in one if name not in MEASURED} for one in both)
    return decode, prefill


def _settings(args: argparse.Namespace) -> Settings:
    fields, of_prefill = _given(args)
    return build("skip_softmax", fields, "skip_softmax", of_prefill)


def _layers(settings: Settings, facts: ModelFacts) -> dict[str, list[int]]:
    assert settings.prefill is not None
    if len(settings.decode.methods) > 1 or len(settings.prefill.methods) > 1:
        message, allowed = "layers has several rules", 'those of skip_softmax, as "2-"'
        raise CalibrationError(message, field="layers", allowed=allowed)
    if reason := settings.prefill.refuse(facts) or settings.decode.refuse(facts):
        message = f"--method skip_softmax does not fit {facts.architecture}: {reason}"
        raise CalibrationError(message, field="--model-path", got=facts.architecture)
    found = {}
    for phase, config, flag in zip(
        PHASES, (settings.prefill.config, settings.config), (PREFILL_FLAG, CONFIG_FLAG), strict=True
    ):
        with within(flag, CalibrationError):
            found[phase] = list(facts.layers(config.layers))
    return found


def _draw(source: Prompts, length: int, args: argparse.Namespace) -> list[list[int]]:
    if args.prompts:
        return source.draw(length, args.n, args.seed)
    made = long_mix(args.n, [length], args.seed, lambda text: len(source.encode(text)))
    return [source.encode_messages(one.messages) for one in made]


def _require_lengths(settings: Settings, prompts: Mapping[int, Sequence[Sequence[int]]], queries: int) -> None:
    """Judge the prompts.

    Raises:
        CalibrationError: a prompt has nothing that a server would run sparse.
    """
    assert settings.prefill is not None
    dense_below, min_seq_len = settings.prefill.dense_below, settings.config.min_seq_len
    tail = settings.prefill.config.dense_tail
    least = max(dense_below + tail + 1, max(min_seq_len, 1) + queries - 1)
    for length, several in prompts.items():
        shortest = min(map(len, several))
        if shortest < least:
            raise CalibrationError(
                f"--lengths {length}: a prompt of {shortest} tokens, and a server with these configs runs dense up to "
                f"position {dense_below} of prefill (crossover_tokens), in its last {tail} (dense_tail) and below "
                f"{min_seq_len} tokens in decode (min_seq_len); allowed is {least} or more, with --queries {queries}; "
                "for shorter prompts: "
                f"""{CONFIG_FLAG} '{{"dense_fallback": "never"}}'""",
                field="--lengths",
                got=length,
            )


def measure(
    model: Any,
    prompts: Sequence[Sequence[int]],
    layers: Mapping[str, Sequence[int]],
    partial: Partial,
    prefill: PrefillGroups,
    queries: int,
) -> None:
    """Run the prompts that are not in `partial` yet.

    Raises:
        CalibrationError: see `capture`; or a layer's attention is not finite.
    """
    done, number = len(partial.rows), len(shown_layers(model.config))
    total, desc = len(prompts) * number, "sglang_sparse.calibrate"
    with tqdm(total=total, initial=done * number, desc=desc, unit="layer") as bar:
        for tokens in prompts[done:]:
            row: dict[str, list[Skipped]] = {phase: [] for phase in PHASES}
            ends = prefill.dense_below, prefill.dense_from(len(tokens))

            def visit(captured: Captured, row: dict[str, list[Skipped]] = row, sparse: tuple[int, int] = ends) -> None:
                if captured.layer in layers["prefill"]:
                    row["prefill"].append(_finite(captured, skipped_in_prefill(captured, *sparse, FACTORS)))
                if captured.layer in layers["decode"]:
                    row["decode"].append(_finite(captured, skipped_in_decode(captured, queries, FACTORS)))
                bar.update()

            capture(model, tokens, len(tokens), visit, sinks=True)
            partial.add(row)


def _finite(captured: Captured, found: Skipped) -> Skipped:
    if not all(map(math.isfinite, found.mass)):
        layer, dtype = captured.layer, captured.key.dtype
        message = f"--model-path: the attention of layer {layer} is not finite in {dtype}"
        raise CalibrationError(message, field="--model-path")
    return found


def points(lengths: Sequence[int], rows: Sequence[Sequence[Sequence[Any]]]) -> list[Point]:
    """Return the measurements of one phase by length of prompt; ``rows`` has the fields of `Skipped` by layer."""
    found = []
    for length in sorted(set(lengths)):
        of_layer = zip(*(row for row, own in zip(rows, lengths, strict=True) if own == length), strict=True)
        several = [[Skipped(*one) for one in layer] for layer in of_layer]
        visited = sum(one.visited for layer in several for one in layer)
        for place, factor in enumerate(FACTORS):
            recalls = [
                sum(one.mass[place] * one.queries for one in layer) / sum(one.queries for one in layer)
                for layer in several
            ]
            skipped = sum(one.skipped[place] for layer in several for one in layer)
            # Rounding errors of perfect ones go beyond 1.
            mean, worst = (min(1.0, round(recall, 6)) for recall in (sum(recalls) / len(recalls), min(recalls)))
            found.append(
                Point(
                    threshold_scale_factor=factor,
                    length=length,
                    sparsity=round(skipped / visited, 6),
                    recall=mean,
                    worst_layer_recall=worst,
                )
            )
    return found


def _sink_share(found: Sequence[Skipped]) -> float:
    return round(sum((one.sinks or 0.0) * one.queries for one in found) / sum(one.queries for one in found), 6)


def summary(lengths: Sequence[int], rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> dict[str, object]:
    """The file: the table that a checkpoint of Model Optimizer has, and what it comes from.

    Raises:
        CalibrationError: see `fit`.
    """
    scale: dict[str, object] = {"formula": FORMULA}
    phases = {}
    for phase in PHASES:
        try:
            formula, phases[phase] = fit(phase, points(lengths, [row[phase] for row in rows]))
        except ValueError as error:
            raise CalibrationError(str(error)) from error
        scale[phase] = formula._asdict()
    group = {"algorithm": "skip_softmax", "threshold_scale_factor": scale}
    producer = {"name": "sglang-sparse", "version": about["versions"]["sglang-sparse"]}
    measured = {phase: [Skipped(*each) for row in rows for each in row[phase]] for phase in PHASES}
    has_sinks = any(one.sinks is not None for found in measured.values() for one in found)
    sinks = {phase: _sink_share(found) for phase, found in measured.items()} if has_sinks else None
    calibration = SkipCalibration(**about, phases=phases, sinks=sinks)
    return {
        TABLE: {"config_groups": {"group_0": group}, "producer": producer},
        "calibration": calibration.model_dump(),
    }


def conclude(config: dict[str, Any], args: argparse.Namespace) -> None:
    """Print and plot what was found; what an interruption would have needed goes."""
    found = SkipCalibration.model_validate(config["calibration"])
    scale = config[TABLE]["config_groups"]["group_0"]["threshold_scale_factor"]
    table(found, scale)
    plot(found, scale, args.out.with_suffix(".png"))
    partial_path(args.out).unlink(missing_ok=True)
