"""``python -m sglang_sparse.check``: what is served and what is refused, without starting a server.

Without arguments it prints the tables of refused flags and models. With the arguments of a server, for example
``--model-path M --sparse-method resa``, it validates them as the server would and prints the resolved config.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, cast

from sglang_sparse import limits, registry
from sglang_sparse.versions import SUPPORTED_SGLANG, installed_sglang

if TYPE_CHECKING:
    from sglang_sparse.config import SparseServerArgs


def capability_table() -> str:
    """Return the table of methods, dense backends and refusals as Markdown."""
    lines = [
        f"SGLang: {', '.join(SUPPORTED_SGLANG)} (installed: {installed_sglang()})",
        f"decode methods: {', '.join(registry.decode_methods())}",
        f"prefill methods: {', '.join(registry.PREFILL_METHODS)}",
        *(f"dense attention backends, {kind}: {', '.join(names)}" for kind, names in limits.DENSE_BACKENDS.items()),
        "",
        "| refused | why |",
        "| --- | --- |",
    ]
    lines += [f"| {limit.name} | {limit.reason} |" for limit in (*limits.FLAG_LIMITS, *limits.MODEL_LIMITS)]
    lines += [f"| {name} on a GPU | {limits.UNMEASURED} |" for name in limits.CPU_ONLY_METHODS]
    lines += [f"| sparse prefill with {limit.name} | {limit.reason} |" for limit in limits.PREFILL_LIMITS]
    lines += [f"| rectification with {limit.name} | {limit.reason} |" for limit in limits.RECTIFY_LIMITS]
    lines += [f"| dsa with {limit.name} | {limit.reason} |" for limit in limits.INDEXER_LIMITS]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the table, or validate a server's arguments. Returns the exit status."""
    if not arguments:
        print(capability_table())
        return 0
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    server_args = cast("SparseServerArgs", prepare_server_args(arguments))
    flags = {
        f"--sparse-method {server_args.sparse_method}": server_args.sparse_method and server_args.sparse_config,
        f"--sparse-prefill-method {server_args.sparse_prefill_method}": server_args.sparse_prefill_config,
    }
    for flag, resolved in flags.items():
        if resolved:
            print(f"{flag} fits {server_args.model_path}; resolved config:")
            print(json.dumps(json.loads(str(resolved)), indent=2))
    if not any(flags.values()):
        print("these arguments start a dense server: neither --sparse-method nor --sparse-prefill-method was given")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
