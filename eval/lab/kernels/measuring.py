"""How a command that measures ends, whatever it measures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from eval.lab.tables.files import any_table
from eval.live.client import FAILURES


def measured(command: str, parse: Callable[[], argparse.Namespace], run: Callable[[argparse.Namespace], int]) -> int:
    """Run a command that writes a file, and print the table of the file.

    Args:
        command: its name.
        parse: reads its command line; ``out`` is the file.
        run: writes the file.

    Returns:
        The exit status that `run` returns; 1 where there is nothing to measure on, and stderr says why.
    """
    try:
        args = parse()
        status = run(args)
        print(any_table(args.out))
    except FAILURES as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 1
    return status
