"""Checks of requests that have let go of their prompts, against copies made when they did so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_sparse.attention import memory
from sglang_sparse.scheduler.prefix_keys import tree_key
from sglang_sparse.scheduler.request_fields import pool_row, protected_len


class DamagedCopyError(AssertionError):
    """A request no longer holds what it kept of its prompt."""


class Compactions:
    """Follows the compactions of a scheduler.

    Args:
        runner: SGLang's ``ModelRunner``.

    Attributes:
        prompts_evicted: prompts that the tree no longer has in full, while a request runs that had let go of them.
    """

    def __init__(self, runner: Any):
        self._pool, self._table = runner.token_to_kv_pool, runner.req_to_token_pool
        self._kept = getattr(self._pool, memory.ATTRIBUTE).require_kept(0)
        self._path = runner.attn_backend.keeps[0].compaction
        self._backend = runner.attn_backend
        self._block = self._backend.method.block_size
        # By request: the position of the first block, the blocks, and K and V of each layer.
        self._expected: dict[str, tuple[int, torch.Tensor, list[torch.Tensor]]] = {}
        self.prompts_evicted = 0
        # By request: its prompt's key in the tree, from when it let go until some of it is evicted.
        self._prompts: dict[str, Any] = {}
        self._let_go, self._path.release_prompt = self._path.release_prompt, self._note

    @classmethod
    def of(cls, runner: Any) -> Compactions | None:
        """Return what follows a runner; None where its method does not compact."""
        keeps = runner.attn_backend.keeps
        return cls(runner) if keeps and keeps[0].compaction else None

    def _note(self, request: Any, span: Any, tree: Any, reserve: int) -> bool:
        place = pool_row(request)
        row = self._table.req_to_token[place].clone().long()
        layers = sorted(self._kept.blocks)
        window = torch.arange(span.boundary * self._block, span.end)
        expected = []
        for layer in layers:
            blocks = self._kept.blocks[layer][place, :, : span.kept].long()
            for cache in (self._pool.get_key_buffer(layer), self._pool.get_value_buffer(layer)):
                heads = []
                for head, chosen in enumerate(blocks):
                    tokens = [int(block) * self._block + i for block in chosen for i in range(self._block)]
                    heads.append(cache[row[[*tokens, *window.tolist()]], head])
                expected.append(torch.stack(heads, 1))
        shared = 0 if tree.disable else protected_len(request)
        if not self._let_go(request, span, tree, reserve):
            return False
        if shared:
            key = RadixKey(request.full_untruncated_fill_ids[:shared], request.extra_key)
            self._prompts[request.rid] = tree_key(tree, key)
        first = span.boundary - span.kept
        self._expected[request.rid] = first * self._block, torch.arange(first, span.boundary), expected
        return True

    def check_sparse(self, batch: Any) -> None:
        """Require that the rows of a decode batch that has run attended to no more than they hold.

        Raises:
            DamagedCopyError: one attended to all.
        """
        plan = self._backend.plan(batch.seq_lens_cpu)
        for row, request in enumerate(batch.reqs):
            if request.sglang_sparse.compacted and not (plan.sparse and plan.selective[row]):
                raise DamagedCopyError(f"{request.rid} has let go of its prompt and attended to all of it")

    def count_evicted(self, requests: Sequence[Any], tree: Any) -> None:
        """Count prompts of running requests that have left the tree since the last call."""
        running = {request.rid for request in requests}
        before = {rid: key for rid, key in self._prompts.items() if rid in running}
        match = tree.tree_core.match_full_device_prefix
        self._prompts = {rid: key for rid, key in before.items() if match(key)[0] == len(key)}
        self.prompts_evicted += len(before) - len(self._prompts)

    def check(self, requests: Sequence[Any]) -> None:
        """Compare what compacted requests hold, bit by bit.

        Raises:
            DamagedCopyError: a difference.
        """
        for request in requests:
            if not request.sglang_sparse.compacted:
                continue
            first, blocks, expected = self._expected[request.rid]
            slots = self._table.req_to_token[pool_row(request), first : first + len(expected[0])].long()
            caches = [
                get(layer)
                for layer in sorted(self._kept.blocks)
                for get in (self._pool.get_key_buffer, self._pool.get_value_buffer)
            ]
            if not all(torch.equal(cache[slots], kv) for cache, kv in zip(caches, expected, strict=True)):
                raise DamagedCopyError(f"{request.rid} holds other KV than it kept")
            for kept in self._kept.blocks.values():
                if not (kept[pool_row(request), :, : len(blocks)] == blocks).all():
                    raise DamagedCopyError(f"{request.rid} looks for what it keeps in other blocks")
