"""The pins, in the form that pip reads and in the form that uv reads; and what a wheel holds."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_constraints_are_the_same_for_pip_and_uv() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["uv"]["constraint-dependencies"] == lines


def test_every_constraint_is_a_name_and_a_version() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"[a-z0-9][a-z0-9-]*==[\w.+!]+( ; .+)?", line), line


def test_a_wheel_has_the_recipes_and_the_cuda_sources(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("sglang_sparse", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        recipes = {Path(name).name: packed.read(name) for name in packed.namelist() if name.endswith(".toml")}
        assert all(name.split("/")[0].startswith("sglang_sparse") for name in packed.namelist())
        assert "sglang_sparse/recipes/qwen3-8b-long.toml" in packed.namelist()
        sources = {str(path.relative_to(ROOT / "kernels")) for path in (ROOT / "kernels").rglob("*.cu*")}
        assert "sglang_sparse_kernels/common/cuda/hopper.cuh" in sources and sources <= set(packed.namelist())
    assert recipes == {path.name: path.read_bytes() for path in (ROOT / "sglang_sparse" / "recipes").iterdir()}
