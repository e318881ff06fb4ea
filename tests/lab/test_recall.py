"""Prompts, captured attention and the command line of the recall command."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.lab import recall
from eval.lab.selection.recall_attention import Captured, capture, head_weights, load_model
from eval.live.counters import EvaluationError
from eval.live.record import read_rows
from eval.live.tokens import tokens

MODEL = str(Path(recall.__file__).parents[1] / "models" / "tiny-gqa")
KV_HEADS = 2


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
        weights = torch.cat([head_weights(data, head) for head in range(KV_HEADS)], 1)
        torch.testing.assert_close(weights, expected[data.layer][0, :, -12:].transpose(0, 1), atol=2e-5, rtol=1e-3)

    capture(model, ids, 12, visit)
    assert seen == [0, 1, 2, 3]


def test_attention_that_no_sparse_server_serves_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(model.model.layers[1].self_attn, "sliding_window", 64)
    with pytest.raises(EvaluationError, match="attention of layer 1 has sliding_window, which no sparse server serves"):
        capture(model, list(range(50)), 4, lambda data: seen.append(data.layer))
    assert seen == [0]
    monkeypatch.undo()
    monkeypatch.setattr(model.config, "num_hidden_layers", 5)
    with pytest.raises(EvaluationError, match=r"the attention of layers \[0, 1, 2, 3\], it has \[0, 1, 2, 3, 4\]"):
        capture(model, list(range(50)), 4, lambda data: None)


def arguments(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"seed": 0, "n": 2, "book": [], "no_chat": False, "text": None, "lengths": [600]} | given
    )


@pytest.mark.parametrize("no_chat", [False, True])
def test_needle_prompts_end_in_the_answer(no_chat: bool) -> None:
    tokenizer = tokens(MODEL)
    found = list(recall.prompts(arguments(no_chat=no_chat), tokenizer))
    assert [prompt.id for prompt in found] == ["600/0", "600/1"]
    for prompt in found:
        assert 590 <= len(prompt.tokens) <= 600
        text = tokenizer.decode(prompt.tokens)
        key, value = prompt.facts["key"], prompt.facts["value"]
        assert f"One of the special magic numbers for {key} is: {value}." in text
        assert text.endswith(f" {value}." if no_chat else f"assistant\n{value}") and text.count(value) == 2
    again = list(recall.prompts(arguments(no_chat=no_chat), tokenizer))
    assert found == again != list(recall.prompts(arguments(no_chat=no_chat, seed=1), tokenizer))


def test_text_prompts_do_not_overlap(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" ".join(str(i) for i in range(1000)))
    tokenizer = tokens(MODEL)
    one, other = recall.prompts(arguments(text=str(tmp_path / "a.txt")), tokenizer)
    assert len(one.tokens) == len(other.tokens) == 600 and one.facts["start"] + 600 <= other.facts["start"]
    with pytest.raises(EvaluationError, match="hold 6 stretches of 600 tokens, wanted 50"):
        list(recall.prompts(arguments(text=str(tmp_path / "a.txt"), n=50), tokenizer))


def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.jsonl"
    given = ["--model-path", MODEL, "--lengths", "300,600", "--n", "2", "--queries", "8", "--out", str(out)]
    given += ["--sparse-config", '{"min_pages": 3, "layers": "0,2"}']
    assert recall.main(given) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + 2 * 3 and "all" in table[1] and table[1].split()[:3] == ["needle", "resa", "300"]
    rows = read_rows(out)
    items = [row for row in rows if row["kind"] == "item"]
    assert len(items) == len({row["id"] for row in items}) == 2 * 2 * 2 * 8
    assert {row["layer"] for row in items} == {0, 2} and all(len(row["kept"]["best"]) == 8 for row in items)
    for row in items:
        assert row["scores"]["mass"] == pytest.approx(sum(row["kept"]["method"]) / 8, abs=1e-4)
        # 300 tokens are 19 pages, 600 are 38 and a tenth of them is 4.
        assert row["density"] == pytest.approx(3 / 19 if row["length"] == 300 else 4 / 38, abs=0.01)
    whole = next(row for row in rows if row["kind"] == "summary")
    assert 0.3 < whole["random"] < whole["mass"] < whole["best"] < 1 and 0.5 < whole["share"] < 1
    assert whole["error"] < whole["random_error"]
    # Cut within the last prompt, so that it alone is measured again.
    cut = [json.dumps(row) for row in rows if row["kind"] != "summary"][:-20]
    out.write_text("\n".join(cut))
    assert recall.main(given) == 0
    again = read_rows(out)
    assert [row for row in again if row["kind"] == "summary"] == [row for row in rows if row["kind"] == "summary"]
    assert [row["id"] for row in again if row["kind"] == "prompt"] == ["300/0", "300/1", "600/0", "600/1"]
    assert recall.main([*given, "--seed", "1"]) == 1
    assert "argument seed was 0 and is 1" in capsys.readouterr().err
    assert recall.main(["--from", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == table


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--model-path and --out are needed"),
        (["--from", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["--n", "0"], "--n 0"),
        (["--lengths", "32"], "above --queries 32"),
        (["--method", "reza"], "did you mean 'resa'?"),
        (["--sparse-config", '{"ratio": 1}'], "unknown field 'ratio'"),
        (["--lengths", "200"], "selects all pages of 200 tokens"),
        (["--lengths", "64k"], "the model's context is 40960 tokens"),
        (["--model-path", "/dev/null"], "--model-path /dev/null: "),
        (["--text", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_wrong_command_lines(
    given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["--model-path", MODEL, "--out", str(tmp_path / "x.jsonl")]
    whole = given if message.startswith(("--model-path and", "cannot")) else [*needed, *given]
    assert recall.main(whole) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error and "eval.lab.recall: " in error and message in error
