"""Print and plot the results of a Skip-Softmax calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_sparse.methods.skip_softmax.calibration_file import Formula, SkipCalibration
from sglang_sparse.tools.calibration.run import new_figure, save


def table(calibration: SkipCalibration, scale: Mapping[str, Any]) -> None:
    """Print the shares that each factor skips and keeps, and the formula's, for factors that change something."""
    print(
        f"{'phase':>7} {'length':>7} {'factor':>11} {'skipped':>8} {'formula':>8} {'mass kept':>9} {'worst layer':>11}"
    )
    for phase, fit in calibration.phases.items():
        formula = Formula(**scale[phase])
        for point in fit.points:
            if not point.is_fitted:
                continue
            share = formula.share(point.threshold_scale_factor)
            print(
                f"{phase:>7} {point.length:>7} {point.threshold_scale_factor:>11.5g} {point.sparsity:>8.1%} "
                f"{share:>8.1%} {point.recall:>9.4f} {point.worst_layer_recall:>11.4f}"
            )
    for phase, fit in calibration.phases.items():
        formula = Formula(**scale[phase])
        print(
            f"{phase}: threshold_scale_factor = {formula.a:.4g} * exp({formula.b:.4g} * share), for shares from "
            f"{fit.lowest:.3f} to {fit.highest:.3f}; R² {fit.r_squared:.3f}, a share is off by up to {fit.error:.1%}"
        )
    for phase, share in (calibration.sinks or {}).items():
        print(f"{phase}: attention sinks hold {share:.1%} of the mass, which counts as kept")


def plot(calibration: SkipCalibration, scale: Mapping[str, Any], path: Path) -> None:
    """Draw shares and masses by factor, and the formula, a panel for each phase.

    Without matplotlib, or where the file cannot be written, it is a note.
    """
    if (figure := new_figure(10, 4)) is None:
        return
    panels = figure.subplots(1, len(calibration.phases), squeeze=False)[0]
    for axes, (phase, fit) in zip(panels, calibration.phases.items(), strict=True):
        for length in sorted({point.length for point in fit.points}):
            some = [point for point in fit.points if point.length == length]
            factors = [point.threshold_scale_factor for point in some]
            (line,) = axes.plot(factors, [point.sparsity for point in some], "o-", label=f"skipped, {length} tokens")
            recalls = [point.recall for point in some]
            axes.plot(factors, recalls, ":", color=line.get_color(), label=f"mass kept, {length} tokens")
        a, b = Formula(**scale[phase])
        ends = (fit.lowest, fit.highest)
        axes.plot([a * math.exp(b * share) for share in ends], ends, "k--", label="formula")
        axes.set(title=phase, xscale="log", xlabel="threshold_scale_factor", ylabel="share", ylim=(0, 1.02))
        axes.legend(fontsize="small")
    save(figure, path)
