"""Data-parallel attention: the ranks agree on the dense pass of a step, and run it together.

Ranks of attention have batches of their own and meet in each MLP and MoE layer, so that all run the same number of
passes, each with the same idea of how many tokens the others have. SGLang gathers one row of numbers from every rank
before a step; two more say what a rank rectifies in it. Where any does, all run two passes: an extend pass of the due
rows, in which ranks without any are idle, and then the step with the rows that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang_sparse.attention.protocols import ModelRunner, ScheduleBatch
from sglang_sparse.config.settings import hooked_settings_of
from sglang_sparse.scheduler.partial_batch import AGREED, Agreed
from sglang_sparse.scheduler.prefill_chunks import current_settings
from sglang_sparse.scheduler.rectification import Rectification, pass_tokens, plan_step

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.dp_attn import MLPSyncBatchInfo

# What this rank is about to ask for, while SGLang gathers.
_ASKED: list[Rectification | None] = [None]


def plan_ahead(
    original: Callable[..., ScheduleBatch | None],
    batch: ScheduleBatch | None,
    model_runner: ModelRunner,
    *args: object,
    **kwargs: object,
) -> ScheduleBatch | None:
    """Around ``prepare_mlp_sync_batch_raw``: plan what this rank rectifies before the ranks tell each other."""
    settings = hooked_settings_of(model_runner.server_args)
    if settings is not None and settings.rectify and batch is not None and batch.forward_mode.is_decode():
        _ASKED[0] = plan_step(settings, batch, pass_tokens(model_runner.server_args))
    try:
        return original(batch, model_runner, *args, **kwargs)
    finally:
        _ASKED[0] = None


def tell(row: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """After ``MLPSyncBatchInfo._get_local_tensor``: add the tokens and rows that this rank rectifies."""
    plan = _ASKED[0]
    return _with(row, [sum(span.tokens for span in plan.spans), len(plan.due)] if plan else [0, 0])


def tell_nothing(row: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """After ``MLPSyncBatchInfo._get_fallback_tensor``: the same of a rank that is not there."""
    return _with(row, [0, 0])


def _with(row: torch.Tensor, numbers: list[int]) -> torch.Tensor:
    settings = current_settings()
    if settings is None or not settings.rectify:
        return row
    return torch.cat([row, torch.tensor(numbers, dtype=row.dtype, device=row.device)])


def agree(_: None, batch: ScheduleBatch, info: MLPSyncBatchInfo, gathers: bool, *__: object, **___: object) -> None:
    """After ``_update_gather_batch``: leave what the ranks rectify on the batch, and count these rows out of its step.

    Args:
        gathers: whether the batch has the sizes of all ranks, or this rank's alone.
    """
    settings = current_settings()
    if settings is None or not settings.rectify:
        return
    setattr(batch, AGREED, None)
    plan = _ASKED[0]
    columns = info.tp0_info_cpu[:, -2:].tolist()
    if not any(tokens for tokens, _ in columns):
        return
    if not gathers:
        columns = [[sum(span.tokens for span in plan.spans), len(plan.due)] if plan else [0, 0]]
    rows = [count for _, count in columns]
    agreed = Agreed(batch, plan, [tokens for tokens, _ in columns], rows)
    setattr(batch, AGREED, agreed)
    if plan:
        plan.agreed = agreed
    for name in ("global_num_tokens", "global_num_tokens_for_logprob"):
        setattr(batch, name, [all_ - due for all_, due in zip(getattr(batch, name), rows, strict=True)])
