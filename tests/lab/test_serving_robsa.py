"""RoBSA's decode in the serving benchmark: inputs and recall from a file, what was left out, goal E5, a picture."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generated_stubs import goals_of, install_client, parse
from kernel_layers import machine
from serving_stubs import FakeServer, after

from eval.lab import bench_mla, bench_serving, documents
from eval.lab.kernels.mla_inputs import PAPER_BLOCKS, RECIPE, SM_SCALE, Shape, Step, recipe_for
from eval.lab.kernels.mla_table import table
from eval.lab.structured.generator import mla_structure, read_recipe
from eval.lab.structured.structure import block_mass
from eval.lab.tables import files
from eval.live.counters import EvaluationError
from eval.live.record import read_rows

K = 1024
SINKS = {"sink_tokens": 1792}
MADE = read_recipe({**RECIPE, **SINKS, "stripe_ratio": 0.0031}).model_dump()
POSITIONS = 128 * K + 256 + 128 + 4
HALF = '{"allow_uncalibrated": true, "layers": "14-"}'
SERVERS = ["--server-args", "--attention-backend flashmla --page-size 64"]
SERVERS += ["--server", f"half-dense=--sparse-method robsa --sparse-config '{HALF}'"]
SERVER_MODULE = Path(__file__).parent.parent.parent / "eval" / "lab" / "structured" / "server"


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    monkeypatch.setattr(FakeServer, "step", {"sparse": 0.008, "half-dense": 0.013, "dense": 0.02})
    monkeypatch.setattr(FakeServer, "pool", dict.fromkeys(FakeServer.step, 10**7))
    return install_client(monkeypatch)


def mla_file(folder: Path, *changes: dict[str, Any], base: dict[str, Any] = MADE) -> Path:
    """A file of ``eval.lab.bench_mla`` with a row for each length."""
    path = folder / "mla.jsonl"
    arguments = {"seed": 0, "active": "paper", "recipe": SINKS}
    header = {"kind": "header", "command": "eval.lab.bench_mla", "base_recipe": base, "arguments": arguments}
    row = {
        "kind": "summary",
        "op": "mass+topp+attend",
        "implementation": "rope",
        "heads": 16,
        "latent": 512,
        "rope": 64,
    }
    row |= {"block_size": 16, "theta1": 0.9, "max_active_ratio": 0.5, "kv_dtype": "bfloat16", "positions": POSITIONS}
    row |= {"stripe_ratio": 0.0031, "recall": 0.909, "similarity": 0.999}
    shares = {n: PAPER_BLOCKS[n] / (64 * n) for n in (32, 64, 128)}
    rows = [{**row, "length": n * K, "target_sparsity": 1 - share} for n, share in shares.items()]
    rows = [row | change for row in rows for change in changes or ({},)]
    others = [{**row, "implementation": "full_score", "recall": 0.9}, {**row, "op": "block_topp", "recall": 0.8}]
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *rows, *others)))
    return path


def run(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    out, file = folder / "serving.jsonl", str(folder / "mla.jsonl")
    flags = ["--shape", "v2-lite", "--sparse-method", "robsa", "--structured", file, "--contexts", "128k"]
    status = bench_serving.main([*flags, "--out", str(out), *arguments])
    return status, read_rows(out)


def test_goal_e5(tmp_path: Path) -> None:
    mla_file(tmp_path)
    status, rows = run(tmp_path, "--batch", "1,24", "--runs", "3", *SERVERS)
    assert status == 0
    assert rows[0]["arguments"]["recall_from"] == "mla.jsonl"
    assert rows[0]["arguments"]["structured"] == {"seed": 0, "recipe": MADE}
    sparse, dense, half = FakeServer.started
    assert json.loads(after(dense.flags, "--json-model-override-args")) == {
        "structured_inputs": {"seed": 0, "recipe": MADE}
    }
    assert sparse.sparse and half.sparse and not dense.sparse and after(half.flags, "--sparse-config") == HALF
    cells = [row for row in rows if row["kind"] == "summary"]
    assert {row["task"] for row in cells} == {"serving"} and len(cells) == 4
    for row in cells:
        assert row["active_blocks"] == pytest.approx(500, abs=1) and row["sparsity"] == pytest.approx(1 - 500 / 8192)
        assert (row["recall"], row["similarity"], row["active"], row["recipe"]) == (0.909, 0.999, "paper", SINKS)
    assert [row["sparse_layers"] for row in cells] == [27, 27, 13, 13]
    beside = "active blocks 500, mass kept 0.909, sparsity 93.9%"
    assert goals_of(tmp_path, "E5") == {
        "24x128k, all sensitive": ["2.5x", "missed", beside],
        "24x128k, half dense": ["1.538x", "stretch", beside],
        "1x128k, all sensitive": ["2.5x", "must", beside],
    }
    shown = files.any_table(tmp_path / "serving.jsonl")
    assert "| 93.9 % | 0.909 | 0.9 | 500 | 27 |" in shown


def test_without_prefill_only_decode_has_figures(tmp_path: Path) -> None:
    mla_file(tmp_path)
    status, rows = run(tmp_path, "--batch", "24", "--skip-prefill", *SERVERS)
    assert status == 0 and rows[0]["arguments"]["structured"] == {"seed": 0, "recipe": MADE, "prefill": "skip"}
    for server in FakeServer.started:
        given = json.loads(after(server.flags, "--json-model-override-args"))["structured_inputs"]
        assert given["prefill"] == "skip"
    cells = [row for row in rows if row["kind"] == "summary"]
    assert [row["decode_tpot_ratio"] for row in cells] == pytest.approx([2.5, 20 / 13])
    assert not [name for row in cells for name in row if "ttft" in name or "throughput" in name]
    assert all("tpot_median" not in row and "itl_median" not in row for row in cells)
    assert "2.5" in files.any_table(tmp_path / "serving.jsonl")


def test_skipped_prefill_is_of_decode_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--sparse-prefill-method", "anchor"], ["--prefix", "4k"], ["--structured", "null"]):
        with pytest.raises(SystemExit):
            parse(["--shape", "v2-lite", "--structured", "{}", "--skip-prefill", "--out", "o.jsonl", *flags])
        assert "--skip-prefill needs --structured inputs" in capsys.readouterr().err


def test_only_e5_is_e5(tmp_path: Path) -> None:
    mla_file(tmp_path)
    run(tmp_path, "--batch", "24", *SERVERS)
    path = tmp_path / "serving.jsonl"
    header, *rows = read_rows(path)
    assert len(goals_of(tmp_path, "E5")) == 2

    def with_changes(asked: dict[str, Any], measured: dict[str, Any]) -> dict[str, list[str]]:
        changed = {**header, "arguments": header["arguments"] | asked}
        path.write_text("".join(json.dumps(row) + "\n" for row in (changed, *(row | measured for row in rows))))
        return goals_of(tmp_path, "E5")

    assert with_changes({"shape": "qwen3-8b"}, {}) == with_changes({"sparse_method": "resa"}, {}) == {}
    for measured in (
        {"context": 65536},
        {"batch": 8},
        {"sparse_layers": 20},
        {"active": 0.061},
        {"recipe": {}},
        {"theta1": 0.5},
        {"kv_dtype": "float8_e4m3fn"},
        {"target_sparsity": None},
        {"sparsity": 0.97},
        {"sparsity": 0.925},
        {"dense_decode_backend": "triton"},
        {"dense_page_size": 16},
        {"dense_decode_graphs": False},
    ):
        assert with_changes({}, measured) == {}, measured
    assert len(with_changes({}, {"sparsity": 0.935})) == 2


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        (
            "active",
            0.09,
            "0.910 of the query-key pairs were left out at theta1 0.9, allowed are 0.939 ± 0.02 and a tenth of",
        ),
        ("active", 0.03, "0.970 of the query-key pairs were left out at theta1 0.9"),
        ("active", 1.0, "nothing ran sparse"),
    ],
)
def test_what_is_no_result(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    attribute: str,
    value: Any,
    message: str,
) -> None:
    monkeypatch.setattr(FakeServer, attribute, value)
    mla_file(tmp_path)
    status, rows = run(tmp_path, "--batch", "1", "--contexts", "2k,128k")
    assert status == 1 and message in capsys.readouterr().err
    # What is decoded dense by the limits has no recall, and needs none.
    (row,) = [row for row in rows if row["kind"] == "summary" and row["task"] == "serving"]
    assert row["context"] == 2 * K and "recall" not in row and "active_blocks" not in row


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"positions": 128 * K},
            "a row with positions 131460, the nearest has positions 131072; run eval.lab.bench_mla with",
        ),
        ({"heads": 128}, "a row with heads 16, the nearest has heads 128"),
        ({"theta1": 0.95}, "a row with theta1 0.9, the nearest has theta1 0.95"),
        ({"kv_dtype": "float8_e4m3fn"}, "a row with kv_dtype 'bfloat16', the nearest has kv_dtype 'float8_e4m3fn'"),
        ({"length": 64 * K}, "a row with length 131072, the nearest has length 65536"),
    ],
)
def test_recall_of_other_inputs_ends_the_run_before_anything_is_measured(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    commands: list[list[str]],
    change: dict[str, Any],
    message: str,
) -> None:
    mla_file(tmp_path, change)
    assert run(tmp_path, "--batch", "1")[0] == 1
    assert message in capsys.readouterr().err and commands == []


def test_a_file_that_cannot_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(file: Path, *more: str) -> str:
        with pytest.raises(SystemExit):
            parse(["--shape", "v2-lite", "--out", "x", "--structured", str(file), *more])
        return capsys.readouterr().err

    robsa = ("--sparse-method", "robsa")
    several = mla_file(tmp_path, {}, {"stripe_ratio": 0.004})
    assert "its rows have several structures, and a server has one: run eval.lab.bench_mla with" in refused(
        several, *robsa
    )
    good = mla_file(tmp_path)
    assert "--recall-from is the recall of a --sparse-prefill-method, or of robsa" in refused(good)
    assert "--sparsity is of a --sparse-prefill-method" in refused(good, *robsa, "--sparsity", "0.9")
    good.write_text(good.read_text().splitlines()[0] + "\n")
    assert "it has no summary, its run was refused or interrupted" in refused(good, *robsa)
    assert "cannot read" in refused(tmp_path / "none.jsonl", *robsa)


def test_picture(tmp_path: Path) -> None:
    mla_file(tmp_path)
    run(tmp_path, "--batch", "1", "--contexts", "32k,128k", *SERVERS)
    assert documents.main([str(tmp_path / "serving.jsonl"), "--out", str(tmp_path / "drawn")]) == 0
    drawn = sorted((tmp_path / "drawn").iterdir())
    assert [path.name for path in drawn] == ["serving.svg"]
    labels = (
        "time per output token, ms",
        "active blocks of 16 tokens",
        "half-dense",
        "all that there are",
        "theta1 0.9",
    )
    for label in labels:
        assert label in drawn[0].read_text(), label


def test_one_structure_has_the_concentration_of_the_paper_at_every_context() -> None:
    longest = Shape(1, 128 * K, positions=POSITIONS, target_share=PAPER_BLOCKS[128] / 8192)
    recipe = recipe_for(longest, read_recipe({**RECIPE, **SINKS}))
    structure = mla_structure(POSITIONS, recipe)
    for thousands, blocks in PAPER_BLOCKS.items():
        scores = structure.logits(thousands * K - 1) * recipe.rope_share
        mass = block_mass(scores.softmax(-1), 16)[0].sort(descending=True).values
        needed = int((mass.cumsum(0) < 0.9).sum()) + 1
        assert abs(needed - blocks) < 0.01 * 64 * thousands, f"{thousands}k: {needed} for {blocks}"


def test_a_server_attends_with_what_bench_mla_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SERVER_MODULE))
    structured_inputs = importlib.import_module("structured_inputs")
    sys.modules.pop("structured_inputs")
    out, positions, length = tmp_path / "mla.jsonl", 6204, 6000
    asked = ["--shapes", f"1x{length},1x5000", "--positions", str(positions), "--active", "0.2", "--page-size", "32"]
    asked += ["--heads", "4", "--latent", "64", "--rope", "64", "--rounds", "2", "--ops", "mass+topp+attend"]
    asked += ["--recipe", '{"noise": 0}', "--peers", ""]
    assert bench_mla.run(bench_mla.parse([*asked, "--out", str(out)]), machine, table) == 0
    args = parse(["--shape", "v2-lite", "--sparse-method", "robsa", "--structured", str(out), "--out", "x"])
    assert args.recall_from == out
    row = next(row for row in read_rows(out) if row["kind"] == "summary" and row["length"] == length)
    assert row["positions"] == positions and row["stripe_ratio"] == args.structured["recipe"]["stripe_ratio"]

    layer = SimpleNamespace(layer_id=0, scaling=0.1, logit_cap=0.0, is_cross_attention=False, sliding_window_size=-1)
    layer.attn_type = SimpleNamespace(value="decoder")
    layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim = 4, 1, 128, 64
    config = SimpleNamespace(attention_arch=SimpleNamespace(name="MLA"), kv_lora_rank=64)
    pool = SimpleNamespace(req_to_token=torch.zeros(1, positions))
    runner = SimpleNamespace(model_config=config, req_to_token_pool=pool, device="cpu", dtype=torch.bfloat16)
    served = structured_inputs.make_inputs(args.structured, [layer], runner)
    assert served.facts["positions"] == positions

    shape = Shape(1, length, 4, 64, 64, page_size=32, positions=positions)
    step = Step(shape, read_recipe(args.structured["recipe"]), "cpu", 1)
    keys, query = step.layers[0].cache[step.slots(0)], step.layers[0].q[0]
    assert served.k[:length, 0].equal(keys)
    # The query is made for the model's scale; but for that, its roundings and its noise it is the same.
    torch.testing.assert_close(served.q[length - 1].float() * 0.1, query.float() * SM_SCALE, rtol=2e-2, atol=2e-3)
    with pytest.raises(EvaluationError, match="--positions must be 6000 or more, got 5999"):
        bench_mla.shapes(bench_mla.parse([*asked, "--positions", "5999", "--out", "x"]))
