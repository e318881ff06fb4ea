"""Anchor attention at the sizes of a real server, blocks of 128 and groups of 2,048, by its kernels."""

from typing import Any

import pytest
import torch
from anchor_runs import chunked, relative_error, run_triton

from sglang_sparse_kernels.anchor_prefill import anchor_prefill, cases
from sglang_sparse_kernels.anchor_prefill.cases import Case, make

pytestmark = pytest.mark.gpu

LENGTHS = (1, 127, 128, 129, 2047, 2048, 2049, 4096, 10_000)
BLOCK, STEP, GROUP = 128, 16, 2048
HEADS, SHARE = 2, 2
# Relative L2 error.
TOLERANCE = 1e-2
KINDS = [(dim, dtype) for dim in (64, 128) for dtype in (torch.bfloat16, torch.float16)]


def inputs(
    prefixes: tuple[int, ...], extends: tuple[int, ...], dim: int, dtype: torch.dtype, theta: float, device: str
) -> dict[str, Any]:
    case = Case(prefixes, extends, 16, HEADS, SHARE, dim, dtype, dtype, block_size=BLOCK, step=STEP, theta=theta)
    return make(case, device)


def in_chunks(arguments: dict[str, Any], prefix: int, chunk: int) -> torch.Tensor:
    """A prompt of one row in chunks behind a prefix."""
    chunks = [len(part) for part in arguments["q"].split(chunk)]
    return chunked(arguments, chunks, run_triton, prefix, STEP, BLOCK)


def dense(arguments: dict[str, Any], row: int, q: torch.Tensor, prefix: int) -> torch.Tensor:
    """Causal attention of a row's queries in float64, a head and a thousand queries at a time."""
    slots = cases.row_slots(arguments["page_table"], row, prefix + len(q), arguments["page_size"])
    positions = torch.arange(prefix + len(q), device=q.device)
    found = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for head in range(q.shape[1]):
        keys, values = (arguments[name][slots, head // SHARE].double() for name in ("k_cache", "v_cache"))
        for first in range(0, len(q), 1000):
            part = q[first : first + 1000, head].double()
            unseen = positions > positions[prefix + first : prefix + first + len(part), None]
            logits = (part @ keys.T * arguments["sm_scale"]).masked_fill_(unseen, float("-inf"))
            found[first : first + len(part), head] = logits.softmax(dim=-1) @ values
    return found


@pytest.mark.parametrize("prefix", [0, 2048, 3001])
@pytest.mark.parametrize(("dim", "dtype"), KINDS)
def test_infinite_theta_is_dense_attention(prefix: int, dim: int, dtype: torch.dtype, device: str) -> None:
    """Prompts of all lengths in one pass."""
    arguments = inputs((prefix,) * len(LENGTHS), LENGTHS, dim, dtype, float("inf"), device)
    stats = torch.zeros(2, dtype=torch.int64, device=device)
    outs = anchor_prefill(**arguments, stats=stats).split(LENGTHS)
    for row, (got, q) in enumerate(zip(outs, arguments["q"].split(LENGTHS), strict=True)):
        assert relative_error(got, dense(arguments, row, q, prefix)) < TOLERANCE, f"{len(q)} tokens"
    assert stats[0] == stats[1] > 0


@pytest.mark.parametrize("prefix", [0, 3001])
@pytest.mark.parametrize(("dim", "dtype"), KINDS)
def test_chunks_of_any_size_are_dense_attention(prefix: int, dim: int, dtype: torch.dtype, device: str) -> None:
    arguments = inputs((prefix,), LENGTHS[-1:], dim, dtype, float("inf"), device)
    expected = dense(arguments, 0, arguments["q"], prefix)
    for chunk in (512, 777, 2048, 8192):
        assert relative_error(in_chunks(arguments, prefix, chunk), expected) < TOLERANCE, f"chunks of {chunk}"


@pytest.mark.parametrize("prefix", [0, GROUP])
@pytest.mark.parametrize(("dim", "dtype"), KINDS)
def test_chunks_of_whole_groups_are_bit_equal(prefix: int, dim: int, dtype: torch.dtype, device: str) -> None:
    arguments = inputs((prefix,), LENGTHS[-1:], dim, dtype, 6.0, device)
    stats = torch.zeros(2, dtype=torch.int64, device=device)
    whole = anchor_prefill(**arguments, stats=stats)
    assert 0.05 < (stats[0] / stats[1]).item() < 0.95
    for chunk in (GROUP, 2 * GROUP, 4 * GROUP):
        assert torch.equal(in_chunks(arguments, prefix, chunk), whole), f"chunks of {chunk}"
