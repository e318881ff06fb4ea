"""SGLang's own arguments, and what it makes of sets of them for DSA models on Hopper, with and without DSA's method.

A child process resolves them: ``python stock_flags.py < CASES``. It imports SGLang without a GPU and pretends one
before it resolves anything, which asks for the device's name, capability and memory alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

NATIVE = {"sparse_method": "dsa", "sparse_config": '{"implementation": "native"}'}
# Drawn anew by each resolution.
FIXED = {"random_seed": 1}
GPUS, MEMORY, CAPABILITY = 8, 140 << 30, (9, 0)


class Case(NamedTuple):
    """A set of arguments.

    Attributes:
        model: its config.json.
        fields: of ``ServerArgs``.
        ours: those that ask for the method.
    """

    model: Mapping[str, object]
    fields: Mapping[str, object]
    ours: Mapping[str, str] = NATIVE


class Outcome(NamedTuple):
    """SGLang's result for a set of arguments.

    Attributes:
        refused: the error's type and message; None where it resolves.
        resolved: all of its own fields, as text.
    """

    refused: str | None
    resolved: Mapping[str, str]


def from_the_parser() -> list[dict[str, object]]:
    """Return each flag of SGLang's parser alone: with each of its choices, as a switch, or with a number."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found: list[dict[str, object]] = []
    for action in parser._actions:
        if action.choices:
            values: list[object] = list(action.choices)
        elif action.nargs == 0 and isinstance(action.const, bool):
            values = [action.const]
        else:
            values = [action.type(number) for number in (2,) if action.type in (int, float)]  # type: ignore[operator]
        found += [{action.dest: [value] if action.nargs in ("+", "*") else value} for value in values]
    # Flags have other names, too.
    return [fields for place, fields in enumerate(found) if fields not in found[:place]]


def outcomes(cases: Sequence[Case], folder: Path, timeout: float) -> list[tuple[Outcome, Outcome]]:
    """Resolve each case without the method and with it, in one child process.

    Args:
        cases: all of them.
        folder: for the models.
        timeout: seconds for all of them.

    Raises:
        AssertionError: the child has ended; has what it said.
    """
    models = list({id(case.model): case.model for case in cases}.values())
    for place, model in enumerate(models):
        (folder / str(place)).mkdir()
        (folder / str(place) / "config.json").write_text(json.dumps(model))
    asked = json.dumps([(str(folder / str(models.index(model))), own, {**own, **ours}) for model, own, ours in cases])
    env = {**os.environ, "SGLANG_PLUGINS": "sglang_sparse", "SGLANG_PLATFORM": "", "PYTHONWARNINGS": "ignore"}
    env["HF_HUB_OFFLINE"] = "1"
    command = [sys.executable, __file__]
    try:
        ran = subprocess.run(command, input=asked, capture_output=True, text=True, env=env, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{len(cases)} cases took over {timeout:g} s: {str(error.stderr)[-2000:]}") from None
    assert ran.returncode == 0, ran.stderr[-4000:]
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[[")]
    assert len(rows) == len(cases), ran.stderr[-4000:]
    return [(Outcome(*stock), Outcome(*ours)) for stock, ours in rows]


def _pretend() -> None:
    """Show the process Hopper GPUs."""
    import torch
    from sglang.srt import platforms
    from sglang.srt.platforms.cuda import CudaSRTPlatform
    from sglang.srt.runtime_context import override_platform

    facts = {"name": "NVIDIA H200", "major": CAPABILITY[0], "minor": CAPABILITY[1], "total_memory": MEMORY}
    device = SimpleNamespace(**facts, multi_processor_count=132, warp_size=32)
    found: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: GPUS,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_name": lambda *_: device.name,
        "get_device_properties": lambda *_: device,
        "mem_get_info": lambda *_: (MEMORY, MEMORY),
    }
    for name, value in found.items():
        setattr(torch.cuda, name, value)
    torch.version.cuda = "13.0"
    old, platforms._current_platform = platforms.current_platform, CudaSRTPlatform()
    for module in [*sys.modules.values()]:
        if vars(module).get("current_platform") is old:
            module.current_platform = platforms._current_platform  # type: ignore[attr-defined]
    override_platform(
        is_cuda=True, is_sm90=True, is_hopper_with_cuda_12_3=True, device_sm=90, device_capability=CAPABILITY
    ).install()


def _resolve(folder: str, fields: Mapping[str, object]) -> Outcome:
    from sglang.srt.arg_groups.arg_utils import field_names
    from sglang.srt.server_args import ServerArgs

    from sglang_sparse.config import arguments

    before = dict(os.environ)
    try:
        record = ServerArgs(model_path=folder, **FIXED, **fields)  # type: ignore[arg-type]
        record.resolve_once()
        args = arguments.of(record)
        names = [name for name in field_names(type(record)) if not name.startswith("sparse_")]
        return Outcome(None, {name: repr(getattr(args, name)) for name in names})
    except (Exception, SystemExit) as error:
        return Outcome(f"{type(error).__name__}: {error}", {})
    finally:
        os.environ.clear()
        os.environ.update(before)


def main() -> None:
    """Write a line of outcomes for each set."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    _pretend()
    for folder, *both in json.load(sys.stdin):
        print(json.dumps([_resolve(folder, fields) for fields in both]), flush=True)


if __name__ == "__main__":
    main()
