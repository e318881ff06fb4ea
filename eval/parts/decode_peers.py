"""Dense peers of ``eval.bench_decode``: what its ``--dense-only`` measured on other servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx

from eval.figures.tpot import Peer
from eval.live.counters import EvaluationError
from eval.live.record import read_finished, read_rows

# Of a cache in float8, dense attention reads half the bytes, and answers something else.
SAME_SERVER = ("kv_cache_dtype", "dtype")


def decode_backend(client: httpx.Client) -> str | None:
    """The attention backend that a server of SGLang decodes dense with; that of prefill may be another."""
    info = client.get("/server_info").raise_for_status().json()
    return info.get("decode_attention_backend") or info.get("attention_backend")


def backend_of(facts: Mapping[str, Any]) -> str:
    """The same from the header of a result file; those of older revisions know one backend for both."""
    return facts.get("decode_backend") or facts.get("attention_backend") or "unknown"


def read_peers(paths: Iterable[Path], facts: Mapping[str, Any], batch: int, context: int) -> list[Peer]:
    """What ``--dense-only`` measured, file by file.

    Args:
        paths: of the files.
        facts: what the server under measurement says about itself.
        batch: requests that it decodes at once.
        context: tokens of each prompt.

    Raises:
        EvaluationError: a file is none of a finished run with ``--dense-only``, or of another model (by the name of its
            folder), batch, context or element type.
    """
    return [_read_peer(path, facts, batch, context) for path in paths]


def _read_peer(path: Path, facts: Mapping[str, Any], batch: int, context: int) -> Peer:
    header = next(iter(read_rows(path)), {})
    if header.get("command") != "eval.bench_decode" or not header.get("dense_only"):
        raise EvaluationError(f"--peer {path} is no file of eval.bench_decode --dense-only")
    (row,) = [row for row in read_finished(path) if row["kind"] == "summary"]
    found, wanted = ({"model": Path(of["model_path"]).name} for of in (header["server"], facts))
    found |= {"batch": header["batch"], "context": header["context"]}
    wanted |= {"batch": batch, "context": context}
    found |= {name: header["server"].get(name) for name in SAME_SERVER}
    wanted |= {name: facts.get(name) for name in SAME_SERVER}
    differing = [f"{name} is {found[name]}, wanted {wanted[name]}" for name in wanted if found[name] != wanted[name]]
    if differing:
        raise EvaluationError(f"--peer {path} is of something else: {'; '.join(differing)}")
    return Peer(backend_of(header["server"]), path.name, row["rounds"], row["tpot"], tuple(row["tpot_range"]))
