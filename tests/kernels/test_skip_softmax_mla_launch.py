"""How Skip-Softmax decode over latents is launched, and what it takes on GPUs that are not at hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from sglang_sparse_kernels.launch import Properties
from sglang_sparse_kernels.skip_softmax_mla_decode import triton as kernels


@pytest.mark.parametrize(
    ("heads", "kibibytes", "tile"),
    [(128, 227, 64), (40, 227, 64), (20, 227, 32), (8, 227, 16), (128, 163, 32), (128, 99, 16)],
)
def test_default_tiles_fit_the_heads_and_the_device(heads: int, kibibytes: int, tile: int) -> None:
    assert kernels.default_config(heads, Properties((9, 0), 132, kibibytes * 1024)).block_heads == tile
    # Tiles of 64 do not compile for Blackwell.
    assert kernels.default_config(heads, Properties((10, 0), 148, kibibytes * 1024)).block_heads == min(tile, 32)


COMPILE = """
from dataclasses import replace
from eval.lab.compile_kernels import compiling, resources
from sglang_sparse_kernels.skip_softmax_mla_decode import skip_softmax_mla_decode as run
from sglang_sparse_kernels.skip_softmax_mla_decode.cases import BF16, FP8, Case, make

for target, limit in ("8.9", 101376), ("9.0", 232448):
    for heads, kv in (16, BF16), (16, FP8), (128, BF16):
        with compiling(target) as found:
            run(**make(Case((300, 20), 64, heads, 512, BF16, kv), "cpu"))
        kernel = found[0]
        used = resources(kernel)
        ahead = "async_copy" in kernel.asm["ttgir"]
        print(used["shared_bytes"] <= limit, ahead, used["stack_bytes"] < 256)
"""


def test_the_kernel_compiles_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fits the shared memory, loads the keys of later blocks while one is judged, and spills next to nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True)
    assert done.stdout == "True True True\n" * 6, done.stdout + done.stderr
