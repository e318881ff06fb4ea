"""RocketKV in plain formulations: what a prompt keeps, block by block, and what a step of a decode batch selects."""

from dataclasses import replace
from typing import Any

import torch

from sglang_sparse.attention.batch import allocate_view
from sglang_sparse.config.settings import build
from sglang_sparse.methods.aux_buffers import AuxBuffers, page_ends
from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.rocketkv import Rocketkv
from sglang_sparse.methods.roles import Kept, Prompts

HEADS, GROUP, DIM, PAGE, BLOCK = 2, 2, 16, 16, 4
MODEL = ModelShape(1, HEADS * GROUP, HEADS, DIM, torch.float32)
SCALE = 0.5
# Small enough to check by hand: 8 tokens choose 4 of the blocks before them.
SMALL: dict[str, Any] = {"window_size": 8, "prompt_budget": 24, "kernel_size": 5, "topk": 6}


def rocketkv(**fields: Any) -> Rocketkv:
    """The method with these fields of its config."""
    method = build("rocketkv", fields).method
    assert isinstance(method, Rocketkv)
    return method


def exact_keys(*shape: int) -> torch.Tensor:
    """Random keys whose bounds every dtype of the KT cache holds."""
    return torch.randn(*shape).to(torch.float8_e5m2).float()


def plain_keep(window: torch.Tensor, keys: torch.Tensor, method: Rocketkv) -> list[int]:
    """Stage 1 of one prompt and KV head: ``window`` ``[W, group, dim]``, ``keys`` ``[tokens, dim]``."""
    config, tokens = method.config, len(keys)
    importance = torch.zeros(tokens, dtype=torch.float64)
    for place, query in enumerate(window.double()):
        seen = tokens - len(window) + place + 1
        importance[:seen] += (query @ keys[:seen].double().T * SCALE).softmax(-1).sum(0)
    before, half = tokens - len(window), config.kernel_size // 2
    pooled = [float(importance[max(0, i - half) : min(before, i + half + 1)].max()) for i in range(before)]
    count, first_visible = method.kept(tokens)
    size = config.kt_page_size
    scores = [max(pooled[block * size : (block + 1) * size]) for block in range(first_visible)]
    return sorted(sorted(range(first_visible), key=lambda block: -scores[block])[:count])


def prompts_of(lengths: list[int], method: Rocketkv) -> Prompts:
    """Random prompts in pages in no order; what lies beyond a prompt's pages is no page."""
    pages = [-(-length // PAGE) for length in lengths]
    free = (torch.randperm(sum(pages)) + 1).tolist()
    table = torch.full((len(lengths), max(pages)), 2**31 - 1, dtype=torch.int32)
    for row, count in enumerate(pages):
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
    window = torch.randn(len(lengths), method.window_tokens, HEADS * GROUP, DIM)
    keys = exact_keys((1 + sum(pages)) * PAGE, HEADS, DIM)
    return Prompts(torch.tensor(lengths, dtype=torch.int32), window, keys, table, PAGE, SCALE, 1.0)


def only(prompts: Prompts, row: int) -> Prompts:
    """One of them."""
    part = slice(row, row + 1)
    table = prompts.page_table[part, : -(-int(prompts.lengths[row]) // PAGE)].contiguous()
    return Prompts(prompts.lengths[part], prompts.window[part], prompts.key_cache, table, PAGE, SCALE, 1.0)


class Rows:
    """A decode batch: sparse rows with and without kept blocks, dense ones, and one that pads a graph."""

    # Tokens, blocks wanted, blocks kept and the first visible one, place in the request pool.
    table = [
        (150, 6, 4, 20, 5),
        (90, 99, 4, 10, 2),
        (333, 6, 0, 0, 1),
        (61, 10, 3, 12, 7),
        (0, 0, 0, 0, 0),
        (130, 1, 2, 30, 3),
    ]

    def __init__(self, method: Rocketkv) -> None:
        torch.manual_seed(2)
        self.method, n_pages = method, 80
        self.aux = AuxBuffers(method.aux_specs(MODEL), (0,), n_pages, PAGE, "cpu")
        self.cache, self.values = (
            exact_keys(n_pages * PAGE, HEADS, DIM),
            torch.randn(n_pages * PAGE, HEADS, DIM),
        )
        zeros = torch.zeros(8, dtype=torch.int32)
        blocks = torch.full((8, HEADS, 5), -(2**31), dtype=torch.int32)
        self.aux.kept = (Kept({0: blocks}, zeros, zeros.clone()),)
        self.view = allocate_view(len(self.table), HEADS, 90, 10, BLOCK, torch.zeros(4, dtype=torch.int64))
        self.query = torch.randn(len(self.table), HEADS * GROUP, DIM)
        self.last_slots = torch.zeros(len(self.table), dtype=torch.int64)
        self._fill((torch.randperm(n_pages - 1) + 1).tolist())

    def _fill(self, free: list[int]) -> None:
        (known,) = self.aux.kept
        for row, (tokens, wanted, kept, first_visible, slot) in enumerate(self.table):
            pages = torch.tensor([free.pop() for _ in range(-(-tokens // PAGE))], dtype=torch.int64)
            slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:tokens]
            self.view.n_pages[row], self.view.n_select[row] = -(-tokens // BLOCK), min(wanted, -(-tokens // BLOCK))
            self.view.page_table[row, : len(slots[::BLOCK])] = (slots[::BLOCK] // BLOCK).int()
            self.view.requests[row] = slot
            known.counts[slot], known.first_visible[slot] = kept, first_visible
            for head in range(HEADS):
                some = torch.randperm(max(1, first_visible))[:kept].sort().values
                known.blocks[0][slot, head, :kept] = some.int()
            if tokens:
                self.last_slots[row] = slots[-1]
                self.aux.refresh({0: self.cache}, page_ends(slots, self.method.block_size))

    def select(self, logit_scale: float = SCALE) -> list[list[list[int]]]:
        """The logical blocks that each KV head of each row selects."""
        found = self.method.select(replace(self.view, logit_scale=logit_scale), 0, self.query, self.aux)
        rows = zip(self.view.page_table.tolist(), found.indices.tolist(), found.counts.tolist(), strict=True)
        return [
            [[table.index(block) for block in head[:count]] for head, count in zip(blocks, counts, strict=True)]
            for table, blocks, counts in rows
        ]

    def visible(self, row: int, head: int) -> list[int]:
        """The logical blocks that a KV head may attend to."""
        tokens, wanted, kept, first_visible, slot = self.table[row]
        held = -(-tokens // BLOCK)
        if wanted >= held:
            return [*range(held)]
        return [*self.aux.require_kept(0).blocks[0][slot, head, :kept].tolist(), *range(first_visible, held)]

    def plain(self, row: int, head: int) -> list[int]:
        """Stage 2 of one row and KV head."""
        tokens, wanted = self.table[row][:2]
        visible = self.visible(row, head)
        query = self.query[row, head * GROUP : (head + 1) * GROUP].double()
        size = query.abs().sum(0).tolist()
        topr = self.method.config.topr or DIM
        dims = sorted(range(DIM), key=lambda dim: (-size[dim], dim))[:topr]
        temperature = (query.abs().sum(1) / query[:, dims].abs().sum(1)).sqrt()
        logits = []
        for block in visible:
            first = int(self.view.page_table[row, block]) * BLOCK
            keys = self.cache[first : first + min(BLOCK, tokens - block * BLOCK), head].double()
            bound = torch.where(query.sum(0) > 0, keys.amax(0), keys.amin(0))
            logits.append(query[:, dims] @ bound[dims] * temperature * SCALE)
        shares = torch.stack(logits).softmax(0).mean(1).tolist() if logits else []
        order = sorted(range(len(visible)), key=lambda i: (i != len(visible) - 1, -shares[i]))
        return sorted(visible[i] for i in order[:wanted])
