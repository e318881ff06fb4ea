"""What the layers read that a calibration does not trust, from hand-made files."""

import json
from pathlib import Path

from eval.lab.tables import theta2


def write(folder: Path, layers: str, theta1: float, density: float) -> Path:
    """A file of one task, whose servers select in three layers if they are the calibrated ones and in four if not."""
    server = {"sparse": {"sparse_layers": 3 if layers == "calibrated" else 4}}
    header = {"kind": "header", "arguments": {"custom_params": {"theta1": theta1}}, "servers": {"base": server}}
    row = {"kind": "summary", "arm": "base", "task": "multikey", "length": 8192, "n": 100, "density": density}
    path = folder / f"{theta2.PREFIX}{layers}-{theta1}.jsonl"
    scored = row | {"score": 0.9, "score_interval": [0.8, 1.0]}
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, scored)))
    return path


def test_what_the_last_layer_reads_is_what_is_left(tmp_path: Path) -> None:
    # In the last layer .03 by full scores and .06 by rotary ones, then .1 and 1.
    read = {0.5: (0.01, 0.015, 0.0225), 0.9: (0.1, 0.1, 0.325)}
    paths = [
        write(tmp_path, layers, theta1, density)
        for theta1, densities in read.items()
        for layers, density in zip(("calibrated", "full", "rotary"), densities, strict=True)
    ]
    said = theta2.times_as_many(paths)
    assert "read 1.5 to 3.2 times as many" in said and "itself reads 2.0 to 10.0 times as many" in said
    # A theta1 that one of them was not asked with says nothing.
    assert theta2.times_as_many([*paths, write(tmp_path, "rotary", 0.3, 0.9)]) == said
