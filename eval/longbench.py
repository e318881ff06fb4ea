"""LongBench from local copies: ``python -m eval.longbench --version 1 --data DIR --prompts DIR ...``.

Version 1 (Bai et al., 2024, arXiv 2308.14508): ``--data`` is the folder with ``narrativeqa.jsonl`` and so on
(``data.zip`` of the data set THUDM/LongBench), ``--prompts`` a copy of the repository THUDM/LongBench, of which
``dataset2prompt.json`` and ``dataset2maxlen.json`` are read. Tasks ending in ``_e`` are those of LongBench-E; their
score is given for the three classes of lengths too. Few-shot and code tasks are raw prompts, as in the official code.

Version 2 (Bai et al., 2025, arXiv 2412.15204): ``--data`` is the folder with ``data.json`` (THUDM/LongBench-v2),
``--prompts`` a copy of the repository, of which ``0shot.txt`` is read. The score is given by difficulty and length too.

What differs from the official code: answers are greedy (official in version 2: temperature .1); the chat template and
the room for the answer count as part of ``--lengths``; ROUGE-L of a long answer may recurse as deep as it must; an
empty answer is wrong (official in version 2: it is left out).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from eval.live import runner
from eval.live.counters import EvaluationError
from eval.live.suite import Case, Prompt
from eval.tasks import local_data, official_metrics
from eval.tasks.local_data import INTEGER, TEXT, TEXTS, LocalSuite, LocalTask, Rows, entry, fill, placed
from eval.tasks.official_metrics import qa_f1, qa_f1_zh, retrieval, rouge_l, rouge_l_zh
from eval.texts.haystacks import chosen

Metric = Callable[[str, str, Sequence[str]], float]

V2_TASK = "longbench_v2"
V2_ROOM = 128
CHOICES = "ABCD"
E_CLASSES = ((4000, "0-4k"), (8000, "4-8k"))
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
RAW = (*FIRST_LINE, "lcc", "repobench-p")
E_TASKS = (
    *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa", "samsum"),
    *("passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)


def _plain(metric: Callable[[str, str], float]) -> Metric:
    return lambda output, answer, _: metric(output, answer)


METRICS: dict[str, Metric] = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"), _plain(qa_f1)),
    "multifieldqa_zh": _plain(qa_f1_zh),
    "triviaqa": _plain(qa_f1),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), _plain(rouge_l)),
    **dict.fromkeys(("dureader", "vcsum"), _plain(rouge_l_zh)),
    **dict.fromkeys(("trec", "lsht"), official_metrics.classification),
    "passage_retrieval_en": lambda output, answer, _: retrieval(output, answer, "en"),
    "passage_retrieval_zh": lambda output, answer, _: retrieval(output, answer, "zh"),
    "passage_count": _plain(official_metrics.count),
    **dict.fromkeys(("lcc", "repobench-p"), _plain(official_metrics.code_similarity)),
}
V1_TASKS = (*METRICS, *(f"{task}_e" for task in E_TASKS))
V1_FIELDS = {"input": TEXT, "context": TEXT, "answers": TEXTS}
V2_FIELDS = dict.fromkeys(
    ("question", "context", "answer", "difficulty", "length", *(f"choice_{letter}" for letter in CHOICES)), TEXT
)


class LongBenchSuite(LocalSuite):
    """See the module."""

    command = "eval.longbench"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """See `Suite.add_arguments`."""
        parser.add_argument("--version", type=int, choices=(1, 2), required=True)
        super().add_arguments(parser)

    def read(self) -> dict[str, LocalTask]:
        """See `LocalSuite.read`."""
        return self._read_v1() if self.args.version == 1 else self._read_v2()

    def score(self, case: Case, prompt: Prompt, output: str) -> dict[str, float]:
        """The official score; of LongBench-E and version 2 again under the name of each class that the row is of."""
        row = self.row(case)
        if self.args.version == 2:
            right = float(choice(output) == row["answer"])
            return {"score": right, row["difficulty"]: right, row["length"]: right}
        task = base(case.task)
        if task in FIRST_LINE:
            output = output.lstrip("\n").split("\n")[0]
        best = max(METRICS[task](output, answer, row.get("all_classes") or []) for answer in prompt.answers)
        return {"score": best} if task == case.task else {"score": best, length_class(row["length"]): best}

    def _read_v1(self) -> dict[str, LocalTask]:
        args = self.args
        prompts, rooms = (_table(args.prompts, f"dataset2{name}.json") for name in ("prompt", "maxlen"))
        found = {}
        for task in chosen(args.tasks, V1_TASKS):
            template = entry(prompts, base(task), str, "dataset2prompt.json")
            room = entry(rooms, base(task), int, "dataset2maxlen.json")
            path = placed(args.data, "--data", f"{task}.jsonl", f"data/{task}.jsonl")
            text = partial(fill, template, where=f"prompt of {task}")
            # Models go on with the next dialogue; an answer ends with its line, but has one token at least.
            one_line = {"stop_token_ids": [self.tokens.encode("\n")[-1]], "min_tokens": 1}
            found[task] = LocalTask(
                Rows(path, fields_of(task), args.n),
                text,
                lambda row: row["answers"],
                room,
                chat=base(task) not in RAW,
                sampling=one_line if base(task) == "samsum" else {},
            )
        return found

    def _read_v2(self) -> dict[str, LocalTask]:
        args = self.args
        chosen(args.tasks, [V2_TASK])
        template = placed(args.prompts, "--prompts", "prompts/0shot.txt", "0shot.txt").read_text(encoding="utf-8")
        rows = local_data.read_array(placed(args.data, "--data", "data.json"), V2_FIELDS, args.n)
        return {V2_TASK: LocalTask(rows, partial(fill_v2, template), lambda row: [row["answer"]], V2_ROOM)}


def _table(folder: Path | None, name: str) -> dict[str, Any]:
    path = placed(folder, "--prompts", f"LongBench/config/{name}", f"config/{name}", name)
    table = local_data.read_json(path)
    if not isinstance(table, dict):
        raise EvaluationError(f"{path}: wanted a JSON object, got {local_data.shown(table)}")
    return table


def fields_of(task: str) -> local_data.Fields:
    """Return the fields that a row of version 1 must have."""
    fields = dict(V1_FIELDS)
    if METRICS[base(task)] is official_metrics.classification:
        fields["all_classes"] = TEXTS
    if task != base(task):
        fields["length"] = INTEGER
    return fields


def base(task: str) -> str:
    """The task of LongBench of which a task of LongBench-E has rows; others are their own."""
    return task if task in METRICS else task.removesuffix("_e")


def length_class(words: int) -> str:
    """The class of LongBench-E that a row of so many words is of."""
    return next((name for below, name in E_CLASSES if words < below), "8k+")


def fill_v2(template: str, row: Mapping[str, str]) -> str:
    """A prompt of version 2: the text, then the question, then the choices are put in, in this order."""
    names = {"DOC": "context", "Q": "question", **{f"C_{letter}": f"choice_{letter}" for letter in CHOICES}}
    for mark, name in names.items():
        template = template.replace(f"${mark}$", row[name].strip())
    return template


def choice(output: str) -> str | None:
    """The letter that an answer of version 2 settles on, None if it does not say so in the wanted form."""
    text = output.strip().replace("*", "")
    form = r"The correct answer is "
    found = re.search(form + r"\(([A-D])\)", text) or re.search(form + r"([A-D])", text)
    return found[1] if found else None


main = partial(runner.main, LongBenchSuite)

if __name__ == "__main__":
    sys.exit(main())
