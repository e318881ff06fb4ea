"""Scratch of sparse prefill in SGLang's sizing of the KV pool."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused
from sglang.srt.runtime_context import get_context

from sglang_sparse.attention import memory
from sglang_sparse.methods.base import ModelShape
from sglang_sparse_kernels.anchor_prefill import scratch_bound

SHAPE = ModelShape(num_layers=36, num_q_heads=32, num_kv_heads=8, head_dim=128, kv_dtype=torch.bfloat16)
CONTEXT = 131072
GIB = 2**30
# Of two prompts, the one that a pass ends and the one that it begins: eight blocks' means in each layer.
CUT_GROUPS = 2 * 36 * 8 * 32 * (2 * 128 + 4)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory, "model_shape", lambda *_: SHAPE)
    # SGLang asks the arguments of the process how wide a row of its token table is.
    with get_context().override_server_args(page_size=16):
        yield


def configurator(
    chunk: int | None = 8192, prefill: str | None = "anchor", v_dim: int = 128, mixed: int | None = None, **kwargs: Any
) -> Any:
    args = SimpleNamespace(
        sparse_method=None,
        sparse_prefill_method=prefill,
        sparse_prefill_config=json.dumps({"step": 8}),
        page_size=16,
        chunked_prefill_size=chunk,
        max_prefill_tokens=16384,
        enable_mixed_chunk=mixed is not None,
        max_running_requests=mixed,
    )
    model = SimpleNamespace(context_len=CONTEXT, v_head_dim=v_dim)
    return SimpleNamespace(
        **{
            "server_args": args,
            "model_config": model,
            "kv_cache_dtype": torch.bfloat16,
            "model_dtype": torch.bfloat16,
            "is_draft_worker": False,
            **kwargs,
        }
    )


@pytest.mark.parametrize(("chunk", "tokens"), [(8192, 8192), (16384, 16384), (-1, 16384 + CONTEXT), (None, 147456)])
def test_the_pool_leaves_the_scratch_of_the_largest_pass(chunk: int | None, tokens: int) -> None:
    expected = scratch_bound(tokens, CONTEXT, 32, 128, 128, 128, 8)
    assert 2**27 < expected < 2**29
    assert memory.charge_scratch(20 * GIB, configurator(chunk), 80.0) == 20 * GIB - expected - CUT_GROUPS


@pytest.mark.parametrize(("rows", "tokens"), [(40, 8232), (0, 8192 + 4096)])
def test_rows_that_decode_in_a_mixed_batch_come_on_top(rows: int, tokens: int) -> None:
    expected = scratch_bound(tokens, CONTEXT, 32, 128, 128, 128, 8)
    assert memory.charge_scratch(20 * GIB, configurator(mixed=rows), 80.0) == 20 * GIB - expected - CUT_GROUPS


def test_wide_values_are_counted() -> None:
    wide = memory.charge_scratch(20 * GIB, configurator(v_dim=192), pre_model_load_memory=80.0)
    assert 20 * GIB - wide >= scratch_bound(8192, CONTEXT, 32, 128, 192, 128, 8)


def test_dense_prefill_and_draft_models_are_charged_nothing() -> None:
    assert memory.charge_scratch(GIB, configurator(prefill=None), 80.0) == GIB
    assert memory.charge_scratch(GIB, configurator(is_draft_worker=True), 80.0) == GIB


def test_too_little_memory_names_the_flags() -> None:
    with refused("--mem-fraction-static", 100 * 2**20) as caught:
        memory.charge_scratch(100 * 2**20, configurator(), 80.0)
    assert "--chunked-prefill-size" in caught.value.allowed
