"""What tiny-dsa chooses, in chunks and token by token: this project's indexer against the one of plain_dsa."""

from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plain_dsa
import pytest
import torch
from transformers import AutoTokenizer

from eval.texts.text import read_book
from eval.texts.windows import BOOK
from sglang_sparse import indexer
from sglang_sparse.config import build

MODEL = Path("eval/models/tiny-dsa")
PAGE, DIM, TOKENS, CHUNKS, TOPK = 64, 128, 800, (300, 300, 196, 1, 1, 1, 1), 512


def _in_turn(module: Any, forward: Any, *inputs: Any, **named: Any) -> torch.Tensor:
    return forward(module, *inputs, **named)


class Asked:
    """Stands around ``plain_dsa.indexer_forward``: lets ours choose from the same hidden states, layer by layer.

    Args:
        monkeypatch: pytest's.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        pages = -(-TOKENS // PAGE)
        self.table = 1 + torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int()[None]
        self.pool: dict[int, torch.Tensor] = {}
        self.apart: list[tuple[int, int, int]] = []
        self.compared = self.done = 0
        pool = SimpleNamespace(get_index_k_with_scale_buffer=lambda layer: self.pool[layer])
        monkeypatch.setattr("sglang.srt.model_executor.forward_context.get_token_to_kv_pool", lambda: pool)
        monkeypatch.setattr(indexer, "served_backend", lambda: self.backend)
        monkeypatch.setattr(plain_dsa.modeling.DeepseekV32Indexer, "forward", partialmethod(_in_turn, self.plainly))
        # Both make queries and keys by the same matrices; these are rotated, and not quantised yet.
        monkeypatch.setattr(plain_dsa, "round_to_fp8", self._kept(plain_dsa.round_to_fp8))

    def _kept(self, original: Any) -> Any:
        def rounding(x: torch.Tensor) -> torch.Tensor:
            self.rows.append(x[0])
            return original(x)

        return rounding

    def plainly(self, module: Any, hidden: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        """``DeepseekV32Indexer.forward``."""
        self.rows: list[torch.Tensor] = []
        chosen = plain_dsa.indexer_forward(module, hidden, *rest, **named)
        key, query = self.rows
        self._compare(module, hidden[0], query, key.squeeze(1), chosen[0])
        return chosen

    def _compare(
        self, module: Any, x: torch.Tensor, query: torch.Tensor, key: torch.Tensor, plain: torch.Tensor
    ) -> None:
        layer, new = module.layer_idx, len(x)
        seen = torch.arange(self.done + 1, self.done + new + 1)
        self.pool.setdefault(layer, torch.zeros(self.table.max() + 1, PAGE * (DIM + 4), dtype=torch.uint8))
        slots = self.table[0, (seen - 1) // PAGE].long() * PAGE + (seen - 1) % PAGE
        mode = SimpleNamespace(is_decode=lambda: False, is_extend=lambda: True)
        batch = SimpleNamespace(forward_mode=mode, out_cache_loc=slots)
        metadata = SimpleNamespace(
            real_page_table=self.table,
            dsa_seqlens_expanded=seen.int(),
            token_to_batch_idx=torch.zeros(new, dtype=torch.int32),
            max_seq_len_k=int(seen[-1]),
            topk_indices_offset=None,
        )
        dense = SimpleNamespace(forward_metadata=metadata, use_fused_topk=False)
        method = build("dsa", {}).method
        self.backend = SimpleNamespace(view=None, dense=dense, first_layer=layer, indexed=None, method=method)
        served = SimpleNamespace(
            n_heads=module.n_heads,
            softmax_scale=module.softmax_scale,
            index_topk=module.index_topk,
            weights_proj=module.weights_proj,
            _get_q_k_bf16=lambda *_: (query, key, None),
        )
        ours = indexer.choose(_refuse, served, x, x, seen - 1, batch, layer)
        assert ours is not None
        for length, mine, theirs in zip(seen.tolist(), ours.tolist(), plain.tolist(), strict=True):
            chosen = {place for place in theirs if place < length}
            self.compared += length > TOPK
            if apart := len(chosen ^ (set(mine) - {-1})):
                self.apart.append((layer, length, apart))


def _refuse(*_: Any) -> torch.Tensor:
    raise AssertionError("SGLang's own indexer ran")


def test_the_same_tokens_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    model, cache = plain_dsa.load(MODEL), None
    text = read_book(BOOK)[20000:24000]
    ids = torch.tensor(AutoTokenizer.from_pretrained(MODEL).encode(text)[:TOKENS])
    assert len(ids) == TOKENS == sum(CHUNKS)
    for chunk in CHUNKS:
        with torch.no_grad():
            part = ids[None, asked.done : asked.done + chunk]
            cache = model(part, past_key_values=cache, use_cache=True).past_key_values
        asked.done += chunk
    assert asked.compared == len(asked.pool) * (TOKENS - TOPK) and len(asked.pool) == 4
    assert not asked.apart
