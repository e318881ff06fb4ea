"""Anchor attention at the sizes of a real server, blocks of 128 and groups of 2,048, by the reference."""

from typing import Any

import pytest
import torch

from sglang_sparse_kernels.anchor_prefill import cases, make_plan, reference
from sglang_sparse_kernels.anchor_prefill.cases import Case, make

LENGTHS = [1, 127, 128, 129, 2047, 2048, 2049, 4096, 10_000]
BLOCK, STEP, GROUP = 128, 16, 2048
FP32 = torch.float32


def inputs(prefix: int, length: int, theta: float) -> dict[str, Any]:
    case = Case((prefix,), (length,), 16, 1, 2, 64, FP32, FP32, block_size=BLOCK, step=STEP)
    arguments = make(case, "cpu")
    return {**arguments, "theta": torch.full_like(arguments["theta"], theta), "k_scale": 1.0, "v_scale": 1.0}


def run(arguments: dict[str, Any], prefix: int, chunk: int) -> torch.Tensor:
    """A prompt in chunks behind a prefix."""
    q, outs = arguments["q"], []
    for first in range(0, len(q), chunk):
        part = q[first : first + chunk]
        plan = make_plan([prefix + first], [len(part)], BLOCK, STEP, "cpu")
        out = torch.empty(*part.shape[:2], arguments["v_cache"].shape[2])
        outs.append(reference.anchor_prefill(**{**arguments, "q": part, "plan": plan}, out=out))
    return torch.cat(outs)


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


def test_chunks_of_whole_groups_are_bit_equal_and_others_leave_out_nearly_the_same() -> None:
    arguments = inputs(0, 3 * GROUP + 500, 6.0)
    whole = run(arguments, 0, 4 * GROUP)
    for chunk in (GROUP, 2 * GROUP):
        assert torch.equal(run(arguments, 0, chunk), whole)
    shares = []
    for chunk in (4 * GROUP, 777):
        stats = torch.zeros(2, dtype=torch.int64)
        run({**arguments, "stats": stats}, 0, chunk)
        shares.append((stats[0] / stats[1]).item())
    assert 0.1 < shares[0] < 0.9 and abs(shares[0] - shares[1]) < 0.05
