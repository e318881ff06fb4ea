"""Distributions that bring a method of their own."""

import sys
from pathlib import Path

import pytest

from sglang_sparse.methods import registry


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, prefill: str = "") -> None:
    """Install a distribution whose decode method "broken" is ``Method`` of a module of this text.

    ``prefill`` is the entry point of a prefill method.
    """
    (folder / "broken_method.py").write_text(text)
    about = folder / "broken_method-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken_method\nVersion: 0.1\n")
    entries = f"[{registry.ENTRY_POINT_GROUP}]\nbroken = broken_method:Method\n"
    (about / "entry_points.txt").write_text(f"{entries}[{registry.PREFILL_ENTRY_POINT_GROUP}]\n{prefill}\n")
    monkeypatch.syspath_prepend(str(folder))
    # What was imported by a test before is another one's.
    monkeypatch.delitem(sys.modules, "broken_method", raising=False)
