"""FlashInfer's block-sparse peer: the best blocks, what its plan takes, and what is asked of it; no GPU is needed."""

import inspect
from typing import Any

import flashinfer
import pytest
import torch

from eval.lab.kernels import prefill_blocks, prefill_inputs
from eval.lab.kernels.prefill import with_equal_recall
from eval.lab.kernels.prefill_blocks import best_blocks, block_sizes, flashinfer_blocks, plan_bytes
from eval.lab.kernels.prefill_inputs import Prompt, Shape
from eval.lab.structured.generator import read_recipe

SHAPE = Shape(600, 256, q_heads=4, kv_heads=2, dim=64, block_size=64)
BLOCKS = 10
Real: Any = flashinfer.VariableBlockSparseAttentionWrapper


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return Prompt(SHAPE, read_recipe({"band_tokens": 64}), "cpu")


def weights(prompt: Prompt) -> torch.Tensor:
    """Exact attention, ``[q_heads, length, length]``."""
    q, k = (part.float().transpose(0, 1) for part in (prompt.q, prompt.k))
    logits = q @ k.repeat_interleave(2, 0).transpose(1, 2) * prompt.scale
    return logits.masked_fill(torch.ones(600, 600).triu(1).bool(), float("-inf")).softmax(-1)


def test_mass_of_blocks_is_exact_in_strips_of_any_size(prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    padded = torch.nn.functional.pad(weights(prompt), (0, 40, 0, 40))
    exact = padded.view(2, 2, BLOCKS, 64, BLOCKS, 64).sum((1, 3, 5))
    assert torch.allclose(prompt.block_mass, exact, rtol=1e-4)
    assert prompt.block_mass.sum() == pytest.approx(4 * 600, rel=1e-4)
    monkeypatch.setattr(prefill_inputs, "STRIP", 1)
    assert torch.allclose(Prompt(SHAPE, read_recipe({"band_tokens": 64}), "cpu").block_mass, exact, rtol=1e-4)


def pairs(mask: torch.Tensor) -> int:
    tokens = mask.repeat_interleave(64, 1).repeat_interleave(64, 2)[:, :600, :600]
    return int((tokens & torch.ones(600, 600).tril().bool()).sum())


@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.6])
def test_the_best_blocks_of_a_sparsity(prompt: Prompt, sparsity: float) -> None:
    mass = prompt.block_mass
    mask = best_blocks(mass, SHAPE, sparsity)
    assert mask[:, :, 0].all() and mask.diagonal(dim1=1, dim2=2).all() and not mask.triu(1).any()
    allowed = (1 - sparsity) * 2 * 600 * 601 / 2
    assert 0 <= allowed - pairs(mask) < 64 * 64
    # Nothing that was left out holds more than something that was taken.
    free = torch.ones(BLOCKS, BLOCKS).tril(-1).bool()
    free[:, 0] = False
    whole = free.clone()
    whole[-1] = False
    left, taken = (mass[whole & chosen] for chosen in (~mask, mask))
    assert left.max() <= taken.min()
    assert best_blocks(mass, SHAPE, sparsity).equal(mask)


def test_everything_and_too_little() -> None:
    mass = torch.zeros(2, BLOCKS, BLOCKS)
    assert best_blocks(mass, SHAPE, 0.0).equal(torch.ones(BLOCKS, BLOCKS).tril().bool().expand(2, -1, -1))
    with pytest.raises(ValueError, match=r"sparsity 0\.9: the first block and the diagonal alone are more"):
        best_blocks(mass, SHAPE, 0.9)
    assert block_sizes(SHAPE).tolist() == [64] * 9 + [24]


def test_a_plan_that_takes_too_much_is_refused_beforehand(prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each of 8 KV heads and 1,024 blocks of queries has on average 512 blocks of 128 keys, of which it keeps a tenth.
    assert plan_bytes(Shape(128 * 1024), 0.9) == pytest.approx(8 * 1024 * 512 * 128 * 0.1 * 32, rel=0.01)
    monkeypatch.setattr(prefill_blocks, "PLAN_LIMIT", 2**16)
    with pytest.raises(ValueError, match=r"its plan takes 0\.0 GiB of indices, allowed are 6\.1"):
        flashinfer_blocks(prompt, 0.3)


class Wrapper:
    """FlashInfer's, as far as a CPU goes: the same signatures, and exact attention over the mask."""

    def __init__(self, *args: Any, **named: Any) -> None:
        inspect.signature(Real.__init__).bind(self, *args, **named)

    def reset_workspace_buffer(self, *args: Any, **named: Any) -> None:
        inspect.signature(Real.reset_workspace_buffer).bind(self, *args, **named)

    def plan(self, *args: Any, **named: Any) -> None:
        self.planned = inspect.signature(Real.plan).bind(self, *args, **named).arguments
        assert self.planned["block_row_sz"].dtype == torch.int32 and self.planned["causal"] is True

    def run(self, *args: Any, **named: Any) -> torch.Tensor:
        given = inspect.signature(Real.run).bind(self, *args, **named).arguments
        q, k, v = (given[name].float() for name in "qkv")
        plan = self.planned
        assert q.shape == (plan["num_qo_heads"], 600, plan["head_dim"]) and k.shape[0] == plan["num_kv_heads"]
        mask = plan["block_mask_map"]
        for dim, sizes in ((1, plan["block_row_sz"]), (2, plan["block_col_sz"])):
            mask = mask.repeat_interleave(sizes[0], dim)
        mask = (mask & torch.ones(600, 600).tril().bool()).repeat_interleave(2, 0)
        logits = q @ k.repeat_interleave(2, 0).transpose(1, 2) * plan["sm_scale"]
        return logits.masked_fill(~mask, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 0)


def test_what_is_asked_of_flashinfer(prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "VariableBlockSparseAttentionWrapper", Wrapper)
    half, all_of_it = (prompt.quality(flashinfer_blocks(prompt, sparsity)(None)) for sparsity in (0.5, 0.0))
    assert all_of_it["dense_l2"] < 1e-2 and all_of_it["recall"] > 0.999
    kept = best_blocks(prompt.block_mass, SHAPE, 0.5)
    mass = (prompt.block_mass * kept).sum() / prompt.block_mass.sum()
    assert half["recall"] == pytest.approx(mass.item(), abs=0.03) and half["recall"] < 0.98


def test_speed_at_equal_recall() -> None:
    def row(us: float, recall: float, shape: str = "1x32k", **more: Any) -> dict[str, Any]:
        return {"shape": shape, "us": us, "recall": recall, "peer": True, "setting": "x", **more}

    ours = [row(us, recall, peer=False) for us, recall in ((100.0, 0.8), (400.0, 0.9))]
    dense = row(900.0, 1.0, setting=None)
    gone = {"shape": "1x32k", "peer": True, "setting": "x", "unavailable": "no"}
    peers = [row(600.0, 0.85), row(600.0, 0.9), row(600.0, 0.95), row(600.0, 0.85, "1x64k")]
    found = with_equal_recall([*ours, dense, gone, *peers])
    # Halfway between two thresholds their geometric mean.
    assert [line.get("equal_recall") for line in found] == [None] * 4 + [
        pytest.approx(3.0),
        pytest.approx(1.5),
        None,
        None,
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu() -> None:
    prompt = Prompt(Shape(8 * 1024), read_recipe({}), "cuda")
    everything, some = (prompt.quality(flashinfer_blocks(prompt, sparsity)(None)) for sparsity in (0.0, 0.6))
    assert everything["dense_l2"] < 1e-2 and everything["recall"] > 0.99
    kept = best_blocks(prompt.block_mass, prompt.shape, 0.6)
    mass = (prompt.block_mass * kept).sum() / prompt.block_mass.sum()
    assert some["recall"] == pytest.approx(mass.item(), abs=0.03)
