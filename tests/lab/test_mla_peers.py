"""Tests of the inputs that peers of the MLA layer benchmark get, seen by stand-ins of their libraries."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eval.lab.kernels import mla_peers
from eval.lab.kernels.mla_inputs import RECIPE, Shape, Step
from eval.lab.kernels.mla_quality import quality, samples
from eval.lab.kernels.mla_table import table
from eval.lab.structured.generator import read_recipe

# The newest page and block are partly filled, and no two sizes are equal.
SHAPE = Shape(2, 1500, heads=6, latent=64, rope=32, page_size=32, block_size=16)


def attention(q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, latent: int, scale: float) -> torch.Tensor:
    """MLA decode of one row in plain torch, ``[heads, latent]``."""
    keys = cache[slots.long()].float()
    return (q.float() @ keys.T * scale).softmax(-1) @ keys[:, :latent]


def paged(q: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, scale: float) -> Any:
    """Attend as FlashMLA and FA3 do: ``[N, H, d]`` queries over ``[pages, size, 1, d]``, value dimensions first."""
    out = []
    for row, tokens in enumerate(lengths.tolist()):
        slots = (table[row, :, None] * pages.shape[1] + torch.arange(pages.shape[1])).flatten()[:tokens]
        out.append(attention(q[row], pages.float().flatten(0, 1)[:, 0], slots, SHAPE.latent, scale))
    return torch.stack(out).bfloat16()


def flashmla_stand_in() -> SimpleNamespace:
    def plan(cache_seqlens: Any, *heads: int, is_fp8_kvcache: bool, topk: int | None = None, **named: int) -> Any:
        if topk is not None:
            assert cache_seqlens.tolist() == [topk] * 2 and topk % 128 == 0 and is_fp8_kvcache and not heads
            assert named == {"num_q_tokens_per_head_k": 64, "num_heads_k": 1, "num_heads_q": 64}
            return topk, "splits"
        assert cache_seqlens.tolist() == [1500] * 2 and heads == (6, 1)
        return is_fp8_kvcache, "splits"

    def attend(q: Any, k: Any, table: Any, lengths: Any, dim: int, fp8: int, splits: str, **options: Any) -> Any:
        if "indices" in options:
            indices, scale = options["indices"][:, 0], options["softmax_scale"]
            assert table.shape == (2, 0) and q.shape == (2, 1, 64, 96) and indices.shape == (2, fp8) and dim == 64
            assert options["is_fp8_kvcache"] and k.dtype == torch.float32 and k.shape[1:] == (32, 1, 96)
            rows = [
                attention(q[row, 0], k.flatten(0, 2), indices[row][indices[row] >= 0], dim, scale) for row in (0, 1)
            ]
            return torch.stack(rows).bfloat16()[:, None], None
        assert splits == "splits" and dim == 64 and options["causal"] and ("descale_q" in options) == fp8
        assert q.dtype == k.dtype and (q.element_size() == 1) == fp8 and q.shape == (2, 1, 6, 96)
        return paged(q[:, 0], k, table, lengths, options["softmax_scale"])[:, None], None

    def tokens(q: Any, kv: Any, indices: Any, scale: float, dim: int, topk_length: Any) -> Any:
        assert q.shape[1] == 64 and indices.shape[2] % 128 == 0 and kv.shape[1:] == (1, 96) and dim == 64
        rows = [
            attention(q[row], kv[:, 0], indices[row, 0, :count], dim, scale)
            for row, count in enumerate(topk_length.tolist())
        ]
        assert all((indices[row, 0, count:] == -1).all() for row, count in enumerate(topk_length.tolist()))
        return torch.stack(rows).bfloat16(), None, None

    return SimpleNamespace(get_mla_metadata=plan, flash_mla_with_kvcache=attend, flash_mla_sparse_fwd=tokens)


def fa3_stand_in() -> SimpleNamespace:
    def attend(q: Any, k: Any, v: Any, qv: Any, page_table: Any, cache_seqlens: Any, **options: Any) -> torch.Tensor:
        assert options["cu_seqlens_q"].tolist() == [0, 1, 2] and options["max_seqlen_q"] == 1 and options["causal"]
        query, pages = torch.cat([qv, q], -1), torch.cat([v, k], -1)
        return paged(query, pages, page_table, cache_seqlens, options["softmax_scale"])

    return SimpleNamespace(flash_attn_with_kvcache=attend)


class FlashInferStandIn:
    """Takes the arguments of FlashInfer's MLA wrapper that the benchmark gives."""

    def __init__(self, workspace: torch.Tensor, backend: str) -> None:
        assert workspace.dtype == torch.uint8 and backend == "auto"

    def plan(self, q_starts: Any, starts: Any, slots: Any, lengths: Any, *rest: Any) -> None:
        *sizes, self.scale, q_dtype, self.kv_dtype = rest
        assert sizes == [6, 64, 32, 1, False] and q_starts.tolist() == [0, 1, 2] and starts.tolist() == [0, 1500, 3000]
        assert q_dtype == torch.bfloat16 and lengths.tolist() == [1500] * 2
        self.slots = slots.view(2, 1500)

    def run(self, q_nope: Any, q_rope: Any, latents: Any, rotated: Any, out: torch.Tensor, **scales: float) -> Any:
        fp8 = self.kv_dtype == mla_peers.FP8
        assert latents.dtype == rotated.dtype == self.kv_dtype
        assert scales == ({"ckv_scale": 1.0, "kpe_scale": 1.0} if fp8 else {})
        query, cache = torch.cat([q_nope, q_rope], -1), torch.cat([latents, rotated], -1)[:, 0]
        return out.copy_(torch.stack([attention(query[row], cache, self.slots[row], 64, self.scale) for row in (0, 1)]))


class SplitsStandIn:
    """Launched as a Triton kernel is."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(splits: torch.Tensor, lengths: torch.Tensor, *facts: int, MAX_NUM_SEQ: int) -> None:
            assert grid == (1,) and MAX_NUM_SEQ == 256 and lengths.tolist() == [1500] * 2
            assert facts == (2, 1, 6, 1, 64, 132)
            splits.fill_(4)

        return launch


def triton_decode(q: Any, k: Any, v: Any, out: Any, starts: Any, slots: Any, *sizes: Any, **options: Any) -> None:
    partial, sums, splits, most, scale, k_scale, v_scale = sizes
    assert partial.shape == (2, 6, most, 64) and sums.shape == (2, 6, most) and splits.tolist() == [4, 4]
    assert k_scale == v_scale == 1.0 and options == {"has_mla": True, "use_pdl": False, "page_size": 32}
    for row in range(2):
        out[row] = attention(q[row], k[:, 0], slots[starts[row] : starts[row + 1]], v.shape[2], scale)


def test_each_peer_is_given_the_right_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(SHAPE, read_recipe({**RECIPE, "band_tokens": 64, "stripe_ratio": 0.02}), "cpu", 2)
    libraries = {
        "sglang.kernels.ops.attention.flash_mla_interface": flashmla_stand_in(),
        "sgl_kernel.flash_attn": fa3_stand_in(),
        "flashinfer": SimpleNamespace(BatchMLAPagedAttentionWrapper=FlashInferStandIn),
        # Stands for quantised rows, so that what reads them is given them.
        mla_peers.QUANTISED: SimpleNamespace(quantize_k_cache=lambda pages: pages.to(mla_peers.FP8).float()),
        f"{mla_peers.TRITON}.decode_attention": SimpleNamespace(decode_attention_fwd=triton_decode),
        f"{mla_peers.TRITON}.metadata": SimpleNamespace(get_num_kv_splits_triton=SplitsStandIn()),
    }
    for name, library in libraries.items():
        monkeypatch.setitem(sys.modules, name, library)
    processors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: processors)
    over, peers = samples(step), [one for one in table() if one.peer]
    assert len(peers) == 8
    for one in peers:
        runs = one.prepare(step)
        first, second = (run() for run in runs)
        assert first is not None and second is not None and first.shape == (2, 6, 64), one.name
        second = second.clone()
        found = quality(step, over, one, runs[0]())
        assert found["relative_l2"] < (5e-3 if one.kv_dtype == torch.bfloat16 else 0.1), one.name
        assert not second.equal(runs[0]()), one.name  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="over a float8 latent cache SGLang converts all of it"):
        mla_peers.fa3(SimpleNamespace(shape=replace(SHAPE, kv_dtype=mla_peers.FP8), batch=None, device="cpu"))  # pyright: ignore[reportArgumentType]


def test_flashinfer_over_a_float8_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(BatchMLAPagedAttentionWrapper=FlashInferStandIn)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    recipe = read_recipe({**RECIPE, "band_tokens": 64, "stripe_ratio": 0.02})
    step = Step(replace(SHAPE, kv_dtype=mla_peers.FP8), recipe, "cpu", 1)
    (one,) = (one for one in table(mla_peers.FP8) if one.name == "flashinfer")
    assert quality(step, samples(step), one, one.prepare(step)[0]())["relative_l2"] < 5e-3


def test_splits_of_the_triton_backend() -> None:
    assert [mla_peers.triton_splits(132, tokens) for tokens in (65536, 1500, 100)] == [256, 64, 8]
