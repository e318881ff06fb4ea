"""Tests of the options of a request, and of how wrong ones are refused."""

import pytest
from refusals import refused

from sglang_sparse.config.request_options import (
    _configs,
    adapter_of_namespace,
    namespaced,
    parse_options,
    prefill_of_namespace,
)
from sglang_sparse.config.settings import build
from sglang_sparse.methods import registry
from sglang_sparse.methods.base import DecodeMethod
from sglang_sparse.methods.config import MethodConfig
from sglang_sparse.methods.groups import DecodeGroups

RESA = build("resa", {"rectify_on_finish": True})


class Plain(DecodeMethod):
    config_class = MethodConfig

    def aux_specs(self, model):
        return ()

    def n_select(self, n_pages):
        return n_pages

    def select(self, view, layer_id, query, pools):
        raise NotImplementedError


def test_nothing_asked_is_the_servers_own() -> None:
    for params in (None, {}, {"thinking_budget": 5, "__req__": object()}):
        options = parse_options(RESA, params)
        assert options.decode is RESA.decode and options.sparse
        assert (options.rectify_interval, options.forced_tokens) == (32, ())


def test_overrides_are_validated_together_and_shared() -> None:
    one = parse_options(RESA, {"active_ratio": 0.5, "rectify_interval": 0})
    two = parse_options(RESA, {"active_ratio": 0.5, "rectify_interval": 0})
    assert one.decode is two.decode is not RESA.decode
    assert (one.decode.config.active_ratio, one.rectify_interval) == (0.5, 0)
    assert RESA.config.active_ratio == 0.1


def test_dense_is_never_rectified() -> None:
    options = parse_options(RESA, {"sparse": False})
    assert (options.sparse, options.rectify_interval) == (False, 0)


def test_a_method_without_rectification_has_no_interval() -> None:
    from sglang_sparse.config.settings import Settings

    plain = Settings("plain", DecodeGroups(["plain"], [Plain(MethodConfig())]))
    with refused("rectify_interval", 8):
        parse_options(plain, {"rectify_interval": 8})
    assert parse_options(plain, {"sparse": False}).rectify_interval == 0


METHODS = {
    **{name: (name, None) for name in registry.DECODE_METHODS},
    **{f"{name} (prefill)": (None, name) for name in registry.PREFILL_METHODS},
}


@pytest.mark.parametrize("method", METHODS)
def test_fields_of_other_methods_are_refused_and_names_of_nobody_are_not(method: str) -> None:
    settings = build(METHODS[method][0], {}, METHODS[method][1])
    configs = [config for each in _configs(settings).values() for config in each]
    own = {field for config in configs for field in type(config).model_fields}
    overridable = {field for config in configs for field in config.request_fields}
    foreign = sorted(registry.known_fields() - own)
    assert len(foreign) > 5
    for field in foreign:
        with refused(field, 3) as caught:
            parse_options(settings, {field: 3})
        assert f"{settings.flag} has no such field" in str(caught.value) and "sparse" in caught.value.allowed
    for field in own - overridable:
        with refused(field, 3) as caught:
            parse_options(settings, {field: 3})
        assert "belongs to the server's config" in str(caught.value) and "sparse" in caught.value.allowed
    options = parse_options(settings, {"thinking_budget": 3, "__req__": object(), "logit_bias_file": "x"})
    assert options.decode is settings.decode


def test_fields_of_third_parties_are_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"pages_at_random": 3}
    assert parse_options(RESA, params).decode is RESA.decode
    monkeypatch.setattr(registry, "known_fields", lambda: frozenset(params))
    with refused("pages_at_random", 3):
        parse_options(RESA, params)


def test_a_namespace_has_what_differs_from_the_server_alone() -> None:
    settings = build(None, {}, "anchor", {"theta": [12.0, 3.5], "exact_prefix": True})
    assert parse_options(settings, {}).prefill is None
    options = parse_options(settings, {"exact_prefix": False})
    own = parse_options(settings, {"exact_prefix": False, "theta": 7})
    assert "exact_prefix" in options.namespace and "theta" not in options.namespace and "theta" in own.namespace
    for asked, tenant, theta in ((options, None, [12.0, 3.5]), (own, "tenant", 7)):
        held = prefill_of_namespace(settings, namespaced(tenant, asked))
        assert asked.prefill is not None and held is not None and held.config == asked.prefill.config
        assert held.config.model_dump()["theta"] == theta and not held.config.exact_prefix


def test_a_namespace_has_the_adapter_that_sglang_appends() -> None:
    settings = build(None, {}, "anchor", {"theta": 12.0})
    usual, own = parse_options(settings, {}), parse_options(settings, {"theta": 7})
    for tenant in (None, "tenant"):
        for asked, theta in ((usual, 12.0), (own, 7)):
            key = f"{namespaced(tenant, asked, adapted=True)}id"
            held = prefill_of_namespace(settings, key)
            assert adapter_of_namespace(key) == "id" and held is not None and held.config.model_dump()["theta"] == theta
            assert adapter_of_namespace(namespaced(tenant, asked)) is None
    # Of a request that is refused.
    assert adapter_of_namespace(f"{namespaced(None, None, adapted=True)}id") == "id"


def test_options_in_a_mapping_leave_other_names_alone() -> None:
    foreign = {"window_size": 90, "ngram_size": 3, "active_ration": 7, "min_seq_len": 1}
    mapping = {"active_ratio": 0.5, "rectify_interval": 0, "forced_tokens": [4], "lossless": False}
    flat = parse_options(RESA, mapping)
    assert parse_options(RESA, {"sparse": mapping}) == flat
    assert parse_options(RESA, {**foreign, "sparse": mapping}, processor=True) == flat
    assert not parse_options(RESA, {**foreign, "sparse": False}, processor=True).sparse
    # With a processor the flat names are its own.
    for params in ({**foreign, **mapping}, {**foreign, **mapping, "sparse": True}, {**foreign, "sparse": {}}):
        assert parse_options(RESA, params, processor=True) == parse_options(RESA, {})


@pytest.mark.parametrize("processor", [False, True])
def test_a_mapping_has_known_options_only(processor: bool) -> None:
    for name, value in {"ngram_size": 3, "window_size": 90, "min_seq_len": 1, "sparse": False}.items():
        with refused(name, value) as caught:
            parse_options(RESA, {"sparse": {"active_ratio": 0.5, name: value}}, processor)
        assert "sparse" not in caught.value.allowed and "active_ratio" in caught.value.allowed
    with refused("active_ratio", 7):
        parse_options(RESA, {"sparse": {"active_ratio": 7}}, processor)


def test_a_flat_option_next_to_a_mapping_is_refused() -> None:
    for name in ("topk", "rectify_interval", "forced_tokens", "lossless"):
        with refused(name, 7):
            parse_options(RESA, {"sparse": {"active_ratio": 0.5}, name: 7, "thinking_budget": 3})
