"""Attention over generated tensors is what was planted in them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.lab.structured import generator
from eval.lab.structured.generator import (
    gqa_structure,
    make_decode,
    make_mla,
    make_mla_decode,
    make_qkv,
    mla_structure,
    read_recipe,
)
from eval.lab.structured.structure import BACKGROUND, PARTS, SINK, STRIPE, Recipe, Structure, block_mass, chirps

Q_HEADS, KV_HEADS = 8, 2
# Numbers of a prompt, from before there were levels.
EARLIER = [-0.46847, -2.18435, -1.17488, -1.10154, -0.32709, -1.60803, -2.48108, 1.53815, -0.84436, 0.22269]


def attention(q: torch.Tensor, k: torch.Tensor, position: int, scale: float) -> torch.Tensor:
    """Softmax weights ``[kv_heads, group, position + 1]`` of the query at a position."""
    query = q[position].float().unflatten(0, (k.shape[1], -1))
    return (scale * torch.einsum("hgd,thd->hgt", query, k[: position + 1].float())).softmax(-1)


def measured(weights: torch.Tensor, structure: Structure, position: int) -> torch.Tensor:
    """Mass of each part, ``[kv_heads, group, 4]``."""
    parts = structure.parts(position)[:, None].expand_as(weights)
    return weights.new_zeros(*weights.shape[:2], len(PARTS)).scatter_add_(2, parts, weights)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("tokens", "band_tokens"), [(512, 64), (1024, 64), (2048, 128)])
def test_mass_is_the_recipe_s(tokens: int, band_tokens: int, head_dim: int) -> None:
    recipe = Recipe(sink=0.25, band=0.35, stripes=0.28, background=0.12, band_tokens=band_tokens, stripe_ratio=0.03)
    structure = gqa_structure(tokens, KV_HEADS, head_dim, recipe, seed=1)
    q, k, _ = make_qkv(tokens, Q_HEADS, KV_HEADS, head_dim, recipe, seed=1)
    want = torch.tensor([recipe.sink, recipe.band, recipe.stripes, recipe.background])
    for position in (tokens // 4, tokens // 2, tokens - 1):
        torch.testing.assert_close(structure.mass(position), want.expand(KV_HEADS, -1), atol=2e-3, rtol=0)
        weights = attention(q, k, position, head_dim**-0.5)
        mass = measured(weights, structure, position)
        # Noise is no more than a sample of some hundred logits; a head's differs more than their mean.
        assert (mass.mean((0, 1)) - want).abs().max() < 0.04 and (mass - want).abs().max() < 0.09
        share = structure.blocks_at_recall(position, 0.8)
        best = block_mass(weights.mean(1), 16).sort(-1, descending=True).values.cumsum(-1)
        assert share.max() < 0.6 and torch.equal((best >= 0.8).any(-1), torch.ones(KV_HEADS, dtype=torch.bool))
        assert ((best < 0.8).sum(-1) + 1 - share * best.shape[1]).abs().max() < 2.5


def test_without_noise_the_mass_is_exact_and_a_chunk_is_no_border(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(noise=0, band_tokens=64)
    q, k, v = make_qkv(1500, Q_HEADS, KV_HEADS, 64, recipe, dtype=torch.float32)
    structure = gqa_structure(1500, KV_HEADS, 64, recipe)
    for position in (0, 3, 5, 40, 63, 64, 200, 959, 1499):
        mass = measured(attention(q, k, position, 64**-0.5), structure, position)
        torch.testing.assert_close(mass, structure.mass(position)[:, None].expand_as(mass), atol=1e-4, rtol=0)
    assert structure.mass(0).tolist() == [[1, 0, 0, 0]] * KV_HEADS
    # With sinks and a band alone they share by their ratio, here 1 to 1.
    assert structure.mass(5)[:, :2].sum(-1).min() > 0.999 and structure.mass(5)[0, 0] == pytest.approx(0.5, abs=1e-4)
    monkeypatch.setattr(generator, "CHUNK", 1000)
    again = make_qkv(1500, Q_HEADS, KV_HEADS, 64, recipe, dtype=torch.float32)
    torch.testing.assert_close(again[0], q)
    rows = structure.kind.T == SINK
    torch.testing.assert_close(again[1][rows], k[rows])
    assert torch.equal(again[2], v)


def test_the_seed_decides_and_decode_has_the_same_cache() -> None:
    recipe = Recipe(band_tokens=64)
    first, again = (make_qkv(300, 4, 2, 64, recipe, seed=5, v_head_dim=32) for _ in range(2))
    other = make_qkv(300, 4, 2, 64, recipe, seed=6, v_head_dim=32)
    assert [tensor.shape for tensor in first] == [(300, 4, 64), (300, 2, 64), (300, 2, 32)]
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in zip(first, again, other, strict=True))
    q, k, v = make_decode(300, 4, 2, 64, recipe, seed=5, v_head_dim=32)
    assert torch.equal(k, first[1]) and torch.equal(v, first[2]) and q.shape == (4, 64)
    mass = measured(attention(q.expand(300, -1, -1), k, 299, 64**-0.5), gqa_structure(300, 2, 64, recipe, 5), 299)
    assert (mass.mean((0, 1)) - torch.tensor([0.3, 0.3, 0.3, 0.1])).abs().max() < 0.06


def test_long_sequences_need_no_attention_matrix() -> None:
    structure = gqa_structure(131072, 2, 128, Recipe())
    assert structure.gram.shape == (1024, 1024)
    for position in (8191, 131071):
        torch.testing.assert_close(
            structure.mass(position), torch.tensor([[0.3, 0.3, 0.3, 0.1]] * 2), atol=1e-3, rtol=0
        )
    # What 16-token blocks can leave out depends on how the stripes lie.
    share = structure.blocks_at_recall(131071, 0.9).max()
    runs = gqa_structure(131072, 2, 128, Recipe(stripe_run=16))
    assert runs.blocks_at_recall(131071, 0.9).max() < 0.03 < share < 0.2


def test_stripes_lie_in_runs_elsewhere_for_each_head() -> None:
    kind = gqa_structure(4096, 3, 64, Recipe(stripe_ratio=0.05, stripe_run=8, sink_tokens=10)).kind
    assert (kind[:, :10] == SINK).all() and not (kind[:, 10:] == SINK).any()
    stripes = (kind == STRIPE).unflatten(1, (-1, 8))
    assert torch.equal(stripes.any(-1), stripes.all(-1)) and stripes.all(-1).sum(-1).tolist() == [26] * 3
    assert not torch.equal(stripes[0], stripes[1])


@pytest.mark.parametrize("dims", [20, 64, 128, 512])
def test_codes_of_blocks_hardly_correlate(dims: int) -> None:
    codes = chirps(min((dims // 8) ** 3, 700), dims)
    p = codes.shape[1] // 2
    gram = codes @ codes.T
    torch.testing.assert_close(gram.diagonal(), torch.ones(len(codes)))
    assert gram.fill_diagonal_(0).abs().max() <= 2 / p**0.5 + 1e-5 and 2 * p <= dims // 2


LEVELS = {"head_level": 2.0, "block_level": 1.0}


def all_logits(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """``[q_heads, queries, keys]``, later keys too."""
    return scale * torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))


@pytest.mark.parametrize("mla", [False, True])
def test_a_level_shifts_all_logits_of_a_query(mla: bool) -> None:
    recipe = Recipe(noise=0, band_tokens=64, **LEVELS)
    without = Recipe(noise=0, band_tokens=64)
    if mla:
        structure, scale = mla_structure(500, recipe, 3), 192**-0.5
        (q, k), (plain_q, plain_k) = (make_mla(500, 4, r, scale, 3, dtype=torch.float32) for r in (recipe, without))
        last, _ = make_mla_decode(500, 4, recipe, scale, 3, dtype=torch.float32)
    else:
        structure, scale = gqa_structure(500, KV_HEADS, 64, recipe, 3), 64**-0.5
        made = (make_qkv(500, 4, KV_HEADS, 64, r, 3, dtype=torch.float32) for r in (recipe, without))
        (q, k, _), (plain_q, plain_k, _) = made
        last, *_ = make_decode(500, 4, KV_HEADS, 64, recipe, 3, dtype=torch.float32)
    logits, plain = all_logits(q, k, scale), all_logits(plain_q, plain_k, scale)
    shift = structure.levels(4).repeat_interleave(32, 1)[:, :500, None]
    torch.testing.assert_close(logits, plain + shift, atol=1e-3, rtol=0)
    torch.testing.assert_close(logits.softmax(-1), plain.softmax(-1), atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(last, q[-1])
    # Every block of every head has another one.
    assert len(structure.levels(4).unique()) == 4 * 16


def test_the_theory_does_not_see_the_level() -> None:
    recipe = Recipe(band_tokens=64, stripe_ratio=0.03, **LEVELS)
    plain = gqa_structure(1024, KV_HEADS, 64, Recipe(band_tokens=64, stripe_ratio=0.03), seed=1)
    structure = gqa_structure(1024, KV_HEADS, 64, recipe, seed=1)
    q, k, _ = make_qkv(1024, Q_HEADS, KV_HEADS, 64, recipe, seed=1, dtype=torch.float32)
    logits = all_logits(q, k, 64**-0.5).unflatten(0, (KV_HEADS, -1))
    levels = structure.levels(Q_HEADS).unflatten(0, (KV_HEADS, -1))
    for position in (300, 1023):
        assert torch.equal(structure.logits(position), plain.logits(position))
        assert torch.equal(structure.blocks_at_recall(position, 0.8), plain.blocks_at_recall(position, 0.8))
        mass = measured(attention(q, k, position, 64**-0.5), structure, position)
        assert (mass.mean((0, 1)) - structure.mass(position)[0]).abs().max() < 0.04
        # What the definition says of a query, and its level, are what its logits are, but for the noise.
        expected = structure.logits(position)[:, None] + levels[..., position // 32, None]
        assert ((logits[..., position, : position + 1] - expected).mean(-1) + recipe.noise**2 / 2).abs().max() < 0.05


def test_levels_spread_as_asked() -> None:
    levels = gqa_structure(100_000, 1, 64, Recipe(**LEVELS), seed=4).levels(200)
    assert levels.shape == (200, 782) and levels.mean(1).std().item() == pytest.approx(2, rel=0.1)
    assert levels.std(1).mean().item() == pytest.approx(1, rel=0.01)
    other = gqa_structure(100_000, 1, 64, Recipe(**LEVELS), seed=5).levels(200)
    assert not torch.equal(levels, other)


def test_without_a_level_the_tensors_are_those_of_earlier_results() -> None:
    q, k, _ = make_qkv(300, 4, 2, 64, Recipe(band_tokens=64), seed=5, dtype=torch.float32)
    found = torch.cat([q[299, 3, :4], k[299, 1, :4], k[0, 0, :2]])
    torch.testing.assert_close(found, torch.tensor(EARLIER), atol=1e-4, rtol=0)


def test_mla_shows_its_structure_in_the_rope_dimensions() -> None:
    scale = 192**-0.5
    for rope_share, low, high in ((1.0, 0.9999, 1.0001), (0.9, 0.99, 0.9999), (0.0, 0.0, 0.5)):
        recipe = Recipe(band_tokens=64, stripe_ratio=0.03, rope_share=rope_share)
        q, k = make_mla(1024, 8, recipe, scale, seed=2)
        structure = mla_structure(1024, recipe, seed=2)
        assert q.shape == (1024, 8, 576) and k.shape == (1024, 1, 576)
        full = attention(q, k, 1023, scale)
        mass = measured(full, structure, 1023).mean((0, 1))
        assert (mass - torch.tensor([0.3, 0.3, 0.3, 0.1])).abs().max() < 0.04
        rope = attention(q[..., 512:], k[..., 512:], 1023, scale)
        assert low <= torch.cosine_similarity(full.mean(1), rope.mean(1)).item() <= high


def test_mla_decode_has_the_last_query_and_the_same_cache() -> None:
    sizes: dict[str, Any] = {"latent": 64, "rope": 32, "seed": 3, "dtype": torch.float32}
    recipe = read_recipe({"band_tokens": 64, "noise": 0})
    q, k = make_mla(300, 4, recipe, 0.1, **sizes)
    last, same = make_mla_decode(300, 4, recipe, 0.1, **sizes)
    torch.testing.assert_close(last, q[-1])
    assert same.equal(k)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 200),
    band=st.integers(1, 100),
    sinks=st.integers(1, 60),
    run=st.integers(1, 20),
    ratio=st.floats(0.001, 0.9),
)
def test_every_position_has_a_whole_distribution(tokens: int, band: int, sinks: int, run: int, ratio: float) -> None:
    recipe = Recipe(band_tokens=2 * band, sink_tokens=sinks, stripe_run=run, stripe_ratio=ratio)
    structure = gqa_structure(tokens, 1, 64, recipe)
    q, k, _ = make_qkv(tokens, 2, 1, 64, recipe)
    assert q.isfinite().all() and k.isfinite().all()
    shares = torch.tensor([recipe.sink, recipe.band, recipe.stripes, recipe.background])
    for position in {0, tokens // 3, tokens - 1}:
        present = torch.zeros(4).index_fill_(0, structure.parts(position).unique(), 1)
        if present[BACKGROUND]:
            # A few tokens of background can all lie in blocks that a code favours, which the straight line misses.
            torch.testing.assert_close(
                structure.mass(position)[0], shares * present / (shares @ present), atol=0.02, rtol=0
            )
        assert structure.mass(position).sum().item() == pytest.approx(1, abs=1e-4)
        assert ((structure.mass(position)[0] > 0) == (present > 0)).all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sink": 0.5}, "must add up to 1, got 1.2"),
        ({"sinks": 0.5}, "sinks: Extra inputs are not permitted, got 0.5; its fields are sink, band, stripes"),
        ({"band_tokens": 3}, "band_tokens: Input should be a multiple of 2, got 3"),
        ({"head_level": -1}, "head_level: Input should be greater than or equal to 0, got -1"),
        ({"noise": float("inf")}, "noise: Input should be a finite number, got inf"),
    ],
)
def test_wrong_recipes(data: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_recipe(data)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((64, 4, 2, 16), "at least 20 dimensions, got 16"),
        ((64, 3, 2, 64), "q_heads must be a multiple of the 2 KV heads, got 3"),
        ((0, 4, 2, 64), "must be positive, got 0 and 2"),
        ((200, 4, 2, 20), "codes for 125 blocks, needed are 200: raise band_tokens"),
    ],
)
def test_wrong_sizes(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_qkv(*sizes, Recipe(band_tokens=2))
