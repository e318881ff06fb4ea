"""What ``eval.lab.bench_decode`` asks of a server, and the server that holds it: for ``eval.lab.reproduce``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.lab.bench_decode import kv_tokens
from eval.lab.servers.decode_arguments import SHORT
from eval.texts.lengths import short_length

PAGE_SIZE = 16
# Tokens of a request beyond its prompt that servers allow.
MAX_ANSWER = 2048
# Tokens of a pass that has a CUDA graph: no pass of rectification is longer, and more graphs would take minutes.
LONGEST_PASS = 512


@dataclass(frozen=True)
class Load:
    """A batch of ``eval.lab.bench_decode``.

    Attributes:
        batch: requests at once.
        context: tokens of each prompt.
        tokens: of each answer.
        short: tokens of each short prompt.
    """

    batch: int
    context: int
    tokens: int = 256
    short: int = SHORT

    @property
    def name(self) -> str:
        """Batch and context, such as "6x128k"."""
        return f"{self.batch}x{short_length(self.context)}"

    def arguments(self) -> tuple[str, ...]:
        """On the command line."""
        values = {name: str(getattr(self, name)) for name in ("batch", "context", "tokens", "short")}
        return tuple(part for name, value in values.items() for part in (f"--{name}", value))

    def pool_tokens(self) -> int:
        """Of the smallest KV pool that has room for it, in whole pages."""
        needed = kv_tokens(self.batch, self.context, self.short, self.tokens, PAGE_SIZE)
        return -(-needed // PAGE_SIZE) * PAGE_SIZE


def server_flags(backend: str, memory: float, loads: Sequence[Load]) -> tuple[str, ...]:
    """Of a server that has room for each of some loads, one at a time, and no more.

    Args:
        backend: of attention; where the server has a sparse method, of its dense decode.
        memory: share of the GPU's memory for weights, KV and page summaries.
        loads: what it is asked.
    """
    batch = max(load.batch for load in loads)
    values = {
        "attention-backend": backend,
        "page-size": PAGE_SIZE,
        "context-length": max(load.context for load in loads) + MAX_ANSWER,
        "max-total-tokens": max(load.pool_tokens() for load in loads),
        "mem-fraction-static": memory,
        "cuda-graph-max-bs-decode": batch,
        "cuda-graph-max-bs-prefill": LONGEST_PASS,
        "max-running-requests": batch + 2,
    }
    return tuple(part for name, value in values.items() for part in (f"--{name}", str(value)))
