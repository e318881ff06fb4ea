"""What a selection of many queries does at a time, so that what it allocates beside its results is bounded."""

import torch

from ..index_keys import PAGE_SIZE

# Of the logits of a prefill that are chosen from at a time, for as many queries as fit; choosing from them takes
# several times as much on a CPU. Logits that SGLang makes may be larger.
LOGITS_BYTES = 32 * 2**20
GPU_LOGITS_BYTES = 256 * 2**20
# Queries whose slots are looked up at a time: 16 MiB of 64-bit places at a selection of 2048.
LOOKED_UP = 1024


def queries_at_once(width: int, device: torch.device) -> int:
    """Queries of a prefill that are served at a time, one at least.

    Args:
        width: columns of the logits.
        device: where they are.
    """
    return max(1, most_logits(device) // width)


def most_logits(device: torch.device) -> int:
    """How many logits, float32, are chosen from at a time."""
    return (LOGITS_BYTES if device.type == "cpu" else GPU_LOGITS_BYTES) // 4


def slots_of(
    chosen: torch.Tensor,
    page_table: torch.Tensor | None,
    rows: torch.Tensor | None,
    offsets: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """What positions are called in the KV cache.

    Args:
        chosen: ``[queries, n]`` int32, positions within each query's row, or -1.
        page_table: ``[rows, pages]`` int32, pages of 64 tokens; not needed with ``offsets``.
        rows: ``[queries]`` int32; likewise.
        offsets: ``[queries]``: number the tokens from these on instead.
        out: optional ``[queries, n]`` int32.

    Returns:
        ``[queries, n]`` int32, -1 where ``chosen`` is.
    """
    out = torch.empty_like(chosen) if out is None else out
    for begin in range(0, len(chosen), LOOKED_UP):
        mine = slice(begin, begin + LOOKED_UP)
        some, found = chosen[mine], out[mine]
        if offsets is not None:
            torch.add(some, offsets[mine, None], out=found)
        else:
            assert page_table is not None and rows is not None
            places = some.clamp(min=0)
            pages = page_table[rows[mine, None], places // PAGE_SIZE]
            torch.add(pages * PAGE_SIZE, places % PAGE_SIZE, out=found)
        found.masked_fill_(some < 0, -1)
    return out
