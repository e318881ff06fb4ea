"""What a selection from index logits takes around ``page_topk``: logits of rows that begin anywhere, and slots.

In plain torch. A server uses it behind SGLang's logits and behind its own; ``eval.bench_dsa`` times both.
"""

import torch

from .index_keys import PAGE_SIZE
from .page_topk import page_topk

# Of the logits of a prefill on a GPU, which are made for as many queries at a time as fit. SGLang's own may be larger.
GPU_LOGITS_BYTES = 256 * 2**20


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
    seen = lengths
    if first is not None:
        start = first[:, None]
        # Nothing else has a say then: each query has at least as many tokens of its own as it takes.
        logits = logits.masked_fill_((columns < start) | (columns >= start + lengths[:, None]), float("-inf"))
        seen = torch.full_like(lengths, width)
    chosen = torch.full((queries, topk), -1, dtype=torch.int32, device=logits.device)
    counts = torch.zeros(queries, 1, dtype=torch.int32, device=logits.device)
    wanted = lengths.clamp(max=topk)
    page_topk(logits.contiguous()[:, None], columns.expand(queries, -1), seen, wanted, topk, (chosen[:, None], counts))
    return chosen if first is None else torch.where(chosen < 0, -1, chosen - first[:, None])


def slots_of(
    chosen: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor | None
) -> torch.Tensor:
    """What positions are called in the KV cache.

    Args:
        chosen: ``[queries, n]`` int32, positions within each query's row, or -1.
        page_table: ``[rows, pages]`` int32, pages of 64 tokens.
        rows: ``[queries]`` int32.
        offsets: ``[queries]``: number the tokens from these on instead.

    Returns:
        ``[queries, n]`` int32, -1 where ``chosen`` is.
    """
    if offsets is not None:
        found = chosen + offsets[:, None]
    else:
        places = chosen.clamp(min=0)
        pages = page_table[rows[:, None], places // PAGE_SIZE]
        found = pages * PAGE_SIZE + places % PAGE_SIZE
    return torch.where(chosen < 0, -1, found).int()
