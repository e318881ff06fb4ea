"""The CUDA kernels of the block mass without a GPU: their source as C++, how they are launched, what they take."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cuda_library import emulated

from sglang_sparse_kernels.block_mass import cuda, reference
from sglang_sparse_kernels.block_mass.cases import BF16, FP8, FP16, FP32, Case, make
from sglang_sparse_kernels.common import nvrtc
from sglang_sparse_kernels.common.launch import LOG2_E

NAN, INF = math.nan, math.inf
# Heads, their type, and blocks of a cluster of the merge.
KINDS = [(16, BF16, 1), (32, FP16, 2), (48, BF16, 1), (64, BF16, 2), (80, FP16, 1), (128, BF16, 1)]
Kind = tuple[int, torch.dtype, int]
Run = Callable[..., torch.Tensor]


def sources() -> Iterator[Any]:
    for heads, dtype, cluster in KINDS:
        shape = cuda.shape_of(heads)
        yield cuda.SOURCE, "block_mass_splits", shape.defines(dtype)
        yield cuda.MERGE, "block_mass_merge", shape.merge_defines(cluster)


on_cpu = emulated(sources())


@pytest.fixture
def run(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The masses of both kernels on a GPU of few processors; places that they leave unwritten are NaN, as is what they
    find in their scratch."""

    def call(arguments: dict[str, Any], processors: int = 1, **more: Any) -> torch.Tensor:
        heads, empty = arguments["q"].shape[1], torch.empty
        cluster = next(cluster for kind, _, cluster in KINDS if kind == heads)

        def kernels(device: torch.device, shape: Any, dtype: torch.dtype) -> tuple[Any, dict[int, Any]]:
            splits = nvrtc.Kernel(cuda.SOURCE, "block_mass_splits", device, shape.defines(dtype))
            merge = nvrtc.Kernel(cuda.MERGE, "block_mass_merge", device, shape.merge_defines(cluster), cluster)
            return splits, {cluster: merge}

        with monkeypatch.context() as patch:
            patch.setattr(cuda, "_kernels", kernels)
            patch.setattr(cuda, "cluster_of", lambda *_: cluster)
            patch.setattr(cuda, "num_processors", lambda _: processors)
            patch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(-1))
            return cuda.block_mass(**arguments, out=torch.full(arguments["block_table"].shape, NAN), **more)

    return call


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


def names(kind: Kind) -> str:
    return f"{kind[0]}-{str(kind[1]).split('.')[-1]}"


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_it_equals_the_reference(kind: Kind, block_size: int, run: Run) -> None:
    """Rows of no token, of one, of parts of a tile; some that are shorter than the splits are many."""
    heads, dtype, _ = kind
    case = Case((300, 0, 33, 1), block_size, heads, 64, dtype, dtype, stored=576, sm_scale=0.4, width=22)
    arguments = make(case, "cpu")
    arguments["block_table"].masked_fill_(~held(arguments), 2**31 - 1)
    got = run(arguments, processors=3)
    check(got, arguments, tolerance=5e-5)
    if block_size == 16:
        assert torch.equal(got.nan_to_num(9), run(arguments, processors=3).nan_to_num(9))


@pytest.mark.parametrize("processors", [2, 9])
def test_any_number_of_splits(processors: int, run: Run) -> None:
    """Each with more tiles than are on their way at once, or one, or most with nothing; keys that lie side by side."""
    case = Case((1300, 64, 65), 16, 64, 64, BF16, BF16, sm_scale=0.6)
    check(run(make(case, "cpu"), processors), make(case, "cpu"))


@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_rows_take_turns_where_the_scratch_is_small(rows: int, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has three tiles of four words for each head. What is allocated is what `scratch_bytes` says."""
    sizes: list[int] = []
    fill = torch.Tensor.fill_

    def counting(tensor: torch.Tensor, value: float) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return fill(tensor, value)

    arguments = make(Case((70, 300, 16, 0, 130), 16, 16, 64, BF16, BF16, stored=576), "cpu")
    monkeypatch.setattr(torch.Tensor, "fill_", counting)
    limit = rows * 3 * 4 * 16 * 4
    got = run(arguments, limit=limit)
    words, *splits = sizes
    assert words == max(rows, 1) * 768 and len(splits) == -(-5 // max(rows, 1))
    monkeypatch.setattr(cuda, "num_processors", lambda _: 1)
    assert words + max(splits) == cuda.scratch_bytes(5, 16, 19, 16, torch.device("cpu"), limit)
    check(got, arguments)


@pytest.mark.parametrize(("kind", "sign"), [(KINDS[0], 1.0), (KINDS[0], -1.0), (KINDS[3], 1.0)], ids=str)
def test_logits_that_rise_or_fall_without_end(kind: Kind, sign: float, run: Run) -> None:
    """Earlier sums are lowered again and again, and differ between the warps and the splits."""
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
            check(run(arguments, processors), arguments, tolerance=1e-3)


@pytest.mark.parametrize("factor", [1e-4, 1e3])
def test_flat_and_steep_distributions(factor: float, run: Run) -> None:
    arguments = make(Case((300, 47), 16, 64, 64, BF16, BF16, sm_scale=0.4 * factor), "cpu")
    check(run(arguments), arguments)


def test_a_token_far_above_or_below_the_others(run: Run) -> None:
    """Wherever it is, and however far: also so far that float32 holds no weight of both."""
    arguments = make(Case((400,), 16, 16, 64, BF16, BF16, sm_scale=1.0), "cpu")
    arguments["q"][:, :, 3] = 1.0
    arguments["q"][:, ::2, 3] = -1.0
    for token in (0, 70, 399):
        for number in (40.0, 60.0, 200.0, 1e4, 1e30, -300.0, -1e30):
            changed = {**arguments, "k_cache": arguments["k_cache"].clone()}
            slot = arguments["block_table"][0, token // 16] * 16 + token % 16
            changed["k_cache"][slot, 3] = number
            check(run(changed, 1), changed)


def test_what_is_not_finite_makes_its_row_nan(run: Run) -> None:
    for value, token in ((NAN, 5), (INF, 5), (INF, 295), (NAN, 200)):
        arguments = make(Case((300, 40), 16, 16, 64, BF16, BF16), "cpu")
        slot = arguments["block_table"][0, token // 16] * 16 + token % 16
        arguments["k_cache"][slot, 3] = value
        # +inf in one head, -inf in the others.
        arguments["q"][0, :, 3] = -1.0
        arguments["q"][0, 2, 3] = 1.0
        got, mask = run(arguments), held(arguments)
        assert got[0][mask[0]].isnan().all()
        torch.testing.assert_close(got[1][mask[1]], run_reference(arguments)[1][mask[1]], rtol=0, atol=2.5e-4)


def test_a_logit_of_minus_infinity_weighs_nothing(run: Run) -> None:
    arguments = make(Case((300,), 16, 64, 64, BF16, BF16), "cpu")
    arguments["q"][:, :, 3] = 1.0
    slots = arguments["block_table"][0, :9, None] * 16 + torch.arange(16)
    # More than a tile, so that there is no finite reference at first.
    arguments["k_cache"][slots.flatten().long(), 3] = -INF
    for processors in (1, 3):
        got = run(arguments, processors)
        assert (got[0, :9] == 0.0).all()
        check(got, arguments)
    arguments["k_cache"][:, 3] = -INF
    assert run(arguments).isnan().all()


def test_a_newest_slot_in_another_block_counts_for_none(run: Run) -> None:
    """Then all slots of the row's last block count, as they do with the reference."""
    arguments = make(Case((320,), 32, 16, 64, BF16, BF16), "cpu")
    arguments["last_slots"] -= 32 * (arguments["last_slots"] >= 64) or -32
    check(run(arguments), arguments)


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
