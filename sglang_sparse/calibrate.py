"""``python -m sglang_sparse.calibrate``: measure on your own checkpoint what a sparse method needs to know of it.

``--method anchor`` finds thresholds of a sparse prefill, ``--method robsa`` the layers of an MLA model that select by
their RoPE part, ``--method skip_softmax`` the factors that skip a share of the blocks; ``--method M --help`` says how.
Each is a module of ``calibration/`` (see `Method`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Protocol

import torch

from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.tools.calibration import anchor, robsa, skip_softmax
from sglang_sparse.tools.calibration.capture import CalibrationError
from sglang_sparse.tools.calibration.prompts import FORMS


class Method(Protocol):
    """A method's module for calibration; its docstring is the help."""

    __doc__: str | None

    @property
    def DEFAULT_LENGTHS(self) -> str:
        """Tokens of the prompts."""
        ...

    @staticmethod
    def use(args: argparse.Namespace) -> str:
        """Flags of a server that take the file, which is written."""
        ...

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the arguments that only this method has."""
        ...

    @staticmethod
    def check(args: argparse.Namespace) -> None:
        """Judge and complete them; raises CalibrationError."""
        ...

    @staticmethod
    def run(args: argparse.Namespace) -> dict[str, object]:
        """Measure, and return the config to write; raises CalibrationError or SparseArgumentError."""
        ...

    @staticmethod
    def conclude(config: dict[str, object], args: argparse.Namespace) -> None:
        """Show what was found, once the file is written."""
        ...


METHODS: dict[str, Method] = {"anchor": anchor, "robsa": robsa, "skip_softmax": skip_softmax}


def _length(text: str) -> int:
    number, factor = (text[:-1], 1024) if text.endswith("k") else (text, 1)
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: tokens, such as 32768 or 32k")
    return int(number) * factor


def _lengths(text: str) -> list[int]:
    return sorted({_length(part) for part in text.split(",")})


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        CalibrationError: names the argument, what it was and what is allowed.
    """
    # The other arguments, and the help, depend on it.
    first = argparse.ArgumentParser("sglang_sparse.calibrate", add_help=False, allow_abbrev=False)
    first.add_argument("--method", choices=list(METHODS), default="anchor", help="for which (default: %(default)s)")
    method = METHODS[first.parse_known_args(arguments)[0].method]
    parser = argparse.ArgumentParser(
        first.prog, description=method.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[first]
    )
    parser.add_argument("--model-path", required=True, help="folder or name of a checkpoint that transformers loads")
    data = parser.add_argument("--prompts", "--data", type=Path, nargs="+", default=[], metavar="FILE")
    data.help = f"{FORMS}; see the method's page in docs"
    parser.add_argument(
        "--lengths", type=_lengths, help=f"tokens of the prompts, such as 8k,16k (default: {method.DEFAULT_LENGTHS})"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="let Python code of the checkpoint run")
    parser.add_argument("--revision", help="of a model that is given by name: branch, tag or commit")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of prompts (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="file to write, .json")
    method.add_arguments(parser)
    args = parser.parse_args(arguments)
    # A method may fit its own lengths to a model, and never the user's.
    args.default_lengths = args.lengths is None
    args.lengths = args.lengths or _lengths(method.DEFAULT_LENGTHS)
    method.check(args)
    if args.out.suffix != ".json" or not args.out.parent.is_dir():
        raise CalibrationError(field="--out", got=str(args.out), allowed="a .json file in a folder that exists")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 where it cannot answer."""
    try:
        args = parse(arguments)
        method = METHODS[args.method]
        config = method.run(args)
        args.out.write_text(json.dumps(config, indent=1) + "\n")
        method.conclude(config, args)
    except (SparseArgumentError, OSError, torch.OutOfMemoryError) as error:
        print(f"sglang_sparse.calibrate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("sglang_sparse.calibrate: interrupted", file=sys.stderr)
        return 130
    print(f"use it: {method.use(args)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
