"""Read SGLang's arguments as resolved so far, and write this plugin's changes to them.

From 0.5.20 on the record keeps the given values. SGLang declares resolved values separately, and so does this plugin
once resolution has begun.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

SOURCE = "sglang_sparse"
# The speculative algorithm whose drafts are the model's own, under the sparse method; and tokens that it drafts.
SPARSE_SELF = "SPARSE_SELF"
DRAFT_TOKENS, MOST_DRAFT_TOKENS = 6, 16
# SGLang's speculative algorithms that may run where prompts alone are sparse.
DRAFTERS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
# Those whose drafts can be chains, which a decode method may verify sparse; and a chain as SGLang would choose it.
CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
CHAIN = 3, 1, 4


class Arguments:
    """A view of the arguments that reads resolved values and writes declarations.

    Args:
        record: SGLang's ``ServerArgs``.
    """

    __slots__ = ("record",)

    record: Any
    attention_backend: str | None
    attn_dp_size: int
    chunked_prefill_size: int | None
    context_length: int | None
    cuda_graph_config: Any
    disable_cuda_graph_padding: bool
    disable_radix_cache: bool
    disaggregation_mode: str
    dp_size: int
    dsa_decode_backend: str | None
    dsa_prefill_backend: str | None
    dtype: str
    elastic_ep_backend: str | None
    enable_deterministic_inference: bool
    enable_dp_attention: bool
    enable_mixed_chunk: bool
    enable_pd_role_switch: bool
    enable_return_aux_hidden_states: bool
    grpc_mode: bool
    kv_cache_dtype: str
    load_format: str
    max_prefill_tokens: int
    max_running_requests: int | None
    model_path: str
    nnodes: int
    node_rank: int
    page_size: int | None
    pp_size: int | None
    quantization_param_path: str | None
    random_seed: int | None
    revision: str | None
    rl_on_policy_target: str | None
    smg_grpc_mode: bool
    sparse_config: str | dict[str, object] | None
    sparse_method: str | None
    sparse_prefill_config: str | dict[str, object] | None
    sparse_prefill_method: str | None
    speculative_draft_model_path: str | None
    speculative_draft_model_revision: str | None
    speculative_eagle_topk: int | None
    speculative_num_draft_tokens: int | None
    speculative_num_steps: int | None
    tokenizer_path: str | None
    tp_size: int

    def __init__(self, record: object):
        object.__setattr__(self, "record", record)

    def __getattr__(self, name: str) -> object:
        from sglang.srt.arg_groups.arg_utils import field_names
        from sglang.srt.arg_groups.overrides import resolution_result

        if name in field_names(type(self.record)):
            return resolution_result(self.record, name)
        return getattr(self.record, name)

    def __setattr__(self, name: str, value: object) -> None:
        from sglang.srt.arg_groups.overrides import declare_resolution

        if hasattr(self.record, "_raw_input"):
            declare_resolution(self.record, SOURCE, **{name: value})
        else:
            setattr(self.record, name, value)

    @property
    def speculative_algorithm(self) -> str | None:
        """The algorithm that drafts: none where SGLang returns auxiliary hidden states, which the flag then names."""
        found = self.__getattr__("speculative_algorithm")
        return None if self.enable_return_aux_hidden_states else cast("str | None", found)

    def get_model_config(self) -> ModelConfig:
        """Return the model, which SGLang caches from now on."""
        from sglang.srt.arg_groups.model_override_base import model_config_of

        return model_config_of(self.record)

    def new_model_config(self) -> ModelConfig:
        """Return a model that SGLang does not cache."""
        from sglang.srt.configs.model_config import ModelConfig

        return ModelConfig.from_server_args(self.record)

    def get_attention_backends(self) -> tuple[str, str]:
        """Return the attention backends of prefill and decode."""
        from sglang.srt.arg_groups.model_override_base import attention_backends_of

        return attention_backends_of(self)


def of(server_args: object) -> Arguments:
    """Return a view of SGLang's arguments; test doubles are returned as they are."""
    if hasattr(type(server_args), "resolve_once"):
        return Arguments(server_args)
    return cast("Arguments", server_args)


def deterministic(args: Arguments) -> bool:
    """Whether a row's output must not depend on the other rows of its batches."""
    return bool(args.enable_deterministic_inference or args.rl_on_policy_target)


def drafts_itself(args: Arguments) -> bool:
    """Whether the sparse method drafts and dense passes verify: ``--speculative-algorithm SPARSE_SELF``."""
    return (args.speculative_algorithm or "").upper() == SPARSE_SELF


def verified_tokens(args: Arguments) -> int:
    """Tokens of a row in a verification that runs sparse: of SGLang's own drafts, on a server with a decode method.

    0 where nothing is verified, or what is verified is dense.
    """
    if not args.speculative_algorithm or drafts_itself(args) or not args.sparse_method:
        return 0
    return args.speculative_num_draft_tokens or 0
