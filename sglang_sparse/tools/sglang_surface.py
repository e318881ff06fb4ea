"""List the names of SGLang that this plugin uses and an installed SGLang lacks: the first step of a port."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from sglang_sparse.hooks import deterministic, limits
from sglang_sparse.hooks.apply import parameters_of
from sglang_sparse.hooks.model_kinds import MODEL_KINDS
from sglang_sparse.hooks.table import HOOKS
from sglang_sparse.methods import rocketkv
from sglang_sparse.methods.dsa import decode
from sglang_sparse.methods.support import FlagLimit

# Errors of looking a name up in an SGLang that this package was not written for.
FOUND_OTHERWISE = (ImportError, AttributeError, TypeError, ValueError)
PACKAGE = Path(__file__).parent.parent

# SGLang's class of every variable, argument or attribute of this name in this package.
CLASSES = {
    "_runner": "sglang.srt.model_executor.model_runner.ModelRunner",
    "_target_worker": "sglang.srt.managers.tp_worker.TpModelWorker",
    "HookRegistry": "sglang.srt.plugins.hook_registry.HookRegistry",
    "adder": "sglang.srt.managers.schedule_policy.PrefillAdder",
    "allocator": "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator",
    "collector": "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector",
    "core": "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface",
    "forward_batch": "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
    "forward_mode": "sglang.srt.model_executor.forward_batch_info.ForwardMode",
    "indexer": "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer",
    "kv": "sglang.srt.managers.schedule_batch.ReqKvInfo",
    "kv_pool": "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
    "kvc": "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator",
    "lock": "sglang.srt.mem_cache.base_prefix_cache.TreeLock",
    "logits_output": "sglang.srt.layers.logits_processor.LogitsProcessorOutput",
    "manager": "sglang.srt.managers.tokenizer_manager.TokenizerManager",
    "memory_budget": "sglang.srt.mem_cache.prefill_budget.PrefillBudget",
    "model_config": "sglang.srt.configs.model_config.ModelConfig",
    "model_runner": "sglang.srt.model_executor.model_runner.ModelRunner",
    "request": "sglang.srt.managers.schedule_batch.Req",
    "req_to_token_pool": "sglang.srt.mem_cache.memory_pool.ReqToTokenPool",
    "runner": "sglang.srt.model_executor.model_runner.ModelRunner",
    "running": "sglang.srt.managers.schedule_batch.ScheduleBatch",
    "sampling_params": "sglang.srt.sampling.sampling_params.SamplingParams",
    "scheduled": "sglang.srt.entrypoints.engine.SchedulerInitResult",
    "scheduler": "sglang.srt.managers.scheduler.Scheduler",
    "server_args": "sglang_sparse.hooks.server_args.SparseServerArgs",
    "tree": "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache",
    "tree_cache": "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache",
    "tree_core": "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface",
    "worker": "sglang.srt.managers.tp_worker.TpModelWorker",
}


def imports() -> dict[str, str]:
    """Return every name that this package imports from SGLang, dotted, with the file that does so."""
    found = {}
    for path, tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
                found |= {f"{node.module}.{alias.name}": path for alias in node.names}
    return found


def attributes() -> dict[str, str]:
    """Return every attribute that this package reads or writes of SGLang's objects, dotted, with the file."""
    found = {}
    for path, tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (owner := CLASSES.get(_name(node.value))):
                found[f"{owner}.{node.attr}"] = path
    return found


def flag_limits() -> dict[str, tuple[FlagLimit, ...]]:
    """Return the limits of flags, by the names of their tables or of the kinds of models that they are for."""
    tables = {
        name: table
        for module in (limits, deterministic, decode, rocketkv)
        for name, table in vars(module).items()
        if name.endswith("_LIMITS")
    }
    return tables | {kind.name: kind.limits for kind in MODEL_KINDS}


def problems() -> list[tuple[str, str]]:
    """Return what the installed SGLang lacks or has changed: dotted names with the problem."""
    found = []
    for hook in HOOKS:
        try:
            got = parameters_of(hook.target)
        except FOUND_OTHERWISE as error:
            found.append((hook.target, f"hooked by {hook.function}: {error}"))
            continue
        if got != hook.parameters:
            found.append((hook.target, f"hooked by {hook.function}: takes ({got}), expected ({hook.parameters})"))
    for name, path in imports().items():
        try:
            pkgutil.resolve_name(name)
        except FOUND_OTHERWISE as error:
            found.append((name, f"imported by {path}: {error}"))
    for name, path in attributes().items():
        owner, _, attribute = name.rpartition(".")
        try:
            known = _known(pkgutil.resolve_name(owner))
        except FOUND_OTHERWISE as error:
            found.append((owner, f"used by {path}: {error}"))
            continue
        if attribute not in known:
            found.append((name, f"used by {path}: no class of its line defines or assigns it"))
    return sorted({*found, *_lost_flags()})


def _lost_flags() -> Iterator[tuple[str, str]]:
    """Yield the arguments that refusals read and SGLang no longer has."""
    from sglang.srt.server_args import ServerArgs

    record: Any = ServerArgs
    for limit in (limit for table in flag_limits().values() for limit in table):
        try:
            limit.got(record(model_path="none"))
        except FOUND_OTHERWISE as error:
            yield "sglang.srt.server_args.ServerArgs", f"refused as {limit.name}: {error}"


def _sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE.parent).as_posix(), ast.parse(path.read_text())


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@cache
def _known(owner: type[object]) -> set[str]:
    """Names that a class, or one that it derives from, defines, annotates or assigns to ``self``."""
    known: set[str] = set()
    for base in owner.__mro__:
        known |= {*vars(base), *vars(base).get("__annotations__", ())}
        if base.__module__.split(".")[0] in ("sglang", "sglang_sparse"):
            nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base))))
            stored = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
            known |= {node.attr for node in stored if _name(node.value) == "self"}
    return known
