"""Tests of the kernels that DSA runs, over a table of machines, and of refusals by name."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused

from sglang_sparse.config.settings import build
from sglang_sparse.hooks import dsa_flags
from sglang_sparse.methods.dsa import kernel_choice
from sglang_sparse.methods.dsa.decode import STAGES
from sglang_sparse.methods.dsa.kernel_choice import Facts, resolve
from sglang_sparse.tools import dry_run

PACKAGES = frozenset({"deep_gemm", "sgl_kernel"})
AMPERE, ADA, HOPPER, BLACKWELL, DESKTOP = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
GPU = Facts(HOPPER, PACKAGES, kv_dtype="auto", heads=16)
CPU = replace(GPU, capability=None)
LAID_OUT = (
    "SGLang keeps float8 KV with scales of a latent of 512 and a rotated key of 64, and the model's have 256 and 64"
)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (CPU, "portable"),
        (replace(GPU, capability=AMPERE), "portable"),
        (replace(GPU, capability=ADA), "portable"),
        (replace(GPU, capability=DESKTOP), "portable"),
        (GPU, "auto"),
        (replace(GPU, capability=BLACKWELL), "auto"),
        (replace(GPU, kv_dtype="fp8_e4m3"), "auto"),
        (replace(GPU, kv_dtype="fp8_e4m3", capability=AMPERE), "portable"),
        (replace(GPU, kv_dtype="fp8_e4m3", capability=DESKTOP), "portable"),
        (replace(CPU, kv_dtype="fp8_e4m3"), "portable"),
        # Without scales, as SGLang's backend trtllm keeps it, it has any size.
        (replace(GPU, kv_dtype="fp8_e4m3", latent=(256, 64), raw=True), "auto"),
        (replace(CPU, packages=frozenset()), "portable"),
        # 48 heads a rank are no kernel's, and 96 are Hopper's no more than Blackwell's.
        (replace(GPU, heads=48), "portable"),
        (replace(GPU, heads=128), "auto"),
        (replace(GPU, heads=64, capability=BLACKWELL), "auto"),
        (replace(GPU, heads=96, capability=BLACKWELL), "portable"),
    ],
)
def test_auto(facts: Facts, expected: str) -> None:
    assert resolve("auto", facts) == expected


def test_what_is_asked_for_is_what_runs() -> None:
    assert [resolve("portable", facts) for facts in (GPU, CPU)] == ["portable"] * 2
    # SGLang's kernels, but for the selection: which of two equal tokens it takes is left open.
    assert STAGES["auto"] == {"indexer": "native", "topk": "portable", "attention": "native"}
    assert all(set(STAGES[choice].values()) == {choice} for choice in ("native", "portable"))


@pytest.mark.parametrize(
    ("facts", "asked", "expected"),
    [
        (
            replace(GPU, capability=(7, 5)),
            "auto",
            "got 'auto', allowed: nothing; not auto: SGLang's kernels are for compute capabilities 9.x and 10.x, and "
            "this GPU has 7.5; not portable: it needs compute capability 8.0 or later, and this GPU has 7.5",
        ),
        (
            replace(GPU, heads=48, kv_dtype="fp8_e4m3", latent=(256, 64)),
            "portable",
            f"got 'portable', allowed: native; not portable: {LAID_OUT}",
        ),
        (
            replace(GPU, kv_dtype="fp8_e4m3", latent=(256, 64)),
            "auto",
            f"got 'auto', allowed: native; not auto: {LAID_OUT}; not portable: {LAID_OUT}",
        ),
        (
            replace(GPU, kv_dtype="fp8_e4m3", latent=(256, 64), raw=True),
            "portable",
            f"got 'portable', allowed: auto, native; not portable: {LAID_OUT}",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(facts: Facts, asked: str, expected: str) -> None:
    with refused("implementation", asked) as caught:
        resolve(asked, facts)
    assert expected in str(caught.value)


@pytest.mark.parametrize("capability", [AMPERE, HOPPER, DESKTOP])
def test_nothing_starts_where_sglangs_model_cannot_be_imported(capability: tuple[int, int]) -> None:
    facts = replace(GPU, capability=capability)
    said = [kernel_choice.absent(replace(facts, packages=PACKAGES - {name})) for name in sorted(PACKAGES)]
    assert str(said[0]).startswith("deep_gemm (package sgl-deep-gemm) cannot be imported; next to a GPU SGLang's model")
    assert str(said[1]).startswith("sgl_kernel (package sglang-kernel) cannot be imported")
    both = str(kernel_choice.absent(replace(facts, packages=frozenset())))
    assert both.startswith("deep_gemm (package sgl-deep-gemm) and sgl_kernel (package sglang-kernel) cannot")
    assert kernel_choice.absent(facts) is None and kernel_choice.absent(replace(CPU, packages=frozenset())) is None


def test_a_config_says_it_for_all_stages() -> None:
    assert build("dsa", {"implementation": "native"}).config.model_dump()["implementation"] == "native"
    method: Any = build("dsa", {"implementation": "auto"}).method
    assert method.native("indexer") and not method.native("topk") and method.exact
    assert method.kernels("triton") == "indexer native, topk portable, attention native"
    method = build("dsa", {"implementation": "portable"}).method
    assert method.kernels("reference") == "indexer reference, topk reference, attention reference"


SOME_NATIVE = '{"implementation": "auto"}'


class Args(SimpleNamespace):
    """A server's arguments before SGLang resolves them, next to a GPU."""

    def __init__(self, config: str = "{}", **changed: Any):
        sparse = {"sparse_method": "dsa", "sparse_config": build("dsa", json.loads(config)).config.model_dump_json()}
        backends = {"dsa_prefill_backend": None, "dsa_decode_backend": None, "dsa_topk_backend": "sgl-kernel"}
        backends |= {"dsa_paged_mqa_logits_backend": "auto", "dtype": "auto"}
        ranks = {"tp_size": 8, "attn_dp_size": 1, "enable_dp_attention": False, "speculative_algorithm": None}
        super().__init__(**{**sparse, **backends, **ranks, "kv_cache_dtype": "auto", **changed})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Makes this machine one with a GPU, and V3.2 the model."""

    def see(
        capability: tuple[int, int], dtype: torch.dtype = torch.bfloat16, installed: frozenset[str] = PACKAGES
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(dsa_flags, "find_spec", lambda name: object() if name in installed else None)
        text = SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64)
        model = SimpleNamespace(num_attention_heads=128, hf_text_config=text, dtype=dtype)
        monkeypatch.setattr(dsa_flags, "_model", lambda _: model)

    return see


def settled(args: Any) -> Any:
    settings = build("dsa", json.loads(args.sparse_config))
    dsa_flags.choose_kernels(args, settings)
    return build("dsa", json.loads(args.sparse_config)).config


@pytest.mark.parametrize("capability", [AMPERE, DESKTOP])
def test_the_portable_attention_takes_the_place_of_a_backend(capability: tuple[int, int], gpu) -> None:
    gpu(capability)
    args = Args()
    assert settled(args).implementation == "portable"
    assert (args.dsa_prefill_backend, args.dsa_decode_backend) == ("tilelang", "tilelang")
    assert args.kv_cache_dtype == "bfloat16"
    with refused("--dsa-decode-backend", "fa3"):
        settled(Args(dsa_decode_backend="fa3"))
    args = Args(kv_cache_dtype="fp8_e4m3")
    assert settled(args).implementation == "portable"
    assert (args.dsa_prefill_backend, args.kv_cache_dtype) == ("tilelang", "fp8_e4m3")


def test_what_cannot_start_on_a_gpu_does_not(gpu) -> None:
    gpu(HOPPER, installed=PACKAGES - {"deep_gemm"})
    for choice in ("auto", "portable"):
        with refused("sglang"):
            settled(Args(json.dumps({"implementation": choice})))
    gpu(HOPPER, dtype=torch.float16)
    with refused("--dtype", "float16"):
        settled(Args())
    gpu(HOPPER)
    with refused("--dsa-topk-backend", "flashinfer"):
        settled(Args(dsa_topk_backend="flashinfer"))


@pytest.mark.parametrize(("attention", "left"), [("portable", True), ("native", False)])
def test_sglang_does_not_refuse_float8_in_the_place_of_a_backend(attention: str, left: bool, gpu) -> None:
    gpu(HOPPER)
    args = Args(json.dumps({"implementation": attention}), kv_cache_dtype="fp8_e4m3")
    settled(args)
    asked: list[Any] = []
    resa = SimpleNamespace(sparse_method="resa", sparse_config=build("resa", {}).config.model_dump_json())
    servers: tuple[Any, ...] = args, resa, SimpleNamespace(sparse_method=None)
    for one in servers:
        found = dsa_flags.keep_replaced_backend(
            lambda given: asked.append(given) or {"dsa_decode_backend": "other"}, one
        )
        assert bool(found) == (one in asked)
    assert asked == [*(servers[1:] if left else servers)]


@pytest.mark.parametrize(
    ("capability", "flags", "warns"),
    [
        (HOPPER, {"tp_size": 1}, False),
        (HOPPER, {"tp_size": 1, "kv_cache_dtype": "fp8_e4m3"}, True),
        (HOPPER, {"tp_size": 1, "kv_cache_dtype": "fp8_e4m3", "config": SOME_NATIVE}, True),
        (HOPPER, {"tp_size": 1, "kv_cache_dtype": "fp8_e4m3", "config": '{"implementation": "portable"}'}, False),
        (HOPPER, {}, True),
        (AMPERE, {}, True),
        (DESKTOP, {}, True),
    ],
)
def test_where_it_was_not_measured_it_says_so(
    capability: tuple[int, int], flags: dict[str, Any], warns: bool, gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu(capability)
    settled(Args(**flags))
    assert ("dsa was measured on one GPU of compute capability 9.x" in caplog.text) is warns
    assert ("over float8 KV with all stages portable alone; this GPU has" in caplog.text) is warns


@pytest.mark.parametrize("capability", [(7, 5), ADA, HOPPER])
def test_sglang_alone_judges_what_it_computes_alone(capability: tuple[int, int], gpu) -> None:
    gpu(capability, dtype=torch.float16, installed=frozenset())
    args = Args('{"implementation": "native"}', dsa_topk_backend="flashinfer", kv_cache_dtype="fp8_e5m2")
    before = dict(vars(args))
    assert settled(args).implementation == "native" and vars(args) == before


def test_native_attention_leaves_sglangs_arguments_alone(gpu) -> None:
    gpu(HOPPER)
    args = Args(dsa_decode_backend="fa3", kv_cache_dtype="fp8_e4m3")
    config = settled(args)
    assert config.implementation == "auto"
    assert (args.dsa_prefill_backend, args.dsa_decode_backend, args.kv_cache_dtype) == (None, "fa3", "fp8_e4m3")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about a GPU that is not here")
@pytest.mark.parametrize(
    ("choice", "gpu", "flags", "expected"),
    [
        ("auto", True, "", None),
        ("auto", False, "", None),
        ("auto", True, "--kv-cache-dtype fp8_e4m3", None),
        ("portable", True, "--kv-cache-dtype fp8_e4m3", None),
        ("auto", True, "--kv-cache-dtype fp8_e5m2", None),
        ("auto", False, "--kv-cache-dtype fp8_e5m2", "KV cache dtype (got 'fp8_e5m2'): allowed: auto, bf16"),
        ("portable", True, "--kv-cache-dtype fp8_e5m2", "KV cache dtype (got 'fp8_e5m2'): allowed: auto, bf16"),
        ("auto", True, "--tp-size 8 --dp-size 8 --enable-dp-attention", None),
        ("auto", False, "--dp-size 2", None),
        (
            "portable",
            True,
            "--kv-cache-dtype fp8_e4m3 --dsa-decode-backend trtllm",
            "--dsa-decode-backend is trtllm and the attention is portable",
        ),
        ("portable", True, "--dsa-decode-backend fa3", "--dsa-decode-backend is fa3 and the attention is portable"),
        ("native", False, "", None),
        ("native", True, "--kv-cache-dtype fp8_e5m2 --speculative-algorithm EAGLE --tp 8 --dp 8", None),
        ("native", True, "--attention-backend triton", "attention backend 'triton' is not supported"),
        ("native", True, "--tokenizer-worker-num 2", None),
    ],
)
def test_a_dry_run_judges_it_as_a_start_does(choice: str, gpu: bool, flags: str, expected: str | None) -> None:
    """Of a GPU that is not here it is what the best one would say."""
    config = json.dumps({"implementation": choice})
    words = ["--model-path", "MODEL", "--sparse-method", "dsa", "--sparse-config", config, *flags.split()]
    said = dry_run.refusal(words, "DSA", gpu)
    assert said is None if expected is None else expected in str(said), said
