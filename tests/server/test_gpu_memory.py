"""Tests that a sparse server reports the GPU memory that the allocator reports."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from server_requests import ask, sparse_state

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CONFIG = {"active_ratio": 0.1, "min_pages": 4, "dense_fallback": "never"}
FLAGS = ("--attention-backend", "triton", "--dtype", "bfloat16", "--mem-fraction-static", "0.3")
TOKENS = 400
DENSE, SPARSE = {"sparse": False}, {"rectify_interval": 0}


@pytest.fixture(scope="module")
def server(serve, checkpoint) -> Iterator[Any]:
    with serve(checkpoint, *FLAGS, "--max-total-tokens", "400000", config=CONFIG) as server:
        yield server


def allocations_per_step(server: Any, prompt: list[int], options: dict[str, Any]) -> float:
    """Of decode alone: the steps beyond those of a short answer to the same prompt, whose pages are cached."""
    found = []
    for tokens in (8, 8, TOKENS):
        before = sparse_state(server)
        ask(server, prompt, tokens, options)
        after = sparse_state(server)
        found.append(
            (
                after["allocator"]["allocations"] - before["allocator"]["allocations"],
                after["decode_steps"] - before["decode_steps"],
            )
        )
    _, (short, few), (long, many) = found
    assert many - few >= TOKENS - 16
    return (long - short) / (many - few)


def test_summaries_take_what_they_were_accounted_for(server) -> None:
    state = sparse_state(server)
    assert state["aux_bytes_accounted"] > 10 * 2**20
    assert abs(state["aux_bytes_measured"] / state["aux_bytes_accounted"] - 1) < 0.01


def test_a_sparse_step_allocates_no_more_than_a_dense_one_and_raises_no_peak(server, prompts) -> None:
    """SGLang's own sampling allocates in every step; the graphs of decode attention must not add to it."""
    dense = allocations_per_step(server, prompts[-1], DENSE)
    peak = sparse_state(server)["allocator"]["peak_bytes"]
    sparse = allocations_per_step(server, prompts[-1], SPARSE)
    assert dense > 0
    assert sparse <= dense + 0.1
    assert sparse_state(server)["allocator"]["peak_bytes"] <= 1.01 * peak
