"""Prefill methods by layer: what rules resolve to, what is refused, and what sizes, requests and passes make of it."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_configs import write_config
from refusals import refused
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs

from sglang_sparse.attention import memory
from sglang_sparse.attention.prefill import PrefillPath
from sglang_sparse.config.request_options import NAMESPACE, namespaced, parse_options, prefill_of_namespace
from sglang_sparse.config.settings import Settings, build
from sglang_sparse.methods.anchor import Anchor
from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.groups import PrefillGroups
from sglang_sparse.methods.prefill import PrefillSpan
from sglang_sparse.methods.skip_softmax.calibration_file import STAND_IN
from sglang_sparse.methods.skip_softmax.prefill import SkipSoftmax
from sglang_sparse.tools.calibration.anchor import base_method
from sglang_sparse.tools.calibration.capture import CalibrationError
from sglang_sparse.tools.calibration.skip_softmax import _layers

SHAPE = ModelShape(num_layers=4, num_q_heads=8, num_kv_heads=2, head_dim=64, kv_dtype=torch.bfloat16)
SKIP = {"method": "skip_softmax"}
RULES = {"0": "dense", "1": {"theta": 8, "step": 8}, "2": {}, "3": SKIP}
SKIP_NAME = {"name": "skip_softmax"}
MIXED = {"0-1": {}, "2-": SKIP}
# Groups of 32 and of 128 tokens, with thresholds that leave nothing out.
PARTS = {"0": {"block_size": 16, "step": 2, "theta": 1e9}, "2": {**SKIP, "threshold_scale_factor": 0}}
APART = ("layers: ", 'allowed: one for all rules: set it next to "layers"')
GROUP, HEADS, DIM, PAGE, TOKENS = 128, 2, 16, 16, 512


def settings_of_rules(layers: Any, name: str = "anchor", **beside: Any) -> Settings:
    return build(None, {}, name, {"layers": layers, **beside})


def prefill(layers: Any = "all", name: str = "anchor", **beside: Any) -> PrefillGroups:
    method = settings_of_rules(layers, name, **beside).prefill
    assert method is not None
    return method


@pytest.mark.parametrize(
    ("rules", "beside", "text"),
    [
        ({"0-1": "dense", "2-": {"method": "anchor", "theta": 8}}, {}, {"layers": "2-", "theta": 8}),
        ({"2-": {}}, {"theta": 8, "dense_tail": 3}, {"layers": "2-", "theta": 8, "dense_tail": 3}),
        ({"5": {}, "2-3": {"theta": 8}, "0": "dense"}, {"theta": 8}, {"layers": "5,2-3", "theta": 8}),
        ({"1-": {"threshold_scale_factor": 9}}, SKIP_NAME, {**SKIP_NAME, "layers": "1-", "threshold_scale_factor": 9}),
    ],
)
def test_dense_rules_and_one_method_are_its_text_form(rules: Any, beside: dict[str, Any], text: dict[str, Any]) -> None:
    found, other = settings_of_rules(rules, **beside), prefill(**text)
    assert found.prefill is not None and found.prefill.configs == other.configs
    assert [*map(type, found.prefill.methods)] == [*map(type, other.methods)]
    assert found.prefill.described == found.prefill_name == beside.get("name", "anchor")


@pytest.mark.parametrize(
    ("rules", "beside"),
    [
        (RULES, {}),
        (RULES, {"crossover_tokens": 100, "dense_tail": 9, "theta": [1.0, 2.0, 3.0, 4.0]}),
        ({"0": "dense", "1-": {}}, {"step": 8, "dense_fallback": "never"}),
        ({"0": {}, "1": SKIP}, {"dense_tail": 5}),
        ({"0": {"theta": 8}, "1": {**SKIP, "target_sparsity": 0.5}}, {}),
        # What one rule says is for all, and then the first two are alike.
        ({"0": {"dense_tail": 128}, "1": {}, "2-": {**SKIP, "dense_tail": 128}}, {}),
    ],
)
def test_what_is_resolved_resolves_to_itself(rules: dict[str, Any], beside: dict[str, Any]) -> None:
    found = build(None, {}, "anchor", {"layers": rules, **beside}, checkpoint=lambda: STAND_IN)
    again = build(None, {}, "anchor", json.loads(json.dumps(found.prefill_resolved)))
    assert found.prefill is not None and again.prefill is not None
    assert again.prefill_resolved == found.prefill_resolved and again.prefill.described == found.prefill.described
    assert again.prefill.configs == found.prefill.configs and again.prefill.config == found.prefill.config
    assert list(found.prefill_resolved["layers"]) == list(rules)
    assert not any("dense_tail" in rule for rule in found.prefill_resolved["layers"].values())


def test_a_start_hands_on_the_rules_in_full(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = write_config(tmp_path_factory.mktemp("qwen3"), "qwen3")
    fields: dict[str, Any] = {"sparse_prefill_config": json.dumps({"layers": RULES}), "chunked_prefill_size": 4096}
    args: Any = ServerArgs(model_path=model, sparse_prefill_method="anchor", **fields)
    assert json.loads(args.sparse_prefill_config) == settings_of_rules(RULES).prefill_resolved


@pytest.mark.parametrize(
    ("step", "crossover", "group", "begin"),
    [(3, 0, 384, 384), (3, 385, 384, 768), (16, 100, 256, 256), (8, 200, 128, 256), (8, "auto", 128, 8192)],
)
def test_all_parts_begin_at_one_end_of_whole_groups(step: int, crossover: Any, group: int, begin: int) -> None:
    method = prefill({"0": {"block_size": 16, "step": step}, "1": SKIP}, crossover_tokens=crossover)
    assert method.group_tokens == group and all(group % part.group_tokens == 0 for part in method.methods)
    assert {method.dense_below, *(part.dense_below for part in method.methods)} == {begin}
    assert method.boundary(begin + 2 * group - 1) == begin + group and method.boundary(begin - 1) == begin - 1


@pytest.mark.parametrize(
    ("fields", "tail"),
    [
        ({"layers": MIXED}, 128),
        ({"layers": MIXED, "dense_tail": 7}, 7),
        ({"layers": {"0": {"dense_tail": 0}, "1": {**SKIP, "dense_tail": 0}}}, 0),
        ({"layers": {"0": {"threshold_scale_factor": 9}, "1": {}}, **SKIP_NAME}, 0),
    ],
)
def test_the_dense_tail_is_the_longest_by_default_unless_it_is_said(fields: dict[str, Any], tail: int) -> None:
    method = prefill(**fields)
    assert {method.config.dense_tail, *(config.dense_tail for config in method.configs)} == {tail}
    assert method.dense_from(1000) == 1000 - tail


def test_sizes_are_the_most_of_a_layer_and_all_that_layers_keep() -> None:
    args = SimpleNamespace(chunked_prefill_size=4096, enable_mixed_chunk=False)
    model = SimpleNamespace(context_len=32768)
    kvc = SimpleNamespace(model_config=model, server_args=args, model_dtype=torch.bfloat16)

    def needed(**fields: Any) -> int:
        return memory.of_prefill(settings_of_rules(**fields), kvc, SHAPE).nbytes

    (short,), (usual,) = prefill(step=8).methods, prefill().methods
    scratch = [one.scratch_bytes(SHAPE, 4096, 32768) for one in (short, usual)]
    kept = short.kept_bytes(SHAPE, 1, torch.bfloat16) + usual.kept_bytes(SHAPE, 2, torch.bfloat16)
    layers = {"0": {"step": 8}, "1-2": {}, "3-": SKIP}
    assert kept > 0 < max(scratch) and needed(layers=layers) == max(scratch) + 2 * kept


def test_fields_of_a_request_go_to_the_parts_that_have_them() -> None:
    settings = settings_of_rules(RULES)
    asked = parse_options(settings, {"threshold_scale_factor": {"prefill": 9}, "theta": 3}).prefill
    assert asked is not None and settings.prefill is not None and asked.names == settings.prefill.names
    assert settings.prefill.described == "anchor in layers 1, anchor in layers 2, skip_softmax in layers 3"
    assert [config.model_dump().get("theta") for config in asked.configs] == [3, 3, None]
    assert [config.model_dump().get("threshold_scale_factor") for config in asked.configs] == [None, None, 9]
    assert [config.layers for config in asked.configs] == ["1", "2", "3"]
    assert parse_options(settings, {}).prefill is settings.prefill


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ({}, {"threshold_scale_factor": 250}, True),
        ({"theta": 3}, {"theta": 3.0, "threshold_scale_factor": 250}, True),
        ({"theta": 3, "threshold_scale_factor": 9}, {"threshold_scale_factor": {"prefill": 9}, "theta": 3}, True),
        # The server's own in one part each.
        ({"theta": 8}, {"theta": 12}, False),
    ],
)
def test_equal_overrides_are_one_namespace(one: dict[str, Any], two: dict[str, Any], same: bool) -> None:
    settings = settings_of_rules(RULES)
    asked = [parse_options(settings, params) for params in (one, two)]
    assert (asked[0].namespace == asked[1].namespace) is same
    for options in asked:
        for key in (namespaced(None, options), f"{namespaced('tenant', options)}|more"):
            held = prefill_of_namespace(settings, key)
            assert held is not None and options.prefill is not None and held.configs == options.prefill.configs


@pytest.mark.parametrize("exact", [False, True])
def test_a_request_may_have_dense_prefill(exact: bool) -> None:
    settings = settings_of_rules(MIXED, exact_prefix=exact)
    for params in ({"exact_prefix": True}, {"sparse": False}):
        options = parse_options(settings, params)
        assert options.prefill is None and options.namespace == ("" if exact else f"{NAMESPACE}exact_prefix")
        assert prefill_of_namespace(settings, namespaced("tenant", options)) is None
    sparse = parse_options(settings, {"exact_prefix": False})
    held = prefill_of_namespace(settings, namespaced("tenant", sparse))
    assert bool(sparse.namespace) is exact and held is not None and sparse.prefill is not None
    assert held.configs == sparse.prefill.configs and not any(config.exact_prefix for config in held.configs)


def path(method: PrefillGroups, layers: tuple[int, ...] = (0, 2)) -> PrefillPath:
    slots = torch.arange(2 * TOKENS).view(2, TOKENS)
    cache = torch.randn(2 * TOKENS, 1, DIM, generator=torch.Generator().manual_seed(0))
    # So that what follows the first keys of each row can be left out.
    cache.view(2, TOKENS, DIM)[:, :16] *= 8
    pool = SimpleNamespace(get_key_buffer=lambda _: cache, get_value_buffer=lambda _: cache)
    return PrefillPath(method, layers, pool, slots, PAGE, HEADS)


def run(at_work: PrefillPath, spans: list[PrefillSpan]) -> list[torch.Tensor]:
    at_work.begin(spans, torch.arange(2))
    tokens = sum(span.tokens for span in spans)
    found = []
    for layer_id in filter(at_work.takes, range(3)):
        layer = SimpleNamespace(layer_id=layer_id, tp_q_head_num=HEADS, qk_head_dim=DIM, v_head_dim=DIM)
        layer.scaling, layer.k_scale_float, layer.v_scale_float, layer.logit_cap = 0.25, None, None, 0.0
        query = torch.randn(tokens, HEADS * DIM, generator=torch.Generator().manual_seed(layer_id))
        found.append(at_work.attend(query, query, query, layer, torch.arange(tokens), save_kv_cache=False))
    return found


def counts_of(at_work: PrefillPath) -> dict[str, int]:
    return at_work.device_totals(at_work.pairs.tolist())


def spans_of(method: PrefillGroups) -> list[PrefillSpan]:
    return [PrefillSpan(0, GROUP, 3 * GROUP, method), PrefillSpan(1, 50, 60, None)]


def test_a_pass_counts_the_pairs_of_all_parts_and_the_blocks_of_one() -> None:
    method = prefill(PARTS, crossover_tokens=100)
    found, skip = path(method), prefill(name="skip_softmax", threshold_scale_factor=0, crossover_tokens=GROUP)
    dense = [PrefillSpan(0, 0, GROUP, method)]
    known = dense[0].causal_pairs * HEADS * 2
    none = {"blocks_skipped": 0, "blocks_visited": 0}
    assert not run(found, dense) and counts_of(found) == {"pairs_attended": known, "pairs_causal": known, **none}
    run(found, spans_of(method))
    alone = path(skip, (2,))
    run(alone, spans_of(skip))
    pairs = sum(span.causal_pairs for span in [*dense, *spans_of(method)]) * HEADS * 2
    skipped, visited = alone.pairs.tolist()[2:]
    assert method.more_counts == skip.more_counts == ("blocks_skipped", "blocks_visited")
    assert visited > 0 == skipped and [*counts_of(found).values()] == [pairs, pairs, 0, visited]
    assert (found.sparse_tokens, found.dense_tokens) == (2 * GROUP, GROUP + 10)


def test_each_layer_attends_as_by_its_part_alone() -> None:
    anchor, skip = {"block_size": 16, "step": 2, "theta": 1}, {"threshold_scale_factor": 200}
    settings = settings_of_rules(PARTS, crossover_tokens=100)
    method = parse_options(settings, {"theta": 1, **skip}).prefill
    assert method is not None and settings.prefill is not None
    found, alone = path(settings.prefill), []
    layers = run(found, spans_of(method))
    for name, layer_id, own in (("anchor", 0, anchor), ("skip_softmax", 2, skip)):
        one = prefill(name=name, **own, crossover_tokens=GROUP)
        at_work = path(one, (layer_id,))
        assert torch.equal(layers[layer_id // 2], *run(at_work, spans_of(one)))
        alone.append(at_work.pairs.tolist())
    assert all(attended < pairs for attended, pairs, *_ in alone)
    sums = [alone[0][0] + alone[1][0], alone[0][1] + alone[1][1], *alone[1][2:]]
    assert [*counts_of(found).values()] == sums


def test_the_kernels_of_each_part_run_once_before_a_request_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[type, int, int]] = []
    for kind in (Anchor, SkipSoftmax):

        def seen(self: Any, plan: Any, layer_id: int, inputs: Any, attend: Any = kind.attend) -> None:
            ran.append((type(self), layer_id, len(inputs.query)))
            attend(self, plan, layer_id, inputs)

        monkeypatch.setattr(kind, "attend", seen)
    found = path(prefill({**PARTS, "3": "dense"}, crossover_tokens=0))
    found.warm_up(torch.float32)
    assert ran == [(Anchor, 0, GROUP), (SkipSoftmax, 2, GROUP)]
    assert not found.pairs.any() and not found.takes(0) and (found.sparse_tokens, found.dense_tokens) == (0, 0)
    assert [(part["method"], part["layers"]) for part in found.parts()] == [("anchor", [0]), ("skip_softmax", [2])]
    assert "2 of 3 layers (0, 2), groups of 128 tokens, dense below position 128" in found.describe(3)


def test_calibration_refuses_rules_of_several_methods() -> None:
    for rules in (MIXED, {"0": {"step": 8}, "1-": {}}):
        with refused("layers", rules, CalibrationError):
            base_method(json.dumps({"layers": rules}))
    assert base_method('{"layers": {"0": "dense", "1-": {}}}').config.layers == "1-"
    several = build("skip_softmax", {}, "skip_softmax", {"layers": {"0": {"method": "anchor"}, "1-": {}}})
    with refused("layers", None, CalibrationError):
        _layers(several, SimpleNamespace())  # pyright: ignore


@pytest.mark.parametrize("rules", [{"0": {"method": "anchor"}, "1-": {}}, {"0": "dense", "1-": {}}, {"all": {}}, MIXED])
def test_rules_of_prefill_do_not_come_along_with_a_decode_method(rules: dict[str, Any]) -> None:
    name = "anchor" if rules is MIXED else "skip_softmax"
    assert build("skip_softmax", {}).comes_along
    settings = build("skip_softmax", {}, name, {"layers": rules})
    assert not settings.comes_along and settings.prefill_flag == f"--sparse-prefill-method {name}"
    again = build("skip_softmax", settings.resolved, name, json.loads(json.dumps(settings.prefill_resolved)))
    assert not again.comes_along and again.prefill_resolved == settings.prefill_resolved
