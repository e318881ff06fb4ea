"""A second engine for what the first one answered: its pool is large, and nothing leaves it or is drafted."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine import RUNNING, Engine, EngineOptions, StopLoop, request

# Log-probabilities differ by rounding: of batches, and of where chunks end.
TOLERANCE = 1e-3


class OtherAnswerError(AssertionError):
    """A request was answered otherwise than it is alone with all the memory."""


@dataclass(frozen=True)
class Answer:
    """A request and what it got.

    Attributes:
        prompt: its tokens.
        sampling: its parameters; greedy.
        tokens: of its output, as far as no retraction and no abort has a say.
        logprobs: of these.
        whole: whether that is all of it.
    """

    prompt: list[int]
    sampling: dict[str, Any]
    tokens: list[int]
    logprobs: list[float]
    whole: bool


class Twin:
    """Waits in a process of its own, forked before this one has a scheduler.

    Args:
        options: of the engine whose answers are compared.
        model: what ``tiny_model`` made.
    """

    def __init__(self, options: EngineOptions, model: Path):
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(_alone(options), model, other, self._pipe))
        self._process.start()
        other.close()

    def compare(self, answers: Mapping[str, Answer]) -> dict[str, str]:
        """Return what was answered otherwise, by request."""
        self._pipe.send({rid: (answer.prompt, answer.sampling) for rid, answer in answers.items()})
        expected = self._pipe.recv()
        self._process.join()
        found = {rid: difference(answer, *expected[rid]) for rid, answer in answers.items()}
        return {rid: text for rid, text in found.items() if text is not None}

    def dismiss(self) -> None:
        """End it without a comparison."""
        self._pipe.close()
        self._process.join()


def difference(answer: Answer, tokens: list[int], logprobs: list[float]) -> str | None:
    """Say how an answer differs from the twin's, or None."""
    # A round that ends with an abort hands out what it accepted behind the end of the text, too.
    end = len(answer.tokens) if answer.whole else min(len(answer.tokens), len(tokens))
    if answer.tokens[:end] != (tokens if answer.whole else tokens[:end]):
        return f"answered {answer.tokens}, alone {tokens}"
    asked = zip(answer.logprobs[:end], logprobs[:end], strict=True) if answer.logprobs else ()
    worst = max((abs(a - b) for a, b in asked), default=0.0)
    return f"log-probabilities are {worst} apart" if worst > TOLERANCE else None


def _alone(options: EngineOptions) -> EngineOptions:
    dense = {"dense_fallback": "auto", "crossover_tokens": 10**9}
    uncompacted = {"eviction": "visibility"} if "eviction" in options.config else {}
    config = {**options.config, **(dense if options.drafts else uncompacted)}
    drafts = 0 if options.drafter else options.drafts
    own = {"overlap": False, "slots": 4096, "chunk": 512, "radix": False, "host": 0, "sessions": False}
    return replace(options, **own, config=config, drafts=drafts)


def _serve(options: EngineOptions, model: Path, pipe: Any, others: Any) -> None:
    # Else its end would not be noticed here.
    others.close()
    with suppress(EOFError):
        asked = pipe.recv()
        engine = Engine(options, model)
        left = [request(rid, *one, logprob=True) for rid, one in asked.items()]

        def receive() -> list[Any]:
            if not engine.scheduler.is_fully_idle():
                return []
            if not left:
                raise StopLoop
            batch, left[:] = left[:RUNNING], left[RUNNING:]
            return batch

        engine.run(receive)
        pipe.send({rid: (engine.outputs[rid], engine.logprobs[rid]) for rid in asked})
