"""Hooks of a server that leaves DSA to SGLang: they call what they hook, and only report."""

import logging
from array import array
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_parallel

from sglang_sparse.attention import cuda_graphs, kv_scales, memory
from sglang_sparse.attention.dsa import latents, native_indexer
from sglang_sparse.config.settings import build, hooked_settings_of, settings_of
from sglang_sparse.hooks import model_runner, requests, server_info
from sglang_sparse.scheduler import compaction, prefill_chunks, rectification

SERVER: Any = SimpleNamespace(
    sparse_method="dsa",
    sparse_prefill_method=None,
    sparse_config='{"implementation": "native"}',
    dp_size=1,
    kv_cache_dtype="fp8_e4m3",
)
RUNNER: Any = SimpleNamespace(server_args=SERVER, is_draft_worker=False)


def original(*_: Any, **__: Any) -> Any:
    return "SGLang's"


def test_only_native_kernels_pass_through() -> None:
    assert {choice: build("dsa", {"implementation": choice}).passes_through for choice in ("native", "auto")} == {
        "native": True,
        "auto": False,
    }
    assert not build("dsa", {"implementation": "portable"}).passes_through and not build("resa", {}).passes_through
    assert settings_of(SERVER) is not None and hooked_settings_of(SERVER) is None
    other = SimpleNamespace(**{**vars(SERVER), "sparse_config": "{}"})
    assert hooked_settings_of(other) is settings_of(other) is not None


def test_nothing_is_wrapped_charged_or_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: SERVER)
    dense, pool = object(), SimpleNamespace()
    with get_parallel().override(world_group=SimpleNamespace(world_size=1)):
        assert model_runner.wrap_attention_backend(lambda _, backend: backend, RUNNER, dense) is dense  # pyright: ignore[reportArgumentType]
    assert memory.charge_aux_bytes(576, None, RUNNER, 4) == 576
    assert memory.charge_scratch(1000, RUNNER) == 1000
    memory.attach_aux_pools(pool, RUNNER)  # pyright: ignore[reportArgumentType]
    assert not vars(pool)
    assert cuda_graphs.no_post_capture_sizing(lambda _: True, SERVER)
    kv_scales.complete_scales(None, model=None, kv_cache_dtype="fp8_e4m3")  # pyright: ignore[reportArgumentType]
    assert latents.row_width(original, model_config=None, kv_cache_dtype=None) == "SGLang's"  # pyright: ignore[reportArgumentType]
    assert native_indexer.plan(original, None, None) == "SGLang's"  # pyright: ignore[reportArgumentType]
    assert native_indexer.schedule(original)(None) == "SGLang's"  # pyright: ignore[reportArgumentType]


def test_steps_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: SERVER)
    scheduler: Any = SimpleNamespace(server_args=SERVER, tp_worker=None)
    batch: Any = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True), reqs=[])
    assert rectification.run_step(original, RUNNER, batch) == "SGLang's"
    assert rectification.run_passes(original, RUNNER, None) == "SGLang's"
    asked: list[Any] = []
    rectification.follow_results(lambda *args: asked.append(args), scheduler, batch, "result")
    assert asked == [(scheduler, batch, "result")]
    compaction.compact_running(batch, scheduler)
    assert prefill_chunks.current_settings() is None


def test_no_hook_is_added_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(HookRegistry, "_hooks", {})
    loaded: list[Any] = []
    model_runner.hook_method(loaded.append, RUNNER)
    assert loaded == [RUNNER] and HookRegistry._hooks == {}


class Wrapper(AttentionBackend):
    """As SGLang's own, for two batches or for prefill and decode."""

    def __init__(self, *inner: AttentionBackend) -> None:
        for place, one in enumerate(inner):
            setattr(self, f"inner_{place}", one)


DSA = DeepseekSparseAttnBackend.__new__(DeepseekSparseAttnBackend)


@pytest.mark.parametrize(
    ("backend", "runs"), [(DSA, True), (Wrapper(Wrapper(), DSA), True), (Wrapper(Wrapper()), False), (Wrapper(), False)]
)
def test_it_says_once_that_sglangs_backend_runs(
    backend: Any, runs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("sglang_sparse.hooks.prometheus.start", original)
    scheduler: Any = SimpleNamespace(
        server_args=SERVER,
        tree_cache=None,
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend)),
    )
    for rank in (0, 1):
        parallel = SimpleNamespace(tp_rank=rank, pp_rank=0, dp_rank=None)
        monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda found=parallel: found)
        info: dict[str, object] = {}
        server_info.report_active(info, scheduler)
        assert info == ({"sparse_method": "dsa", "sparse_prefill_method": None} if runs else {})
    assert caplog.text.count("sglang_sparse: method dsa: SGLang runs DSA unchanged") == runs


@pytest.mark.parametrize(
    ("fields", "field", "got"),
    [
        ({"input_ids": array("q", [5, 100, 7])}, "input_ids", 100),
        ({"input_ids": [5, -1]}, "input_ids", -1),
        ({"top_logprobs_num": 101}, "top_logprobs_num", 101),
        ({"stop_token_ids": {3, 100}, "min_new_tokens": 1}, "stop_token_ids", 100),
        ({"input_embeds": [[0.5] * 8, [0.5] * 7]}, "input_embeds", "rows of 7, 8 numbers"),
        ({"input_embeds": [[0.5] * 8], "dtype": "torch.float16"}, "input_embeds", "1 rows"),
        ({"input_embeds": [[0.5] * 8]}, "", None),
        ({"stop_token_ids": {100}, "top_logprobs_num": 100, "input_ids": array("q", [0, 99])}, "", None),
    ],
)
def test_requests_that_would_end_the_scheduler_are_refused(fields: dict[str, Any], field: str, got: object) -> None:
    model = SimpleNamespace(vocab_size=100, hidden_size=8, dtype=fields.pop("dtype", "torch.bfloat16"))
    manager = SimpleNamespace(
        server_args=SimpleNamespace(**vars(SERVER), speculative_algorithm=None), model_config=model
    )
    of_sampling = {name: fields.pop(name) for name in ("stop_token_ids", "min_new_tokens") if name in fields}
    sampling = {"custom_params": None, "beam_width": 1, "stop_token_ids": None, "min_new_tokens": 0} | of_sampling
    tokenized = SimpleNamespace(**({"input_ids": None} | fields), sampling_params=SimpleNamespace(**sampling))
    with refused(field, got) if field else nullcontext():
        requests.refuse_bad_options(lambda *_: tokenized, manager, None)


@pytest.mark.parametrize("implementation", ["native", "portable"])
@pytest.mark.parametrize("forced", [[], [5]])
def test_beams_are_served_unless_tokens_are_forced(
    implementation: str, forced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SimpleNamespace(**{**vars(SERVER), "sparse_config": f'{{"implementation": "{implementation}"}}'})
    args.speculative_algorithm = None
    manager = SimpleNamespace(server_args=args, model_config=SimpleNamespace(vocab_size=100))
    sampling = SimpleNamespace(
        beam_width=2, custom_params={"forced_tokens": forced}, min_new_tokens=0, stop_token_ids=None
    )
    tokenized = SimpleNamespace(sampling_params=sampling, extra_key=None, input_ids=[5])
    if implementation == "native" and not forced:
        assert requests.refuse_bad_options(lambda *_: tokenized, manager, None) is tokenized
        return
    with refused("beam_width", 2):
        requests.refuse_bad_options(lambda *_: tokenized, manager, None)
