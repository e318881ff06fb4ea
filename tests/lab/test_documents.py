"""The documents say what the result files say, and tables refuse what they do not know."""

import json
import re
from pathlib import Path

import pytest

from eval.lab import documents
from eval.lab.tables.files import backends

ROOT = Path(__file__).parent.parent.parent


def test_documents_agree_with_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert documents.main(["--check"]) == 0, capsys.readouterr().err


def test_a_document_that_disagrees_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = (ROOT / "eval" / "lab" / "docs" / "performance.md").read_text()
    figure = re.search(r"\| (\d+\.\d\d) \|", right)
    assert figure
    wrong = tmp_path / "performance.md"
    wrong.write_text(right.replace(figure[0], "| 123456.78 |"))
    monkeypatch.setattr(documents, "DOCUMENTS", (wrong,))
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    assert documents.main(["--check"]) == 1
    shown = capsys.readouterr().err
    assert "| 123456.78 |" in shown and figure[0] in shown


def test_the_pictures_that_there_are_are_those_that_documents_show() -> None:
    shown = {
        (document.parent / name).resolve()
        for document in documents.DOCUMENTS
        for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", document.read_text())
    }
    folders = (documents.DOCS, documents.IMAGES)
    assert shown == {path for folder in folders for path in folder.resolve().iterdir() if path.suffix != ".md"}


def test_unknown_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(documents.EvaluationError, match="no table is called 'speed': there are decode"):
        documents.fill("<!-- report: speed -->\n<!-- report end -->")
    (tmp_path / "notes.jsonl").write_text('{"note": 1}\n')
    for name, message in (("none.jsonl", "cannot read"), ("notes.jsonl", "first line is no header")):
        assert documents.main([str(tmp_path / name)]) == 1
        assert message in capsys.readouterr().err


def test_sparse_servers_are_no_backends(tmp_path: Path) -> None:
    def made(name: str, score: float, **methods: str | None) -> Path:
        served = {"attention_backend": name, "device": "cuda", **methods}
        row = {"kind": "summary", "arm": "base", "task": "single", "length": 8192, "n": 50, "score": score}
        rows = [{"kind": "header", "servers": {"base": served}}, row | {"score_interval": (score, score)}]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    stock = made("flashmla", 1.0, sparse_method=None)
    others = [made("one", 0.1, sparse_method="robsa"), made("two", 0.2, sparse_prefill_method="anchor")]
    shown = backends([*others, stock, made("older", 0.9)])
    assert [line.split(" | ")[0] for line in shown.splitlines()[2:]] == ["| flashmla, cuda", "| older, cuda"]
