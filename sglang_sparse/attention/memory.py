"""Memory that SGLang's sizing of the KV pool is told of: the method's buffers, and the scratch of sparse passes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse.attention.batch import (
    allocate_views,
    count_sizes,
    regrouped_bytes,
    rows_and_queries,
    view_buffers,
    views_nbytes,
)
from sglang_sparse.attention.kv_scales import kv_bytes_per_token
from sglang_sparse.attention.prompt_selection import PROMPTS_AT_ONCE, TOKENS_AT_ONCE, kept_bytes
from sglang_sparse.attention.protocols import KVPool
from sglang_sparse.config import arguments
from sglang_sparse.config.settings import hooked_settings_of, prefill_chunk
from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.layers import listed, parse_layers
from sglang_sparse.methods.roles import PromptSelector, prompt_selectors
from sglang_sparse.methods.shared_selection import SHARED_BYTES, SharedSelection

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    from sglang_sparse.config.settings import Settings
    from sglang_sparse.methods.base import ModelShape

logger = logging.getLogger(__name__)

# Tokens whose keys, or values, compaction copies at once.
COPIED_AT_ONCE = 1024
# Indices of a token that is copied, by KV head: positions and slots, and what comes in between.
INDEX_BYTES = 40
# SGLang's own bound on the rows that run at once, where none is given.
MOST_ROWS = 4096


@dataclass(frozen=True)
class Need:
    """Memory to keep free next to the KV pool.

    Attributes:
        nbytes: how much.
        phase: "prefill" or "decode".
        flag: what of the command line asked for it.
        passes: what it is for: the largest passes.
        smaller: flags that make it less.
    """

    nbytes: int
    phase: str
    flag: str
    passes: str
    smaller: str


def needs(settings: Settings, kvc: KVCacheConfigurator, model: ModelShape, table_width: int) -> Iterator[Need]:
    """Yield what a server's methods need.

    Args:
        settings: the methods.
        model: the attention layers of this rank; values have at most its ``head_dim``.
        table_width: tokens of a row of SGLang's token table.
    """
    if settings.prefill:
        yield of_prefill(settings, kvc, model)
    if settings.name:
        found = [of_decode(settings, kvc, model, table_width), of_selection(settings, kvc, table_width)]
        yield from (need for need in found if need.nbytes)
    if keeping := prompt_selectors(settings.decode.methods):
        yield of_prompts(keeping, settings.flag, kvc, model)


def of_prefill(settings: Settings, kvc: KVCacheConfigurator, model: ModelShape) -> Need:
    """Compute the memory of a prefill pass, and of what it keeps of cut prompts; see ``needs``. Layers take turns.

    SGLang has one prompt at a time that goes on in a later pass, and in one pass it may end and another begin.

    Its output and its page table are not charged: the dense backend would allocate an output of the same size in the
    same place, and a row of the table comes with a query token, for each of which SGLang leaves 1.5 MB, unless
    --mem-fraction-static says otherwise.
    """
    assert settings.prefill is not None
    context = kvc.model_config.context_len
    tokens = most_query_tokens(kvc.server_args, context)
    methods = settings.prefill.methods
    layers = [len(model.here(parse_layers(method.config.layers, model.num_layers))) for method in methods]
    kept = sum(one.kept_bytes(model, own, kvc.model_dtype) for one, own in zip(methods, layers, strict=True))
    return Need(
        max(method.scratch_bytes(model, tokens, context) for method in methods) + 2 * kept,
        "prefill",
        settings.prefill_flag,
        f"passes of up to {tokens} tokens",
        "--chunked-prefill-size",
    )


def of_decode(settings: Settings, kvc: KVCacheConfigurator, model: ModelShape, table_width: int) -> Need:
    """Compute the memory of a decode layer and of the CUDA graphs' view; see ``needs``. The layers take turns.

    CUDA graphs keep what they were captured with, so that it is needed once for them and once for the batches that run
    without one. The view of these is not charged: half a MB a row (8 KV heads, 128k tokens in pages of 16; up to
    3 MB in RocketKV's blocks of 4) is left to --mem-fraction-static.
    """
    methods, device, dtype = settings.decode.methods, torch.device(kvc.device), kvc.model_dtype
    captured, eager = decode_batches(kvc.server_args)
    counters = torch.zeros(sum(count_sizes(methods)), dtype=torch.int64, device="meta")
    buffers = view_buffers(methods, model, table_width, dtype, device)
    each, queries = rows_and_queries(settings.method, arguments.verified_tokens(arguments.of(kvc.server_args)))
    limits = model.num_kv_heads, table_width, counters
    nbytes = views_nbytes(allocate_views(methods, each * max(captured, default=0), *limits, buffers))
    for batches in (captured, eager):
        sizes = [each * requests for requests in batches]
        views = allocate_views(methods, max(sizes, default=0), *limits, queries=queries)
        asked = [(method, view.rows(rows)) for method, view in zip(methods, views, strict=True) for rows in sizes]
        nbytes += max((one.scratch_bytes(model, view, dtype, device) for one, view in asked), default=0)
        nbytes += regrouped_bytes(model, max(sizes, default=0), queries, dtype)
    graphs = f"CUDA graphs of up to {captured[-1]} rows" if captured else ""
    others = f"{'other ' if graphs else ''}batches of up to {eager[-1]} rows" if eager else ""
    return Need(
        nbytes,
        "decode",
        settings.flag,
        ", ".join(passes for passes in (graphs, others) if passes),
        "--max-running-requests" + (", --cuda-graph-max-bs-decode" if graphs else ""),
    )


def of_selection(settings: Settings, kvc: KVCacheConfigurator, table_width: int) -> Need:
    """Compute the memory of the selection in a prefill pass, for models that select themselves; see ``needs``.

    Not charged is what grows with the tokens of the pass alone, a few KB of the 1.5 MB that SGLang leaves for each.
    """
    tokens = most_query_tokens(kvc.server_args, kvc.model_config.context_len)
    return Need(
        sum(one.selection_bytes(tokens, table_width, torch.device(kvc.device)) for one in settings.decode.methods),
        "prefill",
        settings.flag,
        f"passes of up to {tokens} tokens",
        "--chunked-prefill-size",
    )


def of_prompts(methods: Sequence[PromptSelector], flag: str, kvc: KVCacheConfigurator, model: ModelShape) -> Need:
    """Compute the memory of the prompt tokens that requests keep, and of their selection or copy; see ``needs``.

    The layers of several methods choose one after the other.
    """
    requests = arguments.of(kvc.server_args).max_running_requests or MOST_ROWS
    context = kvc.model_config.context_len
    sizes = [
        (count, max(context if count == 1 else 0, TOKENS_AT_ONCE // count)) for count in range(1, PROMPTS_AT_ONCE + 1)
    ]

    def moment(method: PromptSelector) -> int:
        query = method.window_tokens * model.num_q_heads * model.head_dim * kvc.model_dtype.itemsize
        choice = max(method.keep_scratch_bytes(model, count, tokens) + count * query for count, tokens in sizes)
        return max(choice, compaction_bytes(method, model))

    return Need(
        # SGLang's request pool has a row more, for what pads a batch.
        sum(kept_bytes(method, model, requests + 1) for method in methods) + max(map(moment, methods)),
        "prompts, what their requests keep among it",
        flag,
        f"{requests} requests",
        "--max-running-requests",
    )


def decode_batches(given: object) -> tuple[list[int], range]:
    """Return the sizes of decode batches: those that CUDA graphs have, and those that may run without one."""
    server_args = arguments.of(given)
    running = max(1, (server_args.max_running_requests or MOST_ROWS) // server_args.attn_dp_size)
    graphs = server_args.cuda_graph_config.decode
    if graphs.backend == "disabled":
        return [], range(1, running + 1)
    # SGLang adds a graph of the limit's own size where others are beyond it.
    captured = sorted({min(size, running) for size in graphs.bs})
    # Without padding a batch needs a graph of its very size.
    padded = 0 if server_args.disable_cuda_graph_padding else captured[-1]
    return captured, range(padded + 1, running + 1)


def most_query_tokens(given: object, max_context: int) -> int:
    """Return an upper bound of an extend pass's query tokens.

    Without chunks SGLang takes on requests until ``max_prefill_tokens`` are reached, and cuts none of them. Rows that
    decode within a mixed batch may come on top of a chunk, see ``scheduler/prefill_chunks.py``.
    """
    server_args = arguments.of(given)
    tokens = prefill_chunk(server_args) or server_args.max_prefill_tokens + max_context
    return tokens + (server_args.max_running_requests or MOST_ROWS if server_args.enable_mixed_chunk else 0)


def allocator_counts(device: torch.device) -> dict[str, int] | None:
    """Return this process's GPU memory since its start: number of allocations, and bytes held, now and at most.

    None on the CPU, whose allocator does not count.
    """
    if device.type != "cuda":
        return None
    found = torch.cuda.memory_stats(device)
    names = {"allocations": "allocation.all.allocated", "held_bytes": "allocated_bytes.all.current"}
    names["peak_bytes"] = "allocated_bytes.all.peak"
    return {name: found[counter] for name, counter in names.items()}


# The attribute of the stock pool under which the wrapper finds the buffers: the pool's class stays SGLang's own.
ATTRIBUTE, CHARGED = "sglang_sparse_pools", "sglang_sparse_aux_bytes"


def compaction_bytes(method: PromptSelector, model: ModelShape) -> int:
    """Return an upper bound of the GPU memory that copying takes, in bytes; 0 where nothing is copied."""
    if not method.compacts:
        return 0
    tokens = max(COPIED_AT_ONCE, method.block_size)
    return model.num_kv_heads * tokens * (model.head_dim * model.kv_dtype.itemsize + INDEX_BYTES)


def model_shape(model_config: Any, kv_dtype: torch.dtype) -> ModelShape:
    """Describe a model to a method, for this rank.

    Args:
        kv_dtype: dtype of the KV cache.
    """
    from sglang.srt.distributed.utils import get_pp_indices
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    tp_size, num_layers = parallel.attn_tp_size, model_config.num_hidden_layers
    stage = get_pp_indices(num_layers, parallel.pp_rank, parallel.pp_size) if parallel.pp_size > 1 else None
    latent = model_config.attention_arch.name == "MLA"
    rope_dim = model_config.qk_rope_head_dim if latent else 0
    return ModelShape(
        num_layers=num_layers,
        num_q_heads=model_config.get_num_attention_heads(tp_size),
        num_kv_heads=1 if latent else model_config.get_num_kv_heads(tp_size),
        head_dim=model_config.kv_lora_rank + rope_dim if latent else model_config.head_dim,
        kv_dtype=kv_dtype,
        rope_dim=rope_dim,
        stage=stage,
    )


def aux_bytes_per_token(settings: Settings, model: ModelShape, shares: bool = False) -> int:
    """Bytes that the method's buffers take per token of KV cache, over all layers of this rank, rounded up.

    Args:
        settings: the methods.
        model: see ``DecodeMethod.aux_specs``.
        shares: see ``shares_selection``.
    """
    per_page = sum(spec.bytes_per_page * len(spec.layers or ()) for spec in settings.decode.aux_specs(model))
    if shares:
        per_page += SHARED_BYTES * model.num_kv_heads * len(settings.decode.sparse_layers(model.num_layers))
    return -(-per_page // settings.config.page_size)


def shares_selection(settings: Settings, model: ModelShape, given: object) -> bool:
    """Whether drafts of a round may share a selection: several of the server's own, if all methods select pages so."""
    server_args = arguments.of(given)
    several = arguments.drafts_itself(server_args) and (server_args.speculative_num_steps or 1) > 1
    pages = all(one.verifies and one.block_size == settings.config.page_size for one in settings.decode.methods)
    return several and pages and not model.rope_dim


def charge_aux_bytes(cell_size: int, configurator: object, kvc: KVCacheConfigurator, num_layers: int) -> int:
    """After ``_compute_cell_size``: add the buffers' share to the bytes that SGLang counts per token.

    Called more than once at start, so it must stay pure.
    """
    settings = hooked_settings_of(kvc.server_args)
    if settings is None or kvc.is_draft_worker:
        return cell_size
    model = model_shape(kvc.model_config, kvc.kv_cache_dtype)
    return cell_size + aux_bytes_per_token(settings, model, shares_selection(settings, model, kvc.server_args))


def note_aux_bytes(original: Callable[..., None], configurator: object, kvc: KVCacheConfigurator) -> None:
    """Around ``HybridSWAPoolConfigurator.__init__``: remember the buffers' share for `charge_full_pool`."""
    setattr(configurator, CHARGED, charge_aux_bytes(0, configurator, kvc, 0))
    original(configurator, kvc)


def charge_full_pool(cell_size: int, configurator: object) -> int:
    """After ``HybridSWAPoolConfigurator._full_cell_bytes``: add the buffers' share to a token of the full pool."""
    return cell_size + getattr(configurator, CHARGED)


def charge_scratch(available: int, kvc: KVCacheConfigurator, *_: object, **__: object) -> int:
    """After ``_profile_available_bytes``: keep what sparse passes need for a moment out of the KV pool.

    Returns:
        Bytes that remain for the KV pool.

    Raises:
        SparseArgumentError: nothing remains; ``got`` is the memory in bytes.
    """
    settings = hooked_settings_of(kvc.server_args)
    if settings is None or kvc.is_draft_worker:
        return available
    from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len

    model = model_shape(kvc.model_config, kvc.kv_cache_dtype)
    # The values of MLA are its latents.
    if not model.rope_dim:
        model = dataclasses.replace(model, head_dim=max(model.head_dim, kvc.model_config.v_head_dim or 0))
    for method in settings.decode.methods:
        method.adopt(kvc.model_config)
    width = kvc.model_config.context_len + get_req_to_token_extra_context_len()
    for need in needs(settings, kvc, model, width):
        if need.nbytes >= available:
            raise SparseArgumentError(
                f"{need.flag} needs {need.nbytes / 2**20:.0f} MiB for {need.passes} at a context of "
                f"{kvc.model_config.context_len}, and {available / 2**20:.0f} MiB are left for it and the KV cache",
                field="--mem-fraction-static",
                got=available,
                allowed=f"a smaller {need.smaller} or --context-length, a larger --mem-fraction-static",
            )
        available -= need.nbytes
        logger.info(
            "sglang_sparse: %.1f MiB kept free for the scratch of sparse %s (%s)",
            need.nbytes / 2**20,
            need.phase,
            need.passes,
        )
    return available


def attach_aux_pools(kv_pool: KVPool, configurator: KVCacheConfigurator, **_: object) -> None:
    """After ``_build_token_to_kv_pool``: allocate the buffers and leave them on the stock pool.

    Raises:
        RuntimeError: the KV pool is not SGLang's plain one for this attention, or has other layers than the stage.
        SparseArgumentError: a stage has no layer to attend in.
    """
    settings = hooked_settings_of(configurator.server_args)
    if settings is None or configurator.is_draft_worker:
        return
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    latent = settings.method.kind_of(configurator.model_config) != "MHA"
    # SGLang wraps it where other layers have states, or windows and a pool for them.
    plain = getattr(kv_pool, "full_kv_pool", kv_pool)
    # A platform may have its own subclass for MLA; those that store something else are refused by model or flag.
    if not isinstance(plain, MLATokenToKVPool) if latent else type(plain) is not MHATokenToKVPool:
        needed = (MLATokenToKVPool if latent else MHATokenToKVPool).__name__
        raise RuntimeError(f"{settings.flag} needs {needed}, got {type(plain).__name__}")
    model = model_shape(configurator.model_config, kv_pool.dtype)
    specs = settings.decode.aux_specs(model)
    layers = model.here(settings.decode.sparse_layers(model.num_layers)) if settings.name else ()
    held = set(plain.model_layer_ids)
    if not held.issuperset(layers) or not held.issubset(range(*model.stage) if model.stage else held):
        raise RuntimeError(f"{settings.flag}: the KV pool has layers {held}, the stage {model.stage}: a bug")
    if not held:
        raise SparseArgumentError(f"{settings.flag}: a stage has no layer of full attention; lower --pp-size")
    page_size = settings.config.page_size
    num_pages = plain.get_key_buffer(plain.start_layer).shape[0] // page_size
    on_gpu = torch.device(configurator.device).type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    pools = AuxBuffers(specs, layers, num_pages, page_size, configurator.device)
    pools.views_ready = not (model.stage and model.stage[0])
    if shares := shares_selection(settings, model, configurator.server_args):
        later = (arguments.of(configurator.server_args).speculative_num_steps or 1) - 1
        pools.shared = SharedSelection(layers, model.num_kv_heads, num_pages, page_size, later, configurator.device)
    per_token = aux_bytes_per_token(settings, model, shares)
    pools.accounted_bytes = per_token * kv_pool.size
    pools.kv_bytes_per_token = kv_bytes_per_token(kv_pool)
    if on_gpu:
        pools.measured_bytes = torch.cuda.memory_allocated() - before
    setattr(kv_pool, ATTRIBUTE, pools)
    if settings.name is None:
        return
    kernels = "reference" if pools.overflow.device.type == "cpu" else "triton"
    logger.info(
        "sglang_sparse: method %s, %s, page size %d, %s; aux memory %d bytes per token, %.1f MiB in all; kernels %s",
        settings.decode.described,
        listed(layers, model.num_layers),
        page_size,
        ", ".join(f"{spec.name} {str(spec.dtype).removeprefix('torch.')}" for spec in specs) or "no summaries",
        per_token,
        pools.nbytes / 2**20,
        ", ".join(dict.fromkeys(method.kernels(kernels) for method in settings.decode.methods)),
    )
