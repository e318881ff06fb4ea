"""Skip-Softmax in both phases: attention that leaves out blocks of keys with small softmax weights.

Source: BLASST (arXiv:2512.12087) and the Skip Softmax Attention of TensorRT-LLM, with its field name and the two forms
of the field. ``sglang_sparse_kernels.skip_softmax_decode`` defines the points that both leave to their kernels. In
decode the threshold is ``threshold_scale_factor`` divided by the row's length, as in the source, and at most 1. Prefill
is that of ``methods/skip_softmax/prefill.py``, unless another method is asked for. MLA models are only decoded, in the
absorbed form (``sglang_sparse_kernels.skip_softmax_mla_decode``). Their prefill is dense, as SGLang expands its keys
for each head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import BeforeValidator, Field

from sglang_sparse.methods.config import RectifyConfig, SparseConfig
from sglang_sparse.methods.roles import AttendsItself
from sglang_sparse.methods.skip_softmax.calibration_file import (
    FACTOR_RANGE,
    PHASES,
    is_factor,
    only_with_a_model,
    refuse_other_model,
    resolved_fields,
)
from sglang_sparse.methods.skip_softmax.prefill import CALIBRATION, FILE, TARGET
from sglang_sparse.methods.support import Architecture, ModelConfig, refuse_sizes
from sglang_sparse_kernels import skip_softmax_mla_decode
from sglang_sparse_kernels.skip_softmax_decode import scratch_bytes, skip_softmax_decode
from sglang_sparse_kernels.skip_softmax_mla_decode import LATENT_DIMS, ROPE_DIMS

if TYPE_CHECKING:
    import torch

    from sglang_sparse.methods.base import ModelShape
    from sglang_sparse.methods.views import BatchView, LatentQuery


def _factors(value: object) -> dict[str, float]:
    """The factor of each phase: as a mapping says, which leaves out what is dense, or one number for both."""
    given: dict[str, object] = value if isinstance(value, dict) else dict.fromkeys(PHASES, value)
    factors = {phase: factor for phase, factor in given.items() if is_factor(factor)}
    if not given or not set(given) <= set(PHASES) or len(factors) < len(given):
        raise ValueError(
            f'must be {FACTOR_RANGE} for both phases, or {{"prefill": number, "decode": number}}, of which one may be '
            "left out"
        )
    return {phase: float(factors.get(phase, 0)) for phase in PHASES}


class SkipSoftmaxDecodeConfig(RectifyConfig):
    """Configuration of ``--sparse-method skip_softmax``."""

    request_fields: ClassVar[tuple[str, ...]] = ("threshold_scale_factor", *RectifyConfig.request_fields)
    phase_fields: ClassVar[tuple[str, ...]] = ("threshold_scale_factor",)

    rectify_interval: int = Field(
        0,
        ge=0,
        description="Tokens between dense passes that re-encode a request's last tokens; 0: never, as in the source.",
    )
    # Not measured on any model. A skipped key weighs less than factor / length of a row's heaviest one, and so all of
    # them together less than factor times that one.
    threshold_scale_factor: Annotated[dict[str, float], BeforeValidator(_factors)] = Field(
        {"prefill": 250.0, "decode": 25.0},
        description="A block of keys is skipped if its softmax weights, relative to the largest so far, are below "
        "this divided by the position (prefill) or the length (decode); a number applies to both phases; a phase "
        "that is 0, or missing in a mapping, never skips.",
    )
    target_sparsity: Annotated[None, BeforeValidator(only_with_a_model)] = Field(
        None, description=TARGET.format(of=", for both phases or as a mapping")
    )
    calibration_file: Annotated[None, BeforeValidator(only_with_a_model)] = Field(None, description=FILE)
    calibration: dict[str, object] | None = Field(None, description=CALIBRATION)

    @classmethod
    def from_checkpoint(cls, fields: dict[str, object], read: Callable[[], Mapping[str, object]]) -> dict[str, object]:
        """Put the factors that a calibration gives for it instead of ``target_sparsity``."""
        return resolved_fields(fields, read)


class SkipSoftmaxDecode(AttendsItself):
    """Attend to the blocks of keys in which a query's maximum comes near that of the first and the newest blocks."""

    config_class = SkipSoftmaxDecodeConfig
    config: SkipSoftmaxDecodeConfig
    latents = True
    combines = True
    more_counts = ("blocks_visited", "blocks_skipped")

    @property
    def row_threshold(self) -> float:
        """The factor of decode."""
        return self.config.threshold_scale_factor["decode"]

    def prefill_fields(self) -> dict[str, object] | None:
        """The factor of prefill, if there is one, what it comes from, and what is said for both phases."""
        factor = self.config.threshold_scale_factor["prefill"]
        shared = {name: getattr(self.config, name) for name in SparseConfig.model_fields}
        return {"threshold_scale_factor": factor, "calibration": self.config.calibration, **shared} if factor else None

    def refuse(self, model_config: Architecture) -> str | None:
        """Refuse latents of sizes that the op lacks."""
        sizes = {"qk_rope_head_dim": ROPE_DIMS, "kv_lora_rank": LATENT_DIMS}
        return refuse_sizes(model_config.hf_text_config, sizes) if self.kind_of(model_config) == "MLA" else None

    def refuse_weights(self, model_config: ModelConfig) -> str | None:
        """Refuse what the calibration was not made on."""
        return refuse_other_model(self.config, self.config.calibration, model_config)

    def warnings(self) -> tuple[str, ...]:
        """Say that nothing of decode will be sparse, unless a request asks for it."""
        dense = (
            "skip_softmax: threshold_scale_factor is 0 in decode, where rows attend densely unless a request says more"
        )
        return () if self.row_threshold else (dense,)

    def attend(
        self,
        view: BatchView,
        layer_id: int,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        last_slots: torch.Tensor,
        scaling: float,
        k_scale: float,
        v_scale: float,
        sinks: torch.Tensor | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """One call of the op."""
        return skip_softmax_decode(
            query,
            k_cache,
            v_cache,
            view.page_table,
            view.n_pages,
            last_slots,
            view.row_thresholds,
            view.page_size,
            scaling,
            k_scale,
            v_scale,
            stats=view.method_stats,
            usual_pages=view.usual_select,
            arrivals=view.arrivals,
            sinks=sinks,
            soft_cap=soft_cap,
        )

    def attend_latents(self, view: BatchView, layer_id: int, query: LatentQuery) -> torch.Tensor:
        """One call of the op for latents."""
        return skip_softmax_mla_decode.skip_softmax_mla_decode(
            query.nope,
            query.rope,
            query.cache,
            view.page_table,
            view.n_pages,
            query.last_slots,
            view.row_thresholds,
            view.page_size,
            query.scaling,
            query.kv_scale,
            stats=view.method_stats,
            usual_pages=view.usual_select,
        )

    def scratch_bytes(self, model: ModelShape, view: BatchView, dtype: torch.dtype, device: torch.device) -> int:
        """That of the op. Values have at most the model's ``head_dim``."""
        if model.rope_dim:
            return skip_softmax_mla_decode.scratch_bytes(
                len(view.n_pages),
                num_heads=model.num_q_heads,
                latent_dim=model.head_dim - model.rope_dim,
                pages=view.usual_select,
                page_size=view.page_size,
                dtype=dtype,
                device=device,
            )
        return scratch_bytes(
            len(view.n_pages),
            num_q_heads=model.num_q_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            v_head_dim=model.head_dim,
            pages=view.usual_select,
            page_size=view.page_size,
            dtype=dtype,
            device=device,
        )
