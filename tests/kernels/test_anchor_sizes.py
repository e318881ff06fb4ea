"""Anchor attention at the sizes of a real server, blocks of 128 and groups of 2,048, by the reference."""

from typing import Any

import pytest
import torch
from anchor_sizes import GROUP, inputs, require_bit_equal_groups, require_nearly_as_much, run

from sglang_sparse_kernels.anchor_prefill import cases

LENGTHS = [1, 127, 128, 129, 2047, 2048, 2049, 4096, 10_000]


def dense(arguments: dict[str, Any], prefix: int, rows: list[int]) -> torch.Tensor:
    """Causal attention of some queries in float64."""
    slots = cases.row_slots(arguments["page_table"], 0, prefix + len(arguments["q"]), arguments["page_size"])
    keys, values = (arguments[name][slots, 0].double() for name in ("k_cache", "v_cache"))
    found = []
    for row in rows:
        seen = prefix + row + 1
        logits = arguments["q"][row].double() @ keys[:seen].T * arguments["sm_scale"]
        found.append(logits.softmax(-1) @ values[:seen])
    return torch.stack(found)


def some(length: int) -> list[int]:
    """Rows around the edges of blocks and groups, and the last one."""
    edges = (0, 1, 126, 127, 128, 2047, 2048, 2049, 4095, 4096, 6143, 6144)
    return sorted({row for row in (*edges, length - 1) if row < length})


@pytest.mark.parametrize("prefix", [0, 2048, 3001])
@pytest.mark.parametrize("length", LENGTHS)
def test_infinite_theta_is_dense_attention(length: int, prefix: int) -> None:
    arguments = inputs(prefix, length, float("inf"))
    rows = some(length)
    got, expected = run(arguments, prefix, length)[rows].double(), dense(arguments, prefix, rows)
    assert (got - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("chunk", [512, 777, 2048, 8192])
def test_chunks_of_any_size_are_dense_attention(chunk: int) -> None:
    arguments = inputs(130, 6200, float("inf"))
    rows = some(6200)
    got, expected = run(arguments, 130, chunk)[rows].double(), dense(arguments, 130, rows)
    assert (got - expected).norm() < 1e-5 * expected.norm()


@pytest.fixture(scope="module")
def prompt() -> dict[str, Any]:
    """Three groups and a part of one, with stripes of many strengths."""
    return inputs(0, 3 * GROUP + 500, 7.0)


def test_chunks_of_whole_groups_are_bit_equal(prompt: dict[str, Any]) -> None:
    require_bit_equal_groups(prompt)


def test_chunks_that_cut_groups_keep_nearly_as_much_attention(prompt: dict[str, Any]) -> None:
    require_nearly_as_much(prompt)
