"""Configurations: the fields that all methods have, their validation, and the messages where they are wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeGuard, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from sglang_sparse.errors import SparseArgumentError, nearest, within
from sglang_sparse.methods.layers import LAYERS_FORM, parse_layers

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64)
# The value of "auto" without a measurement of the GPU and the shape, see ``attention/crossover.py``.
DEFAULT_CROSSOVER = 16384


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is an int or a float, and no bool."""
    return type(value) in (int, float)


def _crossover_is_a_count(value: object) -> object:
    if value != "auto" and (type(value) is not int or value < 0):
        raise ValueError('must be "auto" or an integer of at least 0')
    return value


Crossover = Annotated[int | Literal["auto"], BeforeValidator(_crossover_is_a_count)]


class SparseConfig(BaseModel):
    """Fields that every method has, of decode or prefill.

    Attributes:
        request_fields: the fields that a single request may override.
        phase_fields: those of them that both phases may have, so that a request may give each its own by a mapping.
        limits: the fields below which something runs dense; ``dense_fallback: never`` makes them 0.
    """

    request_fields: ClassVar[tuple[str, ...]] = ()
    # Fields of which one is given at most: each, and the one that it replaces.
    replaces: ClassVar[Mapping[str, str]] = {}
    phase_fields: ClassVar[tuple[str, ...]] = ()
    limits: ClassVar[tuple[str, ...]] = ("crossover_tokens",)

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    layers: str | list[int] = Field("all", description='Layers that run sparse: "all", a range "2-", or a list.')
    dense_fallback: Literal["auto", "never"] = Field(
        "auto", description='"never" is for tests: short rows and batches run sparse too, as if every limit were 0.'
    )
    check_exactness: bool = Field(
        False, description="Debug: an idle server proves by recomputation that the prefix cache is exact."
    )

    @classmethod
    def from_checkpoint(cls, fields: dict[str, object], read: Callable[[], Mapping[str, object]]) -> dict[str, object]:
        """Return a user's fields with what the model's config.json says instead of those that ask for it.

        Args:
            fields: what the user gave.
            read: returns config.json.

        Raises:
            ValueError: it does not say it; names the field.
        """
        return fields

    @field_validator("layers", mode="before")
    @classmethod
    def _layers_have_a_form(cls, value: object) -> object:
        if isinstance(value, str) or (isinstance(value, list) and all(type(layer) is int for layer in value)):
            return value
        raise ValueError(f"must be {LAYERS_FORM}")

    @field_validator("layers")
    @classmethod
    def _layers_parse(cls, value: str | list[int]) -> str | list[int]:
        parse_layers(value, num_layers=None)
        return value

    @model_validator(mode="before")
    @classmethod
    def _never_means_no_limits(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("dense_fallback") == "never":
            for name in cls.limits:
                # Configs that are written in full have 0 here.
                if (got := data.get(name)) not in (None, 0, "auto"):
                    message = f"{name}: got {got!r} together with dense_fallback: never, which makes it 0"
                    raise SparseArgumentError(message, field=name, got=got, allowed="one of them")
            return {**data, **dict.fromkeys(cls.limits, 0)}
        return data


class MethodConfig(SparseConfig):
    """Fields that every decode method has; a method adds its own by subclassing."""

    limits: ClassVar[tuple[str, ...]] = ("min_seq_len", "crossover_tokens")

    page_size: int = Field(16, description="Tokens per KV page, which is the block of the selection: 1, 2, 4, … 64.")
    min_seq_len: int = Field(4096, ge=0, description="Rows with fewer KV tokens attend to all of them.")
    crossover_tokens: Crossover = Field(
        "auto",
        description="Batches with fewer KV tokens in all sparse rows run dense; "
        f"auto: as measured for this GPU, else {DEFAULT_CROSSOVER}.",
    )

    @field_validator("page_size")
    @classmethod
    def _page_size_is_a_power_of_two(cls, value: int) -> int:
        if value not in PAGE_SIZES:
            raise ValueError(f"must be a power of two from 1 to {PAGE_SIZES[-1]}")
        return value


class RectifyConfig(MethodConfig):
    """Fields of a method whose approximate KV dense passes make exact again."""

    request_fields: ClassVar[tuple[str, ...]] = ("rectify_interval",)

    layers: str | list[int] = Field(
        "all",
        description='Layers that run sparse: "all", a range "2-", or a list; a mapping has rules for layers, '
        "see docs/layers.md.",
    )
    rectify_interval: int = Field(
        32, ge=0, description="Tokens between dense passes that re-encode a request's last tokens; 0: never."
    )
    rectify_max_batch: int = Field(
        8, ge=1, description="Requests that one step rectifies; more only if this many cannot keep up."
    )
    rectify_on_finish: bool = Field(
        False, description="Rectify a finished request's last tokens too, so that all its pages can be shared."
    )

    @field_validator("rectify_interval")
    @classmethod
    def _one_token_is_no_interval(cls, value: int) -> int:
        if value == 1:
            raise ValueError("must be 0 (never) or at least 2: at 1 every step would be dense")
        return value

    @field_validator("rectify_on_finish")
    @classmethod
    def _on_finish_needs_an_interval(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("rectify_interval") == 0:
            raise ValueError("needs rectification, and rectify_interval is 0 (never)")
        return value


# What is said once for all layers of a server, whatever methods they have.
SHARED = tuple(field for field in RectifyConfig.model_fields if field != "layers")


C = TypeVar("C", bound=SparseConfig)


def validated(
    origin: str,
    config_class: type[C],
    fields: dict[str, object],
    checkpoint: Callable[[], Mapping[str, object]] | None,
) -> C:
    """Validate a config.

    Args:
        origin: what the message begins with.
        config_class: of the method.
        fields: what the user gave.
        checkpoint: reads the model's config.json, which a config may ask for; None without a model.

    Raises:
        SparseArgumentError: names each wrong field, what was got and what is allowed.
    """
    with within(origin):
        try:
            given = config_class.from_checkpoint(fields, checkpoint) if checkpoint else fields
            return config_class.model_validate(given)
        except ValidationError as error:
            found = [refused_value(detail, list(config_class.model_fields)) for detail in error.errors()]
            raise found[0].reworded("; ".join(dict.fromkeys(map(str, found)))) from error


def refused_value(detail: ErrorDetails, fields: Sequence[str] = ()) -> SparseArgumentError:
    """Return one of pydantic's errors as one that names the field, what was got and what is allowed.

    Args:
        detail: an item of pydantic's ``errors()``.
        fields: the fields that there are.
    """
    field, got = str(detail["loc"][0]) if detail["loc"] else "config", detail["input"]
    if detail["type"] == "extra_forbidden":
        message = f"unknown field {field!r}, allowed: {', '.join(fields)}"
        found = SparseArgumentError(message, field=field, got=got, hint=nearest(field, fields))
        found.allowed = fields
        return found
    message = f"{field}: got {got!r}; {detail['msg'].removeprefix('Value error, ')}"
    # A validator of the whole config names the field itself.
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, SparseArgumentError):
        field, got = cause.field, cause.got
    return SparseArgumentError(message, field=field, got=got)
