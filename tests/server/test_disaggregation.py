"""A prefill and a decode server: prompts that the other one prefilled, as they are on one server."""

import pickle
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import approximate
import checkpoints
import folder_transfer
import pytest
import torch
from approximate import METHODS, ask, assert_same, model_of
from server_requests import RANKS, RETRACT, assert_no_error, random_prompts, sparse_state

from launch.server import ServerProcess

pytestmark = [pytest.mark.long, pytest.mark.skipif(torch.cuda.is_available(), reason="the transfer is of the CPU")]
FLAGS = ("--max-total-tokens", "8192", "--context-length", "2048", "--chunked-prefill-size", "512")
FLAGS += ("--dtype", "float32")
PROMPTS = random_prompts(11, (900, 801, 12), 1000)
# Two of these fill the KV pool of a test.
MANY = random_prompts(12, (900, 700, 930), 1000)
STAGES = ("--pp-size", "2")
Ask = Callable[..., dict[str, Any]]


def server_of(name: str, **fields: Any) -> tuple[Path, tuple[str, ...], dict[str, Any]]:
    """The model, flags and sparse flags of a method, with fields of its config."""
    method, config, prefill = METHODS[name]
    model, page = model_of(name)
    unchecked = {"check_exactness": False}
    options = {"method": method, "config": config | unchecked | fields, "prefill": prefill and prefill | unchecked}
    return model, (*FLAGS, "--page-size", page), options


@contextmanager
def pair(
    serve: Any,
    folder: Path,
    name: str,
    *more: str,
    env: dict[str, str] | None = None,
    ranks: tuple[str, ...] = (),
    **fields: Any,
) -> Iterator[tuple[Ask, list[ServerProcess]]]:
    """A prefill and a decode server with the same sparse flags; yields what asks both, and these.

    Args:
        more: flags of the decode server.
        env: of the decode server.
        ranks: flags of both servers.
        fields: of the decode method's config.
    """
    model, flags, options = server_of(name, **fields)
    both = folder_transfer.install(folder)
    flags += (*ranks, "--disaggregation-transfer-backend", "mori", "--disaggregation-mode")
    with (
        # SGLang's prefill servers overlap by events of CUDA.
        serve(model, *flags, "prefill", "--disable-overlap-schedule", **options, env=both) as first,
        serve(model, *flags, "decode", *more, **options, env=both | (env or {})) as second,
        ThreadPoolExecutor() as pool,
    ):
        servers = [first, second]

        def ask_both(prompt: list[int], *args: Any, **given: Any) -> dict[str, Any]:
            given |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": random.getrandbits(62)}
            started = pool.submit(ask, servers[0], prompt, *args, **given)
            answer = ask(servers[1], prompt, *args, **given)
            assert started.result()["output_ids"] == answer["output_ids"][:1]
            return answer

        yield ask_both, servers
        for server in servers:
            server.flush_cache()
        assert ask_both([11, 12, 13], 2)["output_ids"]
        for server in servers:
            assert_no_error(server)


@pytest.fixture(scope="module")
def alone(serve) -> Callable[..., tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Return the answers of a server that is none of a pair, and its state after them."""

    @cache
    def answered(name: str, many: bool = False, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        model, flags, options = server_of(name, **fields)
        with serve(model, *flags, **options) as server:
            return [ask(server, prompt) for prompt in (MANY if many else PROMPTS)], sparse_state(server)

    return answered


@pytest.mark.parametrize("name", METHODS)
def test_a_pair_answers_as_one_server_does(serve, alone, tmp_path: Path, name: str) -> None:
    expected, whole = alone(name)
    with pair(serve, tmp_path, name) as (ask_both, (_, decode)):
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            assert_same(ask_both(prompt), answer)
        found = sparse_state(decode)
        assert found["rectified_tokens"] == whole["rectified_tokens"] and found["sparse_layer_rows"] > 0
        page = int(server_of(name)[1][-1])
        pages = sum(-(-len(prompt) // page) for prompt in PROMPTS)
        assert found["arrived_pages_summarised"] == (0 if name == "skip_softmax" else pages)


@pytest.mark.parametrize("name", ["resa", "rocketkv"])
def test_what_a_retracted_request_takes_back_is_as_it_was(serve, alone, tmp_path: Path, name: str) -> None:
    """Approximate KV too, so that no token changes. When a row is rectified depends on its neighbours: never."""
    expected, _ = alone(name, rectify_interval=0)
    # Streams of the CPU lack what the copy to the host pool needs.
    more = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
    with (
        pair(serve, tmp_path, name, *more, env=RETRACT, rectify_interval=0) as (ask_both, _),
        ThreadPoolExecutor() as pool,
    ):
        answers = list(pool.map(ask_both, PROMPTS))
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 3
        for found, answer in zip(answers, expected, strict=True):
            assert_same(found, answer)


def test_a_prefix_cache_of_the_decode_server_holds_exact_kv_only(serve, tmp_path: Path) -> None:
    model, flags, options = server_of("resa")
    turns = [PROMPTS[0]]
    with serve(model, *flags, **options) as server:
        first = ask(server, turns[0])
        turns.append([*turns[0], *first["output_ids"], *PROMPTS[1][:100]])
        server.flush_cache()
        expected = [first, ask(server, turns[1])]
    with pair(serve, tmp_path, "resa", "--disaggregation-decode-enable-radix-cache") as (ask_both, _):
        # What ends with its first token leaves pages in the cache that no step of its own has summarised.
        assert ask_both(turns[0], 1)["output_ids"] == expected[0]["output_ids"][:1]
        for prompt, answer in zip(turns, expected, strict=True):
            assert_same(ask_both(prompt), answer)


@pytest.mark.parametrize("name", ["resa and anchor", "robsa", "rocketkv"])
def test_servers_that_change_their_roles_answer_as_one_server_does(serve, alone, tmp_path: Path, name: str) -> None:
    expected, whole = alone(name)
    ranks = ("--enable-pd-role-switch", "--disable-overlap-schedule")
    with pair(serve, tmp_path, name, ranks=ranks) as (ask_both, servers):
        for time in (1, 2, 3):
            before = sparse_state(servers[1])
            for prompt, answer in zip(PROMPTS, expected, strict=True):
                assert_same(ask_both(prompt), answer)
            found = sparse_state(servers[1])
            assert found["rectified_tokens"] - before["rectified_tokens"] == whole["rectified_tokens"]
            assert found["sparse_layer_rows"] > before["sparse_layer_rows"]
            if time < 3:
                servers.reverse()
                for server, role in zip(servers, ("prefill", "decode"), strict=True):
                    request = {"new_role": role, "decode_cuda_graph_memory_gb": 0}
                    assert server.client.post("/pd_role_switch", json=request).json()["success"]


@pytest.mark.parametrize("name", ["resa", "robsa", "skip_softmax"])
def test_a_decode_server_takes_prompts_back_from_host_memory(serve, alone, tmp_path: Path, name: str) -> None:
    expected, _ = alone(name, many=True)
    more = ("--max-total-tokens", "2048", "--disaggregation-decode-enable-radix-cache", "--enable-hierarchical-cache")
    with pair(serve, tmp_path, name, *more, "--hicache-ratio", "6") as (ask_both, _):
        for prompt, answer in zip(MANY * 2, expected * 2, strict=True):
            assert_same(ask_both(prompt), answer)
    known = [pickle.loads(path.read_bytes()) for path in (tmp_path / "transfers").glob("*.asked")]
    assert sum(known) > sum(len(prompt) - 64 for prompt in MANY)


@pytest.mark.parametrize("name", ["resa", "resa and anchor", "rocketkv"])
def test_both_servers_compute_with_a_requests_adapter(serve, tmp_path: Path, monkeypatch, name: str) -> None:
    names = (None, "a", "b")
    model, _ = model_of(name)
    paths = [f"{one}={checkpoints.random_adapter(tmp_path / one, model, ord(one))}" for one in names if one]
    monkeypatch.setitem(globals(), "FLAGS", (*FLAGS, "--lora-paths", *paths))
    model, flags, options = server_of(name)
    with serve(model, *flags, **options) as server:
        expected = {one: [ask(server, prompt, lora_path=one) for prompt in PROMPTS[:2]] for one in names}
    assert expected[None][0]["output_ids"] != expected["a"][0]["output_ids"] != expected["b"][0]["output_ids"]
    with pair(serve, tmp_path, name) as (ask_both, _):
        for place, prompt in enumerate(PROMPTS[:2]):
            for one in names:
                assert_same(ask_both(prompt, lora_path=one), expected[one][place])


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("resa", RANKS), ("resa and anchor", STAGES), ("robsa", RANKS), ("skip_softmax", STAGES)],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_ranks_of_a_pair_answer_as_one_server_does(
    serve, tmp_path: Path, monkeypatch, name: str, ranks: tuple[str, ...]
) -> None:
    """Replicas of attention, or stages, on both servers; one prompt at a time, as rows are rectified together."""
    model = checkpoints.untied(model_of(name)[0], tmp_path)
    monkeypatch.setitem(globals(), "model_of", lambda name: (model, approximate.model_of(name)[1]))
    _, flags, options = server_of(name, rectify_interval=16)
    with serve(model, *flags, **options) as server:
        expected = [ask(server, prompt) for prompt in PROMPTS]
    with pair(serve, tmp_path, name, ranks=ranks, rectify_interval=16) as (ask_both, (_, decode)):
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            assert_same(ask_both(prompt), answer)
        states = [state["sparse"] for state in decode.server_info()["internal_states"]]
        assert all(state["rectified_tokens"] > 0 for state in states)
        assert all(state["arrived_pages_summarised"] > 0 or name == "skip_softmax" for state in states)
