"""Controls as servers: the best selection finds the tiny model's needles as ReSA does, a random one does not."""

import json
from pathlib import Path

import pytest
from server_fixtures import serve  # noqa: F401
from server_requests import sparse_state

from eval import niah
from eval.scores.verdicts import read_folder
from launch.server import ServerProcess

EVAL = Path(__file__).parents[2] / "eval"
MODEL = EVAL / "models" / "tiny-gqa"
TENTH = {"active_ratio": 0.1, "dense_fallback": "never"}
# Room for all prompts that the judge asks, which are asked once more for its dense reference.
FLAGS = ("--context-length", "10240", "--max-total-tokens", "131072")


def ask(server: ServerProcess, out: Path, *more: str) -> None:
    """Ten single needles and ten multi-key ones."""
    # An answer has eight tokens; a control that does not find it would go on.
    arguments = ["--base-url", server.url, "--out", str(out), "--concurrency", "4", "--answer-tokens", "12"]
    assert niah.main([*arguments, "--tasks", "single,multikey", "--lengths", "2k", "--n", "2", *more]) == 0


@pytest.mark.timeout(900)
def test_the_judge_tells_selections_apart(serve, tmp_path: Path) -> None:  # noqa: F811
    with serve(MODEL, *FLAGS, config=TENTH) as resa:
        reference = ("--compare-url", resa.url, "--compare-custom-params", '{"sparse": false}')
        ask(resa, tmp_path / "niah.jsonl", *reference)
    for name in ("random_pages", "true_mass"):
        flags = ("--sparse-method", name, "--sparse-config", json.dumps(TENTH))
        with serve(MODEL, *FLAGS, *flags, env={"PYTHONPATH": str(EVAL / "lab" / "controls")}) as server:
            ask(server, tmp_path / f"niah--{name}.jsonl", "--expect", name)
            assert sparse_state(server)["dense_fallback_rows"] == 0
    for line in read_folder(tmp_path):
        assert line["n"] == 10 and line["gates"] and line["verdict"] != "worse", line
        assert line["dense"] >= 0.95 and line["sparse"] >= 0.95 and line["true_mass"] >= 0.95, line
        assert line["random_pages"] < 0.2, line
