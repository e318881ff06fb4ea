"""The legs of ``reproduce``: which server each needs, which commands it runs, and which goals these measure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eval.lab.legs.reproduce_anchor import ANCHOR
from eval.lab.legs.reproduce_framework import FRAMEWORK
from eval.lab.legs.reproduce_leg import FOLDER, URL, Command, Leg, Server
from eval.lab.legs.reproduce_needles import IDENTITY, NEEDLES, UNCALIBRATED
from eval.lab.legs.reproduce_robsa import ROBSA
from eval.lab.servers.decode_load import Load, server_flags

# ReSA's selection as the paper has it, of which the goals are.
_PAPER = {"summary": "minmax", "group": "mean_query"}
_AS_IN_THE_PAPER = ("--sparse-config", json.dumps(_PAPER))


def _resa(model: str, memory: float, *loads: Load, config: Mapping[str, Any] | None = None) -> Server:
    """A server of ReSA for some loads, which selects as the paper says; `config` has what else is not a default."""
    more = ("--sparse-config", json.dumps({**_PAPER, **(config or {})}))
    return Server(model, (*server_flags("fa3", memory, loads), "--sparse-method", "resa", *more))


def _dense_file(model: str, load: Load, kind: str = "") -> str:
    return f"dense-{PEER}{kind}-{model}-{load.name}.jsonl"


def _dense(name: str, model: str, *loads: Load, kind: str = "", flags: tuple[str, ...] = ()) -> Leg:
    """A leg that measures the dense decode of a stock server, of some `kind`: the peers of `_decode`, if of none."""
    loads = tuple(replace(load, short=0) for load in loads)
    commands = [
        Command(
            "eval.lab.bench_decode",
            _dense_file(model, load, kind),
            ("--base-url", URL, "--shape", f"{model}-{load.name}", *load.arguments(), "--dense-only"),
        )
        for load in loads
    ]
    return Leg(name, tuple(commands), Server(model, (*server_flags(PEER, 0.95, loads), NO_PREFILL_GRAPHS, *flags)))


def _decode(model: str, load: Load, goal: str, *more: str, variant: str = "") -> Command:
    """All arms, beside the dense peer of the same batch; `variant` is what else the name of the shape says."""
    shape = f"{model}-{load.name}{variant}"
    arguments = ("--base-url", URL, "--shape", shape, *load.arguments(), *more)
    peer = ("--peer", f"{FOLDER}/{_dense_file(model, load)}")
    return Command("eval.lab.bench_decode", f"bench-decode-{shape}.jsonl", (*arguments, *peer), (goal,))


def _serving(shape: str, *arguments: str, file: str = "", goals: tuple[str, ...] = ()) -> Command:
    return Command("eval.lab.bench_serving", file or f"serving-{shape}.jsonl", ("--shape", shape, *arguments), goals)


def _short(shape: str, runs: str, goal: str) -> Command:
    """Contexts that decode dense, often: a single run says little."""
    return _serving(
        shape,
        *("--both", "--contexts", "2k,4k,8k", "--batch", "1", "--prefix", "0", "--runs", runs, *_AS_IN_THE_PAPER),
        *("--server-args", f"{_FA3} 0.9"),
        file=f"serving-{shape}-short.jsonl",
        goals=(goal,),
    )


# Of servers whose decode alone is timed: they are ready three minutes sooner.
NO_PREFILL_GRAPHS = "--disable-prefill-cuda-graph"
# FA3 is not the dense decode to beat at every shape: at 6 rows of 8 KV heads it falls behind.
PEER = "flashinfer"
_1_7B, _8B = "qwen3-1.7b", "qwen3-8b"
_4X256K, _1X256K = Load(4, 262144), Load(1, 262144)
# With short prompts of 1,024 the largest batch would not fit.
_6X128K, _1X128K = Load(6, 131072, short=256), Load(1, 131072, tokens=512)
# Beside the others, and no peer of theirs: it reads half the bytes.
_FLOAT8: Any = {"kind": "-fp8", "flags": ("--kv-cache-dtype", "fp8_e4m3")}
_FP8 = {"summary_dtype": "fp8", "active_ratio": 0.05, "rectify_interval": 64}
_VARIANT, _EVERY_64 = "-fp8-r.05", ("--interval", "64")
# Eight intervals of 64 tokens.
_4X256K_64, _6X128K_64 = (replace(load, tokens=512, short=256) for load in (_4X256K, _6X128K))
_FA3 = "--attention-backend fa3 --page-size 16 --mem-fraction-static"
_FLASHMLA = "--attention-backend flashmla --page-size 64"
_PROFILE = ("--base-url", URL, "--arm", "sparse", "--batch", "1", "--context", "262144")
_PASS = ("--base-url", URL, "--arm", "rectified", "--interval", "64", "--batch", "6", "--context", "131072")
# Tokens of the generated inputs of servers whose longest context is 128k, as their /server_info says.
_POSITIONS = ("--positions", "131460")
_LENGTHS = ("--lengths", "32k,64k,128k", *_POSITIONS)
# A server prefills the first 8k of 32k densely: there 89 % would cost far more of the attention mass than elsewhere.
_LEFT_OUT = ("--sparsity", "0.89,32k=0.78")
_SERVED = (*_LENGTHS, *_LEFT_OUT, "--dense-below", "8k", "--peers", "")
_HALF = f"--sparse-method robsa --sparse-config '{json.dumps({**UNCALIBRATED, 'layers': '14-'})}'"
_MLA_INPUTS, _PREFILL_RECALL = "mla-v2-lite.jsonl", "prefill-qwen3-8b.jsonl"
_SKIP, _SKIP_RECALL = ("--method", "skip_softmax", "--sparsity", "0.7"), "prefill-skip-softmax-qwen3-8b.jsonl"


def _first_token(chunk: str, contexts: str, goals: tuple[str, ...], *more: str, file: str = "") -> Command:
    """The time to the first token with AnchorAttention, by the chunk that a server prefills at once."""
    return _serving(
        "qwen3-8b",
        *("--both", "--contexts", contexts, "--chunked-prefill-size", chunk),
        *("--sparse-method", "none", "--sparse-prefill-method", "anchor", "--structured", "{}"),
        *("--server-args", "--page-size 16", *_LEFT_OUT),
        *("--recall-from", f"{FOLDER}/{_PREFILL_RECALL}", *more),
        file=file or f"first-token-qwen3-8b-{chunk}.jsonl",
        goals=goals,
    )


def _long_first_token(chunk: str) -> Command:
    return _first_token(chunk, "32k,64k,128k", tuple(f"E6: {length}k, chunks of {chunk}" for length in (128, 64, 32)))


def _robsa_serving(contexts: str, batch: str, *more: str, file: str = "", goals: tuple[str, ...] = ()) -> Command:
    """RoBSA's decode beside the dense one of FlashMLA, over the inputs of `_MLA_INPUTS`."""
    return _serving(
        "v2-lite",
        *("--sparse-method", "robsa", "--structured", f"{FOLDER}/{_MLA_INPUTS}", "--skip-prefill"),
        *("--contexts", contexts, "--batch", batch),
        # Prefill attends to nothing: the larger its chunks, the fewer its launches.
        *("--server-args", f"{_FLASHMLA} --chunked-prefill-size 16384 --mem-fraction-static 0.9 {NO_PREFILL_GRAPHS}"),
        *("--sparse-config", json.dumps(UNCALIBRATED), *more),
        file=file,
        goals=goals,
    )


def _rocketkv(eviction: str) -> str:
    return f"--sparse-method rocketkv --sparse-config '{json.dumps({'eviction': eviction})}'"


LEGS: tuple[Leg, ...] = (
    Leg(
        "kernels",
        (Command("eval.lab.bench_kernels", "bench_kernels.jsonl", ("--recipe", "{}"), ("K1", "K2", "K3", "K4")),),
    ),
    # What E3 is made of.
    Leg(
        "kernels-fp8",
        (
            Command(
                "eval.lab.bench_kernels",
                "bench_kernels_fp8.jsonl",
                (
                    *("--shapes", "6x128k,4x256k", "--active-ratio", "0.05"),
                    *("--summary-dtype", "float8_e4m3fn", "--recipe", "{}"),
                ),
            ),
        ),
    ),
    Leg(
        "tune",
        (Command("sglang_sparse.tune", "crossover.json", ("--shape", "32x8x128", "--shape", "16x8x128")),),
    ),
    _dense("dense-1.7b", _1_7B, _4X256K, _1X256K),
    _dense("dense-1.7b-fp8", _1_7B, _4X256K, _1X256K, **_FLOAT8),
    Leg(
        "e1",
        (
            _decode(_1_7B, _4X256K, "E1: 4x256k"),
            _decode(_1_7B, _1X256K, "E1: 1x256k"),
            Command("eval.lab.profile_decode", "profile-qwen3-1.7b-1x256k.jsonl", _PROFILE),
        ),
        _resa(_1_7B, 0.95, _4X256K, _1X256K),
    ),
    _dense("dense-8b", _8B, _6X128K, _1X128K),
    _dense("dense-8b-fp8", _8B, _6X128K, _1X128K, **_FLOAT8),
    Leg(
        "e2",
        (_decode(_8B, _6X128K, "E2: 6x128k"), _decode(_8B, _1X128K, "E2: 1x128k", "--rounds", "5")),
        _resa(_8B, 0.97, _6X128K, _1X128K),
    ),
    Leg(
        "e3-1.7b",
        (_decode(_1_7B, _4X256K_64, "E3: Qwen3-1.7B, 4x256k", *_EVERY_64, variant=_VARIANT),),
        _resa(_1_7B, 0.95, _4X256K_64, config=_FP8),
    ),
    Leg(
        "e3-8b",
        (
            _decode(_8B, _6X128K_64, "E3: Qwen3-8B, 6x128k", *_EVERY_64, variant=_VARIANT),
            Command("eval.lab.profile_decode", "profile-pass-qwen3-8b-6x128k.jsonl", (*_PASS, "--tokens", "288")),
        ),
        _resa(_8B, 0.97, _6X128K_64, config=_FP8),
    ),
    Leg(
        "serving-8b",
        (
            _serving(
                "qwen3-8b",
                *("--both", "--contexts", "4k,32k,64k,128k", "--batch", "1", "--output-length", "257"),
                # Times of a hit spread widely: with far fewer the interval would be wider than the 3 % in question.
                *("--hits", "200", "--server-args", f"{_FA3} 0.9", *_AS_IN_THE_PAPER),
                goals=("R1",),
            ),
            _short("qwen3-8b", "7", "R2: Qwen3-8B, 8k and less"),
        ),
    ),
    Leg(
        "serving-1.7b",
        # Of a larger batch the first answers end before the last of such prompts is prefilled.
        (
            _serving(
                "qwen3-1.7b",
                *("--contexts", "4k,32k,128k,256k", "--batch", "1", "--prefix", "0", "--server-args", f"{_FA3} 0.95"),
                *_AS_IN_THE_PAPER,
            ),
            # A step is so short that the host decides.
            _short("qwen3-1.7b", "7", "R2: Qwen3-1.7B, 8k and less"),
        ),
    ),
    Leg("mla", (Command("eval.lab.bench_mla", "bench_mla.jsonl", ("--shapes", "8x64k,24x128k,1x128k"), ("K6",)),)),
    Leg(
        "mla-serving",
        (
            Command(
                "eval.lab.bench_mla",
                _MLA_INPUTS,
                (
                    *("--shapes", "1x32k,1x64k,1x96k,1x128k", *_POSITIONS, "--heads", "16"),
                    *("--recipe", '{"sink_tokens": 1792}', "--ops", "mass+topp+attend", "--peers", ""),
                ),
            ),
            _robsa_serving("128k", "1,24", "--runs", "3", "--server", f"half-dense={_HALF}", goals=("E5",)),
            # For the picture, of a batch that no goal is set for.
            _robsa_serving("32k,64k,96k,128k", "8", file="serving-v2-lite-contexts.jsonl"),
        ),
    ),
    Leg("dsa", (Command("eval.lab.bench_dsa", "bench_dsa.jsonl", goals=("K7", "K8", "K12", "K13")),)),
    Leg(
        "dsa-attention",
        (Command("eval.lab.bench_dsa", "bench_dsa_attention.jsonl", ("--ops", "dsa_attention", "--prefill", "")),),
    ),
    # Not of speed: that both implementations choose and answer alike.
    Leg("dsa-agreement", (Command("eval.lab.agree_dsa", "dsa_agreement.jsonl"),)),
    Leg("framework", (Command("eval.lab.bench_framework", "bench_framework.jsonl", goals=("K5", "K11")),)),
    Leg(
        "prefill",
        (
            Command("eval.lab.bench_prefill", "bench_prefill.jsonl", (*_LENGTHS, "--sparsity", "0.89"), ("K9",)),
            Command(
                "eval.lab.bench_prefill",
                "bench_prefill_skip_softmax.jsonl",
                (*_LENGTHS, *_SKIP, "--peers", "fa3,fa3-contiguous,flashinfer"),
                ("K10",),
            ),
        ),
    ),
    Leg(
        "prefill-serving",
        (
            Command("eval.lab.bench_prefill", _PREFILL_RECALL, _SERVED),
            _long_first_token("8k"),
            _long_first_token("16k"),
            # So short that a single run says little.
            _first_token(
                *("8k", "2k,4k,8k", ("E6: 8k and less",), "--cold-runs", "41"), file="first-token-qwen3-8b-short.jsonl"
            ),
        ),
    ),
    Leg(
        "rocketkv-throughput",
        (
            Command(
                "eval.lab.bench_throughput",
                "throughput-qwen3-8b.jsonl",
                (
                    # The KV of 19 fits beside RocketKV's buffers; what does not fit waits.
                    *("--shape", "qwen3-8b", "--batch", "16,19", "--batch-of", "compact=32,64,96"),
                    *(
                        "--server",
                        f"visibility={_rocketkv('visibility')}",
                        "--server",
                        f"compact={_rocketkv('compact')}",
                    ),
                    *("--server-args", f"{_FA3} 0.9"),
                ),
                ("E4",),
            ),
        ),
    ),
    Leg(
        "skip-softmax-serving",
        (
            Command("eval.lab.bench_prefill", _SKIP_RECALL, (*_LENGTHS, *_SKIP, "--dense-below", "8k", "--peers", "")),
            _serving(
                "qwen3-8b",
                *("--both", "--contexts", "32k,64k,128k", "--chunked-prefill-size", "8k"),
                *("--sparse-method", "none", "--sparse-prefill-method", "skip_softmax", "--structured", "{}"),
                *("--server-args", "--page-size 16", "--sparsity", "0.7"),
                *("--recall-from", f"{FOLDER}/{_SKIP_RECALL}"),
                file="first-token-skip-softmax-qwen3-8b.jsonl",
                goals=("E7",),
            ),
        ),
    ),
    # Not of speed: the tools come with the CUDA toolkit, and not every virtual machine lets them watch its GPU.
    Leg("sanitizer", (Command("eval.lab.sanitize_kernels", "sanitizer.jsonl"),)),
    *ANCHOR,
    *FRAMEWORK,
    *NEEDLES,
    *ROBSA,
    *IDENTITY,
)
