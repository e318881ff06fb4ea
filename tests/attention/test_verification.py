"""A verification that runs sparse, through the backend: several tokens of a row over one selection, page by page."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_utils.capture_mode import _set_capture_attention_variant
from small_backend import (
    ALL,
    DIM,
    HEADS,
    HELD,
    KV_HEADS,
    LAYERS,
    PAGE,
    PAPER,
    SCALING,
    SOME,
    WIDTH,
    attention,
    layer_of,
    make_backend,
    selected_pages,
    slots_of,
)
from triton_interpreter import INTERPRETED

from sglang_sparse.attention import cuda_graphs
from sglang_sparse.attention.plan import PLAN, plan_decode
from sglang_sparse.config.settings import build
from sglang_sparse.methods.aux_buffers import page_ends


def verification(backend: Any, held: tuple[int, ...] = HELD) -> Any:
    """The batch of a verification, without its plan, as SGLang makes it up to warm up."""
    table = backend.dense.req_to_token_pool.req_to_token
    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(held),
        req_pool_indices=torch.arange(len(held)),
        seq_lens=torch.tensor(held),
        seq_lens_cpu=torch.tensor(held),
        out_cache_loc=slots_of(table, held, [length + WIDTH for length in held]),
    )


def run_layer(backend: Any, batch: Any, layer: int, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and output of a layer, ``[rows, WIDTH, heads, dim]``."""
    tokens = len(batch.out_cache_loc)
    q = torch.randn(tokens, HEADS * DIM)
    k, v = (torch.randn(tokens, KV_HEADS, DIM) for _ in range(2))
    output = backend.forward(q, k, v, layer_of(layer), batch, **more)
    assert output.shape == q.shape
    return q.view(-1, WIDTH, HEADS, DIM), output.view(-1, WIDTH, HEADS, DIM)


def assert_attends(
    backend: Any, q: torch.Tensor, output: torch.Tensor, layer: int, pages: Any = None, **more: Any
) -> None:
    for row in range(len(HELD)):
        for token in range(WIDTH):
            chosen = None if pages is None else pages[row]
            expected = attention(backend, row, token, q[row, token], layer, chosen, **more)
            torch.testing.assert_close(output[row, token].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(params=["reference", "triton"])
def kernels(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "triton":
        if not INTERPRETED:
            pytest.skip("the interpreter needs a machine without a GPU")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return request.param


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("more", [{}, {"sinks": torch.linspace(2, 6, HEADS).bfloat16()}], ids=["plain", "sinks"])
def test_all_pages_are_dense_causal_attention(more: dict[str, torch.Tensor]) -> None:
    backend: Any = make_backend(ALL)
    batch = verification(backend)
    backend.init_forward_metadata(batch)
    for layer in LAYERS:
        q, output = run_layer(backend, batch, layer, **more)
        assert_attends(backend, q, output, layer, **more)
    assert backend.dense.attended == 0 and backend.counters.extends == 0
    (plan,) = backend.counters.decodes
    assert plan.groups[0].n_pages.tolist() == [-(-(length + WIDTH) // PAGE) for length in HELD]


def test_nothing_keeps_the_buffers_of_a_batch_while_larger_ones_are_made() -> None:
    backend: Any = make_backend(ALL)
    backend.init_forward_metadata(verification(backend, HELD[:2]))
    smaller, allocate = weakref.ref(backend.view), backend._allocate

    def allocate_larger(rows: int) -> Any:
        gc.collect()
        assert smaller() is None
        return allocate(rows)

    backend._allocate = allocate_larger
    backend.init_forward_metadata(verification(backend))
    assert len(backend.view.n_pages) == len(HELD)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("fields", [SOME, PAPER], ids=["votes", "paper"])
def test_a_selection_is_shared_by_the_tokens_of_a_row(fields: dict[str, Any]) -> None:
    """Each sees of the pages what is not behind it; the newest two are among them, which the tokens are in."""
    backend: Any = make_backend(fields)
    batch = verification(backend)
    backend.init_forward_metadata(batch)
    table = backend.dense.req_to_token_pool.req_to_token
    for layer in LAYERS:
        q, output = run_layer(backend, batch, layer)
        pages = selected_pages(backend)
        for row, length in enumerate(HELD):
            last = -(-(length + WIDTH) // PAGE)
            newest = table[row, [(last - 2) * PAGE, (last - 1) * PAGE]].long() // PAGE
            assert all(
                mine[-2:].tolist() == newest.tolist() and len(mine) == max(4, -(-last // 4)) for mine in pages[row]
            )
        assert_attends(backend, q, output, layer, pages)
        # What a step of one token would choose, the first of these.
        view = replace(backend.view, logit_scale=SCALING)
        asked = backend.groups.methods[0].select(view, layer, q[:, 0].contiguous(), backend._pools)
        assert [[mine.tolist() for mine in row] for row in pages] == [
            [asked.indices[row, head, : asked.counts[row, head]].tolist() for head in range(KV_HEADS)]
            for row in range(len(HELD))
        ]


def test_the_pages_that_it_wrote_are_summarised() -> None:
    backend: Any = make_backend(SOME)
    batch = verification(backend)
    backend.init_forward_metadata(batch)
    for layer in LAYERS:
        run_layer(backend, batch, layer)
    (spec,) = backend._pools.specs
    found = {layer: backend._pools.buffer(spec.name, layer).clone() for layer in LAYERS}
    table = backend.dense.req_to_token_pool.req_to_token
    held = slots_of(table, [0] * len(HELD), [length + WIDTH for length in HELD])
    backend.decoding.refresh({PAGE: page_ends(held, PAGE)})
    for layer in LAYERS:
        assert torch.equal(found[layer], backend._pools.buffer(spec.name, layer))


def test_short_rows_are_left_to_the_dense_backend() -> None:
    """Their lengths count with the drafts; what the scheduler has planned goes before what is made up here."""
    backend: Any = make_backend({"crossover_tokens": 0, "min_seq_len": max(HELD) + WIDTH + 1})
    batch = verification(backend)
    backend.init_forward_metadata(batch)
    assert backend.view is None and not backend.counters.decodes[-1].sparse
    run_layer(backend, batch, 0)
    assert backend.dense.attended == 1
    backend.groups = build("resa", {"page_size": PAGE, "crossover_tokens": 0, "min_seq_len": max(HELD) + WIDTH}).decode
    backend.init_forward_metadata(batch)
    assert backend.counters.decodes[-1].groups[0].covered.tolist() == [True, False, True, True]
    setattr(batch, PLAN, plan_decode(backend.groups, torch.tensor(HELD)))
    backend.begin(batch)
    backend.init_forward_metadata(batch)
    assert backend.view is None


def test_a_server_that_verifies_densely_selects_nothing() -> None:
    """As with lossless decoding, whose drafts are the sparse steps."""
    backend: Any = make_backend(ALL)
    backend.verified = 0
    batch = verification(backend)
    backend.init_forward_metadata(batch)
    assert backend.view is None and backend.counters.decodes == []
    run_layer(backend, batch, 0)
    assert backend.dense.attended == 1


def test_both_graphs_of_a_verification() -> None:
    """A replay takes the graph of its plan; padding rows attend to nothing, and their slot 0 summarises nothing."""
    backend: Any = make_backend(ALL)
    backend.dense.init_cuda_graph_state = lambda *_: None
    backend._graph_tokens = 0
    backend.init_cuda_graph_state(len(HELD) + 1, (len(HELD) + 1) * WIDTH)
    variants = cuda_graphs.GraphVariants(backend, build("resa", {"rectify_interval": 0}))
    assert variants.capture_labels == (cuda_graphs.DENSE, cuda_graphs.SPARSE)
    batch = verification(backend)
    assert variants.select(batch) == cuda_graphs.SPARSE
    for label, sparse in ((cuda_graphs.DENSE, False), (cuda_graphs.SPARSE, True)):
        _set_capture_attention_variant(label)
        try:
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
        finally:
            _set_capture_attention_variant(None)
        assert (backend.view is not None) == sparse
    assert backend.view.n_pages.count_nonzero() == 0 and backend.view.queries == WIDTH
    padding = torch.zeros(WIDTH, dtype=torch.int64)
    padded = SimpleNamespace(
        **{**vars(batch), "batch_size": len(HELD) + 1, "num_padding": 1},
    )
    padded.out_cache_loc = torch.cat([batch.out_cache_loc, padding])
    backend.init_forward_metadata_out_graph(padded)
    q, output = run_layer(backend, padded, LAYERS[-1])
    assert output[-1].count_nonzero() == 0
    assert_attends(backend, q[:-1], output[:-1], LAYERS[-1])
