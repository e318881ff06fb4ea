"""Page votes: reference against loops, Triton against the reference, and what a head alone looks for."""

from typing import Any

import pytest
import torch

from sglang_sparse_kernels.page_centroids import HEADER
from sglang_sparse_kernels.page_centroids.reference import pack, unpack
from sglang_sparse_kernels.page_vote import cuda, page_vote, reference, scratch_bytes, select_by_votes
from sglang_sparse_kernels.page_vote.cases import BF16, CASES, FP8, Case, make


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
