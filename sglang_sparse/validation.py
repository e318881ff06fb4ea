"""From fields of a user to a validated config, or one message that says what was wrong."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from sglang_sparse.methods.config import SparseConfig

C = TypeVar("C", bound=SparseConfig)


class SparseArgumentError(ValueError):
    """A sparse flag, config field or combination that cannot be served; the message is meant for the user."""


def validated(
    origin: str,
    config_class: type[C],
    fields: dict[str, Any],
    checkpoint: Callable[[], Mapping[str, Any]] | None,
) -> C:
    """Validate a config.

    Args:
        origin: what the message begins with.
        config_class: of the method.
        fields: what the user gave.
        checkpoint: reads the model's config.json, which a config may ask for; None where no model is at hand.

    Raises:
        SparseArgumentError: names each wrong field, what was got and what is allowed.
    """
    try:
        return config_class.model_validate(config_class.from_checkpoint(fields, checkpoint) if checkpoint else fields)
    except ValidationError as error:
        raise SparseArgumentError(_explain(origin, config_class, error)) from error
    except ValueError as error:
        raise SparseArgumentError(f"{origin}: {error}") from error


def explain_value(detail: Mapping[str, Any]) -> str:
    """Say of one of pydantic's errors which field it is about, what was got and what is allowed."""
    field = detail["loc"][0] if detail["loc"] else "config"
    return f"{field}: got {detail['input']!r}; {detail['msg'].removeprefix('Value error, ')}"


def _explain(origin: str, config_class: type[SparseConfig], error: ValidationError) -> str:
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
    return f"{origin}: " + "; ".join(messages)
