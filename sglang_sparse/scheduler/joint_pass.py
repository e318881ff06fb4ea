"""Data-parallel attention: one dense pass of all ranks in a step where any of them rectifies.

Ranks of attention have batches of their own and meet in each MLP and MoE layer, so that all run the same number of
passes, each with the same idea of how many tokens the others have. SGLang gathers one row of numbers from every rank
before a step; four more say what a rank would rectify in it, whether a row's deadline has come, and whether SGLang's
graph of prefill holds the pass. Where a deadline has come, all run two passes: an extend pass of the due rows, in which
ranks without any are idle, and then the step with the rows that are left, if there are any. Ranks without a deadline
take their rows along that are halfway to it, so that the rows of all ranks are due together from then on, and few steps
have two passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang_sparse.attention.protocols import ModelRunner, ScheduleBatch
from sglang_sparse.config.settings import current_settings, hooked_settings_of
from sglang_sparse.scheduler.due_rows import Rectification, pass_tokens, plan_step
from sglang_sparse.scheduler.partial_batch import STEP, JointPass

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.dp_attn import MLPSyncBatchInfo

# This rank's plan, while SGLang gathers, and whether a graph holds its pass.
_PLAN: list[tuple[Rectification, bool] | None] = [None]


def plan_first(
    original: Callable[..., ScheduleBatch | None],
    batch: ScheduleBatch | None,
    model_runner: ModelRunner,
    *args: object,
    **kwargs: object,
) -> ScheduleBatch | None:
    """Around ``prepare_mlp_sync_batch_raw``: plan what this rank rectifies before SGLang gathers."""
    settings = hooked_settings_of(model_runner.server_args)
    if settings is not None and settings.rectify and batch is not None and batch.forward_mode.is_decode():
        plan = plan_step(settings, batch, pass_tokens(model_runner.server_args), shared=True)
        _PLAN[0] = plan and (plan, _has_graph(model_runner, plan))
    try:
        return original(batch, model_runner, *args, **kwargs)
    finally:
        _PLAN[0] = None


def keep_decode(original: Callable[..., bool], *, local_batch: ScheduleBatch | None, **kwargs: object) -> bool:
    """Around ``_local_prefill_cuda_graph_vote``: vote against graphs of prefill while this rank decodes.

    SGLang makes a prefill of the decode step where all ranks vote for them, and prefill attends densely.
    """
    settings = current_settings()
    decodes = local_batch is not None and local_batch.forward_mode.is_decode()
    if decodes and settings is not None and settings.name:
        return False
    return original(local_batch=local_batch, **kwargs)


def _has_graph(runner: ModelRunner, plan: Rectification) -> bool:
    """Whether this rank's part of a pass fits SGLang's graph of prefill, which all ranks must replay or none."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    graphs = runner.prefill_cuda_graph_runner
    return isinstance(graphs, PrefillCudaGraphRunner) and graphs.can_replay_locally(
        batch_size=len(plan.spans),
        num_tokens=sum(span.tokens for span in plan.spans),
        input_embeds=None,
        replace_embeds=None,
        prefix_lens=[span.start for span in plan.spans],
        is_target_verify=False,
        capture_hidden_mode=None,
        return_logprob=False,
        batch_max_context_len=max(span.end for span in plan.spans),
    )


def append_plan(row: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """After ``MLPSyncBatchInfo._get_local_tensor``: append the numbers of this rank's plan."""
    return _append(row, _PLAN[0])


def append_zeros(row: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """After ``MLPSyncBatchInfo._get_fallback_tensor``: append the same numbers for a rank that is missing."""
    return _append(row, None)


def _append(row: torch.Tensor, planned: tuple[Rectification, bool] | None) -> torch.Tensor:
    settings = current_settings()
    if settings is None or not settings.rectify:
        return row
    numbers = [0, 0, 0, 0]
    if planned:
        plan, graph = planned
        numbers = [sum(span.tokens for span in plan.spans), len(plan.due), plan.urgent, graph]
    return torch.cat([row, torch.tensor(numbers, dtype=row.dtype, device=row.device)])


def attach(_: None, batch: ScheduleBatch, info: MLPSyncBatchInfo, *__: object, **___: object) -> None:
    """After ``_update_gather_batch``: attach this rank's part of a joint pass to its batch, without the due rows."""
    settings = current_settings()
    if settings is None or not settings.rectify or info.tp0_info_cpu is None:
        return
    plan = joint = None
    tokens, rows, urgent, graphs = info.tp0_info_cpu[:, -4:].T.tolist()
    if any(urgent):
        plan = _PLAN[0][0] if _PLAN[0] else None
        for name in ("global_num_tokens", "global_num_tokens_for_logprob"):
            setattr(batch, name, [count - due for count, due in zip(getattr(batch, name), rows, strict=True)])
        joint = JointPass(tokens, rows, whole_step=rows == info.global_num_tokens, graph=all(graphs))
    if plan:
        plan.joint = joint
    setattr(batch, STEP, plan or joint)
