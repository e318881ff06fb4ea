"""Dense peers of ``eval.lab.bench_decode``: what its ``--dense-only`` measured on other servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx

from eval.live.counters import EvaluationError
from eval.live.record import command_name, read_finished, read_rows, sglang_of
from eval.serving.tpot import Peer

COMMAND = "eval.lab.bench_decode"
# Of a cache in float8, dense attention reads half the bytes, and answers something else.
SAME_SERVER = ("kv_cache_dtype", "dtype")


def decode_backend(client: httpx.Client) -> str | None:
    """The attention backend that a server of SGLang decodes dense with; that of prefill may be another."""
    info = client.get("/server_info").raise_for_status().json()
    return info.get("decode_attention_backend") or info.get("attention_backend")


def backend_of(facts: Mapping[str, Any]) -> str:
    """The same from the header of a result file; those of older revisions know one backend for both."""
    return facts.get("decode_backend") or facts.get("attention_backend") or "unknown"


def read_peers(paths: Iterable[Path], header: Mapping[str, Any]) -> list[Peer]:
    """What ``--dense-only`` measured, file by file.

    Args:
        paths: of the files.
        header: of the file beside whose figures they are put: ``server``, ``batch``, ``context`` and ``device``.

    Raises:
        EvaluationError: a file is none of a finished run with ``--dense-only``, or of another model (by the name of its
            folder), batch, context or element type, or of another device where both files say theirs.
    """
    return [_read_peer(path, header) for path in paths]


def _read_peer(path: Path, header: Mapping[str, Any]) -> Peer:
    own = next(iter(read_rows(path)), {})
    if command_name(own.get("command")) != command_name(COMMAND) or not own.get("dense_only"):
        raise EvaluationError(f"--peer {path} is no file of {COMMAND} --dense-only")
    peer = peer_of(path)
    found, wanted = (_measured(of) for of in (own, header))
    if None in (found["device"], wanted["device"]):
        del found["device"], wanted["device"]
    differing = [f"{name} is {found[name]}, wanted {wanted[name]}" for name in wanted if found[name] != wanted[name]]
    if differing:
        raise EvaluationError(f"--peer {path} is of something else: {'; '.join(differing)}")
    return peer


def _measured(header: Mapping[str, Any]) -> dict[str, Any]:
    """What two files must have in common."""
    server = header["server"]
    found = {"model": Path(server["model_path"]).name, "batch": header["batch"], "context": header["context"]}
    return found | {name: server.get(name) for name in SAME_SERVER} | {"device": header.get("device")}


def peer_of(path: Path) -> Peer:
    """What a finished file of ``--dense-only`` says.

    Raises:
        EvaluationError: see `read_finished`.
    """
    header, *rows = read_finished(path)
    (row,) = [row for row in rows if row["kind"] == "summary"]
    return Peer(backend_of(header["server"]), path.name, row["rounds"], row["tpot"], tuple(row["tpot_range"]))


def outdated_peers(folder: Path) -> list[str]:
    """Where a summary has other figures of a peer than the file that it names: that was measured again since then.

    With another SGLang it is another peer, and says nothing of the figures that were measured beside the one before.

    Args:
        folder: of result files; what is not in it cannot be compared.

    Returns:
        A line for each such row, with both figures.

    Raises:
        EvaluationError: see `read_finished`.
    """
    found = []
    for path in sorted(folder.glob("bench-decode-*.jsonl")):
        header, *rows = read_finished(path)
        for row in rows:
            if row["kind"] != "summary" or row["arm"] != "peer" or not (folder / row["file"]).exists():
                continue
            peer = read_finished(folder / row["file"])[0]
            if sglang_of(peer) != sglang_of(header):
                continue
            now = peer_of(folder / row["file"])
            said = Peer(row["backend"], row["file"], row["rounds"], row["tpot"], tuple(row["tpot_range"]))
            if said != now:
                found.append(f"{path.name} has {_figures(said)} from {row['file']}, which has {_figures(now)}")
    return found


def _figures(peer: Peer) -> str:
    least, most = (f"{value * 1e3:.3f}" for value in peer.tpot_range)
    return f"{peer.tpot * 1e3:.3f} ms a token ({least} … {most}, {peer.rounds} rounds, {peer.backend})"
