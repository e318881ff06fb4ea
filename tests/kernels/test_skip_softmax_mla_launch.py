"""How Skip-Softmax decode over latents is launched, and what it takes on GPUs that are not at hand."""

import pytest

from sglang_sparse_kernels.common.launch import Properties
from sglang_sparse_kernels.skip_softmax_mla_decode import triton as kernels


@pytest.mark.parametrize(
    ("heads", "kibibytes", "tile"),
    [(128, 227, 64), (40, 227, 64), (20, 227, 32), (8, 227, 16), (128, 163, 32), (128, 99, 16)],
)
def test_default_tiles_fit_the_heads_and_the_device(heads: int, kibibytes: int, tile: int) -> None:
    assert kernels.default_config(heads, Properties((9, 0), 132, kibibytes * 1024)).block_heads == tile
    # Tiles of 64 do not compile for Blackwell.
    assert kernels.default_config(heads, Properties((10, 0), 148, kibibytes * 1024)).block_heads == min(tile, 32)
