"""Converting TensorRT-LLM's options: who refuses decides, and nothing is left out without a word."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang_sparse import capabilities, convert

SKIP: dict[str, Any] = {"algorithm": "skip_softmax", "threshold_scale_factor": {"prefill": 1000.0}}
ROCKET: dict[str, Any] = {
    "algorithm": "rocket",
    "window_size": 32,
    "kernel_size": 63,
    "topr": 128,
    "topk": 64,
    "prompt_budget": 2048,
    "page_size": 4,
    "kt_cache_dtype": "float8_e5m2",
}


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """What is remembered of methods goes by what a test changes."""
    for remembered in (capabilities.load, capabilities.place_of):
        remembered.cache_clear()
    yield
    for remembered in (capabilities.load, capabilities.place_of):
        remembered.cache_clear()


def converted(options: Mapping[str, Any], gpu: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
    """What SGLang reads of the flags, and what was left out, by the option's name."""
    found, _ = convert.convert(options, gpu)
    assert found.refusal() is None
    return convert.as_fields(found.arguments), {name: change.words for name, _, change in found.report if change.lost}


def run(folder: Path, options: object, *flags: str, suffix: str = "yaml") -> int:
    path = folder / f"options.{suffix}"
    path.write_text(yaml.safe_dump(options, sort_keys=False) if suffix == "yaml" else json.dumps(options))
    return convert.main([str(path), *flags])


@pytest.mark.parametrize(
    ("factor", "became", "left"),
    [
        ({"prefill": 1000.0}, {"prefill": 1000.0}, None),
        ({"prefill": 1000.0, "decode": 0}, {"prefill": 1000.0, "decode": 0}, None),
        ({"prefill": 1000.0, "decode": 500.0}, {"prefill": 1000.0, "decode": 500.0}, None),
        ({"decode": 500.0}, {"decode": 500.0}, None),
        # One number is for both phases there, too.
        (1000.0, {"prefill": 1000.0, "decode": 1000.0}, None),
        ({"prefill": 1000.0, "decode": -1}, {"prefill": 1000.0}, "decode"),
        ({"prefill": "high", "decode": 500.0}, {"decode": 500.0}, "prefill"),
    ],
)
def test_skip_softmax_keeps_the_factor_of_each_phase(factor: object, became: object, left: str | None) -> None:
    fields, lost = converted({"sparse_attention_config": {**SKIP, "threshold_scale_factor": factor}})
    assert fields["sparse_method"] == "skip_softmax"
    assert fields["sparse_config"] == {"threshold_scale_factor": became}
    names = [f"sparse_attention_config.threshold_scale_factor.{left}"] if left else []
    assert list(lost) == names and all("must be a number from 0 to 1e30" in said for said in lost.values())


@pytest.mark.parametrize(
    ("sparse", "said"),
    [
        ({"threshold_scale_factor": -1}, "must be a number from 0 to 1e30"),
        ({"target_sparsity": 1.5}, "must be a number from 0 to 1 for both phases"),
        ({"target_sparsity": None}, "nothing is left that says how much to skip (threshold_scale_factor or target_spa"),
        ({"threshold_scale_factor": None}, "nothing is left that says how much to skip"),
    ],
)
def test_nothing_is_guessed_where_no_threshold_is_left(sparse: dict[str, Any], said: str) -> None:
    with pytest.raises(convert.RefusedError) as caught:
        convert.convert({"sparse_attention_config": {"algorithm": "skip_softmax", **sparse}}, gpu=False)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("share", "became"),
    [(0.5, {"prefill": 0.5, "decode": 0.5}), ({"decode": 0.5}, {"decode": 0.5}), ({"prefill": 2, "decode": 0.5}, None)],
)
def test_a_share_needs_a_calibration(share: object, became: object) -> None:
    found, _ = convert.convert(
        {"sparse_attention_config": {"algorithm": "skip_softmax", "target_sparsity": share}}, gpu=False
    )
    expected = {"decode": 0.5} if became is None else became
    assert convert.as_fields(found.arguments)["sparse_config"] == {"target_sparsity": expected}
    (said,) = (change.words for _, _, change in found.report if change.fields)
    assert said.startswith("needs a checkpoint that NVIDIA Model Optimizer has calibrated, or calibration_file: python")
    lost = [name for name, _, change in found.report if change.lost]
    assert lost == (["sparse_attention_config.target_sparsity.prefill"] if became is None else [])


def test_target_sparsity_beside_a_threshold_is_left_out() -> None:
    for given in ({**SKIP, "target_sparsity": 0.5}, {"target_sparsity": 0.5, **SKIP}):
        fields, left = converted({"sparse_attention_config": given})
        assert fields["sparse_config"] == {"threshold_scale_factor": {"prefill": 1000.0}}
        (said,) = left.values()
        assert list(left) == ["sparse_attention_config.target_sparsity"] and "beside threshold_scale_factor" in said


@pytest.mark.parametrize(
    ("options", "name", "said"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size", "pipeline parallelism (got 2)"),
        ({"enable_attention_dp": True}, "enable_attention_dp", "ranks must agree on the forward mode"),
        ({"enable_lora": True}, "enable_lora", "sparse passes with adapters are not proven yet"),
        ({"tensor_parallel_size": "four"}, "tensor_parallel_size", "invalid int value: 'four'"),
        ({"guided_decoding_backend": "other"}, "guided_decoding_backend", "invalid choice: 'other'"),
        ({"cuda_graph_config": {"batch_sizes": "many"}}, "cuda_graph_config.batch_sizes", "invalid int value: 'many'"),
        ({"kv_cache_config": {"dtype": "nvfp4"}}, "kv_cache_config.dtype", "KV cache dtype (got 'nvfp4'): allowed: "),
        ({"kv_cache_config": {"dtype": ["fp8"]}}, "kv_cache_config.dtype", "invalid choice"),
        ({"kv_cache_config": {"host_cache_size": 1}}, "kv_cache_config.host_cache_size", "no flag of SGLang"),
        ({"kv_cache_config": {"tokens_per_block": 128}}, "kv_cache_config.tokens_per_block", "page_size: got 128"),
        (
            {"enable_chunked_prefill": True, "max_num_tokens": 8191},
            "max_num_tokens",
            "the chunked prefill size is 8191; allowed: multiples of 128",
        ),
        ({"speculative_config": {"decoding_type": "MTP"}}, "speculative_config", "no flag of SGLang"),
        ({"max_beam_width": 4}, "max_beam_width", "no beam search"),
        ({"moe_config": {"backend": "TRTLLM"}}, "moe_config", "no flag of SGLang"),
    ],
)
def test_what_a_server_would_refuse_is_left_out_by_who_refuses(
    options: Mapping[str, Any], name: str, said: str
) -> None:
    fields, left = converted({"sparse_attention_config": SKIP, "max_batch_size": 8, **options})
    assert list(left) == [name] and said in left[name]
    assert fields["max_running_requests"] == 8


@pytest.mark.usefixtures("asked_anew")
def test_rocketkv_keeps_its_fields_but_for_the_page_of_the_kt_cache() -> None:
    cache = {"tokens_per_block": 32}
    fields, left = converted({"sparse_attention_config": ROCKET, "kv_cache_config": cache})
    # The KV cache's pages are not those of the KT cache.
    became = {name: value for name, value in ROCKET.items() if name not in ("algorithm", "page_size")}
    assert fields["sparse_method"] == "rocketkv" and not left
    assert fields["sparse_config"] == {**became, "kt_page_size": 4, "page_size": 32}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("page_size", 32, "kt_page_size: got 32; must divide page_size (16)"),
        ("prompt_budget", 16, "prompt_budget: got 16; must be at least window_size + kt_page_size (36)"),
        ("kt_cache_dtype", "float8_e4m3", "kt_cache_dtype: got 'float8_e4m3'"),
        ("topk", 0, "topk: got 0"),
        ("topr", 0.5, "topr: got 0.5"),
        ("seq_len_threshold", 4096, "a row of fewer tokens than min_seq_len attends to all"),
    ],
)
def test_what_rocketkv_would_refuse_is_left_out(field: str, value: object, said: str) -> None:
    fields, left = converted({"sparse_attention_config": {**ROCKET, field: value}})
    assert list(left) == [f"sparse_attention_config.{field}"] and said in left[f"sparse_attention_config.{field}"]
    assert fields["sparse_config"]["window_size"] == 32
    assert {"page_size": "kt_page_size"}.get(field, field) not in fields["sparse_config"]


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ({}, 2, "sparse_attention_config: got None, allowed: a table with an algorithm"),
        ({"sparse_attention_config": "dsa"}, 2, "got 'dsa', allowed: a table"),
        ({"sparse_attention_config": {"index_topk": 1}}, 2, "allowed: a table with an algorithm, rocket, dsa"),
        ([1], 2, "got a list, allowed: a mapping"),
        ({"sparse_attention_config": {"algorithm": "minimax_m3"}}, 1, "got 'minimax_m3', allowed: rocket, dsa"),
    ],
)
def test_bad_files(options: object, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, options) == status
    printed = capsys.readouterr()
    assert said in printed.err and not printed.out


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.yaml").write_text("a: [")
    for name, said in (("none.yaml", "cannot read"), ("bad.yaml", "not valid YAML"), ("options.txt", "ends in .json")):
        assert convert.main([str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err


def test_each_field_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        "sparse_attention_config": {**SKIP, "target_sparsity": 0.5},
        "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.9},
        "print_iter_log": True,
    }
    assert run(tmp_path, options, "--cpu-platform") == 3
    said = capsys.readouterr().err.splitlines()
    lines = {line.split(":")[0]: line for line in said if " -> " in line}
    assert list(lines) == [
        "sparse_attention_config.algorithm",
        "sparse_attention_config.threshold_scale_factor",
        "sparse_attention_config.target_sparsity",
        "kv_cache_config.enable_block_reuse",
        "kv_cache_config.free_gpu_memory_fraction",
        "print_iter_log",
    ]
    assert lines["kv_cache_config.enable_block_reuse"].endswith(": false -> --disable-radix-cache")
    assert lines["print_iter_log"].endswith("true -> not converted: no flag of SGLang is its evident counterpart")
    assert any(line.startswith("note: threshold_scale_factor is divided by the position") for line in said)
