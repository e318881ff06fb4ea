"""The pins: one list, in the form that pip reads and in the form that uv reads."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

if sys.version_info < (3, 11):
    pytest.skip("tomllib needs Python 3.11", allow_module_level=True)
import tomllib


def test_constraints_are_the_same_for_pip_and_uv() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["uv"]["constraint-dependencies"] == lines


def test_every_constraint_is_a_name_and_a_version() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"[a-z0-9][a-z0-9-]*==[\w.+!]+( ; .+)?", line), line
