"""Skip-Softmax as a prefill method: its config, its refusals, what its plan asks of the op, and its counters."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_configs import write_config
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs

from sglang_sparse.attention.counters import Counters
from sglang_sparse.attention.prefill import PrefillPath
from sglang_sparse.config import settings as config
from sglang_sparse.config.request_options import parse_options
from sglang_sparse.config.settings import build
from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.groups import PrefillGroups
from sglang_sparse.methods.prefill import PrefillSpan
from sglang_sparse.methods.skip_softmax.prefill import SkipSoftmax
from sglang_sparse_kernels.skip_softmax_prefill import BLOCK_KEYS, TILE_QUERIES, Span, make_plan, skip_softmax_prefill

PREFILL = {"sparse_prefill_method": "skip_softmax"}
HEADS, DIM, PAGE, TOKENS, LAYERS = 2, 16, 16, 512, (0, 2)
CPU = torch.device("cpu")


def skip_softmax(**fields: Any) -> SkipSoftmax:
    prefill = build(None, {}, "skip_softmax", fields).prefill
    assert prefill is not None and isinstance(prefill.methods[0], SkipSoftmax)
    return prefill.methods[0]


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp("qwen3"), "qwen3")


def resolve(model: str, **kwargs: object) -> Any:
    return ServerArgs(model_path=model, **{**PREFILL, "chunked_prefill_size": 2048, **kwargs})


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({}, 250.0),
        ({"threshold_scale_factor": 1000}, 1000.0),
        # As TensorRT-LLM's users write it.
        ({"threshold_scale_factor": {"prefill": 587.18}}, 587.18),
    ],
)
def test_arguments_resolve(qwen3: str, fields: dict[str, Any], factor: float) -> None:
    args = resolve(qwen3, sparse_prefill_config=json.dumps(fields))
    assert json.loads(args.sparse_prefill_config)["threshold_scale_factor"] == factor
    settings = config.settings_of(args)
    assert settings is not None and settings.prefill is not None and settings.prefill.group_tokens == TILE_QUERIES
    assert settings.prefill.dense_below == 8192 and settings.prefill.dense_from(9000) == 9000


def test_a_request_has_its_own_threshold_and_namespace() -> None:
    settings = build(None, {}, "skip_softmax", {"threshold_scale_factor": 100.0})
    same, own = ({"threshold_scale_factor": factor} for factor in (100, 7))
    assert parse_options(settings, same).namespace == ""
    options = parse_options(settings, own)
    assert options.prefill is not None and options.prefill.config.model_dump()["threshold_scale_factor"] == 7
    assert "threshold_scale_factor" in options.namespace


def test_spans_become_tiles_with_the_thresholds_of_their_rows() -> None:
    method = skip_softmax(crossover_tokens=200, threshold_scale_factor=3.0)
    assert method.dense_below == 2 * TILE_QUERIES and method.boundary(700) == 5 * TILE_QUERIES
    assert method.boundary(201) == 201
    own = skip_softmax(crossover_tokens=200, threshold_scale_factor=7.0)
    spans = [
        PrefillSpan(0, 100, 400, method),
        PrefillSpan(0, 400, 410, None),
        PrefillSpan(1, 300, 301, None, decodes=True),
        PrefillSpan(2, 256, 300, own),
        PrefillSpan(3, 0, 9, own),
    ]
    plan = method.plan(spans, CPU)
    assert plan.factor.tolist() == [3.0, 0.0, 7.0, 7.0]
    tiles = [(tile.row, tile.first_position, tile.num_queries, tile.context) for tile in plan.op.tiles]
    dense = [(0, 100, 28, 0), (0, 128, 128, 0)]
    assert tiles == [
        *dense, (0, 256, 128, 384), (0, 384, 16, 512), (0, 400, 10, 0), (1, 300, 1, 0), (2, 256, 44, 384), (3, 0, 9, 0)
    ]  # fmt: skip
    assert method.scratch_bytes(ModelShape(1, 8, 2, 64, torch.float32), 8192, 131072) == 0


def test_passes_are_the_op_and_are_counted() -> None:
    torch.manual_seed(0)
    groups = PrefillGroups(["skip"], [skip_softmax(dense_fallback="never", threshold_scale_factor=300.0)])
    keys, values = torch.randn(2, 2 * TOKENS, 1, DIM)
    pool: Any = SimpleNamespace(get_key_buffer=lambda _: keys, get_value_buffer=lambda _: values)
    path = PrefillPath(groups, LAYERS, pool, torch.arange(2 * TOKENS).view(2, TOKENS), PAGE, HEADS)
    query = torch.randn(300, HEADS * DIM)
    # All queries look for the first token of row 1.
    query[:, ::DIM], keys[TOKENS, 0, 0] = 4.0, 20.0
    layer: Any = SimpleNamespace(layer_id=2, tp_q_head_num=HEADS, qk_head_dim=DIM, v_head_dim=DIM, scaling=0.25)
    layer.k_scale_float, layer.v_scale_float, layer.logit_cap = None, None, 0.0
    path.begin([PrefillSpan(1, 200, 500, groups)], torch.tensor([0, 1]))
    got = path.attend(query, keys[:300], values[:300], layer, torch.arange(300), save_kv_cache=False)
    table = torch.arange(2 * TOKENS // PAGE, dtype=torch.int32).view(2, -1)
    arguments = (query.view(300, HEADS, DIM), keys, values, table, make_plan([Span(1, 200, 500)], 2, CPU))
    stats = torch.zeros(4, dtype=torch.int64)
    expected = skip_softmax_prefill(*arguments, torch.tensor([0.0, 300.0]), PAGE, 0.25, stats=stats)
    assert torch.equal(got, expected.flatten(1)) and torch.equal(path.pairs, stats)
    blocks = [-(-end // BLOCK_KEYS) for end in (256, 384, 500)]
    assert stats[3] == HEADS * sum(blocks) and stats[2] == stats[3] - HEADS * len(blocks)
    # A pass that is dense throughout leaves no pair out, and no block is looked at.
    path.begin([PrefillSpan(0, 0, 10, None)], torch.tensor([0]))
    assert not path.takes(2)
    assert path.pairs.tolist() == [*(stats[:2] + 55 * HEADS * len(LAYERS)).tolist(), *stats[2:].tolist()]
    shape = ModelShape(4, HEADS, 1, DIM, torch.float32)
    settings = build(None, {}, "skip_softmax", {})
    pools = AuxBuffers((), (), 8, PAGE, "cpu")
    counters = Counters(settings, pools, shape, torch.zeros(4, dtype=torch.int64), path)
    shown = counters.snapshot()["prefill"]
    assert (shown["blocks_skipped"], shown["blocks_visited"]) == tuple(stats[2:].tolist())
    assert (shown["sparse_tokens"], shown["dense_tokens"]) == (300, 10)
    assert shown["sparsity"] == 1 - shown["pairs_attended"] / shown["pairs_causal"] > 0
