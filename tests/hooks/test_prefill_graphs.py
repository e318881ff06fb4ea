"""Tests of SGLang's CUDA graphs of prefill: the servers that have them, and the steps that may replay them."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_sparse.config.settings import build
from sglang_sparse.hooks import dsa_flags, server_args
from sglang_sparse.scheduler import joint_pass


@pytest.mark.parametrize(
    ("choice", "graphs", "left"),
    [
        ("portable", "breakable", "disabled"),
        ("portable", "disabled", "disabled"),
        ("native", "breakable", "breakable"),
        ("native", "full", "full"),
        ("auto", "breakable", "breakable"),
        ("auto", "full", "disabled"),
    ],
)
def test_prefill_graphs_that_the_indexer_cannot_be_in(
    choice: str, graphs: str, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = CudaGraphConfig(prefill=PhaseConfig(backend=graphs))
    args: Any = SimpleNamespace(cuda_graph_config=config)
    dsa_flags.disable_prefill_graphs(args, build("resa", {}))
    assert args.cuda_graph_config.prefill.backend == graphs
    dsa_flags.disable_prefill_graphs(args, build("dsa", {"implementation": choice}))
    assert args.cuda_graph_config.prefill.backend == left
    assert ("prefill runs without CUDA graphs" in caplog.text) == (graphs != left)


@pytest.mark.parametrize(
    ("method", "interval", "mode", "changes", "switched_off"),
    [
        ("resa", 32, "decode", False, False),
        ("resa", 0, "decode", False, True),
        ("resa", 32, "prefill", False, True),
        ("resa", 0, "decode", True, False),
        ("resa", 0, "prefill", True, False),
        (None, None, "decode", False, True),
        (None, None, "decode", True, True),
    ],
)
def test_a_decode_server_keeps_graphs_of_prefill_for_passes_that_rectify_or_another_role(
    method: str | None, interval: int | None, mode: str, changes: bool, switched_off: bool
) -> None:
    config = None if interval is None else json.dumps({"rectify_interval": interval})
    fields = {"sparse_method": method, "sparse_config": config, "sparse_prefill_method": None}
    roles = {"disaggregation_mode": mode, "enable_pd_role_switch": changes}
    record = SimpleNamespace(**fields, **roles, sparse_prefill_config=None, page_size=16)
    called: list[object] = []
    server_args.keep_prefill_graphs(called.append, record)
    assert called == [record] * switched_off


@pytest.mark.parametrize(
    ("method", "prefill", "mode", "vote"),
    [
        ("resa", None, ForwardMode.DECODE, False),
        ("resa", None, ForwardMode.EXTEND, True),
        (None, "anchor", ForwardMode.DECODE, True),
    ],
)
def test_sparse_decode_never_joins_the_prefill_of_another_rank(
    monkeypatch: pytest.MonkeyPatch, method: str | None, prefill: str | None, mode: ForwardMode, vote: bool
) -> None:
    """SGLang votes for it; a prefill method alone leaves decode dense."""
    settings = build(method, {}, prefill, {})
    monkeypatch.setattr(joint_pass, "current_settings", lambda: settings)
    batch: Any = SimpleNamespace(forward_mode=mode)
    assert joint_pass.keep_decode(lambda **_: True, local_batch=batch, num_tokens=1) is vote
    assert joint_pass.keep_decode(lambda **_: True, local_batch=None, num_tokens=0)
