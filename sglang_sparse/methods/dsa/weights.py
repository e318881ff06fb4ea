"""Whether a checkpoint's weights have the indexers that its config promises, by the names and shapes of its tensors.

SGLang loads what it finds: parts of an indexer that no file has keep what their memory held, and answers are random.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# In the names of its weights.
INDEXER = ".indexer."
# Layer, part, and what a tensor is of it: packed and quantised parts have others than "weight", or further ones.
_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\..*" + re.escape(INDEXER) + r"(\w+)\.(.+)$")
# Missing parts that are named.
NAMED = 3


def refuse(found: Mapping[str, tuple[str, tuple[int, ...]]], layers: int, heads: int, dim: int) -> str | None:
    """Say why weights do not fit the config, or None; packed elements do not tell their rows.

    Args:
        found: element type and shape of each tensor, by name.
        layers: the model's, all of which have an indexer.
        heads: the config's ``index_n_heads``.
        dim: its ``index_head_dim``.
    """
    rows = {"wq_b": heads * dim, "wk": dim, "k_norm": dim, "weights_proj": heads}
    parts = {name: match.groups() for name in found if (match := _NAME.search(name))}
    if not parts:
        return f"its weights have no indexer: no tensor has {INDEXER!r} in its name; allowed: weights with one"
    there = {(int(layer), part) for layer, part, _ in parts.values()}
    missing = [(layer, part) for layer in range(layers) for part in rows if (layer, part) not in there]
    if missing:
        named = ", ".join(f"layers.{layer}{INDEXER}{part}" for layer, part in missing[:NAMED])
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        return (
            f"its weights have not all of its indexers: no tensor of {named}{more}; allowed: weights with "
            f"{', '.join(rows)} in each of its {layers} layers"
        )
    for name, (layer, part, kind) in sorted(parts.items()):
        dtype, shape = found[name]
        expected = rows.get(part) if kind == "weight" and int(layer) < layers else None
        if expected is not None and "F" in dtype and shape[:1] != (expected,):
            return (
                f"its weights have another indexer than its config says: {name} has the shape {list(shape)}, and "
                f"index_n_heads {heads} with index_head_dim {dim} makes {expected} rows; allowed: the config that "
                "belongs to the weights"
            )
    return None
