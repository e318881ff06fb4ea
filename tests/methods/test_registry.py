"""Tests of the sources of methods' names."""

from pathlib import Path

import pytest
from refusals import refused
from third_parties import install

from sglang_sparse.config.settings import build
from sglang_sparse.methods import registry


def test_entry_points_name_methods_of_either_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "", prefill="stripes = broken_method:Stripes")
    assert "broken" in registry.decode_methods() and "broken" not in registry.prefill_methods()
    assert "stripes" in registry.prefill_methods() and "stripes" not in registry.decode_methods()
    monkeypatch.setitem(registry.PREFILL_METHODS, "stripes", "a:B")
    with pytest.raises(RuntimeError, match="'broken_method:Stripes' redefines the built-in method"):
        registry.prefill_methods()


def test_a_third_party_prefill_method_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.PREFILL_METHODS, "broken", "no_such_package:Method")
    with refused("--sparse-prefill-method", "broken"):
        registry.load_prefill_method("broken")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_package", "No module named 'no_such_package'"),
        ("class Method", "expected ':'"),
        ("raise RuntimeError('its library is missing')", "its library is missing"),
        ("{}['its key']", "its key"),
        ("assert False, 'its claim'", "its claim"),
        ("Other = 1", "has no attribute 'Method'"),
        ("Method = 1", "it is no subclass of DecodeMethod"),
        ("class Method: pass", "it is no subclass of DecodeMethod"),
    ],
)
def test_a_third_party_that_cannot_be_loaded_is_refused_by_its_name_alone(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, text)
    with refused("--sparse-method", "broken") as caught:
        registry.load_decode_method("broken")
    assert said in str(caught.value)
    assert "broken" in registry.decode_methods()
    assert list(registry.loaded_decode_methods()) == list(registry.DECODE_METHODS)
    assert "active_ratio" in registry.known_fields()


def test_the_fields_of_a_third_party_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = registry.known_fields()
    install(
        tmp_path,
        monkeypatch,
        "from sglang_sparse.methods.resa import Resa, ResaConfig\n"
        "class MethodConfig(ResaConfig):\n    broken_ratio: float = 0.5\n"
        "class Method(Resa):\n    config_class = MethodConfig\n",
    )
    assert registry.known_fields() == before | {"broken_ratio"}


def test_requests_override_fields_of_a_config_alone() -> None:
    for methods in (registry.loaded_decode_methods(), registry.loaded_prefill_methods()):
        for name, method in methods.items():
            config = method.config_class
            assert set(config.phase_fields) <= set(config.request_fields) <= set(config.model_fields), name


def test_a_third_party_that_cannot_be_loaded_is_no_matter_of_other_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "import no_such_package")
    assert len(build("resa", {"layers": {"0": {}, "1-": {"active_ratio": 0.2}}}).decode.methods) == 2
    mixed = {"0": {}, "1": {"method": "robsa", "allow_uncalibrated": True}}
    with refused("layers", "robsa") as caught:
        build("resa", {"layers": mixed, "rectify_interval": 0})
    assert caught.value.allowed == "resa, rocketkv, skip_softmax"
    with refused("--sparse-method", "broken"):
        build("resa", {"layers": {"0": {}, "1": {"method": "broken"}}})
