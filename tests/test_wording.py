"""Tests of refusals, with the field at fault, its value and the message: each row of ``wording.jsonl`` is a refusal.

The wording of messages stands there alone; ``RENEW_WORDING=1 pytest -n 0 tests/test_wording.py`` writes it anew.
"""

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import CONFIGS, write_config
from refusals import refused
from sglang.srt.plugins import load_plugins
from skip_calibrations import calibration_file

load_plugins()

from resolved import ServerArgs

from sglang_sparse import calibrate, frontend
from sglang_sparse.config.request_options import parse_options
from sglang_sparse.config.settings import build
from sglang_sparse.config.versions import UnsupportedSGLangError, require_supported_sglang
from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.tools import dry_run, recipes

WORDING = Path(__file__).with_name("wording.jsonl")
ROWS: list[dict[str, Any]] = [json.loads(line) for line in WORDING.read_text().splitlines()]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="refused next to CUDA")


@pytest.fixture(scope="module")
def messages() -> Iterator[list[str]]:
    """The messages in the order of the rows."""
    found: list[str] = []
    yield found
    if "RENEW_WORDING" in os.environ:
        rows = [row | {"says": says} for row, says in zip(ROWS, found, strict=True)]
        WORDING.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def drive(row: dict[str, Any], folder: Path) -> None:
    """Do what a row says: start a server, build settings, ask for something in a request, or run a command."""
    match row:
        case {"server": {**flags}}:
            model = flags.pop("model", "qwen3")
            ServerArgs(model_path=write_config(folder, model) if model in CONFIGS else model, **flags)
        case {"build": methods, "checkpoint": checkpoint}:
            build(*methods, checkpoint=lambda: checkpoint)
        case {"build": methods}:
            build(*methods)
        case {"request": [methods, params]}:
            parse_options(build(*methods), params)
        case {"option": {**fields}}:
            frontend.options(**fields)
        case {"dry run": [words, kind, gpu]}:
            flags = ["--model-path", "MODEL", *words.split()]
            raise SparseArgumentError(dry_run.refusal(flags, kind, tuple(gpu) if isinstance(gpu, list) else gpu))
        case {"recipe": recipe}:
            recipes.load(recipe)
        case {"calibrate": words}:
            calibrate.parse(["--model-path", "MODEL", "--out", str(folder / "x.json"), *words.split()])
        case {"sglang": version}:
            require_supported_sglang(version)


def name(row: dict[str, Any]) -> str:
    kind, given = next(iter(row.items()))
    return f"{kind} {given}"[:80]


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_a_refusal_has_a_field_a_value_and_a_message(row: dict[str, Any], tmp_path: Path, messages: list[str]) -> None:
    given = row
    if "FOLDER" in json.dumps(row):
        calibration_file(tmp_path)
        given = json.loads(json.dumps(row).replace("FOLDER", str(tmp_path)))
    kind: Any = UnsupportedSGLangError if "sglang" in row else SparseArgumentError
    with refused(given["field"], given["got"], kind) as caught:
        drive(given, tmp_path)
    error = caught.value
    messages.append(str(error).replace(str(tmp_path), "FOLDER"))
    assert messages[-1] == row["says"]
    again = pickle.loads(pickle.dumps(error))
    # As texts, since NaN is not itself.
    assert type(again) is type(error) and (str(again), str(vars(again))) == (str(error), str(vars(error)))
