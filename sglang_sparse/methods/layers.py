"""The config field ``layers``: the layers of a model that run sparse."""

from __future__ import annotations

import re
from collections.abc import Collection

from sglang_sparse.errors import SparseArgumentError

# The first and the last layer of a range; None is the model's last one.
LayerSpan = tuple[int, int | None]
# Names in ``layer_types`` of a config.json, of layers that do not attend to all earlier tokens.
CHUNKED = "chunked_attention"
BOUNDED = ("sliding_attention", CHUNKED)
LAYERS_FORM = '"all", ids or ranges such as "2-" or "0-3,8", or a list of ids'


def parse_spans(spec: str) -> list[LayerSpan]:
    """Turn a ``layers`` field into ranges, in its order.

    Args:
        spec: ``"all"``, or comma-separated ids and ranges such as ``"0-3,8,20-"``.

    Raises:
        ValueError: the form is wrong.
    """
    spans: list[LayerSpan] = []
    for part in ("0-" if spec == "all" else spec).split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(-\s*(\d*)\s*)?", part)
        if match is None:
            raise SparseArgumentError(f"must be {LAYERS_FORM}; got {spec!r}", field="layers", got=spec)
        first = int(match[1])
        spans.append((first, first if match[2] is None else int(match[3]) if match[3] else None))
    return spans


def names_layer(spec: str | list[int], layer: int) -> bool:
    """Whether a ``layers`` field of a valid form names a layer."""
    if isinstance(spec, list):
        return layer in spec
    return any(first <= layer and (last is None or layer <= last) for first, last in parse_spans(spec))


def parse_layers(spec: str | list[int], num_layers: int | None) -> tuple[int, ...]:
    """Turn a ``layers`` field into layer ids.

    Args:
        spec: ``"all"``, comma-separated ids and ranges such as ``"0-3,8,20-"``, or a list of ids.
        num_layers: layers of the model; None checks the form only.

    Returns:
        Ascending layer ids (empty when ``num_layers`` is None).

    Raises:
        ValueError: the form is wrong, or an id is not a layer of the model.
    """
    if isinstance(spec, list):
        spec = ",".join(str(layer) for layer in spec)
    chosen: set[int] = set()
    spans = parse_spans(spec)
    if num_layers is None:
        return ()
    for (first, end), part in zip(spans, spec.split(","), strict=True):
        last = num_layers - 1 if end is None else end
        if first > last or last >= num_layers:
            named = part.strip()
            message = f"layers {named!r}: the model has layers 0 to {num_layers - 1}"
            raise SparseArgumentError(message, field="layers", got=named)
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def listed(layers: Collection[int], num_layers: int) -> str:
    """Say how many of a model's layers these are, and which unless they are all."""
    ids = f" ({', '.join(map(str, sorted(layers)))})" if len(layers) < num_layers else ""
    return f"{len(layers)} of {num_layers} layers{ids}"
