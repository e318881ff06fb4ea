"""Deterministic inference on real servers: a row's output is a function of the row, bit by bit."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_mla
from httpx import HTTPStatusError
from lone_rows import FLAGS, TOKENS, answer, assert_alone
from server_requests import RETRACT, ask, assert_no_error, assert_nothing_leaked, random_prompts, sparse_state

from launch.server import ServerProcess

INTERVAL = 8
RESA = {"active_ratio": 0.2, "min_pages": 4, "min_seq_len": 100, "rectify_interval": INTERVAL}
ROCKETKV = {"prompt_budget": 128, "topk": 12, "min_seq_len": 0, "rectify_interval": 16}
SKIPPING = {"threshold_scale_factor": {"decode": 300.0}, "min_seq_len": 0, "rectify_interval": 16}
ROBSA = {"allow_uncalibrated": True, "theta1": 0.6, "max_active_ratio": 0.9, "min_seq_len": 0, "rectify_interval": 16}
LATENT_SKIPPING = {**SKIPPING, "rectify_interval": 0}


def assert_ran_sparse(server: ServerProcess, config: dict[str, Any]) -> None:
    """Every decode step was sparse, and every rectification came when its interval was full."""
    state = sparse_state(server)
    assert state["sparse_layer_rows"] >= state["decode_rows"] > 0 == state["dense_fallback_rows"]
    assert state["rectify_max_delay_steps"] == 0
    assert state["rectified_tokens"] == config["rectify_interval"] * state["rectified_requests"]
    assert bool(state["rectified_requests"]) == bool(config["rectify_interval"])
    assert_nothing_leaked(server)


def test_a_row_is_alone_with_resa(serve, checkpoint) -> None:
    with serve(checkpoint, *FLAGS, config=RESA) as server:
        assert_alone(server)
        assert_ran_sparse(server, RESA)
        # Rows that ask for other things than their neighbours, and one that is dense.
        prompts = random_prompts(9, (300, 200, 150, 250), tokens=1000)
        options = [{"rectify_interval": 5}, {"sparse": False}, {"active_ratio": 0.5}, None]
        pairs = list(zip(prompts, options, strict=True))
        alone = [answer(server, *pair)[:2] for pair in pairs]
        server.flush_cache()
        with ThreadPoolExecutor(4) as pool:
            assert [*pool.map(lambda pair: answer(server, *pair)[:2], pairs)] == alone


def test_more_rows_are_due_than_a_pass_or_a_chunk_takes(serve, checkpoint) -> None:
    """Eight rows of 36 pending tokens each, of which 256 fit a pass: all are rectified in one step."""
    flags = ("--enable-deterministic-inference", "--chunked-prefill-size", "256")
    config = {**RESA, "rectify_interval": 36, "rectify_max_batch": 1, "min_seq_len": 0}
    prompts = random_prompts(11, [40] * 8, tokens=1000)
    with serve(checkpoint, *flags, config=config) as server:
        alone = [answer(server, prompt)[:2] for prompt in prompts]
        server.flush_cache()
        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(lambda prompt: answer(server, prompt)[:2], prompts)] == alone
        assert_ran_sparse(server, config)


@pytest.mark.parametrize(
    ("method", "config"), [("rocketkv", ROCKETKV), ("skip_softmax", SKIPPING)], ids=["rocketkv", "skip_softmax"]
)
def test_a_row_is_alone_with_other_methods(serve, checkpoint, method: str, config: dict[str, Any]) -> None:
    with serve(checkpoint, *FLAGS, method=method, config=config) as server:
        assert_alone(server, sizes=(6,))
        assert_ran_sparse(server, config)


@pytest.mark.parametrize(
    ("method", "config"), [("robsa", ROBSA), ("skip_softmax", LATENT_SKIPPING)], ids=["robsa", "skip_softmax"]
)
def test_a_row_is_alone_with_mla(serve, tmp_path: Path, method: str, config: dict[str, Any]) -> None:
    with serve(random_mla(tmp_path), *FLAGS, method=method, config=config) as server:
        assert_alone(server, sizes=(6,))
        assert_ran_sparse(server, config)


def test_a_retracted_request_is_aborted(serve, checkpoint) -> None:
    prompts = random_prompts(13, (300, 200, 150), tokens=1000)
    with serve(checkpoint, *FLAGS, config=RESA, env=RETRACT) as server:
        alone = [answer(server, prompt)[:2] for prompt in prompts]

        def asked(prompt: list[int]) -> Any:
            try:
                return answer(server, prompt)[:2]
            except HTTPStatusError as error:
                return error.response

        with ThreadPoolExecutor(3) as pool:
            found = [*pool.map(asked, prompts)]
        kept = [(one, other) for one, other in zip(found, alone, strict=True) if isinstance(one, tuple)]
        assert kept and all(one == other for one, other in kept)
        refused = [one for one in found if not isinstance(one, tuple)]
        assert refused and {one.status_code for one in refused} == {503}
        assert all("deterministic inference" in one.text for one in refused)
        assert len(ask(server, prompts[0], TOKENS)["output_ids"]) == TOKENS
        assert_no_error(server)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["fa3", "triton"])
@pytest.mark.parametrize(
    ("method", "config"),
    [("resa", RESA), ("rocketkv", ROCKETKV), ("skip_softmax", SKIPPING)],
    ids=["resa", "rocketkv", "skip_softmax"],
)
def test_a_row_is_alone_on_a_gpu(serve, backend: str, method: str, config: dict[str, Any]) -> None:
    flags = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--attention-backend", backend)
    with serve(Path("eval/models/tiny-gqa"), *FLAGS, *flags, method=method, config=config) as server:
        # FA3 computes the few tokens behind a long cached prefix with other bits than a cold prompt, in SGLang too.
        assert_alone(server, turns=backend != "fa3")
        assert_ran_sparse(server, config)
