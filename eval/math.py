"""Mathematics with long answers: ``python -m eval.math --data gsm8k.jsonl aime.jsonl --base-url URL --out FILE.jsonl``.

Each file is a task, named after it: JSONL with the question as ``problem`` or ``question`` and the right answer as
``answer`` (where it ends in ``#### 18``, as in GSM8K, what stands there) or, without one, as ``solution`` with the
answer in a box, as in MATH; capitals in the names do not matter, so that the usual files of AIME and MATH-500 fit too.

Answers are sampled, ``--samples`` of each question, and judged by the package math-verify. The score is pass@1, its
mean over all samples. ``answered`` says how often there was an answer to judge at all; how long they were stands in the
summary. A sample's seed goes with the request; a server that heeds it (SGLang with --enable-deterministic-inference)
gives the same answer again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from eval.live import runner
from eval.live.client import positive
from eval.live.counters import EvaluationError
from eval.live.suite import Case, Prompt, Suite
from eval.tasks.local_data import Rows

INSTRUCTION = "Think step by step, and put the final answer within \\boxed{}."
QUESTIONS = ("problem", "question")
ANSWERS = ("answer", "solution")


class MathSuite(Suite):
    """See the module."""

    command = "eval.math"

    _rows: dict[str, Rows]

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """See `Suite.add_arguments`."""
        parser.add_argument("--data", type=Path, nargs="+", required=True, help="JSONL files")
        parser.add_argument("--n", type=positive, help="the first so many questions of each file; all by default")
        parser.add_argument("--samples", type=positive, default=1, help="answers to each question")
        parser.add_argument("--max-tokens", type=positive, default=16384, help="room for an answer")
        parser.add_argument("--temperature", type=float, default=0.6)
        parser.add_argument("--top-p", type=float, default=0.95)
        parser.add_argument("--no-chat", action="store_true", help="raw prompts")

    def cases(self) -> list[Case]:
        """See `Suite.cases`; the index counts samples, those of a question following each other."""
        args = self.args
        if args.temperature < 0 or not 0 < args.top_p <= 1:
            raise EvaluationError(
                f"--temperature {args.temperature} --top-p {args.top_p}: allowed are 0 or more, and above 0 up to 1"
            )
        if args.temperature == 0 and args.samples > 1:
            raise EvaluationError(f"--samples {args.samples} are all the same with --temperature 0")
        self._rows = {}
        for path in args.data:
            if path.stem in self._rows:
                raise EvaluationError(f"--data {path}: there is a task {path.stem} already, from another file")
            self._rows[path.stem] = Rows(path, {}, args.n, question_and_answer)
        return [Case(task, index=i) for task, rows in self._rows.items() for i in range(len(rows) * self.args.samples)]

    def build(self, case: Case) -> Prompt:
        """See `Suite.build`; ``facts`` say which question and which of its samples it is, both from 0."""
        args = self.args
        row, sample = divmod(case.index, args.samples)
        question, answer = question_and_answer(self._rows[case.task][row], case.id)
        sampling: dict[str, Any] = {"temperature": args.temperature}
        if args.temperature:
            sampling |= {"top_p": args.top_p, "seed": case.rng(args.seed).getrandbits(31)}
        prompt = self.tokens.prompt(f"{question}\n\n{INSTRUCTION}", not args.no_chat)
        return Prompt(prompt, [answer], args.max_tokens, sampling, {"question": row, "sample": sample})

    def score(self, case: Case, prompt: Prompt, output: str) -> dict[str, float]:
        """Whether the answer is right, and whether there is one."""
        right, found = judge(prompt.answers[0], output)
        return {"score": float(right), "answered": float(found)}


def question_and_answer(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Return the question and the right answer of a row; that of a solution is in a box.

    A row without such fields, or with a solution without a box, is refused in a message that begins with `where`.
    """
    fields = {name.lower(): value for name, value in row.items() if value is not None}
    question, answer = (_present(fields, names, row, where) for names in (QUESTIONS, ANSWERS))
    right = str(fields[answer]).strip()
    if "####" in right:
        right = right.rpartition("####")[2].strip()
    elif answer == "solution" and "\\boxed" not in right:
        raise EvaluationError(f"{where}: field 'solution' has no \\boxed answer")
    return str(fields[question]), right.strip("$")


def _present(fields: Mapping[str, Any], names: Sequence[str], row: Mapping[str, Any], where: str) -> str:
    """The first of the names that there is a field of."""
    name = next((name for name in names if name in fields), None)
    if name is None:
        wanted = " or ".join(map(repr, names))
        raise EvaluationError(f"{where}: field {wanted} is missing; there are {', '.join(row) or 'none'}")
    if not isinstance(fields[name], str | int | float) or not str(fields[name]).strip():
        raise EvaluationError(f"{where}: field {name!r} is {fields[name]!r}, wanted a text or a number")
    return name


def judge(answer: str, output: str) -> tuple[bool, bool]:
    """Whether the final answer of an output is right, and whether it has one, by math-verify.

    A box counts before anything else that looks like an answer. What takes longer than five seconds to understand is
    wrong; the package measures that by a signal, so that this must be called in the main thread. The right answer is
    LaTeX, or a solution with the answer in a box.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    forms = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    wanted = parse(answer if "\\boxed" in answer else f"\\boxed{{{answer}}}", forms)
    found = parse(output, forms)
    return verify(wanted, found), bool(found)


main = partial(runner.main, MathSuite)

if __name__ == "__main__":
    sys.exit(main())
