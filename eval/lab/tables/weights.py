"""The weights that a result file was measured with, and RoBSA's choice among their layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.live.record import read_rows
from eval.scores import ppl_summary
from eval.scores.tables import RECTIFICATION, Column, Row, table, text
from eval.scores.verdicts import NLL_MARGIN

MODELS = Path(__file__).parents[2] / "models"
CALIBRATION = "robsa.json"
LABEL = "weights "
SHIPPED, OLDER, UNKNOWN = "as shipped", "earlier ones", "not in the file"


def calibration(model: str) -> dict[str, Any]:
    """Read a model's calibration file; empty where it has none."""
    path = MODELS / model / CALIBRATION
    return json.loads(path.read_text()) if path.exists() else {}


def shipped(model: str) -> str | None:
    """The fingerprint of a model's shipped weights, as its calibration has it; None where it has none."""
    found = calibration(model)
    return found["calibration"]["fingerprint"] if found else None


def weights(header: Mapping[str, Any]) -> str | None:
    """Say whether a file's weights are the shipped ones, for a model that ships with a calibration; None for others.

    A server with a calibration refuses other weights than its own; a stock one's file names them in its label.
    """
    served = _served(header)
    wanted = shipped(Path(served.get("model_path") or "").name)
    if wanted is None:
        return None
    found = calibrated(served) or (header.get("label") or "").removeprefix(LABEL)
    return {wanted: SHIPPED, "": UNKNOWN}.get(found, OLDER)


def sensitive(header: Mapping[str, Any]) -> str | None:
    """Of a file of RoBSA, which layers run sparse: above which similarity, and out of which; None of others."""
    config = _config(_served(header))
    if "theta2" not in config:
        return None
    layers = "" if config["layers"] == "all" else f", layers {config['layers']}"
    blocks = "" if config.get("block_size", 16) == 16 else f", blocks of {config['block_size']}"
    return f"theta2 {config['theta2']:g}{layers}{blocks}"


def said(header: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the weights and the sparse layers of a file, as the tables show them."""
    return {"weights": weights(header), "sensitive": sensitive(header)}


def rectification(*paths: Path, judged: int | None = None) -> str:
    """Perplexity against the rectification interval, in files of ``eval.ppl_rectify``, and what they say of weights.

    At the interval `judged` the perplexity must stay within `NLL_MARGIN` of the dense one, by the upper end of its 95 %
    interval; None: no bound is set.
    """
    rows: list[Row] = []
    for path in paths:
        header, *found = read_rows(path)
        rows += [{**said(header), **row} for row in ppl_summary.summarise(found)]

    def verdict(row: Row) -> str:
        if row["setting"] != "rectified" or row["interval"] != judged:
            return ""
        return f"{'within' if row['diff_interval'][1] <= NLL_MARGIN else 'not within'} {NLL_MARGIN:.1%}"

    first: list[Column] = [("weights", text("weights")), ("sparse layers", text("sensitive"))]
    return table(rows, [*first, *RECTIFICATION, ("verdict", verdict)])


def calibrated(served: Mapping[str, Any]) -> str | None:
    """The fingerprint in the calibration of a sparse server, from what it says of itself; None without one."""
    calibration = _config(served).get("calibration")
    return calibration["fingerprint"] if isinstance(calibration, Mapping) else None


def _served(header: Mapping[str, Any]) -> Mapping[str, Any]:
    servers = header.get("servers", header)
    return servers.get("base") or servers.get("sparse") or {}


def _config(served: Mapping[str, Any]) -> Mapping[str, Any]:
    config = (served.get("sparse") or {}).get("config") or json.loads(served.get("sparse_config") or "{}")
    return config if isinstance(config, Mapping) else {}
