"""Measure the attention of decode steps, dense and sparse, and find where the sparse one becomes faster."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from sglang_sparse.attention import crossover
from sglang_sparse.attention.batch import allocate_view
from sglang_sparse.attention.plan import usual_selection
from sglang_sparse.config import machine
from sglang_sparse.config.machine import package_versions
from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.resa import Resa
from sglang_sparse_kernels.common.testing import paged_batch, random_cache, seeded
from sglang_sparse_kernels.common.timing import capture, in_turn
from sglang_sparse_kernels.sparse_decode import sparse_decode

L2_MULTIPLE = 3

Run = Callable[[int], Any]
Timer = Callable[[Mapping[str, Run], int], Mapping[str, float]]


class TuneError(SparseArgumentError):
    """A measurement is impossible or does not answer the question; the message is meant for the user."""


class Step:
    """The attention of one decode step, over layers with separate caches.

    Args:
        method: ReSA with the page size and the share of the pages to measure.
        model: the shape; ``num_layers`` is the number of layers.
        batch: rows.
        context: KV tokens of each row, a multiple of the page size.
        longest: the server's context length, for which its buffers are made.
        device: the device.

    Raises:
        TuneError: the context is no such multiple, or so short that every page would be selected.
    """

    def __init__(self, method: Resa, model: ModelShape, batch: int, context: int, longest: int, device: str) -> None:
        if context % method.config.page_size:
            allowed = f"multiples of the page size {method.config.page_size}"
            raise TuneError(field="--contexts", got=context, allowed=allowed)
        self.method, self.model, self.batch, self.context = method, model, batch, context
        self.page_size = method.config.page_size
        self.scale = model.head_dim**-0.5
        generator = seeded(device, 0)
        self.rows = paged_batch((context,) * batch, self.page_size, device, generator)
        slots = self.rows.num_pages * self.page_size
        layers = range(model.num_layers)
        heads = (model.num_kv_heads, model.head_dim)
        self.caches = [[random_cache((slots, *heads), model.kv_dtype, device, generator) for _ in "kv"] for _ in layers]
        shape = (batch, model.num_q_heads, model.head_dim)
        self.queries = [torch.randn(shape, device=device, generator=generator).bfloat16() for _ in layers]
        specs = method.aux_specs(model)
        self.pools = AuxBuffers(specs, tuple(layers), self.rows.num_pages, self.page_size, device)
        page_ends = torch.arange(1, self.rows.num_pages + 1, device=device) * self.page_size - 1
        self.pools.refresh(self._k_caches, page_ends)
        width = max(longest, context) // self.page_size
        stats = torch.zeros(4, dtype=torch.int64, device=device)
        usual = usual_selection(method, width)
        view = allocate_view(batch, model.num_kv_heads, width, usual, self.page_size, stats)
        self.view = replace(view, logit_scale=self.scale)
        self.view.page_table[:, : self.rows.page_table.shape[1]].copy_(self.rows.page_table)
        self.view.n_pages.copy_(self.rows.n_pages)
        self.view.n_select.copy_(method.n_select(self.rows.n_pages))
        if bool((self.view.n_select >= self.view.n_pages).any()):
            message = f"--contexts: of {context} tokens every page is selected, which is dense decode"
            raise TuneError(message, field="--contexts", got=context)

    def sparse(self, layer: int) -> torch.Tensor:
        """The sparse step of a layer, ``[batch, q_heads, head_dim]``, as the backend of a server runs it."""
        keys, values = self.caches[layer]
        selected = self.method.select(self.view, layer, self.queries[layer], self.pools)
        pages = (selected.indices, selected.counts, self.rows.last_slots, self.page_size)
        scratch = {"usual_pages": self.view.usual_select, "arrivals": self.view.arrivals}
        output = sparse_decode(self.queries[layer], keys, values, *pages, self.scale, **scratch)
        if layer == self.model.num_layers - 1:
            self.pools.refresh(self._k_caches, self.rows.last_slots)
        return output

    @property
    def _k_caches(self) -> dict[int, torch.Tensor]:
        return {layer: keys for layer, (keys, _) in enumerate(self.caches)}

    def paged(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, each ``[num_pages, page_size, kv_heads, head_dim]``."""
        keys, values = self.caches[layer]
        return keys.unflatten(0, (-1, self.page_size)), values.unflatten(0, (-1, self.page_size))


def flash_attention_3(step: Step) -> Run:
    """Dense decode by FA3.

    Raises:
        ImportError: it is not installed, or does not read this KV dtype with bfloat16 queries.
    """
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    if step.model.kv_dtype != torch.bfloat16:
        raise ImportError("FA3 wants queries of the KV dtype")
    lengths = torch.full_like(step.rows.n_pages, step.context)
    table = step.rows.page_table
    return lambda layer: flash_attn_with_kvcache(
        step.queries[layer][:, None],
        *step.paged(layer),
        softmax_scale=step.scale,
        causal=True,
        page_table=table,
        cache_seqlens=lengths,
    )


def flashinfer(step: Step) -> Run:
    """Dense decode by FlashInfer.

    Raises:
        ImportError: it is not installed.
    """
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    rows, model = step.rows, step.model
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=rows.n_pages.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    batch, pages = rows.page_table.shape
    starts = torch.arange(batch + 1, dtype=torch.int32, device=workspace.device) * pages
    last_page = torch.full_like(rows.n_pages, (step.context - 1) % step.page_size + 1)
    heads = (model.num_q_heads, model.num_kv_heads, model.head_dim, step.page_size)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": model.kv_dtype}
    wrapper.plan(starts, rows.page_table.flatten(), last_page, *heads, **types, sm_scale=step.scale)
    return lambda layer: wrapper.run(step.queries[layer], step.paged(layer))


Peer = Callable[[Step], Run]
PEERS: Mapping[str, Peer] = {"fa3": flash_attention_3, "flashinfer": flashinfer}


def graph_timer(runs: Mapping[str, Run], layers: int, rounds: int = 20) -> dict[str, float]:
    """Median microseconds a layer of each run, captured as CUDA graphs over all layers and replayed in turn."""
    replays = [capture([partial(run, layer) for layer in range(layers)]) for run in runs.values()]
    return dict(zip(runs, map(statistics.median, in_turn(replays, rounds)), strict=True))


def num_layers(method: Resa, model: ModelShape, tokens: int, device: str) -> int:
    """Return the number of layers that read `L2_MULTIPLE` times the L2 cache of a device, at least 2."""
    if not device.startswith("cuda"):
        return 1
    cache = 2 * model.num_kv_heads * model.head_dim * model.kv_dtype.itemsize * tokens
    read = cache * (method.config.active_ratio + 1 / method.config.page_size)
    return max(2, math.ceil(L2_MULTIPLE * torch.cuda.get_device_properties(device).L2_cache_size / read))


# A crossover is given in whole steps of this, rounded up.
STEP = 1024


@dataclass(frozen=True)
class Point:
    """The times of one batch.

    Attributes:
        batch: rows.
        context: KV tokens of each row.
        dense: name of the faster dense implementation.
        dense_us: its microseconds a layer.
        sparse_us: those of the sparse step.
    """

    batch: int
    context: int
    dense: str
    dense_us: float
    sparse_us: float

    @property
    def tokens(self) -> int:
        """KV tokens of the batch."""
        return self.batch * self.context


def measure(step: Step, timer: Timer, peers: Mapping[str, Peer]) -> Point:
    """Time one batch, dense by the faster one of those peers that are installed.

    Raises:
        TuneError: no dense peer is installed.
    """
    runs: dict[str, Run] = {}
    for name, make in peers.items():
        try:
            runs[name] = make(step)
        except ImportError as error:
            _say_once(f"without {name}: {error}")
    if not runs:
        raise TuneError(f"no dense attention to compare with: install one of {', '.join(peers)}")
    times = timer({**runs, "sparse": step.sparse}, step.model.num_layers)
    dense = min(runs, key=lambda name: times[name])
    return Point(step.batch, step.context, dense, times[dense], times["sparse"])


@cache
def _say_once(text: str) -> None:
    print(f"sglang_sparse.tune: {text}", file=sys.stderr, flush=True)


def crossing(points: Iterable[Point]) -> int:
    """The least number of KV tokens from which on the sparse step was faster, at every batch size.

    Between the longest context at which it was not and the next one it is found by linear interpolation: both times
    grow linearly with the tokens. Where it always was faster, the answer is the smallest batch measured.

    Returns:
        Tokens, rounded up to whole ``STEP``.

    Raises:
        TuneError: nothing was measured, or at the longest context of a batch size it was not faster.
    """
    by_batch: dict[int, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.tokens):
        by_batch.setdefault(point.batch, []).append(point)
    if not by_batch:
        raise TuneError("no batch is within --most-tokens", field="--most-tokens")
    found = [min(row[0].tokens for row in by_batch.values())]
    for batch, row in by_batch.items():
        slower = [i for i, point in enumerate(row) if point.sparse_us >= point.dense_us]
        if not slower:
            continue
        if slower[-1] + 1 == len(row):
            most = row[-1].tokens
            message = f"a batch of {batch} is not faster sparse up to {most} KV tokens: give longer --contexts"
            raise TuneError(message, field="--contexts", got=most)
        before, after = row[slower[-1]], row[slower[-1] + 1]
        lost, won = before.sparse_us - before.dense_us, after.dense_us - after.sparse_us
        found.append(math.ceil(before.tokens + (after.tokens - before.tokens) * lost / (lost + won)))
    return -(-max(found) // STEP) * STEP


def entry(method: Resa, model: ModelShape, points: Sequence[Point], device: str, overhead: float) -> dict[str, object]:
    """Make an entry for `sglang_sparse.attention.crossover`, with the measurements behind it.

    Raises:
        TuneError: see `crossing`.
    """
    counted = [replace(point, sparse_us=point.sparse_us + overhead) for point in points]
    return {
        **crossover.setup(crossover.TUNED, method.config, model, machine.gpu_name(torch.device(device))),
        "active_ratio": method.config.active_ratio,
        "crossover_tokens": crossing(counted),
        "overhead_us": overhead,
        "versions": package_versions(),
        "points": [asdict(point) for point in points],
    }


def write(path: Path, entries: Sequence[Mapping[str, object]]) -> None:
    """Put entries into a table, replacing those for the same GPU, shape and share of the pages.

    Raises:
        TuneError: the file is no such table.
    """

    def key(row: Mapping[str, object]) -> tuple[object, ...]:
        return tuple(row[name] for name in crossover.KEY)

    try:
        rows = {key(row): row for row in json.loads(path.read_text())} if path.exists() else {}
    except (ValueError, KeyError, TypeError) as error:
        raise TuneError(f"--out {path} is no table of crossovers: {error!r}", field="--out", got=path) from error
    rows |= {key(row): row for row in entries}
    path.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
