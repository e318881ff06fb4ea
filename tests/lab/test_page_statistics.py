"""Captured attention, and what statistics of a page find in it: a key that stands apart, a file, the command line."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eval.lab.selection import page_statistics
from eval.lab.selection.captured_attention import Captured, capture, load_model
from eval.lab.selection.page_tables import statistics
from eval.live.counters import EvaluationError
from eval.live.record import read_rows

MODEL = str(Path(__file__).parents[2] / "eval" / "models" / "tiny-gqa")


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(MODEL, "cpu", torch.float32)


def test_captured_attention_is_the_models_own(model: Any) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.randint(10, 4000, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    eager: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = eager(torch.tensor([ids]), output_attentions=True).attentions
    seen = []

    def visit(data: Captured) -> None:
        seen.append(data.layer)
        key = data.key.repeat_interleave(data.query.shape[1] // data.key.shape[1], 1)
        logits = torch.einsum("qhd,thd->hqt", data.query, key) * data.scaling
        later = torch.arange(len(key)) > data.positions[:, None]
        weights = logits.masked_fill(later, -torch.inf).softmax(-1)
        torch.testing.assert_close(weights, expected[data.layer][0, :, -12:], atol=2e-5, rtol=1e-3)

    capture(model, ids, 12, visit)
    assert seen == [0, 1, 2, 3]


def test_attention_that_no_sparse_server_serves_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(model.model.layers[1].self_attn, "sliding_window", 64)
    with pytest.raises(EvaluationError, match="attention of layer 1 has sliding_window, which is not measured"):
        capture(model, list(range(50)), 4, lambda data: seen.append(data.layer))
    assert seen == [0]
    monkeypatch.undo()
    monkeypatch.setattr(model.config, "num_hidden_layers", 5)
    monkeypatch.setattr(model.config, "layer_types", ["full_attention"] * 5)
    with pytest.raises(EvaluationError, match=r"the attention of layers \[0, 1, 2, 3\], it has \[0, 1, 2, 3, 4\]"):
        capture(model, list(range(50)), 4, lambda data: None)


def test_a_key_that_stands_apart_is_found_by_who_keeps_it() -> None:
    """One of 16 in its page; another page has many that are a little like it."""
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(64 * 16 + 8, 1, 64, generator=generator) * 0.3
    key[20 * 16 + 5, 0, 7] = 40.0
    key[30 * 16 : 46 * 16, 0, 7] += 4.0
    query = torch.zeros(8, 2, 64)
    query[:, :, 7] = 4.0
    captured = Captured(0, query, key, key, 0.125)
    found = {name: (mass, share) for name, _, mass, share in page_statistics.judged(captured, [0.1])}
    assert found[page_statistics.TRUE] == (pytest.approx(1, abs=1e-3), 1)
    assert found["6 centroids; vote"] == found["4 centroids in float8; vote"] == found[page_statistics.TRUE]
    assert found["mean; vote"][0] < 0.1 and found["mean; vote"][1] == 0
    assert {*found} == {page_statistics.TRUE, *page_statistics.STATISTICS}


def test_a_file_and_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page-statistics.jsonl"
    given = ["--model-path", MODEL, "--texts", "book", "--length", "600", "--n", "1", "--out", str(out)]
    assert page_statistics.main([*given, "--name", "tiny"]) == 0
    header, *rows = read_rows(out)
    assert header["model"]["name"] == "tiny" and len(header["model"]["weights"]) == 64
    ways = len(page_statistics.STATISTICS) + 1
    assert sum(row["kind"] == "item" for row in rows) == 4 * 2 * ways
    best = {row["text"]: row for row in rows if row["kind"] == "summary" and row["statistic"] == page_statistics.TRUE}
    assert all(row["found"] == 1 for row in best.values()) and {*best} == {"book", "all"}
    assert all(row["mass"] <= best["all"]["mass"] for row in rows if row["kind"] == "summary")
    capsys.readouterr()
    assert page_statistics.main(["--from", str(out)]) == 0
    assert "6 centroids; vote" in capsys.readouterr().out
    # Written whole: a second run has nothing left to do.
    assert page_statistics.main(given) == 0
    assert statistics([out]).count("\n| ") == ways + 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--model-path and --out are needed"),
        (["--texts", "poem"], "--texts poem: allowed are mk2, mk3, essay, cwe, book"),
        (["--n", "0"], "--n 0: allowed is 1 or more"),
        (["--ratios", "1.5"], "allowed are numbers between 0 and 1"),
        (["--length", "100"], "--length 100: allowed is 544 or more"),
    ],
)
def test_bad_arguments_are_named(given: list[str], message: str) -> None:
    needed = ["--model-path", MODEL, "--out", "never"] if given else []
    with pytest.raises(EvaluationError, match=message):
        page_statistics.parse([*needed, *given])
