"""RULER's question-answering tasks: a question about one or two of many documents, from SQuAD or HotpotQA."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from eval.live.counters import EvaluationError
from eval.live.tokens import Tokens
from eval.tasks.local_data import TEXT, Kind, read_array, read_json, require
from eval.texts.haystacks import ExactHaystack, Question, spaced

SPARE_DOCUMENTS = 64
_ORDER = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
_LIST = Kind("a list", lambda value: isinstance(value, list))
_PASSAGES = Kind(
    "a list of [title, [sentence, ...]]",
    lambda value: (
        isinstance(value, list)
        and all(isinstance(part, list) and len(part) == 2 and isinstance(part[1], list) for part in value)
    ),
)


@dataclass(frozen=True)
class Asked:
    """A question of a data set: with the documents that answer it, and others of the same article."""

    question: str
    answers: tuple[str, ...]
    needed: tuple[str, ...]
    near: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuestionSet:
    """Questions of a data set and all its documents, in a fixed order."""

    questions: list[Asked]
    documents: list[str]


@cache
def read_squad(path: str) -> QuestionSet:
    """The answerable questions of a SQuAD file (version 1.1 or 2.0, JSON); RULER takes ``dev-v2.0.json``.

    Raises:
        EvaluationError: it is no such file; names the field that is missing.
    """
    whole = read_json(Path(path))
    require(whole, {"data": _LIST}, path)
    questions, documents = [], set()
    for number, article in enumerate(whole["data"], 1):
        where = f"{path}, article {number}"
        require(article, {"paragraphs": _LIST}, where)
        for paragraph in article["paragraphs"]:
            require(paragraph, {"context": TEXT, "qas": _LIST}, where)
        texts = [paragraph["context"] for paragraph in article["paragraphs"]]
        documents |= set(texts)
        for paragraph in article["paragraphs"]:
            near = tuple(dict.fromkeys(text for text in texts if text != paragraph["context"]))
            for asked in paragraph["qas"]:
                require(asked, {"question": TEXT, "answers": _LIST}, where)
                if asked.get("is_impossible"):
                    continue
                answers = tuple(_text(answer, where) for answer in asked["answers"])
                questions.append(Asked(asked["question"], answers, (paragraph["context"],), near))
    return _checked(path, questions, documents)


@cache
def read_hotpot(path: str) -> QuestionSet:
    """The questions of a HotpotQA file (JSON); RULER takes ``hotpot_dev_distractor_v1.json``.

    Raises:
        EvaluationError: it is no such file; names the field that is missing.
    """
    questions = []
    for row in read_array(Path(path), {"question": TEXT, "answer": TEXT, "context": _PASSAGES}):
        needed = tuple(dict.fromkeys(f"{title}\n{''.join(parts)}" for title, parts in row["context"]))
        questions.append(Asked(row["question"], (row["answer"],), needed))
    return _checked(path, questions, {text for asked in questions for text in asked.needed})


def _text(answer: Any, where: str) -> str:
    require(answer, {"text": TEXT}, where)
    return answer["text"]


def _checked(path: str, questions: list[Asked], documents: set[str]) -> QuestionSet:
    if not questions:
        raise EvaluationError(f"{path} has no questions that can be answered")
    if not all(asked.answers for asked in questions):
        raise EvaluationError(f"{path} has questions without answers: a file for testing has none, take one with")
    return QuestionSet(questions, sorted(documents))


READERS: dict[str, Callable[[str], QuestionSet]] = {"qa_1": read_squad, "qa_2": read_hotpot}


def document_question(asked: Asked, found: QuestionSet, rng: random.Random, length: int, tokens: Tokens) -> Question:
    """A question after its documents and as many others as fit, those of the same article first, in random order.

    There must be documents of `length` tokens.

    Raises:
        EvaluationError: the file has not so many.
    """
    pool = _others(asked, found, rng, length, tokens)
    order = rng.random()

    def ask(filling: int) -> str:
        documents = [*asked.needed, *pool.take(0, filling)]
        random.Random(order).shuffle(documents)
        context = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(documents, 1))
        return f"{_ORDER}\n\nThe following are given documents.\n\n{context}\n\n{_ORDER}\n\nQuestion: {asked.question}"

    return Question(ask, "Answer:", asked.answers)


def _others(asked: Asked, found: QuestionSet, rng: random.Random, length: int, tokens: Tokens) -> ExactHaystack:
    """Documents beside those needed that together have `length` tokens, and some to exchange them for."""

    def shuffled() -> Iterator[str]:
        yield from rng.sample(asked.near, len(asked.near))
        known = {*asked.needed, *asked.near}
        for i in rng.sample(range(len(found.documents)), len(found.documents)):
            if found.documents[i] not in known:
                yield found.documents[i]

    source, texts, sizes = shuffled(), [], []
    while sum(sizes) < length:
        more = list(islice(source, SPARE_DOCUMENTS))
        if not more:
            raise EvaluationError(
                f"--lengths {length}: all documents but those of the question together have {sum(sizes)} tokens; "
                "give fewer than that, or a file with more"
            )
        texts += more
        sizes += spaced(tokens, more, "\n\nDocument 100:\n")
    return ExactHaystack(texts, lambda _: sizes)
