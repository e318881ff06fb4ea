"""What a checkpoint answers where one of its layers does not see a number."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eval.lab import blind
from eval.lab.selection.recall_attention import load_model
from eval.live.counters import EvaluationError
from eval.live.record import read_finished

MODEL = str(Path(blind.__file__).parents[1] / "models" / "tiny-gqa")


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(MODEL, "cpu", torch.float32)


def test_tokens_behind_do_not_see_what_is_hidden(model: Any) -> None:
    """A model of one layer's depth: what stands there changes nothing behind it, and those before it all the same."""
    ids = torch.randint(10, 4000, (1, 60), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, 20:24] += 7

    def first_layer(tokens: torch.Tensor, layer: int | None) -> torch.Tensor:
        with torch.inference_mode(), blind.hidden(model, layer, 20, 24):
            return model(tokens, output_hidden_states=True).hidden_states[1][0]

    changed = (first_layer(ids, 0) - first_layer(other, 0)).abs().amax(-1) > 1e-5
    assert changed[20:24].all() and not changed[:20].any() and not changed[24:].any()
    assert (first_layer(ids, None) - first_layer(other, None)).abs().amax(-1)[24:].min() > 1e-5
    torch.testing.assert_close(first_layer(ids, 0)[:24], first_layer(ids, None)[:24], atol=2e-5, rtol=1e-4)


def test_one_layer_looks_numbers_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "blind.jsonl"
    assert blind.main(["--model-path", MODEL, "--lengths", "600", "--n", "3", "--out", str(out)]) == 0
    rows = {row["layer"]: row for row in read_finished(out) if row["kind"] == "summary"}
    assert [*rows] == [None, 0, 1, 2, 3] and "none" in capsys.readouterr().out
    assert rows[None]["first"] == rows[None]["all"] == 1 and rows[1]["all"] == 0
    assert min(rows[layer]["first"] for layer in (0, 2, 3)) == 1


def test_a_number_stands_in_the_text_and_in_the_answer() -> None:
    assert blind.place_of([1, 2], [0, 1, 2, 3, 1, 2]) == 1
    with pytest.raises(EvaluationError, match="reads a number in the text otherwise"):
        blind.place_of([1, 2], [0, 3, 1, 2])


def test_prompts_without_needles_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert blind.main(["--model-path", MODEL, "--text", "a.txt", "--out", str(tmp_path / "b.jsonl")]) == 1
    assert "--text hides no needles" in capsys.readouterr().err
