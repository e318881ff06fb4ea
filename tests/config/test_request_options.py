"""What a request may ask for, and how a wrong wish is refused."""

import pytest

from sglang_sparse.config.request_options import _configs, namespaced, parse_options, prefill_of_namespace
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


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"rectify_interval": 1}, "rectify_interval: got 1; must be 0 (never) or at least 2"),
        ({"rectify_interval": -5}, "rectify_interval: got -5; Input should be greater than or equal to 0"),
        ({"rectify_interval": 4.5}, "rectify_interval: got 4.5; Input should be a valid integer"),
        ({"rectify_interval": True}, "rectify_interval: got True; Input should be a valid integer"),
        ({"rectify_interval": None}, "rectify_interval: got None, allowed: a number"),
        ({"active_ratio": 0}, "active_ratio: got 0; Input should be greater than 0"),
        ({"active_ratio": [1]}, "active_ratio: got [1], allowed: a number"),
        ({"sparse": "no"}, "sparse: got 'no', allowed: true or false"),
        ({"sparse": False, "active_ratio": 0.5}, "active_ratio: has no meaning for a request with sparse: false"),
        ({"active_ration": 0.5}, "custom_params: unknown field 'active_ration'; did you mean 'active_ratio'?"),
        ({"forced_tokens": [1, True]}, "forced_tokens: got [1, True], allowed: a list of token ids"),
        ({"forced_tokens": 7}, "forced_tokens: got 7, allowed: a list of token ids"),
    ],
)
def test_refused(params: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_options(RESA, params)
    assert expected in str(caught.value)


def test_a_method_without_rectification_has_no_interval() -> None:
    from sglang_sparse.config.settings import Settings

    plain = Settings("plain", DecodeGroups(["plain"], [Plain(MethodConfig())]))
    with pytest.raises(ValueError, match="rectify_interval: --sparse-method plain has no such field"):
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
        with pytest.raises(ValueError, match=rf"^{field}: {settings.flag} has no such field; allowed: .*sparse"):
            parse_options(settings, {field: 3})
    for field in own - overridable:
        with pytest.raises(
            ValueError, match=f"^{field}: belongs to the server's config; allowed in a request: .*sparse"
        ):
            parse_options(settings, {field: 3})
    options = parse_options(settings, {"thinking_budget": 3, "__req__": object(), "logit_bias_file": "x"})
    assert options.decode is settings.decode


def test_fields_of_third_parties_are_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"pages_at_random": 3}
    assert parse_options(RESA, params).decode is RESA.decode
    monkeypatch.setattr(registry, "known_fields", lambda: frozenset(params))
    with pytest.raises(ValueError, match="pages_at_random: --sparse-method resa has no such field"):
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
    with pytest.raises(ValueError, match=r"theta: got \[1, 2\], allowed: a number"):
        parse_options(settings, {"theta": [1, 2]})
