"""The table of a calibration's layers in the card of tiny-mla."""

from __future__ import annotations

from typing import Any

from eval.scores.tables import Column, number, table


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
    columns: list[Column] = [
        ("layer", lambda row: str(row["layer"])),
        *((name, number(name, 4)) for name in ("similarity", "deviation", "of long prompts")),
        ("sensitive", lambda row: "yes" if row["layer"] in sensitive else "no"),
    ]
    rows = [
        {
            "layer": row.layer,
            "similarity": row.mean,
            "deviation": row.deviation,
            "of long prompts": row.long.mean if row.long else None,
        }
        for row in found.layers
    ]
    return table(rows, columns)
