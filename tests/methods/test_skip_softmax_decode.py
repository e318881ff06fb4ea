"""Skip-Softmax as a decode method: its two phases, what a request may say of each, its plan, op and counters."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_configs import write_config
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs

from sglang_sparse.attention.batch import allocate_view, load_views, views_nbytes
from sglang_sparse.attention.counters import Counters
from sglang_sparse.attention.decode import DecodePath
from sglang_sparse.attention.plan import plan_decode, usual_selection
from sglang_sparse.config import settings as config
from sglang_sparse.config.request_options import parse_options
from sglang_sparse.config.settings import Settings, build
from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.skip_softmax.decode import SkipSoftmaxDecode
from sglang_sparse.methods.views import SELECT_STATS, BatchView
from sglang_sparse_kernels.skip_softmax_decode import LOCAL_BLOCKS, scratch_bytes, skip_softmax_decode

DECODE = {"sparse_method": "skip_softmax"}
PAGE, HEADS, KV_HEADS, DIM, CONTEXT, LAYER = 16, 4, 2, 16, 512, 1
SHAPE = ModelShape(4, HEADS, KV_HEADS, DIM, torch.float32)
FACTOR = "threshold_scale_factor"
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp("qwen3"), "qwen3")


def resolve(model: str, **kwargs: object) -> Any:
    return ServerArgs(model_path=model, **{**DECODE, "chunked_prefill_size": 2048, **kwargs})


def factors(settings: Settings | None) -> tuple[float | None, float]:
    """Of prefill, None where it is dense, and of decode."""
    assert settings is not None and isinstance(settings.method, SkipSoftmaxDecode)
    prefill = settings.prefill and settings.prefill.config.model_dump()[FACTOR]
    return prefill, settings.method.row_threshold


@pytest.mark.parametrize(
    ("given", "prefill", "decode"),
    [
        (None, 250.0, 25.0),
        (40, 40.0, 40.0),
        ({"prefill": 30, "decode": 7.5}, 30.0, 7.5),
        # What is left out of a mapping is dense, and there is no prefill method then.
        ({"decode": 9}, None, 9.0),
        ({"prefill": 0, "decode": 9}, None, 9.0),
        ({"prefill": 9}, 9.0, 0.0),
        (0, None, 0.0),
    ],
)
def test_one_flag_sets_both_phases(qwen3: str, given: Any, prefill: float | None, decode: float) -> None:
    fields = {} if given is None else {FACTOR: given}
    args = resolve(qwen3, sparse_config=json.dumps({**fields, "layers": "1-", "check_exactness": True}))
    assert args.sparse_prefill_method == (None if prefill is None else "skip_softmax")
    settings = config.settings_of(args)
    assert settings is not None and factors(settings) == (prefill, decode)
    if settings.prefill:
        shared = settings.prefill.config
        assert (shared.layers, shared.check_exactness, shared.dense_fallback) == ("1-", True, "auto")
        assert settings.prefill.dense_below == 8192
    # A scheduler gets the resolved fields, and reads the same from them.
    again = build(args.sparse_method, json.loads(args.sparse_config), None, None)
    assert factors(again) == (prefill, decode)
    assert settings.rectify is not None and settings.rectify.rectify_interval == 0
    assert ["is 0 in decode" in said for said in settings.method.warnings()] == ([] if decode else [True])


def test_another_prefill_method_wins(qwen3: str) -> None:
    own = resolve(qwen3, sparse_prefill_method="skip_softmax", sparse_prefill_config=json.dumps({FACTOR: 3}))
    assert factors(config.settings_of(own)) == (3.0, 25.0)
    # Its own name says which one, and no more.
    same = build("skip_softmax", {FACTOR: {"prefill": 1000, "decode": 9}, "layers": "2-"}, "skip_softmax", {}).prefill
    assert same is not None and (same.config.model_dump()[FACTOR], same.config.layers) == (1000.0, "2-")
    settings = build("skip_softmax", {}, "anchor", {"theta": 9.0})
    assert settings.prefill_name == "anchor" and settings.prefill is not None
    never = build("skip_softmax", {"dense_fallback": "never", "layers": "2-"}).prefill
    assert never is not None and never.dense_below == 0 and never.config.layers == "2-"


def test_what_the_prefill_that_comes_along_needs_is_asked(qwen3: str) -> None:
    """And with dense prefill it is not."""
    decode_only = json.dumps({FACTOR: {"decode": 9}})
    assert resolve(qwen3, chunked_prefill_size=2000, sparse_config=decode_only).sparse_prefill_method is None


@pytest.mark.parametrize(
    ("asked", "prefill", "decode", "shared"),
    [
        (5, 5, 5.0, False),
        ({"decode": 5}, 250.0, 5.0, True),
        ({"prefill": 5}, 5, 25.0, False),
        ({"prefill": 5, "decode": 6}, 5, 6.0, False),
        # No difference to the server's.
        ({"prefill": 250, "decode": 0}, 250.0, 0.0, True),
    ],
)
def test_a_request_may_set_each_phase(asked: Any, prefill: float, decode: float, shared: bool) -> None:
    options = parse_options(build("skip_softmax", {}), {FACTOR: asked})
    assert options.decode.methods[0].row_threshold == decode and options.prefill is not None
    assert options.prefill.config.model_dump()[FACTOR] == prefill
    assert (options.namespace == "") == shared


def test_a_number_is_for_the_phases_that_there_are() -> None:
    exact = parse_options(build("skip_softmax", {}), {FACTOR: 5, "exact_prefix": True})
    assert exact.decode.methods[0].row_threshold == 5 and exact.prefill is None
    alone = parse_options(build("skip_softmax", {FACTOR: {"decode": 9}}), {FACTOR: 5})
    assert alone.decode.methods[0].row_threshold == 5 and (alone.prefill, alone.namespace) == (None, "")
    beside = build("resa", {}, "skip_softmax", {})
    for asked in (5, {"prefill": 5}):
        options = parse_options(beside, {FACTOR: asked})
        assert options.decode is beside.decode and options.prefill is not None and "5" in options.namespace


def test_a_row_is_dense_by_its_factor() -> None:
    """All pages are looked at, of every row, which therefore tells nothing."""
    settings = build("skip_softmax", {FACTOR: 8.0, "crossover_tokens": 20000})
    asked = [{}, {FACTOR: {"decode": 3}}, {"sparse": False}, {FACTOR: 0}, {FACTOR: {"prefill": 3}}, {}]
    rows = [parse_options(settings, params) for params in asked]
    lengths = torch.tensor([9000] * 5 + [4095])
    plan = plan_decode(settings.decode, lengths, rows)
    assert plan.sparse and plan.groups[0].row_thresholds.tolist() == [8.0, 3.0, 0.0, 0.0, 8.0, 0.0]
    assert plan.covered.tolist() == [False, False, True, True, False, True]
    assert plan.groups[0].n_select.tolist() == plan.groups[0].n_pages.tolist()
    # Two sparse rows are below the crossover, whatever the others hold.
    assert not plan_decode(settings.decode, lengths[1:4], rows[1:4]).sparse
    assert not plan_decode(build("skip_softmax", {FACTOR: 0}).decode, torch.tensor([10**6])).sparse
    never = build("skip_softmax", {FACTOR: 0, "dense_fallback": "never"})
    plan = plan_decode(never.decode, torch.tensor([40, 50]), [parse_options(never, p) for p in ({}, {"sparse": False})])
    assert (
        plan.sparse and plan.covered.tolist() == [False, True] and plan.groups[0].row_thresholds.tolist() == [0.0, 0.0]
    )


def filled(settings: Settings, lengths: list[int], stats: torch.Tensor, rows: int) -> tuple[Any, BatchView]:
    """A plan for these rows and its view, of which the rest pads a graph."""
    pages = CONTEXT // PAGE
    usual = usual_selection(settings.method, pages)
    view = allocate_view(rows, KV_HEADS, pages, usual, PAGE, stats, settings.method.view_buffers)
    plan = plan_decode(settings.decode, torch.tensor(lengths))
    table = torch.arange(len(lengths) * CONTEXT, dtype=torch.int32).view(len(lengths), CONTEXT)
    load_views((view,), plan, SimpleNamespace(req_pool_indices=torch.arange(rows).clamp(max=len(lengths) - 1)), table)
    return plan, view


def test_a_layer_is_the_op_and_is_counted() -> None:
    torch.manual_seed(0)
    settings = build("skip_softmax", {FACTOR: 200.0, "min_seq_len": 100, "crossover_tokens": 0})
    lengths = [500, 99, 300]
    stats = torch.zeros(SELECT_STATS + 2, dtype=torch.int64)
    plan, view = filled(settings, lengths, stats, rows=4)
    keys, values = torch.randn(2, len(lengths) * CONTEXT, KV_HEADS, DIM)
    query = torch.randn(4, HEADS, DIM)
    # The long rows look for their first token; a row that pads a graph for whatever is left of an earlier batch.
    query[:, :, 0], keys[::CONTEXT, :, 0] = 4.0, 20.0
    newest = torch.tensor([row * CONTEXT + length - 1 for row, length in enumerate(lengths)] + [0])
    pool: Any = SimpleNamespace(get_key_buffer=lambda _: keys, get_value_buffer=lambda _: values)
    aux = AuxBuffers(settings.method.aux_specs(SHAPE), (LAYER, 3), 2 * CONTEXT // PAGE, PAGE, "cpu")
    path = DecodePath(settings.decode.methods, aux, pool, SHAPE)
    assert path.last_layer == -1
    layer: Any = SimpleNamespace(layer_id=LAYER, tp_q_head_num=HEADS, qk_head_dim=DIM, scaling=0.25)
    layer.k_scale_float, layer.v_scale_float, layer.logit_cap = None, None, 0.0
    got = path.attend(query.flatten(1), query, query, layer, newest, (view,), False, {})
    table = torch.arange(len(lengths) * CONTEXT // PAGE, dtype=torch.int32).view(len(lengths), -1)
    counted = torch.zeros(2, dtype=torch.int64)
    arguments = (
        query[:3],
        keys,
        values,
        table,
        plan.groups[0].n_pages,
        newest[:3],
        torch.tensor([200.0, 0.0, 200.0]),
        PAGE,
        0.25,
    )
    expected = skip_softmax_decode(*arguments, stats=counted)
    assert torch.equal(got[:3], expected.flatten(1)) and not got[3].any()
    assert torch.equal(view.method_stats, counted) and not stats[:SELECT_STATS].any()
    blocks = [-(-length // 64) for length in (500, 300)]
    assert counted.tolist() == [KV_HEADS * sum(blocks), KV_HEADS * sum(n - 1 - LOCAL_BLOCKS for n in blocks)]
    counters = Counters(settings, aux, SHAPE, stats)
    counters.add_decode(plan)
    shown = counters.snapshot()
    assert (shown["blocks_visited"], shown["blocks_skipped"]) == tuple(counted.tolist())
    pages = 2 * KV_HEADS * sum(plan.groups[0].n_pages.tolist())
    assert (shown["sparse_layer_rows"], shown["pages_attended"], shown["pages_held"]) == (2 * 3, pages, pages)
    assert (shown["dense_fallback_rows"], shown["active_fraction"], shown["max_active_fraction"]) == (1, 1.0, None)


def test_only_the_page_table_is_allocated_and_the_op_is_charged() -> None:
    method = build("skip_softmax", {}).method
    view = allocate_view(6, KV_HEADS, 4096, 4000, PAGE, torch.zeros(6, dtype=torch.int64), method.view_buffers)
    assert view.page_table.shape == (6, 4096) and views_nbytes((view,)) < 6 * (4 * 4096 + 64)
    shape = ModelShape(4, 4, 1, 128, torch.bfloat16)
    expected = scratch_bytes(1, 4, 1, 128, 128, 4000, PAGE, torch.bfloat16, CPU)
    assert method.scratch_bytes(shape, view.rows(1), torch.bfloat16, CPU) == expected > 0
