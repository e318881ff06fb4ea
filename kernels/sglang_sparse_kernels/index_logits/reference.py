"""The definition of the index logits in plain torch."""

import torch

from ..index_keys.reference import PAGE_SIZE, parts

# Products held at once, in float64.
_MOST_PRODUCTS = 1 << 22


def index_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    buffer: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """See ``index_logits.index_logits``.

    Float64 holds the products of a query and a key without rounding, so that nothing depends on how they are batched.
    """
    keys, scales = parts(buffer)
    for row in rows[lengths > 0].unique().tolist():
        queries = ((rows == row) & (lengths > 0)).nonzero().flatten()
        longest = int(lengths[queries].max())
        pages = page_table[row, : -(-longest // PAGE_SIZE)].long()
        row_keys = keys[pages].view(torch.float8_e4m3fn).flatten(0, 1)[:longest].double()
        row_scales = scales[pages].flatten()[:longest].double()
        for some in queries.split(max(1, _MOST_PRODUCTS // (longest * q.shape[1]))):
            products = (q[some].double() @ row_keys.T).relu_().mul_(weights[some].double()[..., None])
            logits = products.sum(dim=1) * row_scales
            held = torch.arange(longest, device=q.device) < lengths[some, None]
            out[some, :longest] = torch.where(held, logits.float(), out[some, :longest])
    return out
