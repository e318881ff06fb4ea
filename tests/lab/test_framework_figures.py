"""Figures of RocketKV and Skip-Softmax: what is drawn of a decode step, and what needles are asked."""

from pathlib import Path

from eval.lab.documents import RESULTS
from eval.lab.kernels import framework
from eval.lab.legs.leg import LEGS
from eval.lab.tables.needles import needles
from eval.live.record import result_files


def test_whole_steps_are_drawn_dense_ones_first(tmp_path: Path) -> None:
    peers = [("fa3", 42.0), ("flashinfer", 40.0)]
    rows = [{"op": "dense_decode", "implementation": name, "us": us, "dense_ratio": 40.0 / us} for name, us in peers]
    rows += [{"op": op, "implementation": "ours", "us": 10.0} for op in ("rocketkv_predict", "rocketkv_predict+attend")]
    rows += [{"op": "skip_softmax_decode", "implementation": "ours", "unavailable": "no such GPU"}]
    rows = [{"kind": "item", "shape": "1x32k", **row} for row in rows]
    rows += [{**rows[0], "kind": "summary"}, {**rows[0], "shape": "1x128k"}]
    names = [name for name, _ in framework.bars(rows, "1x32k")]
    assert names == ["dense, flashinfer", "dense, fa3", "rocketkv_predict+attend"]
    (picture,) = framework.plot(rows, tmp_path / "steps")
    assert picture.suffix == ".svg" and picture.stat().st_size


def test_needles_say_what_decode_skipped() -> None:
    paths = [path for name, path in result_files(RESULTS).items() if name.startswith("niah-tiny-gqa-skip_softmax")]
    head, _, *lines = needles(paths).splitlines()
    place = head.split(" | ").index("skipped in decode")
    assert lines and all(line.split(" | ")[place].endswith(" %") for line in lines)


def test_legs_of_skip_softmax_ask_both_phases_and_name_their_factors() -> None:
    factors, names = "prefill-350-decode-1000", [f"needles-skip_softmax{leg}" for leg in ("", "-tasks", "-fp8")]
    commands = [one for leg in LEGS if leg.name in names for one in leg.commands]
    asked = '{"threshold_scale_factor": {"prefill": 350, "decode": 1000}}'
    assert all(asked in one.arguments for one in commands)
    assert len(commands) == 4 and all(factors in one.file for one in commands)
    gates = [one for one in commands if "--least-skipped" in one.arguments]
    assert [one.module for one in gates] == ["eval.niah"] * 2
    assert all("--least-sparsity" in one.arguments for one in gates) and sum("fp8" in one.file for one in gates) == 1
