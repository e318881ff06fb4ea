"""LV-Eval from local copies: ``python -m eval.lveval --data DIR --prompts DIR --base-url URL --out FILE.jsonl``.

LV-Eval (Yuan et al., 2024, arXiv 2402.05136) asks the same questions of contexts of 16k, 32k, 64k, 128k and 256k words.
``--data`` is the folder of its 11 data sets, as ``hotpotwikiqa_mixup_16k.jsonl`` or ``hotpotwikiqa_mixup/...`` (the
data set Infinigence/LVEval, unpacked); ``--prompts`` a copy of the repository infinigence/LVEval: templates, room for
answers and the metric of each task are read from its ``config.py``, and the words that do not count as keywords from
its ``metrics.py``, without running either.

An answer without enough of the annotated keywords scores 0 (two fifths of them in Chinese, a fifth in English), any
other its F1 against the first right answer. What differs from the official code: the chat template and the room for
the answer count as part of ``--lengths``.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eval.live import runner
from eval.live.client import list_of
from eval.live.counters import EvaluationError
from eval.live.suite import Case, Prompt
from eval.live.tokens import Tokens
from eval.tasks import local_data
from eval.tasks.local_data import MAYBE_TEXT, TEXT, TEXTS, Rows, entry, fill, placed
from eval.tasks.local_suite import LocalSuite, LocalTask
from eval.tasks.official_metrics import normal_zh, overlap, qa_f1, qa_f1_zh, rouge_l, segments, words, words_zh

LEVELS = ("16k", "32k", "64k", "128k", "256k")
LEAST_KEYWORDS = {"en": 0.2, "zh": 0.4}
FIELDS = {"input": TEXT, "context": TEXT, "answers": TEXTS, "answer_keywords": MAYBE_TEXT}


@dataclass(frozen=True)
class Ignored:
    """Words that are no keywords, by language."""

    en: frozenset[str]
    zh: frozenset[str]


Metric = Callable[[str, str, "str | None", Ignored], float]


def f1_if_keywords(output: str, answer: str, keywords: str | None, ignored: Ignored) -> float:
    """F1 of English words, 0 where less than a fifth of the keywords occur; there may be none."""
    if keywords and not _recalled(words(output), words(keywords), ignored.en, LEAST_KEYWORDS["en"]):
        return 0.0
    return qa_f1(output, answer)


def f1_zh_if_keywords(output: str, answer: str, keywords: str | None, ignored: Ignored) -> float:
    """F1 of Chinese words, 0 where less than two fifths of the keywords occur; without any, those of the answer."""
    found = words_zh(output)
    if not _recalled(found, words_zh(keywords or answer), ignored.zh, LEAST_KEYWORDS["zh"]):
        return 0.0
    return overlap(found, words_zh(answer))


def rouge_l_zh_kept(output: str, answer: str, keywords: str | None, ignored: Ignored) -> float:
    """ROUGE-L of the Chinese words that are not ignored."""

    def kept(text: str) -> str:
        # The official code segments twice, the second time with spaces between the words.
        found = map(normal_zh, segments(" ".join(segments(text))))
        return " ".join(word for word in found if word not in ignored.zh)

    return rouge_l(kept(output), kept(answer))


def _recalled(found: Sequence[str], keywords: Sequence[str], ignored: Collection[str], least: float) -> bool:
    common = Counter(found) & Counter(keywords)
    same = sum(times for word, times in common.items() if word not in ignored)
    return not keywords or same / len(keywords) >= least


METRICS: dict[str, Metric] = {
    "qa_f1_score": lambda output, answer, *_: qa_f1(output, answer),
    "qa_f1_zh_score": lambda output, answer, *_: qa_f1_zh(output, answer),
    "qa_f1_score_with_gold_ans": f1_if_keywords,
    "qa_f1_zh_score_with_gold_ans": f1_zh_if_keywords,
    "rouge_zh_score_blacklist": rouge_l_zh_kept,
}


class LVEvalSuite(LocalSuite):
    """See the module."""

    command = "eval.lveval"

    def __init__(self, args: argparse.Namespace, tokens: Tokens) -> None:
        super().__init__(args, tokens)
        self._metrics: dict[str, Metric] = {}
        self._ignored = Ignored(frozenset(), frozenset())

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """See `Suite.add_arguments`."""
        super().add_arguments(parser)
        parser.add_argument("--levels", type=list_of(str), default=",".join(LEVELS), help="words of the contexts")

    def read(self) -> dict[str, LocalTask]:
        """See `LocalSuite.read`; the tasks are named after their files, such as "factrecall_en_16k"."""
        args = self.args
        levels = local_data.chosen(args.levels, LEVELS, "--levels")
        config = placed(args.prompts, "--prompts", "config.py")
        prompts, rooms = (local_data.literal(config, f"DATASET_{name}", dict) for name in ("PROMPT", "MAXGEN"))
        metrics = metric_names(config)
        self._ignored = read_ignored(placed(args.prompts, "--prompts", "metrics.py"))
        found = {}
        tasks = local_data.chosen(args.tasks, tuple(prompts))
        for task, level in ((task, level) for level in LEVELS if level in levels for task in tasks):
            name = f"{task}_{level}"
            path = placed(args.data, "--data", f"{name}.jsonl", f"{task}/{name}.jsonl")
            template = entry(prompts, task, str, f"{config}: DATASET_PROMPT")
            room = entry(rooms, task, int, f"{config}: DATASET_MAXGEN")
            text = partial(fill, template, where=f"prompt of {task}")
            found[name] = LocalTask(Rows(path, FIELDS, args.n), text, lambda row: row["answers"][:1], room)
            self._metrics[name] = known_metric(metrics.get(task), task, config)
        return found

    def score(self, case: Case, prompt: Prompt, output: str) -> dict[str, float]:
        """The metric that the official configuration names for the task, of the first right answer."""
        keywords = self.row(case).get("answer_keywords")
        return {"score": self._metrics[case.task](output, prompt.answers[0], keywords, self._ignored)}


def metric_names(config: Path) -> dict[str, str]:
    """The name of each task's metric in the official configuration.

    Raises:
        EvaluationError: see `eval.tasks.local_data.assigned`; or it is not a table of names.
    """
    table = local_data.assigned(config, "DATASET_METRIC")
    if not isinstance(table, ast.Dict):
        raise EvaluationError(f"{config}: DATASET_METRIC is not a table of names")
    pairs = zip(table.keys, table.values, strict=True)
    return {
        str(task.value): metric.id
        for task, metric in pairs
        if isinstance(task, ast.Constant) and isinstance(metric, ast.Name)
    }


def read_ignored(path: Path) -> Ignored:
    """The official lists of words that are no keywords.

    Raises:
        EvaluationError: see `eval.tasks.local_data.literal`.
    """
    lists = [local_data.literal(path, f"ABANDON_WORDS_{language}", list) for language in ("EN", "ZH")]
    return Ignored(*map(frozenset, lists))


def known_metric(name: str | None, task: str, config: Path) -> Metric:
    """The metric of a name.

    Raises:
        EvaluationError: it is none of ours; names file and task.
    """
    if name not in METRICS:
        raise EvaluationError(f"{config}: the metric of {task} is {name}, known are {', '.join(METRICS)}")
    return METRICS[name]


def main(arguments: list[str] | None = None) -> int:
    """Ask the questions of `LVEvalSuite`; see `eval.live.runner.main`."""
    return runner.main(LVEvalSuite, arguments)


if __name__ == "__main__":
    sys.exit(main())
