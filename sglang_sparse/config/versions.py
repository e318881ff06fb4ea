"""The SGLang versions this release works with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from sglang_sparse import __version__

SUPPORTED_SGLANG = ("0.5.23",)


class UnsupportedSGLangError(RuntimeError, ValueError):
    """This release does not work with the installed SGLang; the message has the version to install.

    A RuntimeError, since the environment is wrong, and a ValueError, since ``sglang.Engine`` promises that for every
    refusal at start.

    Attributes:
        got: the installed version, or "not installed".
        allowed: the versions to install.
    """

    field, allowed = "sglang", SUPPORTED_SGLANG

    def __init__(self, reason: str, got: str | None = None):
        super().__init__(reason)
        self.got = got or installed_sglang()

    def __str__(self) -> str:
        works = f"sglang_sparse {__version__} works with SGLang {', '.join(self.allowed)}"
        return f"{self.args[0]}; {works}: pip install sglang=={self.allowed[-1]}"


def installed_sglang() -> str:
    """Return the installed SGLang version, or ``"not installed"``."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "not installed"


def require_supported_sglang(installed: str | None = None) -> None:
    """Refuse an SGLang version that this release does not support.

    Args:
        installed: the version to check; the installed one by default.

    Raises:
        UnsupportedSGLangError: the version is not one of ``SUPPORTED_SGLANG``.
    """
    installed = installed or installed_sglang()
    if installed not in SUPPORTED_SGLANG:
        raise UnsupportedSGLangError(f"got SGLang {installed}", installed)
