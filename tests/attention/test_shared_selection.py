"""Drafts of a round that share a selection, through the backend: what is kept, reused, extended and charged."""

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
    MODEL,
    PAGE,
    PAGES,
    SOME,
    WIDTH,
    attention,
    layer_of,
    make_backend,
    selected_pages,
    slots_of,
)

from sglang_sparse.attention import memory
from sglang_sparse.attention.cuda_graphs import DENSE, LATER_DRAFT, SPARSE, GraphVariants
from sglang_sparse.attention.plan import PLAN
from sglang_sparse.config.settings import build
from sglang_sparse.methods.shared_selection import SharedSelection
from sglang_sparse.scheduler.exact_kv import _plan
from sglang_sparse.scheduler.partial_batch import BOUNDED, LATER

RESA = build("resa", {"rectify_interval": 0})


def sharing(fields: dict[str, Any], pages: int = PAGES) -> tuple[Any, GraphVariants]:
    """A backend that drafts, and its graphs."""
    backend: Any = make_backend(fields)
    backend.verified = 0
    backend._pools.shared = SharedSelection(LAYERS, KV_HEADS, pages, PAGE, WIDTH, "cpu")
    return backend, GraphVariants(backend, RESA)


def draft(backend: Any, step: int, rows: int = len(HELD), held: tuple[int, ...] = HELD, bound: int = 0) -> Any:
    """The batch of a draft of a round, whose first is 0, planned as the scheduler does and padded to `rows`."""
    table = backend.dense.req_to_token_pool.req_to_token
    lengths = torch.tensor([length + step + 1 for length in held])
    options = SimpleNamespace(decode=backend.groups, sparse=True)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_size=rows,
        num_padding=rows - len(held),
        req_pool_indices=torch.arange(len(held)),
        seq_lens=lengths,
        seq_lens_cpu=lengths + bound,
        out_cache_loc=torch.nn.functional.pad(slots_of(table, lengths - 1, lengths), (0, rows - len(held))),
    )
    setattr(batch, LATER, step > 0)
    setattr(batch, BOUNDED, bound > 0)
    setattr(batch, PLAN, _plan(backend, batch, [SimpleNamespace(options=options, compacted=False)] * len(held)))  # type: ignore[arg-type, list-item]
    backend.begin(batch)
    return batch


def run_layer(backend: Any, batch: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and output of a layer, ``[rows, heads * dim]``."""
    rows = batch.batch_size
    q, k, v = (torch.randn(rows, heads * DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q, backend.forward(q, k.view(rows, -1, DIM), v.view(rows, -1, DIM), layer_of(layer), batch)


def selections(backend: Any) -> int:
    """Return the number of selections so far, one for each layer, row and KV head."""
    return int(backend.counters.select_stats[0])


@pytest.mark.parametrize(("padding", "bound"), [(0, 0), (1, 0), (0, 3)])
def test_later_drafts_attend_to_what_the_first_one_selected(padding: int, bound: int) -> None:
    """And to the page that they begin: of the second row with the third draft, of the last with the fifth.

    Of the first draft, the host may know a bound of the lengths alone.
    """
    rows = len(HELD) + padding
    backend, graphs = sharing(SOME, 2 * PAGES)
    assert graphs.capture_labels == (DENSE, SPARSE, LATER_DRAFT)
    assert GraphVariants(backend, build("resa", SOME)).capture_labels == (SPARSE, LATER_DRAFT)
    chosen: list[Any] = []
    table = backend.dense.req_to_token_pool.req_to_token
    for step in range(WIDTH + 1):
        batch = draft(backend, step, rows, bound=0 if step else bound)
        assert graphs.select(batch) == (LATER_DRAFT if step else SPARSE)
        backend.init_forward_metadata(batch)
        for layer in LAYERS:
            q, output = run_layer(backend, batch, layer)
            if step == 0:
                chosen.append(selected_pages(backend))
            assert output[len(HELD) :].count_nonzero() == 0
            for row, length in enumerate(HELD):
                begun = table[row, length : length + step + 1].long() // PAGE
                pages = [torch.cat([mine, begun]) for mine in chosen[layer][row]]
                expected = attention(backend, row, step, q[row].view(HEADS, DIM), layer, pages)
                torch.testing.assert_close(output[row].view(HEADS, DIM).double(), expected, rtol=1e-4, atol=1e-5)
    assert selections(backend) == len(LAYERS) * len(HELD) * KV_HEADS, "the first drafts alone selected"
    assert all(plan.later and not plan.bounded for plan in backend.counters.decodes[1:])


def test_lists_that_do_not_fit_are_not_shared() -> None:
    """Each draft then selects for itself: a row that attends to all its pages leaves the others no room."""
    backend, graphs = sharing(ALL)
    for step in range(2):
        batch = draft(backend, step)
        assert graphs.select(batch) == SPARSE and not backend.shares(getattr(batch, PLAN), len(HELD))
        backend.init_forward_metadata(batch)
        run_layer(backend, batch, 0)
        assert selections(backend) == (step + 1) * len(HELD) * KV_HEADS


def test_nothing_is_reused_behind_a_dense_draft() -> None:
    """The selections stored behind a dense draft are those of an earlier round, or of another batch."""
    backend, graphs = sharing({"min_seq_len": 20, "crossover_tokens": 0, "active_ratio": 0.25, "min_pages": 1})
    for step in range(2):
        backend.init_forward_metadata(draft(backend, step))
    assert backend._pools.shared.reused
    for step, label in ((0, DENSE), (1, SPARSE), (2, LATER_DRAFT)):
        batch = draft(backend, step, 1, (18,))
        assert graphs.select(batch) == label
        backend.init_forward_metadata(batch)
        assert (backend.view is None) == (label == DENSE) and backend._pools.shared.reused == (label == LATER_DRAFT)


def test_the_graph_of_later_drafts_is_captured_over_padding() -> None:
    backend, _ = sharing(SOME)
    backend.init_forward_metadata(draft(backend, 0))
    backend._pools.shared._memory.fill_(3)
    reused = []
    # Of 30 rows none has room for a list: their graph selects.
    for rows in (len(HELD), 30):
        _set_capture_attention_variant(LATER_DRAFT)
        try:
            batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=rows)
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
        finally:
            _set_capture_attention_variant(None)
        batch.out_cache_loc = torch.zeros(rows, dtype=torch.int64)
        assert run_layer(backend, batch, 0)[1].count_nonzero() == 0
        reused.append(backend._pools.shared.reused)
    assert reused == [True, False]


def test_lists_as_long_as_fits() -> None:
    shared = SharedSelection(LAYERS, KV_HEADS, 4 * 33, PAGE, WIDTH, "cpu")
    assert shared.fits(4, 32 - WIDTH) and not shared.fits(4, 33 - WIDTH) and not shared.fits(8, 13)
    # A multiple of sixteen numbers a layer.
    assert shared.nbytes == len(LAYERS) * 272 * 4


def server(algorithm: str | None = "SPARSE_SELF", steps: int = 6) -> Any:
    return SimpleNamespace(speculative_algorithm=algorithm, speculative_num_steps=steps)


def test_what_is_shared_is_charged() -> None:
    charged = [memory.aux_bytes_per_token(RESA, MODEL, shares) for shares in (False, True)]
    assert charged[1] - charged[0] == len(LAYERS) * KV_HEADS * 4 // 16
    shared = SharedSelection(LAYERS, KV_HEADS, 1000, 16, 5, "cpu")
    assert shared.nbytes == 1000 * 16 * (charged[1] - charged[0])


@pytest.mark.parametrize(
    ("method", "fields", "given", "shares"),
    [
        ("resa", {}, server(), True),
        ("resa", {}, server(steps=1), False),
        ("resa", {}, server(None), False),
        ("robsa", {"allow_uncalibrated": True}, server(), False),
        ("resa", {"layers": {"0": {}, "1": {"method": "skip_softmax"}}}, server(), False),
    ],
)
def test_who_shares(method: str, fields: dict[str, Any], given: Any, shares: bool) -> None:
    settings = build(method, {"rectify_interval": 0, **fields})
    assert memory.shares_selection(settings, MODEL, given) == shares
