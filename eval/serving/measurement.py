"""One measurement of ``eval.bench_serving`` on one server: what it attends with, and a batch by SGLang's client."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from eval.live.arms import MAX_DENSE_ROWS
from eval.live.client import Chunk, LiveServer, Stream
from eval.live.counters import EvaluationError, dense_rows, moved, read_shares, require_sparse
from eval.serving.grid import SERVED, Cell, dense_by_limits, grid, streams
from eval.tasks.judge_commands import Target, reach, run_judge, serving_command, serving_rows

Row = Mapping[str, Any]


class Inputs:
    """Inputs of the servers' attention: here the queries, keys and values of a checkpoint.

    A subclass gives a benchmark other inputs, and the quality of a sparse method's selection over them.

    Attributes:
        command: name of the command that has these inputs.
        cell_fields: names of `of_cell`.
        prompt_fields: names of `of_prompt`.
        decode_alone: whether there are no figures that include prefill.
    """

    command = "eval.bench_serving"
    cell_fields: tuple[str, ...] = ()
    prompt_fields: tuple[str, ...] = ()
    decode_alone = False

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """The arguments that say which model it is, and what it attends with."""
        parser.add_argument("--model-path", required=True, help="a checkpoint")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        """End the command where these arguments do not fit together."""

    def require(self) -> None:
        """Refuse, before a server starts, what would be found minutes later."""

    def header(self) -> dict[str, Any]:
        """Return the fields that stand for the typed arguments in the file's header."""
        return {}

    def serve(self, scratch: Path) -> tuple[Path, list[str], dict[str, str]]:
        """The model's folder, and the flags and variables that every server is started with."""
        return Path(self.args.model_path), [], {}

    def made(self, states: Sequence[Row]) -> Row | None:
        """Return a server's report of its inputs, by ``internal_states`` of `/server_info`; None for a checkpoint's."""
        return None

    def require_interval(self, interval: int) -> None:
        """Refuse a server that rectifies every so many tokens, where these inputs allow none."""

    def of_cell(self, cell: Cell, config: Row, made: Row | None, facts: Row) -> dict[str, Any]:
        """Return the quality of the decode method's selection in a batch."""
        return {}

    def of_prompt(self, context: int, config: Row, made: Row | None) -> dict[str, Any]:
        """Return the quality of the prefill method's selection in a prompt."""
        return {}

    def asked(self, quality: Row) -> dict[str, Any]:
        """The ``custom_params`` of a prompt with this `of_prompt`."""
        return {}

    def judge(self, row: Row) -> None:
        """Refuse a row whose sparsity is not the one that its inputs were made for."""


@dataclass(frozen=True)
class Side:
    """A server under measurement.

    Attributes:
        name: among the others.
        url: where it is.
        server: how it is asked.
        target: what it says of itself.
        facts: what it says of itself, and what it decodes and prefills with.
        inputs: what it attends with.
        made: what it says of generated inputs; None where it attends with the model's own.
        config: of its decode method, resolved; empty where it has none.
        prefill_config: of its prefill method, resolved; None where it has none.
    """

    name: str
    url: str
    server: LiveServer
    target: Target
    facts: Row
    inputs: Inputs
    made: Row | None = None
    config: Row = field(default_factory=dict)
    prefill_config: Row | None = None

    @property
    def counted(self) -> bool:
        """Whether it counts what a sparse method does."""
        return self.target.arm.counted


def look(inputs: Inputs, name: str, url: str, server: LiveServer, expect: str) -> Side:
    """Ask a server what it is, and refuse one that is not what the names of methods, or "dense", in `expect` say."""
    args = inputs.args
    info = server.info()
    asked = argparse.Namespace(expect=expect, model=None, tokenizer=None, custom_params={})
    target = reach(asked, server, max(args.contexts) + args.output_length)
    graphs = info.get("cuda_graph_config") or {}
    facts: dict[str, Any] = {f"{phase}_graphs": _captured(graphs.get(phase)) for phase in ("decode", "prefill")}
    facts["decode_backend"] = info.get("decode_attention_backend") or info.get("attention_backend")
    state = info["internal_states"][0].get("sparse") or {}
    made, facts = inputs.made(info["internal_states"]), {**target.facts, **facts}
    facts["sparse_layers"] = state.get("sparse_layers") if state.get("config") else None
    config, prefill = state.get("config") or {}, (state.get("prefill") or {}).get("config")
    side = Side(name, url, server, target, facts, inputs, made, config, prefill)
    # Before anything is measured: a file without these rows would be found minutes later.
    for cell in grid(args):
        inputs.of_cell(cell, side.config, side.made, side.facts)
    return side


def _captured(phase: Row | None) -> bool:
    return (phase or {}).get("backend", "disabled") != "disabled"


def drive(args: argparse.Namespace, side: Side, cell: Cell, run: int, interval: int, scratch: Path) -> dict[str, Any]:
    """Have SGLang's client send a batch, and prove what was measured; refused if a request failed, or the proof does.

    The prefix cache is flushed before the first run; the sparse server rectifies every `interval` tokens, 0 for never.
    """
    sizes = {"output_length": args.output_length, "prompts": cell.batch, "concurrency": cell.batch}
    asked = argparse.Namespace(base_url=side.url, seed=args.seed, **sizes)
    path = scratch / f"{side.name}-{cell.name}-{run}.jsonl"
    command = [*serving_command(side.target, asked, cell.context, path), "--warmup-requests", str(args.warmup)]
    if run:
        command.remove("--flush-cache")
    before = side.server.counters() if side.counted else None
    run_judge(command, scratch, args.out.with_suffix(".log"))
    after = side.server.counters() if before is not None else None
    counts = moved(before, after) if before is not None and after is not None else None
    result = json.loads(path.read_text())
    answers = streams(result)
    if not run and any(answer.cached_tokens for answer in answers):
        raise EvaluationError("prompts of a batch share a prefix: give another --seed")
    if counts is not None and side.config:
        require_sparse_cell(cell, counts, side.config)
    figures = decode_figures(answers, max(interval, 1))
    row = serving_rows(result)[1] | {"id": f"{side.name}/{cell.name}/{run}", "arm": side.name, "run": run}
    row["in_turn"] = args.both
    row |= {"context": cell.context, "batch": cell.batch, "ttfts": figures["ttft"]}
    row |= {"decode_tpot": figures["tpot_mean"], "decode_tpots": figures["tpot"]}
    row |= {f"decode_{name}": figures[name] for name in ("itl_p50", "itl_p99", "itl_max", "merged")}
    row |= {name: side.facts.get(name) for name in SERVED} | {"sparse_layers": side.facts.get("sparse_layers")}
    row |= {"density": None, "dense_rows": None, "counters": counts}
    if after is None or counts is None:
        return row
    if after.get("prefill"):
        require_sparse_prefill(cell, counts, after["prefill"])
    row |= read_shares(counts) | decode_sparsity(side.config, counts)
    row |= side.inputs.of_cell(cell, side.config, side.made, side.facts)
    side.inputs.judge(row)
    return row


def require_sparse_prefill(cell: Cell, counts: dict[str, int], prefill: Row) -> None:
    """Refuse counts of a prefill method that did nothing although the prompts are longer than where it begins."""
    begins = prefill["config"]["crossover_tokens"]
    if not counts["prefill_sparse_tokens"] and cell.context > begins:
        raise EvaluationError(
            f"{cell.name}: no token was prefilled sparse, although {prefill['method']} begins at {begins}"
        )


def require_sparse_cell(cell: Cell, counts: dict[str, int], config: Row) -> None:
    """Refuse counts that do not show sparse decode, unless the server's limits make such a batch dense."""
    if dense_by_limits(cell, config):
        return
    # The client's warm-up request, and the first ones of a batch, may be too few to run sparse.
    require_sparse(cell.name, {**counts, "dense_fallback_rows": 0}, rectifying=config.get("rectify_interval", 0) > 0)
    share = dense_rows(counts) or 0.0
    if share > MAX_DENSE_ROWS:
        raise EvaluationError(
            f"{share:.0%} of the rows were decoded dense, allowed are {MAX_DENSE_ROWS:.0%}: start the sparse server "
            "with lower min_seq_len and crossover_tokens"
        )


def decode_sparsity(config: Row, counts: Mapping[str, int]) -> dict[str, Any]:
    """Compute RoBSA's sparsity in the layers that ran sparse; empty for another method, or where none did.

    Returns:
        ``active_blocks``, the mean over rows, steps and sparse layers, and ``sparsity``, the share of the others.
    """
    if "theta1" not in config or not counts["sparse_layer_rows"]:
        return {}
    shares = counts["pages_attended"] / counts["pages_held"]
    return {"active_blocks": counts["pages_attended"] / counts["sparse_layer_rows"], "sparsity": 1 - shares}


def shared_window(streams: Sequence[Stream]) -> tuple[float, float]:
    """Return when all requests decode: from the last first chunk to the first last one; refused where it is empty."""
    begin = max(s.chunks[0].seconds for s in streams)
    end = min(s.chunks[-1].seconds for s in streams)
    if end <= begin:
        raise EvaluationError("a request ended before another had its first token: the server does not run the batch")
    return begin, end


def whole_periods(chunks: Sequence[Chunk], period: int) -> Sequence[Chunk]:
    """The chunks up to the last one that is a multiple of `period` tokens after the first; empty if there is none."""
    ends = [i for i, chunk in enumerate(chunks) if i and (chunk.tokens - chunks[0].tokens) % period == 0]
    return chunks[: ends[-1] + 1] if ends else []


def decode_figures(streams: Sequence[Stream], period: int = 1) -> dict[str, Any]:
    """Times of a batch, in seconds.

    A multiple of `period` tokens counts, so that no part of an interval between rectifications weighs more.

    Returns:
        Per request: ``ttft``, time to the first token; ``tpot``, mean time per token within the shared window;
        ``tokens`` counted for it. Of the batch: ``tpot_mean``; ``itl_p50`` and ``itl_p99`` of the gaps between tokens,
        a chunk's gap divided evenly among its tokens; ``itl_max``, the longest wait for a chunk; ``merged``, the share
        of chunks with more than one token.

    Raises:
        EvaluationError: the window is empty, or holds less than half of a request's tokens.
    """
    begin, end = shared_window(streams)
    tpots, counts, gaps, waits, sizes = [], [], [], [], []
    for s in streams:
        inside = whole_periods([chunk for chunk in s.chunks if begin <= chunk.seconds <= end], period)
        tokens = inside[-1].tokens - inside[0].tokens if inside else 0
        total = s.chunks[-1].tokens
        if not tokens or 2 * tokens < total - 1:
            raise EvaluationError(f"only {tokens} of {total} tokens came while all requests of the batch decoded")
        tpots.append((inside[-1].seconds - inside[0].seconds) / tokens)
        counts.append(tokens)
        for before, after in pairwise(inside):
            waits.append(after.seconds - before.seconds)
            sizes.append(after.tokens - before.tokens)
            gaps += [waits[-1] / sizes[-1]] * sizes[-1]
    p50, p99 = np.percentile(gaps, [50, 99]).tolist()
    return {
        "ttft": [s.chunks[0].seconds - s.sent for s in streams],
        "tpot": tpots,
        "tokens": counts,
        "tpot_mean": fmean(tpots),
        "itl_p50": p50,
        "itl_p99": p99,
        "itl_max": max(waits),
        "merged": fmean(size > 1 for size in sizes),
    }
