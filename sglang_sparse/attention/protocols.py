"""SGLang's objects, by what this package uses of them: what a port to another release has to keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class RadixAttention(Protocol):
    """The attention of a layer."""

    layer_id: int
    tp_q_head_num: int
    qk_head_dim: int
    v_head_dim: int
    scaling: float
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
    forward_mode: Any
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor


class ModelRunner(Protocol):
    """What runs the passes of a rank; its ``attn_backend`` is ours in a sparse server."""

    attn_backend: Any
    dtype: torch.dtype
    device: str
    is_draft_worker: bool
    model: Any
    model_config: Any
    req_to_token_pool: ReqToTokenPool
    server_args: Any
    token_to_kv_pool: KVPool


class Req(Protocol):
    """A request."""

    rid: str
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    full_untruncated_fill_ids: Sequence[int]
    sampling_params: Any
    kv: Any
    prefix_len: int
    extend_end: int | None
    lock: Any
    last_node: object
    finished_reason: object
    finished: Callable[[], bool]


class ScheduleBatch(Protocol):
    """A batch as the scheduler sees it."""

    reqs: list[Req]
    forward_mode: Any
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    input_ids: torch.Tensor
    prefix_lens: list[int]
    extend_lens: list[int]
    decoding_reqs: list[Req] | None
    batch_is_full: bool
    req_to_token_pool: ReqToTokenPool
