"""Shapes on which Skip-Softmax decode over latents is tested and measured."""

from dataclasses import dataclass
from typing import Any

import torch

from ..skip_softmax_decode import cases as decode
from ..skip_softmax_decode.cases import BF16, FP8, FP16, FP32


@dataclass(frozen=True)
class Case:
    """Rows of ``lengths`` tokens (0 is a padded row), in which ``stripes`` of the keys stand out.

    With ``fused`` the two queries are slices of one tensor.
    """

    lengths: tuple[int, ...]
    page_size: int
    heads: int
    latent_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    rope_dim: int = 64
    factor: float = 30.0
    kv_scale: float = 1.0
    stripes: float = 0.01
    fused: bool = True
    gpu_only: bool = False


_LARGE: dict[str, Any] = {"stripes": 0.005, "gpu_only": True}
CASES = [
    Case((500, 0, 130, 1), 16, 16, 128, BF16, BF16),
    Case((450,), 16, 8, 64, FP32, FP32, rope_dim=16, fused=False),
    Case((700, 321), 1, 20, 64, FP16, FP16, rope_dim=32),
    Case((640, 65), 64, 128, 64, BF16, BF16, factor=400.0, fused=False),
    Case((400, 64), 4, 40, 256, FP16, FP16, factor=100.0),
    Case((500, 31), 16, 20, 128, BF16, FP8, kv_scale=0.5),
    Case((449,), 32, 16, 64, FP16, FP8, kv_scale=1.5),
    Case((500,), 16, 16, 512, BF16, BF16, factor=400.0),
    Case((131072,), 64, 128, 512, BF16, BF16, factor=20000.0, **_LARGE),
    Case((65536,) * 4, 64, 16, 512, BF16, BF16, factor=5000.0, **_LARGE),
    Case((40000, 17, 3001, 0, 9000), 32, 32, 512, FP16, FP16, factor=400.0, **_LARGE),
    Case((20000, 1700), 16, 64, 512, BF16, FP8, factor=400.0, kv_scale=0.5, **_LARGE),
    Case((20000, 1700), 64, 32, 512, BF16, FP8, factor=400.0, **_LARGE),
    Case((20000, 1700), 16, 16, 512, BF16, FP8, factor=400.0, **_LARGE),
    Case((3000, 500) * 100, 16, 128, 512, BF16, BF16, factor=1000.0, fused=False, **_LARGE),
    Case((9000, 400), 1, 8, 256, FP16, FP8, factor=300.0, **_LARGE),
]


def make(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Arguments of ``skip_softmax_mla_decode``: those of ``skip_softmax_decode`` with one KV head.

    Unwritten slots of the cache hold NaN, and so does the query of a padded row.
    """
    shape = (case.page_size, 1, case.heads, case.latent_dim + case.rope_dim, case.dtype, case.kv_dtype)
    shaped = decode.Case(case.lengths, *shape, case.factor, v_dim=1, k_scale=case.kv_scale, stripes=case.stripes)
    drawn = decode.make(shaped, device, seed)
    q_nope, q_rope = drawn["q"][..., : case.latent_dim], drawn["q"][..., case.latent_dim :]
    names = ("page_table", "n_pages", "last_slots", "threshold_scale_factor", "page_size", "sm_scale")
    return {
        "q_nope": q_nope if case.fused else q_nope.contiguous(),
        "q_rope": q_rope if case.fused else q_rope.contiguous(),
        "kv_cache": drawn["k_cache"][:, 0],
        **{name: drawn[name] for name in names},
        "kv_scale": case.kv_scale,
    }
