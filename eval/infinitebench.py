"""Tasks in the manner of InfiniteBench (Zhang et al., 2024, arXiv 2402.13718), and itself from a local copy.

``python -m eval.infinitebench --lengths 16k,64k --base-url URL --out FILE.jsonl`` makes its questions by the
definitions of the benchmark's synthetic tasks, see `eval.tasks.infinitebench_tasks`, and scores them by its rules.
These tasks are called gen_passkey, gen_number_string, gen_kv_retrieval, gen_code_run, gen_math_find and gen_math_calc:
their scores are not those of the data set. With ``--form second_turn`` a first turn of the chat has the text, which the
server answers without the question, and the second one asks.

With ``--data`` the questions are those of the benchmark: the folder with ``passkey.jsonl``, ``longbook_qa_eng.jsonl``
and so on (the data set xinrongzhang2022/InfiniteBench). ``--prompts`` is then a copy of the repository
OpenBMB/InfiniteBench, of whose ``src/prompt.py`` the templates of ``--templates`` are read. Those of yarn_mistral are
raw prompts, as the benchmark asks open models, with its room for answers; all others go through the chat template,
with room for more. What differs from the official code: the room for the answer counts as part of ``--lengths``; with
gpt4 math_calc has no system message and no worked example; decimals given where math_find wants an integer are judged
by their value, where the official code stops.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from eval.live import runner
from eval.live.client import list_of, percent
from eval.live.counters import EvaluationError
from eval.live.suite import Case, Prompt
from eval.live.tokens import fit
from eval.tasks import local_data
from eval.tasks.infinitebench_tasks import TASKS
from eval.tasks.local_data import TEXT, Kind, LocalSuite, LocalTask, Rows, entry, fill, placed
from eval.tasks.official_metrics import LETTERS, SCORES, leading_share_after_first
from eval.texts.haystacks import chosen

ROOMS = {
    "passkey": 6,
    "number_string": 12,
    "kv_retrieval": 50,
    "longbook_sum_eng": 1200,
    "longbook_choice_eng": 40,
    "longbook_qa_eng": 40,
    "longbook_qa_chn": 40,
    "longdialogue_qa_eng": 40,
    "math_find": 3,
    "math_calc": 30000,
    "code_run": 5,
    "code_debug": 5,
}
CHAT_ROOM = 1024
RAW_TEMPLATES = "yarn_mistral"
LENGTHS = (4096, 16384)
N = 5
WITH_OPTIONS = ("code_debug", "longbook_choice_eng")
OPTIONS = Kind("a list of four texts", lambda value: isinstance(value, list) and [type(v) for v in value] == [str] * 4)
ANSWER = Kind("a text, a number or a list of them", lambda value: bool(flat(value)))


class InfiniteBenchSuite(LocalSuite):
    """See the module."""

    command = "eval.infinitebench"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """See `Suite.add_arguments`."""
        super().add_arguments(parser)
        parser.add_argument("--templates", default=RAW_TEMPLATES, help="such as yarn_mistral or gpt4, of --prompts")
        parser.add_argument(
            "--depths",
            type=list_of(percent, some=True),
            default="0,25,50,75,100",
            help="of gen_ tasks that have any, in percent",
        )
        parser.add_argument("--form", default="chat", choices=("chat", "second_turn"), help="of gen_ tasks")

    def read(self) -> dict[str, LocalTask]:
        """See `LocalSuite.read`."""
        args, name = self.args, f"{self.args.templates}_templates"
        wanted = [task for task in self._tasks() if task in SCORES]
        if not wanted:
            return {}
        prompts = placed(args.prompts, "--prompts", "src/prompt.py", "prompt.py")
        templates = local_data.literal(prompts, name, dict)
        raw, found = args.templates == RAW_TEMPLATES, {}
        for task in wanted:
            template = entry(templates, task, str, f"{prompts}: {name}")
            fields = {"context": TEXT, "input": TEXT, "answer": ANSWER}
            fields |= {"options": OPTIONS} if task in WITH_OPTIONS else {}
            rows = Rows(placed(args.data, "--data", f"{task}.jsonl"), fields, args.n, partial(answers, task))
            room = ROOMS[task] if raw else max(ROOMS[task], CHAT_ROOM)
            found[task] = LocalTask(rows, partial(text, template, task), partial(answers, task), room, not raw)
        return found

    def cases(self) -> list[Case]:
        """See `Suite.cases`; the generated ones come first, as many of each task and length."""
        if self.args.form == "second_turn":
            self._require_turns()
        local = super().cases()
        places = [depth / 100 for depth in dict.fromkeys(self.args.depths)]
        n = self.args.n or N
        made = []
        for length in sorted(set(self.args.lengths or LENGTHS)):
            for name in (name for name in self._tasks() if name in TASKS):
                pairs = [(place, i) for place in places for i in range(n)]
                placeless = [(None, i) for i in range(len(pairs))]
                made += [Case(name, length, d, i) for d, i in (pairs if TASKS[name].has_place else placeless)]
        return made + local

    def build(self, case: Case) -> Prompt:
        """See `Suite.build`."""
        if case.task not in TASKS:
            return super().build(case)
        assert case.length is not None
        task = TASKS[case.task]
        room = self.args.max_tokens or (task.room if isinstance(task.room, int) else int(task.room * case.length))
        found, later = {}, self.args.form == "second_turn"

        def make(filling: int) -> list[int]:
            made = task.make(case.rng(self.args.seed), filling, case.depth or 0.0, case.index, self.tokens)
            content = f"{task.intro}\n\n{made.context}"
            if later:
                prompt = self.tokens.second_turn(content, made.question)
            else:
                prompt = self.tokens.prompt(f"{content}\n\n{made.question}", not self.args.no_chat)
            found[tuple(prompt)] = made, self.tokens.first_turn(content) if later else []
            return prompt

        prompt = fit(make, case.length - room, case.spare(self.args.seed))
        made, before = found[tuple(prompt)]
        return Prompt(prompt, made.answers, room, facts=made.facts, before=before)

    def score(self, case: Case, prompt: Prompt, output: str) -> dict[str, float]:
        """The official score of the task, or of that after which a generated task is made."""
        task = case.task.removeprefix("gen_")
        late = task == case.task == "math_calc" and self.args.templates == "gpt4"
        return {"score": (leading_share_after_first if late else SCORES[task])(prompt.answers, output)}

    def _require_turns(self) -> None:
        if self.args.no_chat:
            raise EvaluationError("--form second_turn has turns of a chat; allowed without --no-chat")
        if asked := [task for task in self._tasks() if task not in TASKS]:
            raise EvaluationError(
                f"--form second_turn: --tasks {','.join(asked)} are not generated; allowed: gen_ tasks"
            )

    def _tasks(self) -> list[str]:
        """The tasks that were asked for: by default those of the benchmark where it is at hand, or the generated."""
        default = list(TASKS) if self.args.data is None else list(SCORES)
        return chosen(self.args.tasks or default, [*TASKS, *SCORES])


def flat(value: Any) -> list[str]:
    """Right answers, which the data set holds as a text, a number, a list or a list in a list, as texts."""
    if isinstance(value, list):
        return [text for part in value for text in flat(part)]
    return [str(value)] if isinstance(value, str | int | float) else []


def answers(task: str, row: Mapping[str, Any], where: str = "") -> list[str]:
    """The right answers of a row; of an option, which must be one of the row's, its text and its letter."""
    right = flat(row["answer"])
    if task not in WITH_OPTIONS or (len(right) == 2 and right[1] in LETTERS):
        return right
    if right[0] not in row["options"]:
        raise EvaluationError(f"{where or task}: the answer {right[0]!r} is none of the options {row['options']}")
    return [right[0], LETTERS[row["options"].index(right[0])]]


def text(template: str, task: str, row: Mapping[str, Any]) -> str:
    """The prompt of a row; refused if a field of the template is unknown, or cannot be found in the question."""
    values = {"context": row["context"], "input": row["input"], "question": row["input"]}
    values |= {f"OPTION_{letter}": option for letter, option in zip(LETTERS, row.get("options") or [], strict=False)}
    if task == "code_run":
        call = _found(r"(func_[0-9]+)\(-?[0-9]+\)", task, row["input"])
        values |= {"func": call[1], "func_call": call[0]}
    if task == "math_find":
        # "The largest number of the list is" becomes a question that stands before the list.
        asked = _found(r"The .+ of", task, row["input"])[0].lower().removesuffix(" of")
        values["prefix"] = f"What is {asked} in the following list?"
    return fill(template, values, f"template of {task}")


def _found(pattern: str, task: str, question: str) -> re.Match[str]:
    found = re.search(pattern, question)
    if found is None:
        raise EvaluationError(f"{task}: the question {question!r} has nothing like {pattern}")
    return found


main = partial(runner.main, InfiniteBenchSuite)

if __name__ == "__main__":
    sys.exit(main())
