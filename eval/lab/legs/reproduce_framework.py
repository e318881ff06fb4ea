"""Legs of ``eval.lab.reproduce`` that show on a trained tiny model what RocketKV and Skip-Softmax find, and chance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from eval.lab.legs.reproduce_leg import Command, Leg, Server
from eval.lab.legs.reproduce_needles import ALWAYS, AT_ONCE, BESIDE_DENSE, CONTROLS, EVERY_TENTH, FP8, GRAPHS, SCALES

BOTH_FORMS = ("chat", "second_turn")
# 2 % of a text of 8k are read, of an eighth of it that is kept.
_ROCKETKV: Mapping[str, Any] = {"prompt_budget": 1024, **ALWAYS}
_TOPK = {"topk": 40}
# Chosen by what the files say was left out: each phase skips at least half of the blocks.
SKIP_FACTORS = {"prefill": 350, "decode": 1000}
_SKIP_HALF = ("--least-sparsity", "0.5", "--least-skipped", "0.5")


@dataclass(frozen=True)
class Asked:
    """Questions of one file for each form.

    Attributes:
        suite: module of ``eval`` that asks them.
        tasks: its tasks.
        n: questions of each task and depth.
        depths: in percent.
        label: in the name of the file, where the suite has several.
        more: further arguments.
    """

    suite: str
    tasks: str
    n: int
    depths: str = "0,25,50,75,100"
    label: str = ""
    more: tuple[str, ...] = ()


def _needles(n: int, depths: str = "0,25,50,75,100", more: tuple[str, ...] = ()) -> Asked:
    """One needle in a book, and one of four: the tasks that gate."""
    return Asked("niah", "single,multikey", n, depths, more=more)


def _tasks(n: int, depths: str = "0,25,50,75,100") -> tuple[Asked, ...]:
    """A chain of two variables with words that the model knows, a pass key, and a text of needles alone.

    The last is to be reported and gates nothing.
    """
    return (
        Asked("variables", "variables_known", n, depths),
        Asked("infinitebench", "gen_passkey", n, depths),
        Asked("niah", "multikey_hard", n, depths, "hard"),
    )


def _leg(
    name: str,
    config: Mapping[str, Any],
    length: str,
    fields: Mapping[str, Any],
    asked: Sequence[Asked],
    forms: Sequence[str] = BOTH_FORMS,
    label: str = "",
    leg: str = "",
    backend: str = "fa3",
    more: tuple[str, ...] = (),
) -> Leg:
    """Questions to tiny-gqa, sparse against dense on one server.

    Args:
        name: of the method, or of a control.
        config: of the method.
        length: tokens of prompt and answer.
        fields: of its requests.
        asked: a file of each form for each.
        forms: of the questions.
        label: of a config that is not the method's usual one.
        leg: ends the leg's name.
        backend: of the dense attention.
        more: flags of the server.
    """
    flags = ("--sparse-method", name, "--sparse-config", json.dumps({"page_size": 16, **config}))
    flags += ("--page-size", "16", "--attention-backend", backend, *more, *GRAPHS)
    named, said = "-".join(filter(None, (name, label))), "-".join(_words(fields))
    commands = []
    for form, one in product(forms, asked):
        parts = (one.suite, "tiny-gqa", named, one.label, said, "" if form == "chat" else form)
        line = (*BESIDE_DENSE, "--tasks", one.tasks, "--n", str(one.n), "--depths", one.depths, "--lengths", length)
        line += ("--concurrency", AT_ONCE, "--custom-params", json.dumps(fields), "--form", form, *one.more)
        module = f"eval.{'lab.' * (one.suite == 'variables')}{one.suite}"
        commands.append(Command(module, f"{'-'.join(filter(None, parts))}.jsonl", line))
    environment = CONTROLS if name == "random_kept" else ()
    server = Server("eval/models/tiny-gqa", flags, environment)
    return Leg("-".join(filter(None, ("needles", named, leg))), tuple(commands), server)


def _words(fields: Mapping[str, Any]) -> list[str]:
    """Fields of a request as they stand in a file's name; of a mapping its own fields alone."""
    found = []
    for name, value in fields.items():
        found += _words(value) if isinstance(value, Mapping) else [f"{name}-{value}"]
    return found


_VARIABLES = Asked("variables", "variables_known", 40)


def _rocketkv(**more: Any) -> tuple[Leg, ...]:
    config, label = {**_ROCKETKV, **more}, str(more.get("eviction", ""))
    return (
        _leg("rocketkv", config, "8k", _TOPK, (_needles(100),), label=label),
        _leg("rocketkv", config, "8k", _TOPK, _tasks(40), label=label, leg="tasks"),
    )


_SKIP_FIELDS = {"threshold_scale_factor": SKIP_FACTORS}
FRAMEWORK: tuple[Leg, ...] = (
    *_rocketkv(),
    *_rocketkv(eviction="compact"),
    # What of a chain of variables the budgets lose: every step reads all that is kept, or more of the text is kept.
    _leg("rocketkv", _ROCKETKV, "8k", {"topk": 280}, (_VARIABLES,), ("chat",), leg="all-kept"),
    *(
        _leg("rocketkv", {**_ROCKETKV, "prompt_budget": budget}, "8k", _TOPK, (_VARIABLES,), ("chat",), label=label)
        for label, budget in (("quarter", 2048), ("half", 4096))
    ),
    # One needle in eleven stands at the end, which every prompt keeps.
    _leg("random_kept", _ROCKETKV, "8k", _TOPK, (_needles(10, EVERY_TENTH), *_tasks(10, EVERY_TENTH))),
    _leg("skip_softmax", {}, "32k", _SKIP_FIELDS, (_needles(100, more=_SKIP_HALF),), ("chat",)),
    _leg("skip_softmax", {}, "32k", _SKIP_FIELDS, _tasks(40), ("chat",), leg="tasks"),
    # Over float8 KV single answers differ by more than bfloat16's noise: these say whether any is worse for it.
    _leg(
        *("skip_softmax", {}, "32k", _SKIP_FIELDS, (_needles(300, more=_SKIP_HALF),), ("chat",), "fp8"),
        backend="flashinfer",
        more=(*FP8, "--quantization-param-path", SCALES),
    ),
)
