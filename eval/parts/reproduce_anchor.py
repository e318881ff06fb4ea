"""Legs of ``eval.reproduce`` that show on a trained tiny model what AnchorAttention finds on a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.parts.reproduce_leg import URL, URLS_BESIDE, Command, Leg, Server
from eval.parts.reproduce_needles import (
    AT_ONCE,
    BESIDE_DENSE,
    BOOK_WINDOW,
    BOOKS,
    CONTROLS,
    EVERY_TENTH,
    GRAPHS,
)

_THETAS = "eval/models/tiny-gqa/anchor.json"
# Of servers that stand beside others.
_SMALL_GRAPHS = ("--mem-fraction-static", "0.25", "--cuda-graph-max-bs-decode", AT_ONCE)
_BESIDE = ("--page-size", "16", "--attention-backend", "fa3", "--max-total-tokens", "262144", *_SMALL_GRAPHS)
# Seven eighths are left out at 32k, and nothing is dense for being early: where half of the keys are kept, as by the
# calibrated thresholds, a random selection may find a needle by luck.
_FEW: Mapping[str, Any] = {"theta": 5.0, "crossover_tokens": 0}
_NO_TAIL: Mapping[str, Any] = {"dense_tail": 0}
# Groups of 512 queries, whose window is a quarter, and next to no stripes: chance finds the first digit of a number by
# a guess, and dense decode the others, so that it is to have as few keys as may be.
_NEXT_TO_NONE = 3.0
_NARROW: Mapping[str, Any] = {"theta": _NEXT_TO_NONE, "crossover_tokens": 0, "step": 4}
# The layer of tiny-gqa that looks numbers up, as `eval.blind` finds.
_LOOKUP_LAYER = 1


def _anchor_needles(name: str, more: Sequence[str], count: int) -> Leg:
    """Needles with the thresholds that were calibrated for the tiny model, which leave out three fifths at 32k."""
    flags = ("--sparse-prefill-method", "anchor", "--sparse-prefill-config", _THETAS, *more)
    flags += ("--page-size", "16", "--attention-backend", "fa3", *GRAPHS)
    asked = (*BESIDE_DENSE, "--n", str(count), "--concurrency", AT_ONCE, "--lengths", "32k")
    # The text around a pass key is one sentence again and again, of which more is kept.
    suites = (("niah", "single,multikey", "0.6"), ("infinitebench", "gen_passkey", "0.5"))
    commands = tuple(
        Command(
            f"eval.{suite}",
            f"{suite}-tiny-gqa-{name}.jsonl",
            (*asked, "--tasks", tasks, "--least-sparsity", sparsity),
        )
        for suite, tasks, sparsity in suites
    )
    return Leg(f"needles-{name}", commands, Server("eval/models/tiny-gqa", flags))


def _anchor_batches(name: str, *more: str) -> Leg:
    """The same thresholds in batches of mixed lengths, with and without prefixes of prompts in the cache."""
    flags = ("--sparse-prefill-method", "anchor", "--sparse-prefill-config", _THETAS)
    flags += ("--page-size", "16", "--attention-backend", "fa3", *GRAPHS, *more)
    lengths = ",".join(f"{thousands}k" for thousands in range(10, 33, 2))
    asked = (*BESIDE_DENSE, "--tasks", "single,multikey", "--n", "4", "--concurrency", AT_ONCE, "--mixed")
    asked += ("--lengths", lengths)
    commands = tuple(
        Command("eval.niah", f"niah-mixed-tiny-gqa-{name}-{form}.jsonl", (*asked, "--form", form))
        for form in ("chat", "second_turn")
    )
    return Leg(f"needles-mixed-{name}", commands, Server("eval/models/tiny-gqa", flags))


def _beside(method: str, config: str | Mapping[str, Any]) -> Server:
    """A server of AnchorAttention or a control, with a config or the path of one, that stands beside others."""
    config = config if isinstance(config, str) else json.dumps(config)
    flags = ("--sparse-prefill-method", method, "--sparse-prefill-config", config, *_BESIDE)
    return Server("eval/models/tiny-gqa", flags, () if method == "anchor" else CONTROLS)


def _few_needles(
    method: str,
    config: Mapping[str, Any],
    count: int,
    depths: str,
    label: str = "few",
    tasks: str = "single,multikey",
    least: str = "0.875",
    form: str = "chat",
) -> Leg:
    """Needles where few keys are kept: of those of a prompt `least` is left out."""
    name = method if label == "few" and method != "anchor" else f"{method}-{label}"
    asked = (*BESIDE_DENSE, "--tasks", tasks, "--n", str(count), "--concurrency", AT_ONCE)
    asked += ("--lengths", "32k", "--depths", depths, "--least-sparsity", least, "--form", form)
    command = Command("eval.niah", f"niah-tiny-gqa-{label}-{method}.jsonl", asked)
    return Leg(f"needles-{name}", (command,), _beside(method, config))


def _prefill_perplexity() -> Leg:
    """What the end of a prompt finds of numbers told far before it, with the dense tail and without, and by chance."""
    servers = {"anchor": ("anchor", {}), "anchor-tail-0": ("anchor", _NO_TAIL)}
    servers["random_stripes-tail-0"] = ("random_stripes", _NO_TAIL)
    commands = []
    for (name, _), url in zip(servers.items(), (URL, *URLS_BESIDE), strict=True):
        asked = ("--base-url", url, "--kind", "records")
        # What the others lose is wanted in the file, and is no failure of the leg; fewer windows show it.
        asked += ("--windows", "200") if name == "anchor" else ("--windows", "50", "--bound", "1000")
        commands += [
            Command(
                "eval.ppl_prefill", f"ppl-records-{length // 1024}k-{name}.jsonl", (*asked, "--length", str(length))
            )
            for length in (8192, 16384, 32768)
        ]
    server, *beside = (_beside(method, {**_FEW, **more}) for method, more in servers.values())
    return Leg("ppl-prefill-anchor", tuple(commands), server, tuple(beside))


def _calibrated() -> list[float]:
    return json.loads((Path(__file__).parents[2] / _THETAS).read_text())["theta"]


def _lookup() -> Mapping[str, Any]:
    """As calibrated and served, but with half as long groups, and next to no stripes where numbers are looked up.

    So chance has few keys in the layer that counts for a needle, and prose has its keys in the others.
    """
    theta = _calibrated()
    theta[_LOOKUP_LAYER] = _NEXT_TO_NONE
    return {"theta": theta, "step": 8}


def _stripes() -> Leg:
    """What of the numbers told the calibrated thresholds find by stripes alone, and as many stripes by chance."""
    names, commands = ("anchor", "random_stripes"), []
    config = {"theta": _calibrated(), **_NO_TAIL}
    for name, url in zip(names, (URL, *URLS_BESIDE), strict=False):
        asked = ("--base-url", url, "--kind", "records", "--windows", "50", "--bound", "1000", "--length", "32768")
        commands.append(Command("eval.ppl_prefill", f"ppl-records-32k-{name}-calibrated-tail-0.jsonl", asked))
    server, other = (_beside(name, config) for name in names)
    return Leg("ppl-prefill-anchor-stripes", tuple(commands), server, (other,))


def _books() -> Leg:
    """What prose loses as it is served, and where prompts are sparse from the first token: as calibrated, and most."""
    configs = (_THETAS, {"theta": _calibrated(), "crossover_tokens": 0})
    server, other = (_beside("anchor", config) for config in configs)
    few = ("--custom-params", json.dumps({"theta": _FEW["theta"]}))
    # Below the crossover, what is lost is wanted in the file and is no failure of the leg.
    short = (URLS_BESIDE[0], BOOK_WINDOW)
    settings = {"": (URL, "32768"), "-8k": short, "-8k-few": (*short, *few)}
    commands = []
    for name, (url, length, *more) in settings.items():
        asked = ("--base-url", url, "--kind", "book", "--length", length, "--concurrency", AT_ONCE, *BOOKS, *more)
        bound = ("--bound", "1000") if name else ()
        commands.append(Command("eval.ppl_prefill", f"ppl-prefill-anchor-books{name}.jsonl", (*asked, *bound)))
    return Leg("ppl-prefill-anchor-books", tuple(commands), server, (other,))


def _judged(
    label: str, config: Mapping[str, Any], bound: str, least: str, controls: Mapping[str, str]
) -> tuple[Leg, ...]:
    """Needles, prose and numbers told before with one config, and needles of as many keys that a control chooses.

    Args:
        label: of the config.
        config: of AnchorAttention.
        bound: what prose may lose, as a share; of a config that loses more the file is wanted all the same.
        least: of the keys of a prompt, what is left out.
        controls: and the tasks that each of them is asked.
    """
    needles = _few_needles("anchor", config, 100, "0,25,50,75,100", label, least=least)
    asked = ("--base-url", URL, "--length", "32768", "--concurrency", AT_ONCE)
    book = (*asked, "--bound", bound, "--kind", "book", *BOOKS)
    records = (*asked, "--kind", "records", "--windows", "200")
    texts = (
        Command("eval.ppl_prefill", f"ppl-prefill-anchor-books-{label}.jsonl", book),
        Command("eval.ppl_prefill", f"ppl-records-32k-anchor-{label}.jsonl", records),
    )
    return (
        replace(needles, commands=(*needles.commands, *texts)),
        *(
            _few_needles(control, {**config, **_NO_TAIL}, 10, EVERY_TENTH, label, tasks, least)
            for control, tasks in controls.items()
        ),
    )


def _prefilled(label: str, config: Mapping[str, Any], controls: Sequence[str]) -> tuple[Leg, ...]:
    """Numbers that prefill alone finds, and with as many keys that each of the controls chooses.

    Dense decode writes the rest of a number of which prefill found, or guessed, the beginning.
    """
    form, least = "prefilled", "0.6"
    return (
        _few_needles("anchor", config, 100, "0,25,50,75,100", label, least=least, form=form),
        *(
            _few_needles(control, {**config, **_NO_TAIL}, 10, EVERY_TENTH, label, "multikey", least, form)
            for control in controls
        ),
    )


ANCHOR: tuple[Leg, ...] = (
    _anchor_needles("anchor", (), 100),
    _anchor_needles("anchor-resa", ("--sparse-method", "resa"), 20),
    _anchor_batches("anchor"),
    _anchor_batches("anchor-no-graphs", "--disable-cuda-graph"),
    # The dense tail is a part of the selection that is judged: the controls have none.
    _few_needles("anchor", _FEW, 40, "0,25,50,75,100"),
    *(
        _few_needles(control, {**_FEW, **_NO_TAIL}, count, EVERY_TENTH)
        for control, count in (("random_keys", 5), ("random_stripes", 10), ("newest_stripes", 10))
    ),
    *_judged("narrow", _NARROW, "1000", "0.875", {"random_keys": "single,multikey"}),
    *_judged("lookup", _lookup(), "0.005", "0.6", {"random_keys": "multikey", "newest_stripes": "multikey"}),
    *_prefilled("prefilled", {"theta": _calibrated()}, ("random_keys",)),
    # A window of two fifths of the keys holds two fifths of the needles: a sliding window is to have few.
    *_prefilled("lookup-prefilled", _lookup(), ("random_keys", "newest_stripes")),
    _prefill_perplexity(),
    _stripes(),
    _books(),
)
