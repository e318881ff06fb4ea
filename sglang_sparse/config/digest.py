"""The fields that decide a server's answers, and their digest.

Workers behind one router and ranks of one server must have the same ones. A field is named as a user writes it:
``--sparse-method``, ``--sparse-config active_ratio``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, NotRequired, TypedDict

from sglang_sparse.config.machine import PACKAGE, package_versions

if TYPE_CHECKING:
    from sglang_sparse.config.settings import Settings


class Phase(TypedDict):
    """The method of a phase and its config in full; None twice for a dense phase."""

    method: str | None
    config: dict[str, object] | None


class Published(Phase):
    """The fields of ``/server_info`` that say what decides answers; method and config are those of decode."""

    versions: dict[str, str]
    prefill: NotRequired[Phase]


def published(settings: Settings | None) -> Published:
    """Return what ``/server_info`` publishes of a server's methods; None stands for a server without any."""
    found = Published(versions=package_versions(), method=None, config=None)
    if settings and settings.name:
        crossover = settings.decode.crossover_tokens
        found["method"], found["config"] = settings.name, {**settings.resolved, "crossover_tokens": crossover}
    if settings and settings.prefill:
        config = {**settings.prefill_resolved, "crossover_tokens": settings.prefill.dense_below}
        found["prefill"] = Phase(method=settings.prefill_name, config=config)
    return found


def fields_of(server: Published, page_size: int | None) -> dict[str, object]:
    """Return the fields that decide a server's answers."""
    dense = Phase(method=None, config=None)
    found: dict[str, object] = {PACKAGE: server["versions"][PACKAGE], "--page-size": page_size}
    for flag, phase in (("--sparse", server), ("--sparse-prefill", server.get("prefill", dense))):
        found[f"{flag}-method"] = phase["method"]
        found |= {f"{flag}-config {name}": value for name, value in (phase["config"] or {}).items()}
    return found


def digest(fields: Mapping[str, object]) -> str:
    """Return a digest of fields, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def differences(fields: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """Return the fields that differ, each with its values and who has them.

    Where methods differ, fields of one method alone are left out.

    Args:
        fields: of each worker or rank, by its name.
    """
    shared = set.intersection(*(set(one) for one in fields.values()))
    found: dict[str, str] = {}
    for field in [name for name in next(iter(fields.values())) if name in shared]:
        owners: dict[str, list[str]] = {}
        for owner, values in fields.items():
            owners.setdefault(json.dumps(values[field], sort_keys=True), []).append(owner)
        if len(owners) > 1:
            found[field] = "; ".join(f"{value} ({', '.join(names)})" for value, names in owners.items())
    return found
