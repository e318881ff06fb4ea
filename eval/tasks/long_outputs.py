"""The outputs that ``eval.long_generation`` forces, their checkpoints, and the settings that are compared."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from eval.live.counters import EvaluationError
from eval.texts.windows import SCORED, make_windows, with_records

KINDS = ("book", "records")
# Records and a question need some 220 tokens.
FIRST_CHECKPOINT = {"book": 64, "records": 256}

Generate = Callable[[Sequence[Sequence[int]], int], list[list[int]]]


@dataclass(frozen=True)
class Checkpoint:
    """Positions of an output that are looked at: the `scored` ones before `end`."""

    end: int
    scored: int

    @property
    def positions(self) -> range:
        """Of the output, from 0."""
        return range(self.end - self.scored, self.end)


@dataclass(frozen=True)
class Output:
    """A prompt and what the servers are made to say after it.

    Attributes:
        index: of the prompt.
        prompt: token ids.
        tokens: ids of the output, up to the last checkpoint.
        checkpoints: in ascending order.
        facts: where the text is from.
    """

    index: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    checkpoints: tuple[Checkpoint, ...]
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def ids(self, task: str) -> list[str]:
        """One for each checkpoint, unique within a setting."""
        return [f"{task}/{self.index}/{checkpoint.end}" for checkpoint in self.checkpoints]

    def positions(self) -> list[int]:
        """All that are looked at."""
        return sorted({position for checkpoint in self.checkpoints for position in checkpoint.positions})


@dataclass(frozen=True)
class Setting:
    """The settings of the requests of a comparison with dense decode.

    Attributes:
        name: unique within a run.
        sparse: False for the noise of dense decode itself.
        ratio: share of the pages; None for the server's own.
        interval: tokens between rectifications, 0 for never; None where the method has none.
    """

    name: str
    sparse: bool = True
    ratio: float | None = None
    interval: int | None = None

    @property
    def params(self) -> dict[str, Any]:
        """``custom_params`` of its requests."""
        if not self.sparse:
            return {"sparse": False}
        asked = {"active_ratio": self.ratio, "rectify_interval": self.interval}
        return {name: value for name, value in asked.items() if value is not None}


NOISE = Setting("noise", sparse=False)


def checkpoints_of(kind: str, wanted: Sequence[int] | None, tokens: int) -> list[int]:
    """The ends of the checkpoints of a text, ascending; refused if one is not within an output of `tokens` tokens.

    Without any wanted they are doubled from ``FIRST_CHECKPOINT`` on, and `tokens` itself is the last.
    """
    if wanted is None:
        first = FIRST_CHECKPOINT[kind]
        return sorted({min(first << i, tokens) for i in range(tokens.bit_length())})
    wrong = [end for end in wanted if not 1 <= end <= tokens]
    if wrong or not wanted:
        raise EvaluationError(f"--checkpoints {wrong}: allowed are positions from 1 to {tokens} (--tokens)")
    return sorted(set(wanted))


def make_settings(
    config: Mapping[str, Any], ratios: Sequence[float], intervals: Iterable[int], tokens: int
) -> list[Setting]:
    """The settings of a run: noise, then for each ratio never rectified and every interval.

    Without ratios it is the server's own, and its own interval is beside those wanted. Refused if the method has no
    such field, or an interval never falls into an output.
    """
    if ratios and "active_ratio" not in config:
        raise EvaluationError("--ratios: the server's method has no active_ratio")
    own = config.get("rectify_interval")
    if own is None:
        if intervals := list(intervals):
            raise EvaluationError(f"--intervals {intervals}: the server's method is never rectified")
        return [NOISE, *(Setting("sparse" + _of(ratio), ratio=ratio) for ratio in ratios or [None])]
    asked = sorted({own, *intervals} - {0})
    wrong = [interval for interval in asked if not 2 <= interval < tokens]
    if wrong:
        raise EvaluationError(
            f"rectification every {wrong} tokens: allowed are intervals (--intervals, and the server's own {own}) of "
            f"2 or more that are shorter than the output of {tokens} tokens"
        )
    return [NOISE] + [
        Setting((f"every {interval}" if interval else "off") + _of(ratio), ratio=ratio, interval=interval)
        for ratio in dict.fromkeys(ratios or [None])
        for interval in (0, *asked)
    ]


def _of(ratio: float | None) -> str:
    return "" if ratio is None else f", ratio {ratio:g}"


def make_outputs(
    kind: str,
    books: Mapping[str, Sequence[int]],
    args: argparse.Namespace,
    checkpoints: Sequence[int],
    encode: Callable[[str], Sequence[int]],
    generate: Generate,
) -> list[Output]:
    """The outputs of a text; refused if the books are too short, or an output has no room for the records."""
    if kind == "book":
        windows = make_windows(books, args.prompt_length, args.n, args.seed)
        said = generate([window.tokens for window in windows], checkpoints[-1])
        scored = tuple(Checkpoint(end, min(end, SCORED)) for end in checkpoints)
        return [
            Output(i, window.tokens, tuple(tokens), scored, {"book": window.book, "start": window.start})
            for i, (window, tokens) in enumerate(zip(windows, said, strict=True))
        ]
    found, once = [], cache(encode)
    for i, window in enumerate(make_windows(books, args.prompt_length + checkpoints[-1], args.n, args.seed)):
        for end in checkpoints:
            part = replace(window, tokens=window.tokens[: args.prompt_length + end])
            told = with_records(part, args.prompt_length, args.seed, once)
            prompt, output = told.tokens[: args.prompt_length], told.tokens[args.prompt_length :]
            facts = {"book": told.book, "start": told.start, "depth": told.depth}
            found.append(Output(i, prompt, output, (Checkpoint(end, told.scored),), facts))
    return found
