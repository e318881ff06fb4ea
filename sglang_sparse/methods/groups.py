"""The methods of one phase by layer: mostly one, and by rules several, or several configs of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.methods.base import AuxSpec, DecodeMethod, ModelShape
from sglang_sparse.methods.config import DEFAULT_CROSSOVER, MethodConfig, RectifyConfig, SparseConfig
from sglang_sparse.methods.prefill import PrefillConfig, PrefillMethod
from sglang_sparse.methods.support import Architecture, ModelConfig

M = TypeVar("M", DecodeMethod, PrefillMethod)


class LayerGroups(Generic[M]):
    """Methods of one phase, in the order of their rules; a method's config says which layers it has.

    Args:
        names: what the methods are called in the registry.
        methods: at least one. Several have no common layer, and their configs agree in the fields of ``shared``.

    Attributes:
        config: the method's; of several the fields of ``shared``, and the layers of all.
        more_counts: names of what the methods count on the device themselves.
    """

    shared: ClassVar[type[SparseConfig]]
    config: Any

    def __init__(self, names: Sequence[str], methods: Sequence[M]):
        self.names, self.methods = tuple(names), tuple(methods)
        self.config = methods[0].config
        if len(methods) > 1:
            fields = {field: getattr(self.config, field) for field in self.shared.model_fields}
            fields["layers"] = ",".join(str(method.config.layers) for method in methods)
            self.config = self.shared.model_validate(fields)
        self.more_counts = tuple(dict.fromkeys(name for method in methods for name in method.more_counts))

    @property
    def described(self) -> str:
        """The method's name, or where each of several has its layers."""
        if len(self.methods) == 1:
            return self.names[0]
        pairs = zip(self.names, self.methods, strict=True)
        return ", ".join(f"{name} in layers {method.config.layers}" for name, method in pairs)

    def with_configs(self, configs: Sequence[SparseConfig]) -> Self:
        """Return the same methods with other configs, one for each; a method whose config is the same stays."""
        pairs = zip(self.methods, configs, strict=True)
        methods = [one if config is one.config else type(one)(config) for one, config in pairs]  # type: ignore[arg-type]
        return type(self)(self.names, methods)  # type: ignore[arg-type]

    def refuse(self, model_config: Architecture) -> str | None:
        """Say why a method cannot serve a model; None where all can."""
        return next((reason for method in self.methods if (reason := method.refuse(model_config))), None)

    def refuse_weights(self, model_config: ModelConfig) -> str | None:
        """Say why a config is not for a model's weights, or None; asked only if these are available."""
        return next((reason for method in self.methods if (reason := method.refuse_weights(model_config))), None)

    def warnings(self) -> tuple[str, ...]:
        """Return warnings for the user at start."""
        return tuple(dict.fromkeys(text for method in self.methods for text in method.warnings()))


class DecodeGroups(LayerGroups[DecodeMethod]):
    """Decode methods by layer. A batch runs sparse or dense as a whole.

    Args:
        names: see ``LayerGroups``.
        methods: likewise; several ``combine`` and are of one kind of attention.

    Attributes:
        crossover_tokens: the config's number, or what "auto" stands for; a server that starts puts here what was
            measured for its GPU and its model.
        deterministic: whether each row runs as if it were alone, see ``attention/plan.py``; a server that starts puts
            here what its flags say.
        planned: the last plan that ``plan_decode`` made, behind what it depends on.
    """

    shared = RectifyConfig
    config: MethodConfig
    deterministic: bool = False
    planned: tuple[object, object] | None = None

    def __init__(self, names: Sequence[str], methods: Sequence[DecodeMethod]):
        super().__init__(names, methods)
        asked = self.config.crossover_tokens
        self.crossover_tokens = DEFAULT_CROSSOVER if asked == "auto" else asked

    @property
    def configs(self) -> tuple[MethodConfig, ...]:
        """The configurations that a request's fields may change, one for each method."""
        return tuple(method.config for method in self.methods)

    @property
    def attention(self) -> str:
        """The kind of attention that all serve: that of a method which serves no other, if there is one."""
        return next((method for method in self.methods if not method.latents), self.methods[0]).attention

    def sparse_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers that run sparse in a model of so many, ascending.

        Raises:
            ValueError: a config names layers that the model does not have.
        """
        return tuple(sorted(layer for method in self.methods for layer in method.sparse_layers(num_layers)))

    def aux_specs(self, model: ModelShape) -> tuple[AuxSpec, ...]:
        """Return the buffers of all methods, each for its method's layers on this rank."""
        return tuple(
            replace(spec, layers=frozenset(model.here(method.sparse_layers(model.num_layers))))
            for method in self.methods
            for spec in method.aux_specs(model)
        )

    def prefill_fields(self) -> dict[str, object] | None:
        """See ``DecodeMethod.prefill_fields``; with rules of several methods prefill has a separate flag."""
        return self.methods[0].prefill_fields() if len(self.methods) == 1 else None

    def warnings(self) -> tuple[str, ...]:
        """Return warnings for the user at start, also about methods of both phases that only decode in their layers."""
        several = zip(self.names, self.configs, strict=True) if len(self.methods) > 1 else ()
        both = [name for name, config in several if config.phase_fields]
        own = [f"{name} only decodes in its layers; --sparse-prefill-method decides prefill" for name in both]
        return tuple(dict.fromkeys((*own, *super().warnings())))


class PrefillGroups(LayerGroups[PrefillMethod]):
    """Prefill methods by layer.

    A token's KV depends on what all layers below did, so KV is a function of the tokens before it only at the end of a
    group of every method. All methods begin to be sparse at one position.

    Args:
        names: see ``LayerGroups``.
        methods: likewise; several may differ in ``crossover_tokens``.

    Attributes:
        group_tokens: tokens of whole groups of each method.
        dense_below: where all methods begin, at the end of a group of all.

    Raises:
        ValueError: one of several begins elsewhere than it is told to, or has a separate rule of what may be shared.
    """

    shared = PrefillConfig
    config: PrefillConfig

    def __init__(self, names: Sequence[str], methods: Sequence[PrefillMethod]):
        super().__init__(names, methods)
        self.group_tokens = math.lcm(*(method.group_tokens for method in methods))
        if len(methods) > 1:
            begin = -(-max(method.dense_below for method in methods) // self.group_tokens) * self.group_tokens
            update = {"crossover_tokens": begin}
            self.methods = tuple(type(one)(one.config.model_copy(update=update)) for one in methods)
            for name, method in zip(names, self.methods, strict=True):
                _require_begin(name, method, begin)
        self.dense_below = self.methods[0].dense_below

    @property
    def configs(self) -> tuple[PrefillConfig, ...]:
        """The configurations that a request's fields may change, one for each method."""
        return tuple(method.config for method in self.methods)

    def boundary(self, position: int) -> int:
        """Return the last position, up to ``position``, that is one of ``PrefillMethod.boundary`` for all methods."""
        found = min(method.boundary(position) for method in self.methods)
        return found if found == position else self.boundary(found)

    def dense_from(self, prompt: int) -> int:
        """See ``PrefillMethod.dense_from``."""
        return self.methods[0].dense_from(prompt)

    def refuse(self, model_config: Architecture) -> str | None:
        """Say what a method refuses, or that no prompt of the model has a group of all."""
        context = getattr(model_config, "context_len", None)
        if len(self.methods) > 1 and context and self.group_tokens > context:
            pairs = zip(self.names, self.methods, strict=True)
            sizes = ", ".join(f"{method.group_tokens} of {name}" for name, method in pairs)
            return f"groups of all layers have {self.group_tokens} tokens ({sizes}), and the context has {context}"
        return super().refuse(model_config)


def _require_begin(name: str, method: PrefillMethod, begin: int) -> None:
    own = [rule for rule in ("boundary", "dense_from") if getattr(type(method), rule) != getattr(PrefillMethod, rule)]
    if method.dense_below != begin or own:
        found = f"has its own {own[0]}()" if own else f"begins at {method.dense_below} where {begin} is asked"
        raise SparseArgumentError(f"{name} {found}", field="layers", got=name, allowed="all sparse layers for it alone")
