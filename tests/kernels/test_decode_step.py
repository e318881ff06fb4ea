"""The operations of one decode step together, and their replay as a CUDA graph."""

from typing import Any

import pytest
import torch

from sglang_sparse_kernels.page_score import page_score
from sglang_sparse_kernels.page_summary import update_page_summary
from sglang_sparse_kernels.page_topk import page_topk
from sglang_sparse_kernels.sparse_decode import sparse_decode
from sglang_sparse_kernels.testing import paged_batch, random_cache, seeded

HEADS, GROUP, DIM, PAGE = 2, 4, 64, 16
MAX_SELECT = 24


def make_step(lengths: tuple[int, ...], device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Caches, summaries of every page, and page tables of one batch."""
    generator = seeded(device, seed)
    batch = paged_batch(lengths, PAGE, device, generator, width=24)
    shape = (batch.num_pages * PAGE, HEADS, DIM)
    k_cache, v_cache = (random_cache(shape, torch.bfloat16, device, generator) for _ in range(2))
    summary = torch.zeros(batch.num_pages, HEADS, 2, DIM, dtype=torch.bfloat16, device=device)
    full_pages = torch.arange(1, batch.num_pages, device=device) * PAGE + PAGE - 1
    update_page_summary(k_cache, summary, full_pages, PAGE)
    update_page_summary(k_cache, summary, batch.last_slots, PAGE)
    return {
        "q": torch.randn(len(lengths), HEADS * GROUP, DIM, device=device, generator=generator).bfloat16(),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "summary": summary,
        "page_table": batch.page_table,
        "n_pages": batch.n_pages,
        "n_select": (batch.n_pages // 2).clamp(min=1) * (batch.n_pages > 0),
        "last_slots": batch.last_slots,
        "arrivals": torch.zeros(len(lengths), HEADS, dtype=torch.int32, device=device),
    }


def run_step(step: dict[str, Any]) -> torch.Tensor:
    update_page_summary(step["k_cache"], step["summary"], step["last_slots"], PAGE)
    scores = page_score(step["q"], step["summary"], step["page_table"], step["n_pages"])
    selection = page_topk(scores, step["page_table"], step["n_pages"], step["n_select"], MAX_SELECT)
    caches = step["k_cache"], step["v_cache"]
    settings = {"page_size": PAGE, "sm_scale": DIM**-0.5, "arrivals": step["arrivals"]}
    return sparse_decode(step["q"], *caches, *selection, step["last_slots"], **settings)


def test_triton_step_equals_the_reference_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step((300, 0, 17, 100), device)
    got = run_step(step).float()
    monkeypatch.setenv("SGLANG_SPARSE_REFERENCE", "1")
    expected = run_step(step).float()
    assert ((got - expected).norm() / expected.norm()).item() < 1e-2


def test_selecting_all_pages_is_dense_attention(device: str) -> None:
    lengths = (300, 1, 17, 100)
    step = make_step(lengths, device)
    step["n_select"] = step["n_pages"]
    got = run_step(step).float()
    for row, length in enumerate(lengths):
        pages = step["page_table"][row, : step["n_pages"][row]].long()
        slots = (pages[:, None] * PAGE + torch.arange(PAGE, device=device)).flatten()[:length]
        keys, values = step["k_cache"][slots].float(), step["v_cache"][slots].float()
        query = step["q"][row].float().view(HEADS, GROUP, DIM)
        weights = torch.einsum("hgd,thd->hgt", query, keys).mul(DIM**-0.5).softmax(dim=-1)
        dense = torch.einsum("hgt,thd->hgd", weights, values).reshape(HEADS * GROUP, DIM)
        assert ((got[row] - dense).norm() / dense.norm()).item() < 1e-2


@pytest.mark.gpu
def test_step_replays_as_a_cuda_graph_without_host_synchronisation_and_to_the_bit() -> None:
    batches = [(300, 0, 17, 100), (0, 384, 200, 5)]
    static = make_step(batches[0], "cuda")
    run_step(static)  # compiles the kernels
    # The largest pool serves both batches.
    pools = {name: torch.zeros((64 * PAGE, HEADS, DIM), dtype=torch.bfloat16, device="cuda") for name in ("k", "v")}
    static.update(k_cache=pools["k"], v_cache=pools["v"])
    static["summary"] = torch.zeros(64, HEADS, 2, DIM, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = run_step(static)
    for seed, lengths in enumerate(batches):
        step = make_step(lengths, "cuda", seed)
        expected = run_step(step)
        for name, value in step.items():
            static[name][: len(value)] = value
        for _ in range(100):
            graph.replay()
            assert torch.equal(out, expected)
