"""Tests of the inputs that peers of the kernel benchmark get, seen by stand-ins of their libraries in plain torch."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eval.lab.kernels import kernel_attention, kernel_selection
from eval.lab.kernels.kernel_inputs import Shape, Step
from eval.lab.kernels.kernel_quality import quality, samples
from eval.lab.kernels.kernel_table import TABLE


def paged_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lengths: list[int]) -> Any:
    """Compute attention as FA3 and FlashInfer do, in plain torch: ``[N, H, d]``."""
    out = []
    for entry, tokens in enumerate(lengths):
        keys, values = (cache[table[entry].long()].flatten(0, 1)[:tokens].float() for cache in (k, v))
        group = q.shape[1] // k.shape[2]
        keys, values = (each.repeat_interleave(group, 1).transpose(0, 1) for each in (keys, values))
        logits = q[entry].float()[:, None] @ keys.transpose(1, 2) * q.shape[2] ** -0.5
        out.append((logits.softmax(-1) @ values)[:, 0])
    return torch.stack(out).bfloat16()


def fa3_stand_in() -> SimpleNamespace:
    def attend(q: Any, k: Any, v: Any, page_table: Any, cache_seqlens: Any, **options: Any) -> torch.Tensor:
        if "scheduler_metadata" in options:
            assert q.dim() == 3 and options["scheduler_metadata"]["batch_size"] == len(q) == len(cache_seqlens)
            return paged_attention(q, k, v, page_table, cache_seqlens.tolist())
        return paged_attention(q[:, 0], k, v, page_table, cache_seqlens.tolist())[:, None]

    return SimpleNamespace(flash_attn_with_kvcache=attend, get_scheduler_metadata=lambda **facts: facts)


class FlashInferStandIn:
    """Takes the arguments of FlashInfer's decode wrapper that the benchmark gives."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert layout == "NHD" and use_tensor_cores

    def reset_workspace_buffer(self, floats: torch.Tensor, plan: torch.Tensor) -> None:
        pass

    def plan(
        self, starts: Any, pages: Any, last: Any, heads: int, kv_heads: int, dim: int, size: int, **_: Any
    ) -> None:
        self.table = pages.view(len(last), -1)
        assert starts.tolist() == [i * self.table.shape[1] for i in range(len(last) + 1)]
        self.lengths = ((self.table.shape[1] - 1) * size + last).tolist()

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return paged_attention(q, *caches, self.table, self.lengths)


def minimax_stand_in() -> SimpleNamespace:
    def attend(
        q: Any, sink: None, k: Any, v: Any, slots: Any, lengths: Any, rows: Any, size: int, blocks: Any, **_: Any
    ):
        out = []
        for row, tokens in enumerate(lengths.tolist()):
            for head in range(k.shape[1]):
                held = (blocks[head, row, :, None] * size + torch.arange(size)).flatten()
                picked = slots[rows[row], held[held < tokens]].long()
                group = q[row].unflatten(0, (k.shape[1], -1))[head].float()
                weights = (group @ k[picked, head].float().T * q.shape[2] ** -0.5).softmax(-1)
                out.append(weights @ v[picked, head].float())
        return torch.cat(out).view_as(q)

    return SimpleNamespace(flash_decode_with_gqa_share_sparse=attend)


def highest(scores: torch.Tensor, lengths: torch.Tensor, n: int) -> torch.Tensor:
    """Logical pages, the best first."""
    assert lengths.tolist() == [scores.shape[1]] * len(scores)
    return scores.topk(n).indices


def topk_stand_ins() -> dict[str, SimpleNamespace]:
    def transform(scores: Any, table: Any, lengths: Any, n: int, row_to_batch: Any) -> torch.Tensor:
        return table[row_to_batch].gather(1, highest(scores, lengths, n))

    def planned(scores: Any, lengths: Any, table: Any, out: Any, page_size: int, plan: str) -> None:
        assert page_size == 1 and plan == "plan"
        out.copy_(table.gather(1, highest(scores, lengths, out.shape[1])))

    return {
        "flashinfer.topk": SimpleNamespace(top_k_page_table_transform=transform),
        "sgl_kernel.top_k": SimpleNamespace(fast_topk_v2=highest),
        kernel_selection.DEEPSEEK_V4: SimpleNamespace(
            plan_topk_v2=lambda lengths: "plan", topk_transform_paged_v2=planned
        ),
    }


def test_each_peer_is_given_the_right_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    # The newest page is partly filled, and no two sizes are equal.
    shape = Shape(2, 118, q_heads=6, kv_heads=3, dim=16, page_size=8, active_ratio=0.4, n_min=2, context_length=400)
    step = Step(shape, "cpu", 2)
    libraries = topk_stand_ins() | {
        "sgl_kernel.flash_attn": fa3_stand_in(),
        "flashinfer": SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FlashInferStandIn),
        kernel_attention.MINIMAX: minimax_stand_in(),
    }
    for name, library in libraries.items():
        monkeypatch.setitem(sys.modules, name, library)
    over = samples(step)
    for one in (one for one in TABLE if one.peer):
        runs = one.prepare(step)
        assert len(runs) == len(step.layers)
        found = quality(step, over, one, runs[0]())
        if one.op == "page_topk":
            assert found["agreement"] == 1.0, one.name
        else:
            limit = 1e-2 if one.kv_dtype == torch.bfloat16 else 1e-1
            assert found["relative_l2"] < limit, (one.op, one.name)
        assert not torch.equal(*[run() for run in runs]), one.name  # pyright: ignore[reportArgumentType]


def test_the_folded_cache_is_a_view_of_every_head() -> None:
    pages = torch.arange(5 * 4 * 3 * 2).view(5, 4, 3, 2)
    folded = kernel_attention.folded_cache(pages)
    numbers = kernel_attention.folded_pages(torch.arange(5, dtype=torch.int32).expand(2, 3, -1), 4)
    assert folded.data_ptr() == pages.data_ptr() and numbers.shape == (6, 5) and numbers.is_contiguous()
    assert torch.equal(folded[numbers[:3].long()][..., 0, :], pages.permute(2, 0, 1, 3))
    assert int(numbers.max()) == len(folded) - 1
