"""What a selection from index logits takes around ``page_topk``: logits of rows that begin anywhere, and slots.

In plain torch. A server uses it behind SGLang's logits and behind its own; ``eval.bench_dsa`` times both. What it
allocates beside its results is bounded, whatever the prompt and the chunk: many queries are served in parts.
"""

from collections.abc import Callable

import torch

from .index_keys import PAGE_SIZE
from .page_topk import page_topk

# Of the logits of a prefill that are chosen from at a time, for as many queries as fit; choosing from them takes
# several times as much on a CPU. Logits that SGLang makes may be larger.
LOGITS_BYTES = 32 * 2**20
GPU_LOGITS_BYTES = 256 * 2**20
# Queries whose slots are looked up at a time: 16 MiB of 64-bit places at a selection of 2048.
LOOKED_UP = 1024


def queries_at_once(width: int, device: torch.device) -> int:
    """Queries of a prefill that are served at a time, one at least.

    Args:
        width: columns of the logits.
        device: where they are.
    """
    return max(1, _most(device) // width)


def _most(device: torch.device) -> int:
    return (LOGITS_BYTES if device.type == "cpu" else GPU_LOGITS_BYTES) // 4


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
        return 5 * max(width, _most(device))
    return 4 * width * min(queries, queries_at_once(width, device))


def choose(
    scores: Callable[[slice], torch.Tensor],
    at_once: int,
    lengths: torch.Tensor,
    wanted: torch.Tensor,
    positions: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None = None,
) -> None:
    """Choose for some queries at a time, from logits that are made for them alone.

    Args:
        scores: makes the logits of some queries, ``[n, columns]`` float32, contiguous.
        at_once: queries at a time, 1 or more.
        lengths: ``[queries]`` int32, tokens that each sees.
        wanted: ``[queries]`` int32, tokens that each takes.
        positions: ``[columns]`` int32, 0, 1, 2 and so on.
        out: ``[queries, topk]`` int32 for the positions, ascending, of which what lies beyond the counts is not always
            written; and ``[queries, 1]`` int32 for the counts.
        stats: see ``page_topk``.
    """
    chosen, counts = out
    for begin in range(0, len(chosen), at_once):
        mine = slice(begin, begin + at_once)
        seen, found = lengths[mine], (chosen[mine, None], counts[mine])
        # One table for all, which no query has a copy of. Nothing here holds the logits of one part during the next.
        table = positions.expand(len(seen), -1)
        page_topk(scores(mine)[:, None], table, seen, wanted[mine], chosen.shape[1], found, stats)


def select(logits: torch.Tensor, lengths: torch.Tensor, topk: int, first: torch.Tensor | None) -> torch.Tensor:
    """Choose from logits whose rows begin anywhere.

    It counts nothing: SGLang's lengths give a row that pads a pass a token.

    Args:
        logits: ``[queries, columns]`` float32; with ``first`` it is overwritten outside of each query's tokens.
        lengths: ``[queries]`` int32, tokens of each query.
        topk: most that a query takes.
        first: ``[queries]`` int32, column of each query's first token; None: 0.

    Returns:
        ``[queries, topk]`` int32, positions from ``first`` on, ascending, then -1.
    """
    queries, width = logits.shape
    columns = torch.arange(width, dtype=torch.int32, device=logits.device)
    chosen = torch.full((queries, topk), -1, dtype=torch.int32, device=logits.device)
    counts = torch.zeros(queries, 1, dtype=torch.int32, device=logits.device)
    wanted, out = lengths.clamp(max=topk), (chosen, counts)
    if first is None:
        choose(lambda _: logits.contiguous(), max(1, queries), lengths, wanted, columns, out)
        return chosen

    def own(mine: slice) -> torch.Tensor:
        start = first[mine, None]
        # Nothing else has a say then: each query has at least as many tokens of its own as it takes.
        others = (columns < start) | (columns >= start + lengths[mine, None])
        return logits[mine].masked_fill_(others, float("-inf")).contiguous()

    seen = torch.full_like(lengths, width)
    choose(own, queries_at_once(width, logits.device), seen, wanted, columns, out)
    return torch.where(chosen < 0, -1, chosen - first[:, None])


def slots_of(
    chosen: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """What positions are called in the KV cache.

    Args:
        chosen: ``[queries, n]`` int32, positions within each query's row, or -1.
        page_table: ``[rows, pages]`` int32, pages of 64 tokens.
        rows: ``[queries]`` int32.
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
            places = some.clamp(min=0)
            pages = page_table[rows[mine, None], places // PAGE_SIZE]
            torch.add(pages * PAGE_SIZE, places % PAGE_SIZE, out=found)
        found.masked_fill_(some < 0, -1)
    return out
