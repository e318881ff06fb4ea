"""Deployments of servers: a pair that is real, and figures that are made up."""

import json
from pathlib import Path
from typing import Any

import folder_transfer
import pytest
from forked_server import ForkedServer

from eval.lab import bench_deployments
from eval.lab.servers import deployments, eight_gpus, model_shapes
from eval.lab.servers.deployments import agreement, flags_of, summarise
from eval.lab.tables import files
from eval.live.record import read_rows
from sglang_sparse.tools import dry_run

CONFIG = {"dense_fallback": "never", "rectify_interval": 8, "active_ratio": 0.2, "min_pages": 2, "page_size": 16}
SERVER = "--page-size 16 --dtype float32 --chunked-prefill-size 512 --disable-overlap-schedule"


def test_answers_agree_until_they_part() -> None:
    assert agreement([[1, 2, 3, 4]], [[1, 2, 5, 4]]) == 0.5
    assert agreement([[1, 2], [3, 4]], [[1, 2], [9, 4]]) == 0.5
    # A deployment of several ranks answers more prompts than one GPU.
    assert agreement([[1], [2]], [[1]]) == 1.0


def item(deployment: str, arm: str, throughput: float, ttft_cached: float | None = None) -> dict[str, Any]:
    row = {"deployment": deployment, "arm": arm, "throughput": throughput, "ttft": 2.0, "tpot": 0.01, "itl_p99": 0.02}
    return row | {"ttft_cached": ttft_cached, "ranks": 1, "requests": 4, "tokens": [[1, 2]]}


def test_a_deployment_is_set_beside_one_gpu_and_dense_beside_sparse() -> None:
    rows = [item("one", "dense", 100, 1.0), item("one", "sparse", 200, 2.0)]
    rows += [item("host", "dense", 90, 1.1), item("host", "sparse", 189, 2.2), item("pp", "dense", 50)]
    one, host = summarise(rows)
    assert one["throughput_over_dense"] == 1.0 and one["same_as_one"] == 1.0
    assert host["dense_throughput_over_one"] == 0.9 and host["throughput_over_dense"] == pytest.approx(1.05)
    assert host["ttft_cached_over_dense"] == pytest.approx(1.0)
    # Without a server on one GPU there is nothing that it takes more than.
    (alone,) = summarise([item("tp", "dense", 1), item("tp", "sparse", 2)])
    assert alone["same_as_one"] is None and "throughput_over_one" not in alone


def test_ranks_share_the_gpus() -> None:
    assert flags_of("dp", 8) == ["--tp-size", "8", "--dp-size", "8", "--enable-dp-attention"]
    assert flags_of("one", 8) == []


def test_a_wrong_deployment_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_deployments.parse(["--model-path", "x", "--out", "y", "--sparse", "", "--deployments", "two"])
    assert "got two, allowed: one, host, tp, dp, pp, pair" in capsys.readouterr().err


def test_a_pair_is_started_asked_and_tabulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in folder_transfer.install(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(deployments, "ServerProcess", ForkedServer)
    out = tmp_path / "deployments.jsonl"
    line = ["--model-path", "eval/models/tiny-gqa", "--deployments", "pair", "--transfer", "mori", "--runs", "1"]
    line += ["--input-length", "600", "--output-length", "64", "--batch", "2", "--out", str(out)]
    sparse = f"--sparse-method resa --sparse-config '{json.dumps(CONFIG)}'"
    assert bench_deployments.main([*line, "--sparse", sparse, "--server-args", SERVER]) == 0
    items = {row["arm"]: row for row in read_rows(out) if row["kind"] == "item"}
    assert all(len(answer) == 64 for row in items.values() for answer in row["tokens"])
    # Twice two prompts in the run that counts, each in its own rounds.
    assert items["sparse"]["counters"]["rectified_tokens"] > 4 * 48 and items["dense"]["counters"] is None
    assert files.any_table(out).splitlines()[2].startswith("| pair | 2 |")


@pytest.mark.parametrize("gpus", [4, 8])
@pytest.mark.parametrize("name", list(eight_gpus.RUNS))
def test_runs_on_eight_gpus_are_what_the_benchmark_and_the_servers_take(name: str, gpus: int, tmp_path: Path) -> None:
    args = bench_deployments.parse(eight_gpus.line(name, gpus, tmp_path, "r1"))
    (deployment,) = args.deployments
    requests = eight_gpus.REQUESTS if deployment == "dp" else 4 * gpus
    assert args.batch * bench_deployments.ranks(args, deployment) == requests
    folder = model_shapes.write(args.shape, tmp_path)
    flags = [*bench_deployments.server_flags(args, deployment, "sparse"), *flags_of(deployment, gpus)]
    kind = {"dsa": "DSA", "robsa": "MLA", "resa": "MHA/GQA"}[name.partition("-")[0]]
    assert dry_run.refusal(["--model-path", str(folder), *flags], kind, gpu=True) is None
