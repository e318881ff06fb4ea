"""Servers and prompts that the server tests share."""

import random
import re
from pathlib import Path

import pytest
from checkpoints import random_qwen3
from server_fixtures import serve  # noqa: F401


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_qwen3(tmp_path_factory.mktemp("random-qwen3"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Twenty random prompts of 17 to 2000 tokens; lengths at and around page and chunk borders among them."""
    rng = random.Random(7)
    lengths = [17, 31, 32, 33, 64, 130, 255, 256, 257, 400, 511, 512, 513, 640, 777, 1024, 1025, 1500, 1999, 2000]
    return [[rng.randrange(10, 1000) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="session")
def contributed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples of develop/method.md, installed as a third party would ship them: a folder for ``PYTHONPATH``."""
    folder = tmp_path_factory.mktemp("third-party")
    text = (Path(__file__).parents[2] / "sglang_sparse" / "docs" / "develop" / "method.md").read_text()
    (folder / "my_package.py").write_text("\n\n".join(re.findall(r"```python\n(.*?)```", text, re.S)))
    ((group, entries),) = re.findall(r'```toml\n\[project\.entry-points\."([\w.]+)"\]\n(.*?)\n```', text, re.S)
    metadata = folder / "my_package-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{entries.replace(chr(34), '')}\n")
    return folder
