"""tiny-dsa as the server tests start and ask it."""

from pathlib import Path
from typing import Any

from server_requests import sparse_state

from launch.server import ServerProcess

MODEL = Path("eval/models/tiny-dsa")
FLAGS = ("--page-size", "64", "--chunked-prefill-size", "512", "--dtype", "float32")
TOPK, LAYERS, PAGE = 512, 4, 64
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def moved(server: ServerProcess, before: dict[str, Any], *names: str) -> list[int]:
    """By how much counters of a server have grown since a ``sparse_state``."""
    after = sparse_state(server)
    return [after[name] - before[name] for name in names]
