"""Index of the names under which modules hold functions and classes, for SGLang's hooks.

SGLang replaces a hooked function under every name of every module (``from X import function``), and reads all names
again for each hook: with a hundred hooks most of the CPU time that plugins take in a start. The index is read once for
the hooks of a registration, and then only for modules that are new or have grown.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from types import FunctionType, ModuleType

_sizes: dict[str, tuple[int, int]] = {}
_places: dict[int, list[tuple[ModuleType, str]]] = {}
# The number of modules when names were read last.
_modules = [0]


def forget() -> None:
    """Empty the index: names may have changed before the next hooks are applied."""
    _modules[0] = 0
    _sizes.clear()
    _places.clear()


def _indexed(value: object) -> bool:
    # Not isinstance, which asks a proxy for its class.
    return issubclass(type(value), (FunctionType, type))


def read() -> None:
    """Read the names of modules that are new or have grown, if any module is new."""
    if len(sys.modules) == _modules[0]:
        return
    _modules[0] = len(sys.modules)
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or _sizes.get(name) == (id(module), len(vars(module))):
            continue
        _sizes[name] = id(module), len(vars(module))
        for attribute, value in list(vars(module).items()):
            if _indexed(value):
                _places.setdefault(id(value), []).append((module, attribute))


def replace_search() -> None:
    """Let SGLang find the names of functions and classes in the index; it searches for other objects itself."""
    from sglang.srt.plugins import hook_registry
    from sglang.srt.plugins.hook_registry import _propagate_patch as search

    forget()
    if search.__module__ == __name__:
        return

    def propagate(original: object, wrapped: object, source: object) -> int:
        if not _indexed(original):
            return search(original, wrapped, source)
        read()
        places = _places.get(id(original), [])
        # The next hook of the function finds this one.
        _places.setdefault(id(wrapped), []).extend(places)
        replaced = 0
        for module, name in places:
            if module is not source and vars(module).get(name) is original:
                with suppress(AttributeError, TypeError):
                    setattr(module, name, wrapped)
                    replaced += 1
        return replaced

    hook_registry._propagate_patch = propagate
