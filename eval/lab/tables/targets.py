"""Whether the sparsity of a measurement is the one that its inputs were made for."""

SPARSITY_TOLERANCE = 0.02
# Of a share of active blocks: two points are a third of the 6 % that are active at 128k.
ACTIVE_TOLERANCE = 0.1


def near_active(share: float, target: float) -> bool:
    """Whether a share of active blocks is the one that inputs were made for: within `SPARSITY_TOLERANCE` of it, and
    within `ACTIVE_TOLERANCE` of its size.
    """
    return abs(share - target) <= min(SPARSITY_TOLERANCE, ACTIVE_TOLERANCE * target)


def near_target(sparsity: float, target: float, active: object) -> bool:
    """Whether a measured sparsity is the one that inputs were made for.

    Args:
        sparsity: as measured.
        target: what the inputs were made for.
        active: the share of the blocks that these name as active; it must be near in its own size, see `near_active`.
            None where they name none.
    """
    if active is not None:
        return near_active(1 - sparsity, 1 - target)
    return abs(sparsity - target) <= SPARSITY_TOLERANCE
