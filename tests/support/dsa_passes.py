"""A DSA pass without a server: rows in a pool, an indexer whose queries and keys are random, and the definition."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sparse.attention.batch import allocate_view, load_views
from sglang_sparse.attention.dsa import indexer, latents
from sglang_sparse.attention.plan import plan_decode
from sglang_sparse.config.settings import build
from sglang_sparse.methods.views import BatchView
from sglang_sparse_kernels import index_keys

PAGE, TOPK, HEADS, DIM, HIDDEN, PAGES = 64, 32, 4, 128, 48, 12
LAYERS = (0, 1, 2)
LATENT, ROPE = 64, 16


def no_original(*_: Any) -> torch.Tensor:
    raise AssertionError("SGLang's own function ran")


class Rows:
    """Requests of some lengths in a pool, of which the last tokens are the queries of a pass.

    Args:
        lengths: tokens of each row, with the new ones.
        new: how many of them are new; None for a decode step of one each.
        padding: queries that pad the pass.
    """

    def __init__(self, lengths: list[int], new: list[int] | None = None, padding: int = 0):
        self.generator = torch.Generator().manual_seed(sum(lengths))
        table = 1 + torch.randperm(PAGES, generator=self.generator).int()
        widest = -(-max(lengths) // PAGE)
        self.page_table = torch.stack([table[row * widest : (row + 1) * widest] for row in range(len(lengths))])
        decodes = new is None
        taken = [1] * len(lengths) if new is None else new
        ends = [range(length - some + 1, length + 1) for length, some in zip(lengths, taken, strict=True)]
        self.rows = [row for row, some in enumerate(taken) for _ in range(some)]
        self.seen = [end for row in ends for end in row]
        self.tokens, self.padding = len(self.seen) + padding, padding
        slots = [self.slot(row, seen - 1) for row, seen in zip(self.rows, self.seen, strict=True)]
        mode = SimpleNamespace(is_decode=lambda: decodes, is_extend_without_speculative=lambda: not decodes)
        self.batch = SimpleNamespace(
            forward_mode=mode,
            out_cache_loc=torch.tensor(slots + [0] * padding),
            seq_lens_cpu=torch.tensor(lengths),
        )
        self.metadata = SimpleNamespace(
            real_page_table=self.page_table,
            dsa_seqlens_expanded=torch.tensor(self.seen, dtype=torch.int32),
            token_to_batch_idx=None if decodes else torch.tensor(self.rows, dtype=torch.int32),
            max_seq_len_k=max(lengths),
            topk_indices_offset=None,
        )
        self.pool = {layer: torch.zeros(PAGES + 1, PAGE * (DIM + 4), dtype=torch.uint8) for layer in LAYERS}
        for buffer in self.pool.values():
            keys = torch.randn((PAGES + 1) * PAGE, DIM, generator=self.generator)
            index_keys.store(*index_keys.quantize(keys), torch.arange(len(keys)), buffer)
        self.view = self._view(lengths) if decodes else None

    def slot(self, row: int, position: int) -> int:
        return int(self.page_table[row, position // PAGE]) * PAGE + position % PAGE

    def _view(self, lengths: list[int]) -> BatchView | None:
        settings = build("dsa", {})
        method: Any = settings.method
        method.index_topk = TOPK
        plan = plan_decode(settings.decode, torch.tensor(lengths))
        if not plan.sparse:
            return None
        stats = torch.zeros(4, dtype=torch.int64)
        view = allocate_view(self.tokens, 1, PAGES * PAGE, TOPK, 1, stats, method.view_buffers)
        requests = SimpleNamespace(req_pool_indices=torch.arange(self.tokens))
        load_views((view,), plan, requests, torch.zeros(self.tokens, 1, dtype=torch.int32))
        return view

    def backend(self, config: dict[str, Any] | None = None, fused: bool = False) -> Any:
        dense = SimpleNamespace(forward_metadata=self.metadata, use_fused_topk=fused)
        counters = SimpleNamespace(sparse_layers=len(LAYERS), index_keys=0)
        method = build("dsa", config or {"implementation": "portable"}).method
        return SimpleNamespace(
            view=self.view,
            dense=dense,
            first_layer=LAYERS[0],
            indexed=None,
            method=method,
            counters=counters,
            verified=0,
            exact_states=None,
        )


class Model:
    """An indexer whose queries and keys are random, a new set for every call; keeps them."""

    n_heads, softmax_scale, index_topk = HEADS, DIM**-0.5, TOPK

    def __init__(self, rows: Rows):
        self.generator, self.calls = rows.generator, []
        self.weights_proj = SimpleNamespace(weight=torch.randn(HEADS, HIDDEN, generator=rows.generator))

    def _get_q_k_bf16(self, q_lora: torch.Tensor, x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        query = torch.randn(len(x), HEADS, DIM, generator=self.generator)
        self.calls.append((query, x))
        return query, torch.randn(len(x), DIM, generator=self.generator), None


def runner(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """Return what runs the indexer of one layer, and returns what it chose, a copy."""

    def layer(rows: Rows, backend: Any, model: Model, layer_id: int) -> torch.Tensor:
        pool = SimpleNamespace(get_index_k_with_scale_buffer=rows.pool.__getitem__)
        monkeypatch.setattr("sglang.srt.model_executor.forward_context.get_token_to_kv_pool", lambda: pool)
        for module in (indexer, latents):
            monkeypatch.setattr(module, "served_backend", lambda: backend)
        x = torch.randn(rows.tokens, HIDDEN, generator=rows.generator)
        positions = torch.zeros(rows.tokens, dtype=torch.int64)
        chosen = indexer.choose(no_original, model, x, x, positions, rows.batch, layer_id)
        assert chosen is not None
        return chosen.clone()

    return layer


def defined(rows: Rows, model: Model, layer_id: int) -> torch.Tensor:
    """Return the tokens that the last call should have chosen, from the stored keys, query by query."""
    (query, x), buffer = model.calls[-1], rows.pool[layer_id]
    values, scales = index_keys.quantize(query, rotate=False)
    gates = x.double() @ model.weights_proj.weight.double().T * scales * (HEADS**-0.5 * model.softmax_scale)
    stored, key_scales = index_keys.reference.parts(buffer)
    keys = stored.view(torch.float8_e4m3fn).flatten(0, 1).double() * key_scales.flatten()[:, None].double()
    expected = torch.full((rows.tokens, TOPK), -1, dtype=torch.int32)
    for token, (row, seen) in enumerate(zip(rows.rows, rows.seen, strict=True)):
        slots = [rows.slot(row, position) for position in range(seen)]
        logits = ((values[token].double() @ keys[slots].T).relu() * gates[token][:, None]).sum(0)
        best = logits.float().sort(descending=True, stable=True).indices[:TOPK].sort().values
        expected[token, : len(best)] = best.int()
    return expected


# Arguments of `Rows`.
PASSES: dict[str, dict[str, Any]] = {
    "decode": {"lengths": [200, 20, 33]},
    "decode within a graph": {"lengths": [200, 20], "padding": 2},
    "dense decode": {"lengths": [32, 20]},
    "prefill": {"lengths": [150, 70], "new": [40, 70]},
    "prefill of a padded batch": {"lengths": [150, 20], "new": [30, 20], "padding": 5},
    "prefill of short prompts": {"lengths": [32, 9], "new": [10, 9]},
}
