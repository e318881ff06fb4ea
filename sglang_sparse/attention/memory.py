"""What sparse passes allocate for a moment, which SGLang's sizing of the KV pool knows nothing of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse.attention.plan import usual_selection
from sglang_sparse.attention.prompt_selection import PROMPTS_AT_ONCE, TOKENS_AT_ONCE, kept_bytes
from sglang_sparse.config import arguments
from sglang_sparse.config.settings import prefill_chunk
from sglang_sparse.methods.groups import count_sizes, view_buffers, with_parts
from sglang_sparse.methods.layers import parse_layers
from sglang_sparse.methods.roles import KeepMethod, keep_methods
from sglang_sparse.methods.views import allocate_view
from sglang_sparse.scheduler import compaction

if TYPE_CHECKING:
    from sglang_sparse.config.settings import Settings
    from sglang_sparse.methods.base import ModelShape

# SGLang's own bound on the rows that run at once, where none is given.
MOST_ROWS = 4096


@dataclass(frozen=True)
class Need:
    """Memory to keep free beside the KV pool.

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


def needs(settings: Settings, kvc: Any, model: ModelShape, table_width: int) -> Iterator[Need]:
    """Yield what a server's methods need.

    Args:
        settings: the methods.
        kvc: SGLang's ``KVCacheConfigurator``.
        model: the attention layers of this rank; values have at most its ``head_dim``.
        table_width: tokens of a row of SGLang's token table.
    """
    if settings.prefill:
        yield of_prefill(settings, kvc, model)
    if settings.name:
        found = [of_decode(settings, kvc, model, table_width)]
        if settings.method.selects_in_model:
            found.append(of_selection(settings, kvc, table_width))
        yield from (need for need in found if need.nbytes)
    if keeping := keep_methods(settings.method):
        yield of_prompts(keeping, settings.flag, kvc, model)


def of_prefill(settings: Settings, kvc: Any, model: ModelShape) -> Need:
    """What a pass of the prefill method needs, with what is kept of cut prompts; see ``needs``.

    SGLang has one prompt at a time that goes on in a later pass, and in one pass it may end and another begin.

    Its output and its page table are not charged: the dense backend would allocate an output of the same size in the
    same place, and a row of the table comes with a query token, for each of which SGLang leaves 1.5 MB, unless
    --mem-fraction-static says otherwise.
    """
    assert settings.prefill is not None
    context = kvc.model_config.context_len
    tokens = most_query_tokens(kvc.server_args, context)
    layers = len(parse_layers(settings.prefill.config.layers, model.num_layers))
    kept = 2 * settings.prefill.kept_bytes(model, layers, kvc.model_dtype)
    return Need(
        settings.prefill.scratch_bytes(model, tokens, context) + kept,
        "prefill",
        settings.prefill_flag,
        f"passes of up to {tokens} tokens",
        "--chunked-prefill-size",
    )


def of_decode(settings: Settings, kvc: Any, model: ModelShape, table_width: int) -> Need:
    """What a layer of a decode step needs, and the view of the CUDA graphs; see ``needs``. The layers take turns in it.

    CUDA graphs keep what they were captured with, so that it is needed once for them and once for the batches that run
    without one. The view of these is not charged: half a MB a row (8 KV heads, 128k tokens in pages of 16; up to
    3 MB in RocketKV's blocks of 4) is left to --mem-fraction-static.
    """
    method, device = settings.method, torch.device(kvc.device)
    max_blocks = -(-table_width // method.block_size)
    limits = (model.num_kv_heads, max_blocks, usual_selection(method, max_blocks), method.block_size)
    captured, eager = decode_batches(kvc.server_args)
    counters = torch.zeros(sum(count_sizes(method)), dtype=torch.int64, device="meta")
    buffers = view_buffers(method, model, max_blocks, kvc.model_dtype, device)
    static = allocate_view(max(captured, default=0), *limits, counters, buffers[method.block_size])
    nbytes = with_parts(static, method, max_blocks, buffers).nbytes
    for batches in (captured, eager):
        view = with_parts(allocate_view(max(batches, default=0), *limits, counters), method, max_blocks)
        sizes = (method.scratch_bytes(model, view.rows(rows), kvc.model_dtype, device) for rows in batches)
        nbytes += max(sizes, default=0)
    graphs = f"CUDA graphs of up to {captured[-1]} rows" if captured else ""
    others = f"{'other ' if graphs else ''}batches of up to {eager[-1]} rows" if eager else ""
    return Need(
        nbytes,
        "decode",
        settings.flag,
        ", ".join(passes for passes in (graphs, others) if passes),
        "--max-running-requests" + (", --cuda-graph-max-bs-decode" if graphs else ""),
    )


def of_selection(settings: Settings, kvc: Any, table_width: int) -> Need:
    """What choosing takes in a pass of prefill where the model chooses; see ``needs``.

    Not charged is what grows with the tokens of the pass alone, a few KB of the 1.5 MB that SGLang leaves for each.
    """
    tokens = most_query_tokens(kvc.server_args, kvc.model_config.context_len)
    return Need(
        settings.method.selection_bytes(tokens, table_width, torch.device(kvc.device)),
        "prefill",
        settings.flag,
        f"passes of up to {tokens} tokens",
        "--chunked-prefill-size",
    )


def of_prompts(methods: Sequence[KeepMethod], flag: str, kvc: Any, model: ModelShape) -> Need:
    """What requests keep of their prompts, all the time, and what choosing or copying it needs; see ``needs``.

    The layers of several methods choose one after the other.
    """
    requests = arguments.of(kvc.server_args).max_running_requests or MOST_ROWS
    context = kvc.model_config.context_len
    sizes = [
        (count, max(context if count == 1 else 0, TOKENS_AT_ONCE // count)) for count in range(1, PROMPTS_AT_ONCE + 1)
    ]

    def moment(method: KeepMethod) -> int:
        query = method.window_tokens * model.num_q_heads * model.head_dim * kvc.model_dtype.itemsize
        choice = max(method.keep_scratch_bytes(model, count, tokens) + count * query for count, tokens in sizes)
        return max(choice, compaction.scratch_bytes(method, model))

    return Need(
        # SGLang's request pool has a row more, for what pads a batch.
        sum(kept_bytes(method, model, requests + 1) for method in methods) + max(map(moment, methods)),
        "prompts, what their requests keep among it",
        flag,
        f"{requests} requests",
        "--max-running-requests",
    )


def decode_batches(server_args: Any) -> tuple[list[int], range]:
    """Return the sizes of decode batches: those that CUDA graphs have, and those that may run without one."""
    server_args = arguments.of(server_args)
    running = server_args.max_running_requests or MOST_ROWS
    graphs = server_args.cuda_graph_config.decode
    if graphs.backend == "disabled":
        return [], range(1, running + 1)
    # SGLang adds a graph of the limit's own size where others are beyond it.
    captured = sorted({min(size, running) for size in graphs.bs})
    # Without padding a batch needs a graph of its very size.
    padded = 0 if server_args.disable_cuda_graph_padding else captured[-1]
    return captured, range(padded + 1, running + 1)


def most_query_tokens(server_args: Any, max_context: int) -> int:
    """Return an upper bound of an extend pass's query tokens.

    Without chunks SGLang takes on requests until ``max_prefill_tokens`` are reached, and cuts none of them. Rows that
    decode within a mixed batch may come on top of a chunk, see ``scheduler/prefill_chunks.py``.
    """
    server_args = arguments.of(server_args)
    tokens = prefill_chunk(server_args) or server_args.max_prefill_tokens + max_context
    return tokens + (server_args.max_running_requests or MOST_ROWS if server_args.enable_mixed_chunk else 0)


def allocator_counts(device: torch.device) -> dict[str, int] | None:
    """How often this process has allocated GPU memory since its start, what it holds and what it held at most, bytes.

    None on the CPU, whose allocator does not count.
    """
    if device.type != "cuda":
        return None
    found = torch.cuda.memory_stats(device)
    names = {"allocations": "allocation.all.allocated", "held_bytes": "allocated_bytes.all.current"}
    names["peak_bytes"] = "allocated_bytes.all.peak"
    return {name: found[counter] for name, counter in names.items()}
