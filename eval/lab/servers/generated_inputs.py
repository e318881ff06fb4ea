"""Generated queries, keys and values for ``eval.lab.bench_serving``, and what sparse selections are worth over them.

Recall of a prompt comes from a file of ``eval.lab.bench_prefill`` with the same recipe, seed, heads, length, blocks and
threshold. A server generates as many positions as a request may have: without the same ``--positions`` there its
stripes lie elsewhere, equally dense. It attends densely before its crossover, which the file's recall does not count,
so that it is rather too low than too high.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.lab.kernels.length_shares import share_at, shares
from eval.lab.kernels.mla import COMMAND as MLA_COMMAND
from eval.lab.kernels.prefill import COMMAND as PREFILL_COMMAND
from eval.lab.servers import model_shapes
from eval.lab.servers.serving_recall import command_of, inputs_of, matching, recalls
from eval.lab.structured.generator import SPARSITY_TOLERANCE, near_target, read_recipe
from eval.lab.structured.prefill import ATTEND, SKIP, read_given
from eval.live.counters import EvaluationError
from eval.serving.first_token import TASK
from eval.serving.grid import ROBSA, Cell, dense_by_limits
from eval.serving.measurement import Inputs, Row

ROOT = Path(__file__).parents[3]
SERVER = ROOT / "eval" / "lab" / "structured" / "server"
KV_DTYPES = {"fp8_e4m3": "float8_e4m3fn"}
# What says how much a prefill method leaves out, and what else of its config the recall depends on.
SETTINGS = {"anchor": ("theta", ("block_size", "step")), "skip_softmax": ("threshold_scale_factor", ())}
THRESHOLDS = tuple(name for name, _ in SETTINGS.values())
ADVICE = "find its value with eval.lab.bench_prefill --sparsity, its --dense-below being the server's crossover_tokens"


def served(args: argparse.Namespace, scratch: Path) -> tuple[Path, list[str], dict[str, str]]:
    """The folder, written for a shape without weights; flags and variables make a server generate its inputs.

    Args:
        args: the command line: ``shape`` or ``model_path``, and ``structured``, None where nothing is generated.
        scratch: folder for the shape.
    """
    flags, environment = list[str](), dict[str, str]()
    if args.structured is not None:
        flags = ["--json-model-override-args", json.dumps({"structured_inputs": args.structured})]
        paths = filter(None, [str(SERVER), str(ROOT), os.environ.get("PYTHONPATH")])
        environment = {"PYTHONPATH": os.pathsep.join(paths)}
    return model_shapes.folder_of(args, scratch), flags + model_shapes.load_flags(args), environment


def require_made(structured: Row | None, states: Sequence[Row]) -> Row | None:
    """Return a server's report of its generated inputs; None where none were asked for.

    Raises:
        EvaluationError: the plugin that generates them was not loaded, or made others.
    """
    if structured is None:
        return None
    found = [state["structured_inputs"] for state in states if state.get("structured_inputs")]
    if len(found) != len(states):
        raise EvaluationError("--structured: the server attends with the model's own inputs, see its log")
    wanted = read_given(structured)
    wanted["recipe"] = read_recipe(wanted["recipe"]).model_dump()
    if any({name: made.get(name, ATTEND) for name in wanted} != wanted for made in found):
        raise EvaluationError(f"--structured {structured}: the server attends with other inputs, {found[0]}")
    return found[0]


class GeneratedInputs(Inputs):
    """Those of ``--structured``; without it those of a checkpoint, or of dummy weights of a ``--shape``."""

    command = "eval.lab.bench_serving"
    # By a file of eval.lab.bench_mla; ``recipe`` is what was changed of its own.
    cell_fields = ("recall", "similarity", "target_sparsity", "active", "recipe", "theta1", "block_size", "kv_dtype")
    prompt_fields = (*THRESHOLDS, "recall", "target_sparsity")

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.decode_alone = args.skip_prefill

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """The model or its shape, and which inputs are generated."""
        model = parser.add_mutually_exclusive_group(required=True)
        shapes = list(model_shapes.SHAPES)
        model.add_argument("--shape", choices=shapes, help="a public model's shape, without its weights")
        model.add_argument("--model-path", help="a checkpoint")
        parser.add_argument(
            "--structured",
            type=_structured,
            help="inputs to generate: recipe and seed as JSON, {} for its own, or a file of eval.lab.bench_mla",
        )
        parser.add_argument(
            "--skip-prefill",
            action="store_true",
            help="over --structured inputs prefill writes KV and little else: for decode alone",
        )
        parser.add_argument(
            "--sparsity",
            type=shares,
            default={},
            help="share of the pairs to be left out, such as 0.89,32k=0.78; see above",
        )
        parser.add_argument(
            "--recall-from", type=Path, help="file of eval.lab.bench_prefill, or for robsa of eval.lab.bench_mla"
        )

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        """Read ``--structured``, and end the command where the arguments do not fit together."""
        try:
            if isinstance(args.structured, Path):
                path = args.structured
                args.structured, args.recall_from = inputs_of(path), args.recall_from or path
        except EvaluationError as error:
            parser.error(str(error))
        if args.skip_prefill:
            if not isinstance(args.structured, dict) or args.sparse_prefill_method or args.prefix:
                parser.error(
                    "--skip-prefill needs --structured inputs, which KV is made of anyway, and measures decode alone: "
                    "leave out --sparse-prefill-method and --prefix"
                )
            args.structured = {**args.structured, "prefill": SKIP}
        if args.structured is not None:
            try:
                read_recipe(read_given(args.structured)["recipe"])
            except ValueError as error:
                parser.error(f"--structured: {error}")
        known = args.sparse_prefill_method or args.sparse_method == ROBSA
        if args.recall_from is not None and (args.structured is None or not known):
            parser.error(
                "--recall-from is the recall of a --sparse-prefill-method, or of robsa, over --structured inputs: "
                "give both"
            )
        if args.sparsity and args.recall_from is None:
            parser.error("--sparsity needs --recall-from, which has the threshold that leaves out so much")
        if args.sparsity and not args.sparse_prefill_method:
            parser.error("--sparsity is of a --sparse-prefill-method: what decode leaves out is a matter of the inputs")

    def require(self) -> None:
        """Refuse a file that has no recall."""
        if self.args.recall_from is not None:
            recalls(self.args.recall_from, command_of(self.args))

    def header(self) -> dict[str, Any]:
        """The file of the recall without the folders of this machine."""
        return {"recall_from": self.args.recall_from.name if self.args.recall_from else None}

    def serve(self, scratch: Path) -> tuple[Path, list[str], dict[str, str]]:
        """See `served`."""
        return served(self.args, scratch)

    def made(self, states: Sequence[Row]) -> Row | None:
        """See `require_made`."""
        return require_made(self.args.structured, states)

    def require_interval(self, interval: int) -> None:
        """Refuse rectification where prefill writes KV alone."""
        if self.decode_alone and interval:
            raise EvaluationError("--skip-prefill: the server rectifies, which is prefill: rectify_interval must be 0")

    def of_cell(self, cell: Cell, config: Row, made: Row | None, facts: Row) -> dict[str, Any]:
        """`cell_fields` of a server that decodes by RoBSA; nothing for a cell that is decoded dense, or without a file.

        Raises:
            EvaluationError: the file has no row for this cell; names what differs in the nearest one.
        """
        args = self.args
        if args.recall_from is None or args.sparse_prefill_method or made is None or dense_by_limits(cell, config):
            return {}
        shape = made["shape"]
        wanted = {"length": cell.context, "made": made["recipe"], "seed": made["seed"]}
        # Where stripes lie depends on how many positions there are.
        wanted |= {"positions": made["positions"], "heads": shape["q_heads"], "latent": shape["v_head_dim"]}
        wanted |= {"rope": shape["head_dim"] - shape["v_head_dim"]}
        wanted |= {"kv_dtype": KV_DTYPES.get(facts.get("kv_cache_dtype", "auto"), "bfloat16")}
        wanted |= {name: config.get(name) for name in ("block_size", "theta1", "max_active_ratio")}
        found = matching(args.recall_from, MLA_COMMAND, wanted)
        return {name: found.get(name) for name in self.cell_fields}

    def of_prompt(self, context: int, config: Row, made: Row | None) -> dict[str, Any]:
        """The threshold that a prompt is prefilled with, by its name, and the recall that it has.

        Returns:
            Nothing for a prompt that is dense, or where no file is given.

        Raises:
            EvaluationError: the file has no row for this prompt; names what differs in the nearest one.
        """
        if self.args.recall_from is None or made is None or context <= config["crossover_tokens"]:
            return {}
        shape = made["shape"]
        wanted = {"length": context, "made": made["recipe"], "seed": made["seed"], "dim": shape["head_dim"]}
        wanted |= {name: shape[name] for name in ("q_heads", "kv_heads")}
        setting, others = SETTINGS[self.args.sparse_prefill_method]
        wanted |= {"setting": setting} | {name: config[name] for name in others}
        target = share_at(self.args.sparsity, context)
        wanted |= {"value": config[setting]} if target is None else {"target_sparsity": target}
        near = matching(self.args.recall_from, PREFILL_COMMAND, wanted)
        return {setting: near["value"], "recall": near["recall"], "target_sparsity": target}

    def asked(self, quality: Row) -> dict[str, Any]:
        """The threshold that leaves out ``--sparsity``."""
        return {name: quality[name] for name in THRESHOLDS if quality.get("target_sparsity") and name in quality}

    def judge(self, row: Row) -> None:
        """Refuse a run that left out another share of the query-key pairs than its inputs were made for.

        Raises:
            EvaluationError: names both.
        """
        target, found = row.get("target_sparsity"), row.get("sparsity")
        if target is None or (found is not None and near_target(found, target, row.get("active"))):
            return
        (threshold,) = [f"{name} {row[name]:g}" for name in (*THRESHOLDS, "theta1") if row.get(name) is not None]
        share = found if found is None else f"{found:.3f}"
        of_decode = f"the server does not attend as eval.lab.bench_mla did in {self.args.recall_from}"
        raise EvaluationError(
            f"{share} of the query-key pairs were left out at {threshold}, allowed are {target:.4g} ± "
            f"{SPARSITY_TOLERANCE}{'' if row.get('active') is None else ' and a tenth of the rest'}: "
            f"{ADVICE if row.get('task') == TASK else of_decode}"
        )


def _structured(text: str) -> object:
    return Path(text) if text.endswith((".jsonl", ".jsonl.xz")) else json.loads(text)
