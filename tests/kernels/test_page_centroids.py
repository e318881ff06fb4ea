"""Page centroids: reference against loops, Triton against the reference, and what they are of."""

from typing import Any

import pytest
import torch

from sglang_sparse_kernels.common.testing import seeded
from sglang_sparse_kernels.page_centroids import SCALE, count_of, record_bytes, reference, update_page_centroids
from sglang_sparse_kernels.page_centroids.cases import BF16, CASES, Case, make


def run_reference(arguments: dict[str, Any]) -> torch.Tensor:
    records = arguments["records"][0].clone()
    rest = arguments["last_slots"], arguments["page_size"]
    reference.update_page_centroids(arguments["k_caches"], [records], *rest)
    return records


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
    """The first within float8's roundings, the others within half a step of their difference from it."""
    arguments = make(case, "cpu")
    records = run_reference(arguments)
    found, touched = reference.unpack(records, case.dim).double(), []
    for last in arguments["last_slots"].tolist():
        if last < 0:
            continue
        page = last // case.page_size
        touched.append(page)
        keys = arguments["k_caches"][0].double()[page * case.page_size : last + 1]
        for head in range(case.heads):
            expected, got = centroids_of(keys[:, head], case.count), found[page, head]
            torch.testing.assert_close(got[0], expected[0], rtol=2.0**-4, atol=float(expected.abs().max()) * 2.0**-17)
            apart = (expected[1:] - got[:1]).abs().amax(1, keepdim=True)
            assert ((got - expected)[1:].abs() <= apart * (1.25 / 14) + 1e-5).all()
    untouched = [page for page in range(records.shape[0]) if page not in touched]
    assert not records[untouched].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_the_reference(case: Case, device: str) -> None:
    """But for the last bit of a mean, whose sums run in another order, and what it makes of a level or a step."""
    arguments = make(case, device)
    expected = run_reference(arguments)
    update_page_centroids(**arguments)
    got = arguments["records"][0]
    assert not arguments["overflow"].item()
    assert (got != expected).float().mean() < 0.01
    one, other = (reference.unpack(records, case.dim) for records in (got, expected))
    apart = (one - other).abs() / other.abs().amax(-1, keepdim=True).clamp_min(1e-3)
    assert not apart.numel() or apart.amax() < 0.3


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_no_key_is_too_large(implementation: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of keys that are a power of two larger differs by its scale alone."""
    if implementation == "reference":
        monkeypatch.setenv("SGLANG_SPARSE_REFERENCE", "1")
    keys = torch.randn(16, 1, 64, device=device, generator=seeded(device, 0))
    found = []
    for factor in (1.0, 2.0**40, 2.0**-40, 0.0):
        records = torch.zeros(1, 1, record_bytes(4, 64), device=device, dtype=torch.uint8)
        update_page_centroids([keys * factor], [records], torch.tensor([15], device=device), 16)
        found.append(records)
    assert [int(records[0, 0, SCALE] - found[0][0, 0, SCALE]) for records in found[1:3]] == [40, 256 - 40]
    assert not reference.unpack(found[3], 64).any()
    for records in found:
        records[..., SCALE] = 0
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_the_size_of_a_record() -> None:
    """Six centroids take no more than minimum and maximum in bfloat16."""
    assert [record_bytes(6, dim) for dim in (64, 80, 128)] == [256, 320, 512]
    assert all(
        count_of(record_bytes(count, dim), dim) == count for count in range(1, 9) for dim in (32, 64, 80, 96, 128, 256)
    )


def test_layers_are_written_in_one_launch(device: str) -> None:
    layers = [make(CASES[0], device, seed) for seed in range(3)]
    shared = {name: layers[0][name] for name in ("last_slots", "page_size", "overflow")}
    alone = [dict(layer, **shared, records=[layer["records"][0].clone()]) for layer in layers]
    together = {name: [layer[name][0] for layer in layers] for name in ("k_caches", "records")}
    update_page_centroids(**together, **shared)
    for layer, records in zip(alone, together["records"], strict=True):
        update_page_centroids(**layer)
        assert torch.equal(layer["records"][0], records)


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
    records = torch.zeros(2, 1, record_bytes(4, 64), device=device, dtype=torch.uint8)
    update_page_centroids([k_cache], [records], torch.tensor([29, -1], device=device), 16)
    kept = reference.unpack(records, 64)[1, 0]
    assert ((kept - 3.0).abs() < 0.3).all(1).sum() == 1 and kept.abs().amax() < 3.3
    assert not records[0].any()


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_fewer_kinds_of_keys_than_centroids(implementation: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if implementation == "reference":
        monkeypatch.setenv("SGLANG_SPARSE_REFERENCE", "1")
    k_cache = torch.full((16, 1, 64), 2.0, device=device, dtype=BF16)
    k_cache[5] = 6.0
    records = torch.zeros(1, 1, record_bytes(4, 64), device=device, dtype=torch.uint8)
    update_page_centroids([k_cache], [records], torch.tensor([7], device=device), 16)
    # Seven of one kind, one of the other, and twice the mean of all; steps are rounded up.
    kept = reference.unpack(records, 64)[0, 0, :, 0].tolist()
    assert kept == pytest.approx([2.0, 6.0, 2.5, 2.5], abs=0.5) and kept[0] == 2.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"records": [torch.zeros(4, 2, 250, dtype=torch.uint8)]},
            r"one of \[96, .* bytes a page and head, got 250",
        ),
        ({"records": [torch.zeros(4, 2, 240)]}, "got torch.float32"),
        ({"records": []}, "must be as many, got 1 and 0"),
        ({"page_size": 3}, "page_size"),
        ({"k_caches": [torch.zeros(64, 2, 65, dtype=BF16)]}, "head_dim must be even and at least 32, got 65"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments = {
        "k_caches": [torch.zeros(64, 2, 64, dtype=BF16)],
        "records": [torch.zeros(4, 2, 240, dtype=torch.uint8)],
        "last_slots": torch.tensor([3]),
        "page_size": 16,
    }
    with pytest.raises(ValueError, match=message):
        update_page_centroids(**arguments | change)
