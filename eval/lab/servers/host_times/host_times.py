"""For benchmarks only: how long the host is busy in this project's hooks, for each step of a scheduler.

With this folder on ``PYTHONPATH`` an SGLang server with a sparse method has in `/server_info`, under
``internal_states[0].host_times``, the median and the 99th percentile of the microseconds of a step: of all hooks, and
of `PARTS`. Steps that decode are apart from those that prefill, and by their rows: up to 1, 2, 4 and so on. What ran
before the cache was last flushed is left out. The function of SGLang that a hook is around is not counted; others that
a hook calls are, and so are launches of kernels. Attention within a layer is not. A step ends where the next one
begins: what happens in between, as the release of finished requests, counts with the step before.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

NAME = "host_times"
# Steps that are kept of each kind.
STEPS = 20_000
OTHER = "other"
# By module of this project; the rest is `OTHER`.
PARTS = {
    "scheduler.exact_kv": "planning",
    "scheduler.rectification": "rectification",
    "scheduler.joint_pass": "rectification",
    "scheduler.prefix_keys": "prefix_keys",
    "scheduler.prefill_chunks": "prefix_keys",
    "scheduler.sessions": "prefix_keys",
}
STEP = "scheduler.rectification:run_step"

Function = Callable[..., Any]


class Times:
    """Exclusive times: while a function runs within another one, the outer one's time stands still.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._since = clock()
        self._running: list[str | None] = []
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._kind: str | None = None
        self._steps: defaultdict[str, deque[dict[str, float]]] = defaultdict(lambda: deque(maxlen=STEPS))

    def within(self, part: str | None, function: Function) -> Function:
        """The function, timed as a part; None: as nobody's."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._running.pop()

        return timed

    def around(self, part: str | None, function: Function) -> Function:
        """The same of a hook around a function of SGLang, whose time is left out."""
        return self.within(
            part, lambda original, *args, **kwargs: function(self.within(None, original), *args, **kwargs)
        )

    def _switch(self) -> None:
        now = self._clock()
        if self._running and self._running[-1] is not None:
            self._spent[self._running[-1]] += now - self._since
        self._since = now

    def begin_step(self, decodes: bool, rows: int) -> None:
        """End the step before."""
        if self._kind is not None:
            self._steps[self._kind].append(dict(self._spent))
        self._spent.clear()
        self._kind = f"{'decode' if decodes else 'prefill'}, {1 << max(0, rows - 1).bit_length()} rows"

    def forget(self) -> None:
        """Leave out what was counted so far."""
        self._steps.clear()
        self._spent.clear()
        self._kind = None

    def figures(self) -> dict[str, Any]:
        """By kind of step: how many, and ``[median, 99th percentile]`` in microseconds by part."""
        found = {}
        for kind, steps in self._steps.items():
            parts = {name: [spent.get(name, 0.0) for spent in steps] for name in (*PARTS.values(), OTHER)}
            parts["all"] = [sum(spent.values()) for spent in steps]
            found[kind] = {"steps": len(steps)} | {name: _quantiles(values) for name, values in parts.items()}
        return found


def _quantiles(seconds: list[float]) -> list[float]:
    ordered = sorted(seconds)
    return [1e6 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99)]


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_sparse.hooks import hook
    from sglang_sparse.hooks.table import HOOKS

    times, resolve = Times(), hook._resolve
    around = {each.function for each in HOOKS if each.kind == "AROUND"}

    def step(function: Function) -> Function:
        def stepped(original: Function, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            # A verification has no batch. An idle rank runs along with the others.
            if batch is not None and not worker.is_draft_worker and not batch.forward_mode.is_idle():
                times.begin_step(batch.forward_mode.is_decode(), len(batch.reqs))
            return function(original, worker, batch, *args, **kwargs)

        return stepped

    made: dict[str, Function] = {}

    def timed(function: str) -> Function:
        if function not in made:
            found, part = resolve(function), PARTS.get(function.partition(":")[0], OTHER)
            # Checks when nothing runs belong to no step.
            part = None if function.startswith("debug.") else part
            own = times.around(part, found) if function in around else times.within(part, found)
            made[function] = step(own) if function == STEP else own
        return made[function]

    hook._resolve = timed

    def plan(backends: Any, **_: Any) -> None:
        from sglang_sparse.attention.backend import SparseAttentionBackend

        SparseAttentionBackend._prepare = times.within("planning", SparseAttentionBackend._prepare)

    def report(result: Any, *_: Any, **__: Any) -> None:
        result.internal_state[NAME] = times.figures()

    setup = "sglang.srt.model_executor.model_runner_components.attention_backend_setup.build_attention_backends"
    HookRegistry.register(setup, plan, HookType.AFTER)
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.get_internal_state", report, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.flush_cache", lambda *_, **__: times.forget(), HookType.AFTER)
