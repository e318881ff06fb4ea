"""An attention backend that is another one, but for what a subclass defines."""

from __future__ import annotations

from typing import Any, ClassVar

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend


class DelegatingBackend(AttentionBackend):
    """Pass everything on, reading and writing, to the wrapped backend.

    The delegates for names that SGLang's base class defines are made below the class, because such names never reach
    ``__getattr__``.

    Args:
        dense: the wrapped backend.
    """

    # The attributes of a subclass; all others are the wrapped backend's.
    _OWN: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, dense: Any):
        object.__setattr__(self, "dense", dense)

    def __getattr__(self, name: str) -> Any:
        if name == "dense" or name in self._OWN:
            raise AttributeError(name)
        return getattr(self.dense, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.dense, name, value)


def _delegate(name: str, value: Any) -> Any:
    if callable(value):

        def method(self: DelegatingBackend, *args: Any, **kwargs: Any) -> Any:
            return getattr(self.dense, name)(*args, **kwargs)

        return method
    return property(lambda self: getattr(self.dense, name))


# Made from the base class rather than listed, so that what a later SGLang adds is delegated too.
for _name, _value in vars(AttentionBackend).items():
    if not _name.startswith("__") and _name not in vars(DelegatingBackend) and _name != "_abc_impl":
        setattr(DelegatingBackend, _name, _delegate(_name, _value))
