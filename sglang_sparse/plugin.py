"""Entry point of group ``sglang.srt.plugins``: flags and hooks, nothing else."""

from __future__ import annotations

import sys


def register() -> None:
    """Add the ``--sparse-*`` flags to ``ServerArgs`` and register the hook table.

    SGLang logs and swallows whatever a plugin raises here, and would then serve dense. So a failure ends the process
    when the command line asks for sparsity, and is left to SGLang's log otherwise.

    Raises:
        SystemExit: sparsity was asked for on the command line and the plugin cannot provide it.
    """
    from sglang_sparse.hooks import apply, server_args

    try:
        server_args.add_fields()
        apply.register()
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        if any(argument.startswith("--sparse") for argument in sys.argv[1:]):
            from sglang_sparse.versions import installed_sglang

            raise SystemExit(f"sglang_sparse cannot hook SGLang {installed_sglang()}: {error}") from error
        raise
