"""Anchor attention over generated stripes of one strength, in chunks of any size, by the reference."""

from typing import Any

import pytest
from anchor_sizes import GROUP, Measured, inputs, require_bit_equal_groups, require_nearly_as_much

from eval.lab.structured.generator import make_qkv
from eval.lab.structured.structure import Recipe
from sglang_sparse_kernels.anchor_prefill import cases


def with_stripes(length: int) -> dict[str, Any]:
    """A prompt with stripes of one strength and an uneven background."""
    arguments = inputs(0, length, 7.0)
    q, k, _ = make_qkv(length, 2, 1, 64, Recipe(), 0, "cpu")
    slots = cases.row_slots(arguments["page_table"], 0, length, arguments["page_size"])
    arguments["q"], arguments["k_cache"][slots] = q.float(), k.float()
    return arguments


@pytest.fixture(scope="module")
def prompt() -> dict[str, Any]:
    """Three groups and a part of one."""
    return with_stripes(3 * GROUP + 500)


def test_chunks_of_whole_groups_are_bit_equal(prompt: dict[str, Any]) -> None:
    require_bit_equal_groups(prompt)


def test_chunks_that_cut_groups_keep_nearly_as_much_attention(prompt: dict[str, Any]) -> None:
    require_nearly_as_much(prompt)


@pytest.mark.parametrize(
    ("length", "dense", "bound"),
    [
        *((length, 0, 0.005) for length in (GROUP + 750, GROUP + 1000, 2 * GROUP, 2 * GROUP + 700)),
        # As by default, and less, behind which the first sparse group is a larger part of a short prompt.
        (5 * GROUP + 1000, 4 * GROUP, 0.005),
        (3 * GROUP, 2 * GROUP, 0.005),
        (2 * GROUP + 1000, GROUP, 0.0075),
    ],
)
def test_shorter_prompts_and_those_that_begin_dense(length: int, dense: int, bound: float) -> None:
    """Within half a point over all queries of the prompt; dense ones lend the first sparse group nothing."""
    measured = Measured(with_stripes(length), dense)
    for chunk in (64, 80, 128, 300, 777, 1500):
        found = measured.differences(measured.parts(chunk))
        lost = max(map(abs, found)) * (length - GROUP)
        assert lost / length < bound and lost / (length - dense) < 0.015 + (not dense), f"chunks of {chunk}: {found}"
