"""An attention backend that passes everything on to the one that it wraps."""

from __future__ import annotations

from typing import Any, ClassVar

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend


class DelegatingBackend(AttentionBackend):
    """Pass everything on, reading and writing, to the wrapped backend, but for what a subclass sets until it is sealed.

    The delegates for names that SGLang's base class defines are made below the class, because such names never reach
    ``__getattr__``.

    Args:
        dense: the wrapped backend.
    """

    _sealed: ClassVar[bool] = False

    def __init__(self, dense: Any):
        self.dense = dense

    def seal(self) -> None:
        """Leave further attributes, which SGLang sets, to the wrapped backend; the last line of a constructor."""
        object.__setattr__(self, "_sealed", True)

    def __getattr__(self, name: str) -> Any:
        if name == "dense":
            raise AttributeError(name)
        return getattr(self.dense, name)

    def __setattr__(self, name: str, value: object) -> None:
        if self._sealed and name not in vars(self):
            setattr(self.dense, name, value)
        else:
            object.__setattr__(self, name, value)


def _delegate(name: str, value: object) -> Any:
    if callable(value):

        def method(self: DelegatingBackend, *args: object, **kwargs: object) -> Any:
            return getattr(self.dense, name)(*args, **kwargs)

        return method
    return property(lambda self: getattr(self.dense, name))


# Made from the base class rather than listed, so that what a later SGLang adds is delegated too.
for _name, _value in vars(AttentionBackend).items():
    if not _name.startswith("__") and _name not in vars(DelegatingBackend) and _name != "_abc_impl":
        setattr(DelegatingBackend, _name, _delegate(_name, _value))
