"""Rectification on real servers: the same tokens, exact KV, and no token forwarded more than twice."""

import json
from base64 import b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import approximate
import numpy as np
import pytest
from server_load import TOKENS as LOAD_TOKENS
from server_load import chaos
from server_requests import (
    ask_all,
    assert_exact,
    assert_nothing_leaked,
    forced,
    greedy,
    logprobs,
    random_prompts,
    read_logprobs,
    sparse_state,
    spent,
)
from window_checkpoints import random_windowed

from launch.server import ServerProcess

PAGE, LAYERS, INTERVAL, TOKENS = 16, 4, 32, 256
CHUNKS = ("--chunked-prefill-size", "512")
# Every page is selected, and yet every decode step counts as sparse: so rectification has work to do.
EVERYTHING = {"active_ratio": 1.0, "dense_fallback": "never", "check_exactness": True}
# What a single request asks for on such a server.
SPARSE = {"active_ratio": 0.1}
CANARY = ("--kv-canary-real-data", "all", "--kv-canary-sweep-interval", "16", "--kv-canary")


def ask(server: ServerProcess, prompt: list[int], tokens: int, options: dict[str, Any] | None = None, **kwargs: Any):
    params = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "custom_params": options}
    return server.generate(input_ids=prompt, sampling_params=params | kwargs.pop("params", {}), **kwargs)


def assert_grammar(server: ServerProcess, repeatable: bool = True) -> None:
    """Digits only, among other requests that rectify and finish at other times, and leave these as they are."""
    sampling = {"regex": "[0-9]{20}", "ignore_eos": False}
    prompts = [[20 + i, 21, 22] * 30 for i in range(4)]
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(ask, server, prompt, 9 + i, {"rectify_interval": 4}) for i, prompt in enumerate(prompts)]
        found = [pool.submit(ask, server, prompt, 40, {"rectify_interval": 3}, params=sampling) for prompt in prompts]
        texts = [answer.result()["text"] for answer in found]
        assert all(len(text) == 20 and text.isdigit() for text in texts), texts
        together = [answer.result()["output_ids"] for answer in others]
    assert not repeatable or together == [ask(server, prompt, 9 + i)["output_ids"] for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def sixteen(prompts) -> list[list[int]]:
    return [prompt[:length] for prompt, length in zip(prompts, range(17, 17 + 20 * 37, 37), strict=True)][4:]


@pytest.fixture(scope="module")
def dense_outputs(serve, checkpoint, sixteen) -> list[list[int]]:
    with serve(checkpoint, *CHUNKS) as server:
        return greedy(server, sixteen, tokens=TOKENS, at_once=16)


@pytest.fixture(scope="module")
def server(serve, checkpoint, dense_outputs) -> Iterator[ServerProcess]:
    with serve(checkpoint, *CHUNKS, "--enable-metrics", config={**EVERYTHING, "min_pages": 4}) as server:
        yield server


def test_sixteen_at_once_equal_dense(server, sixteen, dense_outputs) -> None:
    before = sparse_state(server)
    assert greedy(server, sixteen, tokens=TOKENS, at_once=16) == dense_outputs
    used = spent(server, before)
    assert used["dense_fallback_rows"] == 0
    # Rows that decode as always; a rectifying pass is the decode step of its rows.
    assert used["sparse_layer_rows"] == used["decode_rows"] * LAYERS
    generated = 16 * (TOKENS - 1)
    rows = used["decode_rows"] + used["rectified_requests"]
    assert generated <= rows <= generated + 16
    assert used["rectified_requests"] >= 16 * (TOKENS // INTERVAL - 1)
    # Each token was forwarded once by decode or rectification, and again at most once by rectification.
    assert used["rectified_tokens"] <= rows
    steps = used["decode_steps"] + used["rectifying_steps"] - used["second_passes"]
    assert steps >= TOKENS - 1 and 4 * used["rectifying_steps"] <= steps
    assert sparse_state(server)["rectify_max_delay_steps"] == 0
    assert_exact(server)


@pytest.mark.soak
def test_equal_without_overlap(serve, checkpoint, sixteen, dense_outputs) -> None:
    with serve(checkpoint, *CHUNKS, "--disable-overlap-schedule", config=EVERYTHING) as server:
        before = sparse_state(server)
        assert greedy(server, sixteen, tokens=TOKENS, at_once=16) == dense_outputs
        used = spent(server, before)
        assert used["rectified_requests"] >= 16 * (TOKENS // INTERVAL - 1)
        assert used["dense_fallback_rows"] == 0
        assert used["sparse_layer_rows"] == used["decode_rows"] * LAYERS
        assert_grammar(server)
        assert_exact(server)
        assert_nothing_leaked(server)


def test_a_lone_request_costs_one_forward_a_token(server, sixteen) -> None:
    before = sparse_state(server)
    ask(server, sixteen[-1], 101, SPARSE)
    used = spent(server, before)
    assert used["second_passes"] == 0
    # The overlapped scheduler launches one step before it knows that the request has ended.
    assert 100 <= used["decode_steps"] + used["rectifying_steps"] <= 101
    assert used["rectified_tokens"] == 3 * INTERVAL


def test_second_turn_hits_what_is_exact(server, sixteen) -> None:
    server.flush_cache()
    prompt = sixteen[-1]
    for options, exact in ((SPARSE, 2 * INTERVAL), ({"sparse": False}, 70 - 1), ({"rectify_interval": 0}, 0)):
        server.flush_cache()
        first = ask(server, prompt, 70, options)
        second = ask(server, [*prompt, *first["output_ids"], 11, 12], 1)
        assert second["meta_info"]["cached_tokens"] == (len(prompt) + exact) // PAGE * PAGE, options
    assert_exact(server)


def test_the_tail_differs_below_exactness_nothing_does(server, sixteen) -> None:
    """Sparse decode at a tenth drifts from dense, and yet whatever it leaves in the tree is exact."""
    server.flush_cache()
    long = [prompt * 2 for prompt in sixteen[-4:]]
    sparse = [ask(server, prompt, 80, SPARSE)["output_ids"] for prompt in long]
    dense = [ask(server, prompt, 80, {"sparse": False})["output_ids"] for prompt in long]
    assert sparse != dense
    assert_exact(server)


def test_on_finish_makes_all_whole_pages_hits(serve, checkpoint, sixteen) -> None:
    config = {**EVERYTHING, "active_ratio": 0.1, "min_pages": 4, "rectify_on_finish": True}
    with serve(checkpoint, *CHUNKS, config=config) as server:
        before = sparse_state(server)
        with ThreadPoolExecutor(16) as pool:
            first = list(pool.map(lambda prompt: ask(server, prompt, 50)["output_ids"], sixteen))
        used = spent(server, before)
        assert used["tail_tokens_dropped"] == 0 < used["finish_tokens_rectified"]
        for prompt, output in zip(sixteen, first, strict=True):
            if (len(prompt) + 50) % PAGE == 0:
                # With overlap the last token has been forwarded too, as on a dense server.
                continue
            second = ask(server, [*prompt, *output, 11, 12], 1)
            assert second["meta_info"]["cached_tokens"] == (len(prompt) + 50 - 1) // PAGE * PAGE
        assert_grammar(server, repeatable=False)
        assert_exact(server)
        assert_nothing_leaked(server)


def test_streaming_stops_penalties_logprobs_and_n(server, sixteen) -> None:
    prompt = sixteen[-2]
    penalties = {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1}
    plain = ask(server, prompt, 100, {"rectify_interval": 0}, params=penalties, return_logprob=True)
    rectified = ask(server, prompt, 100, {"rectify_interval": 7}, params=penalties, return_logprob=True)
    assert rectified["output_ids"] == plain["output_ids"]
    pairs = zip(
        plain["meta_info"]["output_token_logprobs"], rectified["meta_info"]["output_token_logprobs"], strict=True
    )
    assert max(abs(one[0] - other[0]) for one, other in pairs) < 1e-3
    output = ask(server, prompt, 100)["output_ids"]
    stop = output[60]
    stopped = ask(server, prompt, 100, params={"ignore_eos": False, "stop_token_ids": [stop]})
    assert stopped["output_ids"] == output[: output.index(stop) + 1]
    several = ask(server, prompt, 40, {"rectify_interval": 5}, params={"n": 3})
    assert [answer["output_ids"] for answer in several] == [output[:40]] * 3
    request = {"input_ids": prompt, "stream": True}
    request["sampling_params"] = {"max_new_tokens": 70, "temperature": 0.0, "ignore_eos": True}
    with server.client.stream("POST", "/generate", json=request) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    assert json.loads(lines[-1].removeprefix("data: "))["output_ids"] == output[:70]


def test_grammar(server) -> None:
    assert_grammar(server)


def test_forced_decoding_gives_the_prefills_logprobs(server, sixteen) -> None:
    prompt, forced = sixteen[-1], sixteen[-2][:90]
    for options in ({"sparse": False}, {"rectify_interval": 8}):
        answer = ask(server, prompt, 90, {**options, "forced_tokens": forced}, return_logprob=True)
        assert answer["output_ids"] == forced
        decoded = logprobs(answer)
        server.flush_cache()
        whole = ask(server, [*prompt, *forced], 1, return_logprob=True, logprob_start_len=len(prompt) - 1)
        prefilled = read_logprobs(whole)
        assert max(abs(one - other) for one, other in zip(decoded, prefilled, strict=True)) < 1e-3


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"rectify_interval": 1}, "rectify_interval"),
        ({"rectify_interval": 10**6}, "rectify_interval"),
        ({"active_ratio": 1.5}, "active_ratio"),
        ({"sparse": "no"}, "sparse"),
        ({"active_ration": 0.1}, "active_ratio"),
        ({"forced_tokens": [10**6]}, "forced_tokens"),
    ],
)
def test_a_bad_option_is_status_400_and_named(server, options, field) -> None:
    for stream in (False, True):
        sampling = {"max_new_tokens": 2, "custom_params": options}
        request = {"input_ids": [5, 6, 7], "sampling_params": sampling, "stream": stream}
        response = server.client.post("/generate", json=request)
        assert field in response.text and (response.status_code == 400 or stream)
    body = {"model": "default", "messages": [{"role": "user", "content": "ba"}], "custom_params": options}
    response = server.client.post("/v1/chat/completions", json={**body, "max_tokens": 2})
    assert response.status_code == 400 and field in response.text


def test_metrics_are_exported(server) -> None:
    text = server.client.get("/metrics").text
    for name in ("sparse_active_fraction", "sparse_rectified_tokens_total", "sparse_aux_bytes"):
        assert f"sglang:{name}" in text
    assert "Sparse decode" in server.log()


@pytest.mark.soak
def test_under_retractions_and_aborts_what_finishes_equals_a_quiet_run(server, serve, checkpoint, sixteen) -> None:
    quiet = greedy(server, sixteen, tokens=LOAD_TOKENS)
    load = chaos(serve, checkpoint, sixteen, {**EVERYTHING, "rectify_interval": 8}, seconds=12.0)
    for index, output in load.finished:
        assert output == quiet[index], f"prompt {index} of {len(load.finished)} finished ones"


AUXILIARY = ("--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3")


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [("--enable-return-hidden-states",), (*AUXILIARY, "--return-aux-hidden-state-layer-ids", "1", "2")],
    ids=["last layer", "auxiliary"],
)
def test_hidden_states_are_those_of_each_generated_token(serve, flags: tuple[str, ...]) -> None:
    """Of rows that ask for them and rows that do not, in shared rectifying passes."""
    asked = [(prompt, states) for prompt in random_prompts(11, (300, 50), 1000) for states in (True, False)]
    model, found = approximate.model_of("resa")[0], []
    for config in (None, {**EVERYTHING, "rectify_interval": 7}):
        with (
            serve(model, *CHUNKS, "--dtype", "float32", *flags, config=config) as server,
            ThreadPoolExecutor(len(asked)) as pool,
        ):
            found.append([*pool.map(lambda one: ask(server, one[0], 24, return_hidden_states=one[1]), asked)])
            assert config is None or sparse_state(server)["rectified_tokens"] > 0
            assert_nothing_leaked(server)
    for (_, wanted), dense, sparse in zip(asked, *found, strict=True):
        assert sparse["output_ids"] == dense["output_ids"]
        of_each = [answer["meta_info"].get("hidden_states") for answer in (dense, sparse)]
        assert wanted == all(of_each) == any(of_each)
        if wanted:
            # The first has those of the prompt, but for what the prefix cache had of it.
            for one, other in zip(*(states[1:] for states in of_each), strict=True):
                assert one == pytest.approx(other, abs=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--disable-overlap-schedule",)], ids=["overlap", "no overlap"])
def test_experts_are_those_of_the_step_that_computed_a_token(
    serve, tmp_path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """A rectifying pass routes the tokens that it encodes again, too, to other experts than the sparse step.

    Beside it runs a row that is due in other steps, whose passes take it along from half of its interval on.
    """
    model, (prompt, tokens) = random_windowed(tmp_path, "Mellum"), random_prompts(12, (300, 60), 1000)
    more = ("--disable-hybrid-swa-memory", "--moe-runner-backend", "triton", "--enable-return-routed-experts")
    config = {"active_ratio": 0.1, "min_pages": 2, "dense_fallback": "never", "rectify_interval": INTERVAL}
    with serve(model, *CHUNKS, "--dtype", "float32", *more, *flags, config=config) as server:
        monkeypatch.setattr(server, "generate", partial(server.generate, return_routed_experts=True))

        def experts(**options: Any) -> np.ndarray:
            found = forced(server, prompt, tokens, **options)
            routed = np.frombuffer(b64decode(found["meta_info"]["routed_experts"]), np.int32)
            return routed.reshape(len(prompt) + len(tokens) - 1, -1)

        dense = experts(sparse=False)
        server.flush_cache()
        sparse = experts(rectify_interval=0)
        server.flush_cache()
        with ThreadPoolExecutor() as pool:
            beside = pool.submit(forced, server, [*reversed(prompt)], [*reversed(tokens)] * 9, rectify_interval=5)
            rectified = experts()
            assert not beside.done() and beside.result()
        pass_of = len(prompt) + INTERVAL // 2 - 1
        assert (rectified[:pass_of] == sparse[:pass_of]).all()
        assert (dense[:pass_of] != sparse[:pass_of]).any() and (rectified[pass_of:] != sparse[pass_of:]).any()
        assert_nothing_leaked(server)


@pytest.mark.long
@pytest.mark.parametrize("name", ["resa and anchor", "rocketkv", "skip_softmax", "windows"])
def test_the_canary_finds_no_damage(serve, name: str, tmp_path) -> None:
    """The KV that a rectifying pass rewrites and the next turn reads is not damaged."""
    method, config, prefill = approximate.METHODS["resa" if name == "windows" else name]
    model = random_windowed(tmp_path, "Mellum", 64) if name == "windows" else approximate.model_of(name)[0]
    unchecked, config = {"check_exactness": False}, {**config, "check_exactness": False, "rectify_interval": 7}
    flags = ("--max-total-tokens", "4096", "--context-length", "1024", *CHUNKS, "--dtype", "float32", *CANARY, "raise")
    with serve(model, *flags, method=method, config=config, prefill=prefill and prefill | unchecked) as server:
        prompts = random_prompts(11, (300, 200, 401, 50), 1000)
        answers = ask_all(server, prompts, 24)
        turns = [[*prompt, *one["output_ids"], 11] for prompt, one in zip(prompts, answers, strict=True)]
        assert any(answer["meta_info"]["cached_tokens"] for answer in ask_all(server, turns, 12))
        assert sparse_state(server)["rectified_tokens"] > 0
        assert_nothing_leaked(server)


@pytest.mark.long
def test_the_canary_finds_what_else_is_written(serve, sixteen) -> None:
    env = {"SGLANG_KV_CANARY_PERTURB_REAL_KV_USED_PROB": "1.0", "SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS": "10"}
    env["SGLANG_KV_CANARY_PERTURB_TARGET_GROUP"] = "full"
    config = {**EVERYTHING, "rectify_interval": 7, "check_exactness": False}
    flags = ("--max-total-tokens", "4096", *CHUNKS, *CANARY, "log")
    with serve(approximate.model_of("resa")[0], *flags, config=config, env=env) as server:
        greedy(server, sixteen[:2])
        assert "KV cache canary violation detected" in server.log()
