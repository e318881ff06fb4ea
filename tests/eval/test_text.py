"""Forms and haystacks."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from eval.texts import text
from eval.texts.text import FORMS, IM_END, Haystack

MODEL = Path(__file__).parent.parent.parent / "eval" / "models" / "tiny-gqa"
BOOK = " ".join(f"It was {word} upon the {word}, and so they went on." for word in text.words("eval")) * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


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
    assert text.hide(lines, ["X.", "Y."], [1.0, 0.5], "\n") == "a. b.\nY.\nc. d.\nX."
    with pytest.raises(ValueError, match="1 records and 2 depths"):
        text.hide(lines, ["X."], [0.0, 1.0])


def test_haystack_keeps_its_budget(tokenizer: Tokenizer) -> None:
    haystack = Haystack(BOOK, lambda parts: [len(e.ids) for e in tokenizer.encode_batch(parts)])
    drawn = haystack.draw(random.Random(0), 500)
    assert 450 < len(tokenizer.encode(" ".join(drawn)).ids) <= 500


def test_matching() -> None:
    assert text.exact_match(" 123 ", "123") and not text.exact_match("1234", "123")


def test_chat_text_is_what_the_template_makes() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    chat = text.messages("Long text.", [("First?", "1")], "Second?")
    made = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.chat_text(chat) == made
    assert text.prompt_text(FORMS["needle"], "Long text.", "Second?", [("First?", "1")]) == made
    assert tokenizer.eos_token == IM_END
