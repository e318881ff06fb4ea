"""Method names and the modules behind them, listed without importing torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, TypeVar

from sglang_sparse.errors import SparseArgumentError, nearest

if TYPE_CHECKING:
    from sglang_sparse.methods.base import DecodeMethod
    from sglang_sparse.methods.prefill import PrefillMethod

ENTRY_POINT_GROUP = "sglang_sparse.methods"
PREFILL_ENTRY_POINT_GROUP = "sglang_sparse.prefill_methods"

T = TypeVar("T")

DECODE_METHODS = {
    "resa": "sglang_sparse.methods.resa:Resa",
    "robsa": "sglang_sparse.methods.robsa.decode:Robsa",
    "dsa": "sglang_sparse.methods.dsa.decode:Dsa",
    "rocketkv": "sglang_sparse.methods.rocketkv:Rocketkv",
    "skip_softmax": "sglang_sparse.methods.skip_softmax.decode:SkipSoftmaxDecode",
}
PREFILL_METHODS = {
    "anchor": "sglang_sparse.methods.anchor:Anchor",
    "skip_softmax": "sglang_sparse.methods.skip_softmax.prefill:SkipSoftmax",
}


def decode_methods() -> dict[str, str]:
    """Return ``{name: "module:class"}`` of the built-in and the installed third-party decode methods.

    Raises:
        RuntimeError: a third-party distribution claims a built-in method's name.
    """
    return _with_installed(DECODE_METHODS, ENTRY_POINT_GROUP)


def prefill_methods() -> dict[str, str]:
    """Return the same of the prefill methods."""
    return _with_installed(PREFILL_METHODS, PREFILL_ENTRY_POINT_GROUP)


def _with_installed(built_in: dict[str, str], group: str) -> dict[str, str]:
    methods = dict(built_in)
    for name, value in _installed(group, tuple(sys.path)):
        if name in built_in:
            raise RuntimeError(f"entry point {value!r} redefines the built-in method {name!r}")
        methods[name] = value
    return methods


@cache
def _installed(group: str, path: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the entry points under `path`, cached: reading them takes longer than the rest of a configuration."""
    return tuple((found.name, found.value) for found in entry_points(group=group))


def require_known(flag: str, name: str, known: dict[str, str]) -> None:
    """Refuse a method name that nobody has registered.

    Raises:
        SparseArgumentError: ``name`` is not in ``known``; the message has the list and the nearest name.
    """
    if name not in known:
        raise SparseArgumentError(field=flag, got=name, allowed=sorted(known), hint=nearest(name, known))


def load_decode_method(name: str) -> type[DecodeMethod]:
    """Import and return the class of a decode method.

    Raises:
        ValueError: the name is unknown, or a third party's entry point leads to no decode method.
    """
    from sglang_sparse.methods.base import DecodeMethod

    return _load("--sparse-method", name, decode_methods(), DecodeMethod)


def load_prefill_method(name: str) -> type[PrefillMethod]:
    """Import and return the class of a prefill method.

    Raises:
        ValueError: the name is unknown, or a third party's entry point leads to no prefill method.
    """
    from sglang_sparse.methods.prefill import PrefillMethod

    return _load("--sparse-prefill-method", name, prefill_methods(), PrefillMethod)


def loaded_decode_methods() -> dict[str, type[DecodeMethod]]:
    """Import all decode methods and return their classes by name, without those that cannot be loaded."""
    return _loaded(load_decode_method, decode_methods())


def loaded_prefill_methods() -> dict[str, type[PrefillMethod]]:
    """Return the same of the prefill methods."""
    return _loaded(load_prefill_method, prefill_methods())


def known_fields() -> frozenset[str]:
    """Return the names of the config fields of all methods that can be loaded."""
    return _known_fields((*decode_methods().items(), *prefill_methods().items()), tuple(sys.path))


@cache
def _known_fields(registered: tuple[tuple[str, str], ...], path: tuple[str, ...]) -> frozenset[str]:
    """The same of what is registered under `path`: one that cannot be loaded is not tried again with each request."""
    found = (*loaded_decode_methods().values(), *loaded_prefill_methods().values())
    return frozenset(field for method in found for field in method.config_class.model_fields)


def _loaded(load: Callable[[str], T], names: Iterable[str]) -> dict[str, T]:
    found = {}
    for name in names:
        try:
            found[name] = load(name)
        except ValueError:
            # Whoever asks for this one by its name is told why.
            continue
    return found


def _load(flag: str, name: str, known: dict[str, str], base: type[T]) -> type[T]:
    require_known(flag, name, known)
    module, _, attribute = known[name].partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    # The module of a third party may raise anything while it is imported.
    except Exception as error:
        message = f"{flag} {name}: cannot load {known[name]!r}: {error}"
        raise SparseArgumentError(message, field=flag, got=name) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        message = f"{flag} {name}: cannot load {known[name]!r}: it is no subclass of {base.__name__}"
        raise SparseArgumentError(message, field=flag, got=name)
    return found
