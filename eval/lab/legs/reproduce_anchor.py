"""Legs of ``eval.lab.reproduce`` that show on a trained tiny model what AnchorAttention finds on a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.lab.legs.reproduce_leg import URL, URLS_BESIDE, Command, Leg, Server
from eval.lab.legs.reproduce_needles import (
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
# calibrated thresholds, chance has what dense decode needs to begin a number.
_FEW: Mapping[str, Any] = {"theta": 5.0, "crossover_tokens": 0}
_NO_TAIL: Mapping[str, Any] = {"dense_tail": 0}
# The layer of tiny-gqa that looks numbers up, as `eval.lab.blind` finds, and a threshold that keeps next to no stripes.
_LOOKUP_LAYER, _NEXT_TO_NONE = 1, 3.0
_CONTROLS = ("random_keys", "newest_stripes")
_QUARTERS = "0,25,50,75,100"


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
    return json.loads((Path(__file__).parents[3] / _THETAS).read_text())["theta"]


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


def _texts(label: str) -> tuple[Command, ...]:
    """What prose and numbers told before lose on the first server of a leg, as `_books` and `_prefill_perplexity`."""
    asked = ("--base-url", URL, "--length", "32768", "--concurrency", AT_ONCE)
    kinds = {"prefill-anchor-books": ("book", *BOOKS), "records-32k-anchor": ("records", "--windows", "200")}
    return tuple(
        Command("eval.ppl_prefill", f"ppl-{name}-{label}.jsonl", (*asked, "--kind", *kind))
        for name, kind in kinds.items()
    )


def _tail() -> tuple[Leg, ...]:
    """What the dense tail is worth for numbers that prefill alone is to find: without it, and beside random keys."""
    config, form, depths = {"theta": _calibrated()}, "prefilled", EVERY_TENTH
    return (
        _few_needles("anchor", {**config, **_NO_TAIL}, 10, depths, "prefilled-tail-0", "multikey", "0.6", form),
        _few_needles("random_keys", config, 10, depths, "prefilled-tail-128", "multikey", "0.6", form),
    )


def _fine() -> tuple[Leg, ...]:
    """Blocks of 16 queries, whose mean shows a question of twenty tokens: what stripes find without a tail, and chance.

    The control takes a loop over blocks in plain torch, and is asked less.
    """
    config, label, form, least = {"theta": 9.0, "block_size": 16, "step": 8}, "fine", "prefilled", "0.6"
    bare = {**config, **_NO_TAIL}
    return (
        *_controlled(label, config, (), texts=_texts(label)),
        _few_needles("anchor", bare, 10, EVERY_TENTH, f"{label}-prefilled-tail-0", "multikey", least, form),
        _few_needles("random_keys", bare, 2, EVERY_TENTH, f"{label}-prefilled-tail-0", "multikey", least, form),
    )


def _by_layer() -> Leg:
    """Needles with prefill methods by layer: Skip-Softmax in the first layers, AnchorAttention in the others."""
    skip = {"method": "skip_softmax", "threshold_scale_factor": 350.0}
    config = {"layers": {"0-1": skip, "2": {"theta": 8.375}, "3": {"theta": 7.875}}}
    return _few_needles("anchor", config, 20, _QUARTERS, "layers", least="0.3")


def _controlled(
    label: str,
    config: Mapping[str, Any],
    controls: Sequence[str],
    form: str = "chat",
    texts: tuple[Command, ...] = (),
) -> tuple[Leg, ...]:
    """Needles with a config, and with as many keys that each of the controls chooses.

    In the form *prefilled* all of an answer is prefill's. Else decode, which is dense, writes the rest of a number of
    which prefill found, or guessed, the beginning.
    """
    least = "0.6"
    needles = _few_needles("anchor", config, 100, _QUARTERS, label, least=least, form=form)
    return (
        replace(needles, commands=(*needles.commands, *texts)),
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
    _few_needles("anchor", _FEW, 40, _QUARTERS),
    *(
        _few_needles(control, {**_FEW, **_NO_TAIL}, count, EVERY_TENTH)
        for control, count in (("random_keys", 5), ("random_stripes", 10), ("newest_stripes", 10))
    ),
    *_controlled("lookup", _lookup(), _CONTROLS, texts=_texts("lookup")),
    *_controlled("prefilled", {"theta": _calibrated()}, ("random_keys",), "prefilled"),
    # A sliding window holds as many of the needles as of the keys, so that it is to have few.
    *_controlled("lookup-prefilled", _lookup(), _CONTROLS, "prefilled"),
    *_tail(),
    *_fine(),
    _by_layer(),
    _prefill_perplexity(),
    _stripes(),
    _books(),
)
