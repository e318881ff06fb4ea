"""Coupled noise: what is chosen follows the dense distribution, and alike in a draft and in its verification."""

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from sglang.srt.layers import sampler
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang_cpu_platform import patches

from sglang_sparse.scheduler.speculation import sampling

DRAWS, TOKENS = 100_000, 6
PLAIN = {"temperature": 1.0, "top_k": TOP_K_ALL, "top_p": 1.0, "min_p": 0.0}
FILTERS = [{}, {"temperature": 0.6, "top_k": 3}, {"temperature": 1.4, "top_p": 0.8}, {"min_p": 0.15}]
FILTERS.append({"temperature": 1.2, "top_k": 5, "top_p": 0.9, "min_p": 0.05})
# Of the first token, and of the second one by the first.
LOGITS = torch.tensor([1.0, 0.2, -0.5, 1.5, -2.0, 0.0])
# Seeds of one request on servers of two seeds.
FIRST, OTHER = 8934281094521819012, 1443781605486676790
NEXT = torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(1)) * 1.5


@pytest.fixture(autouse=True)
def noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the CPU platform, which equals the kernel's."""
    monkeypatch.setattr(sampler, "murmur_hash32", patches.hash_noise)


def info_of(rows: Sequence[dict[str, float]]) -> Any:
    """SGLang's sampling parameters of a batch, of these of its rows; what they leave out is off."""
    fields = {name: [{**PLAIN, **row}[name] for row in rows] for name in PLAIN}
    return SimpleNamespace(
        temperatures=torch.tensor(fields["temperature"]).view(-1, 1),
        top_ks=torch.tensor(fields["top_k"], dtype=torch.int32),
        top_ps=torch.tensor(fields["top_p"]),
        min_ps=torch.tensor(fields["min_p"]),
        is_all_greedy=all(count <= 1 for count in fields["top_k"]),
        need_top_k_sampling=any(count != TOP_K_ALL for count in fields["top_k"]),
        need_top_p_sampling=any(share != 1.0 for share in fields["top_p"]),
        need_min_p_sampling=any(share > 0 for share in fields["min_p"]),
        max_top_k=None if TOP_K_ALL in fields["top_k"] else max(fields["top_k"]),
    )


def distribution(logits: torch.Tensor, temperature: float, top_k: float, top_p: float, min_p: float) -> list[float]:
    """Return the distribution that one row is sampled from, computed token by token."""
    weights = (logits.double() / temperature).softmax(-1).tolist()
    ordered = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
    before, kept = 0.0, [0.0] * len(weights)
    for rank, token in enumerate(ordered):
        if rank < top_k and before <= top_p and weights[token] >= min_p * weights[ordered[0]]:
            kept[token] = weights[token]
        before += weights[token]
    return [weight / sum(kept) for weight in kept]


def draw(logits: torch.Tensor, position: int, filters: dict[str, float], seeds: torch.Tensor) -> torch.Tensor:
    """A token for each seed, all at one position, from ``[seeds, tokens]``."""
    info = info_of([filters])
    for name in ("temperatures", "top_ks", "top_ps", "min_ps"):
        one = getattr(info, name)
        setattr(info, name, one.expand(len(seeds), *one.shape[1:]))
    return sampling.choose(logits, torch.full_like(seeds, position), info, seeds)


def assert_follows(drawn: torch.Tensor, weights: Sequence[float]) -> None:
    """Nothing is drawn that has no weight, and the rest passes a chi-squared test."""
    counts = drawn.bincount(minlength=len(weights)).tolist()
    seen = [(count, weight) for count, weight in zip(counts, weights, strict=True) if weight]
    assert sum(count for count, _ in seen) == len(drawn)
    expected = [weight * len(drawn) for _, weight in seen]
    assert chisquare([count for count, _ in seen], expected).pvalue > 1e-3


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_first_and_second_tokens_follow_the_distribution(filters: dict[str, float], monkeypatch) -> None:
    """Both together, so that what is drawn second does not depend on the noise of the first."""
    monkeypatch.setattr(sampling, "ROWS", 4096)
    seeds = torch.arange(DRAWS)
    first = draw(LOGITS.expand(DRAWS, -1), 40, filters, seeds)
    second = draw(NEXT[first], 41, filters, seeds)
    own = {**PLAIN, **filters}
    of_first, of_second = distribution(LOGITS, **own), [distribution(row, **own) for row in NEXT]
    assert_follows(first, of_first)
    joint = [of_first[one] * of_second[one][other] for one, other in product(range(TOKENS), repeat=2)]
    assert_follows(first * TOKENS + second, joint)


@pytest.mark.parametrize(("positions", "apart"), [(1, 0), (0, 1), (7, 0), (0, 2**32), (-1, 1)], ids=str)
def test_noise_of_neighbours_is_independent(positions: int, apart: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of neighbouring positions, and of neighbouring seeds."""
    monkeypatch.setattr(sampling, "ROWS", 4096)
    count, logits = 20_000, torch.zeros(20_000, TOKENS)
    seeds = 2 * torch.arange(count)
    pairs = draw(logits, 900, {}, seeds) * TOKENS + draw(logits, 900 + positions, {}, seeds + apart)
    assert_follows(pairs, [1 / TOKENS**2] * TOKENS**2)


def test_a_mixed_batch_chooses_as_each_row_alone() -> None:
    """More rows than one turn takes; greedy rows take the best token, the first one of equals."""
    generator = torch.Generator().manual_seed(0)
    rows = [*FILTERS, {"top_k": 1}] * 20
    logits = torch.randn(len(rows), 300, generator=generator) * 3
    logits[5, [17, 250]] = 50.0
    positions = torch.randint(0, 10_000, (len(rows),), generator=generator)
    seeds = torch.randint(-(2**62), 2**62, (len(rows),), generator=generator)
    chosen = sampling.choose(logits, positions, info_of(rows), seeds)
    for row, filters in enumerate(rows):
        one = slice(row, row + 1)
        alone = sampling.choose(logits[one], positions[one], info_of([filters]), seeds[one])
        assert alone.item() == chosen[row].item(), filters
        if filters.get("top_k") == 1:
            assert chosen[row] == logits[row].argmax()
    assert chosen[5] == 17 and len(set(chosen.tolist())) > 20


def test_a_verification_chooses_as_the_drafts_of_its_positions() -> None:
    rows, width = [*FILTERS, {"top_k": 1}], 7
    logits = torch.randn(len(rows), width, 200, generator=torch.Generator().manual_seed(2)) * 3
    positions = torch.tensor([5, 900, 31, 77, 12_000, 64])[:, None] + torch.arange(width)
    seeds, info = torch.arange(len(rows)) * 977, info_of(rows)
    verified = sampling.choose(logits.flatten(0, 1), positions.flatten(), info, seeds, width).view(len(rows), width)
    for step in range(width):
        drafted = sampling.choose(logits[:, step], positions[:, step], info, seeds)
        assert torch.equal(drafted, verified[:, step])


def test_what_is_masked_is_never_chosen() -> None:
    """By a grammar: all but one token."""
    logits = torch.full((64, 50), -torch.inf)
    logits[:, 33] = -4.0
    chosen = draw(logits, 3, {"temperature": 2.0, "top_p": 0.7}, torch.arange(64))
    assert chosen.tolist() == [33] * 64


def test_rows_that_are_all_greedy_need_no_seeds() -> None:
    logits = torch.randn(3, 40)
    assert torch.equal(sampling.choose(logits, torch.arange(3), info_of([{"top_k": 1}] * 3), None), logits.argmax(-1))


def test_a_request_without_a_seed_has_one_of_its_name() -> None:
    """In any process, whatever its hashes are."""
    assert [sampling.seed_of("row-1", 7), sampling.seed_of("row-1", 8)] == [FIRST, OTHER]
    requests: list[Any] = [
        SimpleNamespace(rid=rid, sampling_params=SimpleNamespace(sampling_seed=seed))
        for rid, seed in (("row-1", None), ("row-1", 5), ("row-2", -3), ("row-2", None), ("row-1", 0))
    ]
    found = sampling.seeds_of(requests, 7, torch.device("cpu")).tolist()
    assert found == [FIRST, 5, -3, sampling.seed_of("row-2", 7), 0] and len(set(found)) == 5
    assert all(0 <= sampling.seed_of(f"row-{row}", 7) < 2**63 for row in range(100))
