"""The lightning indexer against a naive one, its rounding, its choice and what it is taught."""

import pytest
import torch
from torch import Tensor

from eval.lab.train.indexer import Indexer, chosen, hadamard, index_scores, lesson, quantised


def slow_hadamard(x: list[float]) -> list[float]:
    """Fast Walsh-Hadamard transform of one vector."""
    x, step = list(x), 1
    while step < len(x):
        for i in range(len(x)):
            if not i & step:
                x[i], x[i | step] = x[i] + x[i | step], x[i] - x[i | step]
        step *= 2
    return [value * len(x) ** -0.5 for value in x]


def slow_vector(x: Tensor, position: int) -> Tensor:
    """RoPE of dimension i with i + 32 for i below 32, then the transform; x (128,) float64."""
    turned = x.clone()
    for i in range(32):
        angle = torch.tensor(position * 1e6 ** (-i / 32), dtype=torch.float64)
        turned[i] = x[i] * angle.cos() - x[i + 32] * angle.sin()
        turned[i + 32] = x[i + 32] * angle.cos() + x[i] * angle.sin()
    return torch.tensor(slow_hadamard(turned.tolist()), dtype=torch.float64)


def rounded(x: Tensor, power: bool) -> tuple[Tensor, Tensor]:
    scale = max(float(x.abs().max()), 1e-4) / 448
    scale = 2.0 ** torch.tensor(scale).log2().ceil() if power else torch.tensor(scale)
    return (x / scale).float().clamp(-448, 448).to(torch.float8_e4m3fn).double(), scale.double()


def test_indexer_is_what_a_naive_one_computes() -> None:
    torch.manual_seed(3)
    indexer = Indexer(256, 192).double()
    torch.nn.init.uniform_(indexer.k_norm.weight, 0.5, 1.5)
    torch.nn.init.normal_(indexer.k_norm.bias)
    h, latent, places = torch.randn(6, 256).double(), torch.randn(6, 192).double(), torch.arange(6) * 977
    angle = places[:, None] * 1e6 ** (-torch.arange(32).double() / 32)
    made = indexer.queries(h[None], latent[None], angle.cos(), angle.sin())
    keys, scale = indexer.keys(h[None], angle.cos(), angle.sin())
    mine = index_scores(*made, keys, scale)[0]
    for t in range(6):
        gates = indexer.weights_proj.weight @ h[t]
        for s in range(t + 1):
            k = indexer.wk.weight @ h[s]
            k = (k - k.mean()) / (k.var(unbiased=False) + 1e-6).sqrt() * indexer.k_norm.weight + indexer.k_norm.bias
            k8, k_scale = rounded(slow_vector(k.detach(), int(places[s])), power=False)
            score = torch.zeros((), dtype=torch.float64)
            for head in range(32):
                q = indexer.wq_b.weight[128 * head : 128 * head + 128] @ latent[t]
                q8, q_scale = rounded(slow_vector(q.detach(), int(places[t])), power=True)
                score += gates[head] * 32**-0.5 * q_scale * 128**-0.5 * (q8 @ k8).clamp(min=0)
            torch.testing.assert_close(mine[t, s].double(), score * k_scale, atol=2e-3, rtol=2e-3)


def test_rounding_is_e4m3_with_a_scale_per_vector_and_passes_the_gradient() -> None:
    x = torch.randn(5, 128) * torch.tensor([1e-9, 0.01, 1, 50, 1e4])[:, None]
    for power in (True, False):
        values, scale = quantised(x, power)
        assert torch.equal(values, values.to(torch.float8_e4m3fn).float()) and values.abs().max() <= 448
        torch.testing.assert_close(values[1:] * scale[1:], x[1:], rtol=2**-4, atol=float(x[4].abs().max()) * 2**-9)
        assert float(scale[0]) == pytest.approx(2.0**-22 if power else 1e-4 / 448)
    assert torch.equal(quantised(x, True)[1].log2(), quantised(x, True)[1].log2().round())
    leaf = x[2].clone().requires_grad_()
    values, scale = quantised(leaf, True)
    (values * scale).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, torch.ones(128))
    product = hadamard(128) @ hadamard(128)
    assert torch.equal(product, 128 * torch.eye(128))


def test_choice_is_causal_and_of_the_right_size() -> None:
    later = torch.arange(20) > torch.arange(20)[:, None]
    mask = chosen(torch.randn(2, 20, 20), later, 6)
    assert not (mask & later).any()
    assert mask.sum(-1).tolist() == [[min(6, t + 1) for t in range(20)]] * 2


def test_lesson_is_the_divergence_from_the_mean_of_the_heads() -> None:
    torch.manual_seed(4)
    scores, full = torch.randn(1, 1, 8, requires_grad=True), torch.randn(1, 3, 1, 8)
    later = torch.arange(8) > 5
    picked = chosen(scores, later, 4)
    for restrict, seen in ((False, ~later), (True, picked[0, 0])):
        divergence, mass = lesson(scores, full, later.view(1, 1, 8), picked, restrict)
        target = full[0, :, 0, seen].softmax(-1).mean(0)
        guess = scores[0, 0, seen].softmax(-1)
        torch.testing.assert_close(divergence, (target * (target / guess).log()).sum())
        (gradient,) = torch.autograd.grad(divergence, scores)
        torch.testing.assert_close(gradient[0, 0, seen], (guess - target).detach())
        assert not gradient[0, 0, ~seen].any()
        dense = full[0, :, 0, :6].softmax(-1).mean(0)
        torch.testing.assert_close(mass, dense[picked[0, 0, :6]].sum())


def test_rounding_changes_few_of_the_chosen_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    indexer, t = Indexer(256, 192), 256
    h, latent, angle = torch.randn(1, t, 256), torch.randn(1, t, 192), torch.zeros(t, 32)
    later = torch.arange(t) > torch.arange(t)[:, None]

    def choice() -> Tensor:
        rows = indexer.queries(h, latent, angle.cos(), angle.sin())
        return chosen(index_scores(*rows, *indexer.keys(h, angle.cos(), angle.sin())), later, 64)

    with torch.no_grad():
        rounded_choice = choice()
        monkeypatch.setattr(
            "eval.lab.train.indexer.quantised", lambda x, power_of_two: (x, torch.ones_like(x[..., :1]))
        )
        both = (choice() & rounded_choice).sum() / rounded_choice.sum()
    assert 0.95 < both < 1
