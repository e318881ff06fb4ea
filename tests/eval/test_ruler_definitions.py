"""The sentences and numbers of RULER's definitions."""

import random
import re
from collections import Counter

import pytest
from ruler_prompts import NEEDLE, TOKENS, coded, make, text_of

from eval.live.suite import Case
from eval.tasks.ruler_needles import among
from eval.texts.text import NOISE


def test_needle_sentences() -> None:
    text = text_of("niah_single_1", 1024)
    asked = re.escape(NEEDLE.findall(text)[0][0])
    line = re.escape(NOISE)
    assert re.fullmatch(
        r"A special magic number is hidden within the following text\. Make sure to memorize it\. I will quiz you "
        rf"about the number afterwards\.\n({line}\n)*"
        rf"One of the special magic numbers for {asked} is: \d{{7}}\.\n({line}\n)*"
        rf"(The grass is green\.[^\n]*\n)?What is the special magic number for {asked} mentioned in the provided text"
        rf"\? The special magic number for {asked} mentioned in the provided text is",
        text,
    )
    text = text_of("niah_multiquery", 2048)
    assert text.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the numbers afterwards.\n"
    )
    names = r"(\S+), (\S+), (\S+), and (\S+)"
    found = re.search(
        rf"\nWhat are all the special magic numbers for {names} mentioned in the provided text\? "
        r"The special magic numbers for \1, \2, \3, and \4 mentioned in the provided text are$",
        text,
    )
    assert found and sorted(found.groups()) == sorted(key for key, _ in NEEDLE.findall(text))
    assert "A special magic uuid is hidden" in text_of("niah_single_3", 1024)


@pytest.mark.parametrize(
    ("task", "keys", "values"),
    [("niah_single_2", 1, 1), ("niah_multikey_1", 4, 1), ("niah_multivalue", 1, 4), ("niah_multiquery", 4, 1)],
)
def test_needles_in_essays(task: str, keys: int, values: int) -> None:
    counts = Counter(key for key, _ in NEEDLE.findall(text_of(task, 2048)))
    assert len(counts) == keys and set(counts.values()) == {values}


@pytest.mark.parametrize(("task", "size"), [("niah_multikey_2", 250), ("niah_multikey_3", 80)])
def test_a_text_of_needles(task: str, size: int) -> None:
    lines = text_of(task, 8192).split("\n")[1:-1]
    assert len(lines) > size and all(NEEDLE.fullmatch(line) for line in lines)


def test_variable_tracking_sentences() -> None:
    text = text_of("vt", 4096, "--wording", "nvidia")
    example, asked = text.split("\n\nMemorize and track")
    question = "Question: Find all variables that are assigned the value {0} in the text above. "
    prefix = (
        "Answer: According to the chain(s) of variable assignment in the text above, 5 variables are {1} the value "
        "{0}, they are:"
    )
    value = re.findall(r"VAR [A-Z]{5} = (\d{5})\n", asked)[0]
    assert asked.startswith(" the chain(s) of variable assignment hidden in the following text.\n\n")
    assert asked.endswith("\n" + (question + prefix).format(value, "assigned"))
    assert len(re.findall(r"\nVAR [A-Z]{5} = VAR [A-Z]{5} \n", asked)) == 4
    assert re.search(r"they are:  [A-Z]{3} [A-Z]{3} [A-Z]{3} [A-Z]{3} [A-Z]{3}$", example)
    assert len(TOKENS.encode(example)) < 500
    # With lm-eval the noise stands on the line of an assignment.
    text = text_of("vt", 4096)
    value = re.findall(r"VAR [A-Z]{5} = (\d{5}) The grass is green", text)[0]
    assert text.endswith("\n\n" + (question + prefix).format(value, "assgined"))


def test_assignments_stand_apart() -> None:
    rng = random.Random(0)
    for count in (5, 6, 50):
        lines = among(["-"] * count, list("abcde"), sorted(rng.random() for _ in range(5)))
        assert [line for line in lines if line != "-"] == list("abcde") and lines.count("-") == count
        assert not re.search("[a-e]{2}", "".join(lines))
    assert among(["-"], list("abcde"), [0.1, 0.2, 0.3, 0.4, 0.9])[::-1][:4] == list("edcb")


@pytest.mark.parametrize(("length", "often", "seldom"), [(2048, 6, 1), (8192, 30, 3)])
def test_common_words(length: int, often: int, seldom: int) -> None:
    prompt = make().build(Case("cwe", length))
    text = TOKENS.decode(prompt.tokens)
    assert text.startswith("Below is a numbered list of words. In these words, some appear more often than others. ")
    assert text.endswith(
        "\nQuestion: What are the 10 most common words in the above list?\n\n"
        "Answer: The top 10 words that appear most often in the list are:"
    )
    entries = re.split(r" ?\d+\. ", text.split("\n")[1])[1:]
    counts = Counter(entries)
    assert {counts[word] for word in prompt.answers} == {often} and len(prompt.answers) == 10
    assert {n for word, n in counts.items() if word not in prompt.answers} == {seldom}
    assert text.split("\n")[1].endswith(f" {len(entries)}. {entries[-1]}")


def test_the_example_of_common_words() -> None:
    text = text_of("cwe", 8192, "--wording", "nvidia")
    example, asked = text.split("\nBelow is a numbered list")
    assert len(re.findall(r"\d+\. ", example)) == 10 * 10 + 30 * 3 + 10
    assert re.search(r"list\? Answer: The top 10 words that appear most often in the list are: 1\. \S+ 2\. ", example)
    assert asked.endswith("list? Answer: The top 10 words that appear most often in the list are:")


def test_frequent_words_follow_a_zeta_distribution() -> None:
    prompt = make().build(Case("fwe", 8192))
    text = TOKENS.decode(prompt.tokens)
    assert text.endswith(
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
        "appeared words are:"
    )
    counts = Counter(re.findall(r"\.\.\.|\b[a-z]{6}\b", coded(text)))
    ranked = counts.most_common()
    assert ranked[0][0] == "..." and [word for word, _ in ranked[1:4]] == list(prompt.answers)
    assert all(n == pytest.approx(ranked[0][1] / k**2, abs=1) for k, (_, n) in enumerate(ranked, 1))
    for length in (512, 700, 1000):
        counts = Counter(text_of("fwe", length).split())
        fourth, fifth = [n for word, n in counts.most_common() if re.fullmatch("[a-z]{6}", word)][2:4]
        assert fourth > fifth
