"""DSA: each token attends to the tokens that the model's own trained indexer chooses.

Source: DeepSeek-V3.2-Exp (DeepSeek Sparse Attention, section 2.1). SGLang's model, its indexer's weights and its KV
pool are unchanged; ``attention/dsa/indexer.py`` replaces its kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.methods.base import DecodeMethod, ModelShape
from sglang_sparse.methods.config import Crossover, MethodConfig
from sglang_sparse.methods.dsa import weights
from sglang_sparse.methods.fingerprint import tensors
from sglang_sparse.methods.support import Architecture, FlagLimit, ModelConfig, given, other_than, refuse_sizes
from sglang_sparse_kernels import sparse_mla_decode
from sglang_sparse_kernels.index_topk import choose
from sglang_sparse_kernels.sparse_mla_decode import LATENT_DIMS, ROPE_DIMS

if TYPE_CHECKING:
    import torch

    from sglang_sparse.methods.views import BatchView

logger = logging.getLogger(__name__)

INDEX_DIM = 128
MOST_HEADS = 64
MOST_TOPK = 4096
# What makes an indexer another one than DeepSeek-V3.2's: choices that layers or neighbouring tokens share (1: none do),
# tokens that are always chosen, other RoPE.
SHARED = ("index_topk_freq", "cli_factor", "index_kpool")
OTHER_INDEXERS = ("index_topk_pattern", "index_init_tokens", "index_local_tokens", "indexer_rope_interleave")
AUTO, NATIVE, PORTABLE = "auto", "native", "portable"
# What runs each stage, by the choice of a server that starts. SGLang's own selection leaves open which of two equal
# tokens it takes.
STAGES: Mapping[str, Mapping[str, str]] = {
    NATIVE: {"indexer": NATIVE, "topk": NATIVE, "attention": NATIVE},
    AUTO: {"indexer": NATIVE, "topk": PORTABLE, "attention": NATIVE},
    PORTABLE: {"indexer": PORTABLE, "topk": PORTABLE, "attention": PORTABLE},
}


def _one_for_all_stages(value: object) -> object:
    if isinstance(value, dict):
        raise ValueError(f'one choice is for all stages: must be "{AUTO}", "{NATIVE}" or "{PORTABLE}"')
    return value


# Tokens of a page in which SGLang keeps an indexer's keys; it would put this instead of another one silently.
INDEXER_PAGE = 64
INDEXER_LIMITS = (
    FlagLimit(
        "prefill-decode disaggregation",
        other_than("disaggregation_mode", "null"),
        "GPUs have been compared with SGLang's own kernels alone",
    ),
    FlagLimit(
        "LoRA",
        given("enable_lora", "lora_paths"),
        """this project's kernels are not proven with adapters; allowed: {"implementation": "native"}""",
    ),
    FlagLimit("HiSparse", given("enable_hisparse"), "it is another sparse attention"),
    FlagLimit(
        "external cache linker",
        given("enable_unified_cache_external_linker"),
        "that its store keeps the indexer's keys is not proven",
    ),
    FlagLimit("returned indexer top-k", given("enable_return_indexer_topk"), "what is chosen is not reported"),
    FlagLimit(
        "a page size",
        other_than("page_size", INDEXER_PAGE),
        f"the indexer's keys are laid out in pages of {INDEXER_PAGE}",
    ),
    FlagLimit(
        "a float16 model",
        lambda args: args.dtype if args.dtype in ("half", "float16") else None,
        "the kernels take bfloat16; allowed: --dtype bfloat16",
    ),
)


class DsaConfig(MethodConfig):
    """Configuration of ``--sparse-method dsa``: the kernels alone, as training has fixed the attention."""

    limits: ClassVar[tuple[str, ...]] = ()

    page_size: int = Field(INDEXER_PAGE, description="Tokens per KV page: 64, by the layout of the indexer's keys.")
    min_seq_len: int = Field(0, description="0: rows with more tokens than the model's index_topk run sparse.")
    crossover_tokens: Crossover = Field(0, description="0, as min_seq_len.")
    implementation: Annotated[Literal["auto", "native", "portable"], BeforeValidator(_one_for_all_stages)] = Field(
        AUTO,
        description='Kernels: "native" (SGLang\'s own), "portable" (this project\'s: in Triton, without a GPU in '
        'PyTorch) or "auto" (SGLang\'s except for the selection if they run, else "portable"; "native" where a flag '
        "or the model needs it).",
    )

    @field_validator("layers", "dense_fallback", "check_exactness", "page_size", "min_seq_len", "crossover_tokens")
    @classmethod
    def _as_trained(cls, value: object, info: ValidationInfo) -> object:
        # Validators of one field have its name.
        allowed = cls.model_fields[str(info.field_name)].default
        if value != allowed:
            raise ValueError(f"must be {allowed!r} with dsa")
        return value

    @model_validator(mode="before")
    @classmethod
    def _nothing_to_rectify(cls, data: object) -> object:
        if isinstance(data, dict) and (given := [name for name in data if str(name).startswith("rectify_")]):
            raise SparseArgumentError(
                f"{given[0]}: there is nothing to rectify; the model was trained with its selection, in all layers and "
                "at every length, so its KV is exact",
                field=given[0],
                got=data[given[0]],
            )
        return data


class Dsa(DecodeMethod):
    """Sparse prefill and decode by the model's indexer.

    A *block* is one token here, so what is counted in pages elsewhere is counted in tokens.

    Attributes:
        index_topk: tokens that a row attends to at most: the model's.
        stages: "native" or "portable" for each stage; of a server that starts, see ``kernel_choice.resolve``.
    """

    config_class = DsaConfig
    attention = "DSA"
    selects_in_model = True
    verifies = True
    # The indexer makes its own logits and selection, and names tokens by their positions.
    view_buffers = ()
    # Those of this project make float8 of integers.
    needs_float8 = False
    flag_limits = INDEXER_LIMITS
    exact = True
    index_topk = 0

    def __init__(self, config: DsaConfig):
        super().__init__(config)
        self.stages = STAGES[config.implementation]
        self.passes_through = config.implementation == NATIVE

    def native(self, stage: str) -> bool:
        """Whether SGLang's own kernels run a stage: "indexer", "topk" or "attention"."""
        return self.stages[stage] == NATIVE

    def kernels(self, usual: str) -> str:
        """Return the kernels of each stage."""
        ours = usual if usual == "reference" else PORTABLE
        return ", ".join(f"{stage} {NATIVE if self.native(stage) else ours}" for stage in self.stages)

    @property
    def block_size(self) -> int:
        """One token."""
        return 1

    def refuse(self, model_config: Architecture) -> str | None:
        """Refuse a model without an indexer, or with one that the kernels do not serve."""
        config = model_config.hf_text_config
        trained = getattr(config, "index_topk", None) is not None
        if trained and self.passes_through:
            return None
        if not trained or model_config.attention_arch.name != "MLA":
            return (
                "dsa needs a model with a trained indexer (index_topk in its config, as DeepSeek-V3.2 has); methods "
                "that need no training: resa, rocketkv or skip_softmax for MHA and GQA models, robsa for MLA models"
            )
        sizes = {"qk_rope_head_dim": ROPE_DIMS, "kv_lora_rank": LATENT_DIMS, "index_head_dim": (INDEX_DIM,)}
        if reason := refuse_sizes(config, sizes):
            return reason
        for name, most in (("index_n_heads", MOST_HEADS), ("index_topk", MOST_TOPK)):
            if not 1 <= (found := getattr(config, name, 0)) <= most:
                return f"its {name} is {found}; allowed: 1 to {most}"
        if config.index_topk >= model_config.context_len:
            return (
                f"its index_topk is {config.index_topk} and the context length is {model_config.context_len}: every "
                "token would attend to all; allowed: a longer context"
            )
        shared = {name: getattr(config, name, None) for name in SHARED if (getattr(config, name, None) or 1) != 1}
        other = shared | {name: value for name in OTHER_INDEXERS if (value := getattr(config, name, None))}
        if "shared" in (getattr(config, "indexer_types", None) or ()):
            other["indexer_types"] = '"shared" layers'
        listed = ", ".join(f"{name} {value}" for name, value in other.items())
        return f"its indexer has {listed}, which is not served yet" if other else None

    def refuse_weights(self, model_config: ModelConfig) -> str | None:
        """Refuse weights without an indexer in every layer, or with another one than the config's.

        Weights that are not available are not judged, and a warning says so.
        """
        config = model_config.hf_text_config
        try:
            found = tensors(model_config.model_path, model_config.revision)
        except ValueError as error:
            return str(error)
        if found is None:
            logger.warning(
                "sglang_sparse: whether the weights of %s hold its indexers is not known: its safetensors files are "
                "not all available; they are checked again once it is loaded",
                model_config.model_path,
            )
            return None
        layers = model_config.num_hidden_layers
        return weights.refuse(found, layers, config.index_n_heads, config.index_head_dim)

    def adopt(self, model_config: ModelConfig) -> None:
        """Take ``index_topk``."""
        self.index_topk = model_config.hf_text_config.index_topk

    def n_select(self, n_pages: torch.Tensor) -> torch.Tensor:
        """The model's ``index_topk``, or all tokens where there are fewer."""
        return n_pages.clamp(max=self.index_topk)

    def scratch_bytes(self, model: ModelShape, view: BatchView, dtype: torch.dtype, device: torch.device) -> int:
        """Return the larger need of the selection from SGLang's logits, with padded rows, and of portable attention.

        The logits of a portable indexer are no larger than SGLang's.
        """
        rows, latent = view.n_pages.shape[0], model.head_dim - model.rope_dim
        if self.native("attention"):
            return 4 * rows * self._columns(view.page_table.shape[1])
        return sparse_mla_decode.scratch_bytes(rows, model.num_q_heads, latent, self.index_topk, 1, dtype, device)

    def selection_bytes(self, queries: int, width: int, device: torch.device) -> int:
        """Logits of as many queries as are served at a time, or what choosing from SGLang's takes in addition; SGLang
        divides its own by the memory that it finds free.
        """
        return choose.scratch_bytes(queries, self._columns(width), device, self.native("indexer"))

    def _columns(self, tokens: int) -> int:
        """Logits of a query that may see so many tokens: whole pages of them."""
        return -(-tokens // self.config.page_size) * self.config.page_size
