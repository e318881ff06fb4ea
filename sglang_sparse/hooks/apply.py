"""Hand the hook table to SGLang, and verify that each hook is applied."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Sequence
from functools import cache

from sglang_sparse.config.versions import UnsupportedSGLangError, installed_sglang
from sglang_sparse.hooks import bindings
from sglang_sparse.hooks.hook import Hook
from sglang_sparse.hooks.table import HOOKS


@cache
def active() -> tuple[Hook, ...]:
    """Return the hooks that this machine applies when plugins are loaded.

    On a GPU, hooks of a single method are left out, since every server would import their modules: for DSA, SGLang's
    backend with DeepGEMM. See ``hook_method``.
    """
    import torch

    later = torch.cuda.is_available()
    return tuple(hook for hook in HOOKS if hook.here and not (hook.method and later))


def register(hooks: Sequence[Hook] | None = None) -> None:
    """Register hooks with SGLang, which applies them when all plugins are loaded.

    Args:
        hooks: the hooks; ``active()`` if not given.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    bindings.replace_search()
    for hook in active() if hooks is None else hooks:
        HookRegistry.register(hook.target, hook.lazy(), HookType[hook.kind])


def parameters_of(target: str) -> str:
    """Return the parameters of a function of SGLang, hooked or not, as `Hook.parameters` has them.

    Raises:
        ImportError, AttributeError: there is no such function.
    """
    owner, _, name = target.rpartition(".")
    found = inspect.getattr_static(pkgutil.resolve_name(owner), name)
    signature = inspect.signature(getattr(found, "__func__", found))
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))[1:-1]


def verify(hooks: Sequence[Hook] | None = None) -> None:
    """Verify that hooks are applied in this process, and that their functions have the expected parameters.

    SGLang only logs a hook that it cannot apply, and a server would then run dense or, worse, half sparse.

    Args:
        hooks: the hooks; ``active()`` if not given.

    Raises:
        UnsupportedSGLangError: a hook is missing or its parameters have changed; names it and the SGLang version.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    # The hooks are applied: nobody looks for names any more.
    bindings.forget()
    asked = active() if hooks is None else hooks
    missing = [hook.target for hook in asked if hook.target not in HookRegistry._patched]
    if missing:
        raise UnsupportedSGLangError(f"SGLang {installed_sglang()} has moved what this hooks: {', '.join(missing)}")
    changed = [(hook, got) for hook in asked if (got := parameters_of(hook.target)) != hook.parameters]
    if changed:
        found = "; ".join(f"{hook.target} takes ({got}), expected ({hook.parameters})" for hook, got in changed)
        raise UnsupportedSGLangError(f"SGLang {installed_sglang()} has changed what this hooks: {found}")
