"""What outside judges write, as rows of this project's files, and whether a judge's scores agree with ours.

Layouts: the samples of lm-eval 0.4.13 with ``--log_samples``, and the result of SGLang's ``benchmark.serving``
with ``--output-details --cache-report``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.live.counters import EvaluationError
from eval.scores.stats import Interval, mean_interval
from eval.scores.summary import score

WITHIN = 0.02
GSM8K_SCORES = {"strict-match": "score", "flexible-extract": "flexible"}
STATISTICS = ("mean", "median", "p99")
TIMES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e_latency": "seconds"}

Row = Mapping[str, Any]
Sizes = Callable[[Sequence[str]], list[int]]


def read_samples(folder: Path, task: str) -> list[dict[str, Any]]:
    """The samples of a task that lm-eval wrote somewhere under a folder; refuses a folder without any."""
    found = sorted(folder.rglob(f"samples_{task}_*.jsonl"))
    samples = [json.loads(line) for path in found for line in path.read_text(encoding="utf-8").split("\n") if line]
    if not samples:
        raise EvaluationError(f"lm-eval left no samples of {task} under {folder}")
    return samples


def prompt_of(sample: Row) -> str:
    """The text that lm-eval sent."""
    return sample["arguments"]["gen_args_0"]["arg_0"]


def ruler_items(task: str, length: int, samples: Sequence[Row], sizes: Sizes) -> list[dict[str, Any]]:
    """Item rows of a RULER task; the score is lm-eval's: the share of the references that the output contains.

    Raises:
        EvaluationError: a sample was made without references, or is of another length.
    """
    empty = sum(not sample["doc"]["outputs"] for sample in samples)
    if empty:
        raise EvaluationError(f"{task}: {empty} of {len(samples)} samples of {length} tokens have nothing to find")
    if any(sample["doc"]["max_length"] != length or str(length) not in sample for sample in samples):
        raise EvaluationError(f"{task}: lm-eval's samples are not those of {length} tokens")
    answers = [list(sample["doc"]["outputs"]) for sample in samples]
    # The other lengths stand there as -1, which means "not run".
    scores = [{"score": float(sample[str(length)])} for sample in samples]
    return _items(task, length, samples, answers, scores, sizes)


def gsm8k_items(samples: Sequence[Row], sizes: Sizes) -> list[dict[str, Any]]:
    """Item rows of GSM8K: ``score`` is lm-eval's strict match (``#### number``), ``flexible`` its match of the last
    number.
    """
    questions: dict[int, dict[str, Row]] = {}
    for sample in samples:
        questions.setdefault(sample["doc_id"], {})[sample["filter"]] = sample
    first = [next(iter(found.values())) for _, found in sorted(questions.items())]
    answers = [[sample["target"].split("####")[-1].strip()] for sample in first]
    scores = [
        {ours: float(found[theirs]["exact_match"]) for theirs, ours in GSM8K_SCORES.items()}
        for _, found in sorted(questions.items())
    ]
    return _items("gsm8k", None, first, answers, scores, sizes)


def _items(
    task: str,
    length: int | None,
    samples: Sequence[Row],
    answers: Sequence[list[str]],
    scores: Sequence[dict[str, float]],
    sizes: Sizes,
) -> list[dict[str, Any]]:
    prompts, outputs = [prompt_of(sample) for sample in samples], [sample["resps"][0][0] for sample in samples]
    asked, said = sizes(prompts), sizes(outputs)
    rows = []
    for i, sample in enumerate(samples):
        index = sample["doc_id"]
        name = "/".join(str(part) for part in (task, length, index) if part is not None)
        row = {"arm": "base", "id": name, "task": task, "length": length, "depth": None, "index": index}
        row |= {"prompt_tokens": asked[i], "prompt_sha": hashlib.sha256(prompts[i].encode()).hexdigest()[:16]}
        row |= {"answers": answers[i], "output": outputs[i], "completion_tokens": said[i], "scores": scores[i]}
        rows.append(row)
    return rows


def serving_rows(result: Row) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Item rows and the summary of a run of SGLang's benchmark client; seconds, and tokens a second.

    Returns:
        For each request its time to the first token, its mean time for each further one, and its tokens; where it
        failed or no text of it came, why. Of the run what the client computed: mean, median and 99th percentile of the
        time to the first token (ttft), per further token of a request (tpot), between two tokens (itl) and of the whole
        request (seconds), and what the server worked off.
    """
    length = result["random_input_len"]
    items = []
    names = ("input_lens", "output_lens", "ttfts", "itls", "errors")
    for i, (asked, said, ttft, gaps, error) in enumerate(zip(*(result[name] for name in names), strict=True)):
        row = {"arm": "base", "id": f"serving/{length}/{i}", "task": "serving", "length": length, "index": i}
        row |= {"prompt_tokens": asked, "completion_tokens": said}
        # The client leaves 0 where no text came, as when only special tokens were sampled.
        if error or not ttft:
            row["failed"] = error.strip().splitlines()[-1] if error else "no text came"
        else:
            row |= {"ttft": ttft, "tpot": fmean(gaps) if gaps else None}
        items.append(row)
    summary = {"task": "serving", "length": length, "arm": "base", "n": len(items)}
    summary |= {"failed": sum("failed" in row for row in items), "completion_length": result["random_output_len"]}
    summary |= {
        f"{ours}_{statistic}": result[f"{statistic}_{theirs}_ms"] / 1000
        for theirs, ours in TIMES.items()
        for statistic in STATISTICS
    }
    for name in ("duration", "request_throughput", "input_throughput", "output_throughput", "concurrency"):
        summary[name] = result[name]
    summary["cached_tokens"] = result["cache_report"]["total_cached_tokens"]
    return items, summary


def difference_interval(mine: Sequence[float], theirs: Sequence[float]) -> Interval:
    """95 % interval of the difference of two means of scores between 0 and 1, of different questions.

    Newcombe's: the distances of the two means from the ends of their Wilson intervals, added as squares (Newcombe 1998,
    method 10).
    """
    a, b = fmean(mine), fmean(theirs)
    (a_low, a_high), (b_low, b_high) = mean_interval(mine), mean_interval(theirs)
    return a - b - math.hypot(a - a_low, b_high - b), a - b + math.hypot(a_high - a, b - b_low)


def agreement(ours: Sequence[Row], theirs: Sequence[Row]) -> list[dict[str, Any]]:
    """Compare our RULER scores with the judge's, task by task and length by length.

    The questions differ (each draws its own), so the comparison is not paired. lm-eval's "ruler_vt" is our "vt".

    Args:
        ours: rows of a file of ``eval.ruler``, of which the items of the server under judgement count.
        theirs: rows of a file of ``eval.judges ruler``.

    Returns:
        For each task and length in both: questions, mean tokens of their prompts (lm-eval fills a length in large steps
        and may stay far below it) and mean scores; the difference in points (hundredths, ours less the judge's) with
        its 95 % interval; and ``agrees``: whether it is at most two.

    Raises:
        EvaluationError: no task and length is in both.
    """
    mine, judged = _groups(ours), _groups(theirs)
    both = [key for key in mine if key in judged]
    if not both:
        raise EvaluationError(f"nothing to compare: ours has {_named(mine)}, theirs {_named(judged)}")
    rows = []
    for key in both:
        pair = {"ours": mine[key], "theirs": judged[key]}
        scores = {name: [score(item) for item in items] for name, items in pair.items()}
        row: dict[str, Any] = {"task": key[0], "length": key[1]}
        for name, items in pair.items():
            row |= {f"n_{name}": len(items), name: fmean(scores[name])}
            row[f"tokens_{name}"] = fmean(item.get("prompt_tokens", 0) for item in items)
        low, high = difference_interval(scores["ours"], scores["theirs"])
        difference = row["ours"] - row["theirs"]
        row |= {"points": 100 * difference, "points_interval": (100 * low, 100 * high)}
        rows.append(row | {"agrees": abs(difference) <= WITHIN + 1e-9})
    return rows


def unmatched(ours: Sequence[Row], theirs: Sequence[Row]) -> list[str]:
    """Tasks with their lengths that only one of the two has."""
    alone = _groups(ours).keys() ^ _groups(theirs).keys()
    return [f"{task} {length}" for task, length in sorted(alone, key=str)]


def _groups(rows: Sequence[Row]) -> dict[tuple[str, int | None], list[Row]]:
    found: dict[tuple[str, int | None], list[Row]] = {}
    # A question that failed and was asked again by a later run counts once.
    for row in {row["id"]: row for row in rows if row["kind"] == "item" and row["arm"] == "base"}.values():
        found.setdefault((row["task"].removeprefix("ruler_"), row["length"]), []).append(row)
    return found


def _named(groups: Mapping[tuple[str, int | None], Any]) -> str:
    return ", ".join(f"{task} {length}" for task, length in groups) or "no items"
