"""The prefill benchmark: inputs whose outputs tell the mass kept, rows, thresholds, and peers that are not there."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eval.lab import bench_prefill, documents
from eval.lab.bench_prefill import Machine, measure, parse, sparsity_of, value_for
from eval.lab.kernels import prefill_table
from eval.lab.kernels.prefill_inputs import KEPT, Prompt, Shape
from eval.lab.kernels.prefill_table import DENSE, TABLE, Implementation, Plan, plans
from eval.lab.structured.generator import make_qkv, read_recipe
from eval.lab.tables import files
from eval.lab.tables.goals import goals_table
from eval.live.counters import EvaluationError
from eval.live.record import read_rows
from sglang_sparse_kernels.common.timing import capture

# A group of 2,048 tokens, and chunks that end within the next one.
SHAPE = Shape(2700, 2304, q_heads=2, kv_heads=1, dim=64)
ANCHOR, SKIP_SOFTMAX = (one for one in TABLE if not one.peer)


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return Prompt(SHAPE, read_recipe({}), "cpu")


def causal(prompt: Prompt, _: float) -> Callable[[torch.Tensor | None], torch.Tensor]:
    q, k, v = (part.float().transpose(0, 1) for part in (prompt.q, prompt.k, prompt.v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda _: attend(q, k, v, is_causal=True, scale=prompt.scale, enable_gqa=True).transpose(0, 1)


def broken(prompt: Prompt, _: float) -> Callable[[torch.Tensor | None], torch.Tensor]:
    def run(_: torch.Tensor | None) -> torch.Tensor:
        raise RuntimeError("no image for this device")

    return run


def machine(*micros: float) -> Machine:
    """A machine on which the n-th call that is timed takes so many microseconds; five where nothing is said."""
    times = iter(micros)

    def time(call: Callable[[], torch.Tensor]) -> float:
        return next(times, 5.0)

    parts = {"_identify_kernel": 1.0, "_sparse_kernel": 3.0}
    return Machine("a test", "cpu", 0, capture, lambda: True, time=time, profile=lambda call: parts)


def test_the_first_value_tells_the_mass_kept(prompt: Prompt) -> None:
    dense = causal(prompt, 0)(None)
    found = prompt.quality(dense)
    assert found["dense_l2"] < 1e-4 and found["recall"] > 0.999
    # Attention to the first keys and the newest 512 alone.
    q, k, v = (part.float().transpose(0, 1) for part in (prompt.q, prompt.k, prompt.v))
    positions = torch.arange(SHAPE.length)
    distance = positions[:, None] - positions
    kept = (distance >= 0) & ((distance < 512) | (positions < KEPT))
    logits = (q @ k.repeat_interleave(2, 0).transpose(1, 2)) * prompt.scale
    weights = logits.masked_fill(distance < 0, float("-inf")).softmax(-1)
    mass = (weights * kept).sum(-1)[:, prompt.sampled].mean().item()
    some = logits.masked_fill(~kept, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 0)
    found = prompt.quality(some.transpose(0, 1))
    assert found["recall"] == pytest.approx(mass, abs=0.02) and mass < 0.95 and found["dense_l2"] > 0.05


def test_the_op_over_pages_in_chunks(prompt: Prompt) -> None:
    everything = Plan(ANCHOR, float("inf"))
    assert prompt.quality(everything.prepare(prompt)())["dense_l2"] < 1e-2
    assert sparsity_of(prompt, everything) == 0
    low, high = (sparsity_of(prompt, Plan(ANCHOR, theta)) for theta in (3.0, 7.0))
    assert low > high > 0


def test_skip_softmax_over_pages_in_chunks(prompt: Prompt) -> None:
    everything = Plan(SKIP_SOFTMAX, 1e-9)
    found = prompt.quality(everything.prepare(prompt)())
    assert found["dense_l2"] < 1e-2 and found["recall"] > 0.999 and sparsity_of(prompt, everything) == 0
    low, high = (sparsity_of(prompt, Plan(SKIP_SOFTMAX, factor)) for factor in (3.0, 300.0))
    assert 0 < low < high
    factor = value_for(prompt, SKIP_SOFTMAX, (low + high) / 2, [3.0, 300.0])
    assert abs(sparsity_of(prompt, Plan(SKIP_SOFTMAX, factor)) - (low + high) / 2) < 0.02


def test_rows_and_ratios(prompt: Prompt) -> None:
    dense = [Implementation(name, causal, op=DENSE) for name in ("slow", "fast")]
    todo = [Plan(dense[0], 0), Plan(dense[1], 0), Plan(ANCHOR, 4.0), Plan(Implementation("gone", broken), 0)]
    rows = measure(prompt, todo, machine(*[9] * 6, 30, 20, 4, 32, 22, 5), 2)
    assert [row.get("us") for row in rows] == [31, 21, 4.5, None]
    assert rows[2]["dense"] == "fast" and rows[2]["dense_ratio"] == 21 / 4.5 and rows[2]["label"] == "anchor theta=4"
    assert rows[2]["parts"]["_sparse_kernel"] == 3 and 0 < rows[2]["sparsity"] < 1 and rows[0]["tflops"] > 0
    assert rows[3]["unavailable"] == "RuntimeError: no image for this device"
    with pytest.raises(EvaluationError, match="gone: RuntimeError: no image for this device; nothing can be measured"):
        measure(prompt, todo[3:], replace(machine(), usable=lambda: False), 2)


def test_the_threshold_of_a_sparsity(prompt: Prompt) -> None:
    wanted = sparsity_of(prompt, Plan(ANCHOR, 5.0))
    theta = value_for(prompt, ANCHOR, wanted, [2.0, 9.0])
    assert abs(sparsity_of(prompt, Plan(ANCHOR, theta)) - wanted) < 0.02
    with pytest.raises(EvaluationError, match=r"--sparsity 0\.99: at 1x2700 theta 2 to 9 gives"):
        value_for(prompt, ANCHOR, 0.99, [2.0, 9.0])


def test_a_server_is_dense_below_its_crossover(prompt: Prompt) -> None:
    plan = Plan(ANCHOR, 5.0)
    op, server, everything = (sparsity_of(prompt, plan, dense_below) for dense_below in (0, 2304, 4608))
    assert op == sparsity_of(prompt, plan, 2303) > server > everything == 0
    theta = value_for(prompt, ANCHOR, server, [2.0, 9.0], 2304)
    assert abs(sparsity_of(prompt, Plan(ANCHOR, theta), 2304) - server) < 0.02


def test_the_file_its_table_and_the_goal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = [Implementation("fa3", causal, op=DENSE), ANCHOR, Implementation("gone", broken)]
    monkeypatch.setattr(bench_prefill, "plans", lambda names, own: plans(["fa3", "gone"], own, table))
    out = tmp_path / "prefill.jsonl"
    line = ["--out", str(out), "--lengths", "2700", "--heads", "2,1,64", "--values", "3,8", "--rounds", "2"]
    args = parse([*line, "--sparsity", "0.1", "--peers", ""])
    assert bench_prefill.run(args, machine) == 0
    header, *rows = read_rows(out)
    assert header["recipe"]["stripes"] == 0.3 and header["arguments"]["sparsity"] == {"others": 0.1}
    summary = [row for row in rows if row["kind"] == "summary"]
    assert [row.get("target_sparsity") for row in summary] == [None, None, 0.1]
    assert abs(summary[-1]["sparsity"] - 0.1) < 0.02 and "parts" not in summary[-1]
    text = files.any_table(out)
    assert "| finding the keys | why not |" in text and "| 25.0 % |" in text and "no image" in text
    assert documents.main([str(out), "--out", str(tmp_path / "pictures")]) == 0
    assert (tmp_path / "pictures" / "prefill.svg").exists()
    sizes = {"shape": "1x128k", "q_heads": 32, "kv_heads": 8, "dim": 128}

    def goal(asked: dict[str, Any], part: str = "1x128k", **measured: Any) -> str:
        """K9, where the last row had been measured so."""
        last = {**summary[-1], **sizes, "target_sparsity": 0.89, "sparsity": 0.9, **measured}
        changed = {**header, "arguments": header["arguments"] | asked}
        item = {
            "kind": "item",
            "id": summary[-1]["id"],
            "parts": {"_identify_kernel": 2, "_compact_kernel": 1, "_rest": 7},
        }
        out.write_text("".join(json.dumps(row) + "\n" for row in (changed, item, last)))
        lines = [line for line in goals_table(tmp_path).splitlines() if line.startswith("| K9 ")]
        (found,) = [line for line in lines if f": {part} |" in line]
        return found

    assert "prefill.jsonl" in goal({}) and "sparsity 90.0%" in goal({})
    assert "| 0.3 of its time | ≤ 0.25 of its time |  |  | missed |" in goal({}, "1x128k, finding the keys")
    assert "not measured" in goal({}, "1x128k, finding the keys", id="another")
    wrong = (goal({"recipe": {"noise": 0.0}}), goal({"dense_below": 8192}), goal({}, sparsity=0.84))
    assert all("not measured" in line for line in wrong)


def test_a_sparsity_that_no_threshold_gives_stops_nothing(prompt: Prompt, capsys: pytest.CaptureFixture[str]) -> None:
    args = parse(["--out", "x", "--lengths", "2700", "--values", "3,8", "--sparsity", "0.99"])
    assert [plan.value for plan in bench_prefill.own_plans(prompt, args)] == [3, 8]
    assert "nothing within 0.02 of it" in capsys.readouterr().err


def test_a_prompt_is_the_beginning_of_what_a_server_makes() -> None:
    made, _, _ = make_qkv(3000, 2, 1, 64, read_recipe({}), 0)
    found = Prompt(SHAPE, read_recipe({}), "cpu", positions=3000)
    assert found.q.shape == (2700, 2, 64) and found.q.equal(made[:2700])


def test_no_output_is_worth_nothing(prompt: Prompt) -> None:
    for nothing in (torch.zeros(SHAPE.length, 2, 64), torch.full((SHAPE.length, 2, 64), float("nan"))):
        assert prompt.quality(nothing)["recall"] == 0


def test_peers_that_are_not_installed(prompt: Prompt) -> None:
    peers = [one for one in TABLE if one.peer]
    rows = measure(prompt, plans([one.name for one in peers], (), peers), machine(), 2)
    assert len(rows) == 15 and all("Error" in row["unavailable"] for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "prefill.jsonl"
    assert bench_prefill.main(["--out", str(out), "--lengths", "16k", "--values", "6,1e9", "--peers", ""]) == 0
    rows: list[dict[str, Any]] = [row for row in read_rows(out) if row["kind"] == "summary"]
    assert rows[1]["dense_l2"] < 1e-2 and rows[1]["sparsity"] == 0 and rows[0]["sparsity"] > 0.2
    assert all(row["us"] > 0 for row in rows)


def test_the_table_knows_its_peers() -> None:
    names = [one.name for one in prefill_table.TABLE]
    own = ["anchor", "skip_softmax"]
    assert names == ["fa3", "fa3-contiguous", "flashinfer", *own, "flexprefill", "xattention", "flashinfer-blocks"]


def test_another_name_hides_nothing_of_a_device() -> None:
    found = prefill_table.called_h100(lambda device=0: SimpleNamespace(name=f"NVIDIA H{device}", major=9))(200)
    assert (found.name, found.major) == ("NVIDIA H100", 9)


def test_minference_without_its_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("minference", "minference/modules", "minference/ops"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("raise RuntimeError('no extension')")
    (tmp_path / "minference" / "modules" / "flexprefill.py").write_text("from ..ops.kernel import ONE")
    (tmp_path / "minference" / "ops" / "kernel.py").write_text("ONE = 1")
    with pytest.raises(ImportError, match="minference is not installed"):
        prefill_table.minference("flexprefill")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    assert prefill_table.minference("flexprefill").ONE == 1
    for name in set(sys.modules) - before:
        del sys.modules[name]
