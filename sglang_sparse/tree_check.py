"""Proof by recomputation that the radix tree holds only exact KV: for tests and for the debug option."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sglang_sparse.config import settings_of
from sglang_sparse.kv_check import InexactTreeError, checksums, compare, page_parts, page_slots, stale_summaries

logger = logging.getLogger(__name__)

# The attribute of SGLang's radix cache that holds what was proven about it.
ATTRIBUTE = "sglang_sparse_tree_check"
FORWARD_TOKENS = 2048


@dataclass(frozen=True)
class TreeReport:
    """What a check did.

    Attributes:
        pages_checked: pages whose KV was recomputed by this check.
        worst_abs_difference: the largest difference of an element of their K or V, 0.0 without pages.
        paths_skipped: paths with unproven pages that the free slots could not hold.
    """

    pages_checked: int
    worst_abs_difference: float
    paths_skipped: int = 0


@dataclass
class _Memory:
    """What is known about a tree.

    ``proven`` maps a page to the hash of the tokens up to its end and the checksum of its contents when it was proven.
    Both must still hold, so neither splits, evictions, reuse of the page nor overwriting make it stale.
    """

    proven: dict[int, tuple[int, int]] = field(default_factory=dict)
    seen: tuple[int, int] | None = None
    warned: bool = False


@dataclass(frozen=True)
class _Node:
    """A node of the tree: its pages, the position of its first token and the pages' identities."""

    node: Any
    start: int
    pages: list[int]
    hashes: list[int]


def check_when_idle(_result: None, scheduler: Any, *_: Any) -> None:
    """After ``Scheduler.on_idle``: check the tree, if the config asks for it and anything ran since the last check.

    Raises:
        InexactTreeError: see ``check_tree``.
    """
    settings = settings_of(scheduler.server_args)
    if settings is None or not settings.config.check_exactness or not scheduler.is_fully_idle():
        return
    from sglang.srt.mem_cache.radix_cache import TreeNode

    memory = _memory(scheduler.tree_cache)
    # A new node raises the first number, a pass that could have overwritten a page the second.
    seen = (TreeNode.counter, scheduler.forward_ct)
    if memory.seen == seen:
        return
    report = check_tree(scheduler)
    memory.seen = seen
    if report.pages_checked or report.paths_skipped:
        logger.info(
            "sglang_sparse: %d pages of the radix tree equal a dense recomputation, worst difference %.3g; "
            "%d paths skipped for lack of free slots",
            report.pages_checked,
            report.worst_abs_difference,
            report.paths_skipped,
        )


def check_tree(scheduler: Any, tolerance: float | None = None, scratch: torch.Tensor | None = None) -> TreeReport:
    """Prove that every page of the radix tree is exact: its K and V dense, its summaries those of its keys.

    Pages that no earlier check has proven, and those whose contents changed since, are compared with a dense pass over
    the whole path from the root. No pass may be in flight on another stream than the forward stream.

    Args:
        scheduler: SGLang's ``Scheduler``.
        tolerance: largest allowed absolute difference; ``default_tolerance`` if None.
        scratch: ``[n]`` int64, slots of whole pages that nobody owns; taken from the allocator if None.

    Raises:
        InexactTreeError: names the tokens, the layer, the worst difference and the path.
    """
    from sglang.srt.mem_cache.radix_cache import RadixCache

    tree = scheduler.tree_cache
    if not isinstance(tree, RadixCache) or tree.disable:
        return TreeReport(0, 0.0)
    memory = _memory(tree)
    runner = scheduler.tp_worker.model_runner
    with torch.inference_mode(), _forward_stream(scheduler):
        nodes = list(_nodes(tree))
        if not nodes:
            return TreeReport(0, 0.0)
        pages = [page for node in nodes for page in node.pages]
        identities = dict(zip(pages, _identities(runner.token_to_kv_pool, nodes, pages), strict=True))
        unproven = {page for page, identity in identities.items() if memory.proven.get(page) != identity}
        _require_fresh_summaries(runner.token_to_kv_pool, sorted(unproven))
        report = TreeReport(0, 0.0)
        # Deepest first: a path proves the pages of its inner nodes along with its own.
        for node in sorted(nodes, key=lambda node: node.start, reverse=True):
            if unproven.isdisjoint(node.pages):
                continue
            tokens, slots = _path(node.node)
            report, proven = _check_path(scheduler, tokens, slots, unproven, tolerance, scratch, report)
            unproven -= proven
            memory.proven.update((page, identities[page]) for page in proven)
    return report


def dense_pass(runner: Any, tokens: list[int], slots: torch.Tensor) -> None:
    """Run the model densely over a sequence, and write its KV.

    Uses the row of the token table that SGLang keeps for padding, and restores it.

    Args:
        runner: SGLang's ``ModelRunner``.
        tokens: the sequence.
        slots: ``[len(tokens)]`` int64, where its KV goes.
    """
    row = runner.req_to_token_pool.req_to_token[0, : len(tokens)]
    before = row.clone()
    row.copy_(slots)
    for start in range(0, len(tokens), FORWARD_TOKENS):
        end = min(start + FORWARD_TOKENS, len(tokens))
        runner.forward(_extend_batch(tokens[start:end], slots[start:end], start))
    row.copy_(before)


def _memory(tree: Any) -> _Memory:
    if not hasattr(tree, ATTRIBUTE):
        setattr(tree, ATTRIBUTE, _Memory())
    return getattr(tree, ATTRIBUTE)


@contextmanager
def _forward_stream(scheduler: Any) -> Iterator[None]:
    """Order the block behind every pass that was launched, and everything later behind the block."""
    current = scheduler.device_module.current_stream()
    scheduler.forward_stream.wait_stream(current)
    with scheduler.forward_stream_ctx:
        yield
    current.wait_stream(scheduler.forward_stream)


def _nodes(tree: Any) -> Iterator[_Node]:
    size = tree.page_size
    stack = [(child, 0, 0) for child in tree.root_node.children.values()]
    while stack:
        node, start, parent_hash = stack.pop()
        tokens = list(node.key.raw_token_ids())
        hashes = []
        for first in range(0, len(tokens), size):
            parent_hash = hash((parent_hash, *tokens[first : first + size]))
            hashes.append(parent_hash)
        yield _Node(node, start, (node.value[::size] // size).tolist(), hashes)
        stack += [(child, start + len(tokens), parent_hash) for child in node.children.values()]


def _path(node: Any) -> tuple[list[int], torch.Tensor]:
    """Tokens from the root to the end of a node, and their slots ``[tokens]`` int64."""
    nodes = []
    while node.parent is not None:
        nodes.append(node)
        node = node.parent
    nodes.reverse()
    return [token for node in nodes for token in node.key.raw_token_ids()], torch.cat([node.value for node in nodes])


def _identities(kv_pool: Any, nodes: list[_Node], pages: list[int]) -> Iterator[tuple[int, int]]:
    hashes = (identity for node in nodes for identity in node.hashes)
    return zip(hashes, checksums(kv_pool, pages), strict=True)


def _require_fresh_summaries(kv_pool: Any, pages: list[int]) -> None:
    for part in page_parts(kv_pool, pages) if pages else ():
        stale = part[stale_summaries(kv_pool, part * kv_pool.page_size + kv_pool.page_size - 1)]
        if len(stale):
            raise InexactTreeError(
                f"the summaries of {len(stale)} pages of the radix tree, page {int(stale[0])} among them, are not "
                "what their keys give"
            )


def _check_path(
    scheduler: Any,
    tokens: list[int],
    slots: torch.Tensor,
    unproven: set[int],
    tolerance: float | None,
    scratch: torch.Tensor | None,
    report: TreeReport,
) -> tuple[TreeReport, set[int]]:
    """Recompute a path and compare its unproven pages; returns the report with them, and what was proven."""
    allocator = scheduler.token_to_kv_pool_allocator
    own = None
    if scratch is None:
        scratch = own = allocator.alloc(len(tokens))
    if scratch is None or len(scratch) < len(tokens):
        memory = _memory(scheduler.tree_cache)
        if not memory.warned:
            logger.warning(
                "sglang_sparse: a path of %d tokens stays unchecked until as many slots are free", len(tokens)
            )
            memory.warned = True
        return replace(report, paths_skipped=report.paths_skipped + 1), set()
    runner = scheduler.tp_worker.model_runner
    size = allocator.page_size
    try:
        dense_pass(runner, tokens, scratch[: len(tokens)])
        pages = (slots[::size] // size).tolist()
        positions = [place for place, page in enumerate(pages) if page in unproven]
        where = page_slots(torch.tensor(positions, device=slots.device), size)
        worst = compare(runner.token_to_kv_pool, tokens, where, slots[where], scratch[where], tolerance)
    finally:
        if own is not None:
            allocator.free(own)
    checked = report.pages_checked + len(positions)
    return TreeReport(checked, max(report.worst_abs_difference, worst), report.paths_skipped), {
        pages[place] for place in positions
    }


def _extend_batch(tokens: list[int], slots: torch.Tensor, start: int) -> Any:
    """A ``ForwardBatch`` of one row: made without a ``ScheduleBatch``, so that no request appears to run."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    device, count, end = slots.device, len(tokens), start + len(tokens)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
        req_pool_indices=torch.zeros(1, dtype=torch.int64, device=device),
        seq_lens=torch.tensor([end], dtype=torch.int64, device=device),
        out_cache_loc=slots,
        seq_lens_sum=end,
        orig_seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
        seq_lens_cpu=torch.tensor([end], dtype=torch.int64),
        spec_algorithm=SpeculativeAlgorithm.NONE,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        positions=torch.arange(start, end, dtype=torch.int64, device=device),
        extend_num_tokens=count,
        extend_seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        extend_prefix_lens=torch.tensor([start], dtype=torch.int32, device=device),
        extend_start_loc=torch.zeros(1, dtype=torch.int32, device=device),
        extend_prefix_lens_cpu=[start],
        extend_seq_lens_cpu=[count],
        extend_logprob_start_lens_cpu=[count],
        num_token_non_padded=torch.tensor(count, dtype=torch.int32, device=device),
        num_token_non_padded_cpu=count,
    )
