"""Read the values of ``--sparse-config`` and ``--sparse-prefill-config``: inline JSON, a file, or a mapping."""

from __future__ import annotations

import json
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from sglang_sparse.errors import SparseArgumentError


class _Twice(ValueError):
    """A mapping has a name twice; Python would keep the last."""


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(f"it has {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


class _OnceLoader(yaml.SafeLoader):
    """YAML that refuses a name twice in a mapping, and keeps numeric names as they are written."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        _once([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        for key, _ in node.value:
            # 012 and 1_0 would be 10.
            if key.tag == "tag:yaml.org,2002:int":
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


_PARSERS = {
    ".json": (partial(json.loads, object_pairs_hook=_once), json.JSONDecodeError),
    ".toml": (tomllib.loads, tomllib.TOMLDecodeError),
    ".yaml": (partial(yaml.load, Loader=_OnceLoader), yaml.YAMLError),
    ".yml": (partial(yaml.load, Loader=_OnceLoader), yaml.YAMLError),
}


def read_config(value: str | dict[str, object] | None, flag: str = "--sparse-config") -> dict[str, object]:
    """Read the value of ``--sparse-config`` or ``--sparse-prefill-config``.

    Args:
        flag: the flag, for errors.
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
        message = f"{flag}: got {type(value).__name__}, allowed: JSON text, a path, a mapping"
        raise SparseArgumentError(message, field=flag, got=value)
    if value.lstrip().startswith("{"):
        return _parse(value, ".json", flag)
    path = Path(value)
    if path.suffix not in _PARSERS:
        allowed = f"inline JSON that starts with '{{', or a file that ends in {', '.join(_PARSERS)}"
        raise SparseArgumentError(field=flag, got=value, allowed=allowed)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SparseArgumentError(f"{flag}: cannot read {value!r}: {error}", field=flag, got=value) from error
    return _parse(text, path.suffix, flag, value)


def _parse(text: str, suffix: str, flag: str, path: str = "") -> dict[str, object]:
    parse, parse_error = _PARSERS[suffix]
    origin = f"{flag} {path}".strip()
    try:
        data = parse(text)
    except (parse_error, _Twice) as error:
        message = f"{origin}: not valid {suffix[1:].upper()}: {error}"
        raise SparseArgumentError(message, field=flag, got=path or text) from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        message = f"{origin}: got a {type(data).__name__}, allowed: a mapping of config fields"
        raise SparseArgumentError(message, field=flag, got=data)
    return data


def checkpoint_config(path: str, revision: str | None) -> dict[str, object]:
    """Read the config.json of a checkpoint, a folder or one of the hub.

    Raises:
        OSError: there is none.
    """
    from transformers import PretrainedConfig

    return PretrainedConfig.get_config_dict(path, revision=revision)[0]
