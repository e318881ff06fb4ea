"""A general SGLang plugin that reports what a scheduler really built, to prove that nothing was changed."""

from typing import Any


def report(info: dict[str, Any], scheduler: Any, *_: Any) -> None:
    runner = scheduler.tp_worker.model_runner
    pool = runner.token_to_kv_pool
    info["probe"] = {
        "backend": type(runner.attn_backend).__name__,
        "pool": type(pool).__name__,
        "pool_attributes": sorted(vars(pool)),
        "key_buffer": list(pool.get_key_buffer(0).shape),
        "tokens": scheduler.max_total_num_tokens,
        "page_size": scheduler.page_size,
    }


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_init_info", report, HookType.AFTER)
