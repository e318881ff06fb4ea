"""The tables in the cards of the tiny models: their accuracy, their training, and the layers of a calibration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """Lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def as_served(accuracy: Path, own: str = "dense") -> str:
    """Exact match of the model's `own` attention, tasks by lengths."""
    lines = [line for line in read(accuracy) if line["selector"] == own]
    lengths = sorted({line["length"] for line in lines})
    found = {(line["task"], line["length"]): f"{line['exact_match']:.3f}" for line in lines}
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    return table(["task", *map(str, lengths)], [[t, *(found.get((t, n), "") for n in lengths)] for t in tasks])


def chosen(accuracy: Path, own: str = "dense") -> str:
    """Exact match with other selections, tasks by selectors and ratios; a model that selects itself stands first."""
    lines = read(accuracy)
    other = [line for line in lines if line["selector"] != own]
    if own != "dense":
        compared = {(line["task"], line["length"]) for line in other}
        mine = [line for line in lines if line["selector"] == own]
        other = [line for line in mine if (line["task"], line["length"]) in compared] + other
    columns = list(dict.fromkeys((line["selector"], line["ratio"]) for line in other))
    found = {(line["task"], line["selector"], line["ratio"]): f"{line['exact_match']:.2f}" for line in other}
    tasks = list(dict.fromkeys(line["task"] for line in other))
    header = ["task", *(f"{selector} {ratio}" for selector, ratio in columns)]
    return table(header, [[t, *(found[t, s, r] for s, r in columns)] for t in tasks])


def training(path: Path) -> str:
    """Stages with their steps and their exact match by form."""
    stages = [line for line in read(path) if "stage" in line]
    forms = list(stages[-1]["exact_match"])
    rows = [
        [
            s["stage"],
            str(s["steps"]),
            f"{s['seconds']:.0f}",
            *(f"{s['exact_match'][f]:.2f}" if f in s["exact_match"] else "" for f in forms),
        ]
        for s in stages
    ]
    return table(["stage", "steps", "seconds", *forms], rows)


def layers(calibration: dict[str, Any]) -> str:
    """The similarity of each layer, from the content of a calibration file of RoBSA.

    Raises:
        ValueError: if the content is no config of RoBSA, or has no measured calibration.
    """
    from sglang_sparse.methods.robsa.calibration_file import RopeCalibration
    from sglang_sparse.methods.robsa.decode import RobsaConfig

    config = RobsaConfig.model_validate(calibration)
    found = config.calibration
    if not isinstance(found, RopeCalibration):
        raise ValueError(f"calibration: got {found!r}, allowed is what sglang_sparse.calibrate --method robsa writes")
    sensitive = found.sensitive(config.theta2)
    rows = [
        [
            str(row.layer),
            f"{row.mean:.4f}",
            f"{row.deviation:.4f}",
            f"{row.long.mean:.4f}" if row.long else "",
            "yes" if row.layer in sensitive else "no",
        ]
        for row in found.layers
    ]
    return table(["layer", "similarity", "deviation", "of long prompts", "sensitive"], rows)
