"""Selection from a pass's index logits by ``index_topk``: many queries in parts.

A server uses it behind SGLang's logits and behind its own; ``eval.lab.bench_dsa`` times both. What is allocated beside
the results is bounded, whatever the prompt and the chunk, also where ``index_topk`` has no kernel of its own.
"""

from collections.abc import Callable

import torch

from ..index_keys import PAGE_SIZE
from . import index_topk
from .reference import Names

# Of the logits of a prefill that are chosen from at a time, for as many queries as fit; choosing from them takes
# several times as much on a CPU. Logits that SGLang makes may be larger.
LOGITS_BYTES = 32 * 2**20
GPU_LOGITS_BYTES = 256 * 2**20
# Queries whose slots are looked up at a time: 16 MiB of 64-bit places at a selection of 2048.
LOOKED_UP = 1024


def scratch_bytes(queries: int, width: int, device: torch.device, given: bool) -> int:
    """Bytes that a selection of a prefill allocates at once, beside what grows with its queries alone.

    Args:
        queries: of the prefill.
        width: columns of the logits.
        device: where they are.
        given: whether the logits are somebody else's, as for `select`; these may be wider.
    """
    if given:
        # A mask of a byte, and a copy where rows are padded. SGLang's have the tokens of all requests of a pass.
        return 5 * max(width, most_logits(device))
    return 4 * width * min(queries, queries_at_once(width, device))


def choose_in_parts(
    scores: Callable[[slice], torch.Tensor],
    at_once: int,
    lengths: torch.Tensor,
    wanted: torch.Tensor,
    names: Names,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    stats: torch.Tensor | None = None,
    nothing: int = -1,
) -> None:
    """Choose for some queries at a time, from logits that are made for them alone.

    Args:
        scores: makes the logits of some queries, ``[n, columns]`` float32.
        at_once: queries at a time, 1 or more.
        lengths: ``[queries]`` int32, tokens that each sees.
        wanted: ``[queries]`` int32, tokens that each takes.
        names: page table, rows and offsets, see ``index_topk``; offsets as there, or None.
        out: ``[queries, topk]`` int32 for the positions, ascending, then -1; ``[queries]`` int32 for the counts; and
            ``[queries, topk]`` int32 for the slots, or None.
        stats: see ``index_topk``.
        nothing: the first slot of a query without tokens.
    """
    chosen, counts, slots = out
    for begin in range(0, len(lengths), at_once):
        mine = slice(begin, begin + at_once)
        some = _some(names, mine) if slots is not None else (None, None, None)
        found = chosen[mine], counts[mine], slots[mine] if slots is not None else None
        # Nothing here holds the logits of one part during the next.
        index_topk(scores(mine), lengths[mine], chosen.shape[1], None, wanted[mine], *some, found, stats, nothing)


def _some(names: Names, mine: slice) -> Names:
    """Return the names of tokens for some queries."""
    table, rows, offsets = names
    if offsets is not None:
        return None, None, offsets[mine]
    if table is None or rows is None:
        return None if table is None else table[mine], None, None
    return table, rows[mine], None


def select(
    logits: torch.Tensor, lengths: torch.Tensor, topk: int, first: torch.Tensor | None, names: Names | None = None
) -> torch.Tensor:
    """Choose from logits whose rows begin anywhere.

    It counts nothing: SGLang's lengths give a row that pads a pass a token.

    Args:
        logits: ``[queries, columns]`` float32; with ``first`` it may be overwritten outside of each query's tokens.
        lengths: ``[queries]`` int32, tokens of each query.
        topk: most that a query takes.
        first: ``[queries]`` int32, column of each query's first token; None: 0.
        names: page table, rows and offsets, see ``index_topk``; None: no slots are wanted.

    Returns:
        ``[queries, topk]`` int32, slots of the tokens in ascending order of position, then -1; positions from ``first``
        on where no slots are wanted.
    """
    chosen = torch.empty(len(logits), topk, dtype=torch.int32, device=logits.device)
    if names is None:
        index_topk(logits, lengths, topk, first, out=(chosen, None, None))
    else:
        index_topk(logits, lengths, topk, first, None, *_some(names, slice(None)), out=(None, None, chosen))
    return chosen


def queries_at_once(width: int, device: torch.device) -> int:
    """Queries of a prefill that are served at a time, one at least.

    Args:
        width: columns of the logits.
        device: where they are.
    """
    return max(1, most_logits(device) // width)


def most_logits(device: torch.device) -> int:
    """Return the number of float32 logits of one part."""
    return (LOGITS_BYTES if device.type == "cpu" else GPU_LOGITS_BYTES) // 4


def slots_of(
    chosen: torch.Tensor,
    page_table: torch.Tensor | None,
    rows: torch.Tensor | None,
    offsets: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Translate positions to slots of the KV cache.

    Args:
        chosen: ``[queries, n]`` int32, positions within each query's row, or -1.
        page_table: ``[rows, pages]`` int32, pages of 64 tokens; not needed with ``offsets``.
        rows: ``[queries]`` int32; likewise.
        offsets: ``[queries]``: number the tokens from these on instead.
        out: optional ``[queries, n]`` int32.

    Returns:
        ``[queries, n]`` int32, -1 where ``chosen`` is.
    """
    out = torch.empty_like(chosen) if out is None else out
    for begin in range(0, len(chosen), LOOKED_UP):
        mine = slice(begin, begin + LOOKED_UP)
        some, found = chosen[mine], out[mine]
        if offsets is not None:
            torch.add(some, offsets[mine, None], out=found)
        else:
            assert page_table is not None and rows is not None
            places = some.clamp(min=0)
            pages = page_table[rows[mine, None], places // PAGE_SIZE]
            torch.add(pages * PAGE_SIZE, places % PAGE_SIZE, out=found)
        found.masked_fill_(some < 0, -1)
    return out
