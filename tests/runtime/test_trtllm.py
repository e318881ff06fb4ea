"""What TensorRT-LLM's options become is what SGLang reads, and starts a server."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs, prepare_server_args

from sglang_sparse import capabilities, convert
from sglang_sparse.config.settings import build

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="starts on the CPU platform")
SKIP: dict[str, Any] = {"algorithm": "skip_softmax", "threshold_scale_factor": {"prefill": 1000.0}}
ROCKET: dict[str, Any] = {
    "algorithm": "rocket",
    "window_size": 16,
    "kernel_size": 31,
    "topr": 64.0,
    "topk": 48,
    "prompt_budget": 1024,
    "page_size": 8,
    "kt_cache_dtype": "bfloat16",
}
OURS = {**{name: value for name, value in ROCKET.items() if name != "algorithm"}, "page_size": 16, "kt_page_size": 8}
# What has an evident flag of SGLang, all of it at once, and which one.
EVERYTHING: dict[str, Any] = {
    "backend": "pytorch",
    "trust_remote_code": True,
    "dtype": "bfloat16",
    "load_format": "DUMMY",
    "tensor_parallel_size": 2,
    "max_batch_size": 64,
    "max_seq_len": 65536,
    "max_num_tokens": 4096,
    "enable_chunked_prefill": True,
    "disable_overlap_scheduler": True,
    "guided_decoding_backend": "llguidance",
    "stream_interval": 4,
    "cuda_graph_config": {"max_batch_size": 64, "batch_sizes": [1, 2, 64], "enable_padding": False},
    "kv_cache_config": {
        "enable_block_reuse": False,
        "tokens_per_block": 32,
        "dtype": "auto",
        "max_tokens": 500000,
    },
}
BECAME = {
    "trust_remote_code": True,
    "dtype": "bfloat16",
    "load_format": "dummy",
    "tp_size": 2,
    "max_running_requests": 64,
    "context_length": 65536,
    "chunked_prefill_size": 4096,
    "disable_overlap_schedule": True,
    "grammar_backend": "llguidance",
    "stream_interval": 4,
    "cuda_graph_max_bs_decode": 64,
    "cuda_graph_bs_decode": [1, 2, 64],
    "disable_cuda_graph_padding": True,
    "disable_radix_cache": True,
    "max_total_tokens": 500000,
}


def converted(options: Mapping[str, Any], gpu: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
    """What SGLang reads of the flags, and what was left out, by the option's name."""
    found, _ = convert.convert(options, gpu)
    assert found.refusal() is None
    return convert.as_fields(found.arguments), {name: change.words for name, _, change in found.report if change.lost}


def checkpoint(method: str) -> str:
    kind = capabilities.place_of(capabilities.Method(method, False)).kind
    return capabilities._checkpoint(kind).name


def run(folder: Path, options: object, *flags: str) -> int:
    path = folder / "options.json"
    path.write_text(json.dumps(options))
    return convert.main([str(path), *flags])


def test_every_evident_flag() -> None:
    fields, left = converted({"sparse_attention_config": SKIP, **EVERYTHING})
    sparse = {
        "sparse_method": "skip_softmax",
        "sparse_config": {"threshold_scale_factor": {"prefill": 1000.0}, "page_size": 32},
    }
    assert fields == {**BECAME, **sparse} and not left


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("sparse", "method", "all_of_it"),
    [(SKIP, "skip_softmax", True), (ROCKET, "rocketkv", True), ({"algorithm": "dsa"}, "dsa", False)],
)
def test_what_is_printed_starts(
    sparse: Mapping[str, Any], method: str, all_of_it: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"sparse_attention_config": dict(sparse), **EVERYTHING}
    model = checkpoint(method)
    assert run(tmp_path, options, "--cpu-platform") == (0 if all_of_it else 3)
    args = prepare_server_args(["--model-path", model, *shlex.split(capsys.readouterr().out)])
    assert (args.tp_size, args.disable_radix_cache, args.page_size) == (2, True, 32 if all_of_it else 64)
    assert run(tmp_path, options, "--cpu-platform", "--json") == (0 if all_of_it else 3)
    args = ServerArgs(**{"model_path": model, **json.loads(capsys.readouterr().out)})
    assert args.context_length == 65536


def resolved(fields: Mapping[str, Any], method: str = "rocketkv", **kwargs: Any) -> dict[str, Any]:
    """The config of a server that starts with fields of TensorRT-LLM as they are."""
    args: Any = ServerArgs(model_path=checkpoint(method), sparse_method=method, sparse_config=dict(fields), **kwargs)  # pyright: ignore
    return json.loads(args.sparse_config)


@WITHOUT_GPU
def test_a_config_of_tensorrt_llm_is_what_its_conversion_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = resolved(ROCKET)
    assert found.items() >= OURS.items() and type(found["topr"]) is int
    assert run(tmp_path, {"sparse_attention_config": ROCKET}, "--cpu-platform") == 0
    converted = ["--model-path", checkpoint("rocketkv"), *shlex.split(capsys.readouterr().out)]
    args: Any = prepare_server_args(converted)
    assert (
        json.loads(args.sparse_config)
        == found
        == resolved({**ROCKET, "algorithm": "ROCKET", "seq_len_threshold": None})
    )
    assert resolved({"algorithm": "rocket", "topk": None}) == resolved({})
    assert resolved({**SKIP, "threshold_scale_factor": 7}, "skip_softmax")["threshold_scale_factor"]["decode"] == 7


@WITHOUT_GPU
def test_without_an_algorithm_names_are_ours_and_a_small_page_is_warned_of() -> None:
    found = resolved({"page_size": 4, "topr": 64.0})
    assert found.items() >= {"page_size": 4, "kt_page_size": 4, "topr": 64}.items()
    (said,) = build("rocketkv", {"page_size": 4}).method.warnings()
    assert "page_size is 4, the tokens of a page of the KV cache; TensorRT-LLM's page_size is kt_page_size" in said
    for fields in (ROCKET, {}, {"page_size": 32, "kt_page_size": 2}):
        assert not build("rocketkv", fields).method.warnings()


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("method", "fields", "said"),
    [
        ("rocketkv", {"algorithm": "dsa"}, "algorithm: got 'dsa', allowed with rocketkv: 'rocket'"),
        ("rocketkv", {**ROCKET, "kt_page_size": 8}, "kt_page_size: got it by TensorRT-LLM's name, too"),
        ("rocketkv", {**ROCKET, "page_size": 32}, "kt_page_size: got 32; must divide page_size (16)"),
        ("rocketkv", {**ROCKET, "topr": 0.5}, "topr: got 0.5; Input should be a valid integer"),
        ("rocketkv", {"seq_len_threshold": 64}, "seq_len_threshold: got 64, which has no counterpart here"),
        ("rocketkv", {"seq_len_threshold": 64}, "here a row of fewer tokens than min_seq_len attends to all of them"),
        ("skip_softmax", {**SKIP, "seq_len_threshold": 64}, "fewer tokens than min_seq_len"),
        ("dsa", {"seq_len_threshold": 64}, "the model's index_topk decides it"),
        ("dsa", {"indexer_max_chunk_size": 64}, "how many queries the indexer takes at a time goes by the memory"),
        (
            "dsa",
            {"algorithm": "dsa", "index_topk": 64},
            "index_topk: got 64, which has no counterpart here: the model's own",
        ),
        ("resa", {"algorithm": "rocket"}, "unknown field 'algorithm'"),
    ],
)
def test_what_means_something_else_here_is_refused(method: str, fields: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolved(fields, method)
    assert f"--sparse-config of {method}: " in str(caught.value) and said in str(caught.value)


def test_dsa_goes_by_the_model() -> None:
    given = {
        "algorithm": "DSA",
        "index_n_heads": 64,
        "index_topk": 2048,
        "index_head_dim": None,
        "skip_indexer_for_short_seqs": True,
        "enable_heuristic_topk": True,
        "use_cute_dsl_topk": False,
        "indexer_k_dtype": "fp4",
    }
    cache = {"tokens_per_block": 32, "dtype": "fp8", "free_gpu_memory_fraction": 0.8}
    fields, left = converted({"sparse_attention_config": given, "kv_cache_config": cache, "cuda_graph_config": None})
    assert fields == {"sparse_method": "dsa", "disable_decode_cuda_graph": True, "kv_cache_dtype": "fp8_e4m3"}
    assert "page_size: got 32; must be 64 with dsa" in left.pop("kv_cache_config.tokens_per_block")
    assert "--mem-fraction-static" in left.pop("kv_cache_config.free_gpu_memory_fraction")
    names = ("index_n_heads", "index_topk", "enable_heuristic_topk", "use_cute_dsl_topk", "indexer_k_dtype")
    assert set(left) == {f"sparse_attention_config.{name}" for name in names}
    cache = {"tokens_per_block": 64}
    fields, left = converted({"sparse_attention_config": {"algorithm": "dsa"}, "kv_cache_config": cache})
    assert fields["sparse_config"] == {"page_size": 64} and not left


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"max_num_tokens": 4096}, {"max_prefill_tokens": 4096}),
        (
            {"max_num_tokens": 4096, "enable_chunked_prefill": False},
            {"max_prefill_tokens": 4096, "chunked_prefill_size": -1},
        ),
        ({"cuda_graph_config": {"enable_padding": True}}, {}),
        ({"cuda_graph_config": {}}, {}),
        ({"speculative_config": None, "max_beam_width": 1, "enable_autotuner": False}, {}),
        ({"kv_cache_config": {"enable_block_reuse": True, "dtype": "bfloat16"}}, {"kv_cache_dtype": "bfloat16"}),
        ({"model": "org/model", "tokenizer": "org/other"}, {"model_path": "org/model", "tokenizer_path": "org/other"}),
    ],
)
def test_what_is_no_loss(options: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    found, left = converted({"sparse_attention_config": SKIP, **options})
    assert {name: value for name, value in found.items() if not name.startswith("sparse_")} == fields and not left
