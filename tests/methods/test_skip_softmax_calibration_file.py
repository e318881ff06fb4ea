"""Factors of Skip-Softmax for a share of blocks: from a checkpoint of Model Optimizer, in both of its forms, or from a
file of our own; and what is none.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from model_configs import CONFIGS
from refusals import refused
from sglang.srt.plugins import load_plugins
from skip_calibrations import BY_PHASE, FORMULA, GROUP, NEW, OLD, RANGES, TINY, calibration_file

load_plugins()

from resolved import ServerArgs

from sglang_sparse.config import settings as config
from sglang_sparse.config.settings import build


def checkpoint(folder: Path, table: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**CONFIGS["qwen3"], "sparse_attention_config": table}))
    return str(folder)


def resolve(model: str, **fields: Any) -> Any:
    return ServerArgs(  # pyright: ignore[reportCallIssue]
        model_path=model, sparse_method="skip_softmax", sparse_config=json.dumps(fields), chunked_prefill_size=2048
    )


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


def test_without_a_model_there_is_no_share(tmp_path: Path) -> None:
    with refused("sparse_attention_config", {}):
        resolve(str(tmp_path), target_sparsity=0.5)
    (tmp_path / "config.json").write_text("{")
    with refused("--model-path", str(tmp_path)):
        resolve(str(tmp_path), target_sparsity=0.5)


def test_a_share_becomes_factors_by_a_file_in_both_phases(tmp_path: Path) -> None:
    file = calibration_file(tmp_path)
    shares = {"prefill": 0.2, "decode": 0.9}
    args = resolve(str(TINY), target_sparsity=shares, calibration_file=file)
    found = json.loads(args.sparse_config)
    expected = {phase: BY_PHASE[phase]["a"] * math.exp(BY_PHASE[phase]["b"] * shares[phase]) for phase in shares}
    assert found["threshold_scale_factor"] == pytest.approx(expected)
    about = found["calibration"]
    assert (about["file"], about["model"], about["fits"]["decode"]["error"]) == (file, "models/tiny", 0.03)
    assert about["target_sparsity"] == shares and about["coefficients"] == {phase: BY_PHASE[phase] for phase in RANGES}
    # What a scheduler gets asks for no file.
    Path(file).unlink()
    settings = config.settings_of(args)
    assert settings is not None and settings.prefill is not None
    prefill = settings.prefill.config.model_dump()
    assert prefill["threshold_scale_factor"] == pytest.approx(expected["prefill"])
    assert prefill["calibration"] == about and settings.comes_along


@pytest.mark.parametrize("target", [0.5, {"prefill": 0.5}])
def test_prefill_alone_has_a_share_too(tmp_path: Path, target: Any) -> None:
    def resolved(model: str, **fields: Any) -> Any:
        args: Any = ServerArgs(  # pyright: ignore[reportCallIssue]
            model_path=model,
            sparse_method="resa",
            sparse_prefill_method="skip_softmax",
            sparse_prefill_config=json.dumps(fields),
            chunked_prefill_size=2048,
        )
        return json.loads(args.sparse_prefill_config)

    factor = BY_PHASE["prefill"]["a"] * math.exp(BY_PHASE["prefill"]["b"] * 0.5)
    given = {"target_sparsity": target, "calibration_file": calibration_file(tmp_path)}
    for found in (resolved(str(TINY), **given), resolved(checkpoint(tmp_path, OLD), target_sparsity=target)):
        assert found["threshold_scale_factor"] == pytest.approx(factor)
        assert found["calibration"]["target_sparsity"] == target
    with refused("--model-path", "Qwen3ForCausalLM"):
        resolved(str(other_weights(tmp_path)), **given)


def test_a_prefill_config_repeats_what_decode_says_of_prefill(tmp_path: Path) -> None:
    def built(fields: dict[str, Any], own: dict[str, Any]) -> Any:
        return build("skip_softmax", fields, "skip_softmax", own, lambda: {"sparse_attention_config": OLD}).prefill

    half = built({"target_sparsity": 0.5}, {"layers": "2-", "target_sparsity": 0.5}).config.threshold_scale_factor
    assert half == pytest.approx(BY_PHASE["prefill"]["a"] * math.exp(BY_PHASE["prefill"]["b"] * 0.5))
    assert built({"target_sparsity": {"decode": 0.5}}, {"layers": "2-"}).config.threshold_scale_factor == 250


def other_weights(folder: Path) -> Path:
    shutil.copytree(TINY, folder / "other")
    weights = folder / "other" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    return folder / "other"


def test_a_file_of_other_weights_is_refused(tmp_path: Path) -> None:
    given = {"target_sparsity": 0.5, "calibration_file": calibration_file(tmp_path)}
    with refused("--model-path", "Qwen3ForCausalLM") as caught:
        resolve(str(other_weights(tmp_path)), **given)
    assert "the calibration was made on other weights, models/tiny (" in str(caught.value)
    assert "calibrate this one: python -m sglang_sparse.calibrate --method skip_softmax" in str(caught.value)


def test_a_file_of_other_layers_is_refused(tmp_path: Path) -> None:
    given = {"calibration_file": calibration_file(tmp_path), "layers": "2-"}
    for target, phase in ((0.5, "prefill"), ({"decode": 0.5}, "decode")):
        with refused("--model-path", "Qwen3ForCausalLM") as caught:
            resolve(str(TINY), **given, target_sparsity=target)
        said = f"the calibration is of {phase} in layers [0, 1, 2, 3], and layers [2, 3] are to run sparse"
        assert said in str(caught.value)
    # Dense in both phases, whatever the layers.
    resolve(str(TINY), **given, target_sparsity=0)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"theta": 12}', '{"calibration": {"method": "robsa"}}'])
def test_what_is_no_file_of_ours(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "x.json"
    if content is not None:
        file.write_text(content)
    with refused("calibration_file", str(file)) as caught:
        resolve(str(TINY), calibration_file=str(file), target_sparsity=0.5)
    assert content in (None, "{") or "is another file" in str(caught.value)
