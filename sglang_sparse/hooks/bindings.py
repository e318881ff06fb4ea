"""Index of the names under which modules hold functions and classes, for SGLang's hooks.

SGLang replaces a hooked function under every name of every module (``from X import function``), and reads all names
again for each hook: with a hundred hooks most of the CPU time that plugins take in a start. The index reads a module
once, and again when it has grown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType, ModuleType

_Propagate = Callable[[object, object, object], int]
_sizes: dict[str, int] = {}
_places: dict[int, list[tuple[ModuleType, str]]] = {}
# The number of modules when names were read last.
_modules = [0]


def read() -> None:
    """Read the names of modules that are new or have grown, if any module is new."""
    if len(sys.modules) == _modules[0]:
        return
    _modules[0] = len(sys.modules)
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or _sizes.get(name) == len(vars(module)):
            continue
        _sizes[name] = len(vars(module))
        for attribute, value in list(vars(module).items()):
            if isinstance(value, (FunctionType, type)):
                _places.setdefault(id(value), []).append((module, attribute))


def replace_search() -> None:
    """Let SGLang find the names of functions and classes in the index; it searches for other objects itself."""
    from sglang.srt.plugins import hook_registry

    search: _Propagate = hook_registry._propagate_patch
    if getattr(search, "__module__", None) == __name__:
        return

    def propagate(original: object, wrapped: object, source: object) -> int:
        if not isinstance(original, (FunctionType, type)):
            return search(original, wrapped, source)
        read()
        found = {(module, name) for module, name in _places.get(id(original), ()) if module is not source}
        stale = [(module, name) for module, name in found if vars(module).get(name) is original]
        for module, name in stale:
            setattr(module, name, wrapped)
        return len(stale)

    hook_registry._propagate_patch = propagate
