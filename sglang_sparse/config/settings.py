"""Turn ``--sparse-method``, ``--sparse-config`` and those of prefill into one validated object."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from sglang_sparse.config import arguments
from sglang_sparse.config.layer_rules import build_prefill_rules, build_rules
from sglang_sparse.config.trtllm import as_ours
from sglang_sparse.errors import SparseArgumentError, within
from sglang_sparse.methods import registry
from sglang_sparse.methods.base import DecodeMethod
from sglang_sparse.methods.config import (
    PAGE_SIZES,
    MethodConfig,
    RectifyConfig,
    SparseConfig,
    validated,
)
from sglang_sparse.methods.groups import DecodeGroups, PrefillGroups

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments


@dataclass(frozen=True)
class Settings:
    """The validated methods and configs of a server, one instance per process.

    Attributes:
        name: the decode method's; None for dense decode.
        decode: the decode methods; a plain ``DecodeMethod`` for dense decode.
        prefill_name: the prefill method's; None for dense prefill.
        prefill: the prefill methods.
        rules: the config's ``layers`` in full where it is a mapping, see ``config/layer_rules.py``.
        prefill_rules: the same of the prefill method's.
        asked: what the flags ask for, where this server has one of its phases only; requests are validated against it.
    """

    name: str | None
    decode: DecodeGroups
    prefill_name: str | None = None
    prefill: PrefillGroups | None = None
    rules: Mapping[str, object] | None = None
    prefill_rules: Mapping[str, object] | None = None
    asked: Settings | None = None

    @property
    def flag(self) -> str:
        """The flag and its value that asked for sparsity."""
        if self.name is None:
            return f"--sparse-prefill-method {self.prefill_name}"
        return f"--sparse-method {self.name}"

    @property
    def comes_along(self) -> bool:
        """Whether the prefill method is the one that the decode method brings, without a separate flag."""
        own = self.decode.prefill_fields() if self.name == self.prefill_name else None
        if own is None or self.prefill is None or self.prefill_rules:
            return False
        return self.prefill.config == type(self.prefill.config).model_validate(own)

    @property
    def prefill_flag(self) -> str:
        """The flag and its value that asked for the prefill method."""
        return self.flag if self.comes_along else f"--sparse-prefill-method {self.prefill_name}"

    @property
    def config(self) -> MethodConfig:
        """The decode method's configuration, or what several share."""
        return self.decode.config

    @property
    def method(self) -> DecodeMethod:
        """The first decode method: the only one but for rules by layer."""
        return self.decode.methods[0]

    @property
    def resolved(self) -> dict[str, object]:
        """The decode method's configuration in full, in the form of ``--sparse-config``."""
        return _resolved(self.config, self.rules)

    @property
    def prefill_resolved(self) -> dict[str, object]:
        """The same of the prefill method, in the form of ``--sparse-prefill-config``; empty without one."""
        return _resolved(self.prefill.config, self.prefill_rules) if self.prefill else {}

    @property
    def passes_through(self) -> bool:
        """Whether SGLang computes what it computes without the methods, and this plugin only observes."""
        return self.prefill is None and self.method.passes_through

    @property
    def check_exactness(self) -> bool:
        """Whether an idle server proves that its prefix cache is exact."""
        return self.config.check_exactness or (self.prefill is not None and self.prefill.config.check_exactness)

    @property
    def rectify(self) -> RectifyConfig | None:
        """The same, of a method that rectification can make exact; None for others."""
        config = self.decode.config
        return config if isinstance(config, RectifyConfig) else None

    @property
    def rectifies(self) -> bool:
        """Whether requests are rectified that do not ask otherwise."""
        return bool(self.rectify and self.rectify.rectify_interval)


def only_role(args: Arguments) -> str:
    """Return SGLang's ``--disaggregation-mode``; "null" where a server may change it, and needs the methods of both."""
    return "null" if getattr(args, "enable_pd_role_switch", False) else getattr(args, "disaggregation_mode", "null")


def of_role(settings: Settings, mode: str) -> Settings | None:
    """Return the methods of the phase that a server has, so that both servers of a pair may get the same flags.

    Args:
        settings: what the flags ask for.
        mode: see `only_role`.

    Returns:
        The methods, or None where the flags ask for none of this phase.
    """
    if mode == "null" or settings.method.selects_in_model:
        return settings
    if mode == "decode":
        without = replace(settings, prefill_name=None, prefill=None, prefill_rules=None, asked=settings)
        return without if settings.name else None
    dense = build(None, {"page_size": settings.config.page_size}).decode
    without = replace(settings, name=None, decode=dense, rules=None, asked=settings)
    return without if settings.prefill else None


def _resolved(config: SparseConfig, rules: Mapping[str, object] | None) -> dict[str, object]:
    return {**config.model_dump(mode="json"), **({"layers": dict(rules)} if rules else {})}


def build(
    name: str | None,
    fields: dict[str, object],
    prefill_name: str | None = None,
    prefill_fields: dict[str, object] | None = None,
    checkpoint: Callable[[], Mapping[str, object]] | None = None,
) -> Settings:
    """Validate the methods' configs.

    Args:
        name: the decode method's; None for dense decode.
        fields: its config.
        prefill_name: the prefill method's; None for the decode method's own prefill method, or dense prefill.
        prefill_fields: its config.
        checkpoint: reads the model's config.json, which a config may need; None without a model.

    Raises:
        SparseArgumentError: a method is unknown, or fields are unknown, mistyped or out of range; names each with its
            value and the allowed ones.
    """
    method_class = registry.load_decode_method(name) if name else DecodeMethod
    prefill_class = registry.load_prefill_method(prefill_name) if prefill_name else None
    fields = _as_ours(f"--sparse-config of {name}", name, fields)
    prefill_fields = prefill_fields and _as_ours(
        f"--sparse-prefill-config of {prefill_name}", prefill_name, prefill_fields
    )
    rules = None
    if name and isinstance(fields.get("layers"), dict):
        decode, rules = build_rules(name, fields, checkpoint)
    else:
        config = validated(f"--sparse-config of {name}", method_class.config_class, fields, checkpoint)
        decode = DecodeGroups([str(name)], [method_class(config)])
    # Asked for by its name and without a separate config, it is the one that comes along all the same.
    comes_along = name and (prefill_name is None or (prefill_name == name and not prefill_fields))
    if name and comes_along and (own := decode.prefill_fields()) is not None:
        prefill_name, prefill_fields, prefill_class = name, own, registry.load_prefill_method(name)
    origin = f"--sparse-prefill-config of {prefill_name}"
    prefill, prefill_rules = None, None
    if prefill_name and prefill_fields and isinstance(prefill_fields.get("layers"), dict):
        prefill, prefill_rules = build_prefill_rules(prefill_name, prefill_fields, checkpoint)
    elif prefill_class:
        config = validated(origin, prefill_class.config_class, prefill_fields or {}, checkpoint)
        prefill = PrefillGroups([str(prefill_name)], [prefill_class(config)])
    if name == prefill_name and prefill and prefill_fields and not comes_along:
        _require_own(origin, prefill_fields, decode.config, prefill)
    return Settings(name, decode, prefill_name, prefill, rules, prefill_rules)


def _as_ours(origin: str, name: str | None, fields: dict[str, object]) -> dict[str, object]:
    with within(origin):
        return as_ours(name, fields) if name else fields


def _require_own(origin: str, fields: Mapping[str, object], decode: SparseConfig, prefill: PrefillGroups) -> None:
    """Refuse a config that does not repeat what the decode method's says of prefill: nothing is taken over."""
    for field in decode.phase_fields:
        value = getattr(decode, field).get("prefill")
        own = all(field in config.model_fields_set for config in prefill.configs if field in type(config).model_fields)
        if value and field in decode.model_fields_set and not own:
            raise SparseArgumentError(
                f"{origin}: got {json.dumps(fields)} without {field}, and --sparse-config has {value:g} for prefill, "
                "which a separate prefill config does not inherit",
                field=field,
                allowed='repeat the share or factor of prefill here, or leave it out of --sparse-config: {"decode": …}',
            )


def prefill_chunk(server_args: object) -> int | None:
    """Return the largest chunk of prefill in tokens; None if prompts are not cut."""
    chunk = arguments.of(server_args).chunked_prefill_size or -1
    return chunk if chunk > 0 else None


def settings_of(server_args: object) -> Settings | None:
    """Return the settings of a server, or None without a sparse method.

    The main process has replaced the configs by the resolved fields as JSON, so a scheduler sees the validated fields
    even if a config file has changed.
    """
    record, settings = _LAST[0]
    if server_args is not record:
        settings = _read(arguments.of(server_args))
        if getattr(server_args, "_resolution_finished", False):
            # Resolved arguments never change, and are read several times a step.
            _LAST[0] = server_args, settings
    return settings


def hooked_settings_of(server_args: object) -> Settings | None:
    """Return the settings of a server whose SGLang is to behave differently, or None.

    What only observes a server asks `settings_of`.
    """
    settings = settings_of(server_args)
    return None if settings is None or settings.passes_through else settings


def current_settings() -> Settings | None:
    """Return the settings of this process's server; None where it is dense, or where there is none."""
    from sglang.srt.runtime_context import get_server_args

    try:
        server_args = get_server_args()
    except ValueError:
        return None
    return hooked_settings_of(server_args)


# The last record that was read after its resolution, and its settings.
_LAST: list[tuple[object, Settings | None]] = [(None, None)]


def _read(server_args: Arguments) -> Settings | None:
    name = getattr(server_args, "sparse_method", None)
    prefill = getattr(server_args, "sparse_prefill_method", None)
    if not name and not prefill:
        return None
    resolved = server_args.sparse_config if name else json.dumps(page_size_fields(server_args))
    return _settings(
        name or None,
        str(resolved),
        prefill or None,
        str(getattr(server_args, "sparse_prefill_config", None)),
        only_role(server_args),
    )


def page_size_fields(server_args: Arguments) -> dict[str, object]:
    """Return the config of dense decode: the server's page size. Unsupported sizes are refused elsewhere."""
    return {"page_size": server_args.page_size} if server_args.page_size in PAGE_SIZES else {}


# Cached for every server of this process, because methods store facts about the model.
@cache
def _settings(
    name: str | None, resolved: str, prefill_name: str | None, prefill_resolved: str, mode: str
) -> Settings | None:
    prefill_fields = json.loads(prefill_resolved) if prefill_name else None
    return of_role(build(name, json.loads(resolved), prefill_name, prefill_fields), mode)
