"""Hooks of SGLang's model runner: its attention backend, and the hooks of a single method."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang_sparse.attention import memory
from sglang_sparse.attention.backend import SparseAttentionBackend
from sglang_sparse.attention.counters import DraftCounts
from sglang_sparse.attention.cuda_graphs import GraphVariants, offer
from sglang_sparse.attention.kv_scales import attend_in_the_cache
from sglang_sparse.attention.protocols import ModelRunner
from sglang_sparse.config import arguments
from sglang_sparse.config.settings import hooked_settings_of
from sglang_sparse.hooks import apply, refusals
from sglang_sparse.hooks.equal_ranks import require_equal_ranks
from sglang_sparse.hooks.layer_checks import require_layers
from sglang_sparse.hooks.table import HOOKS
from sglang_sparse.scheduler.compaction import Compaction
from sglang_sparse.scheduler.fa3_packing import divider_of
from sglang_sparse_kernels.common import launch

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput, UpdateWeightFromDiskReqOutput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    from sglang_sparse.config.settings import Settings


def wrap_attention_backend(
    original: Callable[[ModelRunner, object], AttentionBackend], runner: ModelRunner, dense: object
) -> AttentionBackend:
    """Around ``attn_backend_wrapper``: wrap the dense backend of a sparse server, and compare the ranks.

    Raises:
        RuntimeError: a hook is not applied in this process, or the page summaries were never allocated.
        SparseArgumentError: another rank of this server runs other methods, or another config.
    """
    backend = original(runner, dense)
    if runner.is_draft_worker:
        return backend
    settings = hooked_settings_of(runner.server_args)
    if settings is not None:
        backend = _wrapped(backend, runner, settings)
    # Here the crossover is known, and no graph is captured yet: ranks that capture different ones wait for each other.
    require_equal_ranks(runner.server_args)
    return backend


def _wrapped(backend: AttentionBackend, runner: ModelRunner, settings: Settings) -> SparseAttentionBackend:
    apply.verify()
    kv_pool = runner.token_to_kv_pool
    if not hasattr(kv_pool, memory.ATTRIBUTE):
        raise RuntimeError(f"the KV pool {type(kv_pool).__name__} was built without page summaries")
    if kv_pool.dtype == torch.float8_e4m3fn:
        attend_in_the_cache(backend, runner.model)
    wrapped = SparseAttentionBackend(backend, runner, settings)
    buffers, model = getattr(kv_pool, memory.ATTRIBUTE), memory.model_shape(runner.model_config, kv_pool.dtype)
    args = arguments.of(runner.server_args)
    if (args.pp_size or 1) == args.nnodes == 1:
        # Other nodes may have other GPUs, and ranks must divide a step alike.
        wrapped.divide = divider_of(args.get_attention_backends()[0], model, buffers.overflow.device)
    if arguments.drafts_itself(args):
        wrapped.counters.drafts = DraftCounts()
    for path in wrapped.keeps:
        if path.method.compacts:
            path.compaction = Compaction(path.method, buffers, kv_pool)
    offer(runner.model_config.hf_config, GraphVariants(wrapped, settings))
    return wrapped


def hook_method(original: Callable[[ModelRunner], None], runner: ModelRunner) -> None:
    """Around ``ModelRunner.load_model``: apply the hooks of the server's method before its model binds the functions.

    With deterministic inference the kernels are told before anything is sized for them.

    Weights that SGLang has downloaded by then are checked afterwards, and so are the layers: the main process could not
    read either.

    Raises:
        SparseArgumentError: the weights do not fit the method, or a sparse layer is of a kind that is not served.
        UnsupportedSGLangError: a hook is missing; names it and the SGLang version.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    settings = hooked_settings_of(runner.server_args)
    name = settings.name if settings else None
    alone = settings is not None and arguments.deterministic(arguments.of(runner.server_args))
    launch.fixed_rows = launch.FEW_ROWS if alone else None
    found = tuple(hook for hook in HOOKS if hook.method and hook.method == name and hook.here)
    new = [hook for hook in found if hook.target not in HookRegistry._hooks]
    if new:
        apply.register(new)
        HookRegistry.apply_hooks()
    apply.verify(found)
    original(runner)
    if settings is None or runner.is_draft_worker:
        return
    if found:
        refusals.require_weights(arguments.of(runner.server_args), settings, runner.model_config)
    require_layers(settings, runner.model, runner.model_config)


def refuse_other_weights(
    original: Callable[[SchedulerWeightUpdaterManager, UpdateWeightFromDiskReqInput], UpdateWeightFromDiskReqOutput],
    updater: SchedulerWeightUpdaterManager,
    update: UpdateWeightFromDiskReqInput,
) -> UpdateWeightFromDiskReqOutput:
    """Around ``update_weights_from_disk`` of a scheduler: judge new weights as those of the start were judged.

    Returns:
        SGLang's answer; one without success, which is HTTP status 400, if they do not fit the methods.
    """
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    runner = updater.tp_worker.model_runner
    settings = hooked_settings_of(runner.server_args)
    if settings is not None:
        model = copy.copy(runner.model_config)
        # The revision was that of the first weights' repository.
        model.revision = model.revision if update.model_path == model.model_path else None
        model.model_path = update.model_path
        # A method that comes along has the calibration of the decode method.
        prefill = None if settings.comes_along else settings.prefill
        reason = settings.decode.refuse_weights(model) or (prefill and prefill.refuse_weights(model))
        if reason:
            return UpdateWeightFromDiskReqOutput(success=False, message=f"{settings.flag}: {reason}")
    return original(updater, update)
