"""A store of KV behind SGLang's prefix cache, in a folder: for tests of external cache linkers.

A layer arrives where somebody waits for it, and not before: who reads keys without waiting reads others.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker


class Layers:
    """Copies that are still to be made, by layer."""

    def __init__(self, count: int):
        self.consumer_index = self.started = -1
        self.copies: list[list[Callable[[], None]]] = [[] for _ in range(count)]

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        while self.copies[layer]:
            self.copies[layer].pop()()


class FolderLinker(UnifiedCacheLinker):
    def __init__(self, server_args: Any, params: Any, *, extra_config: dict[str, str], **_: Any):
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.folder, self.page = Path(extra_config["folder"]), params.page_size
        self.buffers = [pool.kv_buffer] if hasattr(pool, "kv_buffer") else [pool.k_buffer, pool.v_buffer]
        self.layer_done_counter: Any = Layers(len(self.buffers[0]))
        self.pools = {PoolName.KV: pool}
        self.queued: dict[str, PoolTransfer] = {}
        self.offloaded = 0

    def slots(self, transfer: PoolTransfer) -> list[tuple[Path, torch.Tensor]]:
        """Each page's file and slots."""
        (keys, indices) = transfer.keys or [], transfer.device_indices
        return [(self.folder / key, part) for key, part in zip(keys, indices.long().split(self.page), strict=True)]

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        (keys,) = (transfer.keys for transfer in transfers)
        known = [(self.folder / key).exists() for key in keys]
        return [*range(1, (*known, False).index(False) + 1)]

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        (self.queued[rid],) = transfers
        return True

    def start_layer_wise_loading(self) -> int:
        if not self.queued:
            return -1
        for path, slots in (pair for transfer in self.queued.values() for pair in self.slots(transfer)):
            for buffer, layers in zip(self.buffers, pickle.loads(path.read_bytes()), strict=True):
                for layer, rows in enumerate(layers):
                    copy = buffer[layer].index_copy_
                    self.layer_done_counter.copies[layer].append(
                        lambda copy=copy, slots=slots, rows=rows: copy(0, slots, rows)
                    )
        self.queued.clear()
        self.layer_done_counter.started += 1
        return self.layer_done_counter.started

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return not any(self.layer_done_counter.copies)

    def cancel_queued_load(self, rid: str) -> bool:
        return self.queued.pop(rid, None) is not None

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        for path, slots in (pair for transfer in transfers for pair in self.slots(transfer)):
            path.write_bytes(pickle.dumps([[layer[slots] for layer in buffer] for buffer in self.buffers]))
        self.offloaded += 1
        return True

    def num_completed_offloads(self) -> int:
        return self.offloaded

    def pop_completed_offload(self) -> bool:
        self.offloaded -= 1
        return True

    def reset(self) -> None:
        self.queued.clear()

    def close(self) -> None:
        pass
