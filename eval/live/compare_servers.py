"""The servers of ``eval.compare``: started if need be, and judged before hours are spent on questions to them."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eval.live.arms import methods_of, phases_of, require_method, together
from eval.live.client import LiveServer
from eval.live.counters import EvaluationError
from eval.serving.grid import methods, sparse_flags
from launch.server import ServerProcess


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
        config = json.dumps({"dense_fallback": "never", **json.loads(config)})
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


def require_sparse(state: Mapping[str, Any], lengths: Sequence[int], text_length: int) -> None:
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

    A control takes the place of the decode method, and the prefill of its server is that of the judged one.

    Returns:
        Name, URL, and the methods that the server there must prove.
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
