"""The table of ``eval.lab.bench_dsa``: who does which stage, this project and SGLang; and the rows made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from eval.lab.kernels import dsa_native
from eval.lab.kernels.dsa import ATTEND, AUTO, DECODE, DECODE_TOPK, NATIVE, PORTABLE, PREFILL, PREFILL_TOPK
from eval.lab.kernels.dsa_inputs import FP8, LOGITS, Layer, Shape, Step
from eval.lab.kernels.harness import Implementation, Row
from sglang_sparse_kernels.common.timing import Run
from sglang_sparse_kernels.latent_rows import LATENT_DIMS, row_bytes, write_latents

# How the reason of a row begins whose library is not installed.
ABSENT = (ImportError.__name__, ModuleNotFoundError.__name__)


def _portable(step: Step) -> list[Run]:
    def made(layer: Layer) -> Run:
        if step.op in LOGITS:
            layer = replace(layer, logits=layer.logits.contiguous())
        return partial(step.attend, layer) if step.op == ATTEND else partial(step.portable, layer)

    return [made(layer) for layer in step.layers]


def _float8(step: Step) -> list[Run]:
    """As a server with a float8 KV cache: rows that this project wrote."""
    latent, size = step.shape.latent, row_bytes(step.shape.latent, step.shape.rope)

    def made(layer: Layer) -> Run:
        cache, slots = layer.cache, torch.arange(len(layer.cache), device=layer.cache.device)
        rows = torch.empty(len(cache), size, dtype=torch.uint8, device=cache.device)
        write_latents(cache[:, :latent], cache[:, latent:], slots, rows)
        return partial(step.attend, replace(layer, cache=rows))

    return [made(layer) for layer in step.layers]


def _prefill(op: str) -> list[Implementation[Step]]:
    return [Implementation(op, NATIVE, partial(dsa_native.selection, False))]


def _decode(op: str) -> list[Implementation[Step]]:
    return [
        Implementation(op, NATIVE, partial(dsa_native.selection, True)),
        Implementation(op, "native-v1", partial(dsa_native.selection, False)),
    ]


def _ours(op: str) -> list[Implementation[Step]]:
    """Behind SGLang's logits, and alone; of given logits these differ in how many queries are served at a time."""
    return [Implementation(op, AUTO, dsa_native.auto, False), Implementation(op, PORTABLE, _portable, False)]


TABLE: tuple[Implementation[Step], ...] = (
    *_decode(DECODE),
    *_ours(DECODE),
    *_prefill(PREFILL),
    *_ours(PREFILL),
    *_decode(DECODE_TOPK),
    *_ours(DECODE_TOPK),
    *_prefill(PREFILL_TOPK),
    *_ours(PREFILL_TOPK),
    Implementation(ATTEND, NATIVE, dsa_native.fa3),
    Implementation(ATTEND, "native-flashmla-sparse", dsa_native.flashmla_sparse),
    Implementation(ATTEND, "native-fp8", dsa_native.flashmla_kv, kv_dtype=FP8),
    Implementation(ATTEND, PORTABLE, _portable, False),
    Implementation(ATTEND, "portable-fp8", _float8, False, kv_dtype=FP8),
)


def identity(shape: Shape, one: Implementation[Step]) -> Row:
    """Return the fields that identify a row; ``kv_dtype`` is that of the cache which attention reads."""
    sizes = f"h{shape.heads}/l{shape.latent}/r{shape.rope}/i{shape.index_heads}/k{shape.topk}"
    chunk = f"/c{shape.chunk}" if shape.chunk else ""
    row = {**shape.facts(), "id": f"dsa/{shape.name}{chunk}/{sizes}/{one.op}/{one.name}", **one.facts()}
    return row if one.op == ATTEND else {name: value for name, value in row.items() if name != "kv_dtype"}


def floor(shape: Shape, one: Implementation[Step], row: Mapping[str, Any], header: Mapping[str, Any]) -> Row:
    """``flops``, and where the chip's ceilings are known ``floor_us``, what moving each byte once takes, or the
    products where these take longer, and ``over_floor``, the time over that.

    Args:
        shape: of the pass.
        one: who was measured.
        row: with ``us`` and ``bytes``.
        header: with ``ceiling_gbps``, ``ceiling_tflops`` and, of the indexer's products, ``ceiling_fp8_tflops``.
    """
    flops = shape.flops(one.op)
    rate = header["ceiling_tflops" if one.op == ATTEND else "ceiling_fp8_tflops"]
    if "us" not in row or header["ceiling_gbps"] is None or rate is None:
        return {"flops": flops} if "us" in row else {}
    least = max(row["bytes"] / header["ceiling_gbps"] / 1e3, flops / rate / 1e6)
    return {"flops": flops, "floor_us": round(least, 3), "over_floor": row["us"] / least}


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows of one shape, those of this project with what the fastest of SGLang's implementations of the same
    operation, over a cache of the same dtype, takes: ``native`` (its name), ``native_us``, ``native_over_floor``,
    ``native_repeatable`` and ``native_ratio``, its time over theirs.
    """
    found = []
    for row in rows:
        same = [one for one in rows if one["peer"] and "us" in one and _kind(one) == _kind(row)]
        native = min(same, key=lambda one: one["us"], default=None)
        if native is not None and "us" in row and not row["peer"]:
            beside = {"native": native["implementation"], "native_us": native["us"]}
            known = {name: native[name] for name in ("over_floor", "repeatable") if name in native}
            beside |= {f"native_{name}": value for name, value in known.items()}
            row = {**row, **beside, "native_ratio": native["us"] / row["us"]}
        found.append(row)
    return found


def _kind(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["op"], row.get("kv_dtype")


def failed(rows: Sequence[Row]) -> bool:
    """Whether something of this project is missing. Where SGLang's logits are not installed there is nothing to choose
    behind, and of some latents there are no float8 rows.
    """

    def excused(row: Row) -> bool:
        if row["op"] == ATTEND and row["kv_dtype"] != "bfloat16":
            return row["latent"] not in LATENT_DIMS
        absent = row["unavailable"].startswith(ABSENT)
        return row["implementation"] == AUTO and row["op"] not in LOGITS and absent

    return any("unavailable" in row and not row["peer"] and not excused(row) for row in rows)
