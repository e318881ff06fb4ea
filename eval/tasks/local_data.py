"""Local copies of benchmarks: their files, read strictly, and suites of their questions.

Nothing is downloaded, and nothing of a benchmark's repository is run: of its Python files literal values are read.
"""

from __future__ import annotations

import argparse
import ast
import json
import string
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from eval.live.client import list_of, positive
from eval.live.counters import EvaluationError
from eval.live.suite import Case, Prompt, Suite
from eval.live.tokens import Tokens
from eval.texts.lengths import length

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """The type of a field, in words and as a test."""

    name: str
    fits: Callable[[Any], bool]


TEXT = Kind("a text", lambda value: isinstance(value, str))
INTEGER = Kind("an integer", lambda value: isinstance(value, int))
TEXTS = Kind(
    "a list of texts",
    lambda value: isinstance(value, list) and bool(value) and all(isinstance(part, str) for part in value),
)
Fields = Mapping[str, Kind]


class Rows(Sequence[dict[str, Any]]):
    """Rows of a JSONL file, checked once and read again when asked for: long texts need not fit into memory.

    Args:
        path: the file; empty lines do not count.
        fields: what each row must have.
        limit: only the first so many rows.
        check: gets a row and where it stands, and raises if there is something else wrong with it.

    Raises:
        EvaluationError: there is no such file, it has no rows, or a line is not a JSON object with the fields; names
            file, line and field.
    """

    def __init__(
        self,
        path: Path,
        fields: Fields,
        limit: int | None = None,
        check: Callable[[dict[str, Any], str], object] | None = None,
    ) -> None:
        self.path = path
        self._starts: list[int] = []
        at = 0
        with existing(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and len(self._starts) == limit:
                    break
                if line.strip():
                    where = f"{path}, line {number}"
                    row = parsed(line, where)
                    require(row, fields, where)
                    if check is not None:
                        check(row, where)
                    self._starts.append(at)
                at += len(line)
        if not self._starts:
            raise EvaluationError(f"{path} has no rows")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            return json.loads(file.readline())


def existing(path: Path) -> Path:
    """The path, refused if it is no file."""
    if not path.is_file():
        raise EvaluationError(f"there is no file {path}")
    return path


def placed(folder: Path | None, option: str, *places: str) -> Path:
    """The first of the places in a folder at which there is a file; refused without the folder, or any place."""
    if folder is None:
        raise EvaluationError(f"{option} is missing: give the folder with {places[0]}")
    for place in places:
        if (folder / place).is_file():
            return folder / place
    raise EvaluationError(f"{option} {folder} has no {' or '.join(places)}")


def read_json(path: Path) -> Any:
    """The value in a JSON file; see `existing` and `parsed`."""
    return parsed(existing(path).read_bytes(), str(path))


def parsed(data: bytes, where: str) -> Any:
    """The value that JSON text in UTF-8 stands for; another text is refused, by what `where` calls it."""
    try:
        return json.loads(data)
    except ValueError as error:
        raise EvaluationError(f"{where}: not JSON in UTF-8 ({error})") from error


def require(row: Any, fields: Fields, where: str) -> None:
    """Refuse a row without the fields: by `where`, the field, what it is and what it should be."""
    if not isinstance(row, dict):
        raise EvaluationError(f"{where}: wanted a JSON object, got {type(row).__name__}")
    for name, kind in fields.items():
        if name not in row:
            raise EvaluationError(f"{where}: field {name!r} is missing; there are {', '.join(row) or 'none'}")
        if not kind.fits(row[name]):
            raise EvaluationError(f"{where}: field {name!r} is {shown(row[name])}, wanted {kind.name}")


def shown(value: Any) -> str:
    """A value for an error message, cut short."""
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def read_array(path: Path, fields: Fields, limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of a JSON file that holds one array of objects; they are counted from 1 in errors."""
    rows = read_json(path)
    if not isinstance(rows, list) or not rows:
        raise EvaluationError(f"{path}: wanted a JSON array of rows, got {type(rows).__name__} without any")
    for number, row in enumerate(rows[:limit], 1):
        require(row, fields, f"{path}, row {number}")
    return rows[:limit]


def literal(path: Path, name: str, kind: type[T]) -> T:
    """The literal that a Python file assigns to a name at its top level; the file is not run.

    Raises:
        EvaluationError: the file is missing or not Python, or assigns nothing, no literal or another type to the name.
    """
    try:
        body = ast.parse(existing(path).read_bytes(), str(path)).body
    except (SyntaxError, ValueError) as error:
        raise EvaluationError(f"{path}: not a Python file ({error})") from error
    found = {
        target.id: statement.value
        for statement in body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    if name not in found:
        raise EvaluationError(f"{path} does not assign {name}; it assigns {', '.join(found) or 'nothing'}")
    try:
        value = ast.literal_eval(found[name])
    except ValueError as error:
        raise EvaluationError(f"{path}: what it assigns to {name} is not a literal") from error
    if not isinstance(value, kind):
        raise EvaluationError(f"{path}: {name} is {shown(value)}, wanted a {kind.__name__}")
    return value


def entry(found: Mapping[str, Any], task: str, kind: type[T], where: str) -> T:
    """Return a task's entry in a benchmark's table, such as its template; refused where it is not of the type."""
    value = found.get(task)
    if not isinstance(value, kind):
        raise EvaluationError(f"{where}: for {task!r} it has {shown(value)}, wanted a {kind.__name__}")
    return value


def fill(template: str, values: Mapping[str, Any], where: str) -> str:
    """A template with its fields filled in; refused if it is none, or names a field that there is not."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise EvaluationError(f"{where}: not a template ({error})") from error
    missing = sorted(names - set(values))
    if missing:
        raise EvaluationError(f"{where}: the template wants {', '.join(missing)}; there are {', '.join(values)}")
    return template.format_map(values)


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
        """Return the row of a case in its file."""
        return self.local[case.task].rows[case.index]


def ask(tokens: Tokens, text: str, chat: bool, most: int | None = None) -> list[int]:
    """Token ids of a prompt; one of more than `most` loses its middle, half of what is kept coming from each end.

    That is the truncation of LongBench and InfiniteBench. They count the text alone; here the chat template counts too,
    so that the prompt has the promised size. Refused if `most` has no room for any text.
    """
    prompt = tokens.prompt(text, chat)
    if most is None or len(prompt) <= most:
        return prompt
    ids = tokens.encode(text)
    keep = min(most, len(ids))
    for _ in range(CUTS):
        half = keep // 2
        if half < 1:
            break
        prompt = tokens.prompt(tokens.decode(ids[:half]) + tokens.decode(ids[-half:]), chat)
        if len(prompt) <= most:
            return prompt
        # Text that is cut and put together again may take another number of tokens.
        keep -= max(2, len(prompt) - most)
    raise EvaluationError(f"{most} tokens are too few for a prompt")
