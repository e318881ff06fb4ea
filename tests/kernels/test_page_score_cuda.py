"""The CUDA kernel of the page score without a GPU: its source as C++, its threads taking turns."""

import ctypes
import math
from typing import Any

import pytest
import torch
from cuda_library import build_kinds

from sglang_sparse_kernels.common import nvrtc
from sglang_sparse_kernels.page_score import cuda, reference
from sglang_sparse_kernels.page_score.cases import BF16, FP8, FP16, Case, make

# Dimension, group, type of the queries and of the summaries.
KINDS = [(128, 4, BF16, BF16), (128, 4, BF16, FP8), (64, 7, FP16, FP16), (64, 1, FP16, FP8), (64, 2, BF16, BF16)]
KERNEL = """
#define page_score kernel_{number}
#define DIM {DIM}
#define GROUP {GROUP}
#define KIND {KIND}
#define QUERY {QUERY}
#define RESIDENT {RESIDENT}
namespace kind_{number} {{
{products}
#include "{source}"
}}
extern "C" void run_{number}(
    unsigned blocks, unsigned rows, const unsigned short* q, const unsigned char* summary, const int* table,
    const int* n_pages, float* out, long long q_row, long long q_head, long long stride, long long width,
    long long heads, long long local_pages, long long summaries_ready) {{
    launch(blocks, rows, 32 * WARPS, 1, [=] {{
        kind_{number}::page_score(q, summary, table, n_pages, out, q_row, q_head, stride, width, heads, local_pages,
                                  summaries_ready);
    }});
}}
#undef page_score
#undef DIM
#undef GROUP
#undef KIND
#undef QUERY
#undef RESIDENT
#undef WARPS
#undef PAGES
#undef BYTES
#undef EACH
#undef LOADS
#undef STEPS
#undef PARTS
#undef PADDING
#undef CHAINS
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel of every kind."""
    return build_kinds(tmp_path_factory.mktemp("cuda"), cuda, KERNEL, KINDS)


def on_cpu(library: ctypes.CDLL, arguments: dict[str, Any], blocks: int, ready: bool = False) -> torch.Tensor:
    """What the kernel scores; places that it leaves unwritten are -inf."""
    q, summary, table = arguments["q"], arguments["summary"], arguments["page_table"]
    heads, dim = summary.shape[1], q.shape[2]
    number = KINDS.index((dim, q.shape[1] // heads, q.dtype, summary.dtype))
    out = torch.full((len(q), heads, table.shape[1]), -math.inf)
    tensors = (q, summary, table, arguments["n_pages"], out)
    sizes = (q.stride(0), q.stride(1), table.stride(0), table.shape[1], heads, arguments["local_pages"], int(ready))
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    library[f"run_{number}"](heads * blocks, len(q), *pointers, *map(ctypes.c_longlong, sizes))
    return out


def expected_of(arguments: dict[str, Any]) -> torch.Tensor:
    shape = len(arguments["q"]), arguments["summary"].shape[1], arguments["page_table"].shape[1]
    return reference.page_score(**arguments, out=torch.empty(shape))


def case_of(kind: tuple[int, int, torch.dtype, torch.dtype], n_pages: tuple[int, ...], **more: Any) -> Case:
    dim, group, query, summary = kind
    return Case(n_pages, 2, group, dim, query, summary, **more)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(str(part).split(".")[-1] for part in kind))
def test_it_equals_the_reference(kind: tuple[int, int, torch.dtype, torch.dtype], library: ctypes.CDLL) -> None:
    """Rows of no page, of one, of one more than a warp takes; strided queries; a table with anything beyond."""
    arguments = make(case_of(kind, (70, 0, 17, 1), width=75, local_pages=2), "cpu")
    expected = expected_of(arguments)
    beyond = torch.arange(75) >= arguments["n_pages"][:, None]
    arguments["page_table"].masked_fill_(beyond, 2**31 - 1)
    q = arguments["q"]
    arguments["q"] = torch.cat([q, torch.randn_like(q)], dim=1)[:, : q.shape[1]]
    for blocks, ready in ((1, False), (2, True)):
        got = on_cpu(library, arguments, blocks, ready)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: str(kind[3]).split(".")[-1])
def test_a_query_of_any_size_keeps_its_precision(
    kind: tuple[int, int, torch.dtype, torch.dtype], library: ctypes.CDLL
) -> None:
    """Numbers a million times as large as others, and all of them far from what float16 holds."""
    for size in (1.0, 2.0**-40, 2.0**40) if kind[2] == BF16 else (1.0, 2.0**-8, 2.0**8):
        arguments = make(case_of(kind, (20,), local_pages=0), "cpu")
        arguments["q"][..., 1:] *= 2.0**-20 if kind[2] == BF16 else 2.0**-10
        arguments["q"] *= size
        # Of the large number nothing is left: what the small ones add up to is seen.
        arguments["summary"][:, :, :, 0] = 0
        expected, got = expected_of(arguments), on_cpu(library, arguments, 1)
        assert ((got - expected).abs() <= 1e-5 * expected.abs().max()).all() and expected.abs().max() > 0


@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: str(kind[3]).split(".")[-1])
def test_what_is_no_number(kind: tuple[int, int, torch.dtype, torch.dtype], library: ctypes.CDLL) -> None:
    """A NaN of a summary has its page selected, a NaN or an infinity of a query all pages of its head."""
    largest = torch.finfo(torch.float32).max
    arguments = make(case_of(kind, (9, 9, 9)), "cpu")
    page = arguments["page_table"][0, 3].item()
    bounds = arguments["summary"].float()
    bounds[page, 1, 0, 7] = math.nan
    arguments["summary"] = bounds.to(kind[3])
    for row, value in ((1, math.nan), (2, math.inf)):
        arguments["q"][row, 0, 5] = value
    got = on_cpu(library, arguments, 1)
    assert (got[0] == largest).sum(dim=1).tolist() == [0, 1] and got[0, 1, 3] == largest
    for row in (1, 2):
        assert (got[row] == largest).sum(dim=1).tolist() == [8, 0]
    assert (got[:, :, 8] == math.inf).all()


@pytest.mark.parametrize("dim", [0, 5, 62, 63])
def test_every_number_of_float8(dim: int, library: ctypes.CDLL) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8)
    arguments = make(Case((256,), 1, 1, 64, FP16, FP8, local_pages=0), "cpu")
    arguments["q"] = torch.zeros_like(arguments["q"])
    arguments["q"][0, 0, dim] = 1
    summary = torch.zeros_like(arguments["summary"].view(torch.uint8))
    summary[arguments["page_table"][0].long(), 0, 0, dim] = numbers.view(torch.uint8)
    arguments["summary"] = summary.view(FP8)
    got = on_cpu(library, arguments, 2)
    assert torch.equal(got[0, 0], numbers.float().nan_to_num(nan=torch.finfo(torch.float32).max))


def test_blocks() -> None:
    # 528 blocks of four warps at once on an H200: each warp takes two times 16 of 8,192 pages for each of 8 heads.
    assert cuda.blocks_of(8192, 8, 528) == 66 and cuda.blocks_of(4096, 64, 528) == 8
    assert cuda.blocks_of(100, 8, 528) == 2 and cuda.blocks_of(100, 1000, 528) == 1


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda _: True)
    monkeypatch.setattr(cuda, "capability", lambda _: (8, 0))

    def takes(query: torch.dtype, summary: torch.dtype, dim: int, first: int = 0) -> bool:
        entries = torch.zeros(3 * 2 * dim + first, dtype=summary)[first:].view(3, 1, 2, dim)
        return cuda.takes(torch.zeros(1, 2, dim, dtype=query), entries)

    assert takes(BF16, BF16, 128) and takes(FP16, BF16, 64) and takes(BF16, FP16, 128)
    # No other dimensions, no float32, no summaries that four lanes cannot read together, no float8 before Ada.
    assert not takes(BF16, BF16, 96) and not takes(torch.float32, BF16, 128) and not takes(BF16, torch.float32, 128)
    assert not takes(BF16, BF16, 128, first=4) and not takes(BF16, FP8, 128)
    monkeypatch.setattr(cuda, "capability", lambda _: (8, 9))
    assert takes(BF16, FP8, 128)
    monkeypatch.setattr(nvrtc, "available", lambda _: False)
    assert not takes(BF16, BF16, 128)
