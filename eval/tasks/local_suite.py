"""Questions from local copies of benchmarks: what the commands that ask them share."""

from __future__ import annotations

import argparse
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.live.client import list_of, positive
from eval.live.counters import EvaluationError
from eval.live.suite import Case, Prompt, Suite
from eval.live.tokens import Tokens
from eval.texts.lengths import length

CUTS = 8

Row = Mapping[str, Any]


@dataclass(frozen=True)
class LocalTask:
    """A data set of a benchmark.

    Attributes:
        rows: of its file.
        text: what is asked of a row.
        answers: the right answers of a row.
        room: tokens of the answer.
        chat: asked in the user's turn of the chat template; otherwise as a raw prompt.
        sampling: further fields of a request.
    """

    rows: Sequence[dict[str, Any]]
    text: Callable[[Row], str]
    answers: Callable[[Row], list[str]]
    room: int
    chat: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)


class LocalSuite(Suite):
    """Cases and prompts of data sets that `read` finds; a case is a row at a length."""

    local: dict[str, LocalTask]

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """See `Suite.add_arguments`."""
        parser.add_argument("--data", type=Path, help="folder with the data, see above")
        parser.add_argument("--prompts", type=Path, help="copy of the benchmark's repository, see above")
        parser.add_argument("--tasks", type=list_of(str), help="comma-separated; all by default")
        parser.add_argument(
            "--lengths",
            type=list_of(length, some=True),
            help="tokens of prompt and answer together, k = 1024: longer prompts lose their middle; whole by default",
        )
        parser.add_argument("--n", type=positive, help="the first so many rows of each task; all by default")
        parser.add_argument("--max-tokens", type=positive, help="room for the answer; the benchmark's by default")
        parser.add_argument("--no-chat", action="store_true", help="raw prompts for all tasks")

    @abstractmethod
    def read(self) -> dict[str, LocalTask]:
        """The data sets that were asked for, by task.

        Raises:
            EvaluationError: a file is missing or is not as it should be; names file, line and field.
        """

    def cases(self) -> list[Case]:
        """See `Suite.cases`."""
        self.local = self.read()
        for task in self.local.values():
            # A template that asks for what the rows do not have is better found now than at every question.
            task.text(task.rows[0])
        lengths = sorted(set(self.args.lengths)) if self.args.lengths else [None]
        pairs = [(name, i) for name, task in self.local.items() for i in range(len(task.rows))]
        return [Case(name, wanted, index=i) for wanted in lengths for name, i in pairs]

    def build(self, case: Case) -> Prompt:
        """See `Suite.build`."""
        task, row = self.local[case.task], self.row(case)
        room = self.args.max_tokens or task.room
        most = None if case.length is None else case.length - room
        prompt = ask(self.tokens, task.text(row), task.chat and not self.args.no_chat, most)
        sampling = {"temperature": 0.0, **task.sampling}
        return Prompt(prompt, task.answers(row), room, sampling, {"row": str(row.get("_id", case.index))})

    def row(self, case: Case) -> dict[str, Any]:
        """What the file says of a case."""
        return self.local[case.task].rows[case.index]


def ask(tokens: Tokens, text: str, chat: bool, most: int | None = None) -> list[int]:
    """Token ids of a prompt; one that is too long loses its middle, half of what is kept coming from each end.

    That is the truncation of LongBench and InfiniteBench. They count the text alone; here the chat template
    counts too, so that the prompt has the promised size.

    Args:
        tokens: the tokenizer.
        text: what is asked.
        chat: in the user's turn of the chat template; otherwise as a raw prompt.
        most: tokens of the whole prompt; all if None.

    Raises:
        EvaluationError: `most` has no room for any text.
    """

    def whole(content: str) -> list[int]:
        if chat:
            return tokens.chat([{"role": "user", "content": content}])
        return [*tokens.start(), *tokens.encode(content)]

    prompt = whole(text)
    if most is None or len(prompt) <= most:
        return prompt
    ids = tokens.encode(text)
    keep = min(most, len(ids))
    for _ in range(CUTS):
        half = keep // 2
        if half < 1:
            break
        prompt = whole(tokens.decode(ids[:half]) + tokens.decode(ids[-half:]))
        if len(prompt) <= most:
            return prompt
        # Text that is cut and put together again may take another number of tokens.
        keep -= max(2, len(prompt) - most)
    raise EvaluationError(f"{most} tokens are too few for a prompt")
