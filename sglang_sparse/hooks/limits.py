"""The tables of the flags that a sparse server refuses, with reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_sparse.config.arguments import CHAINS, DRAFT_TOKENS, DRAFTERS, MOST_DRAFT_TOKENS, SPARSE_SELF
from sglang_sparse.hooks.flag_predicates import (
    drafter,
    drafting,
    environment,
    lossless,
    uses_dp_attention,
    uses_ranks_or_stages,
    without_tree,
)
from sglang_sparse.methods.support import FlagLimit, above_one, given, is_decode_server, other_than

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments

FLOAT16 = ("half", "float16")
KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3")

_LORA = given("enable_lora", "lora_paths")
_CANARY = other_than("kv_canary", "none")
_ON_PREFILL = "served on a pair's prefill server without --sparse-prefill-method"

_UNCOMPARED = "not yet compared with SGLang's own kernels on GPUs"
_PER_DRAFT = "a verification also computes them for drafts that it rejects"
# All-to-alls for which SGLang pads each rank's tokens to the most that a rank has.
PADDED = ("pplx", "deepep_v2")
TREE_CORES = ("rust", "python")
_OWN_TREE = (
    "the plugin hooks SGLang's own radix tree to keep approximate KV out of the prefix cache, and would have to hook "
    f"this one too; supported cores: {', '.join(TREE_CORES)}"
)
_OTHER_TREE = FlagLimit(
    "radix cache backend",
    given("radix_cache_backend"),
    "it may load KV from a storage that flags do not show; served by --sparse-method without a prefill method, "
    "compaction or check_exactness",
)


def _foreign_core(_: object) -> str | None:
    from sglang.srt.environ import envs

    variable = envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND
    return None if variable.get() in TREE_CORES else f"{variable.name}={variable.get()}"


FLAG_LIMITS = (
    FlagLimit(
        "other speculative algorithms",
        lambda args: drafter(args, served=False) or other_than("decoupled_spec_role", "null")(args),
        f"the plugin does not follow their passes; allowed: {SPARSE_SELF}, {', '.join(DRAFTERS)} with a prefill method "
        f"alone, or {', '.join(CHAINS)} with --sparse-method resa or dsa",
    ),
    FlagLimit(
        "LMCache",
        given("enable_lmcache"),
        "its tree stores an answer's KV before the plugin removes the approximate part, and loads KV in match_prefix, "
        "where the plugin does not see it arrive; both need a hook; served: --enable-unified-cache-external-linker",
    ),
    FlagLimit("FlexKV", given("enable_flexkv"), _OWN_TREE),
    FlagLimit(
        "data-parallel attention with padded experts",
        lambda args: args.moe_a2a_backend if uses_dp_attention(args) and args.moe_a2a_backend in PADDED else None,
        "SGLang turns decode steps into dense prefills while another rank prefills, and these would have to run sparse",
    ),
    FlagLimit(
        "distributed weights",
        above_one("dwdp_size"),
        f"a rectifying step fetches experts' weights from other GPUs twice, which is not proven yet; {_ON_PREFILL}",
    ),
    FlagLimit(
        "LoRA with --enable-dp-attention",
        lambda args: uses_dp_attention(args) and _LORA(args),
        "SGLang's only LoRA backend for it needs a GPU, and is not proven there yet; leave one out",
    ),
    FlagLimit(
        "two-batch overlap",
        given("enable_two_batch_overlap"),
        "each half of a batch would need its own plan and counters, and a backend has one of each",
    ),
    FlagLimit(
        "PD multiplexing",
        given("enable_pdmux"),
        "prefill and decode run at once on two streams and would each need a plan and scratch; a backend has one",
    ),
    FlagLimit(
        "megakernel",
        given("enable_nvidia_megakernel"),
        "one kernel computes the whole step, and would have to read the selected pages only",
    ),
    FlagLimit(
        "metadata glue graphs",
        environment("SGLANG_ENABLE_METADATA_GLUE_GRAPH"),
        "a replay would skip the sparse path's plan, which would have to be captured too; unset the variable",
    ),
    FlagLimit(
        "decode context parallelism",
        above_one("dcp_size"),
        "each rank holds a part of each page, and ranks would have to reduce their scores",
    ),
    FlagLimit(
        "prefill context parallelism",
        lambda args: given("enable_prefill_cp")(args) or above_one("attn_cp_size")(args),
        f"each rank has a part of each chunk's slots, and a refresh of summaries would need all of them; {_ON_PREFILL}",
    ),
    FlagLimit(
        "unified memory pool",
        given("enable_unified_memory"),
        "its tables hold virtual slots, which summaries and kernels would have to translate",
    ),
    FlagLimit(
        "torch.compile",
        given("enable_torch_compile"),
        "it traces a step once, and the sparse and the dense step would each need a trace",
    ),
    FlagLimit("radix tree core", _foreign_core, _OWN_TREE),
    FlagLimit(
        "KV cache dtype",
        lambda args: None if args.kv_cache_dtype in KV_DTYPES else args.kv_cache_dtype,
        f"allowed: {', '.join(KV_DTYPES)}",
    ),
)

# Of servers of a disaggregated pair.
DISAGGREGATION_LIMITS = (
    FlagLimit(
        "--speculative-algorithm",
        lambda args: args.speculative_algorithm,
        "drafts are not proven yet on a pair; leave it out",
    ),
    FlagLimit(
        "offloaded KV",
        given("disaggregation_decode_enable_offload_kvcache"),
        "it stores an answer's KV as it is written, and would have to wait for rectification",
    ),
    FlagLimit(
        "KV received in host memory",
        lambda args: None if (share := args.disaggregation_decode_host_receive_threshold) == 1 else share,
        "SGLang loads it while the first decode step begins; leave out --disaggregation-decode-host-receive-threshold",
    ),
    FlagLimit("KV cache sharding", given("enable_kv_cache_sharding"), "each rank holds a part of each page"),
)

# Of servers whose kernels SGLang's own may replace, and do.
BY_NATIVE = (
    FlagLimit("data-parallel attention", uses_dp_attention, _UNCOMPARED),
    FlagLimit("pipeline parallelism", above_one("pp_size"), _UNCOMPARED),
    FlagLimit("hierarchical cache", given("enable_hierarchical_cache"), _UNCOMPARED),
)

# Of servers with a decode method that does not verify drafts.
DECODE_LIMITS = (
    FlagLimit(
        "speculative decoding",
        drafting,
        "the method selects for one token a row, and a verification has several; "
        f"allowed: {SPARSE_SELF}, --sparse-method resa, or --sparse-prefill-method without --sparse-method",
    ),
)

_DRAFTS_APART = FlagLimit(
    "drafts with data-parallel attention or pipeline parallelism",
    lambda args: drafting(args) and uses_ranks_or_stages(args),
    "their passes on several ranks are not proven yet",
)
# Of servers with a decode method that does.
VERIFY_LIMITS = (
    _DRAFTS_APART,
    FlagLimit(
        "NGRAM",
        lambda args: name if (name := drafting(args)) and name.upper() not in CHAINS else None,
        "it drafts trees, even with --speculative-ngram-max-bfs-breadth 1, and a sparse verification takes chains; "
        f"allowed: {', '.join(CHAINS)}",
    ),
    FlagLimit(
        "--speculative-eagle-topk",
        lambda args: drafting(args) and above_one("speculative_eagle_topk")(args),
        "a sparse verification takes a chain of drafts; allowed: 1",
    ),
    FlagLimit(
        "adaptive or multi-layer drafts",
        lambda args: drafting(args) and given("speculative_adaptive", "enable_multi_layer_eagle")(args),
        "a sparse verification has a fixed number of tokens and follows one worker",
    ),
    FlagLimit("drafts with the KV canary", lambda args: drafting(args) and _CANARY(args), "not proven yet"),
)

# With the second one a row that is planned to be rectified may be gone when the step is launched.
_NO_GATHER = ("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP")
RECTIFY_LIMITS = (
    FlagLimit(
        "data-parallel attention whose ranks do not gather before a step",
        lambda args: uses_dp_attention(args) and environment(*_NO_GATHER)(args),
        "ranks rectify together; unset the variable",
    ),
    FlagLimit(
        "data-parallel attention with pipeline parallelism",
        lambda args: above_one("pp_size")(args) if uses_dp_attention(args) else None,
        "each rank would have to run a pass in every stage while another rank rectifies; allowed: --pp-size 1",
    ),
    FlagLimit(
        "whole dense layers with pipeline parallelism",
        lambda args: above_one("pp_size")(args) if args.moe_dense_tp_size else None,
        "a stage hands on a pass without the padding that these layers need; allowed: --pp-size 1",
    ),
    FlagLimit("lossless decoding", lossless, "each verification is already a dense pass over all new tokens"),
    FlagLimit(
        "mixed chunk with data-parallel attention, pipeline parallelism or drafts",
        lambda args: given("enable_mixed_chunk")(args) if uses_ranks_or_stages(args) or drafting(args) else None,
        "ranks, stages and drafts would have to take part in the pass before a mixed batch; leave out "
        "--enable-mixed-chunk",
    ),
    FlagLimit(
        "returned routed experts with data-parallel attention",
        lambda args: given("enable_return_routed_experts")(args) if uses_dp_attention(args) else None,
        "SGLang finds a rank's tokens by the size of its decode graph, which a dense pass of all ranks may not have; "
        "leave one out",
    ),
    FlagLimit(
        "expert-parallel all-to-all",
        other_than("moe_a2a_backend", "none"),
        "not proven yet; with data-parallel attention SGLang may tell a rank only its own token count",
    ),
)

_TREE_OF_A_PAIR = FlagLimit(
    "--disaggregation-mode",
    without_tree,
    "there is no prefix cache; allowed with --disaggregation-decode-enable-radix-cache",
)
# Of servers with "rectify_on_finish".
FINISH_LIMITS = (
    _TREE_OF_A_PAIR,
    FlagLimit("--disable-radix-cache", given("disable_radix_cache"), "no other request could reuse the exact KV"),
    FlagLimit(
        "data-parallel attention", uses_dp_attention, "its passes run after a step, when ranks do not synchronize"
    ),
    FlagLimit(
        "pipeline parallelism", above_one("pp_size"), "its passes run after a step, when stages do not synchronize"
    ),
)

# Of SGLang's arguments of speculative decoding, what lossless decoding reads or refuses by name.
_OWN_DRAFTING = {
    f"speculative_{name}"
    for name in ("algorithm", "num_steps", "num_draft_tokens", "eagle_topk", "draft_model_path", "attention_mode")
}


def _other_drafting(args: Arguments) -> object | None:
    """A setting of another speculative algorithm that is not SGLang's default."""
    from sglang.srt.server_args import ServerArgs

    defaults = ServerArgs(model_path="none")  # type: ignore[call-arg]
    names = {name for name in dir(defaults) if name.startswith("speculative_")} | {"enable_multi_layer_eagle"}
    found = ((name, getattr(args, name)) for name in sorted(names - _OWN_DRAFTING))
    return next((f"--{name.replace('_', '-')} {got}" for name, got in found if got != getattr(defaults, name)), None)


_DRAFTS = f"1 to {MOST_DRAFT_TOKENS} drafts a round"
# Of servers with `--speculative-algorithm SPARSE_SELF`.
DRAFT_LIMITS = (
    FlagLimit(
        "--speculative-num-steps",
        lambda args: (
            None
            if args.speculative_num_steps in (None, *range(1, MOST_DRAFT_TOKENS + 1))
            else args.speculative_num_steps
        ),
        f"allowed: {_DRAFTS}",
    ),
    FlagLimit("data-parallel attention", uses_dp_attention, "ranks would have to draft and verify together"),
    FlagLimit("pipeline parallelism", above_one("pp_size"), "stages would have to draft and verify together"),
    FlagLimit("--speculative-eagle-topk", above_one("speculative_eagle_topk"), "drafts are chains; allowed: 1"),
    FlagLimit(
        "--speculative-num-draft-tokens",
        lambda args: (
            None
            if args.speculative_num_draft_tokens in (None, (args.speculative_num_steps or DRAFT_TOKENS) + 1)
            else args.speculative_num_draft_tokens
        ),
        "it follows from --speculative-num-steps; leave it out",
    ),
    FlagLimit("the KV canary", _CANARY, "not proven yet; leave it out"),
    FlagLimit("LoRA", _LORA, "SGLang's LoRA buffers have one width, and a round needs two; leave out LoRA's flags"),
    FlagLimit("a draft model", given("speculative_draft_model_path"), "the model drafts for itself; leave it out"),
    FlagLimit("settings of other speculative algorithms", _other_drafting, "they would have no effect; leave them out"),
    FlagLimit("mixed chunk", given("enable_mixed_chunk"), "rounds and prompts cannot share a pass"),
    FlagLimit("custom logit processors", given("enable_custom_logit_processor"), "they see one token a pass"),
    FlagLimit("returned hidden states", given("enable_return_hidden_states", "return_hidden_states_mode"), _PER_DRAFT),
    FlagLimit("returned routed experts", given("enable_return_routed_experts"), _PER_DRAFT),
)

# Of servers with "check_exactness".
CHECK_LIMITS = (
    _TREE_OF_A_PAIR,
    _OTHER_TREE,
    FlagLimit("--disable-radix-cache", given("disable_radix_cache"), "there is no prefix cache to check"),
    FlagLimit(
        "storage behind the prefix cache",
        given("hicache_storage_backend", "enable_unified_cache_external_linker"),
        "the check does not follow KV that storage loads into the prefix cache",
    ),
    FlagLimit("the KV canary", _CANARY, "the check recomputes tokens that the canary does not expect"),
    FlagLimit("whole dense layers", given("moe_dense_tp_size"), "SGLang counts the tokens of its own passes alone"),
    FlagLimit("data-parallel attention", uses_dp_attention, "a rank cannot recompute without the others"),
    FlagLimit("pipeline parallelism", above_one("pp_size"), "a stage cannot recompute without the others"),
    FlagLimit(
        "--enable-lora-overlap-loading", given("enable_lora_overlap_loading"), "a check loads adapters; leave it out"
    ),
)

COMPACT_LIMITS = (
    _OTHER_TREE,
    FlagLimit(
        "--disaggregation-mode",
        is_decode_server,
        "a retracted request takes its whole prompt back; allowed: null, or prefill without --enable-pd-role-switch",
    ),
    FlagLimit("data-parallel attention", uses_dp_attention, "a step that SGLang makes dense would read freed pages"),
    FlagLimit(
        "pipeline parallelism",
        above_one("pp_size"),
        "a micro-batch does not know which requests of other micro-batches hold a prompt",
    ),
    FlagLimit(
        "hierarchical cache or external cache linker",
        given("enable_hierarchical_cache", "enable_unified_cache_external_linker"),
        "it may overwrite a prompt's pages before compaction has copied the blocks that it keeps",
    ),
    FlagLimit("the KV canary", _CANARY, "it reports the pages that compaction copies"),
    FlagLimit(
        "streaming sessions",
        given("enable_streaming_session"),
        "the next turn would read pages that compaction has freed",
    ),
    FlagLimit(
        "mixed chunk",
        given("enable_mixed_chunk"),
        "decode rows in a mixed chunk would read pages that compaction has freed",
    ),
    FlagLimit(
        "returned routed experts",
        given("enable_return_routed_experts"),
        "SGLang finds them by the prompt's slots, which compaction has freed",
    ),
)


PREFILL_LIMITS = (
    _DRAFTS_APART,
    _OTHER_TREE,
    FlagLimit(
        "adaptive speculative decoding",
        lambda args: drafting(args) and given("speculative_adaptive")(args),
        "each draft length has its own attention backend, and only one of them would report its counters",
    ),
    FlagLimit(
        "storage behind the prefix cache",
        given("hicache_storage_backend", "enable_unified_cache_external_linker"),
        "SGLang looks there by the prompt's tokens, and groups of sparse prefill have separate keys",
    ),
    FlagLimit(
        "a prefix cache on the decode server",
        given("disaggregation_decode_enable_radix_cache"),
        "prompts that differ within a group would share a part of it there; leave out "
        "--disaggregation-decode-enable-radix-cache",
    ),
    FlagLimit("multi-item scoring", given("enable_mis"), "sparse prefill would let an item attend to other items"),
)
