"""Several methods, or configs of one, in one model: each has layers of its own.

Everything that asks a method about memory, limits and refusals asks a ``Composite``; a plan, a view and a decode path
have a part for each of its methods. Page table, lengths and scratch of a view are the same for all parts whose blocks
have one size, which take turns in them as the layers of one method do; how much a row attends to, what it runs with and
what is counted are each part's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse.methods.base import AuxSpec, DecodeMethod, ModelShape
from sglang_sparse.methods.config import SHARED, MethodConfig, RectifyConfig
from sglang_sparse.methods.layers import names_layer, parse_layers
from sglang_sparse.methods.prefill import PrefillConfig, PrefillInputs, PrefillMethod, PrefillSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from sglang_sparse.methods.base import ModelShape
    from sglang_sparse.methods.views import BatchView


class Composite(DecodeMethod):
    """Methods by layer.

    Its ``config`` has what they share, and its blocks are those of the first part. A batch runs sparse or dense as a
    whole; a row attends densely where all parts let it attend to everything.

    Args:
        names: what the parts are called in the registry.
        parts: methods that ``combine``, of one kind of attention and no common layer, whose configs agree in
            ``SHARED``.
    """

    combines = True

    def __init__(self, names: Sequence[str], parts: Sequence[DecodeMethod]):
        shared: dict[str, Any] = {field: getattr(parts[0].config, field) for field in SHARED}
        layers = ",".join(str(part.config.layers) for part in parts)
        super().__init__(RectifyConfig.model_validate({**shared, "layers": layers}))
        self.names = tuple(names)
        self.parts = tuple(parts)
        self.more_counts = tuple(dict.fromkeys(name for part in parts for name in part.more_counts))
        self.attention = next((part for part in parts if not part.latents), parts[0]).attention
        self.latents = all(part.latents for part in parts)
        self.fp8_kv = all(part.fp8_kv for part in parts)
        self.needs_float8 = any(part.needs_float8 for part in parts)
        self.flag_limits = tuple(dict.fromkeys(limit for part in parts for limit in part.flag_limits))

    @property
    def configs(self) -> tuple[MethodConfig, ...]:
        """Those of the parts."""
        return tuple(part.config for part in self.parts)

    @property
    def block_size(self) -> int:
        """That of the first part."""
        return self.parts[0].block_size

    def sparse_layers(self, num_layers: int) -> tuple[int, ...]:
        """Those of the parts, which may have fewer than their configs name."""
        return tuple(sorted(layer for part in self.parts for layer in part.sparse_layers(num_layers)))

    def refuse(self, model_config: object) -> str | None:
        """What a part refuses."""
        return next((reason for part in self.parts if (reason := part.refuse(model_config))), None)

    def refuse_weights(self, model_config: object) -> str | None:
        """What a part refuses."""
        return next((reason for part in self.parts if (reason := part.refuse_weights(model_config))), None)

    def adopt(self, model_config: object) -> None:
        """Tell the parts."""
        for part in self.parts:
            part.adopt(model_config)

    def kernels(self, usual: str) -> str:
        """Those of the parts."""
        return ", ".join(dict.fromkeys(part.kernels(usual) for part in self.parts))

    def warnings(self) -> tuple[str, ...]:
        """Those of the parts; and that what has both phases alone is of decode here."""
        both = [name for name, part in zip(self.names, self.parts, strict=True) if part.config.phase_fields]
        said = [f"{name} decodes in layers of its own; prefill is what --sparse-prefill-method says" for name in both]
        return tuple(dict.fromkeys((*said, *(text for part in self.parts for text in part.warnings()))))

    def aux_specs(self, model: ModelShape) -> tuple[AuxSpec, ...]:
        """Those of the parts, each for its part's layers."""
        return tuple(
            replace(spec, layers=part.sparse_layers(model.num_layers), entry_tokens=part.entry_tokens)
            for part in self.parts
            for spec in part.aux_specs(model)
        )

    def n_select(self, n_pages: torch.Tensor) -> torch.Tensor:
        """What the first part attends to, in its layers."""
        return self.parts[0].n_select(n_pages)

    def scratch_bytes(self, model: ModelShape, view: BatchView, dtype: torch.dtype, device: torch.device) -> int:
        """The most of the parts: layers run one after the other on one stream, and each gives back what it took."""
        parts = zip(self.parts, view.parts, strict=True)
        return max(part.scratch_bytes(model, own, dtype, device) for part, own in parts)


# What is said once for all layers of a server, whatever prefill methods they have.
SHARED_BY_PREFILL = tuple(field for field in PrefillConfig.model_fields if field != "layers")


class LayeredPrefill(PrefillMethod):
    """Prefill methods by layer.

    A token's KV depends on what all layers below did, so that its groups are whole ones of each part: KV is a function
    of the tokens before it where it is in every layer. All parts begin to be sparse at one position.

    Args:
        config: what the parts share.
        names: what the parts are called in the registry.
        parts: methods of no common layer, whose configs agree in ``SHARED_BY_PREFILL`` but for ``crossover_tokens``.

    Raises:
        ValueError: a part begins elsewhere than it is told to, or has a rule of its own of what may be shared.
    """

    def __init__(self, config: PrefillConfig, names: Sequence[str], parts: Sequence[PrefillMethod]):
        super().__init__(config)
        self.names = tuple(names)
        group = math.lcm(*(part.group_tokens for part in parts))
        begin = -(-max(part.dense_below for part in parts) // group) * group
        self.parts = tuple(
            part.with_configs([part.config.model_copy(update={"crossover_tokens": begin})]) for part in parts
        )
        for name, part in zip(names, self.parts, strict=True):
            own = [
                rule for rule in ("boundary", "dense_from") if getattr(type(part), rule) != getattr(PrefillMethod, rule)
            ]
            if part.dense_below != begin or own:
                found = f"has {own[0]}() of its own" if own else f"begins at {part.dense_below} where {begin} is asked"
                raise ValueError(f"{name} {found}; allowed: all sparse layers for it alone")
        self.more_counts = tuple(dict.fromkeys(name for part in parts for name in part.more_counts))
        self._group = group

    @property
    def configs(self) -> tuple[PrefillConfig, ...]:
        """Those of the parts."""
        return tuple(part.config for part in self.parts)

    def warnings(self) -> tuple[str, ...]:
        """Those of the parts."""
        return tuple(dict.fromkeys(text for part in self.parts for text in part.warnings()))

    def with_configs(self, configs: Sequence[PrefillConfig]) -> LayeredPrefill:
        """See ``PrefillMethod.with_configs``; one for each part."""
        parts = [part.with_configs([config]) for part, config in zip(self.parts, configs, strict=True)]
        return LayeredPrefill(self.config, self.names, parts)

    @property
    def group_tokens(self) -> int:
        """Whole groups of each part."""
        return self._group

    @property
    def dense_below(self) -> int:
        """Where the last part begins, at the end of a group of all."""
        return self.parts[0].dense_below

    def refuse(self, model_config: Any) -> str | None:
        """What a part refuses, and groups that no prompt of the model has."""
        context = getattr(model_config, "context_len", None)
        if context and self._group > context:
            sizes = ", ".join(
                f"{part.group_tokens} of {name}" for name, part in zip(self.names, self.parts, strict=True)
            )
            return f"groups of all layers have {self._group} tokens ({sizes}), and the context has {context}"
        return next((reason for part in self.parts if (reason := part.refuse(model_config))), None)

    def refuse_weights(self, model_config: Any) -> str | None:
        """What a part refuses."""
        return next((reason for part in self.parts if (reason := part.refuse_weights(model_config))), None)

    def refuse_page_size(self, page_size: int) -> str | None:
        """What a part refuses."""
        return next((reason for part in self.parts if (reason := part.refuse_page_size(page_size))), None)

    def scratch_bytes(self, model: ModelShape, max_tokens: int, max_context: int) -> int:
        """The most of the parts: layers run one after the other, and each gives back what it took."""
        return max(part.scratch_bytes(model, max_tokens, max_context) for part in self.parts)

    def kept_bytes(self, model: ModelShape, layers: int, dtype: torch.dtype) -> int:
        """Those of the parts, each for its own of the layers."""
        return sum(
            part.kept_bytes(model, len(parse_layers(part.config.layers, model.num_layers)), dtype)
            for part in self.parts
        )

    def plan(self, spans: Sequence[PrefillSpan], device: torch.device) -> tuple[Any, ...]:
        """A plan of each part, for which a request's method is that part of it."""
        return tuple(
            part.plan([replace(span, method=span.method and span.method.parts[place]) for span in spans], device)
            for place, part in enumerate(self.parts)
        )

    def attend(self, plan: tuple[Any, ...], layer_id: int, inputs: PrefillInputs) -> None:
        """Attend by the part that has the layer, and put what it counts where all parts are counted."""
        place = next(i for i, part in enumerate(self.parts) if names_layer(part.config.layers, layer_id))
        part = self.parts[place]
        counts = inputs.pairs.new_zeros(2 + len(part.more_counts))
        part.attend(plan[place], layer_id, replace(inputs, pairs=counts))
        inputs.pairs[:2] += counts[:2]
        for name, count in zip(part.more_counts, counts[2:], strict=True):
            inputs.pairs[2 + self.more_counts.index(name)] += count
