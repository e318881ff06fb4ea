"""Parts of a server with rules by layer: what each has of its own, and what is added up over them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_sparse.attention import crossover, memory, prompt_selection
from sglang_sparse.attention.batch import (
    allocate_view,
    allocate_views,
    clear_views,
    count_sizes,
    load_views,
    view_buffers,
    views_nbytes,
)
from sglang_sparse.attention.counters import Counters
from sglang_sparse.attention.plan import DecodePlan, plan_decode
from sglang_sparse.config.request_options import parse_options
from sglang_sparse.config.settings import Settings, build
from sglang_sparse.debug.kv_compare import stale_summaries
from sglang_sparse.hooks import prometheus
from sglang_sparse.methods import roles
from sglang_sparse.methods.aux_buffers import AuxBuffers, page_ends
from sglang_sparse.methods.base import ModelShape
from sglang_sparse.scheduler import prompt_windows
from sglang_sparse.scheduler.request_state import RequestState
from sglang_sparse_kernels.page_centroids import record_bytes

SHAPE = ModelShape(num_layers=4, num_q_heads=8, num_kv_heads=2, head_dim=64, kv_dtype=torch.bfloat16)
SKIP = {"method": "skip_softmax", "threshold_scale_factor": {"decode": 40}}
SHARED = {"rectify_interval": 0, "crossover_tokens": 0, "min_seq_len": 0}
BOTH = {"layers": {"0": "dense", "1": {}, "2-": SKIP}, **SHARED}


def test_two_parts_of_a_method_run_with_factors_of_their_own() -> None:
    other = {**SKIP, "threshold_scale_factor": {"decode": 10}}
    method = build("skip_softmax", {"layers": {"0": other, "1-": SKIP}, **SHARED}).decode
    counts = torch.zeros(sum(count_sizes(method.methods)), dtype=torch.int64)
    views = allocate_views(method.methods, 2, 2, 1024, counts)
    table = torch.arange(2 * 1024, dtype=torch.int32).reshape(2, 1024)
    batch: Any = type("Batch", (), {"req_pool_indices": torch.tensor([1])})
    load_views(views, plan_decode(method, torch.tensor([640])), batch, table)
    assert [part.row_thresholds.tolist() for part in views] == [[10, 0], [40, 0]]
    assert any("--sparse-prefill-method decides prefill" in text for text in method.warnings())


def test_a_part_refuses_weights_for_all() -> None:
    method = build("resa", BOTH).decode
    assert method.refuse_weights(None) is None
    method.methods[1].refuse_weights = lambda model_config: "of another model"  # type: ignore[method-assign]
    assert method.refuse_weights(None) == "of another model"


def test_what_both_kinds_of_parts_count_is_reported_together(caplog: Any) -> None:
    settings = build("resa", BOTH)
    method = settings.decode
    pools = AuxBuffers(method.aux_specs(SHAPE), (1, 2, 3), 8, 16, "cpu")
    counted = Counters(settings, pools, SHAPE, torch.zeros(sum(count_sizes(method.methods)), dtype=torch.int64), None)
    report = prometheus.IntervalReport(counted, prometheus.DeviceCopy(counted.device_stats), None, logs=False, time=0.0)
    published: list[prometheus.Interval] = []
    report._metrics = type("Metrics", (), {"publish": staticmethod(published.append)})  # type: ignore[assignment]
    counted.add_decode(plan_decode(method, torch.tensor([640])))
    # ReSA counts on the device: one layer, two KV heads.
    counted.select_stats[:3] += torch.tensor([2, 8, 80])
    for time in (1.0, 2.0, 3.0):
        report.step(time)
    assert sum(one.counts["pages_attended"] for one in published) == 8 + 2 * 2 * 40
    assert sum(one.counts["pages_held"] for one in published) == 80 + 2 * 2 * 40


def test_the_crossover_is_that_of_the_part_that_pays_last() -> None:
    method = build("resa", {"layers": {"0": {}, "1": {"active_ratio": 0.5}}})
    entry = crossover.setup("resa", method.decode.methods[0].config, SHAPE, "cpu")
    table = [{**entry, "active_ratio": ratio, "crossover_tokens": tokens} for ratio, tokens in ((0.1, 20), (0.5, 70))]
    assert crossover.find(method, SHAPE, torch.device("cpu"), table).tokens == 70


def test_a_dense_plan_has_no_groups() -> None:
    plan = plan_decode(build("resa", {**BOTH, "min_seq_len": 4096}).decode, torch.tensor([10]))
    assert not plan.sparse and isinstance(plan, DecodePlan) and plan.groups == ()


KEEP = {"method": "rocketkv", "window_size": 8, "prompt_budget": 24, "topk": 4}
WIDER = {"method": "rocketkv", "window_size": 16, "prompt_budget": 100, "topk": 8, "kt_page_size": 8}
KEPT = {"layers": {"0": KEEP, "1": {"method": "resa"}, "2-3": WIDER}, **SHARED}


def request(settings: Settings, prompt: int, **options: Any) -> Any:
    found = SimpleNamespace(origin_input_ids=[0] * prompt)
    found.sglang_sparse = RequestState(parse_options(settings, options), counts=None)  # type: ignore[arg-type]
    return found


def test_the_window_is_the_longest_of_those_that_choose() -> None:
    settings = build("rocketkv", KEPT)
    for prompt, window in ((24, None), (25, 8), (100, 8), (101, 16)):
        start = prompt_windows.window_start(settings, request(settings, prompt))
        assert start == (window and prompt - window)
    assert prompt_windows.window_start(settings, request(settings, 101, sparse=False)) is None


def test_each_part_keeps_what_it_would_keep_alone() -> None:
    """By row of the request pool and by layer, and a pass without prompts' ends leaves it."""
    torch.manual_seed(1)
    settings = build("rocketkv", KEPT)
    keys = {layer: torch.randn(1024, 2, 64) for layer in (0, 2, 3)}
    table = (torch.randperm(60)[:40] + 1).view(4, 10, 1) * 16 + torch.arange(16)
    runner: Any = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table.flatten(1).int()),
        token_to_kv_pool=SimpleNamespace(get_key_buffer=keys.__getitem__),
    )
    queries = {layer: torch.randn(30 + 140, 8 * 64) for layer in keys}
    places = torch.tensor([3, 1])

    def run(method: Any, layers: tuple[int, ...], known: Settings) -> Any:
        aux = AuxBuffers(method.aux_specs(SHAPE), method.sparse_layers(4), 64, 16, "cpu")
        paths = prompt_selection.make_paths(method.methods, aux, runner, SHAPE)
        mode = ForwardMode.EXTEND
        batch = SimpleNamespace(forward_mode=mode, prefix_lens=[0, 0], extend_lens=[30, 140])
        batch.reqs = [request(known, 30), request(known, 140)]
        prompt_windows.begin(SimpleNamespace(keeps=paths), SimpleNamespace(req_pool_indices=places), batch)
        for layer in layers:
            names = {"layer_id": layer, "tp_q_head_num": 8, "qk_head_dim": 64, "scaling": 0.125}
            for path in paths:
                path.keep(queries[layer], SimpleNamespace(**names, k_scale_float=None))
        return aux, paths

    aux, paths = run(settings.decode, (0, 2, 3), settings)
    assert [one.snapshot()["prompts"] for one in paths] == [2, 1]
    assert sum(one.snapshot()["bytes"] for one in paths) == sum(
        prompt_selection.kept_bytes(part, SHAPE, 4) for part in roles.prompt_selectors(settings.decode.methods)
    )
    assert [sorted(kept.blocks) for kept in aux.kept] == [[0], [2, 3]]
    with pytest.raises(RuntimeError, match="in layer 1"):
        aux.require_kept(1)
    for fields, layers in ((KEEP, (0,)), (WIDER, (2, 3))):
        single = {name: value for name, value in fields.items() if name != "method"}
        known = build("rocketkv", {**single, **SHARED, "layers": list(layers)})
        alone = run(known.decode, layers, known)[0]
        for layer in layers:
            mine, other = aux.require_kept(layer), alone.require_kept(layer)
            assert mine.counts.equal(other.counts) and mine.first_visible.equal(other.first_visible)
            assert mine.blocks[layer].equal(other.blocks[layer]) and mine.blocks[layer].any()


def test_memory_of_what_parts_keep_is_added_up_and_a_choice_is_the_largest() -> None:
    settings = build("rocketkv", KEPT)
    kvc = SimpleNamespace(
        server_args=SimpleNamespace(max_running_requests=5),
        model_config=SimpleNamespace(context_len=9000),
        model_dtype=torch.bfloat16,
    )

    def needed(*methods: Any) -> tuple[int, int]:
        kept = sum(prompt_selection.kept_bytes(method, SHAPE, 6) for method in methods)
        return kept, memory.of_prompts(methods, "", kvc, SHAPE).nbytes - kept

    first, second = roles.prompt_selectors(settings.decode.methods)
    assert needed(first, second)[0] == needed(first)[0] + needed(second)[0] > 0
    assert needed(first, second)[1] == max(needed(first)[1], needed(second)[1]) > 0
    # Of one, two and one layers: bounds of blocks of four and eight tokens in float8, and centroids of pages.
    token = 2 * 64 * 2
    assert memory.aux_bytes_per_token(settings, SHAPE) == token // 4 + 2 * token // 8 + 2 * record_bytes(6, 64) // 16


def test_entries_of_two_sizes_are_refreshed_each_where_it_ends() -> None:
    """Entries that a pass left half written are refreshed, and then those of a step's token."""
    settings = build("rocketkv", KEPT)
    method = settings.decode
    aux = AuxBuffers(method.aux_specs(SHAPE), method.sparse_layers(4), 8, 16, "cpu")
    keys = {layer: torch.randn(128, 2, 64).bfloat16() for layer in range(4)}
    pool = SimpleNamespace(get_key_buffer=keys.__getitem__)
    setattr(pool, memory.ATTRIBUTE, aux)
    slots, last = torch.arange(32, 32 + 27), torch.tensor([47, 58])
    assert aux.entry_sizes == (4, 16, 8)
    for size in aux.entry_sizes:
        assert stale_summaries(pool, last).all()
        aux.refresh(keys, page_ends(slots, size), entry_tokens=size)
    assert not stale_summaries(pool, last).any()
    for stored in keys.values():
        stored[59] = 100.0
    token = torch.tensor([59])
    for size in (4, 8):
        aux.refresh(keys, token, entry_tokens=size)
        assert stale_summaries(pool, torch.tensor([47, 59])).tolist() == [False, True]
    aux.refresh(keys, token, entry_tokens=16)
    assert not stale_summaries(pool, torch.tensor([47, 59])).any()


def test_a_view_has_a_page_table_for_each_size_of_blocks() -> None:
    method = build("rocketkv", KEPT).decode
    counts = torch.zeros(sum(count_sizes(method.methods)), dtype=torch.int64)
    device = torch.device("cpu")
    used = view_buffers(method.methods, SHAPE, 1024, torch.bfloat16, device)
    assert used.keys() == {4, 8, 16} and used[16] == ("page_table", "scores", "selected")
    views = allocate_views(method.methods, 3, 2, 1024, counts, used)
    assert views_nbytes(views) == views_nbytes(
        tuple(allocate_view(3, 2, 1024 // size, 1, size, counts, used[size]) for size in (4, 16, 8))
    )
    first, resa, wider = views
    assert (first.page_size, resa.page_size, wider.page_size) == (4, 16, 8)
    table = torch.arange(3 * 1024, dtype=torch.int32).reshape(3, 1024)
    batch: Any = type("Batch", (), {"req_pool_indices": torch.tensor([2, 1])})
    # As a graph is replayed: fewer rows than it has.
    load_views(views, plan_decode(method, torch.tensor([641, 30])), batch, table)
    assert [part.n_pages.tolist() for part in views] == [[161, 8, 0], [41, 2, 0], [81, 4, 0]]
    assert [part.n_select.tolist() for part in views] == [[4, 4, 0], [16, 2, 0], [8, 4, 0]]
    assert [part.requests.tolist()[:2] for part in views] == [[2, 1]] * 3
    for part in views:
        pages = int(part.n_pages[0])
        assert part.page_table[0, :pages].tolist() == [2048 // part.page_size + i for i in range(pages)]
    clear_views(views, table)
    assert not any(part.n_pages.any() or part.n_select.any() for part in (view.rows(2) for view in views))


def test_shares_are_of_rows_that_some_part_leaves_something_out_for() -> None:
    """A part that lets such a row attend to everything attends to all of it; sums are of the smallest blocks."""
    settings = build("rocketkv", KEPT)
    method = settings.decode
    aux = AuxBuffers(method.aux_specs(SHAPE), (0, 1, 2, 3), 8, 16, "cpu")
    counters = Counters(settings, aux, SHAPE, torch.zeros(sum(count_sizes(method.methods)), dtype=torch.int64))
    # ReSA attends to sixteen pages at least: all of 160 tokens.
    counters.add_decode(plan_decode(method, torch.tensor([160, 10**5]), [parse_options(settings, {})] * 2))
    shares = [part["max_active_fraction"] for part in counters.snapshot()["parts"]]
    assert shares == [pytest.approx(4 / 40), 1.0, pytest.approx(8 / 20)]
    counters.select_stats.copy_(torch.tensor([2, 8, 80, 0, 2, 32, 40, 0, 4, 16, 60, 0]))
    found = counters.snapshot()
    assert [part["pages_held"] for part in found["parts"]] == [80, 40, 60]
    assert (found["pages_held"], found["pages_attended"]) == (80 + 4 * 40 + 2 * 60, 8 + 4 * 32 + 2 * 16)
    assert found["active_fraction"] == (8 + 4 * 32 + 2 * 16) / 360
