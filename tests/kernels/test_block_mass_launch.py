"""How the CUDA kernels of the block mass are launched and compiled, and what they take."""

from typing import Any

import pytest
import torch

from sglang_sparse_kernels.block_mass import cuda
from sglang_sparse_kernels.block_mass.cases import BF16, FP8, FP16, FP32
from sglang_sparse_kernels.common import nvrtc
from sglang_sparse_kernels.common.launch import LOG2_E


def test_splits() -> None:
    # 264 blocks at once on an H200: 33 of each of 8 rows.
    assert [cuda.num_splits(batch, 2048, 264) for batch in (1, 8, 24, 300)] == [264, 33, 11, 1]
    assert cuda.num_splits(2, 5, 264) == 5
    assert [cuda.cluster_of(splits, True) for splits in (33, 48, 264)] == [1, 1, 8] and cuda.cluster_of(264, False) == 1


@pytest.mark.parametrize("heads", range(16, 129, 16))
def test_heads_are_divided_among_warps(heads: int) -> None:
    shape = cuda.shape_of(heads)
    assert heads % (16 * shape.head_tiles) == 0 and heads <= shape.threads <= 1024
    assert shape.resident * shape.threads <= 512 and shape.tile_tokens in (64, 128)


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda _: True)

    def takes(heads: int = 16, dim: int = 64, size: int = 16, dtype: Any = BF16, kv: Any = BF16, **more: int) -> bool:
        q = torch.zeros(2 * heads * dim + 8, dtype=dtype)[more.get("q_first", 0) :][: 2 * heads * dim]
        stored, first = more.get("stored", 576), more.get("first", 512)
        cache = torch.zeros(3, stored, dtype=FP32).to(kv)[:, first : first + dim]
        return cuda.takes(q.view(2, heads, dim), cache, size)

    assert takes() and takes(heads=128, size=64, dtype=FP16, kv=FP16) and takes(stored=64, first=0) and takes(q_first=2)
    # No other dimensions, numbers of heads or sizes, no float32 or float8, no keys that cannot be copied 16 bytes each.
    assert not takes(dim=32) and not takes(heads=8) and not takes(heads=144) and not takes(size=8)
    assert not takes(dtype=FP32, kv=FP32) and not takes(kv=FP8) and not takes(kv=FP16)
    assert not takes(first=508) and not takes(stored=580, first=512) and not takes(q_first=1)
    monkeypatch.setattr(nvrtc, "available", lambda _: False)
    assert not takes()


def test_scales_are_passed_as_bits() -> None:
    assert cuda.float_bits(1.0) == 0x3F800000 and cuda.float_bits(1e39) == 0x7F800000
    assert cuda.float_bits(0.1 * LOG2_E) == torch.tensor(0.1 * LOG2_E).view(torch.int32).item()
