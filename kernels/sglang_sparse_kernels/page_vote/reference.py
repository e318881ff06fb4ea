"""The definition of page votes in plain torch."""

import math

import torch

from ..common.row_by_row import row_by_row
from ..page_centroids.reference import unpack
from ..page_score.reference import UNBOUNDED


@row_by_row("q", "page_table", "n_pages")
def page_vote(
    q: torch.Tensor,
    summary: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor,
    local_pages: int = 1,
) -> torch.Tensor:
    """See ``page_vote.page_vote``; entries at or beyond ``n_pages`` are -inf."""
    batch, num_q_heads, head_dim = q.shape
    heads = summary.shape[1]
    out.fill_(float("-inf"))
    width = int(n_pages.max()) if batch else 0
    if width == 0:
        return out
    query = q.float().view(batch, heads, num_q_heads // heads, head_dim) * sm_scale
    logical = torch.arange(width, device=q.device)
    held = logical < n_pages[:, None]  # [B, width]
    # Entries of the table beyond a row's pages may hold anything; page 0 always exists.
    pages = page_table[:, :width].masked_fill(~held, 0).long()
    of_centroids = summary.dtype == torch.uint8
    vectors = unpack(summary[pages], head_dim) if of_centroids else summary[pages].float()  # [B, width, Hkv, V, d]
    if not of_centroids:
        logits = torch.einsum("bhgd,bmhd->bhgm", query.clamp(min=0), vectors[:, :, :, 0])
        logits += torch.einsum("bhgd,bmhd->bhgm", query.clamp(max=0), vectors[:, :, :, 1])
    else:
        halves = -math.log(2) * torch.arange(vectors.shape[3], device=q.device)
        logits = (torch.einsum("bhgd,bmhvd->bhgmv", query, vectors) + halves).logsumexp(-1)
    unknown = logits.isnan()
    logits = logits.masked_fill(unknown, float("-inf"))
    voted = logical < n_pages[:, None] - 1
    whole = logits.masked_fill(~voted[:, None, None], float("-inf")).logsumexp(-1, keepdim=True)
    score = (logits - whole.masked_fill(whole.isinf(), 0)).logsumexp(2).masked_fill(unknown.any(2), UNBOUNDED)
    local = logical >= n_pages[:, None] - local_pages
    score.masked_fill_(local[:, None], float("inf"))
    out[:, :, :width] = score.masked_fill_(~held[:, None], float("-inf"))
    return out
