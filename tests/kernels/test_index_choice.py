"""Choosing from index logits of rows that begin anywhere, and the slots of what was chosen: in parts, as if in one."""

import pytest
import torch
from peak_memory import Peak, collect_after
from triton_interpreter import INTERPRETED

from sglang_sparse_kernels.index_topk import choose, portable
from sglang_sparse_kernels.index_topk.choose import queries_at_once, scratch_bytes, select, slots_of

QUERIES, WIDTH, TOPK, AT_ONCE = 20, 256, 24, 3
CPU = torch.device("cpu")


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "LOGITS_BYTES", 4 * WIDTH * AT_ONCE + 4)
    monkeypatch.setattr(choose, "LOOKED_UP", 7)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with padded rows, lengths and first columns of queries of two requests; some see fewer than are taken."""
    logits = torch.randn(QUERIES, WIDTH + 4, generator=torch.Generator().manual_seed(0))[:, :WIDTH]
    first = torch.tensor([0] * 12 + [150] * 8, dtype=torch.int32)
    lengths = torch.cat([torch.arange(139, 151), torch.arange(20, 28)]).int()
    return logits, lengths, first


@pytest.mark.usefixtures("in_parts")
def test_each_query_chooses_among_its_own() -> None:
    logits, lengths, first = inputs()
    given = logits.clone()
    assert queries_at_once(WIDTH, CPU) == AT_ONCE and queries_at_once(10**9, CPU) == 1
    chosen = select(logits, lengths, TOPK, first)
    for query in range(QUERIES):
        begin, length = int(first[query]), int(lengths[query])
        expected = given[query, begin : begin + length].topk(min(TOPK, length)).indices.sort().values.tolist()
        assert chosen[query].tolist() == expected + [-1] * (TOPK - len(expected))


@pytest.mark.usefixtures("in_parts")
def test_slots_of_many_queries() -> None:
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randint(-1, 256, (QUERIES, TOPK), generator=generator, dtype=torch.int32)
    table = torch.randperm(8, generator=generator).view(2, 4).int()
    rows = torch.arange(QUERIES, dtype=torch.int32) % 2
    out = torch.empty_like(chosen)
    assert slots_of(chosen, table, rows, None, out) is out
    for query in range(QUERIES):
        pages = table[query % 2].tolist()
        assert out[query].tolist() == [-1 if p < 0 else pages[p // 64] * 64 + p % 64 for p in chosen[query].tolist()]
    numbered = slots_of(chosen, table, rows, 100 * rows.long())
    assert (
        torch.equal(numbered, torch.where(chosen < 0, -1, chosen + 100 * rows[:, None])) and numbered.dtype == out.dtype
    )


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.usefixtures("in_parts")
def test_what_is_allocated_is_in_scratch_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    collect_after(monkeypatch, portable, "page_topk")
    logits, lengths, first = inputs()
    with Peak() as peak:
        select(logits, lengths, TOPK, first)
    # What grows with the queries: the selection twice, a mask of it and a few numbers each; and the columns' numbers.
    others = QUERIES * (TOPK * (4 + 4 + 4 + 1) + 5 * 4) + 4 * WIDTH
    bound = scratch_bytes(QUERIES, WIDTH, CPU, given=True)
    assert bound == 5 * (WIDTH * AT_ONCE + 1) < peak.nbytes <= bound + others
    # The width is that of a row, and the logits of a pass may be of several.
    assert bound == scratch_bytes(1, WIDTH // 2, CPU, given=True)
    assert scratch_bytes(2, WIDTH, CPU, given=False) == 4 * WIDTH * 2
