"""Servers as fixtures, for the folders whose conftest imports them."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from forked_server import ForkedServer

from launch.server import ServerProcess

STRICT_MEMORY = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
# Other tests may run on some of a server's GPUs.
SHARED_GPUS = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[ServerProcess]]:
    """Start a server: ``serve(checkpoint, *flags, config={...} or None, prefill={...} or None, env={...})``.

    ``config`` is that of the decode method ``method``.
    """
    logs, numbers = tmp_path_factory.mktemp("servers"), itertools.count()

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
        log = logs / f"{next(numbers)}.log"
        # A process that has seen the GPU cannot be forked.
        kind = ServerProcess if torch.cuda.is_available() else ForkedServer
        with kind(
            checkpoint,
            "--page-size",
            "16",
            *flags,
            *sparse,
            log_path=log,
            env=STRICT_MEMORY | SHARED_GPUS | (env or {}),
        ) as server:
            yield server

    return start
