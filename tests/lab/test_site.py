"""The documentation: it builds, its commands exist, and its troubleshooting page quotes messages that servers print."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "sglang_sparse" / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
# What stands before a block of commands that no test runs, and why not.
NEEDS = re.compile(r"<!-- needs: (a GPU|a large model) -->\n$")
# Its language, and what is in it.
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
# Tests of the modules that the pages' commands start.
RUN = {
    "launch.demo": "tests/test_demo.py",
    "eval.compare": "tests/server/test_compare.py",
    "sglang.launch_server": "tests/server/test_command_line.py",
    "sglang_sparse.check": "tests/tools/test_check.py",
    "sglang_sparse.serve": "tests/tools/test_serve.py",
    "sglang_sparse.calibrate": "tests/tools/test_calibrate.py",
    "sglang_sparse.tune": "tests/tools/test_tune.py",
    "eval.lab.documents": "tests/lab/test_documents.py",
    "pytest": "pyproject.toml",
}


def blocks(page: Path) -> list[tuple[str, bool]]:
    """Blocks of commands, each with whether it says what it needs."""
    text = page.read_text()
    found = [match for match in BLOCK.finditer(text) if not match[1]]
    return [(match[2], bool(NEEDS.search(text[: match.start()]))) for match in found]


def modules(commands: str) -> list[str]:
    return re.findall(r"python -m ([\w.]+)", commands)


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the docs extra")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path), "-f"]
    built = subprocess.run([*command, str(DOCS.parent / "mkdocs.yml")], capture_output=True, text=True, cwd=ROOT)
    assert built.returncode == 0, built.stderr[-4000:]
    assert "SparseIndices" in (tmp_path / "api" / "index.html").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exist_and_have_a_test_or_say_what_they_need(page: Path) -> None:
    for commands, marked in blocks(page):
        for module in modules(commands):
            assert importlib.util.find_spec(module), f"{module} does not exist"
            test = ROOT / RUN.get(module, "none")
            assert marked or (test.is_file() and module.split(".")[-1] in test.read_text()), f"no test runs {module}"


def test_quoted_messages_are_in_the_source() -> None:
    source = "".join(path.read_text() for path in (ROOT / "sglang_sparse").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    page = (DOCS / "troubleshooting.md").read_text()
    quotes = [quote for cell in re.findall(r"^\| (.+?) \|", page, re.M) for quote in re.findall(r"`([^`]+)`", cell)]
    parts = [part.strip() for quote in quotes for part in quote.split("…") if part.strip()]
    assert len(parts) > 15
    # That one is Python's argparse's.
    assert [part for part in parts if part not in joined] == ["unrecognized arguments: --sparse-method"]
