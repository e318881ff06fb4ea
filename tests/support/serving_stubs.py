"""Stand-ins for the servers of ``eval.bench_serving`` and for what SGLang's benchmark client writes."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval import bench_serving
from eval.live.arms import Arm
from eval.live.client import Chunk, Stream
from eval.live.counters import COUNTED, PREFILL_COUNTED
from eval.serving import measurement
from eval.tasks.judge_commands import Target

CONFIG = {"min_seq_len": 4096, "crossover_tokens": 16384, "dense_fallback": "auto", "rectify_interval": 32}
PREFILL = {"crossover_tokens": 8192, "theta": 12.0, "block_size": 128, "step": 16}
ROBSA = {"min_seq_len": 4096, "crossover_tokens": 16384, "theta1": 0.9, "block_size": 16, "max_active_ratio": 0.5}
OUTPUT = 256


class FakeServer:
    """A server process and its client in one: seconds per token, KV tokens, and what it counts."""

    started: list["FakeServer"] = []
    # Every prompt of token ids that a server was asked, with its name.
    order: list[tuple[str, list[int]]] = []
    step = {"sparse": 0.002, "dense": 0.004}
    # Seconds of cold prefills, one after the other.
    ttft: dict[str, list[float]] = {"sparse": [1.0], "dense": [2.0]}
    pool = {"sparse": 10**6, "dense": 10**6}
    # Seconds that a hit takes longer for each prompt that any server was asked before it.
    drift = 0.0
    # Name of the server that caches nothing.
    forgets = ""
    dies = ""
    # Share of the blocks that robsa attends to; none: as the paper says.
    active: float | None = None
    # Share of the pairs of a long prompt that is left out; none: it is prefilled dense.
    left_out = 0.89
    flushes = True
    graphs = "full"

    def __init__(self, folder: Path, *flags: str, log_path: Path, timeout: float, env: dict[str, str] | None) -> None:
        self.name = log_path.name.split(".")[-2]
        self.folder, self.flags, self.log_path, self.env = folder, list(flags), log_path, env
        self.prefill = "--sparse-prefill-method" in flags
        self.sparse = "--sparse-method" in flags or self.prefill
        self.url, self.command, self.start_seconds = f"http://{self.name}", ["/bin/python", *flags], 1.0
        self.counts = dict.fromkeys(COUNTED, 0) | {"extend_pages_summarised": 0}
        self.prefilled_so_far = {"method": "anchor", "config": PREFILL, **dict.fromkeys(PREFILL_COUNTED, 0)}
        self.kept = dict.fromkeys(("prompts", "whole_prompts", "compacted", "freed_tokens", "compact_waits"), 0)
        self.closed = False
        self.prefilled = False
        self.asked: list[dict[str, Any]] = []
        FakeServer.started.append(self)

    def __enter__(self) -> "FakeServer":
        if self.dies == self.name:
            raise RuntimeError("server exited with 2")
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def log(self) -> str:
        return "loading\nsglang_sparse: error: no such method\nbye\n"

    @property
    def method(self) -> str | None:
        """Of decode."""
        return after(self.flags, "--sparse-method") if "--sparse-method" in self.flags else None

    def counters(self) -> dict[str, Any]:
        kept = {"kept": dict(self.kept)} if self.method == "rocketkv" else {}
        return dict(self.counts) | kept | ({"prefill": dict(self.prefilled_so_far)} if self.prefill else {})

    def state(self) -> dict[str, Any] | None:
        if not self.sparse:
            return None
        config = {None: None, "robsa": ROBSA}.get(self.method, CONFIG)
        prefill = {"prefill": {"config": PREFILL}} if self.prefill else {}
        return {"config": config, "sparse_layers": self.sparse_layers, **prefill}

    def facts(self) -> dict[str, Any]:
        size = int(after(self.flags, "--chunked-prefill-size")) if "--chunked-prefill-size" in self.flags else None
        facts = {"max_total_num_tokens": self.pool[self.name], "model_path": str(self.folder)}
        facts |= {"page_size": int(after(self.flags, "--page-size")) if "--page-size" in self.flags else 16}
        return facts | {"chunked_prefill_size": size, "attention_backend": "fa3", "sparse": self.state()}

    def ask(self, question: Any) -> Any:
        return question(SimpleNamespace(post=self._post))

    def info(self) -> dict[str, Any]:
        state: dict[str, Any] = {"sparse": self.state()} if self.sparse else {}
        state |= self.made()
        graphs = {"prefill": {"backend": "breakable"}, "decode": {"backend": self.graphs}}
        backend = after(self.flags, "--attention-backend") if "--attention-backend" in self.flags else "fa3"
        return {"internal_states": [state], "cuda_graph_config": graphs, "attention_backend": backend}

    def made(self) -> dict[str, Any]:
        """Return the server's report of generated inputs."""
        return {}

    def _post(self, path: str) -> Any:
        assert path == "/flush_cache"
        self.prefilled = self.prefilled and not self.flushes
        return SimpleNamespace(is_error=False)

    def vocabulary_size(self) -> int:
        return 1000

    def each(self, work: Any, requests: list[dict[str, Any]]) -> list[Any]:
        hits = []
        for request in requests:
            prompt = request["input_ids"]
            self.order.append((self.name, prompt))
            cached = (len(prompt) - 20) // 16 * 16 if self.prefilled and self.forgets != self.name else 0
            self.counts["extend_pages_summarised"] += -(-(len(prompt) - cached) // 16)
            seconds = 10 * self.step[self.name] + self.drift * len(self.order)
            if not self.prefilled:
                seconds = self.ttft[self.name][len(self.asked) % len(self.ttft[self.name])]
                self.count_prefill(len(prompt))
                self.asked.append(request)
            self.prefilled = True
            hits.append(Stream(1.0, [Chunk(1.0 + seconds, 1)], cached))
        return hits

    def count_decode(self, context: int, rows: int) -> None:
        self.counts["decode_rows"] += rows
        if context < 4096:
            self.counts["dense_fallback_rows"] += rows
            return
        robsa = self.method == "robsa"
        selections = rows * self.sparse_layers if robsa else rows
        held = selections * (-(-context // ROBSA["block_size"]) if robsa else 10)
        paper = {32: 220 / 2048, 64: 320 / 4096, 128: 500 / 8192}.get(context // 1024, 1.0)
        share = paper if self.active is None else self.active
        attended = round(held * (share if robsa else 0.1))
        moved = {"sparse_layer_rows": selections, "pages_attended": attended, "pages_held": held}
        for counter, count in (moved | ({} if robsa else {"rectified_tokens": rows})).items():
            self.counts[counter] += count

    @property
    def sparse_layers(self) -> int:
        """Of V2-Lite's 27."""
        return 13 if "14-" in json.dumps(self.flags) else 27

    def count_prefill(self, context: int) -> None:
        sparse = max(0, context - PREFILL["crossover_tokens"]) if self.left_out else 0
        attended = round(context**2 * (1 - self.left_out)) if sparse else context**2
        for counter, count in zip(PREFILL_COUNTED, (sparse, context - sparse, attended, context**2), strict=True):
            self.prefilled_so_far[counter] += count


class Connected:
    """The client of a server that runs."""

    def __init__(self, url: str) -> None:
        self.server = next(server for server in FakeServer.started if server.url == url and not server.closed)

    def __enter__(self) -> FakeServer:
        return self.server

    def __exit__(self, *_: object) -> None:
        pass


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``eval.bench_serving`` start and ask stand-ins."""
    monkeypatch.setattr(FakeServer, "started", [])
    monkeypatch.setattr(FakeServer, "order", [])

    def reach(args: argparse.Namespace, server: FakeServer, least: int) -> Target:
        arm = Arm("base", server, "tiny", 10**6, {}, server.sparse)  # pyright: ignore[reportArgumentType]
        return Target(arm, server.facts(), str(server.folder), None)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(bench_serving, "ServerProcess", FakeServer)
    monkeypatch.setattr(bench_serving, "LiveServer", Connected)
    monkeypatch.setattr(measurement, "reach", reach)


def install_client(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Have a stand-in for SGLang's client ask the stand-ins; returns the lines of the client that were run."""
    install(monkeypatch)
    found: list[list[str]] = []

    def run_judge(command: list[str], scratch: Path, log: Path) -> None:
        found.append(command)
        server = running(command)
        context, batch = int(after(command, "--random-input-len")), int(after(command, "--num-prompts"))
        server.count_prefill(context)
        server.count_decode(context, batch * OUTPUT)
        rows = result(context, batch, FakeServer.step[server.name])
        Path(after(command, "--output-file")).write_text(json.dumps(rows))

    monkeypatch.setattr(measurement, "run_judge", run_judge)
    return found


def running(command: list[str]) -> FakeServer:
    """The stand-in that a command of SGLang's client asks."""
    name = after(command, "--base-url").removeprefix("http://")
    return next(server for server in FakeServer.started if server.name == name and not server.closed)


def result(context: int, batch: int, step: float, **changes: Any) -> dict[str, Any]:
    """As SGLang's client writes it; the requests of a batch are prefilled one after the other."""
    found: dict[str, Any] = {
        "random_input_len": context,
        "random_output_len": OUTPUT,
        "input_lens": [context] * batch,
        "output_lens": [OUTPUT] * batch,
        "ttfts": [1.0 + i for i in range(batch)],
        "itls": [[batch - 1.0 - i + step, *[step] * (OUTPUT - 2)] for i in range(batch)],
        "errors": [""] * batch,
        "cached_tokens": [0] * batch,
        "cache_report": {"total_cached_tokens": 0},
    }
    times = {
        f"{s}_{n}_ms": 1000 * step for s in ("mean", "median", "p99") for n in ("tpot", "itl", "e2e_latency", "ttft")
    }
    rates = ("duration", "request_throughput", "input_throughput", "output_throughput", "concurrency")
    return {**found, **times, **dict.fromkeys(rates, 1 / step), **changes}


def after(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]
