"""Tests of kernels compiled for absent GPUs: resources, and spills, loads, conversions and products in code."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from eval.lab.compile_kernels import usage
from sglang_sparse_kernels.block_mass import cuda as block_mass
from sglang_sparse_kernels.block_topp import cuda as block_topp
from sglang_sparse_kernels.common import nvrtc
from sglang_sparse_kernels.index_topk import cuda as index_topk
from sglang_sparse_kernels.kt_select import cuda as kt_select
from sglang_sparse_kernels.page_score import cuda as page_score
from sglang_sparse_kernels.page_topk import cuda as page_topk
from sglang_sparse_kernels.skip_softmax_decode import cuda as skip_softmax_decode
from sglang_sparse_kernels.sparse_decode import cuda as sparse_decode

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
REGISTERS = 65536  # of a multiprocessor

# By operation, for a process whose Triton does not interpret: a script and the lines that it prints.
SCRIPTS = {}

SCRIPTS["kt_select, lists"] = (
    """
from sglang_sparse_kernels.kt_select.triton import ListConfig, _visible_blocks_kernel as kernel

for capability in (80, 89, 90, 120):
    constants = {"HEADS": 8, "BLOCK": ListConfig().block, "STATS": True, "DEPENDENT": capability >= 90}
    kinds = {"requests_ptr": "*i64", "stats_ptr": "*i64"}
    compiled = compile_for(capability, kernel, kinds, constants, aligned=lambda _: False, num_warps=4)
    used = usage(compiled.asm["cubin"])
    print(capability, used["stack_bytes"], used["shared_bytes"], "griddepcontrol" in compiled.asm["ptx"])
""",
    [f"{capability} 0 0 {capability >= 90}" for capability in (80, 89, 90, 120)],
)

SCRIPTS["kt_select, scores"] = (
    """
import re
import triton.language as tl
from sglang_sparse_kernels.kt_select.triton import _TILE, _logit_kernel as kernel

constants = {"HEADS": 8, "GROUP": 4, "BLOCK_GROUP": 16, "DIM": 128, "TILE": _TILE, "CHOOSE": True}
kinds = {"q_ptr": "*bf16"} | dict.fromkeys(("logits_ptr", "maxima_ptr", "totals_ptr"), "*fp32")
for capability in (80, 89, 90, 120):
    for encoding, summary in enumerate(("*bf16", "*u8", "*u8")):
        constants |= {"OPERAND": tl.bfloat16, "ENCODING": encoding, "DEPENDENT": capability >= 90}
        compiled = compile_for(capability, kernel, kinds | {"summary_ptr": summary}, constants, num_warps=4)
        # The first bounds are on their way before threads wait for one another.
        early, ptx = compiled.asm["ptx"].split("bar.sync")[0], compiled.asm["ptx"]
        # A stack frame alone is no spill: what is spilled is stored to local memory.
        spills = len(re.findall(r"\\bSTL\\b", disassembled(compiled)))
        print(capability, spills, early.count("ld.global.v4.b32") >= 4, "mma.sync" in ptx)
""",
    [f"{capability} 0 True True" for capability in (80, 89, 90, 120) for _ in range(3)],
)

# It fits the shared memory of all, and loads the keys of later blocks while one is judged.
SCRIPTS["skip_softmax_decode"] = (
    """
from sglang_sparse_kernels.skip_softmax_decode import triton as op

kinds = {"table_ptr": "*i32", "n_pages_ptr": "*i32", "last_slots_ptr": "*i64", "stats_ptr": "*i64"}
kinds |= {"factor_ptr": "*fp32", "lse_ptr": "*fp32"}
aligned = lambda name: "ptr" in name or "stride" in name and name[0] != "t"
for target, dim, kv in (80, 128, 16), (89, 128, 16), (90, 64, 16), (90, 256, 16), (90, 128, 8), (120, 128, 16):
    config = op.default_config(dim, dim, 4)
    constants = {"HEADS": 8, "GROUP": 4, "BLOCK_GROUP": 16, "PAGE": 16, "BLOCK_KEYS": 64, "LOCAL_BLOCKS": 2}
    constants |= {"SPLITS": 64, "UPCAST": False, "DEPENDENT": target >= 90}
    constants |= dict.fromkeys(("DIM", "BLOCK_DIM", "V_DIM", "BLOCK_V_DIM"), dim)
    kinds |= dict.fromkeys(("k_ptr", "v_ptr"), "*bf16" if kv == 16 else "*fp8e4nv")
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.max_registers}
    made = compile_for(target, op._split_kernel, kinds, constants, "*bf16", aligned, **options)
    print(stack(made), made.metadata.shared <= 99 * 1024, "async_copy" in made.asm["ttgir"])
""",
    ["0 True True"] * 6,
)

SCRIPTS["skip_softmax_prefill"] = (
    """
from sglang_sparse_kernels.skip_softmax_prefill import BLOCK_KEYS, TILE_QUERIES
from sglang_sparse_kernels.skip_softmax_prefill.triton import _skip_softmax_kernel as kernel, default_config

config = default_config(TILE_QUERIES)
options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
aligned = lambda name: name.endswith("_ptr") or "stride" in name and name != "table_stride"
for capability, kind in ((80, "*bf16"), (90, "*bf16"), (90, "*fp8e4nv"), (120, "*bf16")):
    kinds = {"q_ptr": "*bf16", "out_ptr": "*bf16", "k_ptr": kind, "v_ptr": kind}
    kinds |= {"factor_ptr": "*fp32", "stats_ptr": "*i64", "sinks_ptr": "*bf16"}
    constants = {"HEADS": 32, "GROUP": 4, "DIM": 128, "V_DIM": 128, "BLOCK_DIM": 128, "BLOCK_V_DIM": 128, "PAGE": 16}
    constants |= {"TILE_QUERIES": TILE_QUERIES, "BLOCK_KEYS": BLOCK_KEYS, "UPCAST": False}
    compiled = compile_for(capability, kernel, kinds, constants, aligned=aligned, **options)
    print(capability, kind, stack(compiled), compiled.metadata.shared <= 99 * 1024, "wgmma" in compiled.asm["ptx"])
""",
    ["80 *bf16 0 True False", "90 *bf16 0 True True", "90 *fp8e4nv 0 True True", "120 *bf16 0 True False"],
)

# What it takes, and where the kernel for Hopper is chosen.
SCRIPTS["skip_softmax_prefill on Hopper"] = (
    """
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
""",
    [*["_skip_softmax_hopper_kernel True True True"] * 3, str([True] * 4), str([False] * 17)],
)

# It fits the shared memory, loads the keys of later blocks while one is judged, and spills next to nothing.
SCRIPTS["skip_softmax_mla_decode"] = (
    """
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
""",
    ["True True True"] * 6,
)

SCRIPTS["window_score"] = (
    """
from sglang_sparse_kernels.window_score import triton as kernels

sizes, config = kernels._sizes(32, 4, 4096), kernels.default_config(128)
options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
aligned = lambda name: name.endswith("_ptr") or "_stride_" in name
constants = {"WINDOW": 32, "GROUP": 4, "DIM": 128, "BLOCK_DIM": 128, "PAGE": 16, "TILES": sizes.tiles}
constants |= {"BLOCK": sizes.block, "TILE": config.tile_tokens, "SPLIT": kernels._SPLIT, "UPCAST": False}
for capability, kind in ((80, "*bf16"), (89, "*bf16"), (90, "*bf16"), (90, "*fp8e4nv"), (120, "*bf16")):
    kinds = {"q_ptr": "*bf16", "k_ptr": kind} | dict.fromkeys(("n_window_ptr", "table_ptr", "lengths_ptr"), "*i32")
    for kernel in (kernels._split_kernel, kernels._weight_kernel):
        compiled = compile_for(capability, kernel, kinds, constants, "*fp32", aligned, **options)
        print(capability, stack(compiled), compiled.metadata.shared <= 99 * 1024, "wgmma" in compiled.asm["ptx"])
""",
    [f"{capability} 0 True {capability == 90}" for capability in (80, 89, 90, 90, 120) for _ in "12"],
)

SCRIPTS["index_keys"] = (
    """
from sglang_sparse_kernels.index_keys.triton import _quantize_kernel, _store_kernel

QUANTIZE = {"ROTATE": True, "STEPS": 7, "FACTOR": 128**-0.5, "BFLOAT16": True, "FLOAT16": False}
kinds = {"x_ptr": "*bf16", "slots_ptr": "*i64", "scales_ptr": "*fp32", "buffer_scales_ptr": "*fp32"}
for capability in (80, 89, 90, 120):
    quantize = [(_quantize_kernel, {**QUANTIZE, "POWERS": powers}) for powers in (True, False)]
    for kernel, constants in (*quantize, (_store_kernel, {"PAGE": 64})):
        constants = {**constants, "DIM": 128, "ROWS": 32, "DEPENDENT": capability >= 90}
        compiled = compile_for(capability, kernel, kinds, constants, "*u8", lambda _: False, enable_fp_fusion=False)
        print(len(compiled.asm["cubin"]) > 0)
""",
    ["True"] * 12,
)

# Summaries are loaded whole and before the wait: 16 bytes a thread, in registers, on GPUs without float8, with it, and
# with dependent launch.
SCRIPTS["page_score"] = (
    """
from sglang_sparse_kernels.page_score.triton import _page_score_kernel as kernel

for capability in (80, 89, 90):
    for summary, packed in (("*bf16", 1), ("*i32", 4)):
        hopper = capability >= 90
        constants = {"HEADS": 8, "GROUP": 4, "DIM": 128, "PACKED": packed, "BLOCK_ENTRIES": 128 // packed, "LANES": 8}
        constants |= {"STEPS": 2, "DEPENDENT": hopper, "READY": hopper, "NATIVE": capability >= 89}
        kinds = {"q_ptr": "*bf16", "summary_ptr": summary, "out_ptr": "*fp32"}
        ptx = compile_for(capability, kernel, kinds, constants, num_warps=4).asm["ptx"]
        early = ptx.split("griddepcontrol.wait")[0] if hopper else ""
        print(capability, packed, early.count("ld.global.v4.b32"), ptx.count("cvt.rn.f16x2.e4m3x2"), ".local" in ptx)
""",
    [
        *("80 1 0 0 False", "80 4 0 0 False"),
        *("89 1 0 0 False", "89 4 0 16 False"),
        *("90 1 4 0 False", "90 4 2 16 False"),
    ],
)

# The order of the sum over the heads hangs on how products are divided, for queries that share keys and for one alone.
# The interpreter's maximum passes NaN on whatever it is told.
SCRIPTS["index_logits"] = (
    """
import re
from sglang_sparse_kernels.index_logits.triton import _index_logits_kernel as kernel, default_config

kinds = dict.fromkeys(("page_table_ptr", "rows_ptr", "lengths_ptr"), "*i32")
for capability in (80, 89, 90, 120):
    config, fp8 = default_config(divmod(capability, 10)), capability >= 89
    kinds |= dict.fromkeys(("q_ptr", "keys_ptr"), "*fp8e4nv" if fp8 else "*u8")
    constants = {"QUERIES": config.queries, "HEADS": 64, "BLOCK_HEADS": config.block_heads, "TILE": config.tile_tokens}
    constants |= {"DIM": 128, "PAGE": 64, "FP8": fp8, "DEPENDENT": capability >= 90}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    compiled = compile_for(capability, kernel, kinds, constants, "*fp32", kinds.__contains__, **options)
    layouts = re.findall(r"#mma.*warpsPerCTA = (\\[.*?\\])", compiled.asm["ttgir"])
    print(capability, config.num_warps, set(layouts), "max.NaN.f32" in compiled.asm["ptx"])
""",
    [f"{capability} 4 {{'[4, 1]'}} True" for capability in (80, 89, 90, 120)],
)

SCRIPTS["page_summary"] = (
    """
from sglang_sparse_kernels.page_summary import triton as module

kernel = module._page_summary_kernel
kinds = {"offsets_ptr": "*i64", "last_slots_ptr": "*i64", "overflow_ptr": "*i32", "summary_ptr": "*u8"}
constants = {"LAYERS": 32, "HEADS": 8, "DIM": 128, "BLOCK_DIM": 128, "PAGE": 4, "COUNT_OVERFLOW": True}
for capability in (80, 89, 90, 120):
    # On Ampere the compiler does not know float8_e4m3fn, the one float8 of the keys.
    for keys in ("*bf16", "*fp8e4nv") if capability >= 89 else ("*bf16",):
        for rounding in (module._E5M2,) if keys == "*fp8e4nv" else (module._E4M3, module._E5M2):
            constants |= {"ROUNDING": rounding, "DEPENDENT": capability >= 90}
            compiled = compile_for(capability, kernel, kinds | {"k_ptr": keys}, constants, num_warps=4)
            # Numbers that float32 holds as subnormal ones must not be flushed to zero, which would be no bound.
            print(capability, stack(compiled), "ftz" in compiled.asm["ptx"])
""",
    ["80 0 False"] * 2 + [f"{capability} 0 False" for capability in (89, 90, 120) for _ in range(3)],
)


@pytest.mark.parametrize("operation", SCRIPTS)
def test_triton(operation: str, tmp_path: Path) -> None:
    script, expected = SCRIPTS[operation]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", "from compiled_kernels import compile_for, disassembled, stack, usage\n" + script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == expected, done.stderr[-2000:]


class Build(NamedTuple):
    """Defines of a source, and the most that its kernel may have of registers, spilled bytes and shared memory."""

    source: Path
    defines: dict[str, int]
    registers: float = 255
    stack: float = 0
    shared: float = 232448


ANY = {"stack": float("inf")}


def block_masses(capability: tuple[int, int]) -> Iterator[Build]:
    """So many blocks of the splits run at once as the launch goes by."""
    for heads in range(16, 129, 16):
        shape = block_mass.shape_of(heads)
        for dtype in (BF16, FP16):
            most = REGISTERS // (shape.threads * shape.resident)
            yield Build(block_mass.SOURCE, shape.defines(dtype), most, shared=49152)
        for cluster in (1, 8) if capability >= (9, 0) else (1,):
            yield Build(block_mass.MERGE, shape.merge_defines(cluster), REGISTERS // 512)


def block_topps(_: tuple[int, int]) -> Iterator[Build]:
    for width in (100, 8192, 10000, 32768):
        yield Build(block_topp.SOURCE, block_topp.defines(width), 64)


def index_topks(capability: tuple[int, int]) -> Iterator[Build]:
    for cluster, threads in ((1, 256), (1, 512), (2, 512), (8, 512), (8, 1024)):
        if cluster == 1 or capability >= (9, 0):
            yield Build(index_topk.SOURCE, index_topk.Shape(cluster, threads).defines, **ANY)


def kt_selects(capability: tuple[int, int]) -> Iterator[Build]:
    """With few spills outside of the loops; two blocks fit a multiprocessor of 100 KB."""
    for pairs in (8, 32, 256):
        config = kt_select.config_of(pairs, 132, capability >= (9, 0))
        most, stack = REGISTERS // (config.threads * config.resident), 32 if capability in ((8, 6), (8, 9)) else 0
        for topr in (128, 32):
            yield Build(kt_select.SOURCE, kt_select.defines(128, 4, BF16, topr, config), most, stack, 48 * 1024)


def page_scores(capability: tuple[int, int]) -> Iterator[Build]:
    kinds = [(128, 4, BF16, BF16), (64, 7, FP16, FP16), (64, 2, BF16, BF16)]
    # No float8 before Ada.
    kinds += [(128, 4, BF16, FP8), (64, 1, FP16, FP8)] if capability >= (8, 9) else []
    for kind in kinds:
        yield Build(page_score.SOURCE, page_score.defines(*kind), **ANY)


def page_topks(capability: tuple[int, int]) -> Iterator[Build]:
    shapes = {(8, 0): [(1, 1024, 16)], (9, 0): [(1, 1024, 32), (8, 512, 4)], (10, 0): [(2, 1024, 4)]}
    for shape in shapes.get(capability, ()):
        yield Build(page_topk.SOURCE, page_topk.Shape(*shape).defines, **ANY)


def skip_softmax_decodes(_: tuple[int, int]) -> Iterator[Build]:
    for config in skip_softmax_decode.CONFIGS:
        for dim, dtype in ((128, BF16), (64, FP16)):
            for group in (1, 8):
                defines = skip_softmax_decode.defines(dim, group, dtype, config)
                yield Build(skip_softmax_decode.SOURCE, defines, REGISTERS // (32 * config.warps * config.resident))


def sparse_decodes(capability: tuple[int, int]) -> Iterator[Build]:
    for config in sparse_decode.CONFIGS if capability >= (9, 0) else (sparse_decode.ALONE,):
        for dim in sparse_decode.DIMS:
            for group, dtype in ((1, FP16), (4, BF16), (8, BF16)):
                defines = sparse_decode.defines(dim, group, dtype, config)
                yield Build(sparse_decode.SOURCE, defines, REGISTERS // (32 * config.warps * config.resident))


BUILDS = (
    *(block_masses, block_topps, index_topks, kt_selects),
    *(page_scores, page_topks, skip_softmax_decodes, sparse_decodes),
)


@pytest.mark.parametrize("builds", BUILDS, ids=lambda builds: builds.__name__)
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_cuda(capability: tuple[int, int], builds: object) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    for build in builds(capability):
        used = usage(nvrtc.compile_file(build.source, capability, build.defines))
        assert used["registers"] <= build.registers and used["stack_bytes"] <= build.stack, build
        assert used["shared_bytes"] <= build.shared, build
