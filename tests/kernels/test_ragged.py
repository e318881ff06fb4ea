"""Random ragged rows: what a decode step runs against its references, over memory that holds anything else."""

from dataclasses import replace

import torch
from exact_decode import exact
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_sparse_kernels.common.testing import paged_batch, random_cache, seeded
from sglang_sparse_kernels.page_score import page_score
from sglang_sparse_kernels.page_score import reference as score_reference
from sglang_sparse_kernels.page_score.cases import Case as ScoreCase
from sglang_sparse_kernels.page_score.cases import make as make_score
from sglang_sparse_kernels.page_summary import reference as summary_reference
from sglang_sparse_kernels.page_summary import update_page_summaries
from sglang_sparse_kernels.sparse_decode import sparse_decode
from sglang_sparse_kernels.sparse_decode.cases import Case as DecodeCase
from sglang_sparse_kernels.sparse_decode.cases import make as make_decode

FP32, FP16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
NAN, NO_PAGE = float("nan"), 2**31 - 1
# Relative L2 error of an output by the dtype of the query.
TOLERANCE = {FP16: 2e-3, BF16: 1e-2}

seeds = st.integers(0, 2**31)
few = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


def ragged(most: int) -> st.SearchStrategy[list[int]]:
    """Sizes of a few rows, of which some are 1 or padding."""
    return st.lists(st.one_of(st.sampled_from([0, 1]), st.integers(2, most)), min_size=1, max_size=4)


HEADS = {"heads": st.integers(1, 2), "dim": st.sampled_from([64, 128])}
GROUPED = {**HEADS, "group": st.sampled_from([1, 2, 4, 7])}
DECODES = st.builds(
    DecodeCase,
    lengths=ragged(150).map(tuple),
    page_size=st.sampled_from([1, 4, 16, 64]),
    **GROUPED,
    dtype=st.sampled_from([FP16, BF16]),
    kv_dtype=st.sampled_from([FP16, BF16]),
    ratio=st.sampled_from([0.3, 1.0]),
    v_dim=st.just(64),
).flatmap(
    lambda case: st.sampled_from(
        [replace(case, kv_dtype=case.dtype), replace(case, kv_dtype=FP8, k_scale=0.5, v_scale=2.0)]
    )
)
SCORES = st.builds(
    ScoreCase,
    n_pages=ragged(60).map(tuple),
    **GROUPED,
    dtype=st.sampled_from([FP16, BF16]),
    summary_dtype=st.sampled_from([FP32, BF16, FP8]),
    width=st.integers(60, 130),
    local_pages=st.integers(0, 3),
)


@few
@given(seed=seeds, case=DECODES)
def test_sparse_decode_of_ragged_selections(device: str, seed: int, case: DecodeCase) -> None:
    arguments = make_decode(case, device, seed)
    # Each head of a row selects a number of pages of its own, none too.
    share = torch.rand(arguments["counts"].shape, device=device, generator=seeded(device, seed))
    arguments["counts"] = (arguments["counts"] * share.sqrt()).round().int()
    beyond = torch.arange(arguments["indices"].shape[2], device=device) >= arguments["counts"][..., None]
    arguments["indices"] = arguments["indices"].masked_fill(beyond, NO_PAGE)
    out = torch.full((*arguments["q"].shape[:2], 64), NAN, dtype=case.dtype, device=device)
    got = sparse_decode(**arguments, out=out, arrivals=torch.zeros_like(arguments["counts"]))
    expected = exact(arguments)
    assert (got.double() - expected).norm() <= TOLERANCE[case.dtype] * expected.norm()
    nothing = (arguments["counts"] == 0).repeat_interleave(case.group, dim=1)
    assert got[nothing].count_nonzero() == 0


@few
@given(seed=seeds, case=SCORES)
def test_page_score_of_ragged_rows(device: str, seed: int, case: ScoreCase) -> None:
    arguments = make_score(case, device, seed)
    held = torch.arange(case.width, device=device) < arguments["n_pages"][:, None]
    arguments["page_table"].masked_fill_(~held, NO_PAGE)
    arguments["summary"].view(torch.uint8)[0] = 0xFF
    unwritten = torch.full((len(case.n_pages), case.heads, case.width), NAN, device=device)
    expected = score_reference.page_score(**arguments, out=unwritten.clone())
    got = page_score(**arguments, out=unwritten)
    written = held[:, None].expand_as(got)
    torch.testing.assert_close(got[written], expected[written], rtol=1e-5, atol=1e-4)
    assert got[~written].isnan().all()


@few
@given(
    seed=seeds,
    lengths=ragged(150),
    page_size=st.sampled_from([1, 2, 16, 64]),
    **HEADS,
    dtypes=st.sampled_from([(BF16, BF16), (FP16, FP16), (FP32, BF16), (BF16, FP8), (FP8, FP8)]),
    layers=st.integers(1, 3),
)
def test_page_summaries_of_ragged_rows(
    device: str,
    seed: int,
    lengths: list[int],
    page_size: int,
    heads: int,
    dim: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    layers: int,
) -> None:
    generator = seeded(device, seed)
    batch = paged_batch(tuple(lengths), page_size, device, generator)
    slots = torch.arange(batch.num_pages * page_size, device=device)
    newest = slots // page_size == batch.last_slots[:, None] // page_size
    unwritten = ((newest & (slots > batch.last_slots[:, None])).any(dim=0) | (slots < page_size)).nonzero()[:, 0]
    # Keys and values of a token lie side by side.
    caches = [
        random_cache((len(slots), heads, 2 * dim), dtypes[0], device, generator)[..., :dim] for _ in range(layers)
    ]
    for cache in caches:
        cache.view(torch.uint8)[unwritten] = 0xFF
    stale = torch.full((batch.num_pages, heads, 2, dim), 7.0, device=device).to(dtypes[1])
    summaries, expected = ([stale.clone() for _ in range(layers)] for _ in range(2))
    overflow = torch.zeros(1, dtype=torch.int32, device=device)
    update_page_summaries(caches, summaries, batch.last_slots, page_size, overflow)
    for cache, summary, wanted in zip(caches, summaries, expected, strict=True):
        summary_reference.update_page_summary(cache, wanted, batch.last_slots, page_size)
        assert torch.equal(summary.float(), wanted.float())
    assert overflow.item() == 0
