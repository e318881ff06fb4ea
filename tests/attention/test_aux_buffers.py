"""The buffers beside the KV pool: which pages a pass touches, what is charged, and that a summary is its page's."""

import inspect
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.model_executor.pool_configurator import HybridSWAPoolConfigurator

from sglang_sparse.attention import exact_states, memory
from sglang_sparse.attention.kv_scales import kv_bytes_per_token
from sglang_sparse.config.settings import build
from sglang_sparse.methods import aux_buffers
from sglang_sparse.methods.base import AuxSpec, ModelShape
from sglang_sparse.methods.resa import SUMMARY

SHAPE = ModelShape(num_layers=4, num_q_heads=8, num_kv_heads=2, head_dim=64, kv_dtype=torch.bfloat16)


@given(
    st.sampled_from([1, 2, 4, 16, 64]),
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 200)), min_size=1, max_size=5),
    st.integers(0, 2**32),
)
def test_page_ends(page_size: int, requests: list[tuple[int, int]], seed: int) -> None:
    """Requests with whole-page tables in random order; each extends from a prefix by some tokens."""
    free = list(range(1, 2000))
    random.Random(seed).shuffle(free)
    slots, expected = [], []
    for prefix, extend in requests:
        table = [free.pop() for _ in range(-(-(prefix + extend) // page_size))]
        positions = range(prefix, prefix + extend)
        slots += [table[p // page_size] * page_size + p % page_size for p in positions]
        expected += [(p + 1) % page_size == 0 or p == positions[-1] for p in positions]
    ends = aux_buffers.page_ends(torch.tensor(slots), page_size)
    assert (ends >= 0).tolist() == expected
    assert ends[ends >= 0].tolist() == [slot for slot, end in zip(slots, expected, strict=True) if end]


def test_slots_of_the_dummy_page_are_skipped() -> None:
    slots = torch.tensor([32, 33, 0, 0, 0])
    assert aux_buffers.page_ends(slots, 16).tolist() == [-1, 33, -1, -1, -1]


def test_a_page_that_two_passes_reach_ends_where_the_later_one_does() -> None:
    """A page that arrived with two tokens and goes on, and one that goes on behind what a pass encodes again."""
    arrived, written = torch.tensor([-1, 33, 63, 70]), torch.tensor([34, 63, -1, 66])
    ends = aux_buffers.newest_ends(torch.cat([arrived, written]), 16)
    assert sorted(ends.tolist()) == [-1, -1, -1, -1, -1, 34, 63, 70]


@pytest.mark.parametrize(
    ("fields", "expected", "of_float8"),
    [
        ({}, 128, 64),
        ({"summary": "minmax"}, 128, 64),
        ({"summary_dtype": "bf16"}, 128, 128),
        ({"summary_dtype": "fp8"}, 64, 64),
        ({"centroids": 3}, 80, 80),
    ],
)
def test_bytes_per_token(fields: dict[str, Any], expected: int, of_float8: int) -> None:
    # 4 layers, 2 heads, vectors of 64 elements, one entry for 16 tokens.
    settings = build("resa", fields)
    assert memory.aux_bytes_per_token(settings, SHAPE) == expected
    assert memory.aux_bytes_per_token(settings, replace(SHAPE, kv_dtype=torch.float8_e4m3fn)) == of_float8


def test_what_a_token_takes_in_sglangs_pool() -> None:
    keys, values = torch.zeros(48, 2, 64, dtype=torch.bfloat16), torch.zeros(48, 2, 32, dtype=torch.bfloat16)
    plain = SimpleNamespace(k_buffer=[keys] * 3, v_buffer=[values] * 3, page_size=16)
    assert kv_bytes_per_token(plain) == 3 * 2 * (64 + 32) * 2
    rows, pages = torch.zeros(128, 1, 656, dtype=torch.uint8), torch.zeros(2, 64 * 132, dtype=torch.uint8)
    latent = SimpleNamespace(kv_buffer=[rows] * 3, index_k_with_scale_buffer=[pages] * 3, page_size=64)
    assert kv_bytes_per_token(latent) == 3 * (656 + 132)


def test_dense_layers_are_not_charged() -> None:
    assert memory.aux_bytes_per_token(build("resa", {"layers": "2-"}), SHAPE) == 64


def test_a_dense_server_is_charged_nothing() -> None:
    kvc = SimpleNamespace(server_args=SimpleNamespace(sparse_method=None), is_draft_worker=False)
    assert memory.charge_aux_bytes(4096, None, kvc, 4) == 4096
    pool = object()
    assert memory.attach_aux_pools(pool, SimpleNamespace(server_args=kvc.server_args)) is None


def test_two_pools_are_charged_by_tokens_of_the_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = build("resa", {"layers": "2-"})
    monkeypatch.setattr(memory, "hooked_settings_of", lambda _: settings)
    monkeypatch.setattr(memory, "model_shape", lambda *_: SHAPE)
    monkeypatch.setattr(memory, "shares_selection", lambda *_: False)
    kvc: Any = SimpleNamespace(server_args=None, is_draft_worker=False, model_config=None, kv_cache_dtype=None)
    # Another test may have hooked it.
    alone = inspect.unwrap(HybridSWAPoolConfigurator._full_cell_bytes)
    charged = lambda self: memory.charge_full_pool(alone(self), self)  # noqa: E731
    monkeypatch.setattr(HybridSWAPoolConfigurator, "_full_cell_bytes", charged)
    sizes = {"_full_per_token": 256, "_swa_per_token": 128, "_full_layers_num": 2, "_swa_layers_num": 2}
    names = ("full", "swa", "swa_full")
    none = {f"_draft_{name}_layers_num": 0 for name in names} | {"_fused_full_entry": None, "_fused_swa_entry": None}
    for is_draft, extra in ((False, 64), (True, 0)):
        kvc.is_draft_worker = is_draft
        sizing = object.__new__(HybridSWAPoolConfigurator)
        vars(sizing).update(sizes, **none, _swa_full_tokens_ratio=0.5, _draft_cell_size=0)
        memory.note_aux_bytes(lambda *_: None, sizing, kvc)
        sizing._recompute_cell_size()
        assert sizing._cell_size == 2 * 256 + extra + 0.5 * 2 * 128


@pytest.mark.parametrize(("running", "copies"), [(None, 8), (4, 4), (100, 8)])
def test_copies_of_states_are_charged(monkeypatch: pytest.MonkeyPatch, running: int | None, copies: int) -> None:
    """One a running request, of which SGLang plans one for five states; and one more, for what pads a batch."""
    schedule = SimpleNamespace(max_mamba_cache_size=40, max_running_requests=running)
    monkeypatch.setattr("sglang.srt.runtime_context.get_schedule", lambda: schedule)
    config = SimpleNamespace(mamba2_cache_params=SimpleNamespace(mamba_cache_per_req=2**30))
    states = {"mambaish_config": config, "_calculate_mamba_ratio": lambda: 5, "attn_dp_size": 1}
    kvc: Any = SimpleNamespace(server_args=None, is_draft_worker=False, **states)
    for interval, charged in ((32, copies + 1), (0, 0)):
        settings = build("resa", {"rectify_interval": interval})
        monkeypatch.setattr(exact_states, "hooked_settings_of", lambda _, found=settings: found)
        assert exact_states.charge_copies(100.0, kvc) == 100 - charged


def test_a_page_written_in_pieces_has_the_summary_of_all_its_keys() -> None:
    settings = build("resa", {"page_size": 4, "summary": "minmax"})
    specs = settings.method.aux_specs(SHAPE)
    aux = aux_buffers.AuxBuffers(specs, (0,), 8, 4, "cpu")
    keys = torch.randn(32, 2, 64).to(torch.bfloat16)
    for slots in ([20, 21], [22], [23]):
        aux.refresh({0: keys}, aux_buffers.page_ends(torch.tensor(slots), 4))
        written = keys[20 : slots[-1] + 1]
        summary = aux.buffer(SUMMARY, 0)[5]
        assert torch.equal(summary[:, 0], written.amax(0)) and torch.equal(summary[:, 1], written.amin(0))


def test_only_what_selection_needs_fresh_is_refreshed_before_it() -> None:
    asked: list[str] = []

    def spec(name: str, early: bool) -> AuxSpec:
        return AuxSpec(name, (1,), torch.float32, lambda *_: asked.append(name), early)

    aux = aux_buffers.AuxBuffers((spec("late", False), spec("early", True)), (0, 1), 8, 16, "cpu")
    aux.refresh({0: torch.zeros(128, 1, 1)}, torch.tensor([31]), before_select=True)
    aux.refresh({0: torch.zeros(128, 1, 1)}, torch.tensor([31]))
    assert asked == ["early", "late", "early"]


def test_bytes_are_those_of_the_buffers() -> None:
    settings = build("resa", {})
    aux = aux_buffers.AuxBuffers(settings.method.aux_specs(SHAPE), (0, 1, 2, 3), 100, 16, "cpu")
    assert aux.nbytes == 100 * 16 * memory.aux_bytes_per_token(settings, SHAPE)


def test_keys_outside_fp8_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    settings = build("resa", {"summary_dtype": "fp8"})
    aux = aux_buffers.AuxBuffers(settings.method.aux_specs(SHAPE), (0,), 8, 16, "cpu")
    keys = torch.randn(128, 2, 64).to(torch.bfloat16)
    aux.refresh({0: keys}, torch.tensor([31]))
    aux.warn_of_overflow()
    aux.warn_of_overflow()
    keys[32:48, 1, 3] = 600.0
    aux.refresh({0: keys}, torch.tensor([47]))
    assert not caplog.messages
    for _ in range(3):
        aux.warn_of_overflow()
    (line,) = caplog.messages
    assert "2 values" in line and line.endswith('needs {"summary_dtype": "bf16"}')
