"""Which weights a result file is of: those of tiny-mla that are shipped, or earlier ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.lab.legs.leg import LEGS
from eval.lab.tables import weights
from eval.live.record import read_rows, result_files
from sglang_sparse.methods.fingerprint import fingerprint

ROOT = Path(__file__).parent.parent.parent


def test_the_calibration_is_of_the_shipped_weights() -> None:
    assert weights.shipped("tiny-mla") == fingerprint(str(ROOT / "eval" / "models" / "tiny-mla"))


def test_legs_name_the_shipped_weights_and_thresholds() -> None:
    stock = [one for leg in LEGS if leg.name.startswith("stock-mla-") for one in leg.commands]
    assert stock and all(f"{weights.LABEL}{weights.shipped('tiny-mla')}" in one.arguments for one in stock)
    (prefilled,) = [leg.servers[0] for leg in LEGS if leg.name == "needles-anchor-prefilled"]
    calibrated = json.loads((ROOT / "eval" / "models" / "tiny-gqa" / "anchor.json").read_text())
    assert json.loads(prefilled.flags[3]) == {"theta": calibrated["theta"]}


def test_results_with_a_calibration_are_of_the_shipped_weights() -> None:
    headers = {name: read_rows(path)[0] for name, path in result_files(ROOT / "eval" / "lab" / "results").items()}
    told = {name: weights.weights(header) for name, header in headers.items()}
    found = {name for name, said in told.items() if said in (weights.SHIPPED, weights.OLDER)}
    assert {"niah-tiny-mla-robsa", "infinitebench-tiny-mla-robsa", "identity-robsa-fa3", "ppl-rectify-mla"} <= found
    older = {name for name in found if told[name] == weights.OLDER}
    assert not older, "measure these again, with the legs of eval.lab.reproduce"


@pytest.mark.parametrize(
    ("served", "label", "said"),
    [
        ({"sparse": {"config": {"calibration": {"fingerprint": "shipped"}}}}, None, weights.SHIPPED),
        ({"sparse": {"config": {"calibration": {"fingerprint": "other"}}}}, None, weights.OLDER),
        ({"sparse_config": '{"calibration": {"fingerprint": "other"}}'}, None, weights.OLDER),
        ({"sparse": {"config": {"calibration": "deepseek-v3-paper-ruler"}}}, None, weights.UNKNOWN),
        ({"sparse": None, "sparse_config": None}, None, weights.UNKNOWN),
        ({}, "weights shipped", weights.SHIPPED),
        ({}, "weights other", weights.OLDER),
        ({"model_path": "elsewhere/other"}, "weights shipped", None),
    ],
)
def test_what_a_header_says(
    served: dict[str, Any], label: str | None, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / weights.CALIBRATION).write_text(json.dumps({"calibration": {"fingerprint": "shipped"}}))
    monkeypatch.setattr(weights, "MODELS", tmp_path)
    server = {"model_path": "eval/models/tiny"} | served
    assert weights.weights({"servers": {"base": server}, "label": label}) == said
    assert weights.weights({"servers": {"sparse": server, "dense": {}}, "label": label}) == said
