"""Scores of LongBench (Bai et al., 2024), which InfiniteBench shares in part.

Written from the definitions of LongBench's evaluation code. All take an output and one right answer and give 0 to 1.
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
    """What jieba takes for the words of a Chinese text, as they stand there."""
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
