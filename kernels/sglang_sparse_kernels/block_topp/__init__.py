"""Top-p selection: the fewest blocks of each row that hold a given share of its attention mass.

Source: the block selection of RoBSA (section "Dynamic block selection", its threshold theta 1). The paper does not say
how ties and roundings are resolved. Here masses are integers and ties go to the lowest logical block, so that every
implementation, order of summation and tensor-parallel rank selects the same blocks; the newest block always belongs to
them; and a row that would need more blocks than it may attend to attends to all.
"""

import torch

from ..common import checks
from . import reference


def block_topp(
    mass: torch.Tensor,
    block_table: torch.Tensor,
    n_blocks: torch.Tensor,
    capacity: torch.Tensor,
    top_p: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    stats: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the smallest set of the highest blocks of each row whose masses sum to ``top_p[b]`` of the row's.

    Each mass counts as ``trunc(mass * 2**30)``, a negative one as 0, and ``top_p`` as ``trunc(top_p * 2**30)``; what
    the set must reach is ``ceil(top_p * sum / 2**30)`` of these integers. The newest block is added where the set lacks
    it.

    A row selects all its blocks where ``top_p`` is 1, where its masses are no shares (their sum is 0, or 2 and more, or
    one of them is NaN or +inf), and where the set has more than ``capacity[b]`` blocks, the newest included. Only in
    the last case the row has *overflowed*.

    The kernel allocates nothing beside the result.

    Args:
        mass: ``[B, M]`` float32, the share of the attention mass of each block; ``M`` is contiguous. Only the first
            ``n_blocks[b]`` entries of a row count, which sum to about 1.
        block_table: ``[B, M]`` int32, the physical block of each logical block; ``M`` is contiguous.
        n_blocks: ``[B]`` int32, blocks of each row, at most ``M``; 0 marks a padded row.
        capacity: ``[B]`` int32, most blocks that a sparse row may attend to. Where it reaches ``n_blocks[b]`` the row
            is dense and its masses are not read.
        top_p: ``[B]`` float32, in (0, 1].
        out: optional ``(indices, counts)``, contiguous, shaped and typed as the result.
        stats: optional ``[4]`` int64 counters, incremented by the number of rows with a selection, the blocks they
            selected, the blocks they hold, and the rows that overflowed.

    Returns:
        ``indices`` ``[B, 1, M]`` int32, physical blocks in ascending logical order, of which the first ``counts``
        ``[B, 1]`` int32 are meant: a selection for one KV head. What lies beyond is -1 from the reference and *left
        unwritten* by the kernel.

    Raises:
        ValueError: a wrong dimension, dtype, device or size.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.block_topp import block_topp
        >>> mass = torch.tensor([[0.25, 0.5, 0.125, 0.0625, 0.0625]])
        >>> block_table = torch.tensor([[7, 5, 9, 8, 6]], dtype=torch.int32)
        >>> as_int32 = lambda value: torch.tensor([value], dtype=torch.int32)
        >>> indices, counts = block_topp(mass, block_table, as_int32(5), as_int32(4), torch.tensor([0.75]))
        >>> indices[0, 0, : counts[0, 0]].tolist()
        [7, 5, 6]
    """
    batch, width = mass.shape if mass.dim() == 2 else (0, 0)
    if out is None:
        out = (
            torch.empty(batch, 1, width, dtype=torch.int32, device=mass.device),
            torch.empty(batch, 1, dtype=torch.int32, device=mass.device),
        )
    _check_arguments(mass, block_table, n_blocks, capacity, top_p, out, stats)
    if checks.use_reference(mass):
        return reference.block_topp(mass, block_table, n_blocks, capacity, top_p, out, stats)
    from . import cuda, triton

    kernels = cuda if cuda.takes(mass) else triton
    return kernels.block_topp(mass, block_table, n_blocks, capacity, top_p, out, stats)


def _check_arguments(
    mass: torch.Tensor,
    block_table: torch.Tensor,
    n_blocks: torch.Tensor,
    capacity: torch.Tensor,
    top_p: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None,
) -> None:
    checks.check_tensor("mass", mass, 2, (torch.float32,))
    checks.check_tensor("block_table", block_table, 2, (torch.int32,))
    batch, width = mass.shape
    checks.check_shape("block_table", block_table, (batch, width))
    checks.check_last(mass=mass, block_table=block_table)
    indices, counts = out
    expected = {
        "n_blocks": (n_blocks, torch.int32, (batch,)),
        "capacity": (capacity, torch.int32, (batch,)),
        "top_p": (top_p, torch.float32, (batch,)),
        "indices": (indices, torch.int32, (batch, 1, width)),
        "counts": (counts, torch.int32, (batch, 1)),
    }
    expected |= {"stats": (stats, torch.int64, (4,))} if stats is not None else {}
    for name, (tensor, dtype, shape) in expected.items():
        checks.check_exactly(name, tensor, shape, dtype)
    tensors = {name: tensor for name, (tensor, *_) in expected.items()}
    checks.check_device(mass.device, block_table=block_table, **tensors)
