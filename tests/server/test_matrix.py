"""Tests on real servers of the features that tables say a method goes with: answers stay the same, and are sparse."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import feature_cells
import msgspec
import pytest
import torch
import zmq
from feature_cells import Cell, row_of
from server_requests import assert_nothing_leaked, greedy, random_prompts, sparse_state
from sglang.srt.disaggregation.kv_events import BlockStored, KVCacheEvent, KVEventBatch

from launch.server import ServerProcess, free_port
from sglang_sparse.tools import support_matrix
from sglang_sparse.tools.support_matrix import Method

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(torch.cuda.is_available(), reason="most methods are refused next to CUDA"),
]

MODELS = Path("eval/models")
# Everything is selected, so that answers are dense attention's; the trained indexer of DSA selects as it always does.
CONFIGS: dict[str, dict[str, Any]] = {
    "resa": {"active_ratio": 1.0, "dense_fallback": "never"},
    "robsa": {"theta1": 1.0, "dense_fallback": "never"},
    "dsa": {},
    "rocketkv": {"prompt_budget": 10240, "topk": 10240, "dense_fallback": "never"},
    "skip_softmax": {"threshold_scale_factor": 0, "dense_fallback": "never"},
    "anchor": {"theta": 1e9, "block_size": 64, "step": 2, "dense_tail": 0, "dense_fallback": "never"},
    "skip_softmax (prefill)": {"threshold_scale_factor": 0, "dense_fallback": "never"},
}
# All of the table's flags but those for a GPU, as many on one server as go together.
SERVERS: dict[str, dict[str, Any]] = {
    "two ranks": {"tp_size": 2},
    "plain": {
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
    },
    "mixed": {"enable_mixed_chunk": True, "enable_return_hidden_states": True, "kv_events_config": "{}"},
    "lossless": {"speculative_algorithm": "SPARSE_SELF"},
}
# A decode method's partners by server.
PARTNERS = {
    "two ranks": Method("anchor", True),
    "plain": Method("skip_softmax", True),
    "mixed": Method("anchor", True),
    "lossless": Method("anchor", True),
}
# By method, in the order of the servers. A prefill method has also those of the decode methods whose partner it is.
PAGES: dict[str, tuple[int, ...]] = {
    "resa": (4, 8, 32, 16),
    "rocketkv": (8, 32, 4, 16),
    "skip_softmax": (32, 4, 8, 16),
    "anchor": (1, 2, 64),
    "skip_softmax (prefill)": (1, 2, 64),
    "robsa": (16, 32, 64, 16),
    "dsa": (64, 64, 64),
}
# Methods that have no page size for a server are not served with its flags.
STARTS = [
    (method, name)
    for place, name in enumerate(SERVERS)
    for method in support_matrix.methods()
    if place < len(PAGES[method.label])
]
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
            page = "64" if kind == "DSA" else "16"
            with serve(model_of(kind), "--dtype", "float32", "--page-size", page, **sparse) as server:
                found[kind] = greedy(server, prompts_of(kind), TOKENS)
        return found[kind]

    return answers


@dataclass(frozen=True)
class Start:
    """A server with a method.

    Attributes:
        method: the method.
        page: tokens of a KV page.
        flags: fields of ``ServerArgs``.
        partner: the prefill method beside it.
        fields: what of its config all that takes.
    """

    method: Method
    page: int
    flags: dict[str, Any]
    partner: Method | None
    fields: dict[str, Any]

    def command(self) -> list[str]:
        own = {} if self.method.prefill else {"page_size": self.page}
        found = ["--dtype", "float32", "--page-size", str(self.page), *support_matrix.flag_text(self.flags).split()]
        found += self.method.flag.split()
        configs = {self.method.prefill: {**CONFIGS[self.method.label], **self.fields, **own}}
        if self.partner:
            found += self.partner.flag.split()
            configs[True] = CONFIGS[self.partner.label]
        for prefill, config in configs.items():
            found += ["--sparse-prefill-config" if prefill else "--sparse-config", json.dumps(config)]
        if "chunked_prefill_size" not in self.flags:
            found += ["--chunked-prefill-size", "256"]
        return found

    def shows(self) -> set[Cell]:
        """Return the cells of the feature tables that are true if this server answers as it should."""
        label = self.method.label
        flags = {row_of(flag) for flag in support_matrix.FLAGS if flag.items() <= self.flags.items()}
        found = {Cell(row, label) for row in flags}
        found |= {
            Cell(feature_cells.PAGE_SIZE, one.label, str(self.page)) for one in (self.method, self.partner) if one
        }
        found |= {
            Cell(feature_cells.PHASE, label, "prefill" if self.method.prefill else "decode"),
            Cell(feature_cells.MODELS, label, support_matrix.place_of(self.method).kind),
            Cell(feature_cells.MACHINE, label, "CPU platform"),
            Cell(feature_cells.ON_CPU, label, backend_of(self.method)),
        }
        if self.partner:
            found |= {Cell(feature_cells.TOGETHER, label, self.partner.name)}
            found |= {Cell(feature_cells.TOGETHER, self.partner.label, self.method.name)}
        return found


def backend_of(method: Method) -> str:
    """The attention backend of the servers here, which the platform chooses."""
    return "dsa" if support_matrix.place_of(method).kind == "DSA" else "torch_native"


def start_of(method: Method, name: str) -> Start:
    """A server with those of some flags that a method goes with on this machine, and with what that takes."""
    place = replace(support_matrix.place_of(method), gpu=False)
    answers = {flag: support_matrix.answer(method, place, {flag: value}) for flag, value in SERVERS[name].items()}
    wanted = [answer.fields for answer in answers.values() if answer.served]
    fields = {name: value for one in (place.fields, *wanted) for name, value in one.items()}
    partner = PARTNERS.get(name)
    if partner and (method.prefill or partner.name not in support_matrix.partners(method)):
        partner = None
    flags = {flag: value for flag, value in SERVERS[name].items() if answers[flag].served}
    return Start(method, PAGES[method.label][[*SERVERS].index(name)], flags, partner, fields)


def shown() -> set[Cell]:
    return {cell for method, name in STARTS for cell in start_of(method, name).shows()}


def test_every_yes_of_the_tables_is_shown() -> None:
    told = shown() | feature_cells.PROOFS.keys()
    assert sorted(feature_cells.cells() - told) == [], "add a test, and name it in tests/support/feature_cells.py"
    assert sorted(told - feature_cells.cells()) == [], "the tables say no"


def read_events(sub: zmq.Socket[bytes]) -> list[KVCacheEvent]:
    """Return the events that a server has published, up to a second without one."""
    found = []
    while sub.poll(1_000):
        found += msgspec.msgpack.decode(sub.recv_multipart()[-1], type=KVEventBatch).events
    return found


def wait_for_events(server: ServerProcess, sub: zmq.Socket[bytes]) -> None:
    """Ask prompts until one shows: what is published before a subscription has arrived is lost."""
    for seed in range(100):
        server.generate(input_ids=random_prompts(seed, [600], 1000)[0], sampling_params=SHORT)
        if sub.poll(100):
            return
    raise TimeoutError("no event of the KV cache")


def test_proofs_are_tests_that_there_are() -> None:
    proofs = {proof for proof in feature_cells.PROOFS.values() if not feature_cells.of_leg(proof)}
    assert not [proof for proof in proofs if not feature_cells.there_is(proof)]
    assert not feature_cells.there_is("tests/x.py::test_x")


@pytest.mark.parametrize(("method", "name"), STARTS, ids=[f"{method.label}-{name}" for method, name in STARTS])
def test_answers_stay_the_same(method: Method, name: str, serve, model_of, expected) -> None:
    start = start_of(method, name)
    flags = start.flags
    assert flags, "nothing of this is served"
    events = free_port()
    if "kv_events_config" in flags:
        flags["kv_events_config"] = json.dumps(
            {"publisher": "zmq", "endpoint": f"tcp://*:{events}"}, separators=(",", ":")
        )
    kind = support_matrix.place_of(method).kind
    prompts = prompts_of(kind)
    with serve(model_of(kind), *start.command()) as server, zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.connect(f"tcp://127.0.0.1:{events}")
        sub.subscribe(b"")
        if "kv_events_config" in flags:
            wait_for_events(server, sub)
            server.flush_cache()
        assert greedy(server, prompts, TOKENS, at_once=AT_ONCE) == expected(kind)
        if "kv_events_config" in flags:
            stored = [event.token_ids for event in read_events(sub) if isinstance(event, BlockStored)]
            assert max(prompts, key=len)[: start.page] in [tokens[: start.page] for tokens in stored]
            assert max(map(max, stored)) < 200_000, "a digest of a group"
        if "enable_return_hidden_states" in flags:
            answer = server.generate(input_ids=prompts[1], sampling_params=SHORT, return_hidden_states=True)
            assert len(answer["meta_info"]["hidden_states"]) == answer["meta_info"]["completion_tokens"] == 3
        info, state = server.server_info(), sparse_state(server)
        assert (info["page_size"], info["attention_backend"]) == (start.page, backend_of(method))
        if not method.prefill:
            assert state["sparse_layer_rows"] > 0
        if "speculative_algorithm" in flags:
            assert state["drafted_tokens"] >= state["accepted_tokens"] > 0
        if method.prefill or start.partner:
            assert state["prefill"]["sparse_tokens"] > 0
            assert state["prefill"]["method"] == (start.partner or method).name
        assert_nothing_leaked(server)
