"""Proof by recomputation that the radix tree holds only exact KV: for tests and for the debug option."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse.attention.protocols import KVPool, ModelConfig, ModelRunner, RadixTree, Scheduler
from sglang_sparse.config import arguments
from sglang_sparse.config.request_options import adapter_of_namespace, prefill_of_namespace
from sglang_sparse.config.settings import settings_of
from sglang_sparse.debug.kv_compare import borrowed, checksums, compare, page_parts, page_slots, stale_summaries
from sglang_sparse.methods.support import is_decode_server
from sglang_sparse.scheduler.inserted_keys import InexactTreeError, remember_inserts
from sglang_sparse.scheduler.prefill_chunks import split_prompt
from sglang_sparse.scheduler.prefix_keys import require_whole_groups, token_ids

if TYPE_CHECKING:
    from sglang_sparse.methods.groups import PrefillGroups
    from sglang_sparse.scheduler.inserted_keys import TreePath

logger = logging.getLogger(__name__)

# The attribute of SGLang's radix cache with its proven pages.
ATTRIBUTE = "sglang_sparse_tree_check"
FORWARD_TOKENS = 2048


@dataclass(frozen=True)
class TreeReport:
    """The result of a check.

    Attributes:
        pages_checked: pages whose KV was recomputed by this check.
        worst_abs_difference: the largest difference of an element of their K or V, 0.0 without pages.
        pages_behind_images: pages of images and of what follows them. Ids alone do not give their KV: only their
            summaries are checked.
    """

    pages_checked: int
    worst_abs_difference: float
    pages_behind_images: int = 0


@dataclass
class _Memory:
    """The proven pages of a tree.

    ``proven`` maps a page to the hash of the tokens up to its end and the checksum of its contents when it was proven.
    Both must still hold, so neither splits, evictions, reuse of the page nor overwriting make it stale.
    """

    proven: dict[int, tuple[int, int]] = field(default_factory=dict)
    seen: tuple[int, int] | None = None


def check_when_idle(_result: None, scheduler: Scheduler, *_: object) -> None:
    """After ``Scheduler.on_idle``: check the tree, if the config asks for it and anything ran since the last check.

    Raises:
        InexactTreeError: see ``check_tree``.
    """
    settings = settings_of(scheduler.server_args)
    if settings is None or not settings.check_exactness or not scheduler.is_fully_idle():
        return
    memory = _memory(scheduler.tree_cache)
    # An insertion raises the first number, a pass that could have overwritten a page the second.
    seen = (remember_inserts(scheduler.tree_cache).count, scheduler.forward_ct)
    if memory.seen == seen:
        return
    report = check_tree(scheduler)
    memory.seen = seen
    if report.pages_checked:
        logger.info(
            "sglang_sparse: %d pages of the radix tree equal their recomputation, worst difference %.3g",
            report.pages_checked,
            report.worst_abs_difference,
        )
    if report.pages_behind_images:
        logger.info(
            "sglang_sparse: %d pages of images and behind them are not recomputed: token ids do not give their KV",
            report.pages_behind_images,
        )


def check_tree(scheduler: Scheduler, tolerance: float | None = None) -> TreeReport:
    """Prove that every page of the radix tree is exact: its K and V dense, its summaries those of its keys.

    With a prefill method, K and V are those of its cold run instead, dense only where that is. Pages that no earlier
    check has proven, and those whose contents changed since, are compared with such a run over the whole path from the
    root, one path at a time (see ``compare_with_recomputed``), and with the LoRA adapter of its requests. What was
    written with an adapter that is no longer loaded is left out: no request finds it. What follows an image is left
    out, too, and counted. No pass may be in flight on another stream than the forward stream.

    Args:
        tolerance: largest allowed absolute difference; ``default_tolerance`` if None.

    Raises:
        InexactTreeError: names the tokens, the layer, the worst difference and the path.
    """
    tree = scheduler.tree_cache
    if tree.disable:
        return TreeReport(0, 0.0)
    memory = _memory(tree)
    runner = scheduler.tp_worker.model_runner
    settings = settings_of(runner.server_args)
    with torch.inference_mode(), _forward_stream(scheduler):
        # The longest first: a path proves the pages that others share with it.
        paths = remember_inserts(tree).paths()
        hashes = {page: found for path in paths for page, found in _hashes(path, tree.page_size)}
        if not hashes:
            return TreeReport(0, 0.0)
        sums = checksums(runner.token_to_kv_pool, [*hashes])
        identities = {page: (found, sums[place]) for place, (page, found) in enumerate(hashes.items())}
        unproven = {page for page, identity in identities.items() if memory.proven.get(page) != identity}
        if not is_decode_server(arguments.of(runner.server_args)):
            # On the decode server of a pair, a request's first step summarises its whole prefix: see `arrivals`.
            _require_fresh_summaries(runner.token_to_kv_pool, sorted(unproven))
        checked, worst, adapters = 0, 0.0, runner.lora_manager
        behind_images: set[int] = set()
        for whole in paths:
            path = _before_images(whole, tree.page_size, runner.model_config)
            behind_images.update((whole.slots[len(path.slots) :: tree.page_size] // tree.page_size).tolist())
            adapter = adapter_of_namespace(path.key.extra_key)
            if adapter and not (adapters and adapter in adapters.loras):
                continue
            prefill = prefill_of_namespace(settings, path.key.extra_key) if settings else None
            require_whole_groups(prefill, path.ends, tree.page_size if path.key.is_bigram else 0)
            difference, proven = _check_path(runner, path, tree.page_size, unproven, tolerance, prefill)
            worst = max(worst, difference)
            checked += len(proven)
            unproven -= proven
            memory.proven.update((page, identities[page]) for page in proven)
    return TreeReport(checked, worst, len(behind_images))


def compare_with_recomputed(
    runner: ModelRunner,
    tokens: list[int],
    slots: torch.Tensor,
    positions: torch.Tensor,
    tolerance: float | None = None,
    prefill: tuple[PrefillGroups | None, int] | None = None,
    adapter: str | None = None,
) -> float:
    """Compare stored KV with that of another run over the same tokens, dense or by a prefill method.

    The run takes place in the very slots, which hold what they held before when this returns or raises: a full pool
    has no others. Meanwhile host memory holds the KV and summaries of the whole sequence, so at most those of SGLang's
    context length: 5 GiB for 32k tokens of Qwen3-8B in bf16. To give chunks back one by one would take less, but the
    next chunk would then be compared with a run over stored KV, which proves less.

    Args:
        tokens: the sequence from its first token.
        slots: ``[len(tokens)]`` int64, where its KV is. Nobody else may use them meanwhile.
        positions: ``[n]`` int64, the compared positions.
        tolerance: largest allowed absolute difference; ``default_tolerance`` if None.
        prefill: the method of the run's prefill, and how many tokens are prompt; None for a dense run.
        adapter: id of the LoRA adapter of the run; None for the base model.

    Returns:
        The largest absolute difference.

    Raises:
        InexactTreeError: a difference above the tolerance, or NaN.
    """
    kv_pool = runner.token_to_kv_pool
    with borrowed(kv_pool, slots) as stored:
        method, prompt = prefill or (None, 0)
        _recompute(runner, tokens, slots, method, prompt, adapter)
        return compare(kv_pool, tokens, positions, slots, stored, tolerance)


def _recompute(
    runner: ModelRunner,
    tokens: list[int],
    slots: torch.Tensor,
    prefill: PrefillGroups | None,
    prompt: int,
    adapter: str | None = None,
) -> None:
    path = runner.attn_backend.prefill
    # A sparse prefill in one piece, or in chunks of whole groups, writes the same.
    group = prefill.group_tokens if prefill else 1
    size = max(1, FORWARD_TOKENS // group) * group
    # SGLang keeps the first row for padding.
    row = runner.req_to_token_pool.req_to_token[0, : len(tokens)]
    before = row.clone()
    row.copy_(slots)
    try:
        for start in range(0, len(tokens), size):
            end = min(start + size, len(tokens))
            if path:
                path.begin([*split_prompt(0, start, end, prompt, prefill)], torch.zeros_like(slots[:1]), counted=False)
            batch = _extend_batch(tokens[start:end], slots[start:end], start)
            if runner.model_config.model_is_mrope:
                batch.mrope_positions = batch.positions.repeat(3, 1)
            if runner.lora_manager is not None:
                batch.lora_ids = [adapter]
                runner.lora_manager.fetch_new_loras({adapter})
                runner.lora_manager.prepare_lora_batch(batch)
            plan = runner.kv_index_translator.own_plan(batch)
            plan.bind(batch, runner.kv_index_translator, cols=None)
            runner.forward(batch)
    finally:
        row.copy_(before)


def _memory(tree: RadixTree) -> _Memory:
    if not hasattr(tree, ATTRIBUTE):
        setattr(tree, ATTRIBUTE, _Memory())
    return getattr(tree, ATTRIBUTE)


@contextmanager
def _forward_stream(scheduler: Scheduler) -> Iterator[None]:
    """Order the block behind every pass that was launched, and everything later behind the block, also if it raises."""
    current = scheduler.device_module.current_stream()
    scheduler.forward_stream.wait_stream(current)
    try:
        with scheduler.forward_stream_ctx:
            yield
    finally:
        current.wait_stream(scheduler.forward_stream)


def _hashes(path: TreePath, size: int) -> Iterator[tuple[int, int]]:
    """Yield the pages of a path, each with a hash of the tokens up to its end."""
    tokens, found = token_ids(path.key), hash((path.key.extra_key, path.key.cache_salt))
    for first, page in zip(range(0, len(tokens), size), (path.slots[::size] // size).tolist(), strict=True):
        found = hash((found, *tokens[first : first + size]))
        yield page, found


def _before_images(path: TreePath, size: int, model: ModelConfig) -> TreePath:
    """Return the whole pages of a path before its first image, whose tokens have ids beyond the vocabulary."""
    # Prefill methods, which write more than ids into keys, do not serve such models.
    ids = path.key.token_ids[: len(path.key)] if model.is_multimodal else ()
    first = next((place for place, token in enumerate(ids) if token >= model.vocab_size), None)
    if first is None:
        return path
    end = first // size * size
    return replace(path, key=path.key[:end], slots=path.slots[:end])


def _require_fresh_summaries(kv_pool: KVPool, pages: list[int]) -> None:
    for part in page_parts(kv_pool, pages) if pages else ():
        stale = part[stale_summaries(kv_pool, part * kv_pool.page_size + kv_pool.page_size - 1)]
        if len(stale):
            raise InexactTreeError(
                f"the summaries of {len(stale)} pages of the radix tree, page {int(stale[0])} among them, are not "
                "what their keys give"
            )


def _check_path(
    runner: Any, path: TreePath, size: int, unproven: set[int], tolerance: float | None, prefill: PrefillGroups | None
) -> tuple[float, set[int]]:
    """Prove the unproven pages of a path; returns the worst difference and these pages."""
    slots = path.slots
    if prefill and path.key.is_bigram:
        # What is behind the last whole group was left by an eviction; no lookup finds it.
        slots = slots[: prefill.boundary(len(slots))]
    pages = (slots[::size] // size).tolist()
    places = [place for place, page in enumerate(pages) if page in unproven]
    if not places:
        return 0.0, set()
    tokens = token_ids(path.key)[: len(slots)]
    positions = page_slots(torch.tensor(places, device=slots.device), size)
    tail = prefill.config.dense_tail if prefill else 0  # beyond the crossover it is not in the tree
    run = prefill, len(tokens) + tail
    adapter = adapter_of_namespace(path.key.extra_key)
    worst = compare_with_recomputed(runner, tokens, slots, positions, tolerance, run, adapter)
    return worst, {pages[place] for place in places}


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
        global_num_token_non_padded=torch.tensor(count, dtype=torch.int32, device=device),
        global_num_token_non_padded_cpu=count,
    )
