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
from eval.parts.judge_commands import Target
from eval.structured.generator import read_recipe

CONFIG = {"min_seq_len": 4096, "crossover_tokens": 16384, "dense_fallback": "auto", "rectify_interval": 32}
PREFILL = {"crossover_tokens": 8192, "theta": 12.0, "block_size": 128, "step": 16}
HEADS = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
OUTPUT = 256


class FakeServer:
    """A server process and its client in one: seconds per token, KV tokens, and what it counts."""

    started: list["FakeServer"] = []
    step = {"sparse": 0.002, "dense": 0.004}
    # Seconds of cold prefills, one after the other.
    ttft: dict[str, list[float]] = {"sparse": [1.0], "dense": [2.0]}
    pool = {"sparse": 10**6, "dense": 10**6}
    dies = ""
    # Share of the pairs of a long prompt that is left out; none: it is prefilled dense.
    left_out = 0.89
    flushes = True
    # What the server attends with where others were asked for.
    inputs: dict[str, Any] | None = None

    def __init__(self, folder: Path, *flags: str, log_path: Path, timeout: float, env: dict[str, str]) -> None:
        self.name = log_path.name.split(".")[-2]
        self.folder, self.flags, self.log_path, self.env = folder, list(flags), log_path, env
        self.prefill = "--sparse-prefill-method" in flags
        self.sparse = "--sparse-method" in flags or self.prefill
        self.url, self.command, self.start_seconds = f"http://{self.name}", ["/bin/python", *flags], 1.0
        self.counts = dict.fromkeys(COUNTED, 0) | {"extend_pages_summarised": 0}
        self.prefilled_so_far = {"method": "anchor", "config": PREFILL, **dict.fromkeys(PREFILL_COUNTED, 0)}
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

    def sparse_state(self) -> dict[str, Any]:
        return {"config": CONFIG}

    def counters(self) -> dict[str, Any]:
        return dict(self.counts) | ({"prefill": dict(self.prefilled_so_far)} if self.prefill else {})

    def facts(self) -> dict[str, Any]:
        size = int(after(self.flags, "--chunked-prefill-size")) if "--chunked-prefill-size" in self.flags else None
        facts = {"max_total_num_tokens": self.pool[self.name], "page_size": 16, "model_path": str(self.folder)}
        return facts | {"chunked_prefill_size": size, "attention_backend": "fa3"}

    def ask(self, question: Any) -> Any:
        return question(SimpleNamespace(get=self._get, post=self._post))

    def _get(self, path: str) -> Any:
        assert path == "/server_info"
        state: dict[str, Any] = {"sparse": {"prefill": {"config": PREFILL}}} if self.prefill else {}
        if self.env:
            asked = json.loads(after(self.flags, "--json-model-override-args"))["structured_inputs"]
            made = {"seed": asked.get("seed", 0), "recipe": read_recipe(asked.get("recipe", {})).model_dump()}
            state["structured_inputs"] = {**made, "shape": HEADS} if self.inputs is None else self.inputs
        info = {"internal_states": [state], "cuda_graph_config": {"prefill": {"backend": "breakable"}}}
        return SimpleNamespace(raise_for_status=lambda: SimpleNamespace(json=lambda: info))

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
            cached = (len(prompt) - 20) // 16 * 16 if self.prefilled else 0
            self.counts["extend_pages_summarised"] += -(-(len(prompt) - cached) // 16)
            seconds = 10 * self.step[self.name]
            if not self.prefilled:
                seconds = self.ttft[self.name][len(self.asked) % len(self.ttft[self.name])]
                self.count_prefill(len(prompt))
                self.asked.append(request)
            self.prefilled = True
            hits.append(Stream(1.0, [Chunk(1.0 + seconds, 1)], cached))
        return hits

    def count_prefill(self, context: int) -> None:
        sparse = max(0, context - PREFILL["crossover_tokens"]) if self.left_out else 0
        attended = round(context**2 * (1 - self.left_out)) if sparse else context**2
        for counter, count in zip(PREFILL_COUNTED, (sparse, context - sparse, attended, context**2), strict=True):
            self.prefilled_so_far[counter] += count


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``eval.bench_serving`` start and ask stand-ins."""
    monkeypatch.setattr(FakeServer, "started", [])

    def reach(args: argparse.Namespace, server: FakeServer, least: int) -> Target:
        arm = Arm("base", server, "tiny", 10**6, {}, server.sparse)  # pyright: ignore[reportArgumentType]
        return Target(arm, server.facts(), str(server.folder), None)  # pyright: ignore[reportArgumentType]

    class Connected:
        def __init__(self, url: str) -> None:
            self.server = next(server for server in FakeServer.started if server.url == url and not server.closed)

        def __enter__(self) -> FakeServer:
            return self.server

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(bench_serving, "ServerProcess", FakeServer)
    monkeypatch.setattr(bench_serving, "LiveServer", Connected)
    monkeypatch.setattr(bench_serving, "reach", reach)


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
