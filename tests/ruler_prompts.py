"""RULER prompts of the tiny model's tokenizer, for tests."""

import argparse
import re

from eval.live.suite import Case
from eval.live.tokens import Tokens, tokens
from eval.ruler import RulerSuite
from eval.texts.text import WORDS_FILE

TOKENS: Tokens = tokens(str(WORDS_FILE.parent.parent / "models" / "tiny-gqa"))
NEEDLE = re.compile(r"One of the special magic (?:number|uuid)s for (.+?) is: (\S+)\.")


def make(*arguments: str) -> RulerSuite:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    RulerSuite.add_arguments(parser)
    return RulerSuite(parser.parse_args(arguments), TOKENS)


def text_of(task: str, length: int, *arguments: str) -> str:
    return TOKENS.decode(make(*arguments).build(Case(task, length)).tokens)


def coded(text: str) -> str:
    return text[text.index("coded words. ") + len("coded words. ") : text.index("\nQuestion")]
