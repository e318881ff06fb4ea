"""What the servers of ``eval.bench_serving`` attend with: by default the queries, keys and values of a checkpoint.

A subclass gives a benchmark other inputs, and says what a sparse method's selection is worth over them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eval.serving.grid import Cell

Row = Mapping[str, Any]


class Inputs:
    """A checkpoint's own.

    Attributes:
        command: name of the command that has these inputs.
        cell_fields: names of `of_cell`.
        prompt_fields: names of `of_prompt`.
        decode_alone: whether nothing that prefill is part of has a figure.
    """

    command = "eval.bench_serving"
    cell_fields: tuple[str, ...] = ()
    prompt_fields: tuple[str, ...] = ()
    decode_alone = False

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """The arguments that say which model it is, and what it attends with."""
        parser.add_argument("--model-path", required=True, help="a checkpoint")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        """End the command where these arguments do not fit together."""

    def require(self) -> None:
        """Refuse, before a server starts, what would be found minutes later."""

    def header(self) -> dict[str, Any]:
        """What the file's header says of the arguments instead of what was typed."""
        return {}

    def model(self, scratch: Path) -> Path:
        """The model's folder."""
        return Path(self.args.model_path)

    def flags(self) -> list[str]:
        """What every server is started with."""
        return []

    def environment(self) -> dict[str, str]:
        """Variables that the servers are started with."""
        return {}

    def made(self, states: Sequence[Row]) -> Row | None:
        """What a server says of its inputs, from ``internal_states`` of its `/server_info`; None of a checkpoint's."""
        return None

    def require_interval(self, interval: int) -> None:
        """Refuse a server that rectifies every so many tokens, where these inputs allow none."""

    def of_cell(self, cell: Cell, config: Row, made: Row | None, facts: Row) -> dict[str, Any]:
        """What the decode method's selection is worth in a batch."""
        return {}

    def of_prompt(self, context: int, config: Row, made: Row | None) -> dict[str, Any]:
        """What the prefill method's selection is worth in a prompt."""
        return {}

    def asked(self, quality: Row) -> dict[str, Any]:
        """The ``custom_params`` of a prompt with this `of_prompt`."""
        return {}

    def judge(self, row: Row) -> None:
        """Refuse a row whose sparsity is not the one that its inputs were made for."""
