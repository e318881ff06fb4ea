"""Anchor attention at the sizes of a real server, blocks of 128 and groups of 2,048, by the reference."""

from typing import Any

import pytest
import torch

from eval.structured.generator import make_qkv
from eval.structured.structure import Recipe
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


@pytest.fixture(scope="module", params=[("recipe", 5.0), ("spread", 7.0)], ids=["one strength", "many strengths"])
def prompt(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Three groups and a part of one, with stripes of one or many strengths, and a theta between them and the rest.

    As in ``eval.bench_prefill`` the first dimension of the values is 1 in the initial block and 0 elsewhere.
    """
    kind, theta = request.param
    length = 3 * GROUP + 500
    arguments = inputs(0, length, theta)
    slots = cases.row_slots(arguments["page_table"], 0, length, arguments["page_size"])
    if kind == "recipe":
        q, k, _ = make_qkv(length, 2, 1, 64, Recipe(), 0, "cpu")
        arguments["q"], arguments["k_cache"][slots] = q.float(), k.float()
    arguments["v_cache"][slots, :, 0] = 0.0
    arguments["v_cache"][slots[:BLOCK], :, 0] = 1.0
    return arguments


def recall(arguments: dict[str, Any], got: torch.Tensor) -> float:
    """Attention mass that sparse queries keep: all keep the initial block, whose share grows by what is left out."""
    rows = list(range(GROUP, len(got), 7))
    return (dense(arguments, 0, rows)[..., 0] / got[rows, :, 0]).mean().item()


def test_chunks_of_whole_groups_are_bit_equal(prompt: dict[str, Any]) -> None:
    whole = run(prompt, 0, 4 * GROUP)
    for chunk in (GROUP, 2 * GROUP):
        assert torch.equal(run(prompt, 0, chunk), whole)


def test_chunks_that_cut_groups_keep_nearly_as_much_attention(prompt: dict[str, Any]) -> None:
    """They keep less where theta lies among stripes: each part of a group looks for keys with its own blocks only."""
    stats = torch.zeros(2, dtype=torch.int64)
    whole = recall(prompt, run({**prompt, "stats": stats}, 0, 4 * GROUP))
    assert 0.1 < (stats[0] / stats[1]).item() < 0.9 and 0.9 < whole < 1
    for chunk in (128, 256, 512, 777, 1500, 3000):
        assert abs(whole - recall(prompt, run(prompt, 0, chunk))) < 0.005, f"chunks of {chunk}"
