"""Rounds of the decode benchmark beside peers that were measured later, and rows whose peer was measured again."""

import json
from pathlib import Path

import pytest
from decode_peer_files import FACTS, ROW, peer_file

from eval.lab import bench_decode, documents
from eval.lab.servers.decode_peers import outdated_peers
from eval.live.record import read_rows


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A file of a sparse server of which one more dense peer was measured."""
    summary = [{**ROW, "arm": "dense", "tpot": 0.04}, {**ROW, "arm": "sparse"}]
    figures = {"dense": (0.04, 0.05, 0.04), "dense_short": (0.01, 0.01, 0.01), "sparse": (0.02, 0.02, 0.01)}
    figures["rectified"] = (0.02, 0.02, 0.02)
    rounds = [
        {"kind": "round", "arm": arm, "round": n, "tpot_mean": tpots[n], "ttft": [0.5], "density": 0.1, "itl_p50": 7}
        for n in range(3)
        for arm, tpots in figures.items()
    ]
    header = {"dense_only": False, "revision": "abc1234", "started": "2020-01-02T03:04:05+00:00", "shape": "2x1"}
    header |= {"label": "a", "interval": 32, "peers": ["gone.jsonl"], "device": "NVIDIA H200"}
    return peer_file(tmp_path / "bench-decode-x.jsonl", *rounds, *summary, **header)


def again(measured: Path, *peers: Path) -> int:
    asked = [argument for peer in peers for argument in ("--peer", str(peer))]
    return bench_decode.main(["--again", str(measured), "--out", str(measured.with_name("again.jsonl")), *asked])


def test_rounds_are_summarised_again_beside_other_peers(measured: Path) -> None:
    fast = peer_file(measured.with_name("fast.jsonl"), {**ROW, "tpot": 0.03})
    slow = peer_file(measured.with_name("slow.jsonl"), {**ROW, "tpot": 0.9}, server={**FACTS, "attention_backend": "x"})
    assert again(measured, fast, slow) == 0
    (before, *old), (header, *rows) = read_rows(measured), read_rows(measured.with_name("again.jsonl"))
    assert header.pop("again").items() >= {"file": "bench-decode-x.jsonl", "peers": ["gone.jsonl"]}.items()
    assert header == before | {"peers": ["fast.jsonl", "slow.jsonl"]}, "revision and time are of the measurement"
    assert rows[:12] == old[:12] and {row["kind"] for row in rows[12:]} == {"summary"}
    summary = rows[12:]
    assert [row["arm"] for row in summary] == ["dense", "peer", "peer", "dense_short", "sparse", "rectified"]
    assert {(row["shape"], row["label"]) for row in summary} == {("2x1", "a")}
    assert [row["file"] for row in summary if row["arm"] == "peer"] == ["fast.jsonl", "slow.jsonl"]
    assert summary[-1]["dense"] == "flashinfer (peer)" and summary[-1]["dense_ratio"] == pytest.approx(1.5)
    assert summary[-1]["bound_ratio"] == pytest.approx(0.02 / (0.02 + 0.03 / 32))
    assert again(measured, slow) == 0
    assert read_rows(measured.with_name("again.jsonl"))[-1]["dense"] == "flashinfer"


def test_what_cannot_be_summarised_again(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer = peer_file(measured.with_name("peer.jsonl"), ROW)
    for other, message in (
        ({"batch": 2}, "batch is 2, wanted 1"),
        ({"device": "x"}, "device is x, wanted NVIDIA H200"),
    ):
        assert again(measured, peer_file(measured.with_name("other.jsonl"), ROW, **other)) == 1
        assert message in capsys.readouterr().err
    assert again(peer, peer) == 1
    assert "peer.jsonl is no file of eval.lab.bench_decode with a sparse arm" in capsys.readouterr().err
    lines = measured.read_text().splitlines(keepends=True)
    measured.write_text("".join(lines[:-2]))
    assert again(measured, peer) == 1
    assert "has no summary: its run was refused or interrupted" in capsys.readouterr().err
    assert not measured.with_name("again.jsonl").exists()


def test_a_peer_that_was_measured_again_is_found(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("DOCUMENTS", ()), ("RESULTS", measured.parent)):
        monkeypatch.setattr(documents, name, value)
    peer = peer_file(measured.with_name("peer.jsonl"), ROW)
    assert again(measured, peer) == 0
    measured.with_name("again.jsonl").replace(measured)
    assert documents.main(["--check"]) == 0
    peer_file(peer, {**ROW, "tpot": 0.025})
    assert documents.main(["--check"]) == 1
    assert capsys.readouterr().err == (
        "eval.lab.documents: bench-decode-x.jsonl has 30.000 ms a token (20.000 … 40.000, 3 rounds, flashinfer) from "
        "peer.jsonl, which has 25.000 ms a token (20.000 … 40.000, 3 rounds, flashinfer)\n"
    )
    for changed in ({"rounds": 4}, {"tpot_range": [0.02, 0.05]}):
        peer_file(peer, {**ROW, **changed})
        assert len(outdated_peers(measured.parent)) == 1
    header, *rows = (json.loads(line) for line in peer.read_text().splitlines())
    header["versions"] = {"sglang": "another"}
    peer.write_text("".join(json.dumps(row) + "\n" for row in (header, *rows)))
    assert outdated_peers(measured.parent) == []
    peer.unlink()
    assert documents.main(["--check"]) == 0, "what is not there cannot be compared"
