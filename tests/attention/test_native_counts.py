"""Counters of a server that leaves DSA to SGLang: from the lengths of each pass, on the host."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_sparse.attention.counters import Counters
from sglang_sparse.attention.native_counts import counters_of, native_counts
from sglang_sparse.config.settings import build
from sglang_sparse.scheduler import exact_kv

TOPK, FIRST, END = 64, 2, 5
NATIVE = build("dsa", {"implementation": "native"})


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rank with the middle layers of a model; those that share an indexer have no keys."""
    monkeypatch.setattr(
        "sglang_sparse.attention.native_counts.model_shape", lambda *_: SimpleNamespace(num_layers=8, num_kv_heads=1)
    )
    keys = [torch.zeros(3, 64 * 132, dtype=torch.uint8), torch.zeros(0, 64 * 132, dtype=torch.uint8)]
    pool = SimpleNamespace(page_size=64, dtype=torch.bfloat16, kv_buffer=[torch.zeros(8, 1, 576).bfloat16()] * 3)
    pool.index_k_with_scale_buffer = keys
    args = SimpleNamespace(
        sparse_method="dsa", sparse_prefill_method=None, sparse_config='{"implementation": "native"}'
    )
    return SimpleNamespace(
        server_args=args,
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(index_topk=TOPK)),
        layer_info=SimpleNamespace(start_layer=FIRST, end_layer=END),
        token_to_kv_pool=pool,
        is_draft_worker=False,
        device="cpu",
    )


def batch_of(mode: ForwardMode, lengths: list[int] | None, held: list[int], forced: list[int] | None = None) -> Any:
    params = SimpleNamespace(custom_params={"forced_tokens": forced} if forced else None)
    request = {"output_ids": [2], "sampling_params": params, "custom_logit_processor": None}
    requests = [SimpleNamespace(origin_input_ids=[1] * (n - 1), **request) for n in held]
    found = None if lengths is None else torch.tensor(lengths)
    return SimpleNamespace(forward_mode=mode, reqs=requests, seq_lens_cpu=found)


def passed(slots: int) -> Any:
    return SimpleNamespace(out_cache_loc=torch.zeros(slots, dtype=torch.int64), seq_lens=torch.zeros(1))


def moved(counts: Counters) -> list[Any]:
    snapshot = counts.snapshot()
    names = ("decode_steps", "decode_rows", "dense_fallback_rows", "sparse_layer_rows", "pages_attended", "pages_held")
    return [snapshot[name] for name in names]


def test_decode_is_counted_as_where_this_project_selects(runner: Any) -> None:
    counts = native_counts(runner, NATIVE)
    assert counts is counters_of(runner, NATIVE) is native_counts(runner, NATIVE)
    counts.follow(passed(2), batch_of(ForwardMode.DECODE, [50, 64], [50, 64]))
    assert moved(counts) == [1, 2, 2, 0, 0, 0]
    counts.follow(passed(2), batch_of(ForwardMode.DECODE, [50, 100], [50, 100]))
    layers = END - FIRST
    assert moved(counts) == [2, 4, 3, 2 * layers, (50 + TOPK) * layers, 150 * layers]
    snapshot = counts.snapshot()
    assert snapshot["sparse_layers"] == layers and snapshot["max_active_fraction"] == pytest.approx(TOPK / 100)
    assert snapshot["kv_bytes_per_token"] == 3 * 576 * 2 + 132 and snapshot["aux_bytes"] == 0
    assert [tensor.device.type for tensor in counts.device_stats] == ["cpu"]


def test_each_token_of_a_verification_is_a_row(runner: Any) -> None:
    counts = native_counts(runner, NATIVE)
    counts.follow(passed(6), batch_of(ForwardMode.TARGET_VERIFY, [62, 100], [62, 100]))
    attended = 63 + 64 + TOPK + 3 * TOPK
    assert moved(counts) == [1, 6, 2, 18, attended * 3, (63 + 64 + 65 + 101 + 102 + 103) * 3]


def test_lengths_that_the_device_alone_knows_are_those_of_the_requests(runner: Any) -> None:
    counts = native_counts(runner, NATIVE)
    counts.follow(passed(4), batch_of(ForwardMode.TARGET_VERIFY, None, [100, 200]))
    assert moved(counts) == [1, 4, 0, 12, 4 * TOPK * 3, (100 + 101 + 200 + 201) * 3]


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.IDLE, ForwardMode.PREBUILT])
def test_other_passes_are_not_counted(mode: ForwardMode, runner: Any) -> None:
    counts = native_counts(runner, NATIVE)
    counts.follow(passed(100), batch_of(mode, [100], [100] if mode != ForwardMode.IDLE else []))
    assert moved(counts) == [0] * 6


def test_a_pass_begins_without_a_wrapper(runner: Any) -> None:
    """Nothing is kept on requests but their options; drafts are not followed."""
    batch = batch_of(ForwardMode.DECODE, [100], [100], forced=[5, 6, 7])
    forward = passed(1)
    exact_kv.begin_pass(forward, type(None), batch, runner)
    (request,) = batch.reqs
    assert exact_kv.state_of(request) is None and exact_kv.shareable_len(request) is None
    assert forward.sglang_sparse_forced.tokens.tolist() == [6]
    runner.is_draft_worker = True
    exact_kv.begin_pass(passed(1), type(None), batch, runner)
    assert moved(native_counts(runner, NATIVE))[0] == 1
