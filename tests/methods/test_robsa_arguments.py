"""What a RoBSA server refuses before it takes memory: each with one message that says what is allowed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model_configs import write_config
from rope_calibrations import calibration
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs

from sglang_sparse.config.settings import SparseArgumentError, build
from sglang_sparse.hooks import refusals

TINY_MLA = "eval/models/tiny-mla"
OPEN = '{"allow_uncalibrated": true}'


def refused(model: str, config: str | None, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as caught:
        ServerArgs(model_path=model, sparse_method="robsa", sparse_config=config, **kwargs)
    return str(caught.value)


def test_an_mla_model_resolves(caplog: pytest.LogCaptureFixture) -> None:
    args: Any = ServerArgs(model_path=TINY_MLA, sparse_method="robsa", sparse_config=OPEN)
    assert args.page_size == 16 and json.loads(args.sparse_config)["theta1"] == 0.9
    assert "robsa runs without a calibration" in caplog.text


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("qwen3", "does not fit Qwen3ForCausalLM: robsa needs an MLA model"),
        ("mla", "does not fit DeepseekV3ForCausalLM: robsa needs a calibration of this model"),
    ],
)
def test_models(tmp_path: Path, kind: str, expected: str) -> None:
    assert expected in refused(write_config(tmp_path, kind), None)


def test_a_model_with_an_indexer_of_its_own(tmp_path: Path) -> None:
    assert "it selects by itself" in refused("eval/models/tiny-dsa", OPEN)


@pytest.mark.parametrize(
    ("config", "kwargs", "expected"),
    [
        ('{"allow_uncalibrated": true, "layers": "0-9"}', {}, "layers '0-9': the model has layers 0 to 3"),
        ('{"calibration": "deepseek-v3-paper-ruler"}', {}, "is for DeepseekV3ForCausalLM with 61 layers"),
        (json.dumps({"calibration": calibration([0.5, 1.0] * 2)}), {}, "the calibration was made on other weights"),
        (OPEN, {"page_size": 64}, "the server's page size is 64 and the config's is 16"),
        (OPEN, {"attention_backend": "flashmla"}, "needs a GPU and this machine has none"),
        (OPEN, {"kv_cache_dtype": "fp8_e4m3"}, "allowed with --kv-cache-dtype fp8_e4m3: triton, flashinfer, flashmla"),
        (OPEN, {"speculative_algorithm": "EAGLE"}, "speculative decoding"),
        (OPEN, {"sparse_prefill_method": "anchor"}, "anchor does not fit DeepseekV3ForCausalLM"),
    ],
)
def test_flags(config: str, kwargs: dict[str, Any], expected: str) -> None:
    assert expected in refused(TINY_MLA, config, **kwargs)


def test_a_calibration_of_another_method() -> None:
    message = refused(TINY_MLA, '{"calibration": "eval/models/tiny-gqa/anchor.json"}')
    assert "eval/models/tiny-gqa/anchor.json is a calibration of 'anchor'; allowed: one of 'robsa'" in message
    assert len(message) < 300


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
    mla = SimpleNamespace(attention_arch=SimpleNamespace(name="MLA"))
    args: Any = SimpleNamespace(get_attention_backends=lambda: [backend], get_model_config=lambda: mla)
    with pytest.raises(SparseArgumentError) as caught:
        refusals.require_after(args, build("robsa", json.loads(OPEN)), gpu)
    assert str(caught.value).endswith(f"{backend!r} is not supported; allowed: {allowed}")
