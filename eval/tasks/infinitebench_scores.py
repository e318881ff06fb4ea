"""Scores of InfiniteBench (Zhang et al., 2024), written from the definitions of its evaluation code.

Each takes the right answers as texts and an output, and gives 0 to 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from eval.tasks.official_metrics import normal_zh, overlap, qa_f1

Score = Callable[[Sequence[str], str], float]

LETTERS = "ABCD"
_DEBUG_PREFIXES = ("answer is:", "is:", "answer:", "correct option is:")
_CHOICE_PREFIXES = ("answer is:", "answer:", "answer is", "option is")


def first_integer(answers: Sequence[str], output: str) -> float:
    """Whether the first run of digits is the answer: passkey and number_string."""
    found = re.search(r"[0-9]+", output)
    return float(found is not None and found[0] == answers[0])


def any_word(answers: Sequence[str], output: str) -> float:
    """Whether the answer is one of the words, punctuation taken for spaces: kv_retrieval."""
    return float(answers[0] in spaced(output, "\n:\"'.,?!{}").split())


def last_integer(answers: Sequence[str], output: str) -> float:
    """Whether the last word is the right integer: code_run."""
    words = spaced(output, "\n.`'\":").split()
    try:
        return float(bool(words) and int(words[-1]) == int(answers[0]))
    except ValueError:
        return 0.0


def first_number(answers: Sequence[str], output: str) -> float:
    """Whether the first number, whole or with decimals, is the right one: math_find."""
    found = re.search(r"\d+\.\d+|\d+", output)
    return float(found is not None and float(found[0]) == float(answers[0]))


def leading_share(answers: Sequence[str], output: str) -> float:
    """Share of the right numbers up to the first wrong one: math_calc; signs do not count."""
    right = 0
    for wanted, got in zip(answers, re.findall("[0-9]+", output), strict=False):
        # As digits: Python refuses to make an integer of the thousands that a model may write.
        if str(int(wanted)) != (got.lstrip("0") or "0"):
            break
        right += 1
    return right / len(answers)


def leading_share_after_first(answers: Sequence[str], output: str) -> float:
    """The same without the first number, which the prompts for GPT-4 ask for."""
    first = re.search("[0-9]+", output)
    return leading_share(answers, output[first.end() :] if first else "")


def buggy_option(answers: Sequence[str], output: str) -> float:
    """Whether the output begins with the right letter, or says it, or the function's name, in a known form: code_debug.

    The answers are that name and that letter.
    """
    name, letter = answers[:2]
    text = output.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = spaced(text, "\n`'\"-*").replace("Option", " ").replace("option", " ")
    said = after_prefix(re.sub(" +", " ", text), _DEBUG_PREFIXES)
    return float(said is not None and said.startswith((letter, name)))


def chosen_option(answers: Sequence[str], output: str) -> float:
    """Whether the right letter, or the option's text, is what the output says in a known form: longbook_choice_eng.

    The answers are that text and that letter.
    """
    text = output.strip()
    if text[:1] in tuple(LETTERS):
        return float(text[0] in answers)
    if text in answers:
        return 1.0
    text = re.sub(" +", " ", spaced(text, "\n\"'.,?!{}"))
    said = after_prefix(text, _CHOICE_PREFIXES)
    if said is not None:
        return float(said.startswith(tuple(answers)))
    letter = next((word for word in text.split() if word in LETTERS), "")
    return float(letter in answers)


def best_f1(answers: Sequence[str], output: str) -> float:
    """F1 of English words, the best of the answers: longbook_qa_eng."""
    return max(qa_f1(output, answer) for answer in answers)


def best_f1_characters(answers: Sequence[str], output: str) -> float:
    """F1 of Chinese characters, the best of the answers: longbook_qa_chn."""
    return max(overlap(normal_zh(output), normal_zh(answer)) for answer in answers)


def summary_rouge(answers: Sequence[str], output: str) -> float:
    """F1 of ROUGE-Lsum by the package ``rouge-score``, the best of the answers: longbook_sum_eng."""
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeLsum"]).score_multi(list(answers), output)["rougeLsum"].fmeasure


def spaced(text: str, characters: str) -> str:
    """A text with spaces in the place of characters."""
    return text.translate(dict.fromkeys(map(ord, characters), " "))


def after_prefix(text: str, prefixes: Sequence[str]) -> str | None:
    """What stands after the first of the prefixes that occurs, one character passed over; None if none does."""
    for prefix in prefixes:
        _, found, said = text.partition(prefix)
        if found:
            return said[1:]
    return None


SCORES: dict[str, Score] = {
    "passkey": first_integer,
    "number_string": first_integer,
    "kv_retrieval": any_word,
    # A name in capitals, whatever the case of the words.
    "longdialogue_qa_eng": lambda answers, output: any_word(answers, output.upper()),
    "longbook_sum_eng": summary_rouge,
    "longbook_choice_eng": chosen_option,
    "longbook_qa_eng": best_f1,
    "longbook_qa_chn": best_f1_characters,
    "math_find": first_number,
    "math_calc": leading_share,
    "code_run": last_integer,
    "code_debug": buggy_option,
}
