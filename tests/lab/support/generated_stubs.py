"""Stand-ins for servers of ``eval.lab.bench_serving``, which generate what they attend with."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import serving_stubs
from serving_stubs import Connected, FakeServer, after

from eval import bench_serving
from eval.lab.servers import in_turn
from eval.lab.servers.generated_inputs import GeneratedInputs
from eval.lab.structured.generator import read_recipe
from eval.lab.tables.goals import goals_table
from eval.serving import measurement

HEADS = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
MLA_HEADS = {"q_heads": 16, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512}

parse = partial(bench_serving.parse, inputs=GeneratedInputs)


def made(server: FakeServer, instead: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a server's report of its generated inputs: those that were asked for, or `instead`."""
    if not server.env:
        return {}
    asked = json.loads(after(server.flags, "--json-model-override-args"))["structured_inputs"]
    found = {"seed": asked.get("seed", 0), "recipe": read_recipe(asked.get("recipe", {})).model_dump()}
    found |= {"prefill": asked.get("prefill", "attend")}
    found |= {"shape": MLA_HEADS if "v2-lite" in server.folder.name else HEADS}
    # As SGLang makes its table of requests.
    found |= {"positions": int(after(server.flags, "--context-length")) + 4}
    return {"structured_inputs": found if instead is None else instead}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``eval.lab.bench_serving`` start and ask stand-ins."""
    serving_stubs.install(monkeypatch)
    monkeypatch.setattr(FakeServer, "made", made)


def install_client(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """As `serving_stubs.install_client`."""
    monkeypatch.setattr(FakeServer, "made", made)
    return serving_stubs.install_client(monkeypatch)


def goals_of(folder: Path, goal: str) -> dict[str, list[str]]:
    """The figure, the verdict and the quality of each part of a goal that result files in a folder have measured."""
    names, _, *lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in goals_table(folder).splitlines()
    ]
    found = [dict(zip(names, line, strict=True)) for line in lines]
    found = [line for line in found if line["id"] == goal and line["reached"] != "not measured"]
    return {
        line["goal"].split(": ")[1]: [line.get(name, "") for name in ("measured", "reached", "quality")]
        for line in found
    }


def install_in_turn(monkeypatch: pytest.MonkeyPatch, run_judge: Callable[[list[str], Path, Path], None]) -> None:
    """Have the benchmarks that run servers in turn start stand-ins, which `run_judge` asks."""
    install(monkeypatch)

    monkeypatch.setattr(in_turn, "ServerProcess", FakeServer)
    monkeypatch.setattr(in_turn, "LiveServer", Connected)
    monkeypatch.setattr(in_turn, "reach", measurement.reach)
    monkeypatch.setattr(in_turn, "run_judge", run_judge)
