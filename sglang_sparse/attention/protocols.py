"""SGLang's objects, by what this package uses of them: what a port to another release has to keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

if TYPE_CHECKING:
    from sglang.srt.configs import model_config
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.managers import schedule_batch, schedule_policy
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
    from sglang.srt.mem_cache import radix_cache, unified_radix_cache
    from sglang.srt.mem_cache.base_prefix_cache import TreeLock
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.model_runner_components.layer_setup import ModelLayerInfo
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_sparse.attention.backend import SparseAttentionBackend

# SGLang's own classes, where nothing less will do.
ModelConfig: TypeAlias = "model_config.ModelConfig"
PrefillAdder: TypeAlias = "schedule_policy.PrefillAdder"
RadixKey: TypeAlias = "radix_cache.RadixKey"
RadixTree: TypeAlias = "unified_radix_cache.UnifiedRadixCache"


class RadixAttention(Protocol):
    """The attention of a layer."""

    layer_id: int
    tp_q_head_num: int
    qk_head_dim: int
    v_head_dim: int
    scaling: float
    logit_cap: float
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_scale_float: float | None
    v_scale_float: float | None


class KVPool(Protocol):
    """A KV pool of MHA, MLA or DSA; what writes takes other arguments in each."""

    dtype: torch.dtype
    size: int
    page_size: int
    start_layer: int
    layer_num: int
    model_layer_ids: tuple[int, ...]
    dsa_kv_cache_store_fp8: bool
    get_key_buffer: Callable[[int], torch.Tensor]
    get_value_buffer: Callable[[int], torch.Tensor]
    get_index_k_with_scale_buffer: Callable[[int], torch.Tensor]
    set_kv_buffer: Callable[..., None]
    set_mla_kv_buffer: Callable[..., None]


class ReqToTokenPool(Protocol):
    """The slots of each request's tokens, ``req_to_token`` ``[requests, positions]``."""

    req_to_token: torch.Tensor
    write: Callable[[tuple[int, slice], torch.Tensor | int], None]


class ForwardBatch(Protocol):
    """A batch as the model sees it."""

    batch_size: int
    forward_mode: ForwardMode
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor


class ModelRunner(Protocol):
    """The runner of a rank's passes; in a sparse server its ``attn_backend`` is ours."""

    attn_backend: SparseAttentionBackend
    dtype: torch.dtype
    device: str
    forward: Callable[[Any], Any]
    is_draft_worker: bool
    kv_index_translator: Any
    layer_info: ModelLayerInfo
    lora_manager: LoRAManager | None
    model: torch.nn.Module
    model_config: ModelConfig
    prefill_cuda_graph_runner: object
    req_to_token_pool: ReqToTokenPool
    server_args: object
    shared_read_done_event: object
    token_to_kv_pool: KVPool


class Req(Protocol):
    """A request."""

    rid: str
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    output_ids_through_stop: Sequence[int]
    full_untruncated_fill_ids: Sequence[int]
    sampling_params: SamplingParams
    custom_logit_processor: str | None
    multimodal_inputs: schedule_batch.MultimodalInputs | None
    kv: schedule_batch.ReqKvInfo
    prefix_len: int
    host_hit_length: int
    extend_end: int | None
    lock: TreeLock | None
    last_node: object
    finished_reason: object
    to_finish: object
    finished: Callable[[], bool]


class ScheduleBatch(Protocol):
    """A batch as the scheduler sees it."""

    reqs: list[Req]
    forward_mode: ForwardMode
    spec_algorithm: SpeculativeAlgorithm
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    input_ids: torch.Tensor
    multimodal_inputs: list[schedule_batch.MultimodalInputs | None] | None
    prefix_lens: list[int]
    extend_lens: list[int]
    extend_num_tokens: int
    decoding_reqs: list[Req] | None
    global_num_tokens: list[int] | None
    global_num_tokens_for_logprob: list[int] | None
    batch_is_full: bool
    req_to_token_pool: ReqToTokenPool
    tree_cache: RadixTree
    req_pool_indices: torch.Tensor
    mamba_track_indices: torch.Tensor
    mamba_track_mask_cpu: list[bool] | None


class ModelWorker(Protocol):
    """The worker that launches a rank's passes."""

    is_draft_worker: bool
    model_runner: ModelRunner
    server_args: object


class Scheduler(Protocol):
    """The scheduler of a rank."""

    chunked_req: Req | None
    device_module: Any
    enable_overlap: bool
    forward_ct: int
    forward_stream: torch.cuda.Stream
    forward_stream_ctx: AbstractContextManager[object]
    is_fully_idle: Callable[[], bool]
    metrics_reporter: SchedulerMetricsReporter
    result_queue: Sequence[tuple[object, Any]]
    schedule_stream: torch.cuda.Stream
    server_args: object
    tp_worker: ModelWorker
    tree_cache: RadixTree
    _apply_war_barrier: Callable[[], None]
