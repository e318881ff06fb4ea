"""Page tables: reference against loops, Triton against the reference, and what neither may touch."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_sparse_kernels.page_table import load_page_table, reference
from sglang_sparse_kernels.page_table.cases import CASES, POISON, Case, make


def run_reference(arguments: dict[str, Any]) -> torch.Tensor:
    table = arguments["page_table"].clone()
    reference.load_page_table(**{**arguments, "page_table": table})
    return table


def assert_equals_the_reference(arguments: dict[str, Any]) -> None:
    expected = run_reference(arguments)
    load_page_table(**arguments)
    assert torch.equal(arguments["page_table"], expected)


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_reference_reads_the_first_slot_of_every_page_held(case: Case) -> None:
    arguments = make(case, "cpu")
    got = run_reference(arguments)
    for row, held in enumerate([*case.n_pages, *[0] * case.padding]):
        for page in range(case.width):
            expected = POISON
            if page < held:
                request = arguments["req_pool_indices"][row]
                expected = int(arguments["req_to_token"][request, page * case.page_size]) // case.page_size
                assert expected > 0
            assert got[row, page] == expected


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_the_reference(case: Case, device: str) -> None:
    assert_equals_the_reference(make(case, device))


def test_strided_tables(device: str) -> None:
    """Rows of a wider table, and a context that ends inside its last page."""
    arguments = make(Case((3, 5, 2), 1, 16, 5), device)
    arguments["req_to_token"] = torch.cat([arguments["req_to_token"]] * 2, dim=1)[:, : 4 * 16 + 1]
    wide = torch.cat([arguments["page_table"]] * 2, dim=1)
    arguments["page_table"] = wide[:, :5]
    assert_equals_the_reference(arguments)
    assert (wide[:, 5:] == POISON).all()


@given(
    seed=st.integers(0, 2**31),
    n_pages=st.lists(st.integers(0, 40), max_size=4),
    padding=st.integers(0, 2),
    page_size=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ragged_rows(
    device: str, seed: int, n_pages: list[int], padding: int, page_size: int, index_dtype: torch.dtype
) -> None:
    assert_equals_the_reference(make(Case(tuple(n_pages), padding, page_size, 48, index_dtype), device, seed))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widest": 13}, "widest must be from 0 to 12 pages, got 13"),
        ({"req_to_token": torch.zeros(6, 33, dtype=torch.int32)}, "widest must be from 0 to 3 pages, got 12"),
        ({"req_pool_indices": torch.zeros(4, dtype=torch.int64)}, "at most 3 entries, got 4"),
        ({"page_size": 12}, "power of two"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_page_table(**{**make(CASES[0], "cpu"), **change})
