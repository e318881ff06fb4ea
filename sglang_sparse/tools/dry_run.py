"""Check a server's command line like a start would, without starting anything."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from sglang_sparse.config import arguments as server_arguments
from sglang_sparse.hooks import judge
from sglang_sparse.hooks.backends import dense_backends
from sglang_sparse.hooks.server_args import resolve
from sglang_sparse.methods.skip_softmax.calibration_file import STAND_IN
from sglang_sparse.methods.support import KINDS

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments


class _Parser(argparse.ArgumentParser):
    """A parser that raises its errors instead of printing them below a hundred lines of usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(arguments: Sequence[str]) -> Arguments:
    """Read a server's command line with SGLang's own parser, and resolve nothing.

    Args:
        arguments: the words after ``python -m sglang.launch_server``.

    Raises:
        ValueError: SGLang does not know a flag or value, or ``--config`` names a file with more flags.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(prog="sglang", add_help=False)
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(arguments)
    if given.config is not None:
        raise ValueError("--config is not read here; allowed: its flags on the command line")
    # Not resolved, since that would inspect this machine.
    return server_arguments.of(ServerArgs.from_cli_args(given))


def refusal(
    arguments: Sequence[str], kind: str, gpu: bool, config: Mapping[str, object] = MappingProxyType({})
) -> str | None:
    """Return why this plugin would refuse a server, or None, by the checks of a start.

    Args:
        arguments: its command line.
        kind: the model's kind of attention in ``support.KINDS``, unless ``--model-path`` is a folder.
        gpu: whether its machine has a GPU.
        config: fields of the model's ``config.json`` that differ from those of the kind.

    Raises:
        ValueError: the command line is not one that SGLang reads.
    """
    args = parse(arguments)
    if not args.sparse_method and not args.sparse_prefill_method:
        return None
    try:
        with TemporaryDirectory(prefix="sglang-sparse-") as folder:
            stand_in = not Path(args.model_path).is_dir()
            if stand_in:
                fields = deepcopy({**KINDS[kind], **STAND_IN})
                fields |= deepcopy({**config})
                text = fields.get("text_config", fields)
                text["max_position_embeddings"] = max(text.get("max_position_embeddings", 0), args.context_length or 0)
                (Path(folder) / "config.json").write_text(json.dumps(fields))
                args.model_path = folder
            settings = resolve(args)
            args.page_size = args.page_size or settings.config.page_size
            if args.attention_backend is None:
                # One that goes with the method on such a machine: which one SGLang takes by itself depends on the GPU.
                args.attention_backend = dense_backends(settings.decode.attention, gpu)[-1]
            return judge.refusal(args, settings, gpu, stand_in)
    except ValueError as error:
        # An unreadable config, or SGLang's error about the model.
        return str(error)
