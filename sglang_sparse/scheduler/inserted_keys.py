"""The sequences that the radix tree holds, read in one way from every tree core.

The nodes of SGLang's Rust core cannot be walked from Python. So every key that enters the tree is remembered and, when
somebody asks, looked up again through read-only calls of the cores' common interface. The core's list of all its slots
then shows whether the remembered keys account for the whole tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_sparse.attention.protocols import RadixKey, RadixTree

# The attribute of SGLang's tree that holds an `InsertedKeys`.
ATTRIBUTE = "sglang_sparse_inserted"
# Keys that are remembered before those that the tree has dropped are forgotten for the first time.
FORGET_AT = 256


@dataclass(frozen=True)
class TreePath:
    """A sequence that the tree holds from its root on.

    Attributes:
        key: SGLang's ``RadixKey``, as it stands in the tree.
        slots: ``[len(key)]`` int64, where its KV is.
        ends: the positions at which its nodes end, ascending; the last may lie behind the key.
    """

    key: RadixKey
    slots: torch.Tensor
    ends: tuple[int, ...]


class InsertedKeys:
    """Remembers the keys that enter a tree.

    Attributes:
        count: insertions so far.
    """

    def __init__(self, tree: RadixTree):
        self.count = 0
        self._tree, self._keys = tree, []
        self._limit = FORGET_AT

    def add(self, key: RadixKey) -> None:
        """Remember a key that has been inserted, a ``RadixKey`` of whole pages."""
        self.count += 1
        self._keys.append(key[: len(key)])
        if len(self._keys) >= self._limit:
            self.paths()
            self._limit = max(FORGET_AT, 2 * len(self._keys))

    def paths(self) -> list[TreePath]:
        """Return sequences that together cover the tree, the longest first; none of them is a prefix of another.

        Raises:
            InexactTreeError: the tree holds slots of sequences that nobody has inserted.
        """
        core, size = self._tree.tree_core, self._tree.page_size
        found, known = [], set()
        matched = [(*core.match_full_device_prefix(key)[:2], key) for key in self._keys]
        for length, node, key in sorted(matched, key=lambda match: match[0], reverse=True):
            slots = self._tree.path_device_indices(node)[:length]
            # A page stands at one place of the tree: who holds the last one of a path holds them all.
            if length == 0 or int(slots[-1]) in known:
                continue
            known.update(slots[size - 1 :: size].tolist())
            ends = tuple(info.path_end for info in core.collect_path_info([node])[0])
            found.append(TreePath(key[:length], slots, ends))
        held = self._tree.all_values_flatten()
        if len(known) * size != len(held):
            raise InexactTreeError(
                f"the radix tree holds {len(held)} slots, {len(held) - len(known) * size} of them of sequences that "
                "nobody has inserted"
            )
        if self._tree.cache_controller is None:
            # What a hierarchical cache keeps in host memory may come back.
            self._keys = [path.key for path in found]
        return found


def remember_inserts(tree: RadixTree) -> InsertedKeys:
    """Remember what enters a tree from now on; returns where."""
    if not hasattr(tree, ATTRIBUTE):
        setattr(tree, ATTRIBUTE, InsertedKeys(tree))
    return getattr(tree, ATTRIBUTE)


class InexactTreeError(RuntimeError):
    """A page of the radix tree is not what a cold run over its tokens would have written."""
