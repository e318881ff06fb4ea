"""Ways to deploy a server on several GPUs, or with KV in host memory: how each is started, asked and compared."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx

from eval.live.client import Stream, checked, post, stream
from eval.live.record import read_finished
from eval.scores.tables import Column, length, number, table, text
from launch.server import ServerProcess, free_port

COMMAND = "eval.lab.bench_deployments"
DENSE, SPARSE = "dense", "sparse"
ONE, HOST, DP, PAIR = "one", "host", "dp", "pair"
DEPLOYMENTS = (ONE, HOST, "tp", DP, "pp", PAIR)
# Where a request that hits the prefix cache says something: the ranks of the others have caches of their own.
CACHED = (ONE, HOST)
FIGURES = ("ttft", "tpot", "itl_p99", "throughput", "ttft_cached")

Row = Mapping[str, Any]
Ask = Callable[[httpx.AsyncClient, dict[str, Any]], Awaitable[Stream]]


def flags_of(name: str, gpus: int) -> list[str]:
    """The flags of one of `DEPLOYMENTS` on so many GPUs; a pair's are those of its first server."""
    number = str(gpus)
    return {
        ONE: [],
        HOST: ["--enable-hierarchical-cache", "--hicache-ratio", "4"],
        "tp": ["--tp-size", number],
        DP: ["--tp-size", number, "--dp-size", number, "--enable-dp-attention"],
        "pp": ["--pp-size", number],
        PAIR: ["--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(free_port())],
    }[name]


@contextmanager
def started(
    name: str, gpus: int, folder: Path, flags: Sequence[str], log: Path, timeout: float
) -> Iterator[tuple[ServerProcess, Ask]]:
    """Start a deployment.

    Args:
        name: one of `DEPLOYMENTS`.
        gpus: that its ranks share.
        folder: of the model.
        flags: of every server.
        log: of the server that decodes; the prefill server of a pair writes to another file in its folder.
        timeout: seconds until a server must be ready.

    Yields:
        The server that decodes, and what asks the deployment.
    """
    own = flags_of(name, gpus)
    if name != PAIR:
        with ServerProcess(folder, *flags, *own, log_path=log, timeout=timeout) as server:
            yield server, stream
        return
    decode = ["--disaggregation-mode", "decode", "--base-gpu-id", "1"]
    first = ServerProcess(folder, *flags, *own, log_path=log.with_suffix(".prefill.log"), timeout=timeout)
    second = ServerProcess(folder, *flags, *decode, log_path=log, timeout=timeout)
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        list(pool.map(stack.enter_context, (first, second)))

        async def both(client: httpx.AsyncClient, request: dict[str, Any]) -> Stream:
            room = {
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": int(own[-1]),
                "bootstrap_room": random.getrandbits(62),
            }
            prefilled = asyncio.ensure_future(post(client, f"{first.url}/generate", request | room))
            answer = await stream(client, request | room)
            checked(await prefilled)
            return answer

        yield second, both


def agreement(mine: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """The mean share of an answer's tokens until it parts from the other one's."""
    shares = []
    for one, other in zip(mine, theirs, strict=False):
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
        shares.append(same / len(one))
    return fmean(shares)


def summarise(items: Sequence[Row]) -> list[dict[str, Any]]:
    """Compare the sparse server of each deployment with the dense one, and both with those on one GPU.

    Args:
        items: rows of counted runs.

    Returns:
        A row for each deployment that was measured on both: medians of `FIGURES` of the sparse server, and of the dense
        one by the prefix ``dense_``; ``NAME_over_one``, the figure over that on one GPU, of which ``NAME_over_dense``
        is the quotient, sparse over dense; ``same_as_one`` and ``same_as_dense``, by `agreement`.
    """
    grouped: dict[tuple[str, str], list[Row]] = {}
    for item in items:
        grouped.setdefault((item["deployment"], item["arm"]), []).append(item)
    alone = [grouped.get((ONE, arm), []) for arm in (SPARSE, DENSE)]
    found = []
    for name in dict.fromkeys(item["deployment"] for item in items):
        mine, theirs = (grouped.get((name, arm), []) for arm in (SPARSE, DENSE))
        if not mine or not theirs:
            continue
        row: dict[str, Any] = {"id": name, "task": "deployment", "deployment": name, "arm": SPARSE, "runs": len(mine)}
        row |= {field: mine[0][field] for field in ("ranks", "requests")}
        row["same_as_dense"] = agreement(mine[0]["tokens"], theirs[0]["tokens"])
        row["same_as_one"] = agreement(mine[0]["tokens"], alone[0][0]["tokens"]) if alone[0] else None
        for figure in FIGURES:
            ours, dense, one, dense_one = (_median(group, figure) for group in (mine, theirs, *alone))
            row |= {figure: ours, f"dense_{figure}": dense}
            if ours and dense and one and dense_one:
                row |= {f"{figure}_over_one": ours / one, f"dense_{figure}_over_one": dense / dense_one}
                row[f"{figure}_over_dense"] = row[f"{figure}_over_one"] / row[f"dense_{figure}_over_one"]
        found.append(row)
    return found


def _median(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return median(values) if values else None


def deployments(*paths: Path) -> str:
    """Return the table of deployments against one GPU, sparse and dense, from one file or several."""
    columns: list[Column] = [
        ("deployment", text("deployment")),
        ("requests", text("requests")),
        ("first token, s", number("ttft", 3)),
        ("dense", number("dense_ttft", 3)),
        ("TPOT, ms", number("tpot", 2, 1e3)),
        ("dense", number("dense_tpot", 2, 1e3)),
        ("slowest of a hundred, ms", number("itl_p99", 1, 1e3)),
        ("dense", number("dense_itl_p99", 1, 1e3)),
        ("cached, s", number("ttft_cached", 3)),
        ("dense", number("dense_ttft_cached", 3)),
        ("throughput over one GPU's", number("throughput_over_one", 2)),
        ("dense", number("dense_throughput_over_one", 2)),
        ("sparse over dense", number("throughput_over_dense", 3)),
    ]
    rows = [row for path in paths for row in read_finished(path) if row["kind"] == "item"]
    return table(sorted(summarise(rows), key=lambda row: DEPLOYMENTS.index(row["id"])), columns)


def beside_stock(*paths: Path) -> str:
    """Return the table of a method that should cost nothing on one GPU: a row a file, with what its runs took."""
    rows = []
    for path in paths:
        header, *found = read_finished(path)
        items = [row for row in found if row["kind"] == "item"]
        (row,) = summarise(items)
        row["length"] = header["arguments"]["input_length"]
        for figure in ("ttft", "tpot"):
            runs = [[item[figure] for item in items if item["arm"] == arm] for arm in (SPARSE, DENSE)]
            row[f"{figure}_runs"] = [[min(taken), max(taken)] for taken in runs]
            row[f"{figure}_median"] = median(runs[0]) / median(runs[1])
            row[f"{figure}_fastest"] = min(runs[0]) / min(runs[1])
        rows.append(row)

    def taken(figure: str, arm: int, digits: int, scale: float) -> Callable[[Row], str]:
        return lambda row: " … ".join(f"{seconds * scale:.{digits}f}" for seconds in row[f"{figure}_runs"][arm])

    columns: list[Column] = [("prompt", length), ("requests", text("requests")), ("runs", text("runs"))]
    for title, figure, digits, scale in (("first token, s", "ttft", 3, 1.0), ("TPOT, ms", "tpot", 2, 1e3)):
        columns += [(title, taken(figure, 0, digits, scale)), ("stock", taken(figure, 1, digits, scale))]
        columns += [("medians", number(f"{figure}_median", 3)), ("fastest", number(f"{figure}_fastest", 3))]
    return table(rows, [*columns, ("same answers", number("same_as_dense", 2))])
