"""Visible blocks: which KV blocks each row and KV head may attend to, where a part of the prompt is left out.

Source: the first stage of RocketKV (arXiv:2502.14051), permanent KV cache eviction. Unlike there, nothing is evicted:
what was not kept stays in the cache, where other requests share it, and is left out of the lists alone.
"""

import torch

from ..common import checks
from . import reference


def visible_blocks(
    kept: torch.Tensor,
    n_kept: torch.Tensor,
    first_visible: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor,
    n_blocks: torch.Tensor,
    n_select: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    stats: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """List the kept blocks of each row's request and then all its blocks from ``first_visible`` on.

    A row with ``n_select[b] >= n_blocks[b]`` is dense: all its blocks are listed and wanted, and what was kept is not
    read. The request of a dense or padded row is not used and may be any number.

    Numbers that contradict one another are an error of the caller, and lead to a wrong list but to no access out of
    bounds: ``n_blocks`` counts as 0 to ``M``, ``first_visible`` as 0 to ``n_blocks``, ``n_kept`` as 0 to
    ``first_visible`` and at most ``K``, and a kept block as the row's nearest. The request of any other row is not
    checked.

    One launch, which allocates nothing.

    Args:
        kept: ``[S, Hkv, K]`` int32, contiguous: by request slot and KV head, the logical blocks that were kept,
            ascending and below the slot's ``first_visible``. Only the first ``n_kept`` count.
        n_kept: ``[S]`` int32, contiguous: kept blocks of each KV head.
        first_visible: ``[S]`` int32, contiguous: the logical block from which on everything is visible. 0, with nothing
            kept, shows all blocks. A row has more blocks than this.
        requests: ``[B]`` int64, contiguous: the request slot of each row.
        block_table: ``[B, M]`` int32, the physical block of each logical block; ``M`` is contiguous.
        n_blocks: ``[B]`` int32, contiguous: blocks of each row, at most ``M``; 0 marks a padded row.
        n_select: ``[B]`` int32, contiguous: blocks that the row attends to; a negative number counts as 0.
        out: optional ``(blocks, counts, wanted)``, contiguous, shaped and typed as the result.
        stats: optional int64 counters, the first three of which are incremented as by ``page_topk``: by the number of
            (row, KV head) pairs that want a block, the blocks they want, and the blocks they hold, visible or not.

    Returns:
        ``blocks`` ``[B, Hkv, M]`` int32, physical blocks in ascending logical order, of which the first ``counts``
        ``[B, Hkv]`` int32 are meant, and ``wanted`` ``[B, Hkv]`` int32, the smaller of ``n_select`` and ``counts``.
        Both are the same for all heads of a row. What lies beyond the counts is -1 from the reference and *left
        unwritten* by the kernel.

    Raises:
        ValueError: a wrong dimension, dtype, device, shape or stride.

    Example:
        >>> import torch
        >>> from sglang_sparse_kernels.visible_blocks import visible_blocks
        >>> as_int32 = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> kept, table = as_int32(1, 2)[None, None], as_int32(7, 5, 9, 8, 6)[None]
        >>> slots = as_int32(2), as_int32(4)
        >>> blocks, counts, wanted = visible_blocks(kept, *slots, torch.tensor([0]), table, as_int32(5), as_int32(2))
        >>> blocks[0, 0, : counts[0, 0]].tolist(), wanted.tolist()
        ([5, 9, 6], [[2]])
    """
    check_inputs(kept, n_kept, first_visible, requests, block_table, n_blocks, n_select)
    batch, width = block_table.shape
    num_kv_heads = kept.shape[1]
    if out is None:
        options = {"dtype": torch.int32, "device": block_table.device}
        shapes = (batch, num_kv_heads, width), (batch, num_kv_heads), (batch, num_kv_heads)
        blocks, counts, wanted = (torch.empty(shape, **options) for shape in shapes)
        out = blocks, counts, wanted
    _check_outputs(out, stats, (batch, num_kv_heads, width), block_table.device)
    arguments = (kept, n_kept, first_visible, requests, block_table, n_blocks, n_select, out, stats)
    if checks.use_reference(block_table):
        return reference.visible_blocks(*arguments)
    from . import triton

    return triton.visible_blocks(*arguments)


def check_inputs(
    kept: torch.Tensor,
    n_kept: torch.Tensor,
    first_visible: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor,
    n_blocks: torch.Tensor,
    n_select: torch.Tensor,
) -> None:
    """Raise ValueError unless these say what is visible, and how much of it is wanted."""
    checks.check_tensor("kept", kept, 3, (torch.int32,))
    checks.check_tensor("block_table", block_table, 2, (torch.int32,))
    checks.check_contiguous("kept", kept)
    batch = block_table.shape[0]
    checks.check_last(block_table=block_table)
    for name, tensor, dtype, size in (
        ("n_kept", n_kept, torch.int32, kept.shape[0]),
        ("first_visible", first_visible, torch.int32, kept.shape[0]),
        ("requests", requests, torch.int64, batch),
        ("n_blocks", n_blocks, torch.int32, batch),
        ("n_select", n_select, torch.int32, batch),
    ):
        checks.check_exactly(name, tensor, (size,), dtype)
    by_request = {"kept": kept, "n_kept": n_kept, "first_visible": first_visible}
    by_row = {"requests": requests, "n_blocks": n_blocks, "n_select": n_select}
    checks.check_device(block_table.device, **by_request, **by_row)


def _check_outputs(
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    stats: torch.Tensor | None,
    shape: tuple[int, int, int],
    device: torch.device,
) -> None:
    for name, tensor, expected in zip(("blocks", "counts", "wanted"), out, (shape, shape[:2], shape[:2]), strict=True):
        checks.check_exactly(name, tensor, expected, torch.int32)
    blocks, counts, wanted = out
    checks.check_device(device, blocks=blocks, counts=counts, wanted=wanted, stats=stats)
    if stats is not None:
        checks.check_stats(stats)
