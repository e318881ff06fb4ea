"""Rules by layer: what they resolve to, what is refused, and what plans, views, pools and sizes make of their parts."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_configs import write_config
from refusals import refused
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs

from sglang_sparse.attention import memory
from sglang_sparse.attention.backend import SparseAttentionBackend
from sglang_sparse.attention.batch import (
    Views,
    allocate_view,
    allocate_views,
    clear_views,
    count_sizes,
    load_views,
    view_buffers,
    views_nbytes,
)
from sglang_sparse.attention.counters import Counters
from sglang_sparse.attention.cuda_graphs import SPARSE
from sglang_sparse.attention.plan import plan_decode
from sglang_sparse.config.files import read_config
from sglang_sparse.config.request_options import parse_options
from sglang_sparse.config.settings import Settings, build
from sglang_sparse.methods import aux_buffers
from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.skip_softmax.calibration_file import STAND_IN

SHAPE = ModelShape(num_layers=4, num_q_heads=8, num_kv_heads=2, head_dim=64, kv_dtype=torch.bfloat16)
SKIP = {"method": "skip_softmax", "threshold_scale_factor": {"decode": 40}}
RULES = {"0": "dense", "1": {"active_ratio": 0.1}, "2": {"active_ratio": 0.5, "summary_dtype": "fp8"}, "3": SKIP}
SHARED = {"rectify_interval": 0, "crossover_tokens": 0}


def three() -> Settings:
    return build("resa", {"layers": RULES, **SHARED})


@pytest.mark.parametrize(
    ("name", "rules", "beside", "text"),
    [
        ("resa", {"0-1": "dense", "2-": {"method": "resa", "active_ratio": 0.2}}, {}, {"layers": "2-"}),
        ("resa", {"2-": {}}, {"active_ratio": 0.2}, {"layers": "2-"}),
        ("resa", {"5": {}, "2-3": {"active_ratio": 0.2}, "0": "dense"}, {"active_ratio": 0.2}, {"layers": "5,2-3"}),
        ("skip_softmax", {"0": "dense", "1-": {"threshold_scale_factor": 9}}, {}, {"layers": "1-"}),
    ],
)
def test_dense_rules_and_one_method_are_its_text_form(
    name: str, rules: dict[str, Any], beside: dict[str, Any], text: dict[str, Any]
) -> None:
    found = build(name, {"layers": rules, **beside})
    own = {"active_ratio": 0.2} if name == "resa" else {"threshold_scale_factor": 9}
    plain = build(name, {**text, **own})
    assert type(found.method) is type(plain.method) and found.config == plain.config
    # Prefill comes along as ever.
    assert found.prefill_name == plain.prefill_name and found.comes_along == plain.comes_along
    assert (found.prefill and found.prefill.config) == (plain.prefill and plain.prefill.config)


@pytest.mark.parametrize("rules", [RULES, {"0": "dense", "1-": {}}])
def test_what_is_resolved_resolves_to_itself(rules: dict[str, Any]) -> None:
    found = build("resa", {"layers": rules, **SHARED})
    again = build("resa", json.loads(json.dumps(found.resolved)))
    assert again.resolved == found.resolved and again.config == found.config
    assert set(found.resolved["layers"]) == set(rules)
    assert again.decode.configs == found.decode.configs


def test_each_part_has_its_layers_its_fields_and_what_stands_beside_them() -> None:
    settings = build("resa", {"layers": {"0": "dense", "1": {"min_pages": 4}, "2-": SKIP}, **SHARED, "min_pages": 8})
    method = settings.decode
    assert method.names == ("resa", "skip_softmax")
    assert [part.sparse_layers(4) for part in method.methods] == [(1,), (2, 3)] and method.sparse_layers(4) == (1, 2, 3)
    resa, skip = (config.model_dump() for config in method.configs)
    assert resa["min_pages"] == 4 and skip["threshold_scale_factor"] == {"prefill": 0, "decode": 40}
    assert resa["crossover_tokens"] == skip["crossover_tokens"] == method.crossover_tokens == 0
    # Prefill is no matter of such rules.
    assert settings.prefill is None and settings.rectify is not None


def test_yaml_names_layers_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("layers:\n  0: dense\n  012: {active_ratio: 0.2}\n")
    assert list(read_config(str(path))["layers"]) == ["0", "012"]
    path.write_text("layers:\n  2-: dense\n  2-: {}\n")
    with refused("--sparse-config", str(path)):
        read_config(str(path))
    with refused("layers", {1: {}, "1": {}}):
        build("resa", {"layers": {1: {}, "1": {}}})


def test_a_start_hands_on_the_rules_in_full(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = write_config(tmp_path_factory.mktemp("qwen3"), "qwen3")

    def start(rules: dict[str, Any]) -> ServerArgs:
        config = json.dumps({"layers": rules, **SHARED})
        return ServerArgs(model_path=model, sparse_method="resa", sparse_config=config)  # pyright: ignore

    resolved = json.loads(start(RULES).sparse_config)  # pyright: ignore
    assert list(resolved["layers"]) == list(RULES) and resolved["layers"]["3"]["method"] == "skip_softmax"


def test_a_row_is_covered_where_all_parts_attend_to_everything() -> None:
    settings = three()
    asked = [{}, {"sparse": False}, {"active_ratio": 1.0}, {"active_ratio": 1.0, "threshold_scale_factor": 0}, {}]
    rows = [parse_options(settings, params) for params in asked]
    plan = plan_decode(settings.decode, torch.tensor([16000] * 4 + [100]), rows)
    assert plan.sparse and plan.covered.tolist() == [False, True, False, True, True]
    tenth, half, skip = plan.groups
    assert tenth.n_select.tolist() == [100, 1000, 1000, 1000, 7]
    assert half.n_select.tolist() == [500, 1000, 1000, 1000, 7]
    assert skip.n_select.tolist() == [1000, 1000, 1000, 1000, 7] and skip.row_thresholds.tolist() == [40, 0, 40, 0, 0]
    own = plan_decode(settings.decode, torch.tensor([16000]))
    assert [part.n_select.tolist() for part in own.groups] == [[100], [500], [1000]]
    assert not plan_decode(settings.decode, torch.tensor([16000] * 2), rows[1:4:2]).sparse
    late = build("resa", {"layers": RULES, "rectify_interval": 0, "crossover_tokens": 20000}).decode
    assert not plan_decode(late, torch.tensor([16000])).sparse and plan_decode(late, torch.tensor([20001])).sparse


def test_fields_go_to_the_parts_that_have_them_once() -> None:
    settings = three()
    one, two = (parse_options(settings, {"threshold_scale_factor": 3}) for _ in range(2))
    assert one.decode is two.decode is not settings.decode
    ours, theirs = one.decode.methods, settings.decode.methods
    assert ours[:2] == theirs[:2] and ours[2] is not theirs[2]
    rectified = parse_options(settings, {"rectify_interval": 8})
    assert rectified.rectify_interval == 8 == rectified.decode.config.model_dump()["rectify_interval"]


def test_a_factor_of_each_phase_beside_a_prefill_method() -> None:
    settings = build("resa", {"layers": RULES, **SHARED}, "skip_softmax", {"threshold_scale_factor": 90})
    both, prefill = (parse_options(settings, {"threshold_scale_factor": value}) for value in (3, {"prefill": 7}))
    assert both.decode.methods[2].row_threshold == 3 and both.prefill is not None
    assert both.prefill.config.model_dump()["threshold_scale_factor"] == 3
    assert prefill.decode is settings.decode and prefill.prefill is not None and prefill.namespace != both.namespace
    assert prefill.prefill.config.model_dump()["threshold_scale_factor"] == 7


def test_a_share_to_skip_is_resolved_by_the_checkpoint() -> None:
    rules = {"0": {}, "1-": {"method": "skip_softmax", "target_sparsity": {"decode": 0.5}}}
    settings = build("resa", {"layers": rules, **SHARED}, checkpoint=lambda: STAND_IN)
    found = settings.decode.configs[1].model_dump()
    assert found["threshold_scale_factor"]["decode"] > 1 and found["threshold_scale_factor"]["prefill"] == 0
    again = build("resa", json.loads(json.dumps(settings.resolved)))
    assert again.decode.configs == settings.decode.configs


def test_buffers_are_those_of_the_layers_that_have_them() -> None:
    settings = build("resa", {"layers": RULES, "summary": "minmax", **SHARED})
    specs = settings.decode.aux_specs(SHAPE)
    aux = aux_buffers.AuxBuffers(specs, settings.decode.sparse_layers(4), 8, 16, "cpu")
    assert [aux.buffer("page_summary", layer).dtype for layer in (1, 2)] == [torch.bfloat16, torch.float8_e4m3fn]
    assert [len(aux.specs_of(layer)) for layer in range(4)] == [0, 1, 1, 0]
    assert memory.aux_bytes_per_token(settings, SHAPE) * 16 * 8 == aux.nbytes == 8 * 2 * 2 * 64 * 3
    keys = {layer: torch.full((128, 2, 64), float(layer)) for layer in (1, 2, 3)}
    aux.refresh(keys, torch.tensor([31]))
    for layer in (1, 2):
        assert (aux.buffer("page_summary", layer)[1].float() == layer).all()
        assert (aux.buffer("page_summary", layer)[0].float() == 0).all()


def views_of(settings: Settings, rows: int) -> Views:
    counts = torch.zeros(sum(count_sizes(settings.decode.methods)), dtype=torch.int64)
    return allocate_views(settings.decode.methods, rows, 2, 64 * 16, counts)


def test_parts_of_a_view_share_all_but_what_is_their_own() -> None:
    settings = three()
    views = views_of(settings, 3)
    one = (allocate_view(3, 2, 64, 32, 16, torch.zeros(4)),)
    assert views_nbytes(views) - views_nbytes(one) == 2 * 3 * 8
    assert [part.usual_select for part in views] == [16, 32, 64]
    assert [part.stats.shape[0] for part in views] == [4, 4, 6]
    for place, part in enumerate(views):
        part.stats.add_(place + 1)
        assert part.page_table is views[0].page_table and part.n_pages is views[0].n_pages
        assert part.scores is views[0].scores
    assert torch.cat([part.stats for part in views]).tolist() == [1] * 4 + [2] * 4 + [3] * 6
    plan = plan_decode(build("resa", {"layers": RULES, **SHARED, "min_seq_len": 0}).decode, torch.tensor([640, 320]))
    table = torch.arange(3 * 1024, dtype=torch.int32).reshape(3, 1024)
    batch: Any = type("Batch", (), {"req_pool_indices": torch.tensor([2, 1])})
    # As a graph is replayed: fewer rows than it has.
    load_views(views, plan, batch, table)
    assert views[0].n_pages.tolist() == [40, 20, 0]
    assert [part.n_select.tolist() for part in views] == [[16, 16, 0], [20, 16, 0], [40, 20, 0]]
    assert views[2].row_thresholds.tolist() == [40, 40, 0] and views[1].rows(1).n_select.tolist() == [20]
    clear_views(views, table)
    assert not any(part.n_select.any() or part.row_thresholds.any() for part in views)


def test_a_graph_of_a_batch_is_replayed_over_the_buffers_it_was_captured_with(monkeypatch) -> None:
    method = build("resa", {"layers": RULES, **SHARED, "min_seq_len": 0}).decode
    table = torch.arange(3 * 1024, dtype=torch.int32).reshape(3, 1024)
    backend = object.__new__(SparseAttentionBackend)
    dense = SimpleNamespace(init_cuda_graph_state=lambda *_: None)
    dense.req_to_token_pool = SimpleNamespace(req_to_token=table)
    object.__setattr__(backend, "dense", dense)
    backend.groups = method
    backend._pools = aux_buffers.AuxBuffers(method.aux_specs(SHAPE), (1, 2, 3), 8, 16, "cpu")
    backend._kv_heads, backend._tokens, backend._graph_views, backend._planned = 2, 1024, None, None
    backend._graph_tokens = 0
    backend._buffers = view_buffers(method.methods, SHAPE, 1024, torch.bfloat16, torch.device("cpu"))
    counts = torch.zeros(sum(count_sizes(method.methods)), dtype=torch.int64)
    backend.counters = Counters(three(), backend._pools, SHAPE, counts)
    backend.init_cuda_graph_state(4, 4)
    monkeypatch.setattr("sglang_sparse.attention.backend.get_capture_attention_variant", lambda: SPARSE)
    backend._begin_capture(2)
    captured = backend._views
    assert captured is not None and not captured[0].n_pages.any() and len(captured) == 3
    mode = ForwardMode.DECODE
    batch = SimpleNamespace(forward_mode=mode, batch_size=2, num_padding=1, seq_lens_cpu=torch.tensor([640, 1]))
    batch.req_pool_indices = torch.tensor([2, 0])
    backend._prepare(batch)
    # What the graph reads is what was filled now.
    assert captured[0].n_pages.tolist() == [40, 0] and captured[0].page_table[0, :40].tolist() == [*range(128, 168)]
    assert [part.n_select.tolist() for part in captured] == [[16, 0], [20, 0], [40, 0]]
    assert captured[2].row_thresholds.tolist() == [40, 0]
    parts = backend.counters.snapshot()["parts"]
    assert [part["max_active_fraction"] for part in parts] == [pytest.approx(0.4), 0.5, None]
    assert [part["pages_held"] for part in parts] == [0, 0, 2 * 40]
    # The counts of a plan are written once, as long as nothing else is written over them.
    captured[0].n_pages.fill_(7)
    batch.seq_lens_cpu[0] = 625
    backend._prepare(batch)
    assert captured[0].n_pages.tolist() == [7, 7]
    for lengths, pages in ((300, 19), (625, 40)):
        batch.seq_lens_cpu[0] = lengths
        backend._prepare(batch)
        assert captured[0].n_pages.tolist() == [pages, 0]
    backend._begin_capture(2)
    backend._prepare(batch)
    assert captured[0].n_pages.tolist() == [40, 0]
