"""Skip-Softmax compiled for GPUs that are not at hand: what its kernels take of them, and which kernel is chosen."""

import subprocess
import sys
from pathlib import Path

import pytest

HOPPER = """
import dataclasses, json, sys, torch
from unittest import mock
from eval.lab import compile_kernels
from sglang_sparse_kernels.common import launch
from sglang_sparse_kernels.skip_softmax_prefill import hopper, skip_softmax_prefill
from sglang_sparse_kernels.skip_softmax_prefill import launch as chosen
from sglang_sparse_kernels.skip_softmax_prefill.cases import Case, make

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
case = Case((100,), (200,), 16, 2, 4, 128, BF16, BF16, tile_queries=128, block_keys=64)
with compile_kernels.compiling("9.0") as found:
    for page, dim, dtype in ((16, 128, BF16), (64, 128, FP16), (32, 64, BF16)):
        changes = {"page_size": page, "dim": dim, "dtype": dtype, "kv_dtype": dtype}
        skip_softmax_prefill(**make(dataclasses.replace(case, **changes), "cpu"))
for kernel in found:
    used = compile_kernels.resources(kernel)
    # At most some values of the loading warp, and none of those that compute.
    print(used["kernel"], used["stack_bytes"] <= 16, used["shared_bytes"] <= 232448, "wgmma" in kernel.asm["ptx"])

def taken(change=None, target="9.0", **changes):
    arguments = make(dataclasses.replace(case, **changes), "cpu") | (change or {})
    with mock.patch.object(launch, "stand_in", compile_kernels.TARGETS[target]):
        names = ("q", "k_cache", "v_cache", "plan", "page_size")
        return chosen.kernels(*(arguments[name] for name in names)) is hopper

odd, wide = torch.zeros(320, 2, 258, dtype=BF16), torch.zeros(320, 2, 264, dtype=BF16)
print([taken(), taken(group=2), taken(dim=64), taken({"q": torch.zeros(200, 8, 256, dtype=BF16)[..., :128]})])
print([
    *(taken(target=target) for target in ("8.0", "10.0", "12.0")),
    *(taken(page_size=size) for size in (1, 8)),
    *(taken(group=group) for group in (1, 7)),
    *(taken(dim=dim) for dim in (96, 256)),
    *(taken(tile_queries=64), taken(block_keys=128), taken(kv_dtype=FP8), taken(v_dim=96)),
    *(taken({"k_cache": odd[..., :128]}), taken({"v_cache": wide[..., 4:132]})),
    taken({"v_cache": torch.zeros(2, 320, 128, dtype=BF16).transpose(0, 1)}),
    taken({"k_cache": torch.zeros(320, 1, 128, dtype=BF16).expand(320, 2, 128)}),
])
"""

LATENTS = """
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


def test_it_compiles_for_hopper_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([sys.executable, "-c", HOPPER], capture_output=True, text=True)
    *kernels, yes, no = done.stdout.splitlines() or [done.stderr[-2000:]] * 3
    assert kernels == ["_skip_softmax_hopper_kernel True True True"] * 3, done.stderr[-2000:]
    assert "False" not in yes and "True" not in no, (yes, no)


def test_the_kernel_over_latents_compiles_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fits the shared memory, loads the keys of later blocks while one is judged, and spills next to nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([sys.executable, "-c", LATENTS], capture_output=True, text=True)
    assert done.stdout == "True True True\n" * 6, done.stdout + done.stderr
