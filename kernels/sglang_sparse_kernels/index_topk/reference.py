"""The definition of the token selection in plain torch."""

import torch

from ..index_keys.reference import PAGE_SIZE

# What tokens are called: a page table, the row of each query in it, and numbers to count from instead.
Names = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
# Positions, counts and slots, as far as they are wanted.
Results = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
# Logits that are sorted at a time.
_MOST = 1 << 22


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
    first = torch.zeros_like(lengths) if first is None else first
    counts = torch.minimum(lengths, lengths.new_tensor(topk) if wanted is None else wanted).clamp(0, topk)
    if stats is not None:
        active = counts > 0
        stats[:3] += torch.stack([active.sum(), counts.sum(), (lengths * active).sum()])
    if out[1] is not None:
        out[1].copy_(counts)
    table, rows, offsets = names
    rows = torch.arange(queries, device=logits.device) if rows is None else rows
    for begin in range(0, queries, max(1, _MOST // max(1, width))):
        mine = slice(begin, begin + max(1, _MOST // max(1, width)))
        positions = _best(logits[mine], lengths[mine, None], topk, first[mine, None], counts[mine, None])
        if out[0] is not None:
            out[0][mine] = positions
        if out[2] is None:
            continue
        if offsets is not None:
            slots = positions + offsets[mine, None]
        else:
            assert table is not None
            # The row of a query without tokens may be any number.
            row = torch.where(counts[mine] > 0, rows[mine], 0)[:, None]
            places = positions.clamp(min=0)
            slots = table[row, places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
        out[2][mine] = torch.where(positions < 0, -1, slots)
        out[2][mine, 0] = torch.where(counts[mine] > 0, out[2][mine, 0], nothing)


def _best(
    logits: torch.Tensor, lengths: torch.Tensor, topk: int, first: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Positions of the ``counts`` highest, ascending, then -1."""
    position = torch.arange(max(topk, logits.shape[1]), device=logits.device)
    if logits.shape[1] == 0:
        return (position - position - 1).expand(len(logits), -1)[:, :topk]
    columns = (first + position).clamp(max=logits.shape[1] - 1)
    # Adding zero turns -0.0 into 0.0. Where all tokens are chosen their logits may be anything.
    keys = logits.gather(1, columns) + 0.0
    keys = keys.masked_fill(keys.isnan(), float("inf")).masked_fill(position >= lengths, float("-inf"))
    # A token may score -inf as well, and then still precedes, by the stable sort, whatever is no token.
    order = keys.argsort(dim=-1, descending=True, stable=True)[:, :topk]
    last = torch.iinfo(torch.int64).max
    best = order.masked_fill(position[:topk] >= counts, last).sort(-1).values
    return best.masked_fill(best == last, -1)
