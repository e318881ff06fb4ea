"""Forms and haystacks."""

import random
from pathlib import Path

import pytest

from eval.texts import text
from eval.texts.text import FORMS, IM_END, Haystack

MODEL = Path(__file__).parent.parent.parent / "eval" / "models" / "tiny-gqa"
BOOK = " ".join(f"It was {word} upon the {word}, and so they went on." for word in text.words("eval")) * 3


def test_words_of_training_and_evaluation_are_disjoint() -> None:
    train, held = set(text.words("train")), set(text.words("eval"))
    assert len(train) > 2000 and len(held) > 500 and not train & held
    with pytest.raises(ValueError, match="allowed are 'train' and 'eval'"):
        text.words("test")


def test_forms_render() -> None:
    assert FORMS["passkey"].record(value="12345") == "The pass key is 12345. Remember it. 12345 is the pass key."
    assert FORMS["json"].record("17", value="12345") == '"17": "12345",'
    assert FORMS["needle_ruler"].question("k").endswith("number for k mentioned in the provided text is")


def test_hide_places_records_by_depth() -> None:
    lines = ["a.", "b.", "c.", "d."]
    assert text.hide(lines, ["X."], [0.0]) == "X. a. b. c. d."
    assert text.hide(lines, ["X.", "Y."], [1.0, 0.5]) == "a. b. Y. c. d. X."
    with pytest.raises(ValueError, match="argument"):
        text.hide(lines, ["X."], [0.0, 1.0])


def test_haystack_keeps_its_budget() -> None:
    drawn = Haystack(BOOK).draw(random.Random(0), 500)
    assert 450 < sum(round(1.4 * len(part.split())) for part in drawn) <= 500


def test_chat_text_is_what_the_template_makes() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    chat = [{"role": "user", "content": "Long text.\nWhat?"}]
    made = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.prompt_text(FORMS["needle"], "Long text.", "What?") == made
    assert tokenizer.eos_token == IM_END
