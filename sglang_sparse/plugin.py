"""Entry point of group ``sglang.srt.plugins``: flags and hooks, nothing else."""

from __future__ import annotations

import sys

from setproctitle import getproctitle

# SGLang's processes that call one hooked function or none: what the other hooks import would load the scheduler.
DETOKENIZER, CONTROLLER = "sglang::detokenizer", "sglang::data_parallel_controller"


def register() -> None:
    """Register the hook table, then add the ``--sparse-*`` flags to ``ServerArgs``.

    SGLang logs and swallows whatever a plugin raises here, and would then serve dense. So the flags come last: without
    the hooks they do not exist. And a failure ends the process when the command line asks for sparsity.

    Raises:
        SystemExit: sparsity was asked for on the command line and the plugin cannot provide it.
    """
    process = getproctitle()
    if process == DETOKENIZER:
        return
    try:
        from sglang_sparse.hooks import apply

        if process == CONTROLLER:
            return apply.register([hook for hook in apply.active() if hook.process == "controller"])
        from sglang_sparse.hooks.server_args import add_fields
        from sglang_sparse.scheduler.speculation import algorithm

        apply.register()
        algorithm.register()
        add_fields()
    except (ImportError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        if any(argument.startswith("--sparse") for argument in sys.argv[1:]):
            raise SystemExit(_message(error)) from error
        raise


def _message(error: Exception) -> str:
    from sglang_sparse.config.versions import UnsupportedSGLangError, installed_sglang

    if not isinstance(error, UnsupportedSGLangError):
        error = UnsupportedSGLangError(f"cannot hook SGLang {installed_sglang()}: {error}")
    return str(error)
