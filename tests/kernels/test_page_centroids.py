"""Page centroids: reference against loops, Triton against the reference, and what they are of."""

from typing import Any

import pytest
import torch

from sglang_sparse_kernels.page_centroids import reference, update_page_centroids
from sglang_sparse_kernels.page_centroids.cases import BF16, CASES, FP8, Case, make
from sglang_sparse_kernels.testing import seeded


def run_reference(arguments: dict[str, Any]) -> tuple[torch.Tensor, int]:
    centroids, overflow = arguments["centroids"][0].clone(), arguments["overflow"].clone()
    rest = arguments["last_slots"], arguments["page_size"], overflow
    reference.update_page_centroids(arguments["k_caches"][0], centroids, *rest)
    return centroids, int(overflow)


def centroids_of(keys: torch.Tensor, count: int) -> torch.Tensor:
    """By loops in float64, ``[count, d]`` of ``[n, d]``."""
    keys = keys.double()
    seeds = [int((keys - keys.mean(0)).norm(dim=1).argmax())]
    while len(seeds) < count:
        seeds.append(int(torch.cdist(keys, keys[seeds]).min(1).values.argmax()))
    owners = torch.cdist(keys, keys[seeds]).round(decimals=9).argmin(1).tolist()
    groups = [[key for key, owner in enumerate(owners) if owner == seed] for seed in range(count)]
    groups.sort(key=lambda group: -len(group))
    return torch.stack([keys[group].mean(0) if group else keys.mean(0) for group in groups])


@pytest.mark.parametrize("case", [case for case in CASES if not case.gpu_only], ids=str)
def test_reference_is_the_means_of_the_nearest_keys(case: Case) -> None:
    arguments = make(case, "cpu")
    found, overflow = run_reference(arguments)
    touched, step = [], 2.0**-4 if case.summary_dtype == FP8 else 2.0**-8
    for last in arguments["last_slots"].tolist():
        if last < 0:
            continue
        page = last // case.page_size
        touched.append(page)
        keys = arguments["k_caches"][0].double()[page * case.page_size : last + 1]
        for head in range(case.heads):
            expected = centroids_of(keys[:, head], case.count)
            outside = (expected.abs() > 448) & (case.summary_dtype == FP8)
            got = found[page, head].double()
            assert torch.equal(got.isnan(), outside)
            torch.testing.assert_close(got[~outside], expected[~outside], rtol=step, atol=2.0**-10 + 1e-5)
    assert overflow == found.float().isnan().sum()
    untouched = [page for page in range(found.shape[0]) if page not in touched]
    assert not found[untouched].float().any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_the_reference(case: Case, device: str) -> None:
    """But for the last bit of a mean, whose sums run in another order."""
    arguments = make(case, device)
    expected, overflow = run_reference(arguments)
    update_page_centroids(**arguments)
    step = 2.0**-3 if case.summary_dtype == FP8 else 2.0**-7
    got = arguments["centroids"][0].float()
    torch.testing.assert_close(got, expected.float(), rtol=step, atol=2.0**-9, equal_nan=True)
    if case.summary_dtype == FP8:
        assert (got != expected.float()).float().mean() < 0.01
    assert arguments["overflow"].item() == overflow


def test_layers_are_written_in_one_launch(device: str) -> None:
    layers = [make(CASES[0], device, seed) for seed in range(3)]
    shared = {name: layers[0][name] for name in ("last_slots", "page_size", "overflow")}
    alone = [dict(layer, **shared, centroids=[layer["centroids"][0].clone()]) for layer in layers]
    together = {name: [layer[name][0] for layer in layers] for name in ("k_caches", "centroids")}
    update_page_centroids(**together, **shared)
    for layer, centroids in zip(alone, together["centroids"], strict=True):
        update_page_centroids(**layer)
        assert torch.equal(layer["centroids"][0].view(torch.uint8), centroids.view(torch.uint8))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_key_that_stands_apart_is_kept_as_it_is(
    implementation: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation == "reference":
        monkeypatch.setenv("SGLANG_SPARSE_REFERENCE", "1")
    k_cache = torch.randn(32, 1, 64, device=device, generator=seeded(device, 0)).mul(0.1).to(BF16)
    k_cache[21] = 3.0
    # Behind the page's last token: another's.
    k_cache[30:] = -50.0
    centroids = torch.zeros(2, 1, 4, 64, device=device).to(FP8)
    update_page_centroids([k_cache], [centroids], torch.tensor([29, -1], device=device), 16)
    kept = centroids[1, 0].float()
    assert (kept == 3.0).all(1).sum() == 1 and kept.abs().amax() == 3.0
    assert not centroids[0].float().any()


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_fewer_kinds_of_keys_than_centroids(implementation: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if implementation == "reference":
        monkeypatch.setenv("SGLANG_SPARSE_REFERENCE", "1")
    k_cache = torch.full((16, 1, 64), 2.0, device=device, dtype=BF16)
    k_cache[5] = 6.0
    centroids = torch.zeros(1, 1, 4, 64, device=device, dtype=BF16)
    update_page_centroids([k_cache], [centroids], torch.tensor([7], device=device), 16)
    # Seven of one kind, one of the other, and twice the mean of all.
    assert centroids[0, 0, :, 0].tolist() == [2.0, 6.0, 2.5, 2.5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"centroids": [torch.zeros(4, 2, 9, 64, dtype=BF16)]}, "1 to 8 vectors a page"),
        ({"centroids": [torch.zeros(4, 2, 4, 64, dtype=torch.float16)]}, "got torch.float16"),
        ({"centroids": []}, "must be as many, got 1 and 0"),
        ({"page_size": 3}, "page_size"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments = {
        "k_caches": [torch.zeros(64, 2, 64, dtype=BF16)],
        "centroids": [torch.zeros(4, 2, 4, 64, dtype=BF16)],
        "last_slots": torch.tensor([3]),
        "page_size": 16,
    }
    with pytest.raises(ValueError, match=message):
        update_page_centroids(**arguments | change)
