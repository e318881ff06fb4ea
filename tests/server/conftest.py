"""Servers and prompts that the server tests share."""

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from checkpoints import random_qwen3
from forked_server import ForkedServer

from launch.server import ServerProcess

STRICT_MEMORY = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_qwen3(tmp_path_factory.mktemp("random-qwen3"))


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[ServerProcess]]:
    """Start a server: ``serve(checkpoint, *flags, config={...} or None, prefill={...} or None, env={...})``.

    ``config`` is that of the decode method ``method``.
    """
    logs = tmp_path_factory.mktemp("servers")

    @contextmanager
    def start(
        checkpoint: Path,
        *flags: str,
        method: str = "resa",
        config: dict[str, object] | None = None,
        prefill: dict[str, object] | None = None,
        env: dict[str, str] | None = None,
    ) -> Iterator[ServerProcess]:
        sparse = [] if config is None else ["--sparse-method", method, "--sparse-config", json.dumps(config)]
        if prefill is not None:
            sparse += ["--sparse-prefill-method", "anchor", "--sparse-prefill-config", json.dumps(prefill)]
        log = logs / f"{len(list(logs.iterdir()))}.log"
        # A process that has seen the GPU cannot be forked.
        kind = ServerProcess if torch.cuda.is_available() else ForkedServer
        with kind(
            checkpoint, "--page-size", "16", *flags, *sparse, log_path=log, env={**STRICT_MEMORY, **(env or {})}
        ) as server:
            yield server

    return start


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Twenty random prompts of 17 to 2000 tokens; lengths at and around page and chunk borders among them."""
    rng = random.Random(7)
    lengths = [17, 31, 32, 33, 64, 130, 255, 256, 257, 400, 511, 512, 513, 640, 777, 1024, 1025, 1500, 1999, 2000]
    return [[rng.randrange(10, 1000) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="session")
def contributed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples of CONTRIBUTING.md, installed as a third party would ship them: a folder for ``PYTHONPATH``."""
    folder = tmp_path_factory.mktemp("third-party")
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    (folder / "my_package.py").write_text("\n\n".join(re.findall(r"```python\n(.*?)```", text, re.S)))
    ((group, entries),) = re.findall(r'```toml\n\[project\.entry-points\."([\w.]+)"\]\n(.*?)\n```', text, re.S)
    metadata = folder / "my_package-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{entries.replace(chr(34), '')}\n")
    return folder
