"""Tests of tiny-dsa's selections, in chunks and token by token: this project's indexer against that of plain_dsa.

Ours gets queries and keys from SGLang's own code, RoPE included, and the rotation of the CPU platform.
"""

from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plain_dsa
import pytest
import torch
from sglang.srt.layers.attention.dsa import dsa_indexer
from sglang.srt.layers.rotary_embedding import get_rope
from sglang_cpu_platform import sparse_mla
from transformers import AutoTokenizer

from eval.texts.text import read_book
from eval.texts.windows import BOOK
from sglang_sparse.attention.batch import allocate_view
from sglang_sparse.attention.dsa import indexer
from sglang_sparse.config.settings import build
from sglang_sparse.methods.views import SELECT_STATS, BatchView

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
        monkeypatch.setattr(dsa_indexer, "rotate_activation", sparse_mla.rotate)
        # What a server's arguments leave behind in the process of other tests.
        monkeypatch.setattr(dsa_indexer, "is_cp_active", lambda _: False)
        flags = SimpleNamespace(deterministic=SimpleNamespace(rl_on_policy_target=None))
        monkeypatch.setattr("sglang.srt.layers.rotary_embedding.base.get_exec", lambda: flags)
        self.decoded = torch.zeros(SELECT_STATS, dtype=torch.int64)
        self.counters = SimpleNamespace(index_keys=0)

    def plainly(self, module: Any, hidden: torch.Tensor, q_resid: torch.Tensor, *rest: Any, **named: Any) -> Any:
        """``DeepseekV32Indexer.forward``."""
        chosen = plain_dsa.indexer_forward(module, hidden, q_resid, *rest, **named)
        self._compare(module, hidden[0], q_resid[0], chosen[0])
        return chosen

    def _view(self, method: Any, length: int) -> BatchView:
        """Of a decode step of one row."""
        view = allocate_view(1, 1, TOKENS, TOPK, method.block_size, self.decoded, method.view_buffers)
        view.n_pages.fill_(length)
        view.n_select.copy_(method.n_select(view.n_pages))
        return view

    def _compare(self, module: Any, x: torch.Tensor, q_lora: torch.Tensor, plain: torch.Tensor) -> None:
        layer, new = module.layer_idx, len(x)
        seen = torch.arange(self.done + 1, self.done + new + 1)
        self.pool.setdefault(layer, torch.zeros(self.table.max() + 1, PAGE * (DIM + 4), dtype=torch.uint8))
        slots = self.table[0, (seen - 1) // PAGE].long() * PAGE + (seen - 1) % PAGE
        decode = new == 1
        mode = SimpleNamespace(is_decode=lambda: decode, is_extend_without_speculative=lambda: not decode)
        batch = SimpleNamespace(forward_mode=mode, out_cache_loc=slots, attn_cp_metadata=None)
        metadata = SimpleNamespace(
            real_page_table=self.table,
            dsa_seqlens_expanded=seen.int(),
            token_to_batch_idx=torch.zeros(new, dtype=torch.int32),
            max_seq_len_k=int(seen[-1]),
            topk_indices_offset=None,
        )
        dense = SimpleNamespace(forward_metadata=metadata, use_fused_topk=False)
        method = build("dsa", {"implementation": "portable"}).method
        method.adopt(SimpleNamespace(hf_text_config=module.config))
        view = self._view(method, int(seen[-1])) if decode else None
        self.backend = SimpleNamespace(
            view=view, dense=dense, first_layer=layer, indexed=None, method=method, counters=self.counters
        )
        ours = indexer.choose(_refuse, _served(module), x, q_lora, seen - 1, batch, layer)
        assert ours is not None
        for length, mine, theirs in zip(seen.tolist(), ours.tolist(), plain.tolist(), strict=True):
            chosen = {place for place in theirs if place < length}
            self.compared += length > TOPK
            if apart := len(chosen ^ (set(mine) - {-1})):
                self.apart.append((layer, length, apart))


def _served(module: Any) -> Any:
    """Return a stand-in with the used parts of SGLang's ``Indexer`` and the weights of transformers' one."""
    names = ("n_heads", "head_dim", "softmax_scale", "index_topk", "weights_proj", "k_norm")
    rope, config = module.qk_rope_head_dim, module.config
    served = SimpleNamespace(
        **{name: getattr(module, name) for name in names},
        wq_b=lambda x: (module.wq_b(x), None),
        wk=lambda x: (module.wk(x), None),
        rope_head_dim=rope,
        rotary_emb=get_rope(
            rope, rope, config.max_position_embeddings, int(config.rope_parameters["rope_theta"]), is_neox_style=True
        ),
        use_dsa_indexer_fusion=False,
        use_aiter_fused_fp8_writer=False,
        alt_stream=None,
        _update_rope_guarded=dsa_indexer.Indexer._update_rope_guarded,
    )
    for name in ("_get_q_k_bf16", "_maybe_rotate"):
        setattr(served, name, partial(getattr(dsa_indexer.Indexer, name), served))
    return served


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
    decoded = len(asked.pool) * CHUNKS.count(1)
    assert asked.counters.index_keys == len(asked.pool) * (TOKENS - CHUNKS.count(1))
    assert asked.decoded[:2].tolist() == [decoded, decoded * TOPK]
