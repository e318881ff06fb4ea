"""The operations of a decode step together, as a server calls them, and their replay as a CUDA graph."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from exact_decode import exact, worst_error

from sglang_sparse_kernels.common.testing import paged_batch, random_cache, seeded
from sglang_sparse_kernels.page_score import page_score
from sglang_sparse_kernels.page_score import reference as score_reference
from sglang_sparse_kernels.page_summary import update_page_summaries
from sglang_sparse_kernels.page_topk import page_topk
from sglang_sparse_kernels.page_topk import reference as topk_reference
from sglang_sparse_kernels.sparse_decode import sparse_decode

PAGE, LOCAL = 16, 2
NO_PAGE = 2**31 - 1
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """Batches of the same rows, by their lengths; none of the first one's rows grows. 0 is a padded row."""

    batches: tuple[tuple[int, ...], ...]
    kv_dtype: torch.dtype
    summary_dtype: torch.dtype
    heads: int
    group: int
    dim: int
    ratio: float
    min_pages: int
    layers: int = 2
    gpu_only: bool = False


KINDS = [(BF16, BF16), (BF16, FP8), (FP8, FP8)]
FEW = (300, 60, 17, 100), (100, 0, 5, 97)
SMALL = [Case(FEW, *kinds, heads=2, group=4, dim=64, ratio=0.5, min_pages=3) for kinds in KINDS]
LARGE = [
    ((131072,), (100001,)),
    ((65536,) * 8, (65536, 1, 40007, 0, 65535, 17, 65521, 50000)),
]
SERVED = [
    Case(batches, *kinds, heads=8, group=4, dim=128, ratio=0.1, min_pages=16, gpu_only=True)
    for batches in LARGE
    for kinds in KINDS
]


def make_step(case: Case, device: str) -> dict[str, Any]:
    """Caches, the summaries of all their pages, and what a server has for a batch, with its first one loaded."""
    generator = seeded(device, 0)
    rows = len(case.batches[0])
    batch = paged_batch(case.batches[0], PAGE, device, generator)
    width = batch.page_table.shape[1]

    def numbers(*shape: int) -> list[torch.Tensor]:
        return [random_cache(shape, case.kv_dtype, device, generator) for _ in range(case.layers)]

    cache = (batch.num_pages * PAGE, case.heads, case.dim)
    k_caches = numbers(*cache)
    summary = torch.zeros(batch.num_pages, case.heads, 2, case.dim, dtype=case.summary_dtype, device=device)
    summaries = [summary.clone() for _ in k_caches]
    update_page_summaries(k_caches, summaries, torch.arange(1, batch.num_pages + 1, device=device) * PAGE - 1, PAGE)
    int32 = {"dtype": torch.int32, "device": device}
    step = {
        "q": torch.randn(rows, case.heads * case.group, case.dim, device=device, generator=generator).bfloat16(),
        "keys": numbers(rows, case.heads, case.dim),
        "values": numbers(rows, case.heads, case.dim),
        "k_caches": k_caches,
        "v_caches": numbers(*cache),
        "summaries": summaries,
        "page_table": batch.page_table,
        "n_pages": batch.n_pages,
        "n_select": torch.zeros_like(batch.n_pages),
        "last_slots": batch.last_slots,
        "scores": torch.empty(rows, case.heads, width, device=device),
        "selected": (torch.empty(rows, case.heads, width, **int32), torch.empty(rows, case.heads, **int32)),
        "arrivals": torch.zeros(rows, case.heads, **int32),
        "stats": torch.zeros(4, dtype=torch.int64, device=device),
    }
    load(step, case, case.batches[0])
    return step | {"usual_pages": int(step["n_select"].max())}


def load(step: dict[str, Any], case: Case, lengths: tuple[int, ...]) -> None:
    """Make the rows those of another batch; what pads it writes to slot 0."""
    device = step["n_pages"].device
    tokens = torch.tensor(lengths, device=device)
    n_pages = (tokens + PAGE - 1) // PAGE
    newest = step["page_table"].gather(1, (n_pages[:, None] - 1).clamp(min=0))[:, 0]
    step["n_pages"].copy_(n_pages)
    step["n_select"].copy_((n_pages * case.ratio).ceil().clamp(min=case.min_pages) * (n_pages > 0))
    step["last_slots"].copy_(torch.where(n_pages > 0, newest * PAGE + (tokens - 1) % PAGE, 0))
    step["stats"].zero_()


def poison(step: dict[str, Any]) -> None:
    """Fill what layers hand on with what none may read."""
    step["scores"].fill_(float("nan"))
    for tensor in step["selected"]:
        tensor.fill_(NO_PAGE)


def run_step(step: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Query and output of each layer; all are what SGLang's layers do with them, but for the projections."""
    query, found, slots = step["q"], [], step["last_slots"]
    tables = step["page_table"], step["n_pages"]
    for layer, caches in enumerate(zip(step["k_caches"], step["v_caches"], strict=True)):
        for cache, new in zip(caches, (step["keys"][layer], step["values"][layer]), strict=True):
            cache.view(torch.uint8)[slots] = new.view(torch.uint8)
        scores = page_score(query, step["summaries"][layer], *tables, step["scores"], LOCAL, summaries_ready=True)
        pages = (*tables, step["n_select"], scores.shape[2])
        selection = page_topk(scores, *pages, step["selected"], step["stats"], tables_ready=True)
        scratch = {"usual_pages": step["usual_pages"], "arrivals": step["arrivals"]}
        output = sparse_decode(query, *caches, *selection, slots, PAGE, query.shape[2] ** -0.5, **scratch)
        found.append((query, output))
        query = query + output
    update_page_summaries(step["k_caches"], step["summaries"], slots, PAGE)
    return found


def attention(step: dict[str, Any], layer: int, query: torch.Tensor, *selection: torch.Tensor) -> torch.Tensor:
    """Attention of a layer to a selection in float64."""
    caches = {"k_cache": step["k_caches"][layer], "v_cache": step["v_caches"][layer]}
    chosen = {"indices": selection[0], "counts": selection[1], "last_slots": step["last_slots"]}
    return exact({"q": query, **caches, **chosen, "page_size": PAGE, "sm_scale": query.shape[2] ** -0.5})


def check_last_layer(step: dict[str, Any], query: torch.Tensor, output: torch.Tensor) -> None:
    """The scores, the selection and the output that the last layer has left are each those of its inputs."""
    tables = step["page_table"], step["n_pages"]
    scores, (indices, counts) = step["scores"], step["selected"]
    places = torch.arange(scores.shape[2], device=scores.device)
    held = (places < step["n_pages"][:, None])[:, None].expand_as(scores)
    expected = score_reference.page_score(query, step["summaries"][-1], *tables, torch.empty_like(scores), LOCAL)
    torch.testing.assert_close(scores[held], expected[held], rtol=1e-5, atol=1e-4)
    out = torch.empty_like(indices), torch.empty_like(counts)
    wanted = topk_reference.page_topk(scores, *tables, step["n_select"], len(places), out)
    assert torch.equal(counts, wanted[1])
    chosen = places < counts[..., None]
    assert torch.equal(indices[chosen], wanted[0][chosen])
    assert worst_error(output, attention(step, -1, query, indices, counts)) < 1e-2
    assert step["arrivals"].count_nonzero() == 0


def counted(step: dict[str, Any]) -> list[int]:
    """Return the amounts that the selections of a step add to its counters."""
    _, counts = step["selected"]
    held = step["n_pages"].sum() * counts.shape[1]
    return [len(step["k_caches"]) * int(count) for count in (counts.count_nonzero(), counts.sum(), held)] + [0]


@pytest.mark.parametrize("case", [*SMALL, *SERVED], ids=str)
def test_step_is_that_of_the_references(case: Case, device: str) -> None:
    step = make_step(case, device)
    for lengths in case.batches:
        load(step, case, lengths)
        poison(step)
        check_last_layer(step, *run_step(step)[-1])
        assert step["stats"].tolist() == counted(step)


@pytest.mark.parametrize("lengths", FEW, ids=str)
def test_first_layer_is_that_of_a_step_of_references(
    lengths: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step(SMALL[0], device)
    load(step, SMALL[0], lengths)
    got = run_step(step)[0][1]
    monkeypatch.setenv("SGLANG_SPARSE_REFERENCE", "1")
    assert worst_error(got, run_step(step)[0][1].double()) < 1e-2


def test_selecting_all_pages_is_dense_attention(device: str) -> None:
    step = make_step(SMALL[0], device)
    step["n_select"].copy_(step["n_pages"])
    heads = SMALL[0].heads
    every = step["page_table"][:, None].expand(-1, heads, -1), step["n_pages"][:, None].expand(-1, heads)
    for layer, (query, output) in enumerate(run_step(step)):
        assert worst_error(output, attention(step, layer, query, *every)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SMALL, *SERVED], ids=str)
def test_step_replays_as_a_cuda_graph_without_host_synchronisation_and_to_the_bit(case: Case) -> None:
    step = make_step(case, "cuda")
    run_step(step)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        replayed = run_step(step)
    for lengths in case.batches:
        load(step, case, lengths)
        expected = [output.clone() for _, output in run_step(step)]
        step["stats"].zero_()
        for _ in range(100):
            poison(step)
            for _, output in replayed:
                output.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(output, same) for (_, output), same in zip(replayed, expected, strict=True))
        check_last_layer(step, *replayed[-1])
        assert step["stats"].tolist() == [100 * count for count in counted(step)]
