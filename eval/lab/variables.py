"""Variable tracking that a tiny model can do: ``python -m eval.lab.variables --base-url URL --out FILE.jsonl``.

A variable is assigned another one, ``VAR lantern-hill = VAR copper-meadow``, and that one a number of five digits
elsewhere in the text; the question asks for the first one's value, so that both lines have to be found. Four such
chains stand in the text, one of them asked for. Tasks:

==============  ================================================================
variables       keys are two words that the tiny models of ``eval/models`` never saw
variables_known keys are two words of their training, which they copy more surely
==============  ================================================================

The depth is that of the line asked for; all others stand anywhere. RULER's own task, ``vt`` of `eval.ruler`, asks for
all names of a chain of four assignments after a worked example. Lengths, depths, forms and texts are those of
`eval.niah`.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence

from eval.live import runner
from eval.live.suite import Case, Prompt
from eval.live.tokens import fit
from eval.niah import PREFILLED, NeedleSuite
from eval.texts import haystacks
from eval.texts.haystacks import ExactHaystack
from eval.texts.text import FORMS, hide, random_key, random_number, unique_keys

# The words of the keys, of `eval.texts.text.words`.
SPLITS = {"variables": "eval", "variables_known": "train"}
CHAINS, HOPS, DIGITS, ROOM = 4, 2, 5, 64
VALUE = re.compile(rf"(?<!\d)\d{{{DIGITS}}}(?!\d)")


class VariableSuite(NeedleSuite):
    """See the module."""

    command = "eval.lab.variables"
    names = tuple(SPLITS)
    forms = tuple(form for form in NeedleSuite.forms if form != PREFILLED)

    def build(self, case: Case) -> Prompt:
        """See `Suite.build`; ``facts["needle_token"]`` is the place of the line asked for in the prompt."""
        assert case.length is not None and case.depth is not None
        room, rng, parts = self.args.answer_tokens or ROOM, case.rng(self.args.seed), self._haystack()
        chains = draw_chains(rng, SPLITS[case.task], parts)
        (key, *_), value = chains[0]
        records = [record for keys, number in chains for record in FORMS["var"].records(*keys, value=number)]
        depths = [case.depth, *(rng.random() for _ in records[1:])]
        start = rng.random()

        texts: dict[int, str] = {}

        def make(filling: int) -> list[int]:
            taken = parts.draw(random.Random(start), filling)
            text = hide(taken, records, [haystacks.share(taken, depth) for depth in depths], "\n")
            prompt = self._track(text, key)
            texts.setdefault(len(prompt), text)
            return prompt

        prompt = fit(make, case.length - room, case.spare(self.args.seed))
        text = texts[len(prompt)]
        facts = {"needle_token": self._place(prompt, text, records[0]), "keys": [key]}
        facts |= {"haystack": self.args.haystack, "form": self.args.form}
        return Prompt(prompt, [value], room, facts=facts, before=self._before(text))

    def score(self, case: Case, prompt: Prompt, output: str) -> dict[str, float]:
        """Exact match of the first number of five digits; ``contains``: whether the value occurs in the output."""
        (value,) = prompt.answers
        return {"score": float(VALUE.findall(output)[:1] == [value]), "contains": float(value in output)}

    def _track(self, text: str, key: str) -> list[int]:
        """The whole prompt: the text, and what is asked after it."""
        question = FORMS["var_completion" if self.args.form == "ruler" else "var"].question(key)
        if self.args.form == "second_turn":
            return self.tokens.second_turn(text, question)
        return self._encode(f"{text}\n{question}")


def draw_chains(rng: random.Random, split: str, haystack: ExactHaystack) -> Sequence[tuple[Sequence[str], str]]:
    """Keys and value of each chain; none of them stands in the haystack, nor in each other."""
    while True:
        keys = unique_keys(rng, CHAINS * HOPS, lambda rng: random_key(rng, split=split))
        values = unique_keys(rng, CHAINS, lambda rng: random_number(rng, DIGITS))
        apart = not any(a in b for a in keys for b in keys if a is not b)
        if apart and not any(text in haystack for text in (*keys, *values)):
            return [(keys[i * HOPS : (i + 1) * HOPS], value) for i, value in enumerate(values)]


def main(arguments: list[str] | None = None) -> int:
    """Ask the questions of `VariableSuite`; see `eval.live.runner.main`."""
    return runner.main(VariableSuite, arguments)


if __name__ == "__main__":
    sys.exit(main())
