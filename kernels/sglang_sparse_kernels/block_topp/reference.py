"""The definition of the top-p selection in plain torch, and its fixed-point numbers."""

import torch

# A mass of 1.
ONE = 2**30
# Where the masses of a row reach 2 (less a few roundings) they are no shares. Below, every sum of them fits an int32,
# and so does the float32 that follows it.
LIMIT = 2**31 - 512


def block_topp(
    mass: torch.Tensor,
    block_table: torch.Tensor,
    n_blocks: torch.Tensor,
    capacity: torch.Tensor,
    top_p: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``block_topp.block_topp``."""
    indices, counts = out
    logical = torch.arange(mass.shape[1], device=mass.device)
    held = logical < n_blocks[:, None]
    chosen, known = smallest_set(mass, held, top_p)
    chosen |= logical == n_blocks[:, None] - 1
    known &= capacity < n_blocks
    overflowed = known & (chosen.sum(dim=1) > capacity)
    chosen = held & (chosen | (~known | overflowed)[:, None])
    row, block = chosen.nonzero(as_tuple=True)
    position = chosen.cumsum(dim=1)[row, block] - 1
    indices.fill_(-1)
    indices[row, 0, position] = block_table[row, block]
    counts.copy_(chosen.sum(dim=1, keepdim=True))
    if stats is not None:
        stats += torch.stack([(n_blocks > 0).sum(), chosen.sum(), held.sum(), overflowed.sum()])
    return out


def smallest_set(mass: torch.Tensor, held: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest set of the highest blocks of each row whose sum reaches its ``top_p``, ties to the lower block.

    Args:
        mass: ``[B, M]`` float32.
        held: ``[B, M]`` bool, the blocks that a row has.
        top_p: ``[B]`` float32.

    Returns:
        A mask ``[B, M]``, and whether the row has such a set, ``[B]``; one without takes all its blocks.
    """
    share = mass < 2.0
    fixed = (mass.where(share, 0.0).clamp(min=0.0) * ONE).long().masked_fill(~share, LIMIT).masked_fill(~held, 0)
    total = fixed.sum(dim=1)
    known = (top_p < 1.0) & (total > 0) & (total < LIMIT)
    top_p_fixed = (top_p.where(known, 0.0).clamp(min=0.0) * ONE).long()
    needed = (top_p_fixed * total.where(known, 0) + (ONE - 1)) >> 30
    ordered, order = fixed.sort(dim=1, descending=True, stable=True)
    # A block is needed as long as those before it do not suffice.
    prefix = ordered.cumsum(dim=1) - ordered < needed[:, None]
    return torch.zeros_like(prefix).scatter(1, order, prefix), known
