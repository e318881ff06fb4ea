"""Sparse MLA decode attention on Hopper: the Gluon kernel against the reference, at the sizes that it takes."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_decode import TOLERANCE, poisoned, relative_error, run_reference
from mla_hopper import RAGGED, SMALL, assert_as_the_reference, run
from triton_interpreter import HAS_GPU

from sglang_sparse_kernels import gluon_kernels, sparse_mla_decode
from sglang_sparse_kernels.sparse_mla_decode import launch, segments
from sglang_sparse_kernels.sparse_mla_decode.cases import CASES, Case, make

FP16, BF16, FP8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability()[0] == 9
SERVED = [case for case in CASES if case.latent_dim == 512 and case.block_size >= 16 and case.dtype == case.kv_dtype]

hopper_only = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("case", [RAGGED, SMALL, *SERVED], ids=str)
def test_it_equals_the_reference(case: Case) -> None:
    arguments = poisoned(make(case, "cuda"))
    assert_as_the_reference(arguments)
    assert torch.equal(run(arguments), run(arguments))


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("heads", [1, 16, 64, 70, 128])
def test_heads_blocks_and_dtypes(heads: int, block_size: int, dtype: torch.dtype) -> None:
    case = Case((3000, 0, 17, 9000, 64), block_size, heads, 512, dtype, dtype, ratio=0.4, kv_scale=0.5)
    assert_as_the_reference(poisoned(make(case, "cuda")))


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 5, 63, 64, 65, 131, 132, 133, 265])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_numbers_of_tiles(tiles: int, rows: int) -> None:
    """Of one program or many, of both consumers or one, with whole tiles and cut ones."""
    for tokens in (64 * tiles, 64 * tiles - 13):
        case = replace(SMALL, lengths=(tokens,) * rows, heads=64)
        arguments = poisoned(make(case, "cuda"))
        for least_tiles in (1, 4):
            for values_first in (False, True):
                assert_as_the_reference(arguments, least_tiles=least_tiles, values_first=values_first)


@pytest.mark.gpu
@hopper_only
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(0, 20000), min_size=1, max_size=30),
    heads=st.sampled_from([5, 16, 64, 128, 140]),
    block_size=st.sampled_from([16, 32, 64]),
    ratio=st.floats(0.01, 1.0),
)
@settings(max_examples=60, deadline=None)
def test_any_rows(seed: int, lengths: list[int], heads: int, block_size: int, ratio: float) -> None:
    case = Case(tuple(lengths), block_size, heads, 512, BF16, BF16, ratio=ratio)
    assert_as_the_reference(poisoned(make(case, "cuda", seed)))


@pytest.mark.gpu
@hopper_only
def test_the_newest_slot_may_be_anywhere() -> None:
    case = replace(RAGGED, heads=64, lengths=(3000, 700, 40, 1))
    arguments = poisoned(make(case, "cuda"))
    cache = arguments["kv_cache"]
    arguments["kv_cache"] = torch.where(cache.isnan(), 1.0, cache)
    chosen = arguments["indices"][:, 0, 0].long()
    for shift in (0, 5, 15, 10**6):
        assert_as_the_reference({**arguments, "last_slots": chosen * 16 + shift})


@pytest.mark.gpu
@hopper_only
def test_what_is_not_selected_is_not_seen() -> None:
    """Slots behind the newest one and blocks beyond the count, finite or not."""
    arguments = poisoned(make(replace(RAGGED, heads=64), "cuda"))
    expected = run(arguments)
    cache = arguments["kv_cache"]
    for other in (float("inf"), 1e4):
        assert torch.equal(run({**arguments, "kv_cache": torch.where(cache.isnan(), other, cache)}), expected)


@pytest.mark.gpu
@hopper_only
def test_views_of_larger_tensors_and_large_logits() -> None:
    arguments = make(replace(RAGGED, heads=64), "cuda")
    expected = run(arguments)
    q_nope, q_rope, cache = (arguments[name] for name in ("q_nope", "q_rope", "kv_cache"))
    changed = {**arguments, "q_nope": q_nope.transpose(0, 1).contiguous().transpose(0, 1)}
    changed["q_rope"] = torch.cat([q_rope, q_rope + 1], dim=1)[:, : q_rope.shape[1]]
    changed["kv_cache"] = torch.cat([cache, cache], dim=1)[:, : cache.shape[1]]
    assert torch.equal(run(changed), expected)
    # Queries whose rows are not aligned to 16 bytes.
    changed["q_nope"] = torch.cat([q_nope, q_nope[..., :1]], dim=-1)[..., :-1]
    assert torch.equal(run(changed), expected)
    assert_as_the_reference({**arguments, "q_nope": q_nope * 100})


@pytest.mark.gpu
@hopper_only
def test_broken_keys_show_in_their_rows_alone() -> None:
    arguments = make(replace(RAGGED, heads=64, lengths=(640, 640)), "cuda")
    expected = run(arguments)
    slot = arguments["indices"][0, 0, 3].long() * 16
    arguments["kv_cache"][slot, 5] = float("nan")
    got = run(arguments)
    assert got[0].isnan().all() and torch.equal(got[1], expected[1])


@pytest.mark.gpu
@hopper_only
def test_a_graph_serves_any_counts() -> None:
    """Captured with nothing selected; replayed with rows that are sparse, dense, padded, and all padded again."""
    dense = replace(RAGGED, ratio=1.0, heads=128, lengths=(3000, 16, 700, 1, 40, 5000), max_select=320)
    all_of, few, half = (make(replace(dense, ratio=ratio), "cuda") for ratio in (1.0, 0.1, 0.5))
    every_other = all_of["counts"] * torch.tensor([1, 0], device="cuda").int().repeat(3)[:, None]
    none = torch.zeros_like(every_other)
    arguments = {name: value.clone() if torch.is_tensor(value) else value for name, value in all_of.items()}
    arguments["counts"].zero_()
    run(arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(arguments)
    replays = [(one, one["counts"]) for one in (all_of, few, half)]
    replays += [(all_of, none), (all_of, every_other), (few, none)]
    for step, (selection, counts) in enumerate([*replays, replays[1]]):
        for name in ("q_nope", "q_rope", "kv_cache", "indices", "last_slots"):
            arguments[name].copy_(selection[name])
        arguments["counts"].copy_(counts)
        out.fill_(float("nan"))
        graph.replay()
        assert relative_error(out, run_reference(arguments)) < TOLERANCE[BF16], step
        assert out[(counts == 0)[:, 0]].count_nonzero() == 0


@pytest.mark.gpu
@hopper_only
def test_many_replays_give_the_same_bits() -> None:
    """Of a call behind another one, before which it may start."""
    arguments = make(replace(RAGGED, lengths=(20000, 3000, 0, 9000), heads=128, max_select=1300), "cuda")
    expected = run(arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [run(arguments) for _ in range(10)]
    for _ in range(100):
        graph.replay()
        assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("rows", [1, 24, 200])
def test_it_allocates_what_is_said(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "USES_HOPPER_KERNEL", True)
    arguments = make(replace(SMALL, lengths=(900,) * rows, heads=128), "cuda")
    width, device = arguments["indices"].shape[2], arguments["q_nope"].device
    from sglang_sparse_kernels.sparse_mla_decode import hopper

    said = hopper.scratch_bytes(128, BF16, device)
    assert sparse_mla_decode.scratch_bytes(rows, 128, 512, width, 16, BF16, device) >= said
    out = torch.empty_like(arguments["q_nope"], memory_format=torch.contiguous_format)
    sparse_mla_decode.sparse_mla_decode(**arguments, out=out)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    sparse_mla_decode.sparse_mla_decode(**arguments, out=out, newest_last=True)
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before == said


def test_it_is_chosen_where_it_serves_and_takes_the_arguments(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And by the same condition its memory is reserved."""
    called = []
    module = SimpleNamespace(
        serves=lambda batch, *_: batch == 3,
        takes=lambda *arguments: arguments[-1] == 1.0,
        scratch_bytes=lambda *_: 10**9,
        sparse_mla_decode=lambda *arguments: called.append(len(arguments)),
    )
    monkeypatch.setattr(gluon_kernels, "hopper_kernel", lambda *_: module)
    arguments = make(SMALL, device)

    def scratch(rows: int) -> int:
        return sparse_mla_decode.scratch_bytes(rows, 16, 512, 20, 16, BF16, torch.device("cpu"))

    def chosen(**changes: Any) -> bool:
        called.clear()
        sparse_mla_decode.sparse_mla_decode(**{**arguments, **changes})
        return bool(called)

    monkeypatch.setattr(launch, "USES_HOPPER_KERNEL", False)
    assert not chosen() and scratch(3) < 10**9
    monkeypatch.setattr(launch, "USES_HOPPER_KERNEL", True)
    assert chosen() and scratch(3) == 10**9
    assert not chosen(kv_scale=0.5)
    fewer = {name: arguments[name][:2] for name in ("q_nope", "q_rope", "indices", "counts", "last_slots")}
    assert not chosen(**fewer) and scratch(2) < 10**9


COMPILE = """
import dataclasses, torch
from unittest import mock
from eval import compile_kernels
from sglang_sparse_kernels import launch
from sglang_sparse_kernels.sparse_mla_decode import hopper, sparse_mla_decode
from sglang_sparse_kernels.sparse_mla_decode import launch as chosen
from sglang_sparse_kernels.sparse_mla_decode.cases import ROWS, Case, make

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
case = Case((300, 40), 16, 128, 512, BF16, BF16)
chosen.USES_HOPPER_KERNEL = True
with compile_kernels.compiling("9.0") as found:
    for block, heads, dtype in ((16, 128, BF16), (64, 16, FP16)):
        changes = {"block_size": block, "heads": heads, "dtype": dtype, "kv_dtype": dtype}
        sparse_mla_decode(**make(dataclasses.replace(case, **changes), "cpu"))
for kernel in found:
    used = compile_kernels.resources(kernel)
    # At most some values of the loading warp and of what is outside of loops.
    print(used["kernel"], used["stack_bytes"] <= 64, used["shared_bytes"] <= 232448, "wgmma" in kernel.asm["ptx"])

def taken(change=None, target="9.0", rows=2, **changes):
    arguments = make(dataclasses.replace(case, lengths=(40,) * rows, **changes), "cpu") | (change or {})
    sizes = (*arguments["q_nope"].shape, arguments["block_size"], arguments["q_nope"].dtype, torch.device("cpu"))
    with mock.patch.object(launch, "stand_in", compile_kernels.TARGETS[target]):
        if chosen.hopper_kernel(*sizes) is not hopper:
            return False
    return hopper.takes(*(arguments[name] for name in "q_nope q_rope kv_cache indices sm_scale kv_scale".split()))

wide, odd = torch.zeros(320, 584, dtype=BF16), torch.zeros(320, 577, dtype=BF16)
none = torch.zeros(2, 1, 0, dtype=torch.int32)
print([taken(), taken(heads=1), taken(block_size=32), taken({"kv_cache": wide[:, :576]}), taken(rows=256)])
print([
    *(taken(target=target) for target in ("8.0", "10.0", "12.0")),
    *(taken(block_size=size) for size in (1, 8)),
    *(taken(latent_dim=256), taken(rope_dim=32), taken(kv_dtype=FP8), taken(kv_dtype=ROWS), taken(rows=257)),
    *(taken({"kv_cache": odd[:, :576]}), taken({"kv_cache": wide[:, 4:580]}), taken({"kv_cache": wide[:0, :576]})),
    *(taken({"indices": none}), taken({"sm_scale": 0.0}), taken({"kv_scale": -1.0})),
])
"""


def test_it_compiles_for_hopper_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True)
    *kernels, yes, no = done.stdout.splitlines() or [done.stderr[-2000:]] * 3
    attend, combine = "_segments_hopper_kernel True True True", "_combine_segments_kernel True True False"
    assert kernels == [attend, combine] * 2, done.stderr[-2000:]
    assert "False" not in yes and "True" not in no, (yes, no)


def test_programs_are_as_many_as_run_at_once() -> None:
    """For each tile of heads; a GPU with fewer multiprocessors than tiles has one for each."""
    found = [segments.num_programs(heads, 132) for heads in (1, 64, 65, 128, 192)]
    assert found == [132, 132, 66, 66, 44] and segments.num_programs(128, 1) == 1
