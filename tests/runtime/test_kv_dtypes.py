"""KV caches that are refused: fp8 without scales, and fp8 on GPUs for which it does not compile."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_sparse import config, kv_dtypes


@pytest.mark.parametrize(
    ("quantization", "beside", "given", "served"),
    [
        (None, None, None, False),
        ({"quant_method": "fp8"}, None, None, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None, None, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, None, None, True),
        (None, {"quantization": {"quant_algo": "FP8"}}, None, False),
        (None, {"quantization": {"kv_cache_quant_algo": "FP8"}}, None, True),
        (None, None, "scales.json", True),
    ],
)
def test_sparse_prefill_takes_fp8_kv_with_scales(
    quantization: dict[str, object] | None, beside: object, given: str | None, served: bool, tmp_path: Path
) -> None:
    if beside:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    model = SimpleNamespace(dtype=torch.bfloat16, hf_config=SimpleNamespace(quantization_config=quantization))
    args = SimpleNamespace(
        model_path=str(tmp_path),
        kv_cache_dtype="fp8_e4m3",
        quantization_param_path=given,
        get_model_config=lambda: model,
        get_attention_backends=lambda: ["triton"],
    )
    for method in ("anchor", "skip_softmax"):
        settings = config.build(None, {}, method, {})
        if served:
            kv_dtypes.require_dtypes(args, settings, gpu=True)
            continue
        with pytest.raises(config.SparseArgumentError, match=r"fp8 KV without scales .* --quantization-param-path"):
            kv_dtypes.require_dtypes(args, settings, gpu=True)
    kv_dtypes.require_dtypes(args, config.build("resa", {}), gpu=True)


@pytest.mark.parametrize("asked", [True, False], ids=["asked about", "this machine's"])
def test_fp8_on_a_gpu_that_has_none(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(dtype=torch.bfloat16)
    if not asked:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = SimpleNamespace(
        kv_cache_dtype="fp8_e4m3", get_model_config=lambda: model, get_attention_backends=lambda: ["dsa"]
    )
    for capability, served in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        gpu = capability if asked else None
        # Its kernels read float8 as integers there.
        kv_dtypes.require_dtypes(args, config.build("dsa", {}), gpu)
        with nullcontext() if served else pytest.raises(ValueError) as caught:
            kv_dtypes.require_dtypes(args, config.build("resa", {}), gpu)
        said = f"8.9 or later, and this one has {capability[0]}.{capability[1]}; allowed: --kv-cache-dtype auto"
        assert served or str(caught.value).endswith(said)


@pytest.mark.parametrize("method", [None, "resa"])
def test_scales_of_a_file_are_tensors_and_numbers(method: str | None) -> None:
    """As SGLang's own models leave them, and as a checkpoint's are."""
    from sglang.srt.layers.radix_attention import RadixAttention

    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), *(RadixAttention(2, 64, 0.125, 1, i) for i in range(2))])
    _, read, plain = model
    read.k_scale, read.v_scale = 0.0625, 0.5
    kv_dtypes.complete_scales(None, model=model, server_args=SimpleNamespace(sparse_method=method, sparse_config="{}"))
    assert (plain.k_scale, plain.k_scale_float) == (None, None)
    if method is None:
        assert (read.k_scale, read.k_scale_float) == (0.0625, None)
        return
    assert (read.k_scale_float, read.v_scale_float) == (0.0625, 0.5)
    assert read.k_scale.dtype == torch.float32 and read.k_scale.expand(3, 2).tolist() == [[0.0625] * 2] * 3
    assert read.v_scale.item() == 0.5
