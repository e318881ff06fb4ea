"""Writes the model card: ``python -m eval.lab.train.card --accuracy FILE --training FILE --out README.md``.

Every figure comes from the two result files and, if it is beside the card, robsa.json: what
``python -m sglang_sparse.calibrate --method robsa`` found of the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eval.lab.train.card_texts import HEAD, PARTITION, SHAPES, SPARSE
from eval.lab.train.mixes import FULL

Line = dict[str, Any]

CALIBRATION = "robsa.json"


def read(path: Path) -> list[Line]:
    """Lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def dense_table(lines: list[Line]) -> str:
    """Tasks by lengths."""
    lengths = sorted({line["length"] for line in lines})
    found = {(line["task"], line["length"]): f"{line['exact_match']:.3f}" for line in lines}
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    return table(["task", *map(str, lengths)], [[t, *(found.get((t, n), "") for n in lengths)] for t in tasks])


def sparse_table(lines: list[Line]) -> str:
    """Tasks by selectors and ratios."""
    columns = list(dict.fromkeys((line["selector"], line["ratio"]) for line in lines))
    found = {(line["task"], line["selector"], line["ratio"]): f"{line['exact_match']:.2f}" for line in lines}
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    header = ["task", *(f"{selector} {ratio}" for selector, ratio in columns)]
    return table(header, [[t, *(found[t, s, r] for s, r in columns)] for t in tasks])


def sparse_section(model: str, lines: list[Line]) -> str:
    """The section of other choices than the model's own."""
    said, n, length = SHAPES[model], lines[-1]["n"], lines[0]["length"]
    return SPARSE.format(**said, n=n, length=length, table=sparse_table(lines))


def training_table(stages: list[Line]) -> str:
    """Stages with their steps and their exact match by form."""
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


def partition(calibration: dict[str, Any]) -> str:
    """The section of the layers' similarity, from the content of a calibration file.

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
    return PARTITION.format(
        prompts=sum(group.prompts for group in found.prompts),
        long=found.long_prompts or 0,
        least=found.min_seq_len,
        theta2=config.theta2,
        table=table(["layer", "similarity", "deviation", "of long prompts", "sensitive"], rows),
    )


def read_calibration(folder: Path) -> dict[str, Any] | None:
    """Content of the calibration file in a model's folder, if it has one."""
    path = folder / CALIBRATION
    return json.loads(path.read_text()) if path.exists() else None


def forms_table(names: Iterable[str]) -> str:
    """One row per form of these, without the header."""
    from eval.texts.text import FORMS

    rows = []
    for form in (form for form in FORMS.values() if form.name in names):
        keys = {"words": ("lantern-hill", "copper-meadow"), "digits": ("48213977",), "none": ()}[form.keys]
        keys = keys[: 2 if form.link else 1]
        value = "48219" if form.link or not keys else "4821937"
        cells = (
            "<br>".join(form.records(*keys, value=value)),
            form.question(*keys[:1]),
            form.answer(*keys, value=value),
        )
        name = form.name if form.chat else f"{form.name} (raw prompt)"
        rows.append([name, *(f"`{cell}`" for cell in cells)])
    return table(["form", "record", "question", "answer"], rows).split("\n", 2)[2]


def card(accuracy: list[Line], training: list[Line], calibration: dict[str, Any] | None = None) -> str:
    """The model card as text; with the content of a calibration file it has a section of it, see `partition`."""
    settings, stages = training[0], [line for line in training if "stage" in line]
    model = settings.get("model", "tiny-gqa")
    own = "indexer" if model == "tiny-dsa" else "dense"
    dense = [line for line in accuracy if line["selector"] == own]
    sparse = [line for line in accuracy if line["selector"] != own]
    if own != "dense":
        compared = {(line["task"], line["length"]) for line in sparse}
        sparse = [line for line in dense if (line["task"], line["length"]) in compared] + sparse
    return HEAD.format(
        model=model,
        **SHAPES[model],
        millions=settings["parameters"] / 1e6,
        steps=sum(s["steps"] for s in stages),
        tokens=settings["tokens_per_step"],
        seed=settings["seed"],
        seconds=sum(s["seconds"] for s in stages),
        device=settings["device"],
        forms=forms_table(FULL.forms),
        n=max(line["n"] for line in dense),
        n_long=min(line["n"] for line in dense),
        dense=dense_table(dense),
        sparse=sparse_section(model, sparse) if sparse else "",
        partition=partition(calibration) if calibration else "",
        training=training_table(stages),
    )


def main() -> None:
    """Reads both result files, and the calibration in the card's folder, and writes the card."""
    parser = argparse.ArgumentParser(description="Writes the model card")
    parser.add_argument("--accuracy", type=Path, required=True)
    parser.add_argument("--training", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(card(read(args.accuracy), read(args.training), read_calibration(args.out.parent)))


if __name__ == "__main__":
    main()
