"""Configs of TensorRT-LLM's sparse attention start a server as they are."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs

from sglang_sparse.config.settings import build
from sglang_sparse.tools import support_matrix

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="starts on the CPU platform")
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


def resolved(fields: Mapping[str, Any] | str, method: str = "rocketkv") -> dict[str, Any]:
    """The config of a server that starts with fields of TensorRT-LLM as they are."""
    kind = support_matrix.place_of(support_matrix.Method(method, False)).kind
    given = fields if isinstance(fields, str) else dict(fields)
    args: Any = ServerArgs(
        model_path=support_matrix._checkpoint(kind).name,
        sparse_method=method,  # pyright: ignore
        sparse_config=given,  # pyright: ignore
    )
    return json.loads(args.sparse_config)


def test_fields_are_read_by_the_names_that_they_have_there() -> None:
    found = resolved(ROCKET)
    assert found.items() >= OURS.items() and type(found["topr"]) is int
    assert found == resolved({**ROCKET, "algorithm": "ROCKET", "seq_len_threshold": None})
    assert resolved({"algorithm": "rocket", "topk": None}) == resolved({})
    assert resolved({**SKIP, "threshold_scale_factor": 7}, "skip_softmax")["threshold_scale_factor"]["decode"] == 7
    given = {"algorithm": "DSA", "index_head_dim": None, "skip_indexer_for_short_seqs": True, "indexer_k_dtype": "fp8"}
    assert resolved(given, "dsa") == resolved({}, "dsa")


def test_a_whole_file_of_options_is_a_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(yaml.safe_dump({"sparse_attention_config": ROCKET}))
    assert resolved(str(path)) == resolved(ROCKET)
    assert not [line for line in caplog.messages if "TensorRT-LLM's options" in line]
    path.write_text(yaml.safe_dump({"sparse_attention_config": ROCKET, "max_batch_size": 8, "kv_cache_config": {}}))
    assert resolved(str(path)) == resolved(ROCKET)
    assert "use SGLang's own flags for kv_cache_config, max_batch_size" in caplog.text


def test_without_an_algorithm_names_are_ours_and_a_small_page_is_warned_of() -> None:
    found = resolved({"page_size": 4, "topr": 64.0})
    assert found.items() >= {"page_size": 4, "kt_page_size": 4, "topr": 64}.items()
    (said,) = build("rocketkv", {"page_size": 4}).method.warnings()
    assert "page_size is 4, the tokens of a page of the KV cache; TensorRT-LLM's page_size is kt_page_size" in said
    for fields in (ROCKET, {}, {"page_size": 32, "kt_page_size": 2}):
        assert not build("rocketkv", fields).method.warnings()
