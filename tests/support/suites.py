"""Suites of questions as their commands make them, with the tiny tokenizer, and rows of ``eval.ppl_prefill``."""

import argparse
from typing import Any, NoReturn, TypeVar

import numpy as np

from eval import ppl_prefill
from eval.live.counters import EvaluationError
from eval.live.suite import Suite
from eval.live.tokens import Tokens, tokens
from eval.texts.text import WORDS_FILE
from eval.texts.windows import Window

TOKENS: Tokens = tokens(str(WORDS_FILE.parent.parent / "models" / "tiny-gqa"))
# Of windows of ``eval.ppl_prefill``: tokens, where sparse queries begin, and how many there are.
LENGTH, BEGINS, WINDOWS = 301, 100, 40
AnySuite = TypeVar("AnySuite", bound=Suite)


class Parser(argparse.ArgumentParser):
    """Refuses as suites do."""

    def error(self, message: str) -> NoReturn:
        raise EvaluationError(message)


def suite_of(kind: type[AnySuite], *arguments: str) -> AnySuite:
    """A suite by its own command line; those that every command takes are left out but for ``--seed``."""
    parser = Parser()
    parser.add_argument("--seed", type=int, default=0)
    kind.add_arguments(parser)
    return kind(parser.parse_args(arguments), TOKENS)


def perplexity_rows(lost: float, text: str = "book", noise: float = 0.0) -> list[dict[str, Any]]:
    """Return the rows of ``eval.ppl_prefill`` if each token from ``BEGINS`` on costs `lost` nats more."""
    rng = np.random.default_rng(0)
    dense = rng.uniform(1.0, 3.0, (WINDOWS, LENGTH - 1))
    sparse = dense + np.where(np.arange(LENGTH - 1) >= BEGINS, lost, 0.0) + noise * rng.normal(size=(WINDOWS, 1))
    windows = [Window("a", i * LENGTH, tuple(range(LENGTH))) for i in range(WINDOWS)]
    found = ppl_prefill.rows_of(text, windows, {"dense": dense, "sparse": sparse}, BEGINS)
    return [*found, {"kind": "counters", "task": text, "arm": "sparse", "sparsity": 0.4}]
