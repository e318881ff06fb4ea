"""Tests of the digest of all that decides answers, and of differences, named as a user writes them."""

import json
from typing import Any

import pytest

from sglang_sparse import __version__
from sglang_sparse.config.digest import differences, digest, fields_of, published
from sglang_sparse.config.settings import build

RULES = {"layers": {"0-1": "dense", "2-": {"active_ratio": 0.2}}}


def fields(*methods: Any) -> dict[str, object]:
    settings = build(*methods)
    return fields_of(published(settings), settings.config.page_size)


def test_the_fields_are_the_resolved_ones_and_the_version() -> None:
    settings = build("resa", {"active_ratio": 0.3}, "anchor", {"theta": 4.0})
    settings.decode.crossover_tokens = 4096
    found = fields_of(published(settings), 32)
    assert settings.prefill
    assert (
        found.items()
        >= {
            "sglang-sparse": __version__,
            "--page-size": 32,
            "--sparse-method": "resa",
            "--sparse-config active_ratio": 0.3,
            "--sparse-config crossover_tokens": 4096,
            "--sparse-prefill-method": "anchor",
            "--sparse-prefill-config theta": 4.0,
            "--sparse-prefill-config crossover_tokens": settings.prefill.dense_below,
        }.items()
    )
    # As it is read from a server.
    assert fields_of(json.loads(json.dumps(published(settings))), 32) == found


def test_a_field_in_full_is_the_same_as_its_default() -> None:
    full = build("resa", {}).resolved
    assert digest(fields("resa", {})) == digest(fields("resa", full)) == digest(fields("resa", {**full}))


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        (("resa", {}), ("resa", {"active_ratio": 0.3}), {"--sparse-config active_ratio": "0.1 (a); 0.3 (b)"}),
        (
            (None, {}, "anchor", {"theta": 4.0}),
            (None, {}, "anchor", {"theta": 5.0}),
            {"--sparse-prefill-config theta": "4.0 (a); 5.0 (b)"},
        ),
        (("resa", {}), (None, {"page_size": 16}), {"--sparse-method": '"resa" (a); null (b)'}),
    ],
)
def test_what_differs_is_named(one: Any, other: Any, named: dict[str, str]) -> None:
    found = {"a": fields(*one), "b": fields(*other)}
    assert differences(found) == named
    assert digest(found["a"]) != digest(found["b"])


def test_rules_by_layer_are_one_field() -> None:
    found = {"a": fields("resa", RULES), "b": fields("resa", {"layers": {"0-1": "dense", "3-": {"active_ratio": 0.2}}})}
    (field,) = differences(found)
    assert field == "--sparse-config layers" and '"3-"' in differences(found)[field]


def test_those_who_agree_stand_together() -> None:
    found = dict(zip("abc", (fields("resa", {}), fields("resa", {"min_pages": 3}), fields("resa", {})), strict=True))
    (value,) = differences(found).values()
    assert value.endswith("(a, c); 3 (b)")
    assert differences({"a": found["a"], "c": found["c"]}) == {}
