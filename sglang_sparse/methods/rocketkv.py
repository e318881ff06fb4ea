"""RocketKV: a prompt's last queries choose its kept blocks once; bounds on their keys choose those that a step reads.

Source: RocketKV (arXiv:2502.14051) and TensorRT-LLM's ``RocketSparseAttentionConfig``, with its field names, except for
``kt_page_size``, its ``page_size``. The two stages are ``window_score`` and ``kt_select``.

Differences from the source:

- With ``eviction`` "visibility", the other blocks of a prompt stay in the KV pool and in the radix tree. They are only
  invisible to the request's own decode steps. With "compact", the request releases the prompt and the tree may evict
  it, see ``scheduler/compaction.py``.
- Kept and read blocks have ``kt_page_size`` tokens and are aligned to absolute positions. So a KT page is a function of
  its keys and shared with its KV page. A block scores as its best token does.
- Stage 2 chooses from the kept blocks and all that follow the window's first token. The newest block is always attended
  to.
- KT bounds are rounded outwards, so that they stay bounds.
- Attention sinks are in the attention alone: both stages choose as they would without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator

from sglang_sparse.methods.base import VIEW_BUFFERS, AuxSpec, ModelShape, SparseIndices, ViewBuffer
from sglang_sparse.methods.config import RectifyConfig
from sglang_sparse.methods.roles import Prompts, PromptSelector
from sglang_sparse.methods.support import (
    Architecture,
    FlagLimit,
    above_one,
    given,
    is_decode_server,
    refuse_sizes,
    refuse_soft_cap,
)
from sglang_sparse.methods.views import attention_bytes
from sglang_sparse_kernels import kt_select as kt
from sglang_sparse_kernels import window_score as window
from sglang_sparse_kernels.page_summary import update_page_summaries
from sglang_sparse_kernels.page_topk import page_topk

if TYPE_CHECKING:
    from sglang_sparse.methods.aux_buffers import AuxBuffers
    from sglang_sparse.methods.views import BatchView

KT_CACHE = "kt_cache"
KT_DTYPES = {"bfloat16": torch.bfloat16, "float8_e5m2": torch.float8_e5m2}
HEAD_DIMS = (16, 32, 64, 128)
# More than any context; what is counted in tokens or blocks fits an int32.
MOST_TOKENS = 1 << 24
WINDOW_LIMITS = (
    FlagLimit(
        "a prefix cache on the decode server",
        given("disaggregation_decode_enable_radix_cache"),
        "it encodes a prompt's last tokens again, in pages that other requests would share; leave out "
        "--disaggregation-decode-enable-radix-cache",
    ),
    FlagLimit(
        "several ranks on the decode server",
        lambda args: (
            (args.enable_dp_attention or above_one("attn_dp_size")(args) or above_one("pp_size")(args))
            if is_decode_server(args)
            else None
        ),
        "it encodes a prompt's last tokens again, in a pass that the other ranks would have to join",
    ),
)


class RocketkvConfig(RectifyConfig):
    """Configuration of ``--sparse-method rocketkv``."""

    request_fields: ClassVar[tuple[str, ...]] = ("topk", *RectifyConfig.request_fields)

    rectify_interval: int = Field(
        0,
        ge=0,
        description="Tokens between dense passes that re-encode a request's last tokens; 0: never, as in the source.",
    )
    window_size: int = Field(
        32, ge=1, le=1024, description="Last tokens of a prompt; their queries choose the kept tokens."
    )
    kt_page_size: Literal[1, 2, 4, 8, 16, 32, 64] = Field(4, description="Tokens of a block, TensorRT-LLM's page_size.")
    prompt_budget: int = Field(
        2048, ge=1, le=MOST_TOKENS, description="Tokens that each KV head keeps of a prompt, including its window."
    )
    kernel_size: int = Field(63, ge=1, le=32767, description="Tokens around one that share its importance; odd.")
    topk: int = Field(
        64,
        ge=1,
        le=MOST_TOKENS,
        description="Blocks of kt_page_size tokens that a decode step attends to; shorter rows attend to all.",
    )
    topr: int | None = Field(
        None, ge=1, description="Number of the query's largest dimensions that score a block; null: all."
    )
    kt_cache_dtype: Literal["bfloat16", "float8_e5m2"] = Field(
        "float8_e5m2", description="Element type of the bounds on the keys of a block."
    )
    eviction: Literal["visibility", "compact"] = Field(
        "visibility",
        description='Tokens that are not kept: "visibility" only hides them from the request, "compact" releases '
        "them, so that they may be evicted.",
    )

    @field_validator("prompt_budget")
    @classmethod
    def _budget_holds_the_window_and_a_block(cls, value: int, info: ValidationInfo) -> int:
        if value < (least := info.data.get("window_size", 0) + info.data.get("kt_page_size", 0)):
            raise ValueError(f"must be at least window_size + kt_page_size ({least})")
        return value

    @field_validator("kernel_size")
    @classmethod
    def _kernel_has_a_middle(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("must be odd")
        return value

    @field_validator("eviction")
    @classmethod
    def _compact_leaves_nothing_to_rectify(cls, value: str, info: ValidationInfo) -> str:
        if value == "compact" and (interval := info.data.get("rectify_interval")):
            raise ValueError(
                f'must be "visibility" with rectify_interval {interval}; allowed with "compact": 0 (never), as dense '
                "passes would read what is gone"
            )
        return value

    @field_validator("kt_page_size")
    @classmethod
    def _blocks_divide_pages(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("page_size", value):
            raise ValueError(f"must divide page_size ({info.data['page_size']})")
        return value


class Rocketkv(PromptSelector):
    """Keep the blocks that the prompt's last queries attend to, and attend to the best of them in each step."""

    config_class = RocketkvConfig
    config: RocketkvConfig
    view_buffers = VIEW_BUFFERS
    flag_limits = WINDOW_LIMITS
    fp8_kv = False
    combines = True

    @property
    def block_size(self) -> int:
        """Tokens of a KT page."""
        return self.config.kt_page_size

    @property
    def window_tokens(self) -> int:
        """``window_size``."""
        return self.config.window_size

    @property
    def max_kept(self) -> int:
        """Whole blocks of ``prompt_budget`` that the window leaves."""
        return (self.config.prompt_budget - self.config.window_size) // self.block_size

    @property
    def compacts(self) -> bool:
        """Whether ``eviction`` is "compact"."""
        return self.config.eviction == "compact"

    @property
    def alone(self) -> str | None:
        """Return the reason why compaction needs all layers, or None without compaction."""
        if self.compacts:
            return (
                'eviction is "compact", which frees the pages of a prompt for all layers at once; allowed: "visibility"'
            )
        return None

    def kept(self, prompt: int) -> tuple[int, int]:
        """Everything up to ``prompt_budget``, as the authors' code; else the budget less the window."""
        if prompt <= max(self.config.prompt_budget, self.window_tokens):
            return 0, 0
        first_visible = (prompt - self.window_tokens) // self.block_size
        return min(self.max_kept, first_visible), first_visible

    def refuse(self, model_config: Architecture) -> str | None:
        """Refuse MLA models, what kernels or ``topr`` do not fit, and dense layers with "compact"."""
        if model_config.attention_arch.name == "MLA":
            return "rocketkv needs an MHA or GQA model; this one uses MLA (multi-head latent attention): see robsa"
        if reason := refuse_soft_cap("rocketkv", model_config) or refuse_sizes(model_config, {"head_dim": HEAD_DIMS}):
            return reason
        if self.config.topr is not None and self.config.topr > model_config.head_dim:
            return f"topr is {self.config.topr}; allowed: at most its head_dim, {model_config.head_dim}"
        if self.compacts and len(self.sparse_layers(layers := model_config.num_hidden_layers)) < layers:
            return (
                f'eviction is "compact" and {layers - len(self.sparse_layers(layers))} of its {layers} layers are '
                'dense, which would attend to what is gone; allowed: none dense, or {"eviction": "visibility"}'
            )
        return None

    def warnings(self) -> tuple[str, ...]:
        """Say whose pages are small: TensorRT-LLM has another ``page_size``."""
        if self.config.page_size >= RocketkvConfig.model_fields["page_size"].default:
            return ()
        return (
            f"rocketkv: page_size is {self.config.page_size}, the tokens of a page of the KV cache; TensorRT-LLM's "
            f"page_size is kt_page_size here, and that is {self.config.kt_page_size}",
        )

    def aux_specs(self, model: ModelShape) -> tuple[AuxSpec, ...]:
        """The KT cache: of each block the maximum and minimum of its keys, ``[kv_heads, 2, head_dim]``."""
        blocks = self.config.page_size // self.block_size
        shape, dtype = (blocks, model.num_kv_heads, 2, model.head_dim), KT_DTYPES[self.config.kt_cache_dtype]
        remedy = '{"kt_cache_dtype": "bfloat16"}'
        return (
            AuxSpec(
                KT_CACHE, shape, dtype, self._refresh, before_select=True, remedy=remedy, entry_tokens=self.block_size
            ),
        )

    def _refresh(
        self,
        k_caches: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        last_slots: torch.Tensor,
        page_size: int,
        overflow: torch.Tensor,
    ) -> None:
        blocks = [buffer.flatten(0, 1) for buffer in buffers]
        update_page_summaries(k_caches, blocks, last_slots, self.block_size, overflow)

    def n_select(self, n_pages: torch.Tensor) -> torch.Tensor:
        """``topk`` blocks."""
        return torch.full_like(n_pages, self.config.topk)

    def keep(self, prompts: Prompts) -> torch.Tensor:
        """Stage 1: the blocks whose tokens the window's queries attend to most, by KV head."""
        config, (rows, width, _, _) = self.config, prompts.window.shape
        device = prompts.lengths.device
        scores = window.window_score(
            prompts.window,
            torch.full((rows,), width, dtype=torch.int32, device=device),
            prompts.key_cache,
            prompts.page_table,
            prompts.lengths,
            prompts.page_size,
            prompts.scaling,
            prompts.k_scale,
            config.kernel_size,
        )
        best = scores.unflatten(2, (-1, self.block_size)).amax(dim=3)
        first_visible = (prompts.lengths - width) // self.block_size
        logical = torch.arange(best.shape[2], dtype=torch.int32, device=device).expand(rows, -1)
        counts = first_visible.clamp(max=self.max_kept)
        return page_topk(best, logical, first_visible, counts, self.max_kept)[0]

    def keep_scratch_bytes(self, model: ModelShape, prompts: int, max_context: int) -> int:
        """Scores of tokens and of blocks, the choice, and what the op takes."""
        results = prompts * model.num_kv_heads * (max_context + max_context // self.block_size + self.max_kept)
        scored = window.scratch_bytes(
            prompts,
            window=self.window_tokens,
            num_q_heads=model.num_q_heads,
            num_kv_heads=model.num_kv_heads,
            max_length=max_context,
        )
        return scored + 4 * results

    def select(self, view: BatchView, layer_id: int, query: torch.Tensor, pools: AuxBuffers) -> SparseIndices:
        """Stage 2: of the visible blocks those that the group's queries may attend to most."""
        kept, summary = pools.require_kept(layer_id), pools.buffer(KT_CACHE, layer_id).flatten(0, 1)
        topr = self.config.topr or query.shape[-1]
        # Without columns where the method's buffers are not used.
        scratch = (*view.visible, view.scores) if view.scores.shape[2] else None
        indices, counts = kt.kt_select(
            query,
            summary,
            kept=kept.blocks[layer_id],
            n_kept=kept.counts,
            first_visible=kept.first_visible,
            requests=view.requests,
            block_table=view.page_table,
            n_blocks=view.n_pages,
            n_select=view.n_select,
            topr=topr,
            sm_scale=view.logit_scale,
            out=view.selected,
            stats=view.stats,
            scratch=scratch,
            tables_ready=pools.views_ready,
        )
        return SparseIndices(indices, counts)

    def buffers(
        self, model: ModelShape, width: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[ViewBuffer, ...]:
        """Without lists of visible blocks and scores where the selection keeps both to itself."""
        scratch = kt.uses_scratch(
            num_q_heads=model.num_q_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            # A view is up to fifteen wider.
            width=width + 15,
            dtype=dtype,
            summary_dtype=KT_DTYPES[self.config.kt_cache_dtype],
            device=device,
        )
        return self.view_buffers if scratch else ("page_table", "selected")

    def scratch_bytes(self, model: ModelShape, view: BatchView, dtype: torch.dtype, device: torch.device) -> int:
        """That of the scores and of the attention, one after the other."""
        rows = len(view.n_pages)
        scored = kt.scratch_bytes(rows, model.num_q_heads, model.num_kv_heads, width=view.max_select)
        return max(scored, attention_bytes(model, view, dtype, device))
