"""Two decode CUDA graphs for every batch size, a dense and a sparse one, and the choice between them.

SGLang keys a captured graph by size and an optional variant, which only LoRA uses (refused with sparsity). So a batch
below the crossover replays SGLang's own dense graph and pays nothing for sparsity but the refresh of the summaries.
What the dense backend allocates for a size serves both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_sparse.config.settings import settings_of


def capture_both(
    original: Callable[..., None],
    runner: Any,
    size: int,
    forward: Callable[..., Any],
    stream_idx: int | None = None,
    variant_label: str | None = None,
    attention_variant: str | None = None,
) -> None:
    """Around ``DecodeCudaGraphRunner.capture_one_shape``: capture the dense and the sparse variant.

    With ``dense_fallback: never`` only the sparse one exists, without a decode method only the dense one.
    """
    settings = settings_of(runner.model_runner.server_args)
    if settings is None or runner.model_runner.is_draft_worker:
        return original(runner, size, forward, stream_idx, variant_label, attention_variant)
    variants = ("sparse",) if settings.config.dense_fallback == "never" else ("dense", "sparse")
    for number, variant in enumerate(variants if settings.name else ("dense",)):
        runner.attn_backend.begin_capture(size, sparse=variant == "sparse", prepared=number > 0)
        original(runner, size, forward, stream_idx, variant_label, variant)


def graph_variant(original: Callable[..., str | None], runner: Any, forward_batch: Any, *args: Any) -> str | None:
    """Around ``_resolve_attention_variant``: name the graph that this batch replays."""
    if settings_of(runner.model_runner.server_args) is None or runner.model_runner.is_draft_worker:
        return original(runner, forward_batch, *args)
    plan = runner.attn_backend.plan(forward_batch.seq_lens_cpu)
    return "sparse" if plan.sparse else "dense"


def no_post_capture_sizing(original: Callable[[Any], bool], server_args: Any) -> bool:
    """Around ``post_capture_kv_sizing_planned``: never with sparsity, whose buffers are sized with the KV pool."""
    return original(server_args) if settings_of(server_args) is None else False
