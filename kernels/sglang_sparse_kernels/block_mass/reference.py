"""The definition of the block mass in plain torch."""

import torch

from ..common.row_by_row import row_by_row


@row_by_row("q", "block_table", "n_blocks", "last_slots")
def block_mass(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    n_blocks: torch.Tensor,
    last_slots: torch.Tensor,
    block_size: int,
    sm_scale: float,
    k_scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """See ``block_mass.block_mass``; entries at or beyond ``n_blocks`` are 0."""
    out.zero_()
    width = int(n_blocks.max()) if len(n_blocks) else 0
    if width == 0:
        return out
    slots, valid = _token_slots(block_table[:, :width], n_blocks, last_slots, block_size)
    keys = k_cache[slots].float()  # [B, T, d]
    logits = q.float() @ keys.transpose(-1, -2) * (sm_scale * k_scale)
    weights = logits.masked_fill_(~valid[:, None], float("-inf")).softmax(dim=-1)
    mass = weights.mean(dim=1).unflatten(1, (width, block_size)).sum(dim=-1)
    # A row that is not finite is NaN as a whole, and the softmax over no tokens at all is NaN too.
    held = torch.arange(width, device=q.device) < n_blocks[:, None]
    out[:, :width] = mass.masked_fill_(~held, 0.0)
    return out


def _token_slots(
    block_table: torch.Tensor, n_blocks: torch.Tensor, last_slots: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots ``[B, M * block_size]`` of the rows' tokens, and which of them are valid."""
    logical = torch.arange(block_table.shape[1], device=block_table.device)
    held = logical < n_blocks[:, None]
    # Entries of the table beyond a row's blocks may hold anything; block 0 always exists.
    blocks = block_table.masked_fill(~held, 0).long()[..., None]
    slots = blocks * block_size + torch.arange(block_size, device=block_table.device)
    last_slots = last_slots[:, None, None]
    newest = (logical == n_blocks[:, None] - 1)[..., None] & (blocks == last_slots // block_size)
    return slots.flatten(1), (held[..., None] & (~newest | (slots <= last_slots))).flatten(1)
