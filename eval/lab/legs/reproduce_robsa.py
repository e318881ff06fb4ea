"""Legs of ``eval.lab.reproduce`` that show on the trained tiny MLA model what RoBSA finds on a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eval.lab.legs.reproduce_leg import URL, Command, Leg, Server
from eval.lab.legs.reproduce_needles import (
    ALWAYS,
    AT_ONCE,
    BESIDE_DENSE,
    BOOK_WINDOW,
    BOOKS,
    CONTROLS,
    EVERY_TENTH,
    FP8,
    GRAPHS,
    identity_leg,
)
from eval.lab.tables import weights

NAME = "tiny-mla"
MODEL = f"eval/models/{NAME}"
CALIBRATION = f"{MODEL}/{weights.CALIBRATION}"
PAGE = ("--page-size", "64")
# Two of the three layers that the calibration trusts at the default, whose similarity is .9999 and more.
TWO_LAYERS: Mapping[str, Any] = {"theta2": 0.998}
# All three but the first, which reads hardly any block of prose and costs it something all the same.
NOT_FIRST: Mapping[str, Any] = {"layers": "1-"}
# The same by whole pages, of which as much mass is more tokens.
PAGES: Mapping[str, Any] = {**NOT_FIRST, "block_size": 64}
THETA1 = (0.3, 0.5, 0.7, 0.9, 0.95)
# What RoBSA reads with its calibration at 8k, where it reads more than at 32k.
SHARE = 0.08
# The same of whole pages.
PAGES_SHARE = 0.1
# Windows in flight, all of whose decode steps are graphs.
_WINDOWS_AT_ONCE = "64"


def _server(
    method: str,
    config: Mapping[str, Any],
    environment: tuple[tuple[str, str], ...] = (),
    more: tuple[str, ...] = GRAPHS,
) -> Server:
    """A server with the layers that the model's calibration says are sensitive."""
    config = {"page_size": 64, "calibration": CALIBRATION, **ALWAYS, **config}
    flags = ("--sparse-method", method, "--sparse-config", json.dumps(config), *PAGE, "--attention-backend", "flashmla")
    return Server(MODEL, (*flags, *more), environment)


def _needles(
    name: str,
    server: Server,
    theta1: float,
    count: int,
    lengths: str = "8k,32k",
    passkey: bool = False,
    depths: str = "0,25,50,75,100",
) -> Leg:
    """Needles with the calibration of the model.

    Args:
        name: of the leg and its files.
        server: of the method or a control.
        theta1: of the requests; of a control the share of the blocks.
        count: of each task, length and depth.
        lengths: tokens of prompt and answer.
        passkey: whether to ask for a pass key, too.
        depths: of the needles, in percent.
    """
    both = (*BESIDE_DENSE, "--n", str(count), "--concurrency", AT_ONCE, "--lengths", lengths, "--depths", depths)
    both += ("--custom-params", json.dumps({"theta1": theta1}))
    commands = [Command("eval.niah", f"niah-tiny-mla-{name}.jsonl", (*both, "--tasks", "single,multikey"))]
    if passkey:
        file = f"infinitebench-tiny-mla-{name}.jsonl"
        commands.append(Command("eval.infinitebench", file, (*both, "--tasks", "gen_passkey")))
    return Leg(f"needles-{name}", tuple(commands), server)


def _controls() -> tuple[Leg, ...]:
    """Blocks at random, and a window: as many as RoBSA reads, in the layers that select and in all."""
    return tuple(
        _needles(f"{control}{suffix}", _server(control, config, CONTROLS), share, 10, depths=EVERY_TENTH)
        for control in ("random_blocks", "sink_window")
        for suffix, config, share in (
            ("", {}, SHARE),
            ("-two-layers", TWO_LAYERS, SHARE),
            ("-not-first", NOT_FIRST, SHARE),
            ("-pages", PAGES, PAGES_SHARE),
            ("-all", {"theta2": 0}, SHARE),
        )
    )


def _batches(label: str, config: Mapping[str, Any], *more: str) -> Leg:
    """Batches of mixed lengths, with and without prefixes of prompts in the cache."""
    name = "-".join(("robsa", *([label] if label else [])))
    lengths = ",".join(f"{thousands}k" for thousands in range(10, 33, 2))
    asked = (*BESIDE_DENSE, "--tasks", "single,multikey", "--n", "4", "--concurrency", AT_ONCE, "--mixed")
    asked += ("--lengths", lengths, "--custom-params", json.dumps({"theta1": 0.95}))
    commands = tuple(
        Command("eval.niah", f"niah-mixed-tiny-mla-{name}-{form}.jsonl", (*asked, "--form", form))
        for form in ("chat", "second_turn")
    )
    return Leg(f"needles-mixed-{name}", commands, _server("robsa", config, more=(*GRAPHS, *more)))


def _theta2(name: str, config: Mapping[str, Any]) -> Leg:
    """Needles over theta1, of one choice of the layers that select: what they read, and what is right then.

    A row that wants more than half of its blocks would get all of them by default, and its answer would say nothing of
    the choice.
    """
    commands = [
        Command(
            "eval.niah",
            f"niah-tiny-mla-theta2-{name}-{theta1}.jsonl",
            (
                *(*BESIDE_DENSE, "--tasks", "multikey,multikey_hard", "--n", "20", "--concurrency", AT_ONCE),
                *("--lengths", "8k", "--custom-params", json.dumps({"theta1": theta1})),
            ),
        )
        for theta1 in THETA1
    ]
    return Leg(f"needles-theta2-{name}", tuple(commands), _server("robsa", {"max_active_ratio": 0.99, **config}))


def _perplexity(suffix: str, config: Mapping[str, Any], theta1: str) -> Leg:
    """What decoding sparse costs in perplexity with the calibrated layers, and what rectification wins back."""
    asked = ("--base-url", URL, "--kind", "book,records", "--ratios", theta1, "--intervals", "32")
    asked += ("--concurrency", _WINDOWS_AT_ONCE, "--length", BOOK_WINDOW, "--suffix", "256", *BOOKS)
    command = Command("eval.ppl_rectify", f"ppl-rectify-mla{suffix}.jsonl", asked)
    graphs = ("--mem-fraction-static", "0.4", "--cuda-graph-max-bs-decode", _WINDOWS_AT_ONCE)
    return Leg(f"ppl-rectify-mla{suffix}", (command,), _server("robsa", config, more=graphs))


def _identity(backend: str, noise: str = "", *flags: str) -> Leg:
    """All layers select.

    Args:
        backend: of all servers but one.
        noise: of that one.
        *flags: those of float8 KV: then bfloat16's noise counts, which the backend's other leg measures.
    """
    config = {"page_size": 64, "calibration": CALIBRATION, "theta2": 0, "theta1": 1, "dense_fallback": "never"}
    sparse = ("--sparse-method", "robsa", "--sparse-config", json.dumps(config))
    name = f"robsa-{backend}"
    if flags:
        file = f"identity-{name}.jsonl"
        return identity_leg(f"{name}-fp8", NAME, sparse, backend, file, (*PAGE, *flags), measured=False)
    return identity_leg(name, NAME, sparse, backend, noise, PAGE)


def _stock(backend: str) -> Leg:
    """The model on a server without the plugin's methods, which does not know what weights it has."""
    asked = ("--base-url", URL, "--tasks", "single,multikey", "--lengths", "8k,32k", "--n", "10")
    asked += ("--label", weights.label(NAME))
    command = Command("eval.niah", f"niah-tiny-mla-{backend}.jsonl", (*asked, "--concurrency", AT_ONCE))
    return Leg(f"stock-mla-{backend}", (command,), Server(MODEL, ("--attention-backend", backend, *PAGE, *GRAPHS)))


ROBSA: tuple[Leg, ...] = (
    _needles("robsa", _server("robsa", {}), 0.95, 100, passkey=True),
    _needles("robsa-two-layers", _server("robsa", TWO_LAYERS), 0.95, 100),
    _needles("robsa-not-first", _server("robsa", NOT_FIRST), 0.95, 100),
    _needles("robsa-pages", _server("robsa", PAGES), 0.95, 100, passkey=True),
    # One of the layers that the calibration trusts looks numbers up, and the one that it does not trust selects too.
    _needles("robsa-all", _server("robsa", {"theta2": 0}), 0.7, 100, passkey=True),
    # What of the loss of those is theta1's.
    _needles("robsa-0.7", _server("robsa", {}), 0.7, 100, lengths="32k"),
    _needles("robsa-block-64", _server("robsa", {"block_size": 64}), 0.95, 100),
    # A needle near the end stands where a window always has it: asked at many depths, it counts for few of them.
    *_controls(),
    _batches("", {}),
    _batches("no-graphs", {}, "--disable-cuda-graph"),
    _batches("pages", PAGES),
    _batches("pages-no-graphs", PAGES, "--disable-cuda-graph"),
    # An answer has eight tokens: after each fourth of them a dense pass.
    _batches("rectified", {"rectify_interval": 4}),
    _theta2("calibrated", {}),
    # Every layer by its rotary scores, whatever the calibration says of it.
    _theta2("rotary", {"theta2": 0}),
    # What it does not trust by the scores of all dimensions: as many layers select as above.
    _theta2("full", {"insensitive": "full_score"}),
    _perplexity("", {}, "0.95,0.98"),
    _perplexity("-two-layers", TWO_LAYERS, "0.95"),
    _perplexity("-not-first", NOT_FIRST, "0.95"),
    _perplexity("-pages", PAGES, "0.95"),
    *(_stock(backend) for backend in ("flashinfer", "flashmla", "triton")),
    *(_identity(backend, "triton") for backend in ("flashmla", "flashinfer", "fa3")),
    _identity("triton", "flashinfer"),
    *(_identity(backend, "", *FP8) for backend in ("flashmla", "flashinfer", "triton")),
)
