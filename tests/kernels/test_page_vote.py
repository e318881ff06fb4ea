"""Page votes: reference against loops, Triton against the reference, and what a head alone looks for."""

import math
from typing import Any

import pytest
import torch
from cuda_library import emulated

from sglang_sparse_kernels.common import nvrtc
from sglang_sparse_kernels.common.launch import LOG2_E
from sglang_sparse_kernels.page_centroids import HEADER
from sglang_sparse_kernels.page_centroids.reference import pack, unpack
from sglang_sparse_kernels.page_vote import cuda, page_vote, reference, scratch_bytes, select_by_votes
from sglang_sparse_kernels.page_vote.cases import BF16, CASES, FP8, FP16, Case, make

# Dimension, group, centroids, type of the queries.
KINDS = [(128, 4, 6, BF16), (64, 7, 6, BF16), (64, 1, 1, FP16), (128, 8, 8, FP16), (256, 8, 6, BF16)]
on_cpu = emulated((cuda.SOURCE, "page_vote", cuda.defines(*kind)) for kind in KINDS)
emulation = pytest.mark.usefixtures("on_cpu")


def run_reference(arguments: dict[str, Any]) -> torch.Tensor:
    shape = arguments["q"].shape[0], arguments["summary"].shape[1], arguments["page_table"].shape[1]
    return reference.page_vote(**arguments, out=torch.empty(shape, device=arguments["q"].device))


def assert_same(got: torch.Tensor, expected: torch.Tensor, n_pages: torch.Tensor) -> None:
    """Equal where a row holds pages; the kernels leave the rest unwritten."""
    held = (torch.arange(got.shape[2], device=got.device) < n_pages[:, None])[:, None].expand_as(got)
    torch.testing.assert_close(got[held], expected[held], rtol=1e-3, atol=5e-3)


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only and case.dim < 128], ids=str)
def test_reference_is_the_softmax_of_every_head(case: Case) -> None:
    arguments = make(case, "cpu")
    scores = run_reference(arguments)
    for row, n_pages in enumerate(case.n_pages):
        assert (scores[row, :, n_pages:] == float("-inf")).all()
        pages = arguments["page_table"][row, :n_pages].long()
        for head in range(case.heads):
            shares = torch.zeros(n_pages, dtype=torch.float64)
            for query in arguments["q"][row, head * case.group : (head + 1) * case.group].double():
                summary = arguments["summary"][pages, head]
                vectors = (unpack(summary, case.dim) if case.centroids else summary).double()
                products = query * vectors * case.dim**-0.5
                if case.centroids:
                    mass = (products.sum(-1).exp() * 0.5 ** torch.arange(case.centroids)).sum(-1)
                else:
                    mass = products.amax(1).sum(-1).exp()
                # All but the newest page.
                shares += mass / (mass[:-1].sum() if n_pages > 1 else 1.0)
            local = min(case.local_pages, n_pages)
            assert scores[row, head, n_pages - local : n_pages].isposinf().all()
            rest = slice(0, n_pages - local)
            torch.testing.assert_close(scores[row, head, rest].double().exp(), shares[rest], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_the_reference(case: Case, device: str) -> None:
    arguments = make(case, device)
    expected = run_reference(arguments)
    beyond = torch.arange(expected.shape[2], device=device) >= arguments["n_pages"][:, None]
    arguments["page_table"].masked_fill_(beyond, 2**31 - 1)
    got = page_vote(**arguments, out=torch.full_like(expected, torch.nan))
    assert_same(got, expected, arguments["n_pages"])
    assert torch.equal(got.nan_to_num(), page_vote(**arguments, out=torch.full_like(expected, torch.nan)).nan_to_num())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_selected_are_the_pages_with_the_most_votes(case: Case, device: str) -> None:
    """As good as those of the reference's scores, in logical order, the same ones each time."""
    arguments, generator = make(case, device), torch.Generator(device).manual_seed(0)
    n_pages, scores = arguments["n_pages"], run_reference(arguments)
    wanted = (n_pages * torch.rand(len(n_pages), generator=generator, device=device)).ceil().int()
    most, local = max(1, int(wanted.max())), arguments.pop("local_pages")
    found = []
    for ready in (False, True):
        stats = torch.zeros(3, dtype=torch.int64, device=device)
        given = {"n_select": wanted, "max_select": most, "scores": torch.full_like(scores, torch.nan), "stats": stats}
        pages, counts = select_by_votes(**arguments, **given, local_pages=local, tables_ready=ready)
        assert torch.equal(counts, wanted[:, None].expand_as(counts))
        assert stats[1] == wanted.sum() * counts.shape[1]
        for row, count in enumerate(wanted.tolist()):
            order = torch.full((int(arguments["page_table"].max()) + 1,), -1, device=device)
            order[arguments["page_table"][row, : n_pages[row]].long()] = torch.arange(int(n_pages[row]), device=device)
            logical = order[pages[row, :, :count].long()]
            assert (logical >= 0).all() and (logical.diff() > 0).all()
            if count:
                least = scores[row].gather(1, logical).amin(1)
                assert (least >= scores[row].topk(count).values[:, -1] - 0.01).all()
        beyond = torch.arange(most, device=device) >= wanted[:, None, None]
        found.append(pages.masked_fill(beyond, 0))
    assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_the_same_bits_each_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred calls of each kernel of the logits, over scratch that holds something else each time."""
    arguments = make(Case((700, 0, 33, 1), 2, 4, 128, BF16, BF16, width=720), "cuda")
    if name == "triton":
        monkeypatch.setattr(cuda, "takes", lambda *_: False)
    elif not cuda.takes(arguments["q"], arguments["summary"]):
        pytest.skip("needs a GPU for which NVRTC compiles the CUDA kernels")
    expected, first = run_reference(arguments), page_vote(**arguments)
    assert_same(first, expected, arguments["n_pages"])
    for number in range(100):
        torch.empty(1 << 22, device="cuda").fill_((float("nan"), 0.0, 1e30)[number % 3])
        again = page_vote(**arguments, summaries_ready=bool(number % 2))
        assert_same(again, first, arguments["n_pages"])
        held = torch.arange(720, device="cuda") < arguments["n_pages"][:, None, None]
        assert torch.equal(again.masked_fill(~held, 0), first.masked_fill(~held, 0)), f"call {number}"


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("centroids", [0, 6])
def test_nan_in_a_summary_selects_the_page_and_takes_no_votes(centroids: int, implementation: str, device: str) -> None:
    arguments = make(Case((80,), 2, 2, 64, BF16, FP8, centroids=centroids), device)
    run = page_vote if implementation == "triton" else lambda **given: run_reference(given)
    before = run(**arguments)[0]
    page = arguments["page_table"][0, 3].item()
    number = arguments["summary"].view(torch.uint8)[page, 1]
    # One element of the first centroid, or of the maxima.
    (number[HEADER:] if centroids else number[0])[7] = 0x7F
    after = run(**arguments)[0]
    assert (after[1] == torch.finfo(torch.float32).max).nonzero().tolist() == [[3]]
    assert torch.equal(after[0], before[0])
    others = [i for i in range(79) if i != 3]
    shift = after[1, others] - before[1, others]
    assert shift.min() > 0 and shift.max() < 0.5


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("local", [0, 1, 2])
def test_the_newest_page_changes_no_others_score(local: int, implementation: str, device: str) -> None:
    """Its summary may be what the page's last owner left."""
    arguments = make(Case((80, 1), 2, 2, 64, BF16, BF16, local_pages=local, centroids=0), device)
    run = page_vote if implementation == "triton" else lambda **given: run_reference(given)
    before = run(**arguments)[:, :, :80]
    arguments["summary"][arguments["page_table"][0, 79]] = 30.0
    after = run(**arguments)[:, :, :80]
    assert torch.equal(before[0, :, :79], after[0, :, :79])
    assert not after[1, :, 0].isnan().any()


def test_the_page_that_one_head_looks_for_beats_what_all_like_a_little(device: str) -> None:
    """By the mean query it does not."""
    q = torch.zeros(1, 4, 64, device=device, dtype=BF16)
    q[0, 0, 0] = 80.0
    q[0, 1:, 0] = -40.0
    q[0, :, 1] = 8.0
    keys = torch.zeros(65, 16, 1, 64, device=device)
    keys[9, :, 0, 0], keys[20, :, 0, 1] = 1.0, 1.0
    centroids = pack(keys, torch.ones(65, 16, dtype=torch.bool, device=device), 1)
    table = torch.arange(65, dtype=torch.int32, device=device)[None]
    count = torch.tensor([65], dtype=torch.int32, device=device)
    scores = page_vote(q, centroids, table, count, 0.125)[0, 0]
    assert scores[:64].argmax() == 9
    mean = page_vote(q.mean(1, keepdim=True), centroids, table, count, 0.125)[0, 0]
    assert mean[:64].argmax() == 20


def test_what_is_allocated_is_counted(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And bounded: rows beyond it wait for those before."""
    row = 4 * 8 * (720 + 2 * 4 * 12)
    assert scratch_bytes(3, 8, 720) == 3 * row
    arguments = make(CASES[0], device)
    whole = page_vote(**arguments)
    monkeypatch.setattr("sglang_sparse_kernels.page_vote.MOST_SCRATCH", 3 * row - 1)
    assert scratch_bytes(4, 8, 720) == 2 * row
    assert_same(page_vote(**arguments), whole, arguments["n_pages"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"summary": torch.zeros(9, 2, 4, 64, dtype=BF16)}, r"summary must have the shape \(9, 2, 2, 64\)"),
        ({"sm_scale": 0.0}, "sm_scale must be above 0, got 0.0"),
        ({"local_pages": -1}, "local_pages must be at least 0, got -1"),
        ({"summary": torch.zeros(9, 2, 250, dtype=torch.uint8)}, "summary must have one of .*, got 250"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments = make(Case((8,), 2, 2, 64, BF16, BF16), "cpu") | change
    with pytest.raises(ValueError, match=message):
        page_vote(**arguments)


def run_emulated(given: dict[str, Any], blocks: int, ready: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and what each warp's pages add up to; places that the CUDA kernel leaves unwritten are NaN."""
    q, width = given["q"], given["page_table"].shape[1]
    logits = torch.full((*q.shape[:2], width), math.nan)
    parts = torch.full((*q.shape[:2], blocks * cuda.WARPS, 2), math.nan)
    tensors = (given[name] for name in ("q", "summary", "page_table", "n_pages", "sm_scale"))
    cuda.leave_logits(*tensors, logits, parts, ready)
    return logits, parts


def logits_of(given: dict[str, Any]) -> torch.Tensor:
    """Each head's logit of each page, ``[B, Hq, M]`` float64, to the base 2."""
    q, summary = given["q"].double(), given["summary"]
    pages = given["page_table"].clamp(0, len(summary) - 1).long()
    vectors = unpack(summary[pages], q.shape[2]).double()
    grouped = q.unflatten(1, (summary.shape[1], -1)) * given["sm_scale"]
    products = torch.einsum("bhgd,bmhvd->bhgmv", grouped, vectors)
    halves = math.log(2) * torch.arange(vectors.shape[3])
    return (products - halves).logsumexp(-1).flatten(1, 2) * LOG2_E


def case_of(kind: tuple[int, int, int, torch.dtype], n_pages: tuple[int, ...], **more: Any) -> Case:
    dim, group, count, query = kind
    return Case(n_pages, 2, group, dim, query, BF16, centroids=count, **more)


@emulation
@pytest.mark.parametrize("number", range(len(KINDS)), ids=[str(kind) for kind in KINDS])
def test_logits_and_their_sums(number: int) -> None:
    """Rows of no page, of one, of one more than a warp takes; strided queries; a table with anything beyond."""
    given = make(case_of(KINDS[number], (150, 0, 17, 1), width=155), "cpu")
    q = given["q"]
    given["q"] = torch.cat([q, torch.randn_like(q)], dim=1)[:, : q.shape[1]]
    expected, held = logits_of(given), torch.arange(155) < given["n_pages"][:, None]
    given["page_table"].masked_fill_(~held, 2**31 - 1)
    for blocks, ready in ((1, False), (2, True)):
        logits, parts = run_emulated(given, blocks, ready)
        assert logits.isnan().equal(~held[:, None].expand_as(logits))
        there = held[:, None].expand_as(logits)
        torch.testing.assert_close(logits[there].double(), expected[there], rtol=1e-3, atol=2e-3)
        for row, n_pages in enumerate(given["n_pages"].tolist()):
            mine = logits[row, :, : max(n_pages - 1, 0)].double()
            most, total = parts[row].double().unbind(-1)
            assert total.isfinite().all() and ((total == 0) == (most == -math.inf)).all()
            if not mine.shape[1]:
                assert (total == 0).all()
                continue
            assert torch.equal(most.amax(1), mine.amax(1))
            base = mine.amax(1, keepdim=True)
            together = (total * (most - base).exp2()).sum(1)
            torch.testing.assert_close(together, (mine - base).exp2().sum(1), rtol=1e-5, atol=1e-6)


@emulation
@pytest.mark.parametrize("number", range(2), ids=[str(kind) for kind in KINDS[:2]])
def test_nan_of_a_record_stays_in_its_page(number: int) -> None:
    given = make(case_of(KINDS[number], (20,)), "cpu")
    given["summary"][given["page_table"][0, 3], 1, HEADER + 5] = 0x7F
    logits, parts = run_emulated(given, 1, False)
    group = KINDS[number][1]
    assert logits[0].isnan().nonzero().tolist() == [[head, 3] for head in range(group, 2 * group)]
    assert not parts.isnan().any()


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda _: True)
    for capability, expected in (((8, 6), False), ((9, 0), True)):
        monkeypatch.setattr(cuda, "capability", lambda _, found=capability: found)
        assert cuda.takes(**{name: make(case_of(KINDS[0], (4,)), "cpu")[name] for name in ("q", "summary")}) == expected
    for case in (case_of((128, 9, 6, BF16), (4,)), case_of((96, 4, 6, BF16), (4,)), case_of((128, 4, 0, BF16), (4,))):
        given = make(case, "cpu")
        assert not cuda.takes(given["q"], given["summary"])
    given = make(case_of(KINDS[0], (4,)), "cpu")
    assert not cuda.takes(given["q"].float(), given["summary"])
    # Heads are read 16 bytes at a time.
    shifted = torch.cat([given["q"], given["q"]], dim=2)[:, :, 4 : 4 + given["q"].shape[2]]
    assert not cuda.takes(shifted, given["summary"])
