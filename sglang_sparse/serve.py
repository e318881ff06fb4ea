"""``python -m sglang_sparse.serve --recipe NAME [flags of SGLang, which win]``: start a server as a recipe says.

``--list`` prints the recipes, and ``--dry-run`` the command instead of running it. Both ask what a server with a GPU
would answer; a start asks for the machine that it is on. What this plugin would refuse is not started: it is said why.
A path that ends in ``.toml`` is a recipe of one's own.

Exit status: 0; 1 where the recipe with these flags is refused, which ``--dry-run`` prints all the same; 2 for what is
no recipe and no flag.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.tools import recipes
from sglang_sparse.tools.dry_run import refusal
from sglang_sparse.tools.recipes import Recipe

LAUNCH = ("-m", "sglang.launch_server")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _run(recipe: Recipe) -> str:
    return recipe.run if recipe.run == "not run" else f"run {recipe.run}"


def _listed(name: str) -> list[str]:
    recipe = recipes.load(name)
    reason = refusal(recipe.arguments(), recipe.attention, True, recipe.config)
    methods = [asked.method for asked in (recipe.decode, recipe.prefill) if asked]
    return [
        name,
        recipe.model_path,
        f"{recipe.gpus} x {recipe.gpu}",
        f"{recipe.context_length} tokens",
        " + ".join(methods),
        _run(recipe),
        "served" if reason is None else f"refused: {reason}",
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def describe(recipe: Recipe) -> str:
    """Describe a recipe: its use, its needs and its measurements."""
    lines = [
        f"{recipe.title}: {recipe.gpus} x {recipe.gpu}, {recipe.context_length} tokens, {_run(recipe)}",
        *(f"before the first start: {step}" for step in recipe.before),
        *(f"note: {note}" for note in recipe.notes),
        *map(str, recipe.measured),
    ]
    return "\n".join(lines)


def serve(name: str, further: Sequence[str], dry_run: bool) -> int:
    """Replace this process by a recipe's server, or print its command.

    Args:
        name: of the recipe, or the path of one.
        further: flags of SGLang that come behind the recipe's, and win.
        dry_run: print the command.

    Returns:
        The exit status; a server that starts does not return.

    Raises:
        ValueError: there is no such recipe, or SGLang has no such flags.
    """
    recipe = recipes.load(name)
    arguments = [*recipe.arguments(), *further]
    reason = refusal(arguments, recipe.attention, dry_run or _has_gpu(), recipe.config)
    print(describe(recipe), file=sys.stderr)
    if dry_run:
        print(shlex.join(["python", *LAUNCH, *arguments]))
    if reason is not None:
        print(f"sglang_sparse: error: recipe {name} is refused, nothing starts: {reason}", file=sys.stderr)
        return 1
    if not dry_run:
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *LAUNCH, *arguments])
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """List recipes, print a command or start a server. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="sglang_sparse.serve", description=__doc__, allow_abbrev=False)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--recipe", metavar="NAME", help=f"one of {', '.join(recipes.names())}, or a .toml file")
    asked.add_argument("--list", action="store_true", help="print the recipes and whether a GPU server has them")
    parser.add_argument("--dry-run", action="store_true", help="print the command, and start nothing")
    args, further = parser.parse_known_args(arguments)
    try:
        if args.list:
            if further:
                message = f"--list: got {' '.join(further)}, allowed: nothing else"
                raise SparseArgumentError(message, field="--list", got=further)
            print(_table([_listed(name) for name in recipes.names()]))
            return 0
        return serve(args.recipe, further, args.dry_run)
    except ValueError as error:
        print(f"sglang_sparse: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
