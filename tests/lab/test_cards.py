"""Tests of the cards of the tiny models: the layers of a calibration, the weights of a file, and its verdict."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.lab.legs.leg import LEGS
from eval.lab.tables import cards, weights
from eval.lab.tables.weights import rectification, sensitive
from eval.live.record import read_rows, result_files
from sglang_sparse.methods.fingerprint import fingerprint

ROOT = Path(__file__).parent.parent.parent


def test_card_has_the_layers_of_a_calibration() -> None:
    def layer(number: int, mean: float, long: float | None) -> dict[str, Any]:
        figures = {"deviation": 0.00123, "recall": 0.9}
        return {"layer": number, "mean": mean, **figures, "long": long and {"mean": long, **figures}}

    about = {"fingerprint": "0", "model": "m", "architecture": "A", "theta1": 0.9, "block_size": 16, "queries": 16}
    about |= {"files": [], "seed": 0, "device": "cpu", "dtype": "float32", "versions": {}, "method": "robsa"}
    groups = [{"kind": "code", "prompts": n, "tokens": 300} for n in (5, 3)]
    layers = [layer(0, 0.99612, 0.995), layer(1, 0.992, 0.985), layer(2, 0.75, None)]
    found = about | {"prompts": groups, "min_seq_len": 4096, "long_prompts": 3, "layers": layers}
    text = cards.layers({"calibration": found})
    assert "| 0 | 0.9961 | 0.0012 | 0.9950 | yes |\n| 1 | 0.9920 | 0.0012 | 0.9850 | no |" in text
    assert "| 2 | 0.7500 | 0.0012 |  | no |" in text
    assert "| 1 | 0.9920 | 0.0012 | 0.9850 | yes |" in cards.layers({"theta2": 0.98, "calibration": found})
    with pytest.raises(ValueError, match="calibration: got 'deepseek-v3-paper-ruler', allowed is what sglang_sparse"):
        cards.layers({"calibration": "deepseek-v3-paper-ruler"})


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


def written(path: Path, *rows: dict[str, Any]) -> Path:
    header = {"kind": "header", "servers": {"base": {"model_path": "other"}}}
    path.write_text("".join(json.dumps(row) + "\n" for row in (header, *rows, {"kind": "summary"})))
    return path


def test_perplexity_is_judged_at_one_interval_by_the_upper_end(tmp_path: Path) -> None:
    def shown(lost: list[float], judged: int | None) -> list[str]:
        place = {"kind": "item", "task": "book"}
        settings = {("dense", None, None): [0.0] * 4, ("off", 0.95, 0): lost}
        settings |= {("rectified", 0.95, f): lost for f in (16, 32)}
        rows = [
            {**place, "setting": setting, "ratio": ratio, "interval": f, "window": i, "scores": {"nll": 2 + nll}}
            for (setting, ratio, f), values in settings.items()
            for i, nll in enumerate(values)
        ]
        return rectification(written(tmp_path / "ppl.jsonl", *rows), judged=judged).splitlines()[2:]

    assert [line.endswith(" within 0.5% |") for line in shown([0.004] * 4, 32)] == [False, False, False, True]
    # The mean of them is within.
    assert shown([0.0, 0.0, 0.0, 0.016], 32)[-1].endswith(" not within 0.5% |")
    assert not any("within" in line for line in shown([0.004] * 4, None))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"theta2": 0.99, "layers": "all"}, "theta2 0.99"),
        ({"theta2": 0.998, "layers": "1-", "block_size": 16}, "theta2 0.998, layers 1-"),
        ({"theta2": 0.99, "layers": "1-", "block_size": 64}, "theta2 0.99, layers 1-, blocks of 64"),
        ({"layers": "all"}, None),
        (None, None),
    ],
)
def test_what_runs_sparse_is_read_from_the_server(config: dict[str, Any] | None, said: str | None) -> None:
    assert sensitive({"servers": {"base": {"sparse_config": json.dumps(config) if config else None}}}) == said
    assert sensitive({"servers": {"sparse": {"sparse": {"config": config}}}}) == said
