"""Suites of questions as their commands make them, with the tiny model's tokenizer, for tests."""

import argparse
from typing import TypeVar

from eval.live.suite import Suite
from eval.live.tokens import Tokens, tokens
from eval.texts.text import WORDS_FILE

TOKENS: Tokens = tokens(str(WORDS_FILE.parent.parent / "models" / "tiny-gqa"))
AnySuite = TypeVar("AnySuite", bound=Suite)


def suite_of(kind: type[AnySuite], *arguments: str) -> AnySuite:
    """A suite by its own command line; those that every command takes are left out but for ``--seed``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    kind.add_arguments(parser)
    return kind(parser.parse_args(arguments), TOKENS)
