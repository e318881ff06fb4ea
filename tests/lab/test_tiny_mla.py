"""What is said of tiny-mla's sparse layers, and the verdict on its perplexity, from hand-made rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.lab.tables.weights import rectification, sensitive


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
