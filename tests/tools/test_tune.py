"""Tests of the crossover to sparse decode: the measurement with a stub clock, the table, and a server's use of it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sglang_sparse import tune
from sglang_sparse.attention import crossover
from sglang_sparse.attention.plan import plan_decode
from sglang_sparse.config.settings import build
from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.config import DEFAULT_CROSSOVER
from sglang_sparse.methods.resa import SUMMARY, Resa, ResaConfig
from sglang_sparse.tools import tune_bench
from sglang_sparse.tools.tune_bench import PEERS, Point, Run, Step, crossing, graph_timer, num_layers
from sglang_sparse.tune import TuneError

SHAPE = ModelShape(num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=64, kv_dtype=torch.bfloat16)
CPU = torch.device("cpu")
ENTRY = {
    **crossover.setup("resa", ResaConfig(), SHAPE, "cpu"),
    "active_ratio": 0.1,
    "crossover_tokens": 7168,
}


def points(batch: int, *rows: tuple[int, float, float]) -> list[Point]:
    return [Point(batch, context, "fa3", dense, sparse) for context, dense, sparse in rows]


@given(st.integers(1, 64), st.floats(0.5, 2.0), st.floats(2.0, 40.0), st.floats(0.05, 0.4))
def test_of_lines_the_crossing_is_where_they_cross(batch: int, fixed: float, least: float, share: float) -> None:
    def row(tokens: int) -> tuple[int, float, float]:
        return tokens // batch, fixed + tokens / 1024, least + share * tokens / 1024

    measured = points(batch, *(row(batch * 1024 * 2**i) for i in range(9)))
    exact = (least - fixed) / (1 - share) * 1024
    expected = max(exact, batch * 1024)
    assert expected - 1 <= crossing(measured) < expected + 1024 + 1
    assert crossing(measured) % 1024 == 0


def test_the_slowest_batch_size_decides() -> None:
    early = points(1, (4096, 10, 12), (8192, 20, 12))
    late = points(8, (4096, 20, 30), (8192, 60, 30))
    assert crossing(early) == 5120
    assert crossing(late) == crossing(early + late) == 40960
    # A point that is faster by chance does not count where a longer one is not.
    assert crossing(points(1, (4096, 10, 9), (8192, 10, 12), (16384, 30, 10))) > 8192
    assert crossing(points(2, (4096, 10, 9))) == 8192


def test_no_answer_is_told() -> None:
    with refused("--contexts", 65536, TuneError):
        crossing(points(1, (4096, 2, 1)) + points(8, (4096, 2, 1), (8192, 2, 2)))
    with refused("--most-tokens", None, TuneError):
        crossing([])


PAPER = {"summary": "minmax", "group": "mean_query"}


def test_the_step_is_what_a_server_runs() -> None:
    method = Resa(ResaConfig.model_validate({"page_size": 8, "active_ratio": 0.25, "min_pages": 4, **PAPER}))
    step = Step(method, SHAPE, 2, 256, 512, "cpu")
    out = step.sparse(0)
    keys, values = (cache.float() for cache in step.paged(0))
    assert step.view.page_table.shape == (2, 64) and step.view.n_select.tolist() == [8, 8]
    for row, query in enumerate(step.queries[0].float()):
        pages = step.rows.page_table[row].long()
        bounds = step.pools.buffer(SUMMARY, 0)[pages, 0].float() * query.mean(0)
        score = bounds.amax(1).sum(-1)
        score[-2:] = math.inf
        chosen = pages[score.topk(8).indices]
        logits = torch.einsum("hd,pod->hpo", query, keys[chosen, :, 0]) * step.scale
        weights = logits.flatten(1).softmax(-1)
        expected = weights @ values[chosen, :, 0].flatten(0, 1)
        torch.testing.assert_close(out[row].float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("context", [100, 256])
def test_contexts_that_measure_nothing(context: int) -> None:
    with refused("--contexts", context, TuneError):
        Step(Resa(ResaConfig.model_validate({})), SHAPE, 1, context, 512, "cpu")


def clock(runs: Mapping[str, Any], layers: int) -> dict[str, float]:
    """Dense takes a microsecond for 100 tokens; sparse a fifth of that and 6 more. Nothing is run."""
    step = runs["sparse"].__self__
    tokens = step.batch * step.context
    return {"fa3": tokens / 100, "slow": tokens / 10, "sparse": 6 + tokens / 500}


def absent(step: Step) -> Run:
    raise ImportError("no such package")


def run(*arguments: str) -> bool:
    args = tune.parser().parse_args(["--shape", "2x1x64", "--context-length", "1k", "--page-size", "8", *arguments])
    peers = {"fa3": lambda step: step.sparse, "slow": lambda step: step.sparse, "none": absent}
    return tune.tune(args, clock, "cpu", peers)


def test_tune_writes_what_a_server_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune_bench._say_once.cache_clear()
    path = tmp_path / "table.json"
    sizes = ["--batches", "1,2", "--contexts", "512,1k", "--out", str(path)]
    assert run(*sizes, "--active-ratio", "0.1,0.2", "--most-tokens", "1k", "--overhead-us", "0")
    told = capsys.readouterr()
    assert """--sparse-config '{"crossover_tokens": 1024}'""" in told.out
    assert told.err.splitlines() == ["sglang_sparse.tune: without none: no such package"]
    table = json.loads(path.read_text())
    assert [row["active_ratio"] for row in table] == [0.1, 0.2] and {row["gpu"] for row in table} == {"cpu"}
    assert table[0]["points"][0] == {"batch": 1, "context": 512, "dense": "fa3", "dense_us": 5.12, "sparse_us": 7.024}
    settings = build("resa", {"page_size": 8})
    assert crossover.find(settings, SHAPE, CPU, table).tokens == 1024
    # Measured again, with what a step costs on the host: one entry is replaced, the other stays.
    assert run(*sizes, "--overhead-us", "2.0")
    again = json.loads(path.read_text())
    assert [row["overhead_us"] for row in again] == [2.0, 0.0]


def test_one_shape_without_an_answer_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    sizes = ["--batches", "1", "--contexts", "512,1k", "--out", str(path)]
    assert not run(*sizes, "--overhead-us", "100")
    assert "not faster sparse up to 1024" in capsys.readouterr().err and not path.exists()
    path.write_text('{"a": 1}')
    with refused("--out", path, TuneError):
        tune_bench.write(path, [ENTRY])


@pytest.mark.parametrize("shape", ["32x8", "32x7x128", "0x8x128", "axbxc"])
def test_bad_shapes(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.main(["--shape", shape])
    assert f"got {shape!r}, allowed: query heads x KV heads x head dimension" in capsys.readouterr().err


def test_without_a_gpu_it_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert tune.main([]) == 1
    assert capsys.readouterr().err == "sglang_sparse.tune: a crossover is measured on a GPU, and torch finds none\n"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert tune.main(["--active-ratio", "0"]) == 1
    assert "active_ratio: got 0.0" in capsys.readouterr().err


def find(config: dict[str, Any], *entries: dict[str, Any], **shape: Any) -> crossover.Crossover:
    model = ModelShape(**{**SHAPE.__dict__, **shape})
    return crossover.find(build("resa", config), model, CPU, [{**ENTRY, **entry} for entry in entries])


def test_what_was_measured_is_the_default_and_the_user_wins() -> None:
    found = find({}, {})
    assert found == crossover.Crossover(7168, "measured on cpu at an active ratio of 0.1")
    assert find({"crossover_tokens": 100}, {}) == crossover.Crossover(100, "set by the user")
    assert find({"dense_fallback": "never"}, {}).tokens == 0


def test_the_next_larger_share_that_was_measured_counts() -> None:
    entries = ({"active_ratio": 0.2, "crossover_tokens": 9216}, {"active_ratio": 0.5, "crossover_tokens": 20480}, {})
    assert [find({"active_ratio": ratio}, *entries).tokens for ratio in (0.05, 0.1, 0.15, 0.3)] == [
        7168,
        7168,
        9216,
        20480,
    ]
    # More than was measured pays no earlier than what was.
    assert find({"active_ratio": 0.6}, *entries).tokens == 20480
    assert find({"active_ratio": 0.6}, {}).tokens == DEFAULT_CROSSOVER


@pytest.mark.parametrize("other", [{"num_kv_heads": 2}, {"head_dim": 128}, {"kv_dtype": torch.float8_e4m3fn}])
def test_another_shape_is_not_measured(other: dict[str, Any]) -> None:
    found = find({}, {}, **other)
    assert found.tokens == DEFAULT_CROSSOVER
    assert found.source == "the default; not measured for this shape on cpu, see python -m sglang_sparse.tune"
    assert find({}, {"gpu": "NVIDIA H100"}).tokens == find({"page_size": 32}, {}).tokens == DEFAULT_CROSSOVER
    for fields in ({"summary_dtype": "fp8"}, {"summary": "minmax"}, {"group": "mean_query"}):
        assert find(fields, {}).tokens == DEFAULT_CROSSOVER


def test_the_packaged_table_is_one() -> None:
    for entry in crossover.packaged_table():
        assert {*crossover.KEY, "crossover_tokens", "points"} <= entry.keys()
        assert crossing(Point(**point) for point in entry["points"]) <= entry["crossover_tokens"]


def test_the_plan_follows_what_was_found() -> None:
    method = build("resa", {}).decode
    assert not plan_decode(method, torch.tensor([10000])).sparse
    method.crossover_tokens = 7168
    assert plan_decode(method, torch.tensor([10000])).sparse


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    arguments = ["--shape", "32x8x128", "--batches", "1,4", "--contexts", "4k,32k,128k", "--out", str(path)]
    assert tune.main(arguments) == 0
    (entry,) = json.loads(path.read_text())
    assert entry["gpu"] == torch.cuda.get_device_name() and 1024 <= entry["crossover_tokens"] <= 128 * 1024
    assert all(point["dense_us"] > 0 and point["sparse_us"] > 0 for point in entry["points"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("peer", list(PEERS))
def test_the_peers_attend_to_everything(peer: str) -> None:
    model = ModelShape(2, 32, 8, 128, torch.bfloat16)
    method = Resa(ResaConfig.model_validate({}))
    assert num_layers(method, model, 4096, "cuda") > 2
    step = Step(method, model, 2, 4096, 4096, "cuda")
    try:
        run = PEERS[peer](step)
    except ImportError as error:
        pytest.skip(str(error))
    step.view.n_select.copy_(step.view.n_pages)
    expected, found = step.sparse(1).float(), run(1)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found.reshape(expected.shape).float(), expected, atol=1e-2, rtol=1e-2)
    assert graph_timer({peer: run}, 2, rounds=2)[peer] > 0
