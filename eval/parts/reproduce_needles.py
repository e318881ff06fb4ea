"""Legs of ``eval.reproduce`` that show on trained tiny models that a method is right on a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from eval.parts.reproduce_leg import URL, URLS_BESIDE, Command, Leg, Server

# Of methods that are refused on a GPU otherwise.
UNPROVEN = {"allow_unproven": True}
# Batches of whatever length run sparse: a few rows are left when most have their answers.
_ALWAYS = {"crossover_tokens": 0}
ROBSA = {"page_size": 64, "allow_uncalibrated": True}
# SGLang prefills short prompts, its own warm-up among them, dense with FA3 otherwise: by other kernels than those that
# are looked at, and it takes no values of 64 beside queries of 128.
BY_INDEX = (("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0"),)
CONTROLS = (("PYTHONPATH", "eval/controls"),)
TINY_MLA_CALIBRATION = "eval/models/tiny-mla/robsa.json"
_FP8 = ("--kv-cache-dtype", "fp8_e4m3")
# Two methods, and one of them with two sets of fields, in the four layers of tiny-gqa.
_BY_LAYER = {
    "layers": {"0": {"method": "skip_softmax"}, "1": {"active_ratio": 0.2}, "2-": {"active_ratio": 0.1}},
    "rectify_interval": 32,
}
_SKIPS_NOTHING = {"page_size": 64, "threshold_scale_factor": 1e-30, "dense_fallback": "never"}
THETA1 = (0.3, 0.5, 0.7, 0.95)
# CUDA graphs of larger batches than are asked would take most of a start.
AT_ONCE = "16"
GRAPHS = ("--mem-fraction-static", "0.4", "--cuda-graph-max-bs-decode", AT_ONCE)
EVERY_TENTH = ",".join(map(str, range(0, 101, 10)))
BESIDE_DENSE = ("--base-url", URL, "--compare-url", URL, "--compare-custom-params", '{"sparse": false}')


def _needles(
    name: str,
    model: str,
    backend: str,
    config: Mapping[str, Any],
    lengths: str,
    *settings: Mapping[str, Any],
    forms: Sequence[str] = ("chat",),
    label: str = "",
) -> Leg:
    """Needles on a trained tiny model, sparse against dense on one server: that a method is right on a GPU.

    Args:
        name: of the method.
        model: of ``eval/models``.
        backend: the attention backend.
        config: of the method, with its page size.
        lengths: tokens of prompt and answer.
        *settings: fields of its requests, one file each.
        forms: of the questions, one file each.
        label: of a config that is not the method's usual one.
    """
    page = config.get("page_size", 16)
    flags = ("--sparse-method", name, "--sparse-config", json.dumps({"page_size": page, **config}))
    flags += ("--page-size", str(page), "--attention-backend", backend, *GRAPHS)
    both = (*BESIDE_DENSE, "--tasks", "single,multikey", "--n", "100", "--concurrency", AT_ONCE)
    named = "-".join((name, *filter(None, (label,))))
    commands = []
    for fields, form in product(settings, forms):
        said = [f"{field}-{value}" for field, value in fields.items()] + ([form] if form != "chat" else [])
        file = "-".join(["niah", model, named, *said])
        asked = ("--custom-params", json.dumps(fields), "--lengths", lengths, "--form", form)
        commands.append(Command("eval.niah", f"{file}.jsonl", (*both, *asked)))
    return Leg(f"needles-{named}", tuple(commands), Server(f"eval/models/{model}", flags))


def _calibrated_server(method: str, config: Mapping[str, Any], environment: tuple[tuple[str, str], ...] = ()) -> Server:
    """A server of tiny-mla with the layers that its calibration says are sensitive."""
    config = {"page_size": 64, "calibration": TINY_MLA_CALIBRATION, **_ALWAYS, **config}
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
    _needles("skip_softmax", "tiny-gqa", "fa3", {}, "32k", {"threshold_scale_factor": 350}),
    # Prefill of MLA is dense.
    _needles(
        "skip_softmax", "tiny-mla", "flashmla", {"page_size": 64}, "32k", {"threshold_scale_factor": 350}, label="mla"
    ),
    _needles("resa", "tiny-gqa", "fa3", {**_BY_LAYER, **_ALWAYS, **UNPROVEN}, "8k", {}, label="layers"),
    # 2 % of a text of 8k are read, of an eighth of it that is kept.
    *(
        _needles(
            *("rocketkv", "tiny-gqa", "fa3", {"prompt_budget": 1024, **_ALWAYS, **more}, "8k", {"topk": 40}),
            forms=("chat", "second_turn"),
            label=str(more.get("eviction", "")),
        )
        for more in (UNPROVEN, {"eviction": "compact", **UNPROVEN})
    ),
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
    _identity(
        *("skip_softmax-mla", "tiny-mla"),
        ("--sparse-method", "skip_softmax", "--sparse-config", json.dumps(_SKIPS_NOTHING)),
        *("flashmla", "triton", ("--page-size", "64")),
    ),
    # A threshold that every key reaches.
    _identity(
        *("anchor-fa3", "tiny-gqa"),
        ("--sparse-prefill-method", "anchor", "--sparse-prefill-config", '{"theta": 1e9, "dense_fallback": "never"}'),
        *("fa3", "flashinfer", ("--page-size", "16")),
    ),
)
