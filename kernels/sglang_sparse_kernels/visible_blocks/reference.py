"""The definition of the visible blocks in plain torch."""

import torch


def visible_blocks(
    kept: torch.Tensor,
    n_kept: torch.Tensor,
    first_visible: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor,
    n_blocks: torch.Tensor,
    n_select: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``visible_blocks.visible_blocks``; what lies beyond the counts is -1."""
    blocks, counts, wanted = out
    _, heads, width = blocks.shape
    held, select = n_blocks.clamp(0, width), n_select.clamp(min=0)
    first, ahead = torch.zeros_like(held), torch.zeros_like(held)  # from here on all; kept before it
    sparse = select < held
    slots = requests[sparse]
    first[sparse] = first_visible[slots].clamp(min=0).minimum(held[sparse])
    ahead[sparse] = n_kept[slots].clamp(0, kept.shape[2]).minimum(first[sparse])
    count = ahead + held - first
    counts.copy_(count[:, None].expand_as(counts))
    wanted.copy_(select[:, None].minimum(counts))
    position = torch.arange(width, device=blocks.device)
    logical = (position + (first - ahead)[:, None]).clamp(max=width - 1)[:, None].repeat(1, heads, 1)  # [B, Hkv, M]
    row, entry = (position < ahead[:, None]).nonzero(as_tuple=True)
    logical[row, :, entry] = kept[requests[row], :, entry].clamp(min=0).minimum(held[row, None] - 1).long()
    physical = block_table[:, None].expand_as(logical).gather(2, logical)
    blocks.copy_(physical.masked_fill((position >= count[:, None])[:, None], -1))
    if stats is not None:
        active = wanted[:, :1] > 0
        stats[:3] += heads * torch.stack([active.sum(), wanted[:, :1].sum(), (held[:, None] * active).sum()])
    return out
