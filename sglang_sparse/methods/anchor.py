"""AnchorAttention: sparse prefill by stripes, found from their difference to an anchor score.

Source: "AnchorAttention: Difference-Aware Sparse Attention with Stripe Granularity", section 3 and appendix C;
``sglang_sparse_kernels.anchor_prefill`` defines the points that its pseudo-code leaves open.

Differences from the paper:

- Groups are aligned to absolute positions of the sequence, cached prefix included.
- A group sees the block before it, without which a number that crosses its edge was read wrong.
- A part of a group that chunks cut finds keys with the queries up to its own last one. If these are few, some of the
  group before help.
- Positions below ``crossover_tokens``, up to the end of a group, and the first group are dense.
- The ``dense_tail`` of a prompt is dense: the mean query of a block would hide a short question, and so the keys that
  it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import BeforeValidator, Field, field_validator

from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.config import is_number
from sglang_sparse.methods.prefill import PrefillConfig, PrefillInputs, PrefillMethod, PrefillSpan
from sglang_sparse.methods.support import Architecture, refuse_soft_cap, refuse_wide_heads
from sglang_sparse_kernels.anchor_prefill import (
    AnchorPlan,
    GroupMeans,
    anchor_prefill,
    make_plan,
    means_bytes,
    scratch_bound,
)
from sglang_sparse_kernels.common.launch import to_device

# A threshold at which all keys count.
ALL_KEYS = 1e9
CALIBRATE = "python -m sglang_sparse.calibrate --method anchor --model-path MODEL --out anchor.json"


def _has_sinks(model_config: Architecture) -> bool:
    """Whether layers of full attention have attention sinks, which MiMo-V2 may have in its windows alone."""
    config = model_config.hf_text_config
    in_full = getattr(config, "add_full_attention_sink_bias", not hasattr(config, "add_swa_attention_sink_bias"))
    return bool(getattr(model_config, "has_attention_sinks", False) and in_full)


def _theta_is_in_range(value: object) -> object:
    thetas: list[object] = value if isinstance(value, list) else [value]
    for layer, theta in enumerate(thetas):
        # NaN is in no range.
        if not is_number(theta) or not 0 <= theta <= ALL_KEYS:
            found = f"; layer {layer} has {theta!r}" if thetas is value else ""
            raise ValueError(f"must be a number from 0 to {ALL_KEYS:.0e}, or a list of one for each layer{found}")
    return value


class AnchorConfig(PrefillConfig):
    """Configuration of ``--sparse-prefill-method anchor``."""

    request_fields: ClassVar[tuple[str, ...]] = ("theta", *PrefillConfig.request_fields)

    theta: Annotated[float | list[float], BeforeValidator(_theta_is_in_range)] = Field(
        12.0,
        description="A key is kept unless its score is this far below the anchor's (natural log); "
        "a list has one for each layer of the model.",
    )
    step: int = Field(16, ge=1, le=64, description="Query blocks that share one set of keys: a group.")
    block_size: int = Field(128, description="Queries that are pooled, and keys of the initial block: 16, 32, 64, 128.")
    calibration: dict[str, object] | None = Field(
        None, description="Origin of theta, as `sglang_sparse.calibrate` writes it."
    )

    @field_validator("block_size")
    @classmethod
    def _block_is_a_power_of_two(cls, value: int) -> int:
        if value not in (16, 32, 64, 128):
            raise ValueError("must be 16, 32, 64 or 128")
        return value


@dataclass(frozen=True)
class _Plan:
    """The op's plan, and what each row's request asked for: ``[layers, rows]`` float32 on the device.

    One layer stands for all where no row has a threshold for each. ``kept`` has, by row, what is kept of a cut prompt;
    rows that go on with one, ``continued``, have it already.
    """

    op: AnchorPlan
    theta: torch.Tensor
    kept: dict[int, dict[int, GroupMeans]]
    continued: frozenset[int]

    def means(self, layer_id: int, query: torch.Tensor) -> dict[int, GroupMeans]:
        """The means of cut prompts in a layer with queries ``[tokens, q_heads, head_dim]``, by row."""
        heads, dim = query.shape[1:]
        for row, kept in self.kept.items():
            if layer_id not in kept and row not in self.continued:
                kept[layer_id] = GroupMeans.allocate(self.op.step, heads, dim, query.dtype, query.device)
        return {row: kept[layer_id] for row, kept in self.kept.items()}


class Anchor(PrefillMethod):
    """Attend to the first block, the own group and the keys whose score comes near the maximum over these."""

    config_class = AnchorConfig
    config: AnchorConfig
    attention: ClassVar[Callable[..., torch.Tensor]] = staticmethod(anchor_prefill)
    """The op; a control may have another one that takes the same arguments."""

    @property
    def group_tokens(self) -> int:
        """``block_size * step``."""
        return self.config.block_size * self.config.step

    @property
    def dense_below(self) -> int:
        """The first group has all its keys in the anchor region."""
        return max(super().dense_below, self.group_tokens)

    def refuse(self, model_config: Architecture) -> str | None:
        """Refuse MLA models, whose cache holds latents, what the kernels lack, and thresholds of other models."""
        if model_config.attention_arch.name == "MLA":
            return "anchor needs an MHA or GQA model; this one uses MLA (multi-head latent attention)"
        if reason := refuse_soft_cap("anchor", model_config) or refuse_wide_heads("anchor", model_config):
            return reason
        theta, layers = self.config.theta, model_config.num_hidden_layers
        if isinstance(theta, list) and len(theta) != layers:
            return f"theta: got a list of {len(theta)}, allowed: a number, or one for each of its {layers} layers"
        calibration, has_sinks = self.config.calibration, _has_sinks(model_config)
        if calibration is not None and (calibration.get("sinks") is not None) != has_sinks:
            other, this = ("without", "with") if has_sinks else ("with", "without")
            return (
                f"the calibration is of a model {other} attention sinks, this one is {this}: theta keeps "
                f"another share of its attention; calibrate this one: {CALIBRATE}"
            )
        return None

    def refuse_page_size(self, page_size: int) -> str | None:
        """Refuse pages that are no part of a block."""
        if self.config.block_size % page_size:
            return f"block_size: got {self.config.block_size}, allowed: a multiple of the page size of {page_size}"
        return None

    def warnings(self) -> tuple[str, ...]:
        """A threshold that nobody chose for the model may leave nothing out, and then costs time."""
        said = super().warnings()
        if "theta" in self.config.model_fields_set:
            return said
        return (
            *said,
            "anchor runs with its usual theta, which nobody chose for this model: it may leave nothing out, and then "
            f"prefill takes longer than dense; {CALIBRATE} finds one for --sparse-prefill-config anchor.json",
        )

    def scratch_bytes(self, model: ModelShape, max_tokens: int, max_context: int) -> int:
        """The op's bound; its slices run one after the other."""
        heads, dim = model.num_q_heads, model.head_dim
        return scratch_bound(max_tokens, max_context, heads, dim, dim, self.config.block_size, self.config.step)

    def kept_bytes(self, model: ModelShape, layers: int, dtype: torch.dtype) -> int:
        """The means of a group's blocks."""
        return layers * means_bytes(self.config.step, model.num_q_heads, model.head_dim, dtype)

    def plan(self, spans: Sequence[PrefillSpan], device: torch.device) -> _Plan:
        """Lay out blocks and groups. A row's sparse tokens come before its dense ones."""
        rows = 1 + max(span.row for span in spans)
        starts, ends, ranges = [0] * rows, [0] * rows, [(0, 0)] * rows
        thetas: list[float | list[float]] = [0.0] * rows
        carried, kept = [0] * rows, {}
        for span in reversed(spans):
            starts[span.row] = span.start
            ends[span.row] = max(ends[span.row], span.end)
            if isinstance(span.method, Anchor):
                # Also what of the prompt later passes run sparse: a part of a group goes by what that will have.
                ranges[span.row] = self.dense_below, max(span.end, span.goes_on)
                thetas[span.row] = span.method.config.theta
                carried[span.row] = span.before.tokens if span.before else 0
                if cut := span.before or span.after:
                    kept[span.row] = cut.kept
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        op = make_plan(starts, lengths, self.config.block_size, self.config.step, device, ranges, carried=carried)
        layers = max(len(theta) if isinstance(theta, list) else 1 for theta in thetas)
        by_row = [theta if isinstance(theta, list) else [theta] * layers for theta in thetas]
        by_layer = list(zip(*by_row, strict=True))
        continued = frozenset(row for row, count in enumerate(carried) if count)
        return _Plan(op, to_device(by_layer, torch.float32, device), kept, continued)

    def attend(self, plan: _Plan, layer_id: int, inputs: PrefillInputs) -> None:
        """One call of the op."""
        self.attention(
            inputs.query,
            inputs.key_cache,
            inputs.value_cache,
            inputs.page_table,
            plan.op,
            plan.theta[layer_id if len(plan.theta) > 1 else 0],
            inputs.page_size,
            inputs.scaling,
            inputs.k_scale,
            inputs.v_scale,
            out=inputs.out,
            stats=inputs.pairs,
            means=plan.means(layer_id, inputs.query),
            sinks=inputs.sinks,
        )
