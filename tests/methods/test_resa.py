"""ReSA's selection on a paged cache against a plain formulation, page by page."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import refused

from sglang_sparse.attention.batch import allocate_view
from sglang_sparse.config.request_options import parse_options
from sglang_sparse.config.settings import build
from sglang_sparse.methods.aux_buffers import AuxBuffers, page_ends
from sglang_sparse.methods.base import ModelShape
from sglang_sparse_kernels.page_centroids.reference import pack, unpack

PAGE, KV_HEADS, GROUP, DIM = 16, 2, 4, 64
SCALE = DIM**-0.5
SHAPE = ModelShape(1, KV_HEADS * GROUP, KV_HEADS, DIM, torch.float32)


def logits(config: Any, query: torch.Tensor, keys: torch.Tensor) -> float:
    """Return the logit that the tokens of a page, ``[tokens, dim]``, can have for a query, by their summary."""
    if config.summary == "minmax":
        return float(torch.maximum(query * keys.amax(0), query * keys.amin(0)).sum() * SCALE)
    written = torch.ones(1, len(keys), dtype=torch.bool)
    kept = unpack(pack(keys[None, :, None], written, config.centroids or 6), DIM)[0, 0]
    return float((kept @ query * SCALE - math.log(2) * torch.arange(len(kept))).logsumexp(0))


def naive(config: Any, keys: torch.Tensor, query: torch.Tensor) -> list[set[int]]:
    """Logical pages for each KV head; ``keys`` is ``[tokens, kv_heads, dim]`` in the order of positions."""
    pages, local = keys.split(PAGE), config.local_pages
    count = min(len(pages), max(config.min_pages, math.ceil(round(len(pages) * config.active_ratio, 9))))
    count = min(len(pages), config.token_budget // PAGE) if config.token_budget else count
    chosen = []
    for head in range(KV_HEADS):
        voters = query.view(KV_HEADS, GROUP, DIM)[head]
        voters = voters.mean(0, keepdim=True) if config.group == "mean_query" else voters
        each = torch.tensor([[logits(config, voter, page[:, head]) for page in pages] for voter in voters])
        scores = each.softmax(1).mean(0).log().tolist()
        scores[len(pages) - local :] = [math.inf] * local
        chosen.append(set(sorted(range(len(pages)), key=lambda j: (-scores[j], j))[:count]))
    return chosen


@pytest.mark.parametrize(
    "fields",
    [
        {"min_pages": 2},
        {"min_pages": 3, "local_pages": 3, "active_ratio": 0.25},
        {"min_pages": 3, "token_budget": 5 * PAGE + 3},
        {"min_pages": 3, "summary": "minmax", "group": "mean_query"},
        {"min_pages": 3, "summary": "minmax"},
        {"min_pages": 3, "centroids": 3, "group": "mean_query"},
    ],
)
def test_selection(fields: dict[str, object]) -> None:
    torch.manual_seed(3)
    settings = build("resa", fields)
    method, config = settings.method, settings.config
    lengths = [17, 160, 333, 640]
    aux = AuxBuffers(method.aux_specs(SHAPE), (0,), 200, PAGE, "cpu")
    cache = torch.randn(200 * PAGE, KV_HEADS, DIM)
    view = allocate_view(len(lengths), KV_HEADS, 40, 40, PAGE, torch.zeros(4, dtype=torch.int64))
    view = replace(view, logit_scale=SCALE)
    free = (torch.randperm(199) + 1).tolist()
    for row, length in enumerate(lengths):
        n_pages = -(-length // PAGE)
        table = torch.tensor([free.pop() for _ in range(n_pages)])
        view.page_table[row, :n_pages] = table
        view.n_pages[row] = n_pages
        slots = (table[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        aux.refresh({0: cache}, page_ends(slots, PAGE))
    view.n_select.copy_(torch.minimum(method.n_select(view.n_pages), view.n_pages))
    query = torch.randn(len(lengths), KV_HEADS * GROUP, DIM)
    selected = method.select(view, 0, query, aux)
    for row, length in enumerate(lengths):
        table = view.page_table[row].tolist()
        slots = (view.page_table[row, :, None].long() * PAGE + torch.arange(PAGE)).flatten()[:length]
        expected = naive(config, cache[slots], query[row])
        for head in range(KV_HEADS):
            count = int(selected.counts[row, head])
            ids = selected.indices[row, head].tolist()
            assert [table.index(page) for page in ids[:count]] == sorted(expected[head])
    assert view.stats.tolist() == [
        len(lengths) * KV_HEADS,
        int(view.n_select.sum()) * KV_HEADS,
        int(view.n_pages.sum()) * KV_HEADS,
        0,
    ]


@pytest.mark.parametrize(
    ("fields", "summary", "group"),
    [
        ({}, "centroids", "vote"),
        ({"summary_dtype": "fp8"}, "minmax", "mean_query"),
        ({"summary_dtype": "auto"}, "centroids", "vote"),
        ({"summary": "minmax", "summary_dtype": "fp8"}, "minmax", "vote"),
        ({"summary_dtype": "bf16", "group": "vote", "min_pages": 1}, "minmax", "vote"),
    ],
)
def test_a_config_of_the_time_before_centroids_means_what_it_did(
    fields: dict[str, object], summary: str, group: str
) -> None:
    config: Any = build("resa", fields).config
    assert (config.summary, config.group) == (summary, group)


def test_a_budget_in_tokens() -> None:
    pages = torch.tensor([3, 40, 8000], dtype=torch.int32)
    settings = build("resa", {"token_budget": 2050})
    # As a scheduler reads it, with all fields.
    assert build("resa", settings.resolved).config == settings.config
    assert settings.method.n_select(pages).tolist() == [128] * 3
    for fields, asked, count in (
        ({}, {"token_budget": 512.0}, [32] * 3),
        ({"active_ratio": 0.5}, {"token_budget": 512}, [32] * 3),
        ({"token_budget": 2048}, {"active_ratio": 0.5}, [16, 20, 4000]),
    ):
        options = parse_options(build("resa", fields), asked)
        assert options.decode.methods[0].n_select(pages).tolist() == count
    for fields, why in (
        ({"token_budget": 255}, "at least min_pages * page_size (256)"),
        ({"token_budget": 512, "active_ratio": 0.2}, "takes the place of active_ratio, which is 0.2"),
    ):
        with refused("token_budget", fields["token_budget"]) as caught:
            build("resa", fields)
        assert why in str(caught.value)
