"""Where the names of methods come from."""

from pathlib import Path

import pytest

from sglang_sparse import registry


def test_entry_points_name_methods_of_either_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent.parent / "eval" / "controls"))
    assert "random_pages" in registry.decode_methods() and "random_pages" not in registry.prefill_methods()
    assert "random_stripes" in registry.prefill_methods() and "random_stripes" not in registry.decode_methods()
    monkeypatch.setitem(registry.PREFILL_METHODS, "random_stripes", "a:B")
    with pytest.raises(RuntimeError, match="'random_stripes:RandomStripes' redefines the built-in method"):
        registry.prefill_methods()


def test_a_third_party_prefill_method_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.PREFILL_METHODS, "broken", "no_such_package:Method")
    with pytest.raises(ValueError, match="--sparse-prefill-method broken: cannot load 'no_such_package:Method'"):
        registry.load_prefill_method("broken")
