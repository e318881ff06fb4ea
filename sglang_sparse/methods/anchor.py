"""AnchorAttention: sparse prefill by stripes, found from their difference to an anchor score.

Source: "AnchorAttention: Difference-Aware Sparse Attention with Stripe Granularity", section 3 and appendix C; what its
pseudo-code leaves open is settled in ``sglang_sparse_kernels.anchor_prefill``. Differences: groups are aligned to
absolute positions of the sequence, cached prefix included, and positions below ``crossover_tokens`` are dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field, field_validator

from sglang_sparse.prefill_method import PrefillConfig, PrefillInputs, PrefillMethod, PrefillSpan
from sglang_sparse_kernels.anchor_prefill import AnchorPlan, anchor_prefill, make_plan


class AnchorConfig(PrefillConfig):
    """Configuration of ``--sparse-prefill-method anchor``."""

    request_fields: ClassVar[tuple[str, ...]] = ("theta", *PrefillConfig.request_fields)

    theta: float = Field(
        12.0, ge=0, le=1e9, description="A key counts unless its score is this far below the anchor's (natural log)."
    )
    step: int = Field(16, ge=1, le=64, description="Query blocks that share one set of keys: a group.")
    block_size: int = Field(128, description="Queries that are pooled, and keys of the initial block: 16, 32, 64, 128.")

    @field_validator("block_size")
    @classmethod
    def _block_is_a_power_of_two(cls, value: int) -> int:
        if value not in (16, 32, 64, 128):
            raise ValueError("must be 16, 32, 64 or 128")
        return value


@dataclass(frozen=True)
class _Plan:
    """The op's plan, and what each row's request asked for: ``[rows]`` float32 on the device."""

    op: AnchorPlan
    theta: torch.Tensor


class Anchor(PrefillMethod):
    """Attend to the first block, the own group and the keys whose score comes near the maximum over these."""

    config_class = AnchorConfig
    config: AnchorConfig

    @property
    def group_tokens(self) -> int:
        """``block_size * step``."""
        return self.config.block_size * self.config.step

    @property
    def dense_below(self) -> int:
        """The first group has all its keys in the anchor region."""
        return max(super().dense_below, self.group_tokens)

    def refuse(self, model_config: Any) -> str | None:
        """Refuse MLA models: their cache holds latents, not the keys of KV heads."""
        if model_config.attention_arch.name == "MLA":
            return "anchor needs an MHA or GQA model; this one uses MLA (multi-head latent attention)"
        return None

    def refuse_page_size(self, page_size: int) -> str | None:
        """Refuse pages that are no part of a block."""
        if self.config.block_size % page_size:
            return f"block_size: got {self.config.block_size}, allowed: a multiple of the page size of {page_size}"
        return None

    def plan(self, spans: Sequence[PrefillSpan], device: torch.device) -> _Plan:
        """Lay out blocks and groups. A row's sparse tokens come before its dense ones."""
        rows = 1 + max(span.row for span in spans)
        starts, ends, ranges, theta = [0] * rows, [0] * rows, [(0, 0)] * rows, [0.0] * rows
        for span in reversed(spans):
            starts[span.row] = span.start
            ends[span.row] = max(ends[span.row], span.end)
            if isinstance(span.method, Anchor):
                ranges[span.row] = self.dense_below, span.end
                theta[span.row] = span.method.config.theta
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        op = make_plan(starts, lengths, self.config.block_size, self.config.step, device, ranges)
        host = torch.tensor(theta, dtype=torch.float32, pin_memory=device.type == "cuda")
        return _Plan(op, host.to(device, non_blocking=True))

    def attend(self, plan: _Plan, layer_id: int, inputs: PrefillInputs) -> None:
        """One call of the op."""
        anchor_prefill(
            inputs.query,
            inputs.key_cache,
            inputs.value_cache,
            inputs.page_table,
            plan.op,
            plan.theta,
            inputs.page_size,
            inputs.scaling,
            inputs.k_scale,
            inputs.v_scale,
            out=inputs.out,
            stats=inputs.pairs,
        )
