"""Factors of Skip-Softmax from what Model Optimizer leaves in a checkpoint: both of its forms, and what is none."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from model_configs import CONFIGS
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.server_args import ServerArgs

from sglang_sparse import config
from sglang_sparse.config import build

FORMULA = {"formula": "a * exp(b * target_sparsity)"}
BY_PHASE = {**FORMULA, "prefill": {"a": 7.93, "b": 8.61}, "decode": {"a": 0.12, "b": 9.85}}
OLD = {
    "config_groups": {"group_0": {"sparse_algo": "softmax_skip", "targets": ["LlamaAttention"]}},
    "threshold_scale_factor": BY_PHASE,
    "producer": {"name": "modelopt", "version": "0.37.0"},
}
OTHER_GROUP = {"algorithm": "sparse_softmax"}
GROUP = {"algorithm": "skip_softmax", "targets": ["Attention"], "threshold_scale_factor": BY_PHASE}
NEW = {"config_groups": {"group_0": OTHER_GROUP, "group_1": GROUP}}


def checkpoint(folder: Path, table: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**CONFIGS["qwen3"], "sparse_attention_config": table}))
    return str(folder)


def resolve(model: str, **fields: Any) -> Any:
    return ServerArgs(  # pyright: ignore[reportCallIssue]
        model_path=model, sparse_method="skip_softmax", sparse_config=json.dumps(fields), chunked_prefill_size=2048
    )


def refused(model: str, **fields: Any) -> str:
    with pytest.raises(ValueError) as caught:
        resolve(model, **fields)
    return str(caught.value)


@pytest.mark.parametrize("table", [OLD, NEW], ids=["old", "new"])
@pytest.mark.parametrize(
    ("target", "shares"),
    [
        (0.5, {"prefill": 0.5, "decode": 0.5}),
        ({"decode": 0.7}, {"decode": 0.7}),
        ({"prefill": 1}, {"prefill": 1}),
        ({"prefill": 0, "decode": 0.5}, {"decode": 0.5}),
    ],
)
def test_a_share_becomes_factors(tmp_path: Path, table: dict[str, Any], target: Any, shares: dict[str, float]) -> None:
    args = resolve(checkpoint(tmp_path, table), target_sparsity=target)
    found = json.loads(args.sparse_config)
    expected = {
        phase: BY_PHASE[phase]["a"] * math.exp(BY_PHASE[phase]["b"] * share) if (share := shares.get(phase)) else 0
        for phase in ("prefill", "decode")
    }
    assert found["threshold_scale_factor"] == pytest.approx(expected)
    assert found["calibration"]["target_sparsity"] == target and found["target_sparsity"] is None
    assert found["calibration"]["producer"] == table.get("producer")
    assert (args.sparse_prefill_method == "skip_softmax") == ("prefill" in shares)
    # What a scheduler gets asks for no checkpoint.
    settings = config.settings_of(args)
    assert settings is not None and settings.config.model_dump()["threshold_scale_factor"] == pytest.approx(expected)


def test_a_table_may_be_its_only_group(tmp_path: Path) -> None:
    """As TensorRT-LLM's guide shows it; and a phase of which nothing is to be skipped was not calibrated."""
    scale = {**FORMULA, "decode": BY_PHASE["decode"]}
    model = checkpoint(tmp_path, {"threshold_scale_factor": scale})
    found = json.loads(resolve(model, target_sparsity={"prefill": 0, "decode": 0.5}).sparse_config)
    assert found["threshold_scale_factor"]["prefill"] == 0 < found["threshold_scale_factor"]["decode"]


def test_coefficients_may_be_for_both_phases(tmp_path: Path) -> None:
    scale = {**FORMULA, "coefficients": {"a": 2.0, "b": 3}}
    model = checkpoint(tmp_path, {"config_groups": {"group_0": {**GROUP, "threshold_scale_factor": scale}}})
    found = json.loads(resolve(model, target_sparsity=0.5).sparse_config)["threshold_scale_factor"]
    assert found == pytest.approx(dict.fromkeys(("prefill", "decode"), 2 * math.exp(1.5)))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (None, "needs a checkpoint whose config.json has one sparse_attention_config for skip_softmax"),
        ([1], "this one has 0; allowed without one: threshold_scale_factor"),
        ({"config_groups": {"group_0": OTHER_GROUP}}, "this one has 0"),
        ({"config_groups": {"group_0": GROUP, "group_1": GROUP}}, "this one has 2"),
        (
            {"config_groups": {"group_0": {**GROUP, "ignore": ["*layers.0*"]}}},
            "leaves layers dense (ignore: ['*layers.0*'])",
        ),
        ({"config_groups": {"group_0": {"algorithm": "skip_softmax"}}}, "the checkpoint's formula is None"),
        ({**OLD, "threshold_scale_factor": {**BY_PHASE, "formula": "a + b"}}, "formula is 'a + b'; allowed: 'a * exp("),
        (
            {**OLD, "threshold_scale_factor": {**FORMULA, "prefill": BY_PHASE["prefill"]}},
            "coefficients for decode are None",
        ),
        (
            {**OLD, "threshold_scale_factor": {**BY_PHASE, "decode": {"a": -1, "b": 2}}},
            "for decode are {'a': -1, 'b': 2}",
        ),
        (
            {**OLD, "threshold_scale_factor": {**BY_PHASE, "decode": {"a": 1, "b": 1e9}}},
            "numbers a, at least 0, and b, up to",
        ),
    ],
)
def test_what_is_no_calibration(tmp_path: Path, table: Any, said: str) -> None:
    message = refused(checkpoint(tmp_path, table), target_sparsity=0.5)
    assert message.startswith("--sparse-config of skip_softmax: target_sparsity: ") and said in message


@pytest.mark.parametrize("target", [-0.1, 1.1, True, "half", {}, {"both": 0.5}, {"decode": float("nan")}])
def test_what_is_no_share(tmp_path: Path, target: Any) -> None:
    message = refused(checkpoint(tmp_path, OLD), target_sparsity=target)
    assert f"target_sparsity: got {target!r}; must be a number from 0 to 1" in message


def test_a_share_and_a_factor_exclude_each_other(tmp_path: Path) -> None:
    message = refused(checkpoint(tmp_path, OLD), target_sparsity=0.5, threshold_scale_factor=9)
    assert "target_sparsity: got 0.5 beside threshold_scale_factor; allowed: one of them" in message


def test_without_a_model_there_is_no_share(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is read with the model's own config"):
        build("skip_softmax", {"target_sparsity": 0.5})
    assert "this one has 0" in refused(str(tmp_path), target_sparsity=0.5)
    (tmp_path / "config.json").write_text("{")
    assert f"cannot read config.json of {tmp_path}" in refused(str(tmp_path), target_sparsity=0.5)
