"""Peak memory of a piece of code, on any device."""

import gc
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """The most bytes at any time of tensors that were made since, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self._alive = 0, {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.untyped_storage()._cdata not in known:
                storage = leaf.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: pair for key, pair in self._alive.items() if not pair[0].expired()}
        self.nbytes = max(self.nbytes, sum(nbytes for _, nbytes in self._alive.values()))
        return result


def collect_after(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Triton's interpreter holds in cycles what a kernel ran on."""
    original = getattr(module, name)

    def collecting(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        gc.collect()
        return result

    monkeypatch.setattr(module, name, collecting)
