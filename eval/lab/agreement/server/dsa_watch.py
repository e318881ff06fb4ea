"""For ``eval.lab.agree_dsa`` only: a server that says whether its selections are those of this project's own indexer.

With this folder and the repository's root on ``PYTHONPATH``, and ``DSA_WATCH`` in the environment naming a file, a
server with ``--sparse-method dsa`` lets the portable indexer choose, too, after each layer's own one: from the same
hidden states, for the same rows and pages. What it chooses is compared and forgotten; the server goes on with its own.
The file gets a line of JSON for each layer of each pass in which a token leaves something out:

- ``selection``: see ``eval.lab.agreement.dsa_sets``, over all tokens that leave something out. ``keys`` says whose:
  "native", the keys that the server itself has stored, or "own", those that the portable indexer quantised, in a cache
  beside the server's. ``other_keys`` are the tokens of the pass whose stored keys are other bytes.
- ``replays``: once for each layer and phase, ``DSA_WATCH_REPLAYS`` replays of the portable selection over the server's
  keys, in decode as a CUDA graph, too.
- ``wrong``: two selections that cannot be compared, and why.

It looks at the device after each layer, so the server must run without CUDA graphs; a pass that is captured is let go.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from eval.lab.agreement.agreement import NATIVE, OWN
from eval.lab.agreement.dsa_sets import WATCH, WATCH_REPLAYS, captured, compare, joined, positions_of, same_replays
from sglang_sparse.attention.dsa import indexer as portable
from sglang_sparse_kernels import index_keys
from sglang_sparse_kernels.index_keys.reference import parts
from sglang_sparse_kernels.index_logits import index_logits

# Elements of the logits that are compared at a time; masks of them are made beside.
AT_ONCE = 1 << 23


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    path = os.environ.get(WATCH)
    # A process that is forked from one in which this was done has it already.
    if portable.choose.__module__ == __name__:
        return
    # The hooked function looks it up at its first call.
    if path:
        portable.choose = Watch(Path(path), int(os.environ.get(WATCH_REPLAYS, "100"))).choose


@dataclass(frozen=True)
class Selected:
    """The inputs of the portable indexer's selection in a layer.

    Attributes:
        batch: what the layers of the pass share; its ``chosen`` are positions.
        values: ``[tokens, heads, 128]`` float8_e4m3fn, index queries.
        gates: ``[tokens, heads]`` float32.
        buffer: the index cache that it chose from.
    """

    batch: portable.IndexerBatch
    values: torch.Tensor
    gates: torch.Tensor
    buffer: torch.Tensor

    def over(self, buffer: torch.Tensor) -> Selected:
        """The same queries over another cache, with memory of its own for what is chosen."""
        fresh = {"chosen": torch.full_like(self.batch.chosen, -1), "counts": torch.empty_like(self.batch.counts)}
        return replace(self, batch=replace(self.batch, **fresh, stats=None), buffer=buffer)

    def select(self) -> None:
        """Choose, into ``batch.chosen``."""
        select(self.batch, self.values, self.gates, self.buffer)


select = portable._select


class Watch:
    """Stands around ``sglang_sparse.attention.dsa.indexer.choose``.

    Args:
        path: the file; lines are appended.
        replays: of each layer's selection in each phase.
    """

    def __init__(self, path: Path, replays: int) -> None:
        self.path, self.replays = path, replays
        self._choose = portable.choose
        self._caches: dict[int, torch.Tensor] = {}
        self._indexed: portable.IndexerBatch | None = None
        self._replayed: set[tuple[int, str]] = set()

    def choose(
        self,
        original: Callable[..., torch.Tensor | None],
        indexer: Any,
        x: torch.Tensor,
        q_lora: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        layer_id: int,
        return_indices: bool = True,
        use_cuda_graph: bool = True,
    ) -> torch.Tensor | None:
        """As ``sglang_sparse.attention.dsa.indexer.choose``, whose result it returns."""
        inputs = (indexer, x, q_lora, positions, forward_batch, layer_id, return_indices, use_cuda_graph)
        given = self._choose(original, *inputs)
        backend = portable.served_backend()
        if backend is None or not len(x) or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return given
        from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

        pool: Any = get_token_to_kv_pool()
        stored = pool.get_index_k_with_scale_buffer(layer_id)
        kept = None if given is None else given.clone()
        with self._instead(backend, layer_id, stored) as found:
            self._choose(_refuse, *inputs)
        if kept is not None and found:
            phase = "prefill" if forward_batch.forward_mode.is_extend_without_speculative() else "decode"
            place = {"layer": layer_id, "phase": phase}
            self._judge(backend, place, kept, found[0], stored, forward_batch.out_cache_loc)
        return given

    @contextmanager
    def _instead(self, backend: Any, layer_id: int, stored: torch.Tensor) -> Iterator[list[Selected]]:
        """A server in which the indexer is portable; yields what will have been selected with, if anything."""
        from sglang.srt.model_executor import forward_context

        cache = self._caches.setdefault(layer_id, torch.zeros_like(stored))
        pool = SimpleNamespace(get_index_k_with_scale_buffer=lambda _: cache)
        view = backend.view
        other = SimpleNamespace(
            dense=SimpleNamespace(forward_metadata=backend.dense.forward_metadata, use_fused_topk=False),
            view=None if view is None else replace(view, stats=torch.zeros_like(view.stats)),
            method=SimpleNamespace(native=lambda _: False),
            first_layer=backend.first_layer,
            verified=backend.verified,
            indexed=self._indexed,
            counters=SimpleNamespace(index_keys=0),
        )
        found: list[Selected] = []

        def selecting(*inputs: Any) -> None:
            select(*inputs)
            found.append(Selected(*inputs))

        with (
            patch.object(portable, "served_backend", lambda: other),
            patch.object(portable, "_select", selecting),
            patch.object(forward_context, "get_token_to_kv_pool", lambda: pool),
        ):
            yield found
        self._indexed = other.indexed

    def _judge(
        self,
        backend: Any,
        place: dict[str, Any],
        given: torch.Tensor,
        mine: Selected,
        stored: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        batch = mine.batch
        leaves_out = (batch.wanted < batch.lengths).nonzero()[:, 0]
        if not len(leaves_out):
            return
        theirs = mine.over(stored)
        theirs.select()
        try:
            named = _positions(backend, batch, given, len(stored))
            for keys, one in ((NATIVE, theirs), (OWN, mine)):
                step = max(1, AT_ONCE // (batch.page_table.shape[1] * index_keys.PAGE_SIZE))
                apart = joined([_apart(one, named, some) for some in leaves_out.split(step)])
                other = _other_keys(stored, mine.buffer, slots) if keys == OWN else 0
                self._write("selection", **place, keys=keys, **apart.figures(), other_keys=other)
        except ValueError as error:
            self._write("wrong", **place, reason=str(error))
        self._replay(place, theirs)

    def _replay(self, place: dict[str, Any], theirs: Selected) -> None:
        key = (place["layer"], place["phase"])
        if key in self._replayed:
            return
        self._replayed.add(key)
        runs: dict[bool, Callable[[], object]] = {False: theirs.select}
        if key[1] == "decode" and theirs.buffer.is_cuda:
            runs[True] = captured(theirs.select)
        for graph, again in runs.items():
            same = same_replays(again, theirs.batch.chosen, self.replays)
            self._write("replays", **place, graph=graph, n=self.replays, same=same, queries=len(theirs.values))

    def _write(self, kind: str, **fields: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")


def _refuse(*_: Any) -> torch.Tensor:
    raise RuntimeError("SGLang's own indexer was asked in the place of the portable one")


def _positions(backend: Any, batch: portable.IndexerBatch, given: torch.Tensor, pages: int) -> torch.Tensor:
    """Return the server's selection as positions within each row."""
    if not backend.dense.use_fused_topk:
        return given
    offsets = backend.dense.forward_metadata.topk_indices_offset
    if offsets is not None:
        return torch.where(given < 0, -1, given - offsets[: len(given), None])
    seen = batch.lengths > 0
    # The first slot of a query without tokens stands for none.
    given = torch.where(seen[:, None], given, -1)
    return positions_of(given, batch.page_table, batch.rows, batch.lengths, pages, index_keys.PAGE_SIZE)


def _apart(one: Selected, named: torch.Tensor, some: torch.Tensor) -> Any:
    batch = one.batch
    lengths, rows = batch.lengths[some].contiguous(), batch.rows[some].contiguous()
    logits = index_logits(one.values[some], one.gates[some], one.buffer, batch.page_table, rows, lengths)
    return compare(named[some], batch.chosen[some], logits, lengths)


def _other_keys(stored: torch.Tensor, own: torch.Tensor, slots: torch.Tensor) -> int:
    """Of these slots, how many have other bytes in one cache than in the other."""
    page, token = slots // index_keys.PAGE_SIZE, slots % index_keys.PAGE_SIZE
    pairs = [(one[page, token], other[page, token]) for one, other in zip(parts(stored), parts(own), strict=True)]
    return int(((pairs[0][0] != pairs[0][1]).any(-1) | (pairs[1][0] != pairs[1][1])).sum())
