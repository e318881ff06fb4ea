"""The CUDA kernel of the votes without a GPU: its source as C++, its threads taking turns."""

import ctypes
import math
from typing import Any

import pytest
import torch
from cuda_library import build_kinds

from sglang_sparse_kernels.block_mass.cuda import float_bits
from sglang_sparse_kernels.common import nvrtc
from sglang_sparse_kernels.common.launch import LOG2_E
from sglang_sparse_kernels.page_centroids import HEADER
from sglang_sparse_kernels.page_centroids.reference import unpack
from sglang_sparse_kernels.page_vote import cuda
from sglang_sparse_kernels.page_vote.cases import BF16, FP16, Case, make

# Dimension, group, centroids, type of the queries.
KINDS = [(128, 4, 6, BF16), (64, 7, 6, BF16), (64, 1, 1, FP16), (128, 8, 8, FP16)]
MACROS = (
    "DIM GROUP COUNT QUERY RESIDENT DEPTH BFLOAT16 FLOAT16 KIND WARPS PAGES HEADER OTHERS RECORD QUARTER WORDS CHUNKS "
    "ZERO_LEVEL LARGEST SHIFT INFINITE"
)
KERNEL = """
#define page_vote kernel_{number}
#define DIM {DIM}
#define GROUP {GROUP}
#define COUNT {COUNT}
#define RECORD {RECORD}
#define QUERY {QUERY}
#define RESIDENT {RESIDENT}
#define DEPTH {DEPTH}
#define KIND 1
namespace kind_{number} {{
{products}
#undef KIND
#include "{source}"
}}
extern "C" void run_{number}(
    unsigned blocks, unsigned rows, const unsigned short* q, const unsigned char* records, const int* table,
    const int* n_pages, float* logits, float* parts, long long q_row, long long q_head, long long stride,
    long long width, long long tiles, long long heads, long long factor, long long ready) {{
    launch(blocks, rows, 32 * WARPS, 1, [=] {{
        kind_{number}::page_vote(q, records, table, n_pages, logits, parts, q_row, q_head, stride, width, tiles, heads,
                                 factor, ready);
    }});
}}
#undef page_vote
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel of every kind."""
    return build_kinds(tmp_path_factory.mktemp("cuda"), cuda, KERNEL, KINDS, MACROS)


def on_cpu(
    library: ctypes.CDLL, number: int, given: dict[str, Any], blocks: int, ready: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and what each warp's pages add up to; places that the kernel leaves unwritten are NaN."""
    q, summary, table = given["q"], given["summary"], given["page_table"]
    heads, warps = summary.shape[1], blocks * cuda.WARPS
    logits = torch.full((*q.shape[:2], table.shape[1]), math.nan)
    parts = torch.full((*q.shape[:2], warps, 2), math.nan)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (q, summary, table, given["n_pages"], logits, parts)]
    sizes = (q.stride(0), q.stride(1), table.stride(0), table.shape[1], warps, heads)
    sizes = (*sizes, float_bits(given["sm_scale"] * LOG2_E), int(ready))
    library[f"run_{number}"](heads * blocks, len(q), *pointers, *map(ctypes.c_longlong, sizes))
    return logits, parts


def expected_of(given: dict[str, Any]) -> torch.Tensor:
    """Each head's logit of each page, ``[B, Hq, M]`` float64, to the base 2."""
    q, summary = given["q"].double(), given["summary"]
    pages = given["page_table"].clamp(0, len(summary) - 1).long()
    vectors = unpack(summary[pages], q.shape[2]).double()
    grouped = q.unflatten(1, (summary.shape[1], -1)) * given["sm_scale"]
    products = torch.einsum("bhgd,bmhvd->bhgmv", grouped, vectors)
    halves = math.log(2) * torch.arange(vectors.shape[3])
    return (products - halves).logsumexp(-1).flatten(1, 2) * LOG2_E


def case_of(kind: tuple[int, int, int, torch.dtype], n_pages: tuple[int, ...], **more: Any) -> Case:
    dim, group, count, query = kind
    return Case(n_pages, 2, group, dim, query, BF16, centroids=count, **more)


@pytest.mark.parametrize("number", range(len(KINDS)), ids=[str(kind) for kind in KINDS])
def test_logits_and_their_sums(number: int, library: ctypes.CDLL) -> None:
    """Rows of no page, of one, of one more than a warp takes; strided queries; a table with anything beyond."""
    given = make(case_of(KINDS[number], (150, 0, 17, 1), width=155), "cpu")
    q = given["q"]
    given["q"] = torch.cat([q, torch.randn_like(q)], dim=1)[:, : q.shape[1]]
    expected, held = expected_of(given), torch.arange(155) < given["n_pages"][:, None]
    given["page_table"].masked_fill_(~held, 2**31 - 1)
    for blocks, ready in ((1, False), (2, True)):
        logits, parts = on_cpu(library, number, given, blocks, ready)
        assert logits.isnan().equal(~held[:, None].expand_as(logits))
        there = held[:, None].expand_as(logits)
        torch.testing.assert_close(logits[there].double(), expected[there], rtol=1e-3, atol=2e-3)
        for row, n_pages in enumerate(given["n_pages"].tolist()):
            mine = logits[row, :, : max(n_pages - 1, 0)].double()
            most, total = parts[row].double().unbind(-1)
            assert total.isfinite().all() and ((total == 0) == (most == -math.inf)).all()
            if not mine.shape[1]:
                assert (total == 0).all()
                continue
            assert torch.equal(most.amax(1), mine.amax(1))
            base = mine.amax(1, keepdim=True)
            together = (total * (most - base).exp2()).sum(1)
            torch.testing.assert_close(together, (mine - base).exp2().sum(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("number", range(2), ids=[str(kind) for kind in KINDS[:2]])
def test_nan_of_a_record_stays_in_its_page(number: int, library: ctypes.CDLL) -> None:
    given = make(case_of(KINDS[number], (20,)), "cpu")
    given["summary"][given["page_table"][0, 3], 1, HEADER + 5] = 0x7F
    logits, parts = on_cpu(library, number, given, 1, False)
    group = KINDS[number][1]
    assert logits[0].isnan().nonzero().tolist() == [[head, 3] for head in range(group, 2 * group)]
    assert not parts.isnan().any()


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda _: True)
    for capability, expected in (((8, 6), False), ((9, 0), True)):
        monkeypatch.setattr(cuda, "capability", lambda _, found=capability: found)
        assert cuda.takes(**{name: make(case_of(KINDS[0], (4,)), "cpu")[name] for name in ("q", "summary")}) == expected
    for case in (case_of((128, 9, 6, BF16), (4,)), case_of((96, 4, 6, BF16), (4,)), case_of((128, 4, 0, BF16), (4,))):
        given = make(case, "cpu")
        assert not cuda.takes(given["q"], given["summary"])
    given = make(case_of(KINDS[0], (4,)), "cpu")
    assert not cuda.takes(given["q"].float(), given["summary"])
    # Heads are read 16 bytes at a time.
    shifted = torch.cat([given["q"], given["q"]], dim=2)[:, :, 4 : 4 + given["q"].shape[2]]
    assert not cuda.takes(shifted, given["summary"])
