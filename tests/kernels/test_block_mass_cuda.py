"""The CUDA kernels of the block mass without a GPU: their source as C++, its threads taking turns."""

import ctypes
import math
from typing import Any

import pytest
import torch
from cuda_library import build

from sglang_sparse_kernels.block_mass import cuda, reference
from sglang_sparse_kernels.block_mass.cases import BF16, FP16, Case, make

NAN, INF = math.nan, math.inf
# Heads, their type, and blocks of a cluster of the merge.
KINDS = [(16, BF16, 1), (32, FP16, 2), (48, BF16, 1), (64, BF16, 2), (80, FP16, 1), (128, BF16, 1)]
KERNELS = """
#define block_mass_splits splits_{number}
#define block_mass_merge merge_{number}
#define HEADS {HEADS}
#define TOKEN_WARPS {TOKEN_WARPS}
#define KIND {KIND}
#define HEAD_TILES {HEAD_TILES}
#define STAGES {STAGES}
#define RESIDENT {RESIDENT}
#define CLUSTER {CLUSTER}
namespace splits_of_{number} {{
static void multiply(float (&sums)[4], const unsigned (&query)[4], uint2 keys) {{
    multiply_as(!KIND, sums, query, keys);
}}
#include "{splits}"
}}
extern "C" void run_splits_{number}(
    unsigned splits, unsigned rows, const unsigned short* q, const unsigned char* keys, const int* table,
    const int* n_blocks, const long long* last_slots, unsigned* words, float2* totals, long long q_row,
    long long q_head, long long stride, long long table_stride, long long row_words, long long size_log2,
    long long scale) {{
    launch(splits, rows, THREADS, 1, [=] {{
        splits_of_{number}::splits_{number}(q, keys, table, n_blocks, last_slots, words, totals, q_row, q_head, stride,
                                            table_stride, row_words, size_log2, scale);
    }});
}}
#undef THREADS
namespace merge_of_{number} {{
#include "{merge}"
}}
extern "C" void run_merge_{number}(
    unsigned blocks, unsigned rows, const unsigned* words, const float2* totals, const int* n_blocks, float* out,
    long long row_words, long long splits, long long width, long long size_log2) {{
    launch(blocks, rows, THREADS, CLUSTER, [=] {{
        merge_of_{number}::merge_{number}(words, totals, n_blocks, out, row_words, splits, width, size_log2);
    }});
}}
#undef THREADS
#undef block_mass_splits
#undef block_mass_merge
#undef HEADS
#undef TOKEN_WARPS
#undef KIND
#undef HEAD_TILES
#undef STAGES
#undef RESIDENT
#undef CLUSTER
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels of every kind."""
    files = {"splits": cuda.SOURCE, "merge": cuda.MERGE}
    sources = (
        KERNELS.format(**files, number=i, CLUSTER=cluster, **cuda.shape_of(heads).defines(dtype))
        for i, (heads, dtype, cluster) in enumerate(KINDS)
    )
    return build(tmp_path_factory.mktemp("cuda"), sources)


class OnCpu:
    """A kernel as ``nvrtc.Kernel``."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, grid: tuple[int, int], threads: int, *arguments: torch.Tensor | int) -> None:
        values = [
            ctypes.c_void_p(value.data_ptr()) if isinstance(value, torch.Tensor) else ctypes.c_longlong(value)
            for value in arguments
        ]
        self._function(*grid, *values)


def on_cpu(
    library: ctypes.CDLL, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch, processors: int = 1, **more: Any
) -> torch.Tensor:
    """The masses of both kernels on a GPU of few processors; places that they leave unwritten are NaN, as is what they
    find in their scratch."""
    q = arguments["q"]
    number = next(i for i, kind in enumerate(KINDS) if kind[:2] == (q.shape[1], q.dtype))
    cluster, empty = KINDS[number][2], torch.empty

    def kernels(*_: Any) -> tuple[Any, dict[int, Any]]:
        splits, merge = (OnCpu(library[f"run_{name}_{number}"]) for name in ("splits", "merge"))
        return splits, {cluster: merge}

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "_kernels", kernels)
        patch.setattr(cuda, "cluster_of", lambda *_: cluster)
        patch.setattr(cuda, "num_processors", lambda _: processors)
        patch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(-1))
        out = torch.full(arguments["block_table"].shape, NAN)
        return cuda.block_mass(**arguments, out=out, **more)


def run_reference(arguments: dict[str, Any]) -> torch.Tensor:
    return reference.block_mass(**arguments, out=torch.empty(arguments["block_table"].shape))


def held(arguments: dict[str, Any]) -> torch.Tensor:
    return torch.arange(arguments["block_table"].shape[1]) < arguments["n_blocks"][:, None]


def check(got: torch.Tensor, arguments: dict[str, Any], tolerance: float = 2.5e-4) -> None:
    expected, mask = run_reference(arguments), held(arguments)
    torch.testing.assert_close(got[mask], expected[mask], rtol=0, atol=tolerance)
    totals = got.where(mask, 0.0).sum(dim=1)
    torch.testing.assert_close(totals, (arguments["n_blocks"] > 0).float(), rtol=0, atol=1e-5)
    assert got[~mask].isnan().all()


def names(kind: tuple[int, torch.dtype, int]) -> str:
    return f"{kind[0]}-{str(kind[1]).split('.')[-1]}"


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_it_equals_the_reference(
    kind: tuple[int, torch.dtype, int], block_size: int, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of no token, of one, of parts of a tile; some that are shorter than the splits are many."""
    heads, dtype, _ = kind
    case = Case((300, 0, 33, 1), block_size, heads, 64, dtype, dtype, stored=576, sm_scale=0.4, width=22)
    arguments = make(case, "cpu")
    arguments["block_table"].masked_fill_(~held(arguments), 2**31 - 1)
    got = on_cpu(library, arguments, monkeypatch, processors=3)
    check(got, arguments, tolerance=5e-5)
    if block_size == 16:
        assert torch.equal(got.nan_to_num(9), on_cpu(library, arguments, monkeypatch, processors=3).nan_to_num(9))


@pytest.mark.parametrize("processors", [2, 9])
def test_any_number_of_splits(processors: int, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with more tiles than are on their way at once, or one, or most with nothing; keys that lie side by side."""
    case = Case((1300, 64, 65), 16, 64, 64, BF16, BF16, sm_scale=0.6)
    check(on_cpu(library, make(case, "cpu"), monkeypatch, processors), make(case, "cpu"))


@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_rows_take_turns_where_the_scratch_is_small(
    rows: int, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row has three tiles of four words for each head. What is allocated is what `scratch_bytes` says."""
    sizes: list[int] = []
    fill = torch.Tensor.fill_

    def counting(tensor: torch.Tensor, value: float) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return fill(tensor, value)

    arguments = make(Case((70, 300, 16, 0, 130), 16, 16, 64, BF16, BF16, stored=576), "cpu")
    monkeypatch.setattr(torch.Tensor, "fill_", counting)
    limit = rows * 3 * 4 * 16 * 4
    got = on_cpu(library, arguments, monkeypatch, limit=limit)
    words, *splits = sizes
    assert words == max(rows, 1) * 768 and len(splits) == -(-5 // max(rows, 1))
    monkeypatch.setattr(cuda, "num_processors", lambda _: 1)
    assert words + max(splits) == cuda.scratch_bytes(5, 16, 19, 16, torch.device("cpu"), limit)
    check(got, arguments)


@pytest.mark.parametrize(("kind", "sign"), [(KINDS[0], 1.0), (KINDS[0], -1.0), (KINDS[3], 1.0)], ids=str)
def test_logits_that_rise_or_fall_without_end(
    kind: tuple[int, torch.dtype, int], sign: float, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was summed up before is lowered again and again, and differs between the warps and the splits."""
    heads, dtype, _ = kind
    for step in (0.02, 0.4, 3.0):
        arguments = make(Case((900,), 16, heads, 64, dtype, dtype, sm_scale=1.0), "cpu")
        slots = (arguments["block_table"][0, :, None] * 16 + torch.arange(16)).flatten()[:900].long()
        keys = arguments["k_cache"]
        keys[slots, 7] = torch.linspace(0, 1, 900).to(dtype)
        # Half of the heads rise at another rate, and the last one falls.
        rates = torch.full((heads,), sign * step * 900)
        rates[::2] *= 0.1
        rates[-1] *= -1
        arguments["q"][0, :, 7] = rates.to(dtype)
        for processors in (1, 2):
            check(on_cpu(library, arguments, monkeypatch, processors), arguments, tolerance=1e-3)


@pytest.mark.parametrize("factor", [1e-4, 1e3])
def test_flat_and_steep_distributions(factor: float, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = make(Case((300, 47), 16, 64, 64, BF16, BF16, sm_scale=0.4 * factor), "cpu")
    check(on_cpu(library, arguments, monkeypatch), arguments)


def test_a_token_far_above_or_below_the_others(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is, and however far: also so far that float32 holds no weight of both."""
    arguments = make(Case((400,), 16, 16, 64, BF16, BF16, sm_scale=1.0), "cpu")
    arguments["q"][:, :, 3] = 1.0
    arguments["q"][:, ::2, 3] = -1.0
    for token in (0, 70, 399):
        for number in (40.0, 60.0, 200.0, 1e4, 1e30, -300.0, -1e30):
            changed = {**arguments, "k_cache": arguments["k_cache"].clone()}
            slot = arguments["block_table"][0, token // 16] * 16 + token % 16
            changed["k_cache"][slot, 3] = number
            check(on_cpu(library, changed, monkeypatch, 1), changed)


def test_what_is_not_finite_makes_its_row_nan(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, token in ((NAN, 5), (INF, 5), (INF, 295), (NAN, 200)):
        arguments = make(Case((300, 40), 16, 16, 64, BF16, BF16), "cpu")
        slot = arguments["block_table"][0, token // 16] * 16 + token % 16
        arguments["k_cache"][slot, 3] = value
        # +inf in one head, -inf in the others.
        arguments["q"][0, :, 3] = -1.0
        arguments["q"][0, 2, 3] = 1.0
        got, mask = on_cpu(library, arguments, monkeypatch), held(arguments)
        assert got[0][mask[0]].isnan().all()
        torch.testing.assert_close(got[1][mask[1]], run_reference(arguments)[1][mask[1]], rtol=0, atol=2.5e-4)


def test_a_logit_of_minus_infinity_weighs_nothing(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = make(Case((300,), 16, 64, 64, BF16, BF16), "cpu")
    arguments["q"][:, :, 3] = 1.0
    slots = arguments["block_table"][0, :9, None] * 16 + torch.arange(16)
    # More than a tile, so that there is no finite reference at first.
    arguments["k_cache"][slots.flatten().long(), 3] = -INF
    for processors in (1, 3):
        got = on_cpu(library, arguments, monkeypatch, processors)
        assert (got[0, :9] == 0.0).all()
        check(got, arguments)
    arguments["k_cache"][:, 3] = -INF
    assert on_cpu(library, arguments, monkeypatch).isnan().all()


def test_a_newest_slot_in_another_block_counts_for_none(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then all slots of the row's last block count, as they do with the reference."""
    arguments = make(Case((320,), 32, 16, 64, BF16, BF16), "cpu")
    arguments["last_slots"] -= 32 * (arguments["last_slots"] >= 64) or -32
    check(on_cpu(library, arguments, monkeypatch), arguments)
