"""KV caches that are refused: fp8 without scales, and fp8 on GPUs for which it does not compile."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused

from sglang_sparse.attention import kv_scales
from sglang_sparse.config import settings as config
from sglang_sparse.hooks import kv_dtypes

SCALES = Path(__file__).parents[2] / "eval" / "models" / "tiny-gqa" / "kv_scales.json"


def args_of(
    quantization: dict[str, object] | None, beside: object, folder: Path, dtype: str, backend: str, given: str | None
) -> Any:
    """Of a server with a checkpoint.

    Args:
        quantization: in the checkpoint's config.
        beside: what stands in ModelOpt's file, if there is one.
        folder: of the checkpoint.
        dtype: of the KV cache.
        backend: of attention.
        given: file with scales.
    """
    if beside:
        (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    model = SimpleNamespace(dtype=torch.bfloat16, hf_config=SimpleNamespace(quantization_config=quantization))
    return SimpleNamespace(
        model_path=str(folder),
        kv_cache_dtype=dtype,
        quantization_param_path=given,
        get_model_config=lambda: model,
        get_attention_backends=lambda: [backend],
    )


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
    args = args_of(quantization, beside, tmp_path, "fp8_e4m3", "triton", given)
    for method in ("anchor", "skip_softmax"):
        settings = config.build(None, {}, method, {})
        if served:
            kv_dtypes.require_dtypes(args, settings, gpu=True)
            continue
        with refused("--kv-cache-dtype", "fp8_e4m3") as caught:
            kv_dtypes.require_dtypes(args, settings, gpu=True)
        assert "--quantization-param-path FILE" in caught.value.allowed
    kv_dtypes.require_dtypes(args, config.build("resa", {}), gpu=True)


@pytest.mark.parametrize(
    ("quantization", "beside", "read_by", "float8"),
    [
        ({"quant_algo": "FP8", "kv_cache_scheme": {"type": "float", "num_bits": 8}}, None, "ModelOptFp8Config", True),
        ({"quant_algo": "FP8", "kv_cache_scheme": {"type": "float", "num_bits": 4}}, None, "ModelOptFp8Config", False),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "fp8"}, None, "ModelOptFp8Config", True),
        (
            {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float", "num_bits": 8}},
            None,
            None,
            False,
        ),
        (None, {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}, None, True),
        (None, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, "ModelOptFp8Config", False),
        (None, None, None, False),
    ],
)
@pytest.mark.parametrize("dtype", ["auto", "bf16"])
def test_a_checkpoint_may_make_the_cache_float8(
    quantization: dict[str, object] | None,
    beside: object,
    read_by: str | None,
    float8: bool,
    dtype: str,
    tmp_path: Path,
) -> None:
    """As SGLang decides it, with its own class of the quantization, and the methods are held to that."""
    from sglang.srt.layers.quantization import modelopt_quant
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype

    args = args_of(quantization, beside, tmp_path, dtype, "torch_native", None)
    if read_by:
        loaded = SimpleNamespace(quant_config=getattr(modelopt_quant, read_by).from_config(quantization or beside))
        _, stored = configure_kv_cache_dtype(
            server_args_kv_cache_dtype=dtype,
            model=loaded,
            model_dtype=torch.bfloat16,
            is_draft_worker=False,
            is_dflash=False,
            speculative_draft_attention_backend=None,
        )
        assert (stored == torch.float8_e4m3fn) == (float8 and dtype == "auto")
    made = float8 and dtype == "auto"
    with refused("--attention-backend", "torch_native") if made else nullcontext():
        kv_dtypes.require_dtypes(args, config.build("resa", {}), gpu=True)
    with refused("--kv-cache-dtype", "auto") if made else nullcontext() as caught:
        kv_dtypes.require_dtypes(args, config.build("rocketkv", {}), gpu=True)
    assert caught is None or caught.value.allowed == "bf16"


@pytest.mark.parametrize("asked", [True, False], ids=["asked about", "this machine's"])
def test_fp8_on_a_gpu_that_has_none(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(dtype=torch.bfloat16)
    if not asked:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = SimpleNamespace(
        kv_cache_dtype="fp8_e4m3",
        quantization_param_path=None,
        get_model_config=lambda: model,
        get_attention_backends=lambda: ["dsa"],
    )
    for capability, served in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        gpu = capability if asked else None
        # Its kernels read float8 as integers there.
        kv_dtypes.require_dtypes(args, config.build("dsa", {}), gpu)
        with nullcontext() if served else refused("--kv-cache-dtype", "fp8_e4m3") as caught:
            kv_dtypes.require_dtypes(args, config.build("resa", {}), gpu)
        assert caught is None or f"this one has {capability[0]}.{capability[1]}" in str(caught.value)


def loaded(
    scales: Mapping[int, float],
    method: str | None = "resa",
    path: str | None = "scales.json",
    dtype: str = "fp8_e4m3",
    algo: str | None = None,
) -> list[Any]:
    """Layers with what SGLang leaves of a file's scales, the last one with a checkpoint's.

    ``algo`` is what the checkpoint's quantization says of the KV cache.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [RadixAttention(2, 64, 0.125, 1, number) for number in range(3)]
    for number, scale in scales.items():
        layers[number].k_scale = layers[number].v_scale = scale
    for name in ("k_scale", "v_scale"):
        setattr(layers[-1], name, torch.nn.Parameter(torch.tensor(0.5), requires_grad=False))
        setattr(layers[-1], f"{name}_float", 0.5)
    args = SimpleNamespace(
        sparse_method=method, sparse_config="{}", kv_cache_dtype=dtype, quantization_param_path=path, tp_size=2
    )
    model: Any = torch.nn.ModuleList([torch.nn.Linear(2, 2), *layers])
    if algo:
        model.quant_config = SimpleNamespace(kv_cache_quant_algo=algo)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglang.srt.runtime_context.get_server_args", lambda: args)
        kv_scales.complete_scales(None, model=model, kv_cache_dtype=dtype)
    return layers


def paged(layers: list[Any]) -> bool:
    """Whether FlashInfer's prefill is told to attend in the cache alone, by itself and beside another of decode."""
    alone, beside = (SimpleNamespace(use_paged=False, prefill_backend="fa2") for _ in range(2))
    for dense in (alone, SimpleNamespace(prefill_backend=beside), SimpleNamespace()):
        kv_scales.attend_in_the_cache(dense, torch.nn.ModuleList(layers))
    assert alone.use_paged == beside.use_paged
    return alone.use_paged


@pytest.mark.parametrize("method", [None, "resa"])
def test_scales_of_a_file_are_tensors_and_numbers(method: str | None) -> None:
    """As a checkpoint's are, which stay as they were; FlashInfer reads them in the cache alone."""
    read, plain, checkpoint = loaded({0: 0.0625}, method)
    assert (plain.k_scale, plain.k_scale_float) == (None, None)
    assert isinstance(checkpoint.k_scale, torch.nn.Parameter) and checkpoint.v_scale_float == 0.5
    assert paged([read, plain]) == (method is not None) and paged([checkpoint]) and not paged([plain])
    if method is None:
        assert (read.k_scale, read.k_scale_float) == (0.0625, None)
        return
    assert (read.k_scale_float, read.v_scale_float) == (0.0625, 0.0625)
    assert read.k_scale.dtype == torch.float32 and read.k_scale.expand(3, 2).tolist() == [[0.0625] * 2] * 3
    assert read.v_scale.item() == 0.0625


def test_a_file_whose_scales_sglang_does_not_read() -> None:
    with refused("--quantization-param-path", "scales.json"):
        loaded({})
    loaded({}, path=None)


def test_the_tiny_models_scales_are_read() -> None:
    """SGLang says nothing of a file that it cannot read."""
    from sglang.srt.model_loader.weight_utils import kv_cache_scales_loader

    found = dict(kv_cache_scales_loader(str(SCALES), 0, 1, 4, "qwen3"))
    assert found == dict.fromkeys(range(4), 0.0625)
    assert list(kv_cache_scales_loader(str(SCALES), 0, 2, 4, "qwen3")) == []
