"""SGLang's kernels for DSA in torch, for shapes that a test can afford, with checks of their arguments."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_layers import machine as fake

from eval.lab.kernels.dsa_inputs import FP8, Shape, Step
from eval.lab.kernels.dsa_table import TABLE
from eval.lab.kernels.harness import Implementation, Machine
from eval.lab.kernels.mla_peers import FLASHMLA
from sglang_sparse_kernels.index_keys.reference import parts

# The newest page is partly filled, and no two sizes are equal.
SHAPE = Shape(2, 300, heads=6, latent=128, rope=16, index_heads=4, topk=70)
PROMPT = replace(SHAPE, batch=1, length=200, chunk=90)


def index_logits(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[queries, keys]``, the definition in float32."""
    products = torch.einsum("thd,sd->ths", q.float(), keys.view(FP8).float()).relu()
    return (products * weights[..., None]).sum(1) * scales


def gemm_stand_in() -> SimpleNamespace:
    def schedule(lengths: torch.Tensor, block: int, processors: int) -> str:
        assert lengths.tolist() == [[300], [300]] and lengths.dtype == torch.int32 and (block, processors) == (64, 132)
        return "schedule"

    def paged(q: Any, cache: Any, weights: Any, lengths: Any, table: Any, plan: str, most: int, **options: Any) -> Any:
        assert q.shape == (2, 1, 4, 128) and cache.shape[1:] == (64, 1, 132) and cache.dtype == torch.uint8
        assert plan == "schedule" and most == 384 and lengths.shape == (2, 1) and options == {"clean_logits": False}
        out = torch.full((2, most), torch.nan)
        keys, scales = parts(cache.flatten(1))
        for row, pages in enumerate(table.long()):
            made = index_logits(q[row], weights[row][None], keys[pages].flatten(0, 1), scales[pages].flatten())
            out[row, : lengths[row, 0]] = made[0, : lengths[row, 0]]
        return out

    def ragged(q: Any, kv: Any, weights: Any, first: Any, end: Any, **options: Any) -> torch.Tensor:
        keys, scales = kv
        assert q.shape == (90, 4, 128) and keys.shape == (200, 128) and scales.shape == (200,)
        assert keys.dtype == FP8 and scales.dtype == torch.float32 and options == {"clean_logits": False}
        assert first.tolist() == [0] * 90 and end.tolist() == [*range(111, 201)]
        made = index_logits(q, weights, keys, scales)
        return made.masked_fill(torch.arange(200) >= end[:, None], torch.nan)

    return SimpleNamespace(
        get_num_sms=lambda: 132,
        get_paged_mqa_logits_metadata=schedule,
        fp8_paged_mqa_logits=paged,
        fp8_mqa_logits=ragged,
    )


def best_of(scores: torch.Tensor, lengths: torch.Tensor, topk: int) -> torch.Tensor:
    """Positions in no order, ``[rows, topk]``, then -1."""
    beyond = torch.arange(scores.shape[1]) >= lengths[:, None]
    found = scores.masked_fill(beyond, -torch.inf).topk(min(topk, scores.shape[1])).indices
    return found.masked_fill(beyond.gather(1, found), -1).flip(-1)


def topk_v2(scores: Any, lengths: Any, table: Any, out: Any, page: int, plan: Any) -> None:
    assert plan.shape == (3, 2) and page == 64 and table.shape == (2, 6) and scores.stride(0) % 4 == 0
    found = best_of(scores, lengths, out.shape[1])
    slots = table.long().gather(1, found.clamp(min=0) // page) * page + found % page
    out.copy_(torch.where(found < 0, -1, slots))


def fused(
    score: Any, lengths: Any, page_table_size_1: Any, cu_seqlens_q: Any, topk: int, row_starts: Any = None
) -> Any:
    rows = torch.arange(len(cu_seqlens_q) - 1).repeat_interleave(cu_seqlens_q.diff().long())
    assert len(rows) == len(score) and (row_starts is None or not row_starts.any())
    found = best_of(score, lengths, topk)
    return torch.where(found < 0, -1, page_table_size_1[rows].gather(1, found.clamp(min=0)))


def over(q: torch.Tensor, keys: torch.Tensor, latent: int, scale: float) -> torch.Tensor:
    return (q.float() @ keys.float().T * scale).softmax(-1) @ keys[:, :latent].float()


def flashmla_stand_in() -> SimpleNamespace:
    def plan(**options: Any) -> tuple[str, str]:
        assert options.pop("cache_seqlens").tolist() == [70, 70]
        assert options == {"num_q_tokens_per_head_k": 64, "num_heads_k": 1, "num_heads_q": 64, "is_fp8_kvcache": True,
                           "topk": 70}  # fmt: skip
        return "plan", "splits"

    def attend(q: Any, cache: Any, table: Any, lengths: Any, dim: int, *plans: str, **options: Any) -> Any:
        assert q.shape == (2, 1, 64, 144) and cache.shape[1:] == (64, 1, 144) and table.shape == (2, 0)
        assert plans == ("plan", "splits") and options["is_fp8_kvcache"] and options["indices"].shape == (2, 1, 70)
        keys, scale = cache.flatten(0, 2), options["softmax_scale"]
        made = [over(q[row, 0], keys[slots[0].long()], dim, scale) for row, slots in enumerate(options["indices"])]
        return torch.stack(made)[:, None].bfloat16(), None

    def tokens(q: Any, kv: Any, indices: Any, sm_scale: float, d_v: int, topk_length: Any) -> Any:
        assert q.shape == (2, 64, 144) and kv.shape[1:] == (1, 144) and topk_length.tolist() == [70, 70]
        made = [over(q[row], kv[slots[0].long(), 0], d_v, sm_scale) for row, slots in enumerate(indices)]
        return torch.stack(made).bfloat16(), None, None

    return SimpleNamespace(get_mla_metadata=plan, flash_mla_with_kvcache=attend, flash_mla_sparse_fwd=tokens)


def fa3(q: Any, k_cache: Any, v_cache: Any, qv: Any, page_table: Any, cache_seqlens: Any, **options: Any) -> Any:
    assert k_cache.shape[1:] == (1, 1, 16) and v_cache.shape[1:] == (1, 1, 128) and cache_seqlens.tolist() == [70, 70]
    assert options["cu_seqlens_q"].tolist() == [0, 1, 2] and options["cu_seqlens_k_new"].tolist() == [0, 70, 140]
    keys, query = torch.cat([v_cache, k_cache], -1).flatten(0, 2), torch.cat([qv, q], -1)
    made = [over(query[row], keys[slots.long()], 128, options["softmax_scale"]) for row, slots in enumerate(page_table)]
    return torch.stack(made).bfloat16()


class Keys:
    """In place of a Triton kernel of SGLang's, which gathers a row's keys and scales."""

    @staticmethod
    def execute(pool: Any, buffer: torch.Tensor, page_indices: torch.Tensor, **rows: Any) -> Any:
        assert rows.pop("seq_len_tensor").tolist() == [200] and rows == {"seq_len_sum": 200, "max_seq_len": 200}
        assert (pool.index_page_size, pool.index_head_dim) == (64, 128)
        keys, scales = parts(buffer)
        pages = page_indices[0].long()
        return keys[pages].flatten(0, 1)[:200], scales[pages].reshape(-1, 1)[:200].contiguous().view(torch.uint8)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace all that needs a GPU by torch; SGLang dispatches between its kernels itself."""
    from sglang.kernels.ops.attention import flash_attention
    from sglang.kernels.ops.attention.dsv4 import topk
    from sglang.kernels.ops.kvcache import dsa_index_k_cache
    from sglang.kernels.ops.quantization import dsa_quant_k_cache

    # Where arguments of a server on the CPU were resolved before, SGLang has turned these off for the whole process.
    for variable in ("SGLANG_DSA_FUSE_TOPK", "SGLANG_OPT_USE_TOPK_V2"):
        monkeypatch.setenv(variable, "1")
    package: Any = ModuleType("sgl_kernel")
    # SGLang imports both.
    package.fast_topk_transform_fused = package.fast_topk_transform_ragged_fused = fused
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    monkeypatch.setitem(sys.modules, FLASHMLA, flashmla_stand_in())
    monkeypatch.setitem(sys.modules, "deep_gemm", gemm_stand_in())
    monkeypatch.setattr(topk, "plan_topk_v2", lambda lengths: lengths.new_zeros(len(lengths) + 1, 2))
    monkeypatch.setattr(topk, "topk_transform_paged_v2", topk_v2)
    monkeypatch.setattr(dsa_index_k_cache, "GetKAndS", Keys)
    monkeypatch.setattr(dsa_quant_k_cache, "quantize_k_cache", lambda cache: cache.float())
    monkeypatch.setattr(flash_attention, "flash_attn_with_kvcache", fa3)


def machine() -> Machine:
    """One whose replays do the first layer again."""

    def capture(runs: Any) -> Any:
        def replay() -> float:
            runs[0]()
            return 5.0

        return replay

    return replace(fake(), capture=capture, repeat=capture)


def of(op: str, *names: str) -> list[Implementation[Step]]:
    return [one for one in TABLE if one.op == op and (not names or one.name in names)]
