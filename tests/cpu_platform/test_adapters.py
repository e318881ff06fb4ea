"""LoRA on the CPU platform: what adapters add to absorbed latents is what they would add to the weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_cpu_platform import adapters

HEADS, NOPE, VALUE, LATENT, SLOTS, MOST = 3, 5, 4, 16, 3, 8
# Tokens, slot and rank of each segment; slot 1 has no adapter, and what a larger one has left in slot 2 is not read.
SEGMENTS = ((4, 0, 8), (2, 1, 0), (3, 2, 2), (1, 0, 8))
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform stays inactive next to CUDA")


@pytest.fixture
def attention() -> Any:
    torch.manual_seed(0)
    tokens, slots, _ = (torch.tensor(column) for column in zip(*SEGMENTS, strict=True))
    ranks = torch.zeros(SLOTS, dtype=torch.int64)
    for _, slot, rank in SEGMENTS:
        ranks[slot] = rank
    info = SimpleNamespace(
        weight_indices_cpu=slots, seg_lens_cpu=tokens, lora_ranks_cpu=ranks, scalings_cpu=torch.tensor([0.5, 0.0, 2.0])
    )
    layer = SimpleNamespace(
        set_lora=True,
        lora_backend=SimpleNamespace(batch_info=info),
        A_buffer=torch.randn(SLOTS, MOST, LATENT),
        B_buffer=torch.randn(SLOTS, HEADS * (NOPE + VALUE), MOST),
    )
    return SimpleNamespace(kv_b_proj=layer, num_local_heads=HEADS, qk_nope_head_dim=NOPE)


def added(attention: Any) -> torch.Tensor:
    """Return the weight that each token's adapter adds to ``kv_b_proj``, ``[tokens, heads, dims, latent]``."""
    layer = attention.kv_b_proj
    scalings = layer.lora_backend.batch_info.scalings_cpu
    each = [
        (scalings[slot] * layer.B_buffer[slot, :, :rank] @ layer.A_buffer[slot, :rank]).expand(tokens, -1, -1)
        for tokens, slot, rank in SEGMENTS
    ]
    return torch.cat(each).unflatten(1, (HEADS, NOPE + VALUE))


def test_queries_and_values_have_what_the_weights_would_have(attention: Any) -> None:
    tokens, weights = sum(count for count, *_ in SEGMENTS), added(attention)
    q_nope, absorbed = torch.randn(tokens, HEADS, NOPE), torch.randn(HEADS, tokens, LATENT).transpose(0, 1)
    expected = absorbed + torch.einsum("thd,thdl->thl", q_nope, weights[:, :, :NOPE])
    torch.testing.assert_close(adapters.correct_queries(attention, q_nope, absorbed), expected)
    latents, flat = torch.randn(tokens, HEADS, LATENT), torch.randn(tokens, HEADS * VALUE)
    expected = flat + torch.einsum("thl,thdl->thd", latents, weights[:, :, NOPE:]).flatten(1)
    torch.testing.assert_close(adapters.correct_values(attention, latents, flat), expected)


def test_a_layer_without_adapters_adds_nothing(attention: Any) -> None:
    attention.kv_b_proj.set_lora = False
    flat = torch.randn(10, HEADS * VALUE)
    assert torch.equal(adapters.correct_values(attention, torch.randn(10, HEADS, LATENT), flat), flat)


def test_another_backend_is_refused() -> None:
    defaults = {"lora_backend": "csgmv"}
    args, other = (SimpleNamespace(lora_backend=name, enable_lora=True) for name in ("csgmv", "triton"))
    adapters.use_torch(args, defaults)
    assert args.lora_backend == adapters.BACKEND
    with pytest.raises(ValueError, match="--lora-backend triton"):
        adapters.use_torch(other, defaults)
