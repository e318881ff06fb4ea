"""The comparison as a user runs it, over all suites: twenty questions of each task on a real server."""

from pathlib import Path

import pytest

from eval import compare
from eval.live.record import read_rows

MODEL = Path(__file__).parent.parent.parent / "eval" / "models" / "tiny-gqa"
# Few enough pages to be a tenth of the shortest text.
CONFIG = {"active_ratio": 0.1, "dense_fallback": "never", "min_pages": 4}


# Eight minutes on two cores.
@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_the_whole_set(serve, tmp_path: Path) -> None:
    with serve(MODEL, "--context-length", "4096", config=CONFIG) as server:
        arguments = ["--base-url", server.url, "--out", str(tmp_path), "--lengths", "1k", "--text-length", "560"]
        assert compare.main([*arguments, "--n", "20", "--concurrency", "16"]) == 0
    header, *rows = read_rows(tmp_path / "compare.jsonl")
    lines = {(row["suite"], row["task"]): row for row in rows if row["kind"] == "summary"}
    assert header["servers"]["base"]["sparse"]["method"] == "resa" and header["arguments"]["text_length"] == 560
    asked = {suite: [line for line in lines.values() if line["suite"] == suite] for suite in compare.PARTS}
    assert len(asked["niah"]) == 4 and len(asked["infinitebench"]) == 6 and len(asked["ruler"]) == 11, lines.keys()
    assert {line["n"] for suite in ("niah", "ruler", "infinitebench") for line in asked[suite]} == {20}
    assert [line["task"] for line in asked["ppl"]] == [f"{text}, ratio 0.1, f = 32" for text in ("book", "records")]
    assert len(asked["long_generation"]) == 2
    assert all(line["density"] < 0.2 and not line.get("dense_rows") for line in lines.values()), lines
    assert lines["niah", "multikey"]["dense"] >= 0.9
