"""Legs of ``eval.lab.reproduce`` that show on trained tiny models that a method is right on a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eval.lab.legs.reproduce_leg import FOLDER, URL, URLS_BESIDE, Command, Leg, Server

# Batches of whatever length run sparse: a few rows are left when most have their answers.
ALWAYS = {"crossover_tokens": 0}
UNCALIBRATED = {"page_size": 64, "allow_uncalibrated": True}
# SGLang prefills short prompts, its own warm-up among them, dense with FA3 otherwise: by other kernels than those that
# are looked at, and it takes no values of 64 beside queries of 128.
BY_INDEX = (("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0"),)
CONTROLS = (("PYTHONPATH", "eval/lab/controls"),)
FP8 = ("--kv-cache-dtype", "fp8_e4m3")
# A sixteenth in every layer: the largest key or value of tiny-gqa is near 12, and float8 ends at 448.
SCALES = "eval/models/tiny-gqa/kv_scales.json"
# With these every method of decode and of prefill for MHA and GQA has run.
_PAIRS = (("resa", "anchor"), ("rocketkv", "skip_softmax"), ("skip_softmax", ""))
# Two methods, and one of them with two sets of fields, in the four layers of tiny-gqa.
_BY_LAYER = {
    "page_size": 16,
    "layers": {"0": {"method": "skip_softmax"}, "1": {"active_ratio": 0.2}, "2-": {"active_ratio": 0.1}},
    "rectify_interval": 32,
}
_SKIPS_NOTHING = {"page_size": 64, "threshold_scale_factor": 1e-30, "dense_fallback": "never"}
# CUDA graphs of larger batches than are asked would take most of a start.
AT_ONCE = "16"
GRAPHS = ("--mem-fraction-static", "0.4", "--cuda-graph-max-bs-decode", AT_ONCE)
# All that is held out of the tiny models' training, in 201 windows that do not overlap.
BOOKS = ("--book", "eval/data", "--book", "eval/data/held-out")
BOOK_WINDOW = "7936"
EVERY_TENTH = ",".join(map(str, range(0, 101, 10)))
BESIDE_DENSE = ("--base-url", URL, "--compare-url", URL, "--compare-custom-params", '{"sparse": false}')


def _by_layer() -> Leg:
    """Needles on tiny-gqa whose layers have different methods, sparse against dense on one server."""
    flags = ("--sparse-method", "resa", "--sparse-config", json.dumps({**_BY_LAYER, **ALWAYS}))
    flags += ("--page-size", "16", "--attention-backend", "fa3", *GRAPHS)
    asked = (*BESIDE_DENSE, "--tasks", "single,multikey", "--n", "100", "--concurrency", AT_ONCE, "--lengths", "8k")
    command = Command("eval.niah", "niah-tiny-gqa-resa-layers.jsonl", asked)
    return Leg("needles-resa-layers", (command,), Server("eval/models/tiny-gqa", flags))


def _latents() -> Leg:
    """Needles of Skip-Softmax's decode on tiny-mla, whose prefill is dense, sparse against dense on one server."""
    flags = ("--sparse-method", "skip_softmax", "--sparse-config", json.dumps({"page_size": 64, **ALWAYS}))
    flags += ("--page-size", "64", "--attention-backend", "flashmla", *GRAPHS)
    asked = (*BESIDE_DENSE, "--tasks", "single,multikey", "--n", "100", "--concurrency", AT_ONCE, "--lengths", "32k")
    fields = {"threshold_scale_factor": 350}
    file = "niah-tiny-mla-skip_softmax-mla-threshold_scale_factor-350.jsonl"
    command = Command("eval.niah", file, (*asked, "--custom-params", json.dumps(fields)))
    return Leg("needles-skip_softmax-mla", (command,), Server("eval/models/tiny-mla", flags))


# Servers beside others, one request at a time.
_LITTLE = ("--mem-fraction-static", "0.3", "--max-total-tokens", "65536", "--cuda-graph-max-bs-decode", "2")


def _backend(name: str) -> tuple[str, ...]:
    """Flags of an attention backend; of FA3, which has no prefill for values of 64 beside keys of 128, in decode."""
    if name == "fa3":
        return ("--prefill-attention-backend", "flashinfer", "--decode-attention-backend", name)
    return ("--attention-backend", name)


def identity_leg(
    name: str, model: str, sparse: Sequence[str], backend: str, noise: str, both: Sequence[str], measured: bool = True
) -> Leg:
    """A method that leaves nothing out, against the same server without it.

    Args:
        name: of leg and file.
        model: of all servers.
        sparse: flags of the one with the method.
        backend: attention backend of both.
        noise: another one, whose answers show what a kernel's order of summing changes; or, if it is not measured here,
            the name of the file that says it.
        both: flags of all servers.
        measured: whether a third server runs for the noise.
    """
    both = (*both, *_LITTLE)
    path = f"eval/models/{model}"
    beside = tuple(Server(path, (*_backend(one), *both)) for one in (backend, *([noise] if measured else [])))
    other = ("--noise-url", URLS_BESIDE[1]) if measured else ("--noise-from", f"{FOLDER}/{noise}")
    urls = ("--base-url", URL, "--compare-url", URLS_BESIDE[0], *other)
    command = Command("eval.identity", f"identity-{name}.jsonl", urls)
    return Leg(f"identity-{name}", (command,), Server(path, (*sparse, *_backend(backend), *both)), beside)


# All that a method could leave out: a budget that covers the context, a factor so small that nothing is below it, and a
# threshold that every key reaches.
_WHOLE: Mapping[str, Mapping[str, Any]] = {
    "resa": {"active_ratio": 1, "rectify_interval": 0},
    "rocketkv": {"prompt_budget": 65536, "topk": 32768},
    "skip_softmax": {"threshold_scale_factor": 1e-30},
    "anchor": {"theta": 1e9},
}


def _whole(method: str, prefill: str = "") -> tuple[str, ...]:
    """Flags of a server all of whose layers have a method of decode or prefill, or both, that leave nothing out."""
    flags: list[str] = []
    for kind, name in (("sparse", method), ("sparse-prefill", prefill)):
        if name:
            config = {**_WHOLE[name], "dense_fallback": "never"}
            flags += (f"--{kind}-method", name, f"--{kind}-config", json.dumps(config))
    return tuple(flags)


def _methods(method: str, prefill: str) -> tuple[str, ...]:
    return ("--sparse-method", method, *(("--sparse-prefill-method", prefill) if prefill else ()))


def _framework_identity(backend: str, noise: str, method: str, prefill: str = "", fp8: bool = False) -> Leg:
    """All layers of tiny-gqa with methods that leave nothing out, see ``reproduce_robsa``.

    Args:
        backend: of both servers.
        noise: another backend; over float8 KV unused: bfloat16's noise counts, which the leg without it measures.
        method: of decode, if any.
        prefill: its method, if any.
        fp8: whether the KV is float8.
    """
    name, both = "-".join(filter(None, (method, prefill, backend))), ("--page-size", "16")
    sparse = _whole(method, prefill)
    if not fp8:
        return identity_leg(name, "tiny-gqa", sparse, backend, noise, both)
    both = (*_backend(backend), *both, *FP8, "--quantization-param-path", SCALES, *_LITTLE)
    # A stock server reads such scales wrongly: the dense one has the methods, too, and is asked not to use them.
    server, other = (Server("eval/models/tiny-gqa", (*flags, *both)) for flags in (sparse, _methods(method, prefill)))
    asked = ("--base-url", URL, "--compare-url", URLS_BESIDE[0], *BESIDE_DENSE[-2:])
    asked += ("--noise-from", f"{FOLDER}/identity-{name}.jsonl")
    return Leg(
        f"identity-{name}-fp8", (Command("eval.identity", f"identity-{name}-fp8.jsonl", asked),), server, (other,)
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
    _latents(),
    _own_needles("portable"),
    _own_needles("portable", *FP8),
    _own_needles("auto"),
)

IDENTITY: tuple[Leg, ...] = (
    _framework_identity("fa3", "flashinfer", "rocketkv"),
    _framework_identity("fa3", "flashinfer", "skip_softmax"),
    identity_leg(
        *("skip_softmax-mla", "tiny-mla"),
        ("--sparse-method", "skip_softmax", "--sparse-config", json.dumps(_SKIPS_NOTHING)),
        *("flashmla", "triton", ("--page-size", "64")),
    ),
    _framework_identity("fa3", "flashinfer", "", "anchor"),
    # Dense batches are another backend's, in both phases.
    *(
        _framework_identity(backend, noise, *methods)
        for backend, noise in (("triton", "flashinfer"), ("flashinfer", "triton"), ("torch_native", "triton"))
        for methods in _PAIRS
    ),
    # FlashInfer's dense attention multiplies in bfloat16 whatever the cache has, as the methods' kernels do; that of
    # others rounds queries to float8 too.
    *(_framework_identity("flashinfer", "", *methods, fp8=True) for methods in (_PAIRS[0], _PAIRS[2])),
)
