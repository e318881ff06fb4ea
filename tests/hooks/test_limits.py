"""Every limit of the tables refuses what it is there for, with its name, what was got and why not."""

import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from model_configs import write_config
from refusals import refused
from sglang.srt.arg_groups.arg_utils import field_names
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs as StockServerArgs

load_plugins()

from resolved import ServerArgs

from sglang_sparse.config.arguments import DRAFTERS, of
from sglang_sparse.config.settings import build
from sglang_sparse.hooks.refusals import require_after
from sglang_sparse.methods import registry, support
from sglang_sparse.tools.sglang_surface import flag_limits

# By what they are for: the fields that no limit refuses.
LISTED = Path(__file__).parents[1] / "support" / "server_fields.toml"
LIMITS = flag_limits()
DRAFTS = {"sparse_method": "resa", "speculative_algorithm": "SPARSE_SELF"}
EAGLE = {"speculative_algorithm": "EAGLE"}
COMPACT = {"sparse_method": "rocketkv", "sparse_config": {"eviction": "compact"}}


@dataclass(frozen=True)
class Trigger:
    """Settings that make one limit refuse.

    Attributes:
        limit: its name.
        flags: fields of ``ServerArgs``.
        variable: of the environment.
        value: of the variable, where the message shows it too.
        named: the message shows the flag, too.
    """

    limit: str
    flags: dict[str, Any] = field(default_factory=dict)
    variable: str | None = None
    value: str | None = None
    named: bool = False

    @property
    def got(self) -> Any:
        """The value that the message shows."""
        if self.named:
            ((flag, value),) = self.flags.items()
            return f"--{flag.replace('_', '-')} {value}"
        shown = f"{self.variable}={self.value}" if self.value else self.variable
        return shown or next(iter(self.flags.values()))


def on(limit: str, flag: str, value: object = True) -> Trigger:
    return Trigger(limit, {flag: value})


LORA = (on("LoRA", "enable_lora"), on("LoRA", "lora_paths", ["adapter"]))
_DRAFTS = tuple(on("speculative decoding", "speculative_algorithm", name) for name in ("EAGLE", "SPARSE_SELF"))
# What most kinds of models refuse.
_OF_MOST = (
    on("--disaggregation-mode", "disaggregation_mode", "decode"),
    on("external cache linker", "enable_unified_cache_external_linker"),
    on("streaming sessions", "enable_streaming_session"),
    on("deterministic inference", "enable_deterministic_inference"),
)
_MIXED = "mixed chunk with data-parallel attention, pipeline parallelism or drafts"
_EXPERTS = "returned routed experts with data-parallel attention"
_PREFILLED = "--sparse-prefill-method on ranks, on stages or with host memory"
_APART = ({"pp_size": 2}, {"attn_dp_size": 2, "tp_size": 2}, {"enable_hierarchical_cache": True})
# By kind of model: one of ``model_configs``, and what it refuses.
OF_KINDS = {
    "a model with recurrent states": (
        "states",
        (
            on("--mamba-radix-cache-strategy", "mamba_radix_cache_strategy", "no_buffer"),
            on("--mamba-radix-cache-strategy", "mamba_radix_cache_strategy", "extra_buffer_lazy"),
            *(on("--enable-linear-replayssm", f"enable_linear_replayssm{end}") for end in ("", "_spec")),
            on("--enable-int8-mamba-checkpoint", "enable_int8_mamba_checkpoint"),
            on("--linear-attn-backend", "linear_attn_backend", "flashinfer"),
            on("mixed chunk", "enable_mixed_chunk"),
            on("pipeline parallelism", "pp_size", 2),
            on("hierarchical cache", "enable_hierarchical_cache"),
            *(*_DRAFTS, *_OF_MOST),
        ),
    ),
    "a model with chunked attention": ("local_attention", (*_DRAFTS, on("mixed chunk", "enable_mixed_chunk"))),
    "a model with a KV pool for its windows": (
        "two_pools",
        (
            on("speculative decoding", "speculative_algorithm", "STANDALONE"),
            Trigger("speculative decoding", {"speculative_algorithm": "EAGLE3", "enable_hierarchical_cache": True}),
            *(*_OF_MOST, *(Trigger(_PREFILLED, {"sparse_prefill_method": "skip_softmax"} | where) for where in _APART)),
            Trigger("early release of windows", variable="SGLANG_OPT_RELEASE_PREFILL_SWA"),
        ),
    ),
    "a model whose windows have KV of another shape": ("gemma4", (on("one KV pool", "disable_hybrid_swa_memory"),)),
    "a model with towers for media": (
        "towers",
        (
            *(on("towers on other servers", flag) for flag in ("language_only", "encoder_only")),
            on("towers on other servers", "enable_adaptive_dispatch_to_encoder"),
            on("mixed chunk", "enable_mixed_chunk"),
            on("--hicache-storage-backend", "hicache_storage_backend", "file"),
            *(*_DRAFTS, *_OF_MOST),
        ),
    ),
}
# By table: what asks for it, how the message begins, and a trigger or several for each of its limits.
TABLES: dict[str, tuple[dict[str, Any], str, tuple[Trigger, ...]]] = {
    "FLAG_LIMITS": (
        {"sparse_method": "resa"},
        "--sparse-method resa cannot run with ",
        (
            on("other speculative algorithms", "speculative_algorithm", "DFLASH"),
            on("other speculative algorithms", "decoupled_spec_role", "drafter"),
            on("LMCache", "enable_lmcache"),
            on("FlexKV", "enable_flexkv"),
            Trigger(
                "data-parallel attention with padded experts", {"moe_a2a_backend": "pplx", "enable_dp_attention": 1}
            ),
            on("distributed weights", "dwdp_size", 2),
            on("two-batch overlap", "enable_two_batch_overlap"),
            on("PD multiplexing", "enable_pdmux"),
            on("megakernel", "enable_nvidia_megakernel"),
            Trigger("metadata glue graphs", variable="SGLANG_ENABLE_METADATA_GLUE_GRAPH"),
            on("decode context parallelism", "dcp_size", 2),
            on("prefill context parallelism", "enable_prefill_cp"),
            on("prefill context parallelism", "attn_cp_size", 2),
            Trigger("LoRA with --enable-dp-attention", {"enable_lora": True, "enable_dp_attention": True}),
            on("unified memory pool", "enable_unified_memory"),
            on("torch.compile", "enable_torch_compile"),
            on("KV cache dtype", "kv_cache_dtype", "nvfp4"),
            Trigger("radix tree core", variable="SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", value="other"),
        ),
    ),
    "DETERMINISTIC_LIMITS": (
        {"sparse_method": "resa", "sparse_config": {"rectify_interval": 0}, "enable_deterministic_inference": True},
        "--sparse-method resa with deterministic inference cannot run with ",
        (
            on("--speculative-algorithm", "speculative_algorithm", "EAGLE"),
            *LORA,
            on("mixed chunk", "enable_mixed_chunk"),
            on("priority preemption", "enable_priority_scheduling"),
            on("data-parallel attention", "enable_dp_attention"),
            on("pipeline parallelism", "pp_size", 2),
            on("--disaggregation-mode", "disaggregation_mode", "decode"),
        ),
    ),
    "DECODE_LIMITS": (
        {"sparse_method": "rocketkv"},
        "--sparse-method rocketkv cannot run with ",
        tuple(on("speculative decoding", "speculative_algorithm", name) for name in DRAFTERS),
    ),
    "VERIFY_LIMITS": (
        {"sparse_method": "resa"},
        "--sparse-method resa cannot run with ",
        (
            on("NGRAM", "speculative_algorithm", "NGRAM"),
            Trigger("--speculative-eagle-topk", {"speculative_eagle_topk": 4} | EAGLE),
            Trigger("adaptive or multi-layer drafts", {"speculative_adaptive": True} | EAGLE),
            Trigger("adaptive or multi-layer drafts", {"enable_multi_layer_eagle": True} | EAGLE),
            Trigger("drafts with data-parallel attention or pipeline parallelism", {"pp_size": 2} | EAGLE),
            Trigger("drafts with the KV canary", {"kv_canary": "log"} | EAGLE),
        ),
    ),
    "RECTIFY_LIMITS": (
        {"sparse_method": "resa"},
        "--sparse-method resa cannot rectify with ",
        (
            Trigger("data-parallel attention with pipeline parallelism", {"pp_size": 2, "enable_dp_attention": True}),
            Trigger("whole dense layers with pipeline parallelism", {"pp_size": 2, "moe_dense_tp_size": 1}),
            Trigger(
                "lossless decoding",
                {"speculative_algorithm": "SPARSE_SELF", "sparse_config": {"rectify_interval": 8}},
            ),
            Trigger(
                "data-parallel attention whose ranks do not gather before a step",
                {"enable_dp_attention": True},
                "SGLANG_SCHEDULER_SKIP_ALL_GATHER",
            ),
            *(Trigger(_MIXED, {"enable_mixed_chunk": True} | more) for more in (*_APART[:2], EAGLE)),
            Trigger(_EXPERTS, {"enable_return_routed_experts": True} | _APART[1]),
            on("expert-parallel all-to-all", "moe_a2a_backend", "deepep"),
        ),
    ),
    "DRAFT_LIMITS": (
        DRAFTS,
        "--speculative-algorithm SPARSE_SELF cannot run with ",
        (
            on("data-parallel attention", "enable_dp_attention"),
            on("pipeline parallelism", "pp_size", 2),
            *(on("--speculative-num-steps", "speculative_num_steps", steps) for steps in (0, -1, 17)),
            on("--speculative-eagle-topk", "speculative_eagle_topk", 2),
            on("--speculative-num-draft-tokens", "speculative_num_draft_tokens", 6),
            Trigger("--speculative-num-draft-tokens", {"speculative_num_draft_tokens": 7, "speculative_num_steps": 3}),
            *LORA,
            on("a draft model", "speculative_draft_model_path", "some/draft"),
            on("the KV canary", "kv_canary", "log"),
            *(
                Trigger("settings of other speculative algorithms", {flag: value}, named=True)
                for flag, value in (
                    ("speculative_adaptive", True),
                    ("enable_multi_layer_eagle", True),
                    ("speculative_accept_threshold_acc", 0.9),
                    ("speculative_ngram_match_type", "PROB"),
                    ("speculative_dflash_block_size", 8),
                )
            ),
            on("mixed chunk", "enable_mixed_chunk"),
            on("custom logit processors", "enable_custom_logit_processor"),
            on("returned hidden states", "enable_return_hidden_states"),
            on("returned hidden states", "return_hidden_states_mode", "last"),
            on("returned routed experts", "enable_return_routed_experts"),
        ),
    ),
    "FINISH_LIMITS": (
        {"sparse_method": "resa", "sparse_config": {"rectify_on_finish": True}},
        "--sparse-method resa: rectify_on_finish cannot run with ",
        (
            on("--disaggregation-mode", "disaggregation_mode", "decode"),
            on("--disable-radix-cache", "disable_radix_cache"),
            on("data-parallel attention", "enable_dp_attention"),
            on("pipeline parallelism", "pp_size", 2),
        ),
    ),
    "CHECK_LIMITS": (
        {"sparse_method": "resa", "sparse_config": {"check_exactness": True, "rectify_interval": 0}},
        "--sparse-method resa: check_exactness cannot run with ",
        (
            on("--disaggregation-mode", "disaggregation_mode", "decode"),
            on("--disable-radix-cache", "disable_radix_cache"),
            on("radix cache backend", "radix_cache_backend", "other"),
            on("storage behind the prefix cache", "hicache_storage_backend", "file"),
            on("storage behind the prefix cache", "enable_unified_cache_external_linker"),
            on("the KV canary", "kv_canary", "log"),
            on("whole dense layers", "moe_dense_tp_size", 1),
            on("data-parallel attention", "enable_dp_attention"),
            on("pipeline parallelism", "pp_size", 2),
            on("--enable-lora-overlap-loading", "enable_lora_overlap_loading"),
        ),
    ),
    "COMPACT_LIMITS": (
        COMPACT,
        "--sparse-method rocketkv cannot compact with ",
        (
            on("--disaggregation-mode", "disaggregation_mode", "decode"),
            Trigger("--disaggregation-mode", {"disaggregation_mode": "prefill", "enable_pd_role_switch": True}),
            on("radix cache backend", "radix_cache_backend", "other"),
            on("hierarchical cache or external cache linker", "enable_hierarchical_cache"),
            on("hierarchical cache or external cache linker", "enable_unified_cache_external_linker"),
            on("the KV canary", "kv_canary", "raise"),
            on("data-parallel attention", "enable_dp_attention"),
            on("pipeline parallelism", "pp_size", 2),
            on("streaming sessions", "enable_streaming_session"),
            on("mixed chunk", "enable_mixed_chunk"),
            on("returned routed experts", "enable_return_routed_experts"),
        ),
    ),
    "DISAGGREGATION_LIMITS": (
        {"sparse_method": "resa", "sparse_config": {"rectify_interval": 0}, "disaggregation_mode": "decode"},
        "--sparse-method resa with --disaggregation-mode cannot run with ",
        (
            on("--speculative-algorithm", "speculative_algorithm", "EAGLE"),
            on("offloaded KV", "disaggregation_decode_enable_offload_kvcache"),
            on("KV received in host memory", "disaggregation_decode_host_receive_threshold", 0.5),
            on("KV cache sharding", "enable_kv_cache_sharding"),
        ),
    ),
    "WINDOW_LIMITS": (
        {"sparse_method": "rocketkv"},
        "--sparse-method rocketkv cannot run with ",
        (
            on("a prefix cache on the decode server", "disaggregation_decode_enable_radix_cache"),
            Trigger(
                "several ranks on the decode server", {"enable_dp_attention": True, "disaggregation_mode": "decode"}
            ),
            Trigger("several ranks on the decode server", {"pp_size": 2, "disaggregation_mode": "decode"}),
            Trigger(
                "several ranks on the decode server",
                {"enable_dp_attention": True, "disaggregation_mode": "prefill", "enable_pd_role_switch": True},
            ),
        ),
    ),
    **{
        kind: (
            {"sparse_method": "resa", "sparse_config": {"rectify_interval": 0}},
            f"--sparse-method resa on {kind} cannot run with ",
            triggers,
        )
        for kind, (_, triggers) in OF_KINDS.items()
    },
    "INDEXER_LIMITS": (
        {"sparse_method": "dsa"},
        "--sparse-method dsa cannot run with ",
        (
            on("prefill-decode disaggregation", "disaggregation_mode", "prefill"),
            *LORA,
            on("HiSparse", "enable_hisparse"),
            on("external cache linker", "enable_unified_cache_external_linker"),
            on("returned indexer top-k", "enable_return_indexer_topk"),
            on("a page size", "page_size", 32),
            *(on("a float16 model", "dtype", name) for name in ("half", "float16")),
        ),
    ),
    "PREFILL_LIMITS": (
        {"sparse_prefill_method": "anchor"},
        "--sparse-prefill-method anchor cannot run with ",
        (
            Trigger("drafts with data-parallel attention or pipeline parallelism", {"pp_size": 2} | EAGLE),
            Trigger("adaptive speculative decoding", {"speculative_adaptive": True, "speculative_algorithm": "eagle"}),
            on("storage behind the prefix cache", "hicache_storage_backend", "file"),
            on("storage behind the prefix cache", "enable_unified_cache_external_linker"),
            on("radix cache backend", "radix_cache_backend", "other"),
            on("a prefix cache on the decode server", "disaggregation_decode_enable_radix_cache"),
            on("multi-item scoring", "enable_mis"),
        ),
    ),
}
CASES = [(table, trigger) for table, (_, _, triggers) in TABLES.items() for trigger in triggers]


def limit_of(table: str, name: str) -> support.FlagLimit:
    (found,) = (limit for limit in LIMITS[table] if limit.name == name)
    return found


def test_no_limit_lacks_a_trigger() -> None:
    assert set(LIMITS) == set(TABLES)
    for name, (_, _, triggers) in TABLES.items():
        assert {limit.name for limit in LIMITS[name]} == {trigger.limit for trigger in triggers}, name
    own = {limit for name in registry.DECODE_METHODS for limit in registry.load_decode_method(name).flag_limits}
    assert own <= {limit for table in TABLES for limit in LIMITS[table]}


def test_a_prefill_server_without_a_prefill_method_is_sglangs(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"enable_prefill_cp": True, "cp_strategy": "zigzag", "enable_torch_compile": True}
    pair = {"model_path": write_config(tmp_path, "qwen3"), "sparse_method": "resa", "disaggregation_mode": "prefill"}
    args = ServerArgs(**pair, **flags)
    assert args.sparse_method is None and args.enable_torch_compile
    with refused("--speculative-algorithm", "SPARSE_SELF"):
        ServerArgs(**pair, speculative_algorithm="SPARSE_SELF")


class Asked:
    """Default arguments that remember which of them were read."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.record = StockServerArgs(model_path="MODEL")

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self.record, name)


def test_every_field_of_a_server_is_judged() -> None:
    """No flag is served that nobody has looked at: it is refused by a limit, or stands in the list with a reason."""
    asked = Asked()
    for table in TABLES:
        for limit in LIMITS[table]:
            limit.got(asked)
    fields = set(field_names(StockServerArgs))
    groups = tomllib.loads(LISTED.read_text())["group"]
    patterns = [pattern for group in groups for pattern in group["fields"]]
    listed = {pattern: {name for name in fields if fnmatch(name, pattern)} for pattern in patterns}
    assert not [pattern for pattern, names in listed.items() if not names], "no such fields"
    assert fields - asked.names - set().union(*listed.values()) == set(), "unjudged"


@pytest.mark.parametrize(
    ("table", "trigger"), CASES, ids=[f"{table}-{case.variable or next(iter(case.flags))}" for table, case in CASES]
)
def test_a_flag_is_refused(table: str, trigger: Trigger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, beginning, _ = TABLES[table]
    models = {"INDEXER_LIMITS": "own_sparse_attention"} | {kind: model for kind, (model, _) in OF_KINDS.items()}
    model = write_config(tmp_path, models.get(table, "qwen3"))
    if trigger.variable:
        monkeypatch.setenv(trigger.variable, trigger.value or "1")
    with refused(trigger.limit, trigger.got) as caught:
        ServerArgs(model_path=model, **asked, **trigger.flags)
    assert str(caught.value).startswith(beginning)
    assert f"{trigger.limit} (got {trigger.got!r}): {limit_of(table, trigger.limit).reason}" in str(caught.value)


@pytest.mark.parametrize(("model", "triggers"), OF_KINDS.values(), ids=OF_KINDS)
def test_a_flag_is_refused_after_resolution_too(model: str, triggers: tuple[Trigger, ...], tmp_path: Path) -> None:
    args = of(ServerArgs(model_path=write_config(tmp_path, model), sparse_method="resa"))
    setattr(args, *next(iter(triggers[0].flags.items())))
    with refused(triggers[0].limit, triggers[0].got):
        require_after(args, build("resa", {}))
