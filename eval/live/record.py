"""The JSONL files of results: one schema for every command, and files that an interrupted run can go on with.

A file is a row of kind ``header``, then rows as they are measured, then the summary. Kinds that several commands share:

- ``header``: ``command``, ``revision`` of this code, ``started`` (UTC), ``arguments``, and what the servers say about
  themselves.
- ``item``: one question, window or prompt: ``id`` (unique within an arm), ``task``, ``arm`` (which server or setting),
  ``scores`` by name, and what else the command keeps of it; ``failed`` says why there are no scores.
- ``counters``: what a group of items did on a sparse server, the ``density`` that decode really read, and the
  ``sparsity`` of prefill where that has a method.
- ``summary``: figures of a group, with their 95 % interval.
- ``resumed``: a later run went on here.
"""

from __future__ import annotations

import importlib.metadata
import json
import lzma
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from eval.live.counters import EvaluationError, Unreachable

SERVER_FIELDS = (
    "version",
    "model_path",
    "attention_backend",
    "page_size",
    "quantization",
    "kv_cache_dtype",
    "dtype",
    "device",
    "disable_cuda_graph",
    "disable_radix_cache",
    "chunked_prefill_size",
    "sparse_method",
    "sparse_config",
    "sparse_prefill_method",
    "sparse_prefill_config",
    "max_total_num_tokens",
)
# What two servers must have in common for one's results to go on with the other's; a restart may change the rest.
SAME_SERVER = (
    "version",
    "models",
    "model_path",
    "sparse_method",
    "sparse_config",
    "sparse_prefill_method",
    "sparse_prefill_config",
    "kv_cache_dtype",
    "dtype",
    "page_size",
)

PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python")


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
    """Ask a server about itself: model, and for SGLang version, flags and, on a sparse one, its counters.

    Raises:
        Unreachable: nobody answers, or somebody else than an OpenAI-compatible server.
    """
    try:
        models = client.get("/v1/models")
        info = client.get("/server_info")
    except httpx.TransportError as error:
        raise Unreachable(f"no server answers at {client.base_url}: {error}") from error
    try:
        facts: dict[str, Any] = (
            {"models": [model["id"] for model in models.json()["data"]]} if models.is_success else {}
        )
        answer = info.json() if info.is_success else None
    except (ValueError, KeyError, TypeError) as error:
        raise Unreachable(f"{client.base_url} is no OpenAI-compatible server: it answers something else") from error
    if models.is_error and info.is_error:
        raise Unreachable(
            f"{client.base_url} is no OpenAI-compatible server: /v1/models answers {models.status_code}; the URL is "
            "that of the server itself, without /v1"
        )
    if answer is None:
        return facts
    facts |= {field: answer.get(field) for field in SERVER_FIELDS}
    facts["sparse"] = answer["internal_states"][0].get("sparse")
    facts["memory_usage"] = answer["internal_states"][0].get("memory_usage")
    return facts


def command_name(command: str | None) -> str:
    """The name of a command without its package, by which its files are known: packages have changed."""
    return (command or "").rpartition(".")[2]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file, ``.jsonl`` or ``.jsonl.xz``; a last line that was cut off is left out.

    Raises:
        EvaluationError: there is no such file, or another line is no JSON.
    """
    try:
        raw = path.read_bytes()
        lines = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode().splitlines()
    except OSError as error:
        raise EvaluationError(f"cannot read {path}: {error.strerror}") from error
    except lzma.LZMAError as error:
        raise EvaluationError(f"{path} is no xz file: {error}") from error
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path} is no text") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise EvaluationError(f"{path}, line {number}, is no JSON: {error}") from error
    if any(not isinstance(row, dict) for row in rows):
        raise EvaluationError(f"{path} is no file of results: a line is no JSON object")
    return rows


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the installed version of each package, of several the one that is imported; None where none is."""
    installed: dict[str, str] = {}
    for found in importlib.metadata.distributions():
        installed.setdefault(found.metadata["Name"], found.version)
    return {name: installed.get(name) for name in packages}


def result_files(folder: Path) -> dict[str, Path]:
    """The JSONL files of a folder, compressed ones too, by their names without suffixes."""
    paths = sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.xz")])
    return {path.name.split(".jsonl")[0]: path for path in paths}


def read_finished(path: Path) -> list[dict[str, Any]]:
    """The rows of a file whose run came to its end, refused otherwise: the summary is written last."""
    rows = read_rows(path)
    if not any(row["kind"] == "summary" for row in rows):
        raise EvaluationError(f"{path} has no summary: its run was refused or interrupted; run the same command again")
    return rows


def summarised(path: Path) -> bool:
    """Whether a result file is there and complete."""
    return path.exists() and any(row.get("kind") == "summary" for row in read_rows(path))


class Record:
    """A JSONL file that begins with its header; rows are on disk as soon as they are added.

    Args:
        path: the file.
        command: name of the command.
        revision: of the code; asked of git by default.
        resume: go on with the file if it is there, otherwise it is overwritten. ``earlier`` are its rows, header left
            out.
        **header: facts for the first line. ``arguments`` are what the results depend on.

    Raises:
        EvaluationError: the file holds the results of other arguments, or of another server.
    """

    def __init__(self, path: Path, command: str, revision: str | None = None, resume: bool = False, **header: Any):
        started = datetime.now(UTC).isoformat(timespec="seconds")
        first = {"kind": "header", "command": command, "revision": revision or git_revision(), "started": started}
        first |= header
        # As it will be read back: tuples become lists.
        first = json.loads(json.dumps(first))
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = read_rows(path) if resume and path.exists() else []
        self.earlier = rows[1:]
        if not rows:
            self._file = path.open("w")
            self.add(**first)
            return
        require_same(path, rows[0], first)
        # The summary is made anew; a line that was cut off goes too.
        self.earlier = [row for row in self.earlier if row["kind"] != "summary"]
        kept = path.with_suffix(path.suffix + ".tmp")
        kept.write_text("".join(json.dumps(row) + "\n" for row in [rows[0], *self.earlier]))
        kept.replace(path)
        self._file = path.open("a")
        self.add("resumed", revision=first["revision"])

    def add(self, kind: str, **fields: Any) -> None:
        """Write a row at once, so that an interrupted run keeps what it measured."""
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")
        self._file.flush()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()


def require_same(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse to go on with a file whose header shows other arguments or another server than this run has."""
    if old.get("kind") != "header":
        raise EvaluationError(f"{path} is no file of results: its first line is no header")
    differing = [("command", command_name(old.get("command")), command_name(new["command"]))]
    before, now = old.get("arguments", {}), new.get("arguments", {})
    differing += [(f"argument {name}", before.get(name), now.get(name)) for name in sorted({*before, *now})]
    for arm in sorted({*old.get("servers", {}), *new.get("servers", {})}):
        one, other = (header.get("servers", {}).get(arm) or {} for header in (old, new))
        both = [field for field in SAME_SERVER if field in one and field in other]
        differing += [(f"{arm} server's {field}", one[field], other[field]) for field in both]
    found = [f"{name} was {was!r} and is {value!r}" for name, was, value in differing if was != value]
    if found:
        raise EvaluationError(f"{path} holds other results ({'; '.join(found)}): delete it or give another --out")


def gpus() -> str | None:
    """The names of the GPUs that this process sees, each kind once; None without any."""
    import torch

    return " or ".join(sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})) or None


def this_machine() -> dict[str, Any]:
    """``device`` and ``versions`` of the servers that this process starts."""
    return {"device": gpus() or "cpu", "versions": versions(PACKAGES)}
