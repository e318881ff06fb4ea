"""Stand-ins for the servers of ``eval.bench_serving`` and for what SGLang's benchmark client writes."""

from pathlib import Path
from typing import Any

from eval.live.client import Chunk, Stream
from eval.live.counters import COUNTED

CONFIG = {"min_seq_len": 4096, "crossover_tokens": 16384, "dense_fallback": "auto", "rectify_interval": 32}
OUTPUT = 256


class FakeServer:
    """A server process and its client in one: seconds per token, KV tokens, and what it counts."""

    started: list["FakeServer"] = []
    step = {"sparse": 0.002, "dense": 0.004}
    pool = {"sparse": 10**6, "dense": 10**6}
    dies = ""

    def __init__(self, folder: Path, *flags: str, log_path: Path, timeout: float, env: dict[str, str]) -> None:
        self.name = log_path.name.split(".")[-2]
        self.folder, self.flags, self.log_path, self.env = folder, list(flags), log_path, env
        self.prefill = "--sparse-prefill-method" in flags
        self.sparse = "--sparse-method" in flags or self.prefill
        self.url, self.command, self.start_seconds = f"http://{self.name}", ["/bin/python", *flags], 1.0
        self.counts = dict.fromkeys(COUNTED, 0) | {"extend_pages_summarised": 0}
        names = ("sparse_tokens", "dense_tokens", "pairs_attended", "pairs_causal")
        self.prefilled_so_far = {"method": "anchor", "config": {"crossover_tokens": 8192}, **dict.fromkeys(names, 0)}
        self.closed = False
        self.prefilled = False
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

    def ask(self, question: Any) -> dict[str, Any]:
        return {"internal_states": [{"structured_inputs": {"seed": 0}} if self.env else {}]}

    def vocabulary_size(self) -> int:
        return 1000

    def each(self, work: Any, requests: list[dict[str, Any]]) -> list[Any]:
        hits = []
        for request in requests:
            prompt = request["input_ids"]
            cached = (len(prompt) - 20) // 16 * 16 if self.prefilled else 0
            self.counts["extend_pages_summarised"] += -(-(len(prompt) - cached) // 16)
            self.prefilled = True
            hits.append(Stream(1.0, [Chunk(1.0 + 10 * self.step[self.name], 1)], cached))
        return hits


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
