"""Shapes on which the window score is tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.testing import paged_batch, random_cache, seeded

FP32, FP16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """Prompts of ``lengths`` tokens (0 is a padded row) in a table of ``width`` pages (0: as wide as the longest row).

    A row has the queries of its last ``window`` tokens, or of as many as it has. The larger ``sharpness``, the fewer
    tokens hold most of the attention.
    """

    lengths: tuple[int, ...]
    page_size: int
    heads: int
    group: int
    dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    window: int = 32
    kernel_size: int = 63
    sharpness: float = 1.0
    k_scale: float = 1.0
    width: int = 0
    gpu_only: bool = False


CASES = [
    Case((200, 0, 33, 1, 32), 16, 2, 4, 128, BF16, BF16, width=20),
    Case((70, 9), 4, 1, 1, 64, FP32, FP32, window=5, kernel_size=7),
    Case((130, 40), 64, 1, 8, 64, FP16, FP16, sharpness=3.0),
    Case((90,), 1, 2, 2, 64, BF16, BF16, window=8, kernel_size=1, width=200),
    Case((77, 12), 8, 2, 4, 128, BF16, FP8, window=16, kernel_size=5, k_scale=0.5),
    Case((40, 64), 2, 1, 3, 80, FP16, FP16, window=7, kernel_size=201),
    Case((1100, 30), 32, 1, 2, 64, FP16, FP16, window=12, kernel_size=63, sharpness=2.0),
    Case((45,), 16, 1, 5, 256, BF16, BF16, kernel_size=3),
    Case((32768,), 16, 8, 4, 128, BF16, BF16, gpu_only=True),
    Case((262144,), 16, 8, 4, 128, BF16, BF16, gpu_only=True),
    Case((40000, 17, 3001, 0, 9000), 64, 4, 8, 128, FP16, FP16, width=1000, gpu_only=True),
    Case((20000, 1700), 16, 8, 4, 128, BF16, FP8, k_scale=0.5, gpu_only=True),
    Case((9000, 1024), 16, 2, 2, 256, BF16, BF16, gpu_only=True),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``window_score``; queries that there are not, and slots that hold no token, are NaN."""
    generator = seeded(device, seed)
    batch = paged_batch(case.lengths, case.page_size, device, generator, case.width)
    wide = case.kv_dtype if case.kv_dtype.itemsize > 1 else BF16
    shape = (batch.num_pages * case.page_size, case.heads, case.dim)
    keys = torch.full(shape, float("nan"), dtype=wide, device=device)
    for pages, length in zip(batch.page_table.long(), case.lengths, strict=True):
        position = torch.arange(length, device=device)
        slots = pages[position // case.page_size] * case.page_size + position % case.page_size
        keys[slots] = random_cache((length, *shape[1:]), wide, device, generator)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    n_window = lengths.clamp(max=case.window)
    q_shape = (len(case.lengths), case.window, case.heads * case.group, case.dim)
    q = random_cache(q_shape, case.dtype, device, generator) * case.sharpness
    real = torch.arange(case.window, device=device) >= case.window - n_window[:, None]
    return {
        "q": q.masked_fill(~real[:, :, None, None], float("nan")),
        "n_window": n_window,
        "k_cache": keys.to(case.kv_dtype),
        "page_table": batch.page_table,
        "lengths": lengths,
        "page_size": case.page_size,
        "sm_scale": case.dim**-0.5,
        "k_scale": case.k_scale,
        "kernel_size": case.kernel_size,
    }
