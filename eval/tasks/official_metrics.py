"""Scores of LongBench (Bai et al., 2024) and of InfiniteBench (Zhang et al., 2024), which shares some of them.

Written from the definitions of their evaluation code. All give 0 to 1: LongBench's take an output and one right answer,
those in ``SCORES``, of InfiniteBench, the right answers as texts and an output.
"""

from __future__ import annotations

import difflib
import logging
import re
import string
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from eval.live.counters import EvaluationError

# What LongBench leaves out of Chinese words beside ASCII punctuation.
CHINESE_PUNCTUATION = (
    "–—‘’‛“”„‟…‧、。〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿﹏！＂＃＄％＆＇（）"  # noqa: RUF001
    "＊＋，－／：；＜＝＞？＠［＼］＾＿｀｛｜｝～｟｠｡｢｣､"  # noqa: RUF001
)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + CHINESE_PUNCTUATION)
RETRIEVED = {"en": re.compile(r"Paragraph (\d+)"), "zh": re.compile(r"段落(\d+)")}


def words(text: str) -> list[str]:
    """Words of an English text, in lower case, without punctuation and articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_NO_PUNCTUATION)).split()


def normal_zh(text: str) -> str:
    """A Chinese text in lower case, without punctuation and spaces."""
    return "".join(text.lower().translate(_NO_CHINESE_PUNCTUATION).split())


def segments(text: str) -> list[str]:
    """Split a Chinese text into words by jieba, without changing them."""
    return _segmenter()(text)


@cache
def _segmenter() -> Callable[[str], list[str]]:
    with warnings.catch_warnings():
        # The package asks for its own files by a way that setuptools warns of.
        warnings.simplefilter("ignore")
        import jieba
    jieba.setLogLevel(logging.WARNING)
    return jieba.lcut


def words_zh(text: str) -> list[str]:
    """Words of a Chinese text, in lower case, without punctuation."""
    return [word for word in map(normal_zh, segments(text)) if word]


def overlap(found: Sequence[str], wanted: Sequence[str]) -> float:
    """F1 of two bags of words."""
    same = (Counter(found) & Counter(wanted)).total()
    return 2 * same / (len(found) + len(wanted)) if same else 0.0


def qa_f1(output: str, answer: str) -> float:
    """F1 of the words of both, in any order."""
    return overlap(words(output), words(answer))


def qa_f1_zh(output: str, answer: str) -> float:
    """The same of Chinese words."""
    return overlap(words_zh(output), words_zh(answer))


def rouge_l(output: str, answer: str) -> float:
    """F1 of ROUGE-L by the package ``rouge``, which LongBench uses; 0 where one of them has no words.

    The package recurses once a word. LongBench gives 0 where that goes too deep, here it may go as deep as it must.
    """
    from rouge import Rouge

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + len(output.split()) + len(answer.split()))
    try:
        found: Any = Rouge(metrics=["rouge-l"]).get_scores([output], [answer])
    except ValueError:
        return 0.0
    finally:
        sys.setrecursionlimit(limit)
    return found[0]["rouge-l"]["f"]


def rouge_l_zh(output: str, answer: str) -> float:
    """The same of Chinese texts, jieba's words taken for words."""
    return rouge_l(" ".join(segments(output)), " ".join(segments(answer)))


def classification(output: str, answer: str, classes: Sequence[str]) -> float:
    """1 if the right class is named, less if others are named too: one by the number of classes named.

    Names that stand within the right one do not count, except where the next name in the list was dropped for that:
    the official code deletes from the list that it walks along.
    """
    named = [name for name in classes if name in output]
    at = 0
    while at < len(named):
        if named[at] in answer and named[at] != answer:
            del named[at]
        at += 1
    return 1 / len(named) if answer in named else 0.0


def count(output: str, answer: str) -> float:
    """Share of the numbers in an output that are the right one."""
    found = re.findall(r"\d+", output)
    return found.count(answer) / len(found) if found else 0.0


def retrieval(output: str, answer: str, language: str) -> float:
    """Share of the numbers in an output that are that of the paragraph in the answer, such as "Paragraph 12"."""
    wanted = RETRIEVED[language].search(answer)
    if wanted is None:
        raise EvaluationError(f"the right answer {answer!r} names no paragraph")
    return count(output, wanted[1])


def code_similarity(output: str, answer: str) -> float:
    """Similarity, rounded to percent, of the answer and the first line of an output that is no comment or fence.

    LongBench calls ``fuzz.ratio`` of the package ``fuzzywuzzy``, which is Python's ``difflib`` where nothing faster is
    installed beside it, as it is by LongBench's list of requirements.
    """
    lines = output.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if line == answer:
        return 1.0
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100 if line and answer else 0.0


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
    """Return the text after the first of the prefixes that occurs, one character passed over; None if none does."""
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
