"""Print and plot the results of a RoBSA calibration."""

from __future__ import annotations

from pathlib import Path

from sglang_sparse.methods.robsa.calibration_file import RopeCalibration
from sglang_sparse.tools.calibration.run import new_figure, save

# For these the table says how the layers would be parted; those of the paper's table 4.
THETA2S = (0.95, 0.96, 0.97, 0.98, 0.99, 0.995)


def table(calibration: RopeCalibration, theta2: float) -> None:
    """Print similarity and recall by layer, and how many layers are insensitive at other thresholds."""
    sensitive = calibration.sensitive(theta2)
    print(f"{'layer':>5} {'similarity':>10} {'deviation':>9} {'recall':>7} {'long':>7} {'recall':>7}")
    for row in calibration.layers:
        kind = "sensitive" if row.layer in sensitive else "insensitive"
        long = _share(row.long and row.long.mean), _share(row.long and row.long.recall)
        print(f"{row.layer:>5} {row.mean:10.4f} {row.deviation:9.4f} {_share(row.recall)} {' '.join(long)}  {kind}")
    prompts = sum(group.prompts for group in calibration.prompts)
    print(f"over {prompts} prompts; long: over the {calibration.long_prompts or 0} of at least", end=" ")
    print(f"{calibration.min_seq_len} tokens (min_seq_len); recall at theta1 {calibration.theta1:g}")
    print(
        "sensitive: both similarities are above theta2. The paper asks it of the first alone, which short prompts "
        "raise; rows as short as these run dense here."
    )
    layers = len(calibration.layers)
    print(f"{'theta2':>10}: " + " ".join(f"{value:>5g}" for value in THETA2S))
    counts = (layers - len(calibration.sensitive(value)) for value in THETA2S)
    print(f"insensitive: {' '.join(f'{count:>5}' for count in counts)}  of {layers} layers")
    print(f"at theta2 {theta2:g} {len(sensitive)} layers select by their RoPE part alone")


def _share(value: float | None) -> str:
    return f"{'' if value is None else f'{value:.4f}':>7}"


def plot(calibration: RopeCalibration, theta2: float, path: Path) -> None:
    """Draw similarity, its deviation and the threshold by layer, as the paper's figure 5, and that of long prompts.

    Without matplotlib, or where the file cannot be written, it is a note.
    """
    if (figure := new_figure(8, 4)) is None:
        return
    from matplotlib.ticker import MaxNLocator

    layers = [row.layer for row in calibration.layers]
    mean = [row.mean for row in calibration.layers]
    axes = figure.add_subplot()
    axes.fill_between(
        layers,
        [row.mean - row.deviation for row in calibration.layers],
        [min(1.0, row.mean + row.deviation) for row in calibration.layers],
        alpha=0.3,
        label="deviation over prompts",
    )
    axes.plot(layers, mean, marker="o", markersize=3, label="mean cosine similarity")
    if all(row.long for row in calibration.layers):
        long = [row.long.mean for row in calibration.layers if row.long]
        axes.plot(layers, long, marker="s", markersize=3, label=f"prompts of {calibration.min_seq_len} tokens or more")
    axes.axhline(theta2, color="tab:red", linestyle="--", label=f"theta2 = {theta2:g}")
    axes.set_xlabel("layer")
    axes.set_ylabel("full against RoPE-only attention")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    save(figure, path)
