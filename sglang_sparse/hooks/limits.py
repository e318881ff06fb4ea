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

_UNCOMPARED = "GPUs have been compared with SGLang's own kernels alone"
_PER_TOKEN = "a rectifying pass computes them anew for every token that it re-encodes, where SGLang wants each once"
_PER_DRAFT = "a verification computes them for drafts that are not accepted, too"
# All-to-alls for which SGLang pads each rank's tokens to the most that a rank has.
PADDED = ("pplx", "deepep_v2")
TREE_CORES = ("rust", "python")
_OWN_TREE = (
    "what keeps approximate KV out of the prefix cache hooks SGLang's own tree, and another one would have to be cut, "
    f"too; its cores: {', '.join(TREE_CORES)}"
)
_OTHER_TREE = FlagLimit(
    "radix cache backend",
    given("radix_cache_backend"),
    "it may give SGLang's tree a storage of its own, and flags do not say so; served by --sparse-method without a "
    "prefill method, compaction or check_exactness",
)


def _foreign_core(_: object) -> str | None:
    from sglang.srt.environ import envs

    variable = envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND
    return None if variable.get() in TREE_CORES else f"{variable.name}={variable.get()}"


FLAG_LIMITS = (
    FlagLimit(
        "other speculative algorithms",
        lambda args: drafter(args, served=False) or other_than("decoupled_spec_role", "null")(args),
        f"their passes are not followed; allowed: {SPARSE_SELF}, {', '.join(DRAFTERS)} with a prefill method alone, or "
        f"{', '.join(CHAINS)} with --sparse-method resa or dsa",
    ),
    FlagLimit(
        "LMCache",
        given("enable_lmcache"),
        "its tree stores an answer's KV before it is cut to what is exact, and takes up loads in match_prefix, where "
        "nobody notes that they arrive; both would have to be hooked, and --enable-unified-cache-external-linker is "
        "served",
    ),
    FlagLimit("FlexKV", given("enable_flexkv"), _OWN_TREE),
    FlagLimit(
        "data-parallel attention with padded experts",
        lambda args: args.moe_a2a_backend if uses_dp_attention(args) and args.moe_a2a_backend in PADDED else None,
        "SGLang turns decode steps into dense prefills where another rank prefills, and these would have to run sparse",
    ),
    FlagLimit(
        "distributed weights",
        above_one("dwdp_size"),
        "a rectifying step has two passes that fetch experts' weights from other GPUs, which is not proven yet; "
        f"{_ON_PREFILL}",
    ),
    FlagLimit(
        "LoRA with --enable-dp-attention",
        lambda args: uses_dp_attention(args) and _LORA(args),
        "SGLang's one backend of adapters for it needs a GPU, where it is not proven yet; leave one out",
    ),
    FlagLimit(
        "two-batch overlap",
        given("enable_two_batch_overlap"),
        "each half of a batch would need a plan and counters of its own; a backend has one of each",
    ),
    FlagLimit(
        "PD multiplexing",
        given("enable_pdmux"),
        "prefill and decode run at once on two streams, and would need a plan and scratch each; a backend has one",
    ),
    FlagLimit(
        "megakernel",
        given("enable_nvidia_megakernel"),
        "a plugin's kernel computes the whole step, and would have to take the chosen pages",
    ),
    FlagLimit(
        "metadata glue graphs",
        environment("SGLANG_ENABLE_METADATA_GLUE_GRAPH"),
        "a replay would not prepare the sparse path, which would have to be captured, too; unset the variable",
    ),
    FlagLimit(
        "decode context parallelism",
        above_one("dcp_size"),
        "a rank holds only a part of each page, and scores would have to be reduced over ranks",
    ),
    FlagLimit(
        "prefill context parallelism",
        lambda args: given("enable_prefill_cp")(args) or above_one("attn_cp_size")(args),
        "a rank has only a part of each chunk's slots, and a refresh would have to take the gathered ones; "
        f"{_ON_PREFILL}",
    ),
    FlagLimit(
        "unified memory pool",
        given("enable_unified_memory"),
        "slots of its tables are virtual, and summaries and kernels would have to translate them",
    ),
    FlagLimit(
        "torch.compile",
        given("enable_torch_compile"),
        "the compiled step is traced once, and a sparse and a dense graph would have to be traced apart",
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
        "drafts of a pair are not proven yet; leave it out",
    ),
    FlagLimit(
        "offloaded KV",
        given("disaggregation_decode_enable_offload_kvcache"),
        "it stores an answer's KV as it is written, and would have to wait until it is rectified",
    ),
    FlagLimit(
        "KV received in host memory",
        lambda args: None if (share := args.disaggregation_decode_host_receive_threshold) == 1 else share,
        "it is loaded while the first decode step begins; leave out --disaggregation-decode-host-receive-threshold",
    ),
    FlagLimit("KV cache sharding", given("enable_kv_cache_sharding"), "a rank holds only a part of each page"),
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
        "it selects for one token of a row at a time, and a verification has several; "
        f"allowed: {SPARSE_SELF}, --sparse-method resa, or --sparse-prefill-method without --sparse-method",
    ),
)

_DRAFTS_APART = FlagLimit(
    "drafts with data-parallel attention or pipeline parallelism",
    lambda args: drafting(args) and (uses_dp_attention(args) or above_one("pp_size")(args)),
    "their passes on several ranks are not proven yet",
)
# Of servers with a decode method that does.
VERIFY_LIMITS = (
    _DRAFTS_APART,
    FlagLimit(
        "NGRAM",
        lambda args: name if (name := drafting(args)) and name.upper() not in CHAINS else None,
        "its drafts are a tree, even with --speculative-ngram-max-bfs-breadth 1, and a sparse verification takes a "
        f"chain; allowed: {', '.join(CHAINS)}",
    ),
    FlagLimit(
        "--speculative-eagle-topk",
        lambda args: drafting(args) and above_one("speculative_eagle_topk")(args),
        "a sparse verification takes a chain of drafts; allowed: 1",
    ),
    FlagLimit(
        "adaptive or multi-layer drafts",
        lambda args: drafting(args) and given("speculative_adaptive", "enable_multi_layer_eagle")(args),
        "a sparse verification has one number of tokens and follows one worker",
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
        "a rank would have to run along in each stage where others rectify; allowed: --pp-size 1",
    ),
    FlagLimit("lossless decoding", lossless, "each of its verifications is a dense pass over all new tokens"),
    FlagLimit("mixed chunk", given("enable_mixed_chunk"), "its decode rows would wait while prompts are prefilled"),
    FlagLimit(
        "expert-parallel all-to-all",
        other_than("moe_a2a_backend", "none"),
        "SGLang may tell a rank its own tokens alone, and what others run of a divided step would have to be gathered",
    ),
    FlagLimit("returned auxiliary hidden states", given("enable_return_aux_hidden_states"), _PER_TOKEN),
    FlagLimit("returned routed experts", given("enable_return_routed_experts"), _PER_TOKEN),
)

_TREE_OF_A_PAIR = FlagLimit(
    "--disaggregation-mode",
    without_tree,
    "there is no prefix cache; allowed with --disaggregation-decode-enable-radix-cache",
)
# Of servers with "rectify_on_finish".
FINISH_LIMITS = (
    _TREE_OF_A_PAIR,
    FlagLimit("--disable-radix-cache", given("disable_radix_cache"), "nobody shares what it makes exact"),
    FlagLimit("data-parallel attention", uses_dp_attention, "its passes run behind a step, where ranks do not meet"),
    FlagLimit("pipeline parallelism", above_one("pp_size"), "its passes run behind a step, where stages do not meet"),
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
    FlagLimit("data-parallel attention", uses_dp_attention, "its ranks would have to draft and verify together"),
    FlagLimit("pipeline parallelism", above_one("pp_size"), "its stages would have to draft and verify together"),
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
    FlagLimit("LoRA", _LORA, "SGLang's buffers of adapters have one width, and a round two; leave out LoRA's flags"),
    FlagLimit("a draft model", given("speculative_draft_model_path"), "the model drafts for itself; leave it out"),
    FlagLimit("settings of other speculative algorithms", _other_drafting, "they would do nothing; leave them out"),
    FlagLimit("mixed chunk", given("enable_mixed_chunk"), "rounds and prompts cannot share a pass"),
    FlagLimit("custom logit processors", given("enable_custom_logit_processor"), "they see one token a pass"),
    FlagLimit("returned hidden states", given("enable_return_hidden_states", "return_hidden_states_mode"), _PER_DRAFT),
    FlagLimit("returned auxiliary hidden states", given("enable_return_aux_hidden_states"), _PER_DRAFT),
    FlagLimit("returned routed experts", given("enable_return_routed_experts"), _PER_DRAFT),
)

# Of servers with "check_exactness".
CHECK_LIMITS = (
    _TREE_OF_A_PAIR,
    _OTHER_TREE,
    FlagLimit("--disable-radix-cache", given("disable_radix_cache"), "it has nothing to prove"),
    FlagLimit(
        "storage behind the prefix cache",
        given("hicache_storage_backend", "enable_unified_cache_external_linker"),
        "what storage puts into the prefix cache is not followed",
    ),
    FlagLimit("the KV canary", _CANARY, "a recomputation writes tokens that the canary knows of no request"),
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
        "what a retracted request takes back is its whole prompt; allowed: null, or prefill for good",
    ),
    FlagLimit("data-parallel attention", uses_dp_attention, "a step that SGLang makes dense would read freed pages"),
    FlagLimit("pipeline parallelism", above_one("pp_size"), "who holds a prompt is known of one micro-batch only"),
    FlagLimit(
        "hierarchical cache or external cache linker",
        given("enable_hierarchical_cache", "enable_unified_cache_external_linker"),
        "it may load into the pages of a prompt before what is kept of them is copied",
    ),
    FlagLimit("the KV canary", _CANARY, "it reports the pages that compaction copies"),
    FlagLimit(
        "streaming sessions",
        given("enable_streaming_session"),
        "a turn would go on behind pages that compaction has freed",
    ),
    FlagLimit(
        "mixed chunk",
        given("enable_mixed_chunk"),
        "decode rows in a mixed chunk would read pages that compaction has freed",
    ),
    FlagLimit(
        "returned routed experts",
        given("enable_return_routed_experts"),
        "they are found by the slots of a prompt, which compaction has freed",
    ),
)


PREFILL_LIMITS = (
    _DRAFTS_APART,
    _OTHER_TREE,
    FlagLimit(
        "adaptive speculative decoding",
        lambda args: drafting(args) and given("speculative_adaptive")(args),
        "each number of drafts has an attention backend of its own, and the counts of one would be reported",
    ),
    FlagLimit(
        "storage behind the prefix cache",
        given("hicache_storage_backend", "enable_unified_cache_external_linker"),
        "SGLang looks there for the prompt's own tokens, and groups have separate keys",
    ),
    FlagLimit(
        "a prefix cache on the decode server",
        given("disaggregation_decode_enable_radix_cache"),
        "prompts that part within a group would share some of it there; leave out "
        "--disaggregation-decode-enable-radix-cache",
    ),
    FlagLimit("multi-item scoring", given("enable_mis"), "sparse prefill would let an item attend to other items"),
)
