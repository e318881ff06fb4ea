"""RULER prompts of the tiny model's tokenizer, for tests."""

import re

from suites import TOKENS, suite_of

from eval.live.suite import Case
from eval.ruler import RulerSuite

NEEDLE = re.compile(r"One of the special magic (?:number|uuid)s for (.+?) is: (\S+)\.")


def make(*arguments: str) -> RulerSuite:
    return suite_of(RulerSuite, *arguments)


def text_of(task: str, length: int, *arguments: str) -> str:
    return TOKENS.decode(make(*arguments).build(Case(task, length)).tokens)


def coded(text: str) -> str:
    return text[text.index("coded words. ") + len("coded words. ") : text.index("\nQuestion")]
