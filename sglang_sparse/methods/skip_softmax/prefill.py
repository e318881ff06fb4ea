"""Skip-Softmax: prefill that leaves out blocks of keys with small softmax weights.

Source: BLASST (arXiv:2512.12087) and the Skip Softmax Attention of TensorRT-LLM, with its field names.
``sglang_sparse_kernels.skip_softmax_prefill`` defines the points that both leave to their kernels. Difference: the
threshold is ``threshold_scale_factor`` divided by the position behind a tile of queries, not by the sequence's length.

Sharing: a block is skipped for a whole tile of 128 queries, so a token's KV in the layers above depends on the rest of
its tile. It depends on nothing else that follows: tiles are aligned to absolute positions, blocks are visited in a
fixed order, and the position sets the threshold. (Divided by the prompt's length, as in the source, two prompts with
one prefix would differ from the first token on.) So a tile is the group of ``PrefillMethod``: prefixes are cached,
matched and cut into chunks by whole tiles, and all requests that share one have the KV of a cold prefill in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import BeforeValidator, Field

from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.prefill import PrefillConfig, PrefillInputs, PrefillMethod, PrefillSpan
from sglang_sparse.methods.skip_softmax.calibration_file import (
    FACTOR_RANGE,
    is_factor,
    only_with_a_model,
    refuse_other_model,
    resolved_fields,
)
from sglang_sparse.methods.support import Architecture, ModelConfig, refuse_wide_heads
from sglang_sparse_kernels.common.launch import to_device
from sglang_sparse_kernels.skip_softmax_prefill import (
    TILE_QUERIES,
    SkipSoftmaxPlan,
    Span,
    make_plan,
    skip_softmax_prefill,
)

PREFILL = ("prefill",)
# What both configs say of the fields that they share.
TARGET = (
    "Share of the blocks to skip, from 0 to 1{of}, instead of threshold_scale_factor: by calibration_file, or by the "
    "factors of NVIDIA Model Optimizer in the checkpoint's config.json."
)
FILE = "Output of `sglang_sparse.calibrate --method skip_softmax` for this model, used by target_sparsity."
CALIBRATION = "Origin of a threshold_scale_factor from target_sparsity; reported, and compared with the model."


def _factor_of_prefill(value: object) -> float:
    """A number, or TensorRT-LLM's mapping of phases, of which this has prefill."""
    factor = value["prefill"] if isinstance(value, dict) and list(value) == ["prefill"] else value
    if not is_factor(factor):
        raise ValueError(
            f'must be {FACTOR_RANGE}, or {{"prefill": number}}; that of decode belongs to --sparse-method skip_softmax'
        )
    return factor


class SkipSoftmaxConfig(PrefillConfig):
    """Configuration of ``--sparse-prefill-method skip_softmax``."""

    request_fields: ClassVar[tuple[str, ...]] = ("threshold_scale_factor", *PrefillConfig.request_fields)
    phase_fields: ClassVar[tuple[str, ...]] = ("threshold_scale_factor",)

    dense_tail: int = Field(
        0,
        ge=0,
        description="Last tokens of a prompt that attend densely. 0 is enough: a block is skipped only if no query of "
        "a tile needs it.",
    )
    threshold_scale_factor: Annotated[float, BeforeValidator(_factor_of_prefill)] = Field(
        250.0,
        description="A block of keys is skipped if its softmax weights, relative to the largest so far, are below "
        'this divided by the position, for each query of a tile; 0: never. `{"prefill": 250}` is allowed, too.',
    )
    target_sparsity: Annotated[None, BeforeValidator(only_with_a_model)] = Field(None, description=TARGET.format(of=""))
    calibration_file: Annotated[None, BeforeValidator(only_with_a_model)] = Field(None, description=FILE)
    calibration: dict[str, object] | None = Field(None, description=CALIBRATION)

    @classmethod
    def from_checkpoint(cls, fields: dict[str, object], read: Callable[[], Mapping[str, object]]) -> dict[str, object]:
        """Put the factor that a calibration gives for it instead of ``target_sparsity``."""
        return resolved_fields(fields, read, PREFILL)


@dataclass(frozen=True)
class _Plan:
    """The op's plan, and what each row's request asked for: ``[rows]`` float32 on the device."""

    op: SkipSoftmaxPlan
    factor: torch.Tensor


class SkipSoftmax(PrefillMethod):
    """Attend to the blocks of keys in which some query's maximum comes near its maximum so far."""

    config_class = SkipSoftmaxConfig
    config: SkipSoftmaxConfig
    more_counts = ("blocks_skipped", "blocks_visited")

    @property
    def group_tokens(self) -> int:
        """Queries of a tile."""
        return TILE_QUERIES

    def refuse(self, model_config: Architecture) -> str | None:
        """Refuse MLA models, for whose expanded keys of prefill there is no kernel, and heads too wide for it."""
        if model_config.attention_arch.name != "MLA":
            return refuse_wide_heads("skip_softmax", model_config)
        return (
            "skip_softmax prefills MHA and GQA models; this one uses MLA (multi-head latent attention), which SGLang "
            "prefills with keys expanded for each head, apart from its cache; allowed: --sparse-method skip_softmax, "
            "which decodes it, without a prefill method"
        )

    def refuse_weights(self, model_config: ModelConfig) -> str | None:
        """Refuse what the calibration was not made on."""
        return refuse_other_model(self.config, self.config.calibration, model_config)

    def scratch_bytes(self, model: ModelShape, max_tokens: int, max_context: int) -> int:
        """None: what the kernel holds between its blocks is in registers. The reference, on a CPU, is not counted."""
        return 0

    def plan(self, spans: Sequence[PrefillSpan], device: torch.device) -> _Plan:
        """Lay out tiles."""
        rows = 1 + max(span.row for span in spans)
        factors = [0.0] * rows
        for span in spans:
            if isinstance(span.method, SkipSoftmax):
                factors[span.row] = span.method.config.threshold_scale_factor
        op = make_plan([part for span in spans for part in self._parts(span)], rows, device)
        return _Plan(op, to_device(factors, torch.float32, device))

    def _parts(self, span: PrefillSpan) -> Iterator[Span]:
        dense_until = span.end if span.method is None else min(span.end, max(span.start, self.dense_below))
        if span.start < dense_until:
            yield Span(span.row, span.start, dense_until, sparse=False)
        if dense_until < span.end:
            yield Span(span.row, dense_until, span.end)

    def attend(self, plan: _Plan, layer_id: int, inputs: PrefillInputs) -> None:
        """One call of the op."""
        skip_softmax_prefill(
            inputs.query,
            inputs.key_cache,
            inputs.value_cache,
            inputs.page_table,
            plan.op,
            plan.factor,
            inputs.page_size,
            inputs.scaling,
            inputs.k_scale,
            inputs.v_scale,
            out=inputs.out,
            stats=inputs.pairs,
            sinks=inputs.sinks,
            soft_cap=inputs.soft_cap,
        )
