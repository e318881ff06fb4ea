"""Thresholds of a sparse prefill for your own model and prompts, layer by layer.

No server: the checkpoint runs in this process with dense attention, on the GPU in bfloat16 if there is one, and each
layer's queries and keys are looked at before the next one runs. Judged are the queries that a server with this config
would run sparse (from ``crossover_tokens`` on), by the definition of the method, for every theta from 0 to 64 in steps
of an eighth. A layer gets the smallest one at which, at every length,

- the *recall*, the share of the attention mass that falls on keys that are kept, mean over query heads and queries,
  reaches the target;
- and that of the worst head is not below ``--head-floor``, since a mean over many heads would hide one that lost nearly
  all. By default a head may lose three times what the layer may on average: with a target of .95 its floor is .85.

A layer that no theta brings there is none of the config's ``layers``: it attends densely, which is faster than to find
that all keys are wanted. ``--out`` is a config as it stands, for ``--sparse-prefill-config``; its field ``calibration``
says what was measured.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from sglang_sparse.config.files import read_config
from sglang_sparse.config.settings import build
from sglang_sparse.errors import within
from sglang_sparse.methods.anchor import ALL_KEYS, Anchor, AnchorConfig
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
from sglang_sparse.tools.calibration.prompts import FLAGS, FORMS, Prompts
from sglang_sparse.tools.calibration.recall import MAX_THETA, Kept, Tally
from sglang_sparse.tools.calibration.report import layer_rows, report, same_theta_rows, sink_share
from sglang_sparse.tools.calibration.robsa_prompts import fitting

CONFIG_FLAG = "--sparse-prefill-config"
DEFAULT_LENGTHS = "32k"
# How many times the mass that a layer may lose a single head may, by default.
HEAD_LOSS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of this method alone."""
    parser.add_argument("--n", type=int, default=8, help="prompts of each length, if there are (default: %(default)s)")
    parser.add_argument("--target-recall", type=float, default=0.95, help="above 0, up to 1 (default: %(default)s)")
    parser.add_argument("--head-floor", type=float, help="up to the target; 0: none (default: see above)")
    parser.add_argument(CONFIG_FLAG, help="the other fields, as for a server: JSON or a file")


def use(args: argparse.Namespace) -> str:
    """Flags of a server that take the file."""
    return f"--sparse-prefill-method anchor {CONFIG_FLAG} {shlex.quote(str(args.out))}"


def check(args: argparse.Namespace) -> None:
    """Complete the arguments.

    Raises:
        CalibrationError: names the argument, what it was and what is allowed.
    """
    if not 0 < args.target_recall <= 1:
        raise CalibrationError(field="--target-recall", got=args.target_recall, allowed="above 0 and at most 1")
    if args.head_floor is None:
        args.head_floor = max(0.0, round(1 - HEAD_LOSS * (1 - args.target_recall), 6))
    if not 0 <= args.head_floor <= args.target_recall:
        allowed = f"0 to the target of {args.target_recall}"
        raise CalibrationError(field="--head-floor", got=args.head_floor, allowed=allowed)
    if args.n < 1:
        raise CalibrationError(field="--n", got=args.n, allowed="1 or more")
    if not args.prompts:
        raise CalibrationError(
            f"{FLAGS} is needed: files with texts such as the server will see ({FORMS}); a .txt is cut into prompts "
            'of --lengths tokens, a line of .jsonl is one prompt, {"text": "…"} or {"messages": […]}',
            field=FLAGS,
        )


def base_method(config: str | None) -> Anchor:
    """The method whose theta is looked for, by the other fields of a ``--sparse-prefill-config``.

    Raises:
        SparseArgumentError: as the server refuses it.
        CalibrationError: it gives layers different methods or fields.
    """
    given = read_config(config, CONFIG_FLAG)
    fields = {name: value for name, value in given.items() if name not in ("theta", "calibration")}
    prefill = build(None, {}, "anchor", fields).prefill
    method, *others = prefill.methods if prefill else [None]
    if others or not isinstance(method, Anchor):
        message, allowed = f"{CONFIG_FLAG}: layers has several rules", 'those of anchor, as "2-"'
        raise CalibrationError(message, field="layers", got=fields.get("layers"), allowed=allowed)
    return method


def sparse_layers(method: Anchor, model: ModelFacts) -> tuple[int, ...]:
    """The layers of a model that the method runs in.

    Raises:
        CalibrationError: the method does not fit the model, or there are no such layers.
    """
    if reason := method.refuse(model):
        message = f"--method anchor does not fit {model.architecture}: {reason}"
        raise CalibrationError(message, field="--model-path", got=model.architecture)
    with within(CONFIG_FLAG, CalibrationError):
        return model.layers(method.config.layers)


def measure(
    model: Any, prompts: Mapping[int, Sequence[Sequence[int]]], method: Anchor, layers: Sequence[int]
) -> dict[int, dict[int, Kept]]:
    """Run all prompts.

    Args:
        model: of `load_model`.
        prompts: token ids, by their length.
        method: of `base_method`.
        layers: of `sparse_layers`.

    Returns:
        What each theta keeps, by length and layer.

    Raises:
        CalibrationError: see `capture`.
    """
    tallies: dict[int, dict[int, Tally]] = {length: {} for length in prompts}
    total = sum(map(len, prompts.values())) * len(shown_layers(model.config))
    with tqdm(total=total, desc="sglang_sparse.calibrate", unit="layer") as bar:
        for length, several in prompts.items():

            def visit(captured: Captured, length: int = length) -> None:
                if captured.layer in layers:
                    tally = tallies[length].setdefault(captured.layer, Tally(captured.query.shape[1]))
                    tally.add(captured, method.dense_below, method.config.block_size, method.config.step)
                bar.update()

            for tokens in several:
                capture(model, tokens, len(tokens), visit, sinks=True)
    return {length: {layer: tally.kept() for layer, tally in row.items()} for length, row in tallies.items()}


def choose(kept: Sequence[Kept], target: float, floor: float) -> int | None:
    """The place among `thetas` of the smallest one that serves a layer at all lengths; None if none does.

    Args:
        kept: of the layer, by length.
        target: recall to reach, mean over heads.
        floor: recall that every head is to reach.
    """
    reached = [(one.recall.mean(0) >= target) & (one.recall.amin(0) >= floor) for one in kept]
    places = torch.stack(reached).all(0).nonzero().flatten().tolist()
    return places[0] if places else None


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measure and choose.

    Returns:
        The config to write.

    Raises:
        CalibrationError: see the functions that this one calls; a length is none of the model, or no layer reaches the
            target.
        SparseArgumentError: see `base_method`.
    """
    method = base_method(args.sparse_prefill_config)
    described = model_facts(args.model_path, args.trust_remote_code, args.revision)
    layers = sparse_layers(method, described)
    _require_lengths(args.lengths, method.dense_below, described.context_len)
    source = Prompts(args.prompts, args.model_path, args.trust_remote_code, args.revision)
    prompts = {length: source.draw(length, args.n, args.seed) for length in args.lengths}
    device, dtype = device_and_dtype()
    model = load_model(args.model_path, device, dtype, args.trust_remote_code, args.revision)
    measured = measure(model, prompts, method, layers)
    places = {
        layer: choose([by_layer[layer] for by_layer in measured.values()], args.target_recall, args.head_floor)
        for layer in layers
    }
    if not (served := [layer for layer, place in places.items() if place is not None]):
        raise CalibrationError(
            f"no theta up to {MAX_THETA:g} reaches a recall of {args.target_recall} in any layer, with "
            f"{args.head_floor} in every head",
            field="--target-recall",
            got=args.target_recall,
            allowed="a lower --target-recall or --head-floor",
        )
    rows = layer_rows(measured, places)
    chosen = {row["layer"]: row["theta"] for row in rows}
    calibration = {
        "method": "anchor",
        "target_recall": args.target_recall,
        "head_floor": args.head_floor,
        "model": args.model_path,
        "architecture": described.architecture,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "prompts": [file.name for file in args.prompts],
        "number_of_prompts": [{"length": length, "prompts": len(several)} for length, several in prompts.items()],
        "first_position": method.dense_below,
        "seed": args.seed,
        "versions": versions(),
        "sinks": sink_share(measured),
        "layers": rows,
        "same_theta_in_all_layers": same_theta_rows(measured),
    }
    config = method.config.model_dump(exclude_unset=True)
    # Theta is good for these alone, whatever their defaults become.
    config |= {"block_size": method.config.block_size, "step": method.config.step}
    if len(served) < len(places):
        config["layers"] = served
    # Should a layer that is dense now run sparse some day, it is on the safe side.
    config["theta"] = [chosen.get(layer, ALL_KEYS) for layer in range(described.num_hidden_layers)]
    config["calibration"] = calibration
    return AnchorConfig.model_validate(config).model_dump(include=set(config))


def _require_lengths(lengths: Sequence[int], dense_below: int, context: int) -> None:
    if lengths[0] <= dense_below:
        raise CalibrationError(
            f"--lengths {lengths[0]}: prompt tokens before position {dense_below} attend densely, allowed is more; for "
            """shorter prompts lower the crossover: --sparse-prefill-config '{"crossover_tokens": 0}'""",
            field="--lengths",
            got=lengths[0],
        )
    fitting(lengths, context, is_default=False)


def conclude(config: dict[str, object], args: argparse.Namespace) -> None:
    """Print what was found."""
    report(config)
