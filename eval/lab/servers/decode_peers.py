"""Dense peers of ``eval.lab.bench_decode``, and figures of its rounds beside those that ``--dense-only`` measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from eval.lab.servers.server_facts import sglang_of
from eval.live.counters import EvaluationError
from eval.live.record import command_name, read_finished, read_rows

COMMAND = "eval.lab.bench_decode"
# Of a cache in float8, dense attention reads half the bytes, and answers something else.
SAME_SERVER = ("kv_cache_dtype", "dtype")


@dataclass(frozen=True)
class Peer:
    """Dense decode of the same batch on another server.

    Attributes:
        backend: its attention backend.
        file: name of the file that says so.
        rounds: times that it was measured.
        tpot: seconds per token, the median of the rounds.
        tpot_range: least and most of the rounds.
    """

    backend: str
    file: str
    rounds: int
    tpot: float
    tpot_range: tuple[float, float]


def decode_backend(client: httpx.Client) -> str | None:
    """The attention backend that a server of SGLang decodes dense with; that of prefill may be another."""
    info = client.get("/server_info").raise_for_status().json()
    return info.get("decode_attention_backend") or info.get("attention_backend")


def backend_of(facts: Mapping[str, Any]) -> str:
    """The same from the header of a result file; those of older revisions know one backend for both."""
    return facts.get("decode_backend") or facts.get("attention_backend") or "unknown"


def read_peers(paths: Iterable[Path], header: Mapping[str, Any]) -> list[Peer]:
    """Read the peers that ``--dense-only`` measured, file by file.

    Args:
        paths: of the files.
        header: of the file that they are compared with: ``server``, ``batch``, ``context`` and ``device``.

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
    """Return the fields of a header that two files must have in common."""
    server = header["server"]
    found = {"model": Path(server["model_path"]).name, "batch": header["batch"], "context": header["context"]}
    return found | {name: server.get(name) for name in SAME_SERVER} | {"device": header.get("device")}


def peer_of(path: Path) -> Peer:
    """Read the peer in a finished file of ``--dense-only``.

    Raises:
        EvaluationError: see `read_finished`.
    """
    header, *rows = read_finished(path)
    (row,) = [row for row in rows if row["kind"] == "summary"]
    return Peer(backend_of(header["server"]), path.name, row["rounds"], row["tpot"], tuple(row["tpot_range"]))


def outdated_peers(folder: Path) -> list[str]:
    """Find summaries whose figures of a peer differ from those of the file that they name, measured again since then.

    With another SGLang it is another peer, and says nothing of the figures that were measured beside the one before.

    Args:
        folder: of result files; a file that is not in it cannot be compared.

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


def bound_ratio(rectified: float, sparse: float, dense: float, dense_short: float, interval: int) -> float:
    """Time per token of the rectified arm over what it should cost.

    Args:
        rectified: seconds per token with rectification.
        sparse: without.
        dense: of dense decode at this context.
        dense_short: of dense decode at a short context.
        interval: tokens between rectifications.
    """
    return rectified / (sparse + (dense - dense_short) / interval)


def strongest(own: Sequence[float], backend: str, peers: Sequence[Peer]) -> tuple[str, Sequence[float]]:
    """The fastest dense decode by its median; among equals that of the server itself.

    Args:
        own: seconds per token of the dense arm, round by round.
        backend: of that server.
        peers: of other servers.

    Returns:
        Whose it is, and its seconds per token in each round. The rounds of a peer are others: its median stands for
        each of them.
    """
    best = min(peers, key=lambda peer: peer.tpot, default=None)
    if best is None or best.tpot >= median(own):
        return backend, own
    return f"{best.backend} (peer)", [best.tpot] * len(own)


def against(name: str, dense: Sequence[float], values: Sequence[float]) -> dict[str, Any]:
    """``dense``, whose dense decode it is; ``dense_ratio`` of the medians; ``dense_ratio_range`` over the rounds.

    Args:
        name: whose.
        dense: its seconds per token, round by round.
        values: the same of what is compared with it.
    """
    ratios = [one / value for one, value in zip(dense, values, strict=True)]
    ratio = median(dense) / median(values)
    return {"dense": name, "dense_ratio": ratio, "dense_ratio_range": (min(ratios), max(ratios))}


def summarise(
    rounds: Sequence[dict[str, Any]], interval: int, backend: str = "unknown", peers: Sequence[Peer] = ()
) -> list[dict[str, Any]]:
    """Figures of each arm over the rounds.

    Args:
        rounds: rows with arm, round, tpot_mean, ttft and density.
        interval: tokens between rectifications.
        backend: attention backend of the dense arm.
        peers: of other servers.

    Returns:
        For each arm the median time per token with its range, the ratio of the strongest dense decode to it (`against`,
        `strongest`), median time to the first token and density; for the rectified arm ``bound_ratio`` likewise, which
        goes by the arms of this server alone. Each peer is a row with arm "peer", its ``backend`` and its ``file``.
    """
    tpots: dict[str, list[float]] = {}
    for row in rounds:
        tpots.setdefault(row["arm"], []).append(row["tpot_mean"])
    reference = strongest(tpots["dense"], backend, peers)
    summary = []
    for arm, values in tpots.items():
        mine = [row for row in rounds if row["arm"] == arm]
        row: dict[str, Any] = {
            "arm": arm,
            "rounds": len(values),
            "tpot": median(values),
            "tpot_range": (min(values), max(values)),
            "ttft": median(t for row in mine for t in row["ttft"]),
            "density": mine[-1]["density"],
        }
        if arm != "dense_short":
            row |= against(*reference, values)
        if arm == "rectified" and "dense_short" in tpots:
            dense, short, sparse = tpots["dense"], tpots["dense_short"], tpots["sparse"]
            each = zip(values, sparse, dense, short, strict=True)
            bounds = [bound_ratio(r, s, d, d_short, interval) for r, s, d, d_short in each]
            row["bound_ratio"] = bound_ratio(row["tpot"], median(sparse), median(dense), median(short), interval)
            row["bound_ratio_range"] = (min(bounds), max(bounds))
        summary.append(row)
    beside = [
        {"arm": "peer", **asdict(peer)} | against(*reference, [peer.tpot] * len(tpots["dense"])) for peer in peers
    ]
    return [summary[0], *beside, *summary[1:]]
