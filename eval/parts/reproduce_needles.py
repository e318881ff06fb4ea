"""Legs of ``eval.reproduce`` that show on trained tiny models that a method is right on a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eval.parts.reproduce_leg import URL, URLS_BESIDE, Command, Leg, Server

# Of methods that are refused on a GPU otherwise.
UNPROVEN = {"allow_unproven": True}
# Batches of whatever length run sparse: a few rows are left when most have their answers.
ALWAYS = {"crossover_tokens": 0}
ROBSA = {"page_size": 64, "allow_uncalibrated": True}
# SGLang prefills short prompts, its own warm-up among them, dense with FA3 otherwise: by other kernels than those that
# are looked at, and it takes no values of 64 beside queries of 128.
BY_INDEX = (("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0"),)
CONTROLS = (("PYTHONPATH", "eval/controls"),)
TINY_MLA_CALIBRATION = "eval/models/tiny-mla/robsa.json"
_FP8 = ("--kv-cache-dtype", "fp8_e4m3")
# Two methods, and one of them with two sets of fields, in the four layers of tiny-gqa.
_BY_LAYER = {
    "page_size": 16,
    "layers": {"0": {"method": "skip_softmax"}, "1": {"active_ratio": 0.2}, "2-": {"active_ratio": 0.1}},
    "rectify_interval": 32,
}
THETA1 = (0.3, 0.5, 0.7, 0.95)
# CUDA graphs of larger batches than are asked would take most of a start.
AT_ONCE = "16"
GRAPHS = ("--mem-fraction-static", "0.4", "--cuda-graph-max-bs-decode", AT_ONCE)
EVERY_TENTH = ",".join(map(str, range(0, 101, 10)))
BESIDE_DENSE = ("--base-url", URL, "--compare-url", URL, "--compare-custom-params", '{"sparse": false}')


def _by_layer() -> Leg:
    """Needles on tiny-gqa whose layers have different methods, sparse against dense on one server."""
    flags = ("--sparse-method", "resa", "--sparse-config", json.dumps({**_BY_LAYER, **ALWAYS, **UNPROVEN}))
    flags += ("--page-size", "16", "--attention-backend", "fa3", *GRAPHS)
    asked = (*BESIDE_DENSE, "--tasks", "single,multikey", "--n", "100", "--concurrency", AT_ONCE, "--lengths", "8k")
    command = Command("eval.niah", "niah-tiny-gqa-resa-layers.jsonl", asked)
    return Leg("needles-resa-layers", (command,), Server("eval/models/tiny-gqa", flags))


def _calibrated_server(method: str, config: Mapping[str, Any], environment: tuple[tuple[str, str], ...] = ()) -> Server:
    """A server of tiny-mla with the layers that its calibration says are sensitive."""
    config = {"page_size": 64, "calibration": TINY_MLA_CALIBRATION, **ALWAYS, **config}
    flags = ("--sparse-method", method, "--sparse-config", json.dumps(config), "--page-size", "64")
    flags += ("--attention-backend", "flashmla", *GRAPHS)
    return Server("eval/models/tiny-mla", flags, environment)


def _robsa_needles(
    method: str,
    theta1: float,
    count: int,
    environment: tuple[tuple[str, str], ...] = (),
    every_layer: bool = False,
    passkey: bool = False,
    depths: str = "0,25,50,75,100",
) -> Leg:
    """Needles with the calibration of the tiny model.

    Args:
        method: or the name of a control.
        theta1: of the requests; of a control the share of the blocks.
        count: of each task, length and depth.
        environment: that the server knows it by.
        every_layer: whether all layers select by their rotary scores, not those alone that the calibration trusts.
        passkey: whether to ask for a pass key, too.
        depths: of the needles, in percent.
    """
    name, config = (f"{method}-all", {"theta2": 0}) if every_layer else (method, {})
    both = (*BESIDE_DENSE, "--n", str(count), "--concurrency", AT_ONCE, "--lengths", "8k,32k", "--depths", depths)
    both += ("--custom-params", json.dumps({"theta1": theta1}))
    commands = [Command("eval.niah", f"niah-tiny-mla-{name}.jsonl", (*both, "--tasks", "single,multikey"))]
    if passkey:
        file = f"infinitebench-tiny-mla-{name}.jsonl"
        commands.append(Command("eval.infinitebench", file, (*both, "--tasks", "gen_passkey")))
    return Leg(f"needles-{name}", tuple(commands), _calibrated_server(method, config, environment))


def _backend(name: str) -> tuple[str, ...]:
    """Flags of an attention backend; of FA3, which has no prefill for values of 64 beside keys of 128, in decode."""
    if name == "fa3":
        return ("--prefill-attention-backend", "flashinfer", "--decode-attention-backend", name)
    return ("--attention-backend", name)


def _identity(name: str, model: str, sparse: Sequence[str], backend: str, noise: str, both: Sequence[str]) -> Leg:
    """A method that leaves nothing out, against the same server without it.

    Args:
        name: of leg and file.
        model: of all three servers.
        sparse: flags of the one with the method.
        backend: attention backend of both.
        noise: another one, whose answers show what a kernel's order of summing changes.
        both: flags of all three.
    """
    both = (*both, "--mem-fraction-static", "0.3", "--max-total-tokens", "65536", "--cuda-graph-max-bs-decode", "2")
    path = f"eval/models/{model}"
    dense, other = (Server(path, (*_backend(one), *both)) for one in (backend, noise))
    urls = ("--base-url", URL, "--compare-url", URLS_BESIDE[0], "--noise-url", URLS_BESIDE[1])
    command = Command("eval.identity", f"identity-{name}.jsonl", urls)
    return Leg(f"identity-{name}", (command,), Server(path, (*sparse, *_backend(backend), *both)), (dense, other))


def _robsa_identity(backend: str, noise: str, *flags: str) -> Leg:
    """All layers of tiny-mla; ``flags`` are those of another KV dtype."""
    config = {"page_size": 64, "calibration": TINY_MLA_CALIBRATION, "theta2": 0, "theta1": 1, "dense_fallback": "never"}
    sparse = ("--sparse-method", "robsa", "--sparse-config", json.dumps(config))
    name = "-".join(("robsa", backend, *(("fp8",) if flags else ())))
    return _identity(name, "tiny-mla", sparse, backend, noise, ("--page-size", "64", *flags))


def _framework_identity(method: str, config: Mapping[str, Any]) -> Leg:
    """All layers of tiny-gqa with a method of the framework, see ``_robsa_identity``."""
    config = {**config, "dense_fallback": "never", **UNPROVEN}
    sparse = ("--sparse-method", method, "--sparse-config", json.dumps(config))
    return _identity(f"{method}-fa3", "tiny-gqa", sparse, "fa3", "flashinfer", ("--page-size", "16"))


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
    return Leg(
        f"needles-theta2-{name}", tuple(commands), _calibrated_server("robsa", {"max_active_ratio": 0.99, **config})
    )


def _own_needles(implementation: str, *more: str) -> Leg:
    """Needles on the tiny model that chooses by itself, which has no dense answers to compare with.

    Args:
        implementation: of DSA.
        *more: what its KV cache has, if not bfloat16.
    """
    name = "-".join(("dsa", implementation, *(("fp8",) if more else ())))
    config = json.dumps({"implementation": implementation})
    flags = ("--sparse-method", "dsa", "--sparse-config", config, "--page-size", "64", *GRAPHS, *more)
    asked = ("--base-url", URL, "--expect", "dsa", "--lengths", "1k,8k,32k")
    asked += ("--tasks", "single,multikey,multivalue,multiquery", "--n", "25", "--concurrency", AT_ONCE)
    command = Command("eval.niah", f"niah-tiny-{name}.jsonl", asked)
    return Leg(f"needles-{name}", (command,), Server("eval/models/tiny-dsa", flags, BY_INDEX))


NEEDLES: tuple[Leg, ...] = (
    _by_layer(),
    _robsa_needles("robsa", 0.95, 100, passkey=True),
    # The other layers find the needles, so that a window may do in those that the calibration trusts; it must not where
    # all of them select.
    _robsa_needles("robsa", 0.7, 100, every_layer=True, passkey=True),
    # A share that is more than RoBSA reads. One needle in eleven stands at the end, where a window always has it.
    *(
        _robsa_needles(control, 0.15, 10, CONTROLS, every_layer, depths=EVERY_TENTH)
        for control in ("random_blocks", "sink_window")
        for every_layer in (False, True)
    ),
    _theta2("calibrated", {}),
    # Every layer by its rotary scores, whatever the calibration says of it.
    _theta2("rotary", {"theta2": 0}),
    # What it does not trust by the scores of all dimensions: as many layers select as above.
    _theta2("full", {"insensitive": "full_score"}),
    _own_needles("portable"),
    _own_needles("portable", *_FP8),
    _own_needles("auto"),
)

IDENTITY: tuple[Leg, ...] = (
    *(_robsa_identity(backend, "triton") for backend in ("flashmla", "flashinfer", "fa3")),
    _robsa_identity("triton", "flashinfer"),
    _robsa_identity("flashmla", "triton", *_FP8),
    _robsa_identity("triton", "flashmla", *_FP8),
    # A budget that covers the context, and a factor so small that nothing is below it.
    _framework_identity("rocketkv", {"prompt_budget": 65536, "topk": 32768}),
    _framework_identity("skip_softmax", {"threshold_scale_factor": 1e-30}),
    # A threshold that every key reaches.
    _identity(
        *("anchor-fa3", "tiny-gqa"),
        ("--sparse-prefill-method", "anchor", "--sparse-prefill-config", '{"theta": 1e9, "dense_fallback": "never"}'),
        *("fa3", "flashinfer", ("--page-size", "16")),
    ),
)
