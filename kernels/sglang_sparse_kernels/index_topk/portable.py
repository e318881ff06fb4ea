"""The token selection by ``page_topk`` and plain torch, where its CUDA kernel does not run.

What it allocates beside its results is bounded, whatever the prompt and the chunk: see ``choose``.
"""

import torch

from ..page_topk import page_topk
from .choose import queries_at_once, slots_of
from .reference import Names, Results


def index_topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    first: torch.Tensor | None,
    wanted: torch.Tensor | None,
    names: Names,
    out: Results,
    stats: torch.Tensor | None = None,
    nothing: int = -1,
) -> None:
    """See ``index_topk.index_topk``, whose page table, rows and offsets are ``names``."""
    queries, width = logits.shape
    chosen, counts, slots = out
    chosen = lengths.new_empty(queries, topk) if chosen is None else chosen
    counts = torch.empty_like(lengths) if counts is None else counts
    wanted = lengths.clamp(max=topk) if wanted is None else torch.minimum(lengths, wanted).clamp(0, topk)
    chosen.fill_(-1)
    columns = torch.arange(width, dtype=torch.int32, device=logits.device)
    found = chosen[:, None], counts[:, None]
    if first is None:
        # One table for all, which no query has a copy of.
        table = columns.expand(queries, -1)
        page_topk(logits.contiguous()[:, None], table, lengths, wanted, topk, found, stats)
    else:
        at_once = queries_at_once(max(1, width), logits.device)
        for begin in range(0, queries, at_once):
            mine = slice(begin, begin + at_once)
            table = columns.expand(len(wanted[mine]), -1)
            seen = torch.full_like(wanted[mine], width)
            part = found[0][mine], found[1][mine]
            own = _own(logits[mine], columns, first[mine, None], lengths[mine, None])
            page_topk(own[:, None], table, seen, wanted[mine], topk, part)
            # Nothing here holds the logits of one part during the next.
            del own
        missing = chosen < 0
        chosen.sub_(first[:, None]).masked_fill_(missing, -1)
        if stats is not None:
            stats[:3] += torch.stack([(wanted > 0).sum(), wanted.sum(), (lengths * (wanted > 0)).sum()])
    if slots is not None:
        table, rows, offsets = names
        if offsets is None:
            rows = torch.arange(queries, device=logits.device) if rows is None else rows
            # That of a query without tokens may be any number.
            rows = rows.masked_fill(counts == 0, 0)
        slots_of(chosen, table, rows, offsets, slots)
        if nothing != -1:
            slots[:, :1].masked_fill_(counts[:, None] == 0, nothing)


def _own(logits: torch.Tensor, columns: torch.Tensor, first: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Logits of which nothing has a say that is not a query's own: it has at least as many tokens as it takes."""
    logits.clamp_(min=torch.finfo(torch.float32).min)
    others = (columns < first) | (columns >= first + lengths)
    return logits.masked_fill_(others, float("-inf")).contiguous()
