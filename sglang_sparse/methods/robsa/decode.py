"""RoBSA: block-sparse decode for MLA models, by the attention scores of the rotary dimensions alone.

Source: "RoPE-based Blockwise Sparse Multi-head Latent Attention" (RoBSA), sections 2.2.2 to 2.3.2 and algorithm 1. It
takes a softmax over the row's tokens per head, the mean over heads, and the sum over each block's tokens. It attends
exactly to the smallest set of the highest blocks that hold ``theta1`` of the mass.

Differences from the paper:

- In its *insensitive* layers, in which rotary scores do not represent the full ones, it selects by the full score. Here
  they are dense by default: a full score reads the whole cache as dense attention does, which is exact.
- A layer is sensitive if its similarity is above ``theta2`` over all calibration prompts, and over the long ones too
  (of at least ``min_seq_len`` tokens). Only long rows are decoded sparse, and short prompts raise the mean.
- The newest block is always attended to.
- A row that needs more than ``max_active_ratio`` of its blocks attends to all of them; one that needs more than
  ``token_budget`` to so many of the heaviest.
- Dense passes may make decode's KV exact again, as in ReSA (``rectify_interval``); off by default.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch
from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.methods.base import AuxSpec, DecodeMethod, ModelShape, SparseIndices
from sglang_sparse.methods.config import PAGE_SIZES, RectifyConfig
from sglang_sparse.methods.fingerprint import misfit, overridden
from sglang_sparse.methods.robsa.calibration_file import PRESETS, Preset, RopeCalibration
from sglang_sparse.methods.support import Architecture, ModelConfig, refuse_sizes
from sglang_sparse_kernels import sparse_mla_decode
from sglang_sparse_kernels.block_mass import block_mass, scratch_bytes
from sglang_sparse_kernels.block_topp import block_topp
from sglang_sparse_kernels.sparse_mla_decode import LATENT_DIMS, ROPE_DIMS

if TYPE_CHECKING:
    from sglang_sparse.methods.aux_buffers import AuxBuffers
    from sglang_sparse.methods.views import BatchView, LatentQuery

ROPE_COPY = "rope_copy"
# More than the share that ``block_topp`` rounds off of up to 100,000 blocks.
ROUNDING = 1e-4
BLOCK_SIZES = tuple(size for size in PAGE_SIZES if size >= 16)
_UNCALIBRATED = (
    "robsa needs a calibration of this model: python -m sglang_sparse.calibrate --method robsa --model-path MODEL "
    '--out FILE.json, then --sparse-config FILE.json; or {"allow_uncalibrated": true} at the cost of accuracy'
)


def _preset_exists(name: str) -> str:
    if name not in PRESETS:
        raise ValueError(f"must be a .json file of sglang_sparse.calibrate or one of {', '.join(PRESETS)}")
    return name


PresetName = Annotated[str, AfterValidator(_preset_exists)]


class RobsaConfig(RectifyConfig):
    """Configuration of ``--sparse-method robsa``."""

    request_fields: ClassVar[tuple[str, ...]] = ("theta1", *RectifyConfig.request_fields)

    rectify_interval: int = Field(
        0, ge=0, description="Tokens between dense passes that re-encode a request's last tokens; 0: never."
    )
    theta1: float = Field(0.9, gt=0, le=1, description="Share of the attention mass that the attended blocks hold.")
    block_size: int = Field(16, validate_default=True, description="Tokens of a block: 16, 32 or 64, at most a page.")
    calibration: RopeCalibration | PresetName | None = Field(
        None, description="Output of `sglang_sparse.calibrate --method robsa` for this model, or a preset's name."
    )
    theta2: float = Field(
        0.99, ge=0, le=1, description="Layers with a calibrated similarity above this select by rotary scores."
    )
    insensitive: Literal["dense", "full_score"] = Field(
        "dense", description='The other layers run dense, or with "full_score" select by the scores of all dimensions.'
    )
    allow_uncalibrated: bool = Field(
        False, description="Serve without a calibration, all layers by rotary scores: accuracy may collapse."
    )
    max_active_ratio: float = Field(
        0.5, gt=0, lt=1, description="A row that needs more than this share of its blocks attends to all of them."
    )
    token_budget: int | None = Field(
        None, ge=1, description="Attend to at most this many tokens of a row, though theta1 asks for more."
    )
    rope_copy: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Store a second, contiguous copy of the rotary keys, which scoring reads faster; auto: off.",
    )
    head_scope: Literal["global", "rank"] = Field(
        "global", description='Mean over the heads of all tensor-parallel ranks, or of each "rank" alone.'
    )

    @field_validator("block_size")
    @classmethod
    def _blocks_fit_pages(cls, value: int, info: ValidationInfo) -> int:
        page = info.data.get("page_size", value)
        if value not in BLOCK_SIZES or value > page:
            fitting = ", ".join(str(size) for size in BLOCK_SIZES if size <= page) or "none at this page size"
            raise ValueError(f"must divide the page of {page} tokens; allowed: {fitting}")
        return value

    @field_validator("token_budget")
    @classmethod
    def _budget_is_the_bound(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is None:
            return value
        # The newest block and another one.
        if value < (least := 2 * info.data.get("block_size", 0)):
            raise ValueError(f"must be at least 2 * block_size ({least})")
        if (ratio := info.data.get("max_active_ratio")) != cls.model_fields["max_active_ratio"].default:
            raise ValueError(f"takes the place of max_active_ratio, which is {ratio:g}: leave one of them out")
        return value

    @field_validator("calibration", mode="before")
    @classmethod
    def _named_calibration(cls, value: object) -> object:
        if not isinstance(value, str) or not value.endswith(".json"):
            return value
        try:
            found = json.loads(Path(value).read_text())["calibration"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"cannot be read: {type(error).__name__}: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"its calibration is {found!r}; allowed: what sglang_sparse.calibrate wrote")
        if (method := found.get("method")) != "robsa":
            raise ValueError(f"{value} is a calibration of {method!r}; allowed: one of 'robsa'")
        return found

    @field_validator("allow_uncalibrated")
    @classmethod
    def _not_both(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("calibration") is not None:
            raise ValueError("there is a calibration")
        return value

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> RobsaConfig:
        fields = type(self).model_fields
        unread = {"theta2", "insensitive"} if self.calibration is None else set()
        unread |= {"theta2"} if isinstance(self.calibration, str) else set()
        for name in sorted(unread):
            if (given := getattr(self, name)) != fields[name].default:
                message = f"{name}: got {given!r}, which needs a calibration with similarities"
                raise SparseArgumentError(message, field=name, got=given)
        return self


class Robsa(DecodeMethod):
    """Score every block by the attention mass that the rotary dimensions give it, attend to the heaviest ones."""

    attention = "MLA"
    decides_on_device = True
    combines = True
    config_class = RobsaConfig
    config: RobsaConfig

    def __init__(self, config: RobsaConfig):
        super().__init__(config)
        given = config.calibration
        self._calibration = PRESETS[given] if isinstance(given, str) else given
        self._sensitive = self._calibration and frozenset(self._calibration.sensitive(config.theta2))
        self._budget = (config.token_budget or 0) // config.block_size

    @property
    def block_size(self) -> int:
        """The config's."""
        return self.config.block_size

    @property
    def row_threshold(self) -> float:
        """Theta1."""
        return self.config.theta1

    def selects_by_rope(self, layer_id: int) -> bool:
        """Whether a layer's rotary scores stand for its full ones."""
        return self._sensitive is None or layer_id in self._sensitive

    def sparse_layers(self, num_layers: int) -> tuple[int, ...]:
        """The config's layers; without the insensitive ones where these are dense."""
        layers = super().sparse_layers(num_layers)
        return tuple(
            layer for layer in layers if self.config.insensitive == "full_score" or self.selects_by_rope(layer)
        )

    def warnings(self) -> tuple[str, ...]:
        """Of a preset, of a calibration that says so, or of none."""
        if isinstance(self._calibration, Preset):
            return (self._calibration.warning,)
        if self._calibration is None:
            return (
                "robsa runs without a calibration, all layers by their rotary scores: where these do not stand for the "
                "full ones, what is attended to is wrong; see python -m sglang_sparse.calibrate --method robsa",
            )
        return tuple(self._calibration.notes)

    def refuse(self, model_config: Architecture) -> str | None:
        """Refuse what is no MLA model, or has not the layers of the one that the calibration was made on."""
        if model_config.attention_arch.name != "MLA":
            others = "resa, rocketkv and skip_softmax serve MHA and GQA models"
            return f"robsa needs an MLA model (multi-head latent attention); {others}"
        sizes = {"qk_rope_head_dim": ROPE_DIMS, "kv_lora_rank": LATENT_DIMS}
        return refuse_sizes(model_config.hf_text_config, sizes) or self._refuse_calibration(model_config)

    def refuse_weights(self, model_config: ModelConfig) -> str | None:
        """Refuse what the calibration was not made on; a preset names no weights."""
        found = self._calibration
        measured = isinstance(found, RopeCalibration)
        return misfit("robsa", found.fingerprint, found.model, model_config) if measured else None

    def _refuse_calibration(self, model_config: Architecture) -> str | None:
        calibration, layers = self._calibration, model_config.num_hidden_layers
        if calibration is None:
            reason = None if self.config.allow_uncalibrated else _UNCALIBRATED
        elif isinstance(calibration, Preset):
            reason = calibration.refuse(model_config.hf_config, layers)
        else:
            # What is overridden may be the number of layers.
            reason = overridden(model_config) or _other_layers(calibration, layers)
        if reason is None and not self.sparse_layers(layers):
            return (
                f"no layer is left to run sparse at theta2 {self.config.theta2}; allowed: a lower theta2, or "
                '{"insensitive": "full_score"}'
            )
        return reason

    def aux_specs(self, model: ModelShape) -> tuple[AuxSpec, ...]:
        """Nothing, or each page's rotary keys, ``[page_size, rope_dim]``: they are read from the latent cache else."""
        if self.config.rope_copy != "on":
            return ()
        shape = (self.config.page_size, model.rope_dim)
        return (AuxSpec(ROPE_COPY, shape, model.kv_dtype, copy_rope, before_select=True),)

    def n_select(self, n_pages: torch.Tensor) -> torch.Tensor:
        """The most blocks that a sparse row attends to: those of the budget, or ``floor(n_pages * max_active_ratio)``,
        and all at theta1 1.
        """
        if self._budget:
            return torch.full_like(n_pages, self._budget)
        if self.config.theta1 >= 1:
            return n_pages.clone()
        # One block at least: a row that holds a single one is then dense.
        return (n_pages.to(torch.float64) * self.config.max_active_ratio + 1e-9).to(torch.int32).clamp_min(1)

    def mass(self, view: BatchView, layer_id: int, query: LatentQuery, pools: AuxBuffers) -> torch.Tensor:
        """Share of the attention mass that each block is given, mean over the heads, ``[rows, max_pages]`` float32."""
        if self.selects_by_rope(layer_id):
            copied = self.config.rope_copy == "on"
            keys = pools.buffer(ROPE_COPY, layer_id).flatten(0, 1) if copied else query.cache[:, query.nope.shape[2] :]
            asked = query.rope
        else:
            asked, keys = torch.cat([query.nope, query.rope], dim=-1), query.cache
        mass = block_mass(
            asked,
            keys,
            view.page_table,
            view.n_pages,
            query.last_slots,
            self.block_size,
            sm_scale=query.scaling,
            k_scale=query.kv_scale,
            out=view.scores[:, 0],
        )
        return query.mean_over_ranks(mass) if self.config.head_scope == "global" else mass

    def select(self, view: BatchView, layer_id: int, query: LatentQuery, pools: AuxBuffers) -> SparseIndices:
        """One selection for all heads, by the mean of their masses."""
        mass = self.mass(view, layer_id, query, pools)
        top_p = self._within_budget(mass, view) if self._budget else view.row_thresholds
        return SparseIndices(
            *block_topp(mass, view.page_table, view.n_pages, view.n_select, top_p, view.selected, view.stats)
        )

    def _within_budget(self, mass: torch.Tensor, view: BatchView) -> torch.Tensor:
        """Theta1 of each row, or what its heaviest blocks hold where they fill the budget; the newest one is added."""
        held = torch.arange(mass.shape[1], device=mass.device) < view.n_pages[:, None]
        # A float32 sum of a row may depend on how many rows there are.
        mass = mass.double().where(held, 0.0)
        heaviest = mass.topk(min(self._budget - 1, mass.shape[1])).values.sum(dim=1)
        share = heaviest / mass.sum(dim=1) * (1 - ROUNDING)
        return torch.minimum(view.row_thresholds, share.to(torch.float32))

    def scratch_bytes(self, model: ModelShape, view: BatchView, dtype: torch.dtype, device: torch.device) -> int:
        """The most that one step takes: refreshing the keys' copy, selecting, or attending, one after the other."""
        rows, width = view.page_table.shape
        heads, rope, whole = model.num_q_heads, model.rope_dim, model.head_dim
        steps = [
            sparse_mla_decode.scratch_bytes(
                rows,
                num_heads=heads,
                latent_dim=whole - rope,
                blocks=view.usual_select,
                block_size=self.block_size,
                dtype=dtype,
                device=device,
            )
        ]
        if self.config.rope_copy == "on":
            steps.append(rows * (self.config.page_size * rope * model.kv_dtype.itemsize + torch.int64.itemsize))
        if self._budget:
            # What is held, its masses before and after, and the heaviest with their places.
            steps.append(rows * (17 * width + 16 * min(self._budget, width)))
        # The reduction over ranks may copy the masses; for a full score both parts of the query are put together.
        means = view.scores.nbytes if self.config.head_scope == "global" else 0
        for dim in (rope, whole) if self.config.insensitive == "full_score" else (rope,):
            query = rows * heads * dim * dtype.itemsize if dim > rope else 0
            steps.append(query + max(means, scratch_bytes(rows, heads, dim, width, self.block_size, dtype, device)))
        return max(steps)


def copy_rope(
    k_caches: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    last_slots: torch.Tensor,
    page_size: int,
    overflow: torch.Tensor,
) -> None:
    """Copy the rotary keys of written pages, see ``AuxSpec.refresh``.

    Args:
        k_caches: ``[slots, 1, latent + rope]`` by layer.
        buffers: ``[pages, page_size, rope]`` by layer.
        last_slots: ``[n]`` int64, the last written slot of each page, -1: none.
        page_size: tokens per page.
        overflow: untouched: the copy has the cache's dtype.
    """
    # Page 0 is SGLang's dummy: what is not meant goes there, and stays what it is.
    pages = last_slots.clamp_min(0) // page_size
    for k_cache, buffer in zip(k_caches, buffers, strict=True):
        # Not every dtype can be indexed on every device; bytes can.
        bytes_of = buffer.view(torch.uint8)
        bytes_of[pages] = k_cache.view(torch.uint8).unflatten(0, (-1, page_size))[pages, :, 0, -bytes_of.shape[2] :]


def _other_layers(calibration: RopeCalibration, layers: int) -> str | None:
    measured = len(calibration.layers)
    return None if measured == layers else f"the calibration is of a model of {measured} layers, this one has {layers}"
