"""What the table of features says a method goes with, on real servers: answers stay the same, and they are sparse."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from server_requests import assert_nothing_leaked, greedy, sparse_state

from launch.server import free_port
from sglang_sparse import capabilities
from sglang_sparse.capabilities import Method

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="most methods are refused next to CUDA")

MODELS = Path("eval/models")
# Everything is selected, so that answers are dense attention's; the trained indexer of DSA selects as it always does.
CONFIGS: dict[str, dict[str, Any]] = {
    "resa": {"active_ratio": 1.0, "dense_fallback": "never"},
    "robsa": {"theta1": 1.0, "dense_fallback": "never"},
    "dsa": {},
    "rocketkv": {"prompt_budget": 10240, "topk": 10240, "dense_fallback": "never"},
    "skip_softmax": {"threshold_scale_factor": 0, "dense_fallback": "never"},
    "anchor": {"theta": 1e9, "block_size": 32, "step": 4, "dense_tail": 0, "dense_fallback": "never"},
    "skip_softmax (prefill)": {"threshold_scale_factor": 0, "dense_fallback": "never"},
}
# All of the table's flags, as many on one server as go together; and what only a GPU has.
SERVERS: dict[str, dict[str, Any]] = {
    "two ranks": {"tp_size": 2},
    "plain": {
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
    },
    "mixed": {"enable_mixed_chunk": True, "enable_return_hidden_states": True, "kv_events_config": "{}"},
}
GPU_ONLY = {"kv_cache_dtype", "quantization_param_path"}
COMMON = {kind: ("--dtype", "float32", "--page-size", "64" if kind == "DSA" else "16") for kind in capabilities.KINDS}
SHORT = {"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True}
TOKENS, AT_ONCE = 8, 4


def prompts_of(kind: str) -> list[list[int]]:
    """Some longer than a group of sparse prefill, one longer than what DSA selects, and two that share a prefix."""
    rng = random.Random(kind)
    first = [rng.randrange(300, 1000) for _ in range(560)]
    return [first, first[:300], [rng.randrange(300, 1000) for _ in range(400)], first[:30]]


@pytest.fixture(scope="module")
def model_of(checkpoint: Path) -> Callable[[str], Path]:
    return lambda kind: {"MHA/GQA": checkpoint, "MLA": MODELS / "tiny-mla", "DSA": MODELS / "tiny-dsa"}[kind]


@pytest.fixture(scope="module")
def expected(serve, model_of) -> Callable[[str], list[list[int]]]:
    """Answers by kind of attention, of a server without flags, one request after the other."""
    found: dict[str, list[list[int]]] = {}

    def answers(kind: str) -> list[list[int]]:
        if kind not in found:
            sparse = {"method": "dsa", "config": {}} if kind == "DSA" else {}
            with serve(model_of(kind), *COMMON[kind], **sparse) as server:
                found[kind] = greedy(server, prompts_of(kind), TOKENS)
        return found[kind]

    return answers


def served(method: Method, flags: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of some flags that a method goes with on this machine, and what of its config that takes."""
    place = replace(capabilities.place_of(method), gpu=False)
    answers = {flag: capabilities.answer(method, place, {flag: value}) for flag, value in flags.items()}
    wanted = [answer.fields for answer in answers.values() if answer.served]
    fields = {name: value for one in (place.fields, *wanted) for name, value in one.items()}
    return {flag: value for flag, value in flags.items() if answers[flag].served}, fields


def test_every_flag_of_the_table_is_tried() -> None:
    tried = [name for flags in SERVERS.values() for name in flags]
    assert sorted([*tried, *GPU_ONLY]) == sorted(name for flags in capabilities.FLAGS for name in flags)
    assert {method.label for method in capabilities.methods()} == set(CONFIGS)


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("method", capabilities.methods(), ids=lambda method: method.label)
def test_answers_stay_the_same(method: Method, name: str, serve, model_of, expected) -> None:
    flags, fields = served(method, SERVERS[name])
    assert flags, "nothing of this is served"
    events = free_port()
    if "kv_events_config" in flags:
        flags["kv_events_config"] = json.dumps(
            {"publisher": "zmq", "endpoint": f"tcp://*:{events}"}, separators=(",", ":")
        )
    kind = capabilities.place_of(method).kind
    config = "--sparse-prefill-config" if method.prefill else "--sparse-config"
    command = [*COMMON[kind], *capabilities.flag_text(flags).split(), *method.flag.split()]
    command += [config, json.dumps({**CONFIGS[method.label], **fields})]
    if "chunked_prefill_size" not in flags:
        command += ["--chunked-prefill-size", "256"]
    prompts = prompts_of(kind)
    with serve(model_of(kind), *command) as server, zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.connect(f"tcp://127.0.0.1:{events}")
        listener.subscribe(b"")
        assert greedy(server, prompts, TOKENS, at_once=AT_ONCE) == expected(kind)
        if "kv_events_config" in flags:
            assert listener.poll(10_000), "no event of the KV cache"
        if "enable_return_hidden_states" in flags:
            answer = server.generate(input_ids=prompts[1], sampling_params=SHORT, return_hidden_states=True)
            assert len(answer["meta_info"]["hidden_states"]) == answer["meta_info"]["completion_tokens"] == 3
        state = sparse_state(server)
        assert (state["prefill"]["sparse_tokens"] if method.prefill else state["sparse_layer_rows"]) > 0
        assert_nothing_leaked(server)
