"""The one table of what a sparse server refuses, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_sparse.config import Settings, SparseArgumentError
from sglang_sparse.method import parse_layers

if TYPE_CHECKING:
    from sglang_sparse.config import SparseServerArgs

DENSE_BACKENDS = ("torch_native", "triton", "flashinfer", "fa3")
GPU_ONLY_BACKENDS = ("triton", "flashinfer", "fa3")
KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3")


@dataclass(frozen=True)
class FlagLimit:
    """A server flag that sparsity does not serve.

    Attributes:
        name: what the user calls it.
        got: returns the offending value, or None.
        reason: why not.
    """

    name: str
    got: Callable[[Any], object | None]
    reason: str


@dataclass(frozen=True)
class ModelLimit:
    """A kind of model that no method serves.

    Attributes:
        name: the kind.
        applies: judges SGLang's ``ModelConfig``.
        reason: why not.
    """

    name: str
    applies: Callable[[Any], bool]
    reason: str


def _set(field: str) -> Callable[[Any], object | None]:
    return lambda args: getattr(args, field) or None


def _above_one(field: str) -> Callable[[Any], object | None]:
    return lambda args: getattr(args, field) if (getattr(args, field) or 1) > 1 else None


_OTHER_WRITER = "KV arrives without a forward pass on this server, so its pages have no summaries"
_OTHER_LOOP = "it runs another event loop or splits forward passes, which the sparse path does not follow"

_PER_TOKEN = "a rectifying pass computes them for every token that it re-encodes"
_OWN_TREE = "the rule that only exact KV is shared is proven for SGLang's default tree only"


def _other_radix_tree(_: Any) -> str | None:
    from sglang.srt.environ import envs

    for name in ("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "SGLANG_ENABLE_UNIFIED_RADIX_TREE"):
        if getattr(envs, name).get():
            return name
    return None


FLAG_LIMITS = (
    FlagLimit("speculative decoding", _set("speculative_algorithm"), "draft tokens are verified by other passes"),
    FlagLimit(
        "prefill-decode disaggregation",
        lambda args: None if args.disaggregation_mode == "null" else args.disaggregation_mode,
        _OTHER_WRITER,
    ),
    FlagLimit("hierarchical cache", _set("enable_hierarchical_cache"), _OTHER_WRITER),
    FlagLimit("LMCache", _set("enable_lmcache"), _OTHER_WRITER),
    FlagLimit("FlexKV", _set("enable_flexkv"), _OTHER_WRITER),
    FlagLimit("data-parallel attention", _set("enable_dp_attention"), "ranks must agree on the forward mode"),
    FlagLimit(
        "data parallelism",
        _above_one("dp_size"),
        "SGLang 0.5.17's data-parallel controller hides from the main process what a scheduler runs",
    ),
    FlagLimit("two-batch overlap", _set("enable_two_batch_overlap"), _OTHER_LOOP),
    FlagLimit("PD multiplexing", _set("enable_pdmux"), _OTHER_LOOP),
    FlagLimit("pipeline parallelism", _above_one("pp_size"), _OTHER_LOOP),
    FlagLimit("decode context parallelism", _above_one("dcp_size"), "a rank holds only a part of each page"),
    FlagLimit("prefill context parallelism", _set("enable_prefill_cp"), "a rank holds only a part of each chunk"),
    FlagLimit("attention context parallelism", _above_one("attn_cp_size"), "a rank holds only a part of each chunk"),
    FlagLimit("LoRA", lambda args: args.enable_lora or args.lora_paths or None, "it uses the decode graphs' variants"),
    FlagLimit("diffusion LLM decoding", _set("dllm_algorithm"), "tokens are not decoded one by one"),
    FlagLimit("HiSparse", _set("enable_hisparse"), "it is another sparse attention"),
    FlagLimit("unified memory pool", _set("enable_unified_memory"), "the summaries would not be allocated"),
    FlagLimit("page-major KV layout", _set("enable_page_major_kv_layout"), "the kernels read one layer's K at a time"),
    FlagLimit("streaming sessions", _set("enable_streaming_session"), "a session keeps approximate KV"),
    FlagLimit("torch.compile", _set("enable_torch_compile"), "the sparse and the dense graph would share one"),
    FlagLimit(
        "deterministic inference",
        lambda args: args.enable_deterministic_inference or args.rl_on_policy_target or None,
        "splits and the crossover depend on the batch, so a request's output depends on its neighbours",
    ),
    FlagLimit("embedding serving", _set("is_embedding"), "nothing is decoded"),
    FlagLimit(
        "gRPC serving",
        lambda args: args.smg_grpc_mode or args.grpc_mode or None,
        "its requests' options would not be validated",
    ),
    FlagLimit(
        "radix cache backend",
        _set("radix_cache_backend"),
        _OWN_TREE,
    ),
    FlagLimit(
        "KV cache dtype",
        lambda args: None if args.kv_cache_dtype in KV_DTYPES else args.kv_cache_dtype,
        f"allowed: {', '.join(KV_DTYPES)}",
    ),
    FlagLimit("another radix tree", _other_radix_tree, _OWN_TREE),
)

RECTIFY_LIMITS = (
    FlagLimit("mixed chunk", _set("enable_mixed_chunk"), "its decode rows would wait while prompts are prefilled"),
    FlagLimit("returned hidden states", _set("enable_return_hidden_states"), _PER_TOKEN),
    FlagLimit("returned routed experts", _set("enable_return_routed_experts"), _PER_TOKEN),
    FlagLimit("returned indexer top-k", _set("enable_return_indexer_topk"), _PER_TOKEN),
)


def _mamba_like(model: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model) is not None


def _own_sparse_attention(model: Any) -> bool:
    from sglang.srt.configs.model_config import is_deepseek_dsa, is_minimax_sparse

    return is_deepseek_dsa(model.hf_config) or is_minimax_sparse(model.hf_config)


def _soft_cap(model: Any) -> bool:
    return bool(getattr(model.hf_text_config, "attn_logit_softcapping", None))


MODEL_LIMITS = (
    ModelLimit("encoder-only or embedding model", lambda m: not m.is_generation, "nothing is decoded"),
    ModelLimit("encoder-decoder model", lambda m: m.is_encoder_decoder, "cross attention has no pages of its own"),
    ModelLimit("multimodal model", lambda m: m.is_multimodal, "its towers and M-RoPE positions are not proven yet"),
    ModelLimit("hybrid SSM or linear-attention model", _mamba_like, "its state layers have no KV pages"),
    ModelLimit(
        "sliding-window model",
        lambda m: m.is_hybrid_swa or _windowed(m),
        "its windowed layers free the pages that a selection could name",
    ),
    ModelLimit("chunked local attention model", lambda m: m.is_local_attention_model, "its layers see only a window"),
    ModelLimit("model with its own sparse attention", _own_sparse_attention, "it selects by itself"),
    ModelLimit("model with attention sinks", lambda m: bool(m._detect_attention_sinks()), "not in the kernels yet"),
    ModelLimit("model with a soft cap on attention logits", _soft_cap, "not in the kernels yet"),
)


def _windowed(model: Any) -> bool:
    config = model.hf_text_config
    return bool(getattr(config, "use_sliding_window", True) and model.sliding_window_size)


def require_before(args: SparseServerArgs, settings: Settings) -> None:
    """Refuse what can be seen before SGLang resolves its arguments.

    Raises:
        SparseArgumentError: names every refused flag, what was got and why not.
    """
    found = _found(args, FLAG_LIMITS)
    if found:
        raise SparseArgumentError(f"--sparse-method {settings.name} cannot run with {found}")
    rectify = settings.rectify
    found = rectify and rectify.rectify_interval and _found(args, RECTIFY_LIMITS)
    if found:
        raise SparseArgumentError(
            f"--sparse-method {settings.name} cannot rectify with {found}; "
            'allowed without rectification: {"rectify_interval": 0}'
        )
    if rectify and rectify.rectify_on_finish and args.disable_radix_cache:
        raise SparseArgumentError(
            f"--sparse-config of {settings.name}: rectify_on_finish has no use with --disable-radix-cache"
        )
    import torch

    if not torch.cuda.is_available():
        for flag in ("attention_backend", "decode_attention_backend", "prefill_attention_backend"):
            name = getattr(args, flag)
            if name in GPU_ONLY_BACKENDS:
                raise SparseArgumentError(
                    f"--{flag.replace('_', '-')} {name} needs a GPU and this machine has none; allowed: torch_native"
                )


def _found(args: SparseServerArgs, limits: tuple[FlagLimit, ...]) -> str:
    got = [(limit, limit.got(args)) for limit in limits]
    return "; ".join(f"{limit.name} (got {value!r}): {limit.reason}" for limit, value in got if value is not None)


def require_after(args: SparseServerArgs, settings: Settings) -> None:
    """Refuse what SGLang's resolved arguments show.

    Raises:
        SparseArgumentError: says what was got and what is allowed.
    """
    for name in args.get_attention_backends():
        if name not in DENSE_BACKENDS:
            raise SparseArgumentError(
                f"--sparse-method {settings.name}: attention backend {name!r} is not supported; "
                f"allowed: {', '.join(DENSE_BACKENDS)}"
            )
    if args.cuda_graph_config is not None and args.cuda_graph_config.prefill.backend == "full":
        raise SparseArgumentError(
            f"--sparse-method {settings.name}: the prefill CUDA graph backend 'full' would not refresh the summaries; "
            "allowed: breakable, tc_piecewise, disabled"
        )
    _require_dtypes(args, settings)
    context = args.get_model_config().context_len
    if settings.rectify and settings.rectify.rectify_interval > context:
        raise SparseArgumentError(
            f"--sparse-config of {settings.name}: rectify_interval: got {settings.rectify.rectify_interval}, "
            f"allowed: at most the context length of {context}"
        )
    if args.page_size != settings.config.page_size:
        raise SparseArgumentError(
            f"--sparse-method {settings.name}: the server's page size is {args.page_size} and the config's is "
            f"{settings.config.page_size}; they must be equal: set --page-size {settings.config.page_size} "
            f'or {{"page_size": {args.page_size}}}'
        )


def _require_dtypes(args: SparseServerArgs, settings: Settings) -> None:
    import torch

    dtype = str(args.get_model_config().dtype).removeprefix("torch.")
    cache = {"auto": dtype, "bf16": "bfloat16"}.get(args.kv_cache_dtype, args.kv_cache_dtype)
    if cache not in (dtype, "fp8_e4m3"):
        raise SparseArgumentError(
            f"--sparse-method {settings.name}: the KV cache dtype is {args.kv_cache_dtype} and the model's is {dtype}; "
            "allowed: auto, fp8_e4m3"
        )
    if cache == "fp8_e4m3" and "torch_native" in args.get_attention_backends():
        raise SparseArgumentError(
            f"--sparse-method {settings.name}: the attention backend torch_native writes fp8 KV without its scales; "
            f"allowed with --kv-cache-dtype fp8_e4m3: {', '.join(GPU_ONLY_BACKENDS)}"
        )
    if dtype == "float32" and torch.cuda.is_available():
        raise SparseArgumentError(
            f"--sparse-method {settings.name}: float32 models run on the CPU only; allowed: --dtype bfloat16, float16"
        )


def require_model(args: SparseServerArgs, settings: Settings) -> None:
    """Refuse what the model's config shows.

    Raises:
        SparseArgumentError: names the architecture, the kind of model and why not, or the layers that do not exist.
    """
    from sglang.srt.configs.model_config import ModelConfig

    # SGLang caches what ``get_model_config`` returns, and its own arguments are not resolved yet.
    model = ModelConfig.from_server_args(args)
    architecture = (model.hf_config.architectures or ["unknown"])[0]
    for limit in MODEL_LIMITS:
        if limit.applies(model):
            raise SparseArgumentError(
                f"--sparse-method {settings.name} does not fit {architecture}: {limit.name}; {limit.reason}"
            )
    reason = settings.method.refuse(model)
    if reason:
        raise SparseArgumentError(f"--sparse-method {settings.name} does not fit {architecture}: {reason}")
    try:
        parse_layers(settings.config.layers, model.num_hidden_layers)
    except ValueError as error:
        raise SparseArgumentError(f"--sparse-config of {settings.name}: {error}") from error
