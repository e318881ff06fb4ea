"""Deterministic inference at the start of a server: what is served, and what is refused with what to type."""

from pathlib import Path
from typing import Any

import pytest
from model_configs import write_config
from refusals import refused
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import Backends, ServerArgs

from sglang_sparse.config import arguments
from sglang_sparse.config.settings import settings_of
from sglang_sparse.hooks.judge import refusal

FLAG = {"enable_deterministic_inference": True}
HOPPER = (9, 0)


def start(folder: Path, kind: str = "qwen3", **flags: Any) -> ServerArgs:
    return ServerArgs(model_path=write_config(folder, kind), **FLAG, **flags)


@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("resa", {}),
        ("resa", {"crossover_tokens": 0, "rectify_on_finish": True}),
        ("resa", {"dense_fallback": "never"}),
        ("rocketkv", {}),
        ("skip_softmax", {"threshold_scale_factor": {"decode": 300.0}}),
    ],
)
def test_methods_are_served(tmp_path: Path, method: str, config: dict[str, Any]) -> None:
    args = arguments.of(start(tmp_path, sparse_method=method, sparse_config=config))
    assert args.attention_backend == "torch_native" and not args.disable_radix_cache
    assert arguments.deterministic(args)


def test_the_policy_of_a_trainer_asks_for_it(tmp_path: Path) -> None:
    model = write_config(tmp_path, "qwen3")
    args = ServerArgs(model_path=model, sparse_method="resa", rl_on_policy_target="fsdp")
    assert arguments.of(args).enable_deterministic_inference
    with refused("mixed chunk", True):
        ServerArgs(model_path=model, sparse_method="resa", rl_on_policy_target="fsdp", enable_mixed_chunk=True)


def test_preemption_may_be_off(tmp_path: Path) -> None:
    start(tmp_path, sparse_method="resa", enable_priority_scheduling=True, disable_priority_preemption=True)


@pytest.mark.parametrize(
    ("flags", "field", "got", "said"),
    [
        (
            {"sparse_method": "resa", "sparse_config": {"crossover_tokens": 4096}},
            "crossover_tokens",
            4096,
            '0 or "auto"',
        ),
        (
            {"sparse_method": "rocketkv", "sparse_config": {"eviction": "compact"}},
            "eviction",
            "compact",
            '{"eviction": "visibility"}',
        ),
        ({"sparse_prefill_method": "anchor"}, "--sparse-prefill-method", "anchor", "leave out --sparse-prefill-method"),
        (
            {"sparse_method": "skip_softmax"},
            "--sparse-prefill-method",
            "skip_softmax",
            '{"threshold_scale_factor": {"decode": 1000}}',
        ),
    ],
)
def test_what_depends_on_neighbours_is_refused(
    tmp_path: Path, flags: dict[str, Any], field: str, got: object, said: str
) -> None:
    with refused(field, got) as caught:
        start(tmp_path, **flags)
    assert "with deterministic inference" in str(caught.value) and said in str(caught.value)


def test_a_backend_whose_prefill_follows_what_is_cached_is_refused(tmp_path: Path) -> None:
    args = arguments.of(start(tmp_path, sparse_method="resa"))
    settings = settings_of(args.record)
    assert settings is not None
    for name, served in (("fa3", True), ("triton", True), ("flashinfer", False)):
        other: Any = Backends(args, name)
        why = refusal(other, settings, HOPPER, stand_in=True)
        assert (why is None) is served, why
        assert served or ("with deterministic inference; allowed: torch_native, triton, fa3" in str(why))


def test_dsa_is_refused_which_sglang_would_run_dense(tmp_path: Path) -> None:
    with refused("--sparse-method", "dsa") as caught:
        start(tmp_path, "own_sparse_attention", sparse_method="dsa")
    assert "nothing of DSA would run" in str(caught.value)
