"""Report the results of an AnchorAttention calibration: rows for its file, and a printed table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sglang_sparse.methods.anchor import ALL_KEYS
from sglang_sparse.tools.calibration.recall import MAX_THETA, Kept, thetas

# Of these the file says what they would keep if all layers had the same.
COMPARED = (0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0)
# By length and layer.
Measured = Mapping[int, Mapping[int, Kept]]


def layer_rows(measured: Measured, places: Mapping[int, int | None]) -> list[dict[str, object]]:
    """Return sparsity and recall of the chosen thetas, as shares, in a row for each layer and length."""
    rows = []
    for layer, place in places.items():
        for length, by_layer in measured.items():
            kept = by_layer[layer]
            row: dict[str, object] = {"layer": layer, "length": length}
            if place is None:
                row |= {"theta": ALL_KEYS, "recall": 1.0, "worst_head_recall": 1.0, "sparsity": 0.0}
            else:
                recall = kept.recall[:, place]
                row |= {
                    "theta": thetas()[place].item(),
                    "recall": round(recall.mean().item(), 4),
                    "worst_head_recall": round(recall.min().item(), 4),
                    "sparsity": round(kept.sparsity[:, place].mean().item(), 4),
                }
            rows.append(row)
    return rows


def same_theta_rows(measured: Measured) -> list[dict[str, object]]:
    """Return the mean sparsity and recall over layers with one theta for all: a row for each theta and length."""
    rows = []
    for length, by_layer in measured.items():
        recall = torch.stack([kept.recall.mean(0) for kept in by_layer.values()]).mean(0)
        sparsity = torch.stack([kept.sparsity.mean(0) for kept in by_layer.values()]).mean(0)
        for theta in COMPARED:
            place = int(torch.searchsorted(thetas(), theta))
            shares = {"recall": round(recall[place].item(), 4), "sparsity": round(sparsity[place].item(), 4)}
            rows.append({"theta": theta, "length": length, **shares})
    return rows


def sink_share(measured: Measured) -> float | None:
    """The share of the attention mass that attention sinks hold, mean over layers and lengths; None without sinks."""
    found = [
        kept.sinks.mean() for by_layer in measured.values() for kept in by_layer.values() if kept.sinks is not None
    ]
    return round(torch.stack(found).mean().item(), 4) if found else None


def report(config: Mapping[str, Any]) -> None:
    """Print what was found."""
    found = config["calibration"]
    print(f"{'layer':>5} {'length':>7} {'theta':>8} {'recall':>7} {'worst head':>10} {'left out':>9}")
    for row in found["layers"]:
        theta = "all keys" if row["theta"] == ALL_KEYS else f"{row['theta']:8.3f}"
        shares = f"{row['recall']:7.4f} {row['worst_head_recall']:10.4f} {row['sparsity']:9.1%}"
        print(f"{row['layer']:>5} {row['length']:>7} {theta} {shares}")
    print("mean over layers, each with its own theta; and with the same in all:")
    for counted in found["number_of_prompts"]:
        length, prompts = counted["length"], counted["prompts"]
        rows = [row for row in found["layers"] if row["length"] == length]
        recall, sparsity = (sum(row[name] for row in rows) / len(rows) for name in ("recall", "sparsity"))
        print(f"{'':>5} {length:>7} {'own':>8} {recall:7.4f} {'':>10} {sparsity:9.1%}  ({prompts} prompts)")
        for row in found["same_theta_in_all_layers"]:
            if row["length"] == length:
                print(f"{'':>5} {length:>7} {row['theta']:8.3f} {row['recall']:7.4f} {'':>10} {row['sparsity']:9.1%}")
    if found["sinks"] is not None:
        print(f"attention sinks hold {found['sinks']:.1%} of the mass, which counts as kept")
    dense = sorted({row["layer"] for row in found["layers"] if row["theta"] == ALL_KEYS})
    if dense:
        print(f"no theta up to {MAX_THETA:g} reaches the target in layers {', '.join(map(str, dense))}: dense there")
