"""Errors that name the flag or field at fault, its value and what is allowed; every folder may import this file."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar


class SparseArgumentError(ValueError):
    """A sparse flag, config field, request option or combination that cannot be served; the message is for the user.

    The text is ``{message}; allowed: {allowed}``, or ``form`` without a message.

    Attributes:
        field: the flag, config field, option or limit at fault, as a user writes it; empty if there is no single one.
        got: its value.
        allowed: the allowed values, as a text or a collection; empty if only the message says it.
    """

    form: ClassVar[str] = "{field}: got {got!r}, allowed{where}: {allowed}"

    def __init__(
        self,
        message: str | None = None,
        *,
        field: str = "",
        got: object = None,
        allowed: str | Collection[object] = "",
        where: str = "",
        hint: str = "",
    ):
        """Compose the message.

        Args:
            message: what was got, in words; None for ``form``.
            field: see the class.
            got: see the class.
            allowed: see the class.
            where: follows the word "allowed", such as "on this server".
            hint: ends the message, after a semicolon.
        """
        listed = allowed if isinstance(allowed, str) else ", ".join(map(str, allowed))
        where = f" {where}" if where else ""
        if message is None:
            message = self.form.format(field=field, got=got, allowed=listed, where=where)
        elif listed:
            message = f"{message}; allowed{where}: {listed}"
        super().__init__(f"{message}; {hint}" if hint else message)
        self.field, self.got, self.allowed = field, got, allowed

    def reworded(self, message: str, kind: type[SparseArgumentError] | None = None) -> SparseArgumentError:
        """Return an error with this message and the same fields; of the same kind unless another one is given."""
        found = (kind or type(self))(message)
        found.field, found.got, found.allowed = self.field, self.got, self.allowed
        return found


@contextmanager
def within(origin: str, kind: type[SparseArgumentError] = SparseArgumentError) -> Iterator[None]:
    """Make a ValueError in the block one of this kind that has the same fields and begins with ``origin``."""
    try:
        yield
    except ValueError as error:
        message = f"{origin}: {error}"
        raise (error.reworded(message, kind) if isinstance(error, SparseArgumentError) else kind(message)) from error


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the question whether the known name that resembles ``name`` most was meant, or an empty text."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {found[0]!r}?" if found else ""
