"""Tests of a RoBSA server's refusals before it takes memory: each is one message that states the allowed choices."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs

from sglang_sparse.config.settings import build
from sglang_sparse.hooks import refusals

TINY_MLA = "eval/models/tiny-mla"
OPEN = '{"allow_uncalibrated": true}'


def test_an_mla_model_resolves(caplog: pytest.LogCaptureFixture) -> None:
    args: Any = ServerArgs(model_path=TINY_MLA, sparse_method="robsa", sparse_config=OPEN)
    assert args.page_size == 16 and json.loads(args.sparse_config)["theta1"] == 0.9
    assert "robsa runs without a calibration" in caplog.text


@pytest.mark.parametrize(
    ("backend", "gpu", "allowed"),
    [
        # It rotates queries and keys itself.
        ("trtllm_mla", True, "triton, flashinfer, flashmla, fa3"),
        # SGLang's own would end the server at the first prompt.
        ("torch_native", True, "triton, flashinfer, flashmla, fa3"),
        ("flashmla", False, "torch_native"),
    ],
)
def test_attention_backends_of_mla(backend: str, gpu: bool, allowed: str) -> None:
    mla = SimpleNamespace(
        attention_arch=SimpleNamespace(name="MLA"),
        has_attention_sinks=False,
        is_local_attention_model=False,
        hf_config=SimpleNamespace(),
        hf_text_config=SimpleNamespace(),
    )
    asks = {"get_attention_backends": lambda: [backend], "get_model_config": lambda: mla}
    plain = {"enable_deterministic_inference": False, "rl_on_policy_target": None, "speculative_algorithm": None}
    args: Any = SimpleNamespace(**plain, **asks)
    with refused("--attention-backend", backend) as caught:
        refusals.require_after(args, build("robsa", json.loads(OPEN)), gpu)
    assert ", ".join(caught.value.allowed) == allowed
