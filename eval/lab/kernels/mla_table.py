"""The table of ``bench_mla``: who does which operation, this project and its peers; and the rows made of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from eval.lab.kernels import mla_peers
from eval.lab.kernels.harness import Implementation, Row
from eval.lab.kernels.mla import ATTEND, COPY, DENSE, FULL, MASS, ROPE, TOPP, WHOLE
from eval.lab.kernels.mla_inputs import Shape, Step
from sglang_sparse_kernels.common.timing import Run

FLASHMLA = "flashmla"
# SGLang's Triton decode stands beside: a ratio to it says nothing.
STRONG = (FLASHMLA, "fa3", "flashinfer")


def _ours(op: str, score: str, kv_dtype: torch.dtype) -> Implementation[Step]:
    method = {MASS: Step.mass, TOPP: Step.select, ATTEND: Step.attend, WHOLE: Step.whole}[op]

    def prepare(step: Step) -> list[Run]:
        for layer in step.layers:
            # The copy of the keys is made here, as a server makes it before it decodes.
            layer.scored(score)
        return [partial(method, step, score, layer) for layer in step.layers]

    return Implementation(op, score, prepare, peer=False, kv_dtype=kv_dtype)


def table(kv_dtype: torch.dtype = torch.bfloat16) -> list[Implementation[Step]]:
    """All there is, over a cache of a dtype. Over bfloat16 FlashMLA over float8 stands beside.

    This project's implementations are called after what they score by, `eval.lab.kernels.mla_inputs.SCORES`.
    """
    found: list[Implementation[Step]] = [
        Implementation(DENSE, FLASHMLA, partial(mla_peers.flashmla, kv_dtype), kv_dtype=kv_dtype),
        Implementation(DENSE, "fa3", mla_peers.fa3, kv_dtype=kv_dtype),
        Implementation(DENSE, "flashinfer", mla_peers.flashinfer, kv_dtype=kv_dtype),
        Implementation(DENSE, "triton", mla_peers.triton, kv_dtype=kv_dtype),
    ]
    if kv_dtype == torch.bfloat16:
        fp8 = partial(mla_peers.flashmla, mla_peers.FP8)
        found.append(Implementation(DENSE, "flashmla-fp8", fp8, kv_dtype=mla_peers.FP8))
    found += [_ours(MASS, score, kv_dtype) for score in (ROPE, COPY, FULL)]
    found += [_ours(TOPP, ROPE, kv_dtype), _ours(ATTEND, ROPE, kv_dtype)]
    if kv_dtype == torch.bfloat16:
        found.append(Implementation(ATTEND, "fa3-blocks", mla_peers.fa3_blocks))
        found.append(Implementation(ATTEND, "flashmla-tokens", mla_peers.flashmla_tokens))
        fp8_tokens = mla_peers.flashmla_fp8_tokens
        found.append(Implementation(ATTEND, "flashmla-fp8-tokens", fp8_tokens, kv_dtype=mla_peers.FP8))
    found += [_ours(WHOLE, score, kv_dtype) for score in (ROPE, COPY, FULL)]
    return found


def identity(shape: Shape, one: Implementation[Step]) -> Row:
    """Return the fields that identify a row."""
    facts = shape.facts()
    sizes = f"h{shape.heads}/l{shape.latent}/r{shape.rope}/p{shape.page_size}/b{shape.block_size}"
    settings = f"{shape.name}/{sizes}/t{shape.theta1}/m{shape.max_active_ratio}/{facts['kv_dtype']}"
    return {**facts, "id": f"mla/{settings}/{one.op}/{one.name}", **one.facts()}


def strongest(rows: Iterable[Row]) -> Row | None:
    """The fastest dense row of `STRONG`; None where FlashMLA was not measured, without which no ratio counts."""
    measured = [row for row in rows if row["op"] == DENSE and row["implementation"] in STRONG and "us" in row]
    if not any(row["implementation"] == FLASHMLA for row in measured):
        return None
    return min(measured, key=lambda row: row["us"])


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows of one shape; those that do all that dense attention does with ``dense_ratio``, the time of the
    strongest dense peer over theirs, with that peer's name ``dense`` and its time ``dense_us``, and with
    ``flashmla_ratio``, which is against FlashMLA.
    """
    dense = strongest(rows)
    if dense is None:
        return list(rows)
    flashmla = next(row for row in rows if row["op"] == DENSE and row["implementation"] == FLASHMLA)

    def ratios(row: Row) -> Row:
        if "us" not in row or row["op"] not in (DENSE, WHOLE):
            return {}
        beside: dict[str, Any] = {"dense": dense["implementation"], "dense_us": dense["us"]}
        return beside | {"dense_ratio": dense["us"] / row["us"], "flashmla_ratio": flashmla["us"] / row["us"]}

    return [{**row, **ratios(row)} for row in rows]
