"""ReSA: group block sparse decode over page summaries, with dense rectification.

Source: "Rectified Sparse Attention" (ReSA), sections 2.1 to 2.3; the score is Quest's upper bound. The paper's p, both
the ratio and the sparsity, is ``active_ratio`` here. The scheduler rectifies, see ``scheduler/rectification.py``; with
``rectify_interval`` 0 this is Quest with one selection per GQA group.

The default differs from the paper: summaries are centroids (``page_centroids``), and heads vote (``page_vote``) instead
of sharing one mean query. The paper's own form is ``summary`` minmax with ``group`` mean_query.

The paper always attends to one newest page (n_local), this method to two. A page that has just begun holds one token,
and nothing else would ensure that the words before it are attended to. Answers that cross the end of a page show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator

from sglang_sparse.methods.base import AuxSpec, DecodeMethod, ModelShape, SparseIndices
from sglang_sparse.methods.config import RectifyConfig
from sglang_sparse.methods.views import attention_bytes
from sglang_sparse_kernels import page_vote as votes
from sglang_sparse_kernels.page_centroids import LEAST_DIM, MAX_CENTROIDS, holds, record_bytes, update_page_centroids
from sglang_sparse_kernels.page_score import page_score
from sglang_sparse_kernels.page_summary import update_page_summaries
from sglang_sparse_kernels.page_topk import page_topk

if TYPE_CHECKING:
    from sglang_sparse.methods.aux_buffers import AuxBuffers
    from sglang_sparse.methods.support import Architecture
    from sglang_sparse.methods.views import BatchView

SUMMARY = "page_summary"
SUMMARY_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


class ResaConfig(RectifyConfig):
    """Configuration of ``--sparse-method resa``."""

    request_fields: ClassVar[tuple[str, ...]] = ("active_ratio", "token_budget", *RectifyConfig.request_fields)
    replaces: ClassVar[Mapping[str, str]] = {"active_ratio": "token_budget", "token_budget": "active_ratio"}

    active_ratio: float = Field(0.1, gt=0, le=1, description="Share of a row's pages that a decode step attends to.")
    min_pages: int = Field(16, ge=1, description="Attend to at least this many pages.")
    token_budget: int | None = Field(
        None,
        ge=1,
        description="Attend to this many tokens of a row instead of active_ratio's share, in whole pages.",
    )
    local_pages: int = Field(2, ge=1, description="Newest pages that are always attended to; at most min_pages.")
    summary: Literal["minmax", "centroids"] = Field(
        "centroids",
        description="Page summary: means of similar keys, or minimum and maximum of all keys (the paper's).",
    )
    centroids: int | None = Field(
        None,
        ge=1,
        le=MAX_CENTROIDS,
        description="With summary centroids, means of a page, at most page_size; by default 6, or 2 with an fp8 KV "
        "cache, which takes no more bytes than minmax in the KV cache's dtype.",
    )
    group: Literal["mean_query", "vote"] = Field(
        "vote",
        description="How the query heads of a KV head choose pages: vote averages their softmax over the pages, "
        "mean_query scores pages with their mean query (the paper's).",
    )
    summary_dtype: Literal["auto", "bf16", "fp8"] = Field(
        "auto",
        description="Element type of summary minmax; auto is the KV cache's. Centroids have a fixed format.",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_fit(cls, data: object) -> object:
        if isinstance(data, dict):
            if data.get("min_pages") == 1:
                data = {"local_pages": 1, **data}
            # A dtype is of bounds, which with the mean query were the default once: an old config stays what it was.
            if data.get("summary_dtype", "auto") != "auto" and "summary" not in data:
                data = {"summary": "minmax", "group": "mean_query", **data}
        return data

    @field_validator("token_budget")
    @classmethod
    def _budget_holds_the_least(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is None:
            return value
        if value < (least := info.data.get("min_pages", 0) * info.data.get("page_size", 0)):
            raise ValueError(f"must be at least min_pages * page_size ({least})")
        if (ratio := info.data.get("active_ratio")) != cls.model_fields["active_ratio"].default:
            raise ValueError(f"takes the place of active_ratio, which is {ratio:g}: leave one of them out")
        return value

    @field_validator("local_pages")
    @classmethod
    def _local_fits(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("min_pages", value):
            raise ValueError(f"must be at most min_pages ({info.data['min_pages']})")
        return value

    @field_validator("centroids")
    @classmethod
    def _centroids_are_kept(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and (summary := info.data.get("summary", "centroids")) != "centroids":
            raise ValueError(f'needs summary "centroids", got {summary!r}')
        if value is not None and value > (size := info.data.get("page_size", value)):
            raise ValueError(f"must be at most page_size ({size})")
        return value

    @field_validator("summary_dtype")
    @classmethod
    def _dtype_is_of_bounds(cls, value: str, info: ValidationInfo) -> str:
        if value != "auto" and info.data.get("summary") == "centroids":
            raise ValueError(f'needs summary "minmax", got {value!r} with "centroids", which are kept in four bits')
        return value


class Resa(DecodeMethod):
    """Score every page by its summary, attend to the best ones."""

    config_class = ResaConfig
    config: ResaConfig
    combines = verifies = True

    @property
    def local_blocks(self) -> int:
        """Pages."""
        return self.config.local_pages

    def refuse(self, model_config: Architecture) -> str | None:
        """Refuse MLA models, whose cache holds latents, not the keys of KV heads, and heads too small for records."""
        if model_config.attention_arch.name == "MLA":
            return "resa needs an MHA or GQA model; this one uses MLA (multi-head latent attention), which robsa serves"
        dim = model_config.head_dim
        if self.config.summary == "centroids" and not holds(dim):
            return (
                f"summary: got 'centroids' and the model's head_dim is {dim}; allowed: an even one of at least "
                f'{LEAST_DIM}, or {{"summary": "minmax"}}'
            )
        return None

    def aux_specs(self, model: ModelShape) -> tuple[AuxSpec, ...]:
        """One entry a page: maximum and minimum of its keys, ``[kv_heads, 2, head_dim]``, or a record of centroids."""
        heads, dim = model.num_kv_heads, model.head_dim
        if self.config.summary == "minmax":
            dtype = SUMMARY_DTYPES.get(self.config.summary_dtype, model.kv_dtype)
            return (AuxSpec(SUMMARY, (heads, 2, dim), dtype, update_page_summaries),)
        usual = 2 if model.kv_dtype.itemsize == 1 else 6
        size = record_bytes(self.config.centroids or min(usual, self.config.page_size), dim)
        return (AuxSpec(SUMMARY, (heads, size), torch.uint8, update_page_centroids),)

    def n_select(self, n_pages: torch.Tensor) -> torch.Tensor:
        """``max(min_pages, ceil(n_pages * active_ratio))`` (methods of the paper, section 2.2), or the budget."""
        if (budget := self.config.token_budget) is not None:
            return torch.full_like(n_pages, budget // self.config.page_size)
        return _count(n_pages, self.config.active_ratio).clamp_min(self.config.min_pages)

    def select(self, view: BatchView, layer_id: int, query: torch.Tensor, pools: AuxBuffers) -> SparseIndices:
        """One selection a KV head."""
        summary, local = pools.buffer(SUMMARY, layer_id), self.config.local_pages
        if not self._by_votes:
            scores = page_score(
                query,
                summary,
                view.page_table,
                view.n_pages,
                out=view.scores,
                local_pages=local,
                summaries_ready=pools.views_ready,
            )
            indices, counts = page_topk(
                scores,
                view.page_table,
                view.n_pages,
                view.n_select,
                view.max_select,
                out=view.selected,
                stats=view.stats,
                tables_ready=pools.views_ready,
            )
            return SparseIndices(indices, counts)
        if self.config.group == "mean_query":
            query = query.unflatten(1, (summary.shape[1], -1)).mean(2, dtype=torch.float32)
        indices, counts = votes.select_by_votes(
            query,
            summary,
            view.page_table,
            view.n_pages,
            view.n_select,
            view.max_select,
            sm_scale=view.logit_scale,
            scores=view.scores,
            out=view.selected,
            stats=view.stats,
            local_pages=local,
            tables_ready=pools.views_ready,
        )
        return SparseIndices(indices, counts)

    @property
    def _by_votes(self) -> bool:
        """Whether ``page_vote`` scores; a mean query is then a group's only voter."""
        return self.config.group == "vote" or self.config.summary == "centroids"

    def scratch_bytes(self, model: ModelShape, view: BatchView, dtype: torch.dtype, device: torch.device) -> int:
        """The more of the votes' and the attention's: scores and selection are in the view."""
        rows, width = view.page_table.shape
        voted = 0
        if self._by_votes:
            voters = model.num_q_heads if self.config.group == "vote" else model.num_kv_heads
            # Behind it the mean query, in float32.
            voted = votes.scratch_bytes(rows, voters, width) + rows * model.num_kv_heads * model.head_dim * 4
        return max(voted, attention_bytes(model, view, dtype, device))


def _count(n_pages: torch.Tensor, ratio: float) -> torch.Tensor:
    # A ratio of 0.1 is not 1/10 in binary: in float64 with a guard below one page of any real length, ceil(30 * 0.1)
    # stays 3.
    return torch.ceil(n_pages.to(torch.float64) * ratio - 1e-9).to(torch.int32)
