"""From ``--sparse-method`` and ``--sparse-config`` to one validated object."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from sglang_sparse import registry
from sglang_sparse.method import DecodeMethod, MethodConfig, RectifyConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    class SparseServerArgs(ServerArgs):
        """SGLang's class as ``cli.add_server_args`` leaves it."""

        sparse_method: str | None
        sparse_prefill_method: str | None
        sparse_config: str | dict[str, Any] | None


class SparseArgumentError(ValueError):
    """A sparse flag, config field or combination that cannot be served; the message is meant for the user."""


@dataclass(frozen=True)
class Settings:
    """What the user asked for, validated: one instance a process."""

    name: str
    method: DecodeMethod

    @property
    def config(self) -> MethodConfig:
        """The method's configuration."""
        return self.method.config

    @property
    def rectify(self) -> RectifyConfig | None:
        """The same, of a method that rectification can make exact; None for others."""
        config = self.method.config
        return config if isinstance(config, RectifyConfig) else None


_PARSERS = {
    ".json": (json.loads, json.JSONDecodeError),
    ".toml": (tomllib.loads, tomllib.TOMLDecodeError),
    ".yaml": (yaml.safe_load, yaml.YAMLError),
    ".yml": (yaml.safe_load, yaml.YAMLError),
}


def read_config(value: str | dict[str, Any] | None) -> dict[str, Any]:
    """Read the value of ``--sparse-config``.

    Args:
        value: inline JSON (it starts with ``{``), a path to a .json, .toml, .yaml or .yml file, a mapping (from
            ``sglang.Engine``), or None.

    Raises:
        SparseArgumentError: the file is missing, unreadable, of another type or cannot be parsed, or it does not
            hold a mapping.
    """
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise SparseArgumentError(f"--sparse-config: got {type(value).__name__}, allowed: JSON text, a path, a mapping")
    if value.lstrip().startswith("{"):
        return _parse(value, ".json", "--sparse-config")
    path = Path(value)
    if path.suffix not in _PARSERS:
        raise SparseArgumentError(
            f"--sparse-config: got {value!r}, allowed: inline JSON that starts with '{{', "
            f"or a file that ends in {', '.join(_PARSERS)}"
        )
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SparseArgumentError(f"--sparse-config: cannot read {value!r}: {error}") from error
    return _parse(text, path.suffix, f"--sparse-config {value}")


def _parse(text: str, suffix: str, origin: str) -> dict[str, Any]:
    parse, parse_error = _PARSERS[suffix]
    try:
        data = parse(text)
    except parse_error as error:
        raise SparseArgumentError(f"{origin}: not valid {suffix[1:].upper()}: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise SparseArgumentError(f"{origin}: got a {type(data).__name__}, allowed: a mapping of config fields")
    return data


def build(method_name: str, fields: dict[str, Any]) -> Settings:
    """Validate a method's config.

    Raises:
        SparseArgumentError: the method is unknown, or fields are unknown, mistyped or out of range; each is named
            with what was got and what is allowed.
    """
    try:
        method_class = registry.load_decode_method(method_name)
    except ValueError as error:
        raise SparseArgumentError(str(error)) from error
    try:
        config = method_class.config_class.model_validate(fields)
    except ValidationError as error:
        raise SparseArgumentError(_explain(method_name, method_class.config_class, error)) from error
    return Settings(method_name, method_class(config))


def explain_value(detail: Mapping[str, Any]) -> str:
    """Say of one of pydantic's errors which field it is about, what was got and what is allowed."""
    field = detail["loc"][0] if detail["loc"] else "config"
    return f"{field}: got {detail['input']!r}; {detail['msg'].removeprefix('Value error, ')}"


def _explain(method_name: str, config_class: type[MethodConfig], error: ValidationError) -> str:
    allowed = list(config_class.model_fields)
    messages = []
    for detail in error.errors():
        field = str(detail["loc"][0]) if detail["loc"] else "config"
        if detail["type"] == "extra_forbidden":
            nearest = difflib.get_close_matches(field, allowed, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            message = f"unknown field {field!r}, allowed: {', '.join(allowed)}{hint}"
        else:
            message = explain_value(detail)
        if message not in messages:
            messages.append(message)
    return f"--sparse-config of {method_name}: " + "; ".join(messages)


def settings_of(server_args: SparseServerArgs) -> Settings | None:
    """Return the settings of a server, or None where no sparse method was asked for.

    The main process has replaced ``sparse_config`` by the resolved fields as JSON, so a scheduler sees what was
    validated even if a config file changed meanwhile.
    """
    name = getattr(server_args, "sparse_method", None)
    return _settings(name, str(server_args.sparse_config)) if name else None


@lru_cache(maxsize=1)
def _settings(name: str, resolved: str) -> Settings:
    return build(name, json.loads(resolved))
