"""The definition of the page score in plain torch."""

import torch

from ..common.row_by_row import row_by_row

# A page without a finite bound comes before every page with one, and after the local pages.
UNBOUNDED = torch.finfo(torch.float32).max


@row_by_row("q", "page_table", "n_pages")
def page_score(
    q: torch.Tensor,
    summary: torch.Tensor,
    page_table: torch.Tensor,
    n_pages: torch.Tensor,
    out: torch.Tensor,
    local_pages: int = 1,
) -> torch.Tensor:
    """See ``page_score.page_score``; entries at or beyond ``n_pages`` are -inf."""
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = summary.shape[1]
    out.fill_(float("-inf"))
    width = int(n_pages.max()) if batch else 0
    if width == 0:
        return out
    query = q.float().view(batch, num_kv_heads, num_q_heads // num_kv_heads, head_dim).mean(dim=2)
    logical = torch.arange(width, device=q.device)
    held = logical < n_pages[:, None]  # [B, width]
    # Entries of the table beyond a row's pages may hold anything; page 0 always exists.
    pages = page_table[:, :width].masked_fill(~held, 0).long()
    bounds = summary[pages].float()  # [B, width, Hkv, 2, d]
    score = torch.einsum("bhd,bmhd->bhm", query.clamp(min=0), bounds[:, :, :, 0])
    score += torch.einsum("bhd,bmhd->bhm", query.clamp(max=0), bounds[:, :, :, 1])
    local = logical >= n_pages[:, None] - local_pages
    score.masked_fill_(score.isnan(), UNBOUNDED).masked_fill_(local[:, None], float("inf"))
    out[:, :, :width] = score.masked_fill_(~held[:, None], float("-inf"))
    return out
