"""RULER's tasks: lengths, data, arguments, a scorer that can fail, and the sentences and numbers of the definitions."""

import json
import random
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ruler_prompts import NEEDLE, TOKENS, coded, make, text_of

from eval.live.counters import EvaluationError
from eval.live.suite import Case, Prompt
from eval.ruler import ANSWER_TOKENS, READERS, WITHOUT_FILES
from eval.tasks.ruler_needles import NEEDLE_TASKS, among, words_of
from eval.texts.text import NOISE


def article(i: int) -> str:
    return f"The capital of Land-{i} is City-{i}. " + " ".join(words_of("noun")[40 * i : 40 * i + 25]) + "."


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that name data in the formats of SQuAD and HotpotQA."""
    folder = tmp_path_factory.mktemp("qa")
    asked = [
        {
            "context": article(i),
            "qas": [
                {"question": "Unanswerable?", "answers": [], "is_impossible": True},
                {"question": f"What is the capital of Land-{i}?", "answers": [{"text": f"City-{i}"}, {"text": "?"}]},
            ],
        }
        for i in range(150)
    ]
    squad = {"data": [{"title": "", "paragraphs": asked[i : i + 3]} for i in range(0, 150, 3)]}
    hotpot = [
        {
            "question": f"What is the capital of Land-{i}?",
            "answer": f"City-{i}",
            "context": [[f"Title {j}", [article(j), " More."]] for j in range(i, i + 10)],
        }
        for i in range(140)
    ]
    (folder / "squad.json").write_text(json.dumps(squad))
    (folder / "hotpot.json").write_text(json.dumps(hotpot))
    return ["--squad", str(folder / "squad.json"), "--hotpot", str(folder / "hotpot.json")]


def oracle(text: str) -> str:
    """Return a perfect reader's answer to a prompt."""
    if "special magic" in text:
        asked = re.findall(r"What (?:is|are all) the special magic \w+ for (.*?) mentioned", text)[-1]
        return " ".join(value for key, value in NEEDLE.findall(text) if key in re.split(", and |, ", asked))
    if "variable assignment" in text:
        question = text[text.rindex("Memorize") :]
        known = set(re.findall(r"assigned the value (\d+) in", question))
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", question):
            known |= {name} if source in known else set()
        return " ".join(known)
    if "numbered list" in text:
        entries = text[text.rindex("Below is") :].split("\n")[1]
        counts = Counter(re.split(r" ?\d+\. ", entries)[1:])
        return ", ".join(word for word, _ in counts.most_common(10))
    if "coded text" in text:
        counts = Counter(re.findall(r"\b[a-z]{6}\b", coded(text)))
        return " ".join(word for word, _ in counts.most_common(3))
    land = re.findall(r"Question: What is the capital of (\S+)\?", text)[0]
    return re.findall(rf"The capital of {land} is (\S+)\.", text)[0]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    task=st.sampled_from(list(ANSWER_TOKENS)),
    length=st.sampled_from([1280, 2048, 3000, 5120, 8192]),
    options=st.sampled_from([[], ["--chat"], ["--wording", "nvidia"]]),
    index=st.integers(0, 100),
    seed=st.integers(0, 10**6),
)
def test_prompts(files: list[str], task: str, length: int, options: list[str], index: int, seed: int) -> None:
    # Whole documents fill the length: few of them leave more than 1 % over.
    assume(length >= 2048 or task not in READERS)
    suite, case = make(*files, *options, "--seed", str(seed)), Case(task, length, None, index)
    prompt = suite.build(case)
    assert 0.99 * length <= len(prompt.tokens) + prompt.max_new_tokens <= length
    assert prompt.max_new_tokens == ANSWER_TOKENS[task]
    text = TOKENS.decode(prompt.tokens)
    assert suite.score(case, prompt, oracle(text))["score"] == 1
    if task in NEEDLE_TASKS:
        assert all(text.count(value) == 1 for value in prompt.answers)
        assert len({value for _, value in NEEDLE.findall(text)}) == len(NEEDLE.findall(text))


def test_a_prompt_depends_on_its_case_and_seed_alone(files: list[str]) -> None:
    for task in ANSWER_TOKENS:
        case = Case(task, 2048, None, 1)
        prompt = make(*files).build(case)
        assert prompt == make(*files, "--n", "3", "--tasks", "vt").build(case)
        assert prompt.tokens != make(*files, "--seed", "1").build(case).tokens


def test_guessing_scores_nothing(files: list[str]) -> None:
    suite, rng = make(*files), random.Random(0)
    alphabets = ("0123456789", "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ")

    def garble(letter: str) -> str:
        return next((rng.choice(letters) for letters in alphabets if letter in letters), letter)

    for task in ANSWER_TOKENS:
        case = Case(task, 2048)
        prompt = suite.build(case)
        guesses = [" ".join("".join(map(garble, answer)) for answer in prompt.answers) for _ in range(20)]
        if task == "cwe":
            guesses = [" ".join(rng.sample(words_of("noun", "adjective", "verb"), 10)) for _ in range(20)]
        if not task.startswith("qa"):
            assert sum(suite.score(case, prompt, guess)["score"] for guess in guesses) / 20 < 0.02
        assert suite.score(case, prompt, "") == {"score": 0, "all": 0}
    # Another needle's value, not just any number.
    prompt = suite.build(Case("niah_multikey_2", 2048))
    others = {value for _, value in NEEDLE.findall(TOKENS.decode(prompt.tokens))} - set(prompt.answers)
    assert others and all(suite.score(Case("niah_multikey_2"), prompt, value)["score"] == 0 for value in others)


def test_scores() -> None:
    suite, prompt = make(), Prompt([], ["ABCDE", "FGHIJ", "KLMNO", "PQRST"], 30)
    assert suite.score(Case("vt"), prompt, "fghij, xABCDEx\x00") == {"score": 0.5, "all": 0}
    assert suite.score(Case("qa_1"), prompt, "It is fghij.") == {"score": 1, "all": 0}
    assert suite.score(Case("qa_1"), prompt, "It is f.") == {"score": 0, "all": 0}


def test_documents(files: list[str]) -> None:
    text = text_of("qa_1", 4096, *files)
    order = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    )
    assert text.startswith(f"{order}\n\nThe following are given documents.\n\nDocument 1:\n")
    assert text.endswith(f"\n\n{order}\n\nQuestion: What is the capital of Land-0? Answer:")
    numbers = [int(n) for n in re.findall(r"Document (\d+):\n", text)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 20
    # Paragraphs of the same article come with it.
    assert all(f"Land-{i} " in text for i in range(3))
    assert "\nTitle 1\nThe capital of Land-1 is City-1." in text_of("qa_2", 4096, *files)


def test_essays_of_ones_own(tmp_path: Path) -> None:
    essay = "Owls hoot at night.\nFoxes sleep by day. " * 5
    (tmp_path / "essays.json").write_text(json.dumps({"text": essay}))
    (tmp_path / "essays.txt").write_text(essay)
    for name in ("essays.json", "essays.txt"):
        prompt = make("--essays", str(tmp_path / name)).build(Case("niah_single_2", 1024))
        assert TOKENS.decode(prompt.tokens).count("Owls hoot at night. Foxes sleep by day.") > 30
        assert prompt.facts["haystack"] == "essays"
    assert make().build(Case("niah_single_2", 1024)).facts["haystack"] == "books"


def test_a_prompt_of_128k_is_quick() -> None:
    suite = make("--lengths", "128k")
    suite.cases()
    began = time.process_time()
    prompt = suite.build(Case("niah_multiquery", 131072))
    assert time.process_time() - began < 2
    assert 0.99 * 131072 <= len(prompt.tokens) + 128 <= 131072


def test_cases() -> None:
    cases = make("--lengths", "8k,4k", "--n", "2").cases()
    assert [case.task for case in cases[::2]] == [*WITHOUT_FILES, *WITHOUT_FILES] and len(WITHOUT_FILES) == 11
    assert [case.length for case in cases] == [4096] * 22 + [8192] * 22


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "vt,qa_1"], "--tasks qa_1 needs --squad FILE"),
        (["--tasks", "qa_2", "--hotpot", "/nowhere.json"], "there is no file /nowhere.json"),
        (["--tasks", "qa"], "--tasks: got qa, allowed: niah_single_1, .* qa_2"),
        (["--wording", "plain"], r"--wording: invalid choice: 'plain' \(choose from .*lm-eval.*nvidia"),
        (["--essays", "/nowhere.txt"], "--essays /nowhere.txt: not a readable"),
        (
            ["--tasks", "cwe", "--lengths", "16k,512"],
            r"--lengths 512: the shortest prompt of cwe and its answer take 6\d\d",
        ),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        make(*arguments).cases()


def test_wrong_files(tmp_path: Path, files: list[str]) -> None:
    with pytest.raises(EvaluationError, match=r"--n 151: .*squad\.json has 150 questions"):
        make(*files, "--tasks", "qa_1", "--n", "151").cases()
    with pytest.raises(EvaluationError, match="all documents but those of the question together have"):
        make(*files).build(Case("qa_1", 131072))
    wrong = {
        "text.json": ("what", "not JSON"),
        "rows.json": ('{"data": [{"paragraphs": [{"qas": []}]}]}', "article 1: field 'context' is missing"),
        "none.json": ('{"data": []}', "no questions that can be answered"),
    }
    for name, (text, message) in wrong.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(EvaluationError, match=message):
            make("--tasks", "qa_1", "--squad", str(tmp_path / name)).cases()


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
