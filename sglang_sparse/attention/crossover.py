"""From how many KV tokens on a batch runs sparse: what the user set, what was measured for this GPU, or the default.

``crossover.json`` has an entry for each GPU, shape and share of the pages measured by ``python -m sglang_sparse.tune``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch

from sglang_sparse.config.machine import gpu_name
from sglang_sparse.methods.config import DEFAULT_CROSSOVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_sparse.config.settings import Settings
    from sglang_sparse.methods.base import ModelShape
    from sglang_sparse.methods.config import MethodConfig

TABLE = Path(__file__).with_name("crossover.json")
# The method that ``sglang_sparse.tune`` measures.
TUNED = "resa"
# Fields of the config by which a step takes longer or shorter, in addition to the share of the pages.
_SELECTION = {"summary": None, "group": None, "summary_dtype": "auto"}
# What tells two entries of a table apart; the first ones are what `setup` returns.
KEY = ("method", "gpu", "q_heads", "kv_heads", "head_dim", "page_size", "kv_dtype", *_SELECTION, "active_ratio")


class Entry(TypedDict):
    """A crossover of the table, for the setup that `setup` returns."""

    active_ratio: float
    crossover_tokens: int


@dataclass(frozen=True)
class Crossover:
    """The length from which decode runs sparse.

    Attributes:
        tokens: KV tokens of a batch's sparse rows in total.
        source: where the number comes from, for the log.
    """

    tokens: int
    source: str


def setup(method: str, config: MethodConfig, model: ModelShape, gpu: str) -> dict[str, object]:
    """Return the key of a measured crossover, without the share of the pages, as an entry of the table has it.

    Args:
        method: name of the decode method.
        config: its config.
        model: the attention layers of one rank.
        gpu: see `gpu_name`.
    """
    return {
        "method": method,
        "gpu": gpu,
        "q_heads": model.num_q_heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "page_size": config.page_size,
        "kv_dtype": str(model.kv_dtype).removeprefix("torch."),
        **{name: getattr(config, name, usual) for name, usual in _SELECTION.items()},
    }


@cache
def packaged_table() -> tuple[Entry, ...]:
    """The entries that ship with this package."""
    return tuple(json.loads(TABLE.read_text()))


def find(
    settings: Settings, model: ModelShape, device: torch.device, table: Sequence[Entry] | None = None
) -> Crossover:
    """Decide the crossover of a server: of several methods that of the one that pays last.

    A number that the user set wins. Of the entries for this GPU and shape the one counts whose share of the pages is
    the smallest that is not below the server's: attending to fewer pages pays from fewer tokens on.

    Args:
        settings: the methods and their configs.
        model: the attention layers of this rank.
        device: of the KV pool.
        table: entries to look in; the packaged ones by default.
    """
    gpu, entries = gpu_name(device), packaged_table() if table is None else table
    pairs = zip(settings.decode.names, settings.decode.configs, strict=True)
    return max((_of_method(name, config, model, gpu, entries) for name, config in pairs), key=lambda one: one.tokens)


def _of_method(name: str, config: MethodConfig, model: ModelShape, gpu: str, entries: Sequence[Entry]) -> Crossover:
    if config.dense_fallback == "never":
        return Crossover(0, "dense_fallback is never")
    if config.crossover_tokens != "auto":
        return Crossover(config.crossover_tokens, "set by the user")
    wanted = setup(name, config, model, gpu)
    ratio = getattr(config, "active_ratio", float("inf"))
    measured = [entry for entry in entries if wanted.items() <= entry.items()]
    found = [entry for entry in measured if entry["active_ratio"] >= ratio]
    if not found:
        # Attending to more pages than was measured pays later, if at all.
        tokens = max([DEFAULT_CROSSOVER, *(entry["crossover_tokens"] for entry in measured)])
        hint = ", see python -m sglang_sparse.tune" if name == TUNED else ""
        return Crossover(tokens, f"the default; not measured for this shape on {gpu}{hint}")
    best = min(found, key=lambda entry: entry["active_ratio"])
    return Crossover(best["crossover_tokens"], f"measured on {gpu} at an active ratio of {best['active_ratio']}")
