"""The definition of a page summary in plain torch."""

import torch


def update_page_summary(
    k_cache: torch.Tensor,
    summary: torch.Tensor,
    last_slots: torch.Tensor,
    page_size: int,
    overflow: torch.Tensor | None = None,
) -> None:
    """See ``page_summary.update_page_summary``."""
    pages, keys, written = touched(k_cache, last_slots, page_size)
    unwritten = ~written[:, :, None, None]
    k_max = keys.masked_fill(unwritten, float("-inf")).amax(dim=1)
    k_min = keys.masked_fill(unwritten, float("inf")).amin(dim=1)
    bounds = torch.stack([round_up(k_max, summary.dtype), round_down(k_min, summary.dtype)], dim=2)
    store(summary, pages, bounds)
    if overflow is not None:
        overflow += bounds.float().isnan().sum()


def touched(
    k_cache: torch.Tensor, last_slots: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the pages that were written to, their keys ``[pages, P, Hkv, d]`` in float32, and which of them count."""
    last_slots = last_slots[last_slots >= 0]
    pages = last_slots // page_size
    slots = pages[:, None] * page_size + torch.arange(page_size, device=k_cache.device)
    return pages, k_cache[slots].float(), slots <= last_slots[:, None]


def store(summary: torch.Tensor, pages: torch.Tensor, values: torch.Tensor) -> None:
    """Write the summaries of pages, of the summary's dtype."""
    # Index assignment is not implemented for float8 on every device: move the bytes instead.
    summary.view(torch.uint8)[pages] = values.view(torch.uint8)


def round_up(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Smallest value of ``dtype`` that is at least ``x`` (float32); NaN outside the range of float8."""
    nearest = x.to(dtype)
    if dtype == torch.float32:
        return nearest
    integer = torch.int8 if dtype.itemsize == 1 else torch.int16
    bits = nearest.view(integer)
    # The bits are sign and magnitude: one step up adds to a positive magnitude and takes from a negative one.
    one_step_up = torch.where(bits >= 0, bits + 1, bits - 1)
    rounded = torch.where(nearest.float() < x, one_step_up, bits)
    if dtype.itemsize == 1:
        # NaN in either format; the infinities of e5m2 are not used.
        rounded = rounded.masked_fill(x.abs() > torch.finfo(dtype).max, 0x7F)
    return rounded.view(dtype)


def round_down(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Largest value of ``dtype`` that is at most ``x`` (float32); NaN outside the range of float8."""
    return (-round_up(-x, dtype).float()).to(dtype)
