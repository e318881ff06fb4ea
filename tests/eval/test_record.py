"""Result files: what a later run may go on with."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from eval.live.counters import EvaluationError
from eval.live.record import Record, read_rows, result_files, versions

SERVER = {"version": "0.5.23", "model_path": "m", "max_total_num_tokens": 1000, "sparse": {"decode_rows": 0}}


def header(**changes: Any) -> dict[str, Any]:
    return {"arguments": {"n": 2, "lengths": [1024]}, "servers": {"base": SERVER}, **changes}


def write(path: Path, rows: int, **changes: Any) -> None:
    with Record(path, "eval.niah", "abc", resume=True, **header(**changes)) as record:
        for i in range(rows):
            record.add("item", id=str(i))


def test_a_cut_off_line_is_dropped_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.jsonl"
    write(path, 3)
    path.write_text(path.read_text() + '{"kind": "summary", "n": 3}\n{"kind": "item", "id": "3')
    changed = {**SERVER, "max_total_num_tokens": 7, "sparse": {"decode_rows": 9}}
    with Record(path, "eval.niah", "def", resume=True, **header(servers={"base": changed})) as record:
        assert [row["id"] for row in record.earlier] == ["0", "1", "2"]
        record.add("item", id="3")
    rows = read_rows(path)
    assert [row["kind"] for row in rows] == ["header", "item", "item", "item", "resumed", "item"]
    assert rows[0]["revision"] == "abc" and rows[4]["revision"] == "def"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arguments": {"n": 3, "lengths": [1024]}}, "argument n was 2 and is 3"),
        ({"arguments": {"n": 2, "lengths": [1024], "seed": 1}}, "argument seed was None and is 1"),
        ({"servers": {"base": {**SERVER, "model_path": "other"}}}, "base server's model_path was 'm' and is 'other'"),
        ({"servers": {"base": {**SERVER, "version": "0.6"}}}, "delete it or give another --out"),
    ],
)
def test_other_results_are_not_touched(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "run.jsonl"
    write(path, 1)
    before = path.read_text()
    with pytest.raises(EvaluationError, match=message):
        write(path, 1, **changes)
    assert path.read_text() == before


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text('{"note": 1}\n')
    with pytest.raises(EvaluationError, match="first line is no header"):
        write(path, 1)
    path.write_text("notes\nof mine\n")
    with pytest.raises(EvaluationError, match="line 1, is no JSON"):
        write(path, 1)
    with pytest.raises(EvaluationError, match="No such file"):
        read_rows(tmp_path / "none.jsonl")


def test_without_resume_the_file_is_new(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, 2)
    with Record(path, "eval.bench", "abc") as record:
        record.add("row")
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["header", "row"]


def test_a_compressed_file_is_read_as_it_was(tmp_path: Path) -> None:
    with Record(tmp_path / "a.jsonl", "eval.x", "1") as record:
        record.add("summary", score=1)
    path = tmp_path / "b--control.jsonl.xz"
    path.write_bytes(lzma.compress((tmp_path / "a.jsonl").read_bytes()))
    assert read_rows(path) == read_rows(tmp_path / "a.jsonl")
    assert result_files(tmp_path) == {"a": tmp_path / "a.jsonl", "b--control": path}
    path.write_bytes(b"no xz")
    with pytest.raises(EvaluationError, match="no xz file"):
        read_rows(path)


def test_of_two_versions_the_one_that_is_imported_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, version in (("first", "2.14.1"), ("second", "2.11.0")):
        info = tmp_path / folder / f"some_torch-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: some-torch\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
    assert versions(["some-torch", "nothing"]) == {"some-torch": "2.11.0", "nothing": None}
