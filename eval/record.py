"""The JSONL files of results: a header that says what was measured on, then one row a measurement."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

SERVER_FIELDS = (
    "version",
    "model_path",
    "attention_backend",
    "page_size",
    "kv_cache_dtype",
    "dtype",
    "device",
    "disable_cuda_graph",
    "disable_radix_cache",
    "chunked_prefill_size",
    "sparse_method",
    "sparse_config",
    "max_total_num_tokens",
)


def git_revision() -> str:
    """The revision of this checkout, with ``+`` when files differ from it, or "unknown"."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def server_facts(client: httpx.Client) -> dict[str, Any]:
    """What a server says about itself: version, model, flags and, on a sparse one, its counters."""
    info = client.get("/server_info").raise_for_status().json()
    facts = {field: info.get(field) for field in SERVER_FIELDS}
    facts["sparse"] = info["internal_states"][0].get("sparse")
    facts["memory_usage"] = info["internal_states"][0].get("memory_usage")
    return facts


class Record:
    """A JSONL file that is opened with its header and closed with a summary.

    Args:
        path: the file, overwritten.
        command: name of the command.
        revision: of the code; asked of git by default.
        **header: facts for the first line.
    """

    def __init__(self, path: Path, command: str, revision: str | None = None, **header: Any):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self.add("header", command=command, revision=revision or git_revision(), **header)

    def add(self, kind: str, **fields: Any) -> None:
        """Write a row at once, so that an interrupted run keeps what it measured."""
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")
        self._file.flush()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()
