"""The servers of a run, and what each must be and prove before its scores count."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.live.client import LiveServer, served_model
from eval.live.counters import (
    EvaluationError,
    dense_rows,
    leaves_out,
    require_dense,
    require_dense_prefill,
    sparsity,
    sum_of,
)
from eval.live.suite import Case
from eval.serving.grid import methods, sparse_flags
from launch.server import ServerProcess

# More would make the scores those of a dense server, and the recorded density those of a few rows.
MAX_DENSE_ROWS = 0.1
MAX_FAILED = 0.005


@dataclass(frozen=True)
class Arm:
    """One of the servers under comparison, as it is asked.

    Attributes:
        name: "base", "compare", or that of further fields on the base server.
        server: where it is.
        model: its name there.
        context: most tokens of prompt and answer; None where the server does not say.
        options: further fields of each request.
        counted: whether the server counts what its sparse methods do.
        decodes: whether it has a decode method.
        prefills: whether it has a prefill method.
    """

    name: str
    server: LiveServer
    model: str
    context: int | None
    options: dict[str, Any]
    counted: bool
    decodes: bool = True
    prefills: bool = False


def make_arm(name: str, server: LiveServer, facts: dict[str, Any], model: str | None, params: dict[str, Any]) -> Arm:
    """Describe a server, of which `facts` is what it says about itself."""
    found, context = server.ask(lambda http: served_model(http, model))
    decode, prefill = phases_of(facts)
    options = {"custom_params": params} if params else {}
    counted = facts.get("sparse") is not None
    return Arm(name, server, found, context, options, counted, decode is not None, prefill is not None)


def decode_config(server: LiveServer) -> dict[str, Any]:
    """The config of a server's decode method; refused without one, or with one for each of several parts."""
    state = server.sparse_state()
    if state.get("parts"):
        raise EvaluationError(
            f"the server decodes by rules of several methods or fields, {_method_of(state)}; wanted is one config"
        )
    if state["config"] is None:
        raise EvaluationError(f"the server runs {_method_of(state['prefill'])} alone and decodes dense")
    return state["config"]


def phases_of(facts: dict[str, Any]) -> tuple[str | None, str | None]:
    """The decode method and the prefill method that a server runs; None where the phase is dense."""
    state = facts.get("sparse") or {}
    return _method_of(state), _method_of(state.get("prefill") or {})


def _method_of(state: dict[str, Any]) -> str | None:
    """The method of a phase, or those of rules by layer, such as "resa/skip_softmax"."""
    return "/".join(part["method"] for part in state["parts"]) if state.get("parts") else state.get("method")


def together(*names: str | None) -> str | None:
    """Name the methods of both phases in one word, such as "resa", "resa+anchor" or "anchor"; None without any."""
    return "+".join(name for name in names if name) or None


def methods_of(facts: dict[str, Any]) -> str | None:
    """The sparse methods that a server runs, by `together`; None for a dense one."""
    return together(*phases_of(facts))


def require_method(expect: str, facts: dict[str, Any], compared: bool) -> None:
    """Refuse a server that does not run what is expected of it."""
    method = methods_of(facts)
    if expect == "any" or (expect == "auto" and (method or not compared)):
        return
    wanted = {"auto": "a sparse method", "dense": None}.get(expect, expect)
    if method != wanted:
        raise EvaluationError(
            f"the base server runs {method or 'no sparse method'}, expected {wanted or 'none'}: "
            f"start it so, or say --expect {method or 'dense'}"
        )


def require_reference(expect: str, facts: Sequence[dict[str, Any]], params: dict[str, Any]) -> None:
    """Refuse a server to compare with that is not asked to run dense, or has another model."""
    method = methods_of(facts[1])
    if method and params.get("sparse") is not False and expect != "any":
        raise EvaluationError(
            f"the server to compare with runs {method}: say --compare-custom-params '{{\"sparse\": false}}' to have it "
            "run dense, or --expect any"
        )
    models = [fact.get("model_path") for fact in facts]
    if all(models) and models[0] != models[1]:
        raise EvaluationError(f"the servers have different models, {models[0]} and {models[1]}: prompts are token ids")


def require_proof(label: str, arm: Arm, expect: str, counts: Sequence[dict[str, int]]) -> None:
    """Refuse the scores of a server whose counters do not show that it ran as it was asked to: sparse, or dense.

    Each phase that has a method must have run by it; where only one has, the other is dense.
    """
    total, params = sum_of(counts), arm.options.get("custom_params", {})
    if params.get("sparse") is False:
        require_dense(f"{label} {arm.name}", total)
        return
    if expect in ("any", "dense"):
        return
    if arm.decodes:
        _require_sparse_decode(label, total)
    if arm.prefills and params.get("exact_prefix") is True:
        require_dense_prefill(f"{label} {arm.name}", total)
    elif arm.prefills:
        require_sparse_prefill(label, total, ", or say --expect any")


def _require_sparse_decode(label: str, total: dict[str, int]) -> None:
    if not total["sparse_layer_rows"] or not leaves_out(total):
        raise EvaluationError(
            f"{label}: nothing of it was decoded sparse, so it says nothing about the method: start the server with "
            "lower min_seq_len, crossover_tokens and min_pages, ask longer questions, or say --expect any"
        )
    share = dense_rows(total) or 0.0
    if share > MAX_DENSE_ROWS:
        raise EvaluationError(
            f"{label}: {share:.0%} of the rows were decoded dense, allowed are {MAX_DENSE_ROWS:.0%}: start the server "
            "with lower min_seq_len and crossover_tokens, raise --concurrency, or say --expect any"
        )


def require_sparse_prefill(label: str, total: dict[str, int], otherwise: str = "") -> None:
    """Refuse counts of prompts of which prefill left nothing out; `otherwise` ends the advice."""
    if not total.get("prefill_sparse_tokens") or not sparsity(total):
        raise EvaluationError(
            f"{label}: prefill left nothing out of it, so it says nothing about the method: start the server with a "
            "lower crossover_tokens in --sparse-prefill-config, or with a threshold that leaves more out, or ask longer"
            f" questions{otherwise}"
        )


def require_answers(arm: str, rows: Sequence[dict[str, Any]]) -> None:
    """Refuse the scores of a server that did not answer half a percent of the questions."""
    failed = [row for row in rows if row.get("failed")]
    if len(failed) > MAX_FAILED * len(rows):
        reasons = sorted({row["failed"] for row in failed})
        raise EvaluationError(f"void: {len(failed)} of {len(rows)} {arm} requests failed: {'; '.join(reasons[:3])}")


# What a server must leave out at the least: the field of a summary, and its part of the message.
LEAST = {
    "sparsity": "prefill left out less than {least:g} of the query-key pairs (--least-sparsity)",
    "skipped": "decode skipped less than {least:g} of the blocks (--least-skipped)",
}


def require_least(summary: Sequence[dict[str, Any]], field: str, least: float) -> None:
    """Refuse a base server that left out less than the share `least`: its scores say little of a sparse one."""
    mine = [row for row in summary if row["arm"] == "base"]
    less = [row for row in mine if (row.get(field) or 0.0) < least]
    if less:
        found = ", ".join(f"{row['task']} {row['length']}: {row.get(field) or 0.0:.3f}" for row in less)
        raise EvaluationError(f"{LEAST[field].format(least=least)}: {found}")


def require_room(cases: Sequence[Case], arms: Sequence[Arm]) -> None:
    """Refuse questions that a server has no room for."""
    longest = max((case.length or 0 for case in cases), default=0)
    for arm in arms:
        if arm.context is not None and longest > arm.context:
            raise EvaluationError(
                f"a length of {longest} tokens is wanted, the {arm.name} server's context is {arm.context}: start it "
                "with a larger --context-length, or ask for shorter ones"
            )


@contextlib.contextmanager
def servers(args: argparse.Namespace) -> Iterator[tuple[str, str | None]]:
    """URLs of the sparse and of the dense server (None: the sparse one itself), started if need be."""
    if args.base_url:
        yield args.base_url, args.compare_url
        return
    config = args.sparse_config
    with contextlib.suppress(json.JSONDecodeError):
        # The lengths asked for are meant to be decoded sparse, unless the config says otherwise. Not so prefill: its
        # thresholds may be calibrated from the crossover on alone.
        given = json.loads(config)
        config = json.dumps(
            given if given.keys() & {"min_seq_len", "crossover_tokens"} else {"dense_fallback": "never", **given}
        )
    sparse = sparse_flags(argparse.Namespace(**{**vars(args), "sparse_config": config}))
    args.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        urls = []
        for name, more, expected in (("sparse", sparse, together(*methods(args))), ("dense", [], "dense")):
            flags = [*shlex.split(args.server_args), *more]
            process = ServerProcess(args.model_path, *flags, log_path=args.out / f"{name}.log")
            urls.append(stack.enter_context(process).url)
            with LiveServer(urls[-1]) as server:
                require_method(str(expected), server.facts(), True)
        yield urls[0], urls[1]


def require_sparse_lengths(state: Mapping[str, Any], lengths: Sequence[int], text_length: int) -> None:
    """Refuse a server that would run the shortest questions, or the forced texts, dense; lengths are in tokens."""
    config, prefill = state["config"] or {}, state.get("prefill")
    least, shortest = config.get("min_seq_len", 0), min([*lengths, text_length])
    if config.get("dense_fallback") != "never" and least >= shortest:
        raise EvaluationError(
            f"the server decodes texts of {shortest} tokens dense: its min_seq_len is {least}; start it with "
            'dense_fallback "never", or give longer --lengths'
        )
    if prefill and (begins := prefill["config"]["crossover_tokens"]) >= min(lengths):
        raise EvaluationError(
            f"the server prefills texts of {min(lengths)} tokens dense: its {prefill['method']} begins at position "
            f"{begins}; start it with a lower crossover_tokens in --sparse-prefill-config, or give longer --lengths"
        )


def require_controls(
    controls: Sequence[tuple[str, str]], facts: Mapping[str, Any], strict: bool
) -> list[tuple[str, str, str]]:
    """Refuse controls that are not what they are called, or that nothing here is to be held against.

    A control takes the place of the decode method, and the prefill of its server is that of the judged one. Returned
    are name, URL, and the methods that the server there must prove.
    """
    decode, prefill = phases_of(dict(facts))
    if decode is None and (controls or strict):
        wanted = "--control" if controls else "--strict"
        raise EvaluationError(
            f"{wanted}: the server runs {prefill} alone, and here controls are of decode, so that no task gates: put "
            "the questions of eval.niah to the control random_stripes by itself"
        )
    found = []
    for control, url in controls:
        with LiveServer(url) as server:
            runs = methods_of(server.facts()) or "no sparse method"
        expected = together(control, prefill)
        if runs != expected:
            raise EvaluationError(f"--control {control}={url}: the server there runs {runs}, expected {expected}")
        found.append((control, url, str(expected)))
    return found
