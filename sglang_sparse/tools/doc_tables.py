"""Markdown for README and the method pages: answers of a start, and each method's docstring and config."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from sglang_sparse.config.arguments import SPARSE_SELF
from sglang_sparse.hooks import deterministic, limits, model_limits, refusals
from sglang_sparse.hooks.model_kinds import MODEL_KINDS
from sglang_sparse.methods import registry
from sglang_sparse.methods.base import DecodeMethod
from sglang_sparse.methods.support import KINDS, FlagLimit
from sglang_sparse.tools.support_matrix import (
    FLAGS,
    UNCALIBRATED,
    UNRECTIFIED,
    Answer,
    Method,
    Place,
    answer,
    backends,
    broken_methods,
    flag_answer,
    flag_text,
    load,
    methods,
    page_sizes,
    partners,
    place_of,
    rule_partners,
    stages,
)

# Compute capabilities, and GPUs that have them.
GPUS = {
    (8, 0): "A100",
    (8, 6): "A10, RTX 3090",
    (8, 9): "L40S, RTX 4090",
    (9, 0): "H100, H200",
    (10, 0): "B200",
    (12, 0): "RTX 5090",
}
# All figures were measured on this one.
MEASURED = (9, 0)
# The features of SGLang in the first table.
GLANCE: Mapping[str, Mapping[str, object]] = {
    "tensor parallelism": {"tp_size": 2},
    "pipeline parallelism": {"pp_size": 2},
    "data parallelism": {"dp_size": 2},
    "data-parallel attention": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    "mixed chunks": {"enable_mixed_chunk": True},
    "lossless decoding": {"speculative_algorithm": SPARSE_SELF},
    "speculative decoding": {"speculative_algorithm": "EAGLE3"},
    "LoRA": {"enable_lora": True},
    "prefill-decode disaggregation": {"disaggregation_mode": "prefill"},
    "hierarchical cache": {"enable_hierarchical_cache": True},
}
# With scales and without.
FLOAT8 = tuple(flag for flag in FLAGS if "kv_cache_dtype" in flag)

# A refused feature, the methods that refuse it, and the reason.
Refused = tuple[str, Sequence[Method], str]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _decode_class(method: Method) -> type[DecodeMethod]:
    found = load(method)
    return found if issubclass(found, DecodeMethod) else DecodeMethod


def _words(found: Answer) -> str:
    if not found.served:
        return "no"
    if found.fields == UNCALIBRATED:
        return "calibrated"
    return f"with `{json.dumps(found.fields)}`" if found.fields else "yes"


def _what(method: Method) -> str:
    return (inspect.getdoc(inspect.getmodule(load(method))) or method.name).split("\n")[0].removesuffix(".")


def _phase(method: Method) -> str:
    if method.prefill:
        return "prefill"
    both = _decode_class(method).selects_in_model or method.name in registry.prefill_methods()
    return "prefill, decode" if both else "decode"


def _kinds(method: Method) -> str:
    found = {kind: answer(method, Place(kind, place_of(method).gpu)) for kind in KINDS}
    return ", ".join(
        kind + ("" if how.fields != UNCALIBRATED else " (calibrated)") for kind, how in found.items() if how.served
    )


def _machine(method: Method) -> str:
    if not place_of(method).gpu:
        return "CPU platform"
    return "GPU, CPU platform" if backends(method, gpu=False) else "GPU"


def properties() -> dict[str, Callable[[Method], str]]:
    """Return the questions about a method other than server flags, with functions that answer them."""
    return {
        "phase": _phase,
        "models": _kinds,
        "runs on": _machine,
        "together with": lambda m: ", ".join(partners(m)) or "none",
        "other layers by `layers` rules": lambda m: ", ".join(rule_partners(m)) or "none",
    }


def methods_table() -> str:
    """Return the table of methods: summary, models, machines and methods of the other phase."""
    asked = properties()
    rows = [[_what(m), f"`{m.flag}`", *(answer(m) for answer in asked.values())] for m in methods()]
    rows += [[why, f"`{m.flag}`", *[""] * len(asked)] for m, why in broken_methods().items()]
    return table(["method", "flag", *asked], rows)


def features() -> dict[str, Callable[[Method], str]]:
    """Return the flags of a server, with functions that answer whether a method supports them."""
    return {
        "`--page-size`": lambda m: ", ".join(map(str, page_sizes(m))),
        "`--attention-backend` on a GPU": lambda m: ", ".join(backends(m, gpu=True)) or "none",
        "`--attention-backend` on the CPU platform": lambda m: ", ".join(backends(m, gpu=False)) or "none",
        **{f"`{flag_text(flag)}`": lambda m, flag=flag: _words(flag_answer(m, flag)) for flag in FLAGS},
    }


def features_table() -> str:
    """Return the table of server flags that each method supports."""
    asked = methods()
    rows = [[name, *(found(method) for method in asked)] for name, found in features().items()]
    return table(["", *(method.label for method in asked)], rows)


def _float8(method: Method, place: Place) -> bool:
    return any(flag_answer(method, flag, place).served for flag in FLOAT8)


def on_gpu(method: Method, capability: tuple[int, int]) -> str:
    """Return "yes" or "no" for a method on a compute capability, with differences from the measured GPU."""
    place, best = (dataclasses.replace(place_of(method), gpu=gpu) for gpu in (capability, MEASURED))
    if not answer(method, place).served:
        return "no"
    how = dict.fromkeys(stages(method, place).values())
    words = ["yes", *([f"({' and '.join(how)} kernels)"] if how else [])]
    less = _float8(method, best) and not _float8(method, place)
    return " ".join(words) + (", no float8 KV" if less else "")


def gpus_table() -> str:
    """Return the table of methods by GPU, with the GPUs that were measured."""
    asked = methods()
    rows = [
        [
            f"{major}.{minor} ({names})",
            "measured" if (major, minor) == MEASURED else "compiled",
            *(on_gpu(method, (major, minor)) for method in asked),
        ]
        for (major, minor), names in GPUS.items()
    ]
    return table(["compute capability", "seen", *(method.label for method in asked)], rows)


def glance_table() -> str:
    """Return the table of marks for each method and the most wanted features."""
    asked = methods()
    rows = [[f"{kind} models", *(_mark(answer(m, Place(kind, place_of(m).gpu))) for m in asked)] for kind in KINDS]
    for capability, names in GPUS.items():
        rows.append([names, *("✓" if on_gpu(m, capability).startswith("yes") else "-" for m in asked)])
    for name, flag in GLANCE.items():
        rows.append([name, *(_mark(flag_answer(m, flag)) for m in asked)])
    return table(["", *(method.label for method in asked)], rows)


def _mark(found: Answer) -> str:
    if not found.served:
        return "-"
    return "(✓)" if found.fields else "✓"


def _of_tables() -> Iterator[Refused]:
    asked = methods()
    decoding = [method for method in asked if not method.prefill]
    plain = [method for method in asked if method.name not in ("robsa", "dsa")]
    # Some prefill methods come with the decode method of the same name.
    prefilling = [method for method in asked if method.prefill or method.name in registry.prefill_methods()]
    tables: tuple[tuple[str, Sequence[Method], Sequence[FlagLimit]], ...] = (
        ("", asked, limits.FLAG_LIMITS),
        *(("", [method], _decode_class(method).flag_limits) for method in asked),
        (
            "prefill-decode disaggregation with ",
            [method for method in asked if method.name != "dsa"],
            limits.DISAGGREGATION_LIMITS,
        ),
        ("", [method for method in decoding if not _decode_class(method).verifies], limits.DECODE_LIMITS),
        ("", [method for method in decoding if _decode_class(method).verifies], limits.VERIFY_LIMITS),
        ("deterministic inference with ", asked, deterministic.DETERMINISTIC_LIMITS),
        *(
            (f"{kind.name} with ", [one for one in plain if not (one.prefill and kind.no_prefill)], kind.limits)
            for kind in MODEL_KINDS
        ),
        ("", prefilling, limits.PREFILL_LIMITS),
        ("rectification with ", [method for method in asked if method.takes(UNRECTIFIED)], limits.RECTIFY_LIMITS),
        (
            "compact eviction with ",
            [method for method in asked if method.takes({"eviction": "compact"})],
            limits.COMPACT_LIMITS,
        ),
    )
    for beginning, refusing, table_ in tables:
        for limit in table_:
            yield beginning + limit.name, refusing, limit.reason
    for kind in model_limits.MODEL_LIMITS:
        yield kind.name, [method for method in asked if refusals.excludes(kind, _decode_class(method))], kind.reason


def _of_answers() -> Iterator[Refused]:
    known = {reason for *_, reason in _of_tables()}
    for method in methods():
        place = place_of(method)
        asked = {f"{kind} model": answer(method, Place(kind, place.gpu)) for kind in KINDS}
        asked |= {f"`{flag_text(flag)}`": flag_answer(method, flag) for flag in FLAGS}
        for name, found in asked.items():
            if found.reason is not None and not any(reason in found.reason for reason in known):
                # The part before the colon names the flag.
                yield name, [method], found.reason.partition(": ")[2] or found.reason


def _refusing() -> dict[tuple[str, tuple[str, ...]], list[str]]:
    """Return refused features by reason and names of the refusing methods."""
    refusing: dict[tuple[str, str], dict[str, None]] = {}
    for name, asked, reason in (*_of_answers(), *_of_tables()):
        refusing.setdefault((name, reason), {}).update(dict.fromkeys(method.label for method in asked))
    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (name, reason), names in refusing.items():
        merged.setdefault((reason, tuple(names)), []).append(name)
    return merged


def _everyone() -> tuple[str, ...]:
    return tuple(method.label for method in methods())


def refusals_table() -> str:
    """Return the table of refused features, with methods and reasons."""
    rows = [
        [", ".join(things), "all" if names == _everyone() else ", ".join(names), reason]
        for (reason, names), things in _refusing().items()
    ]
    return table(["refused", "by", "why"], rows)


def drafts_table() -> str:
    """Return the table of what lossless decoding excludes, with reasons."""
    merged: dict[str, list[str]] = {}
    for limit in limits.DRAFT_LIMITS:
        merged.setdefault(limit.reason, []).append(limit.name)
    return table(["refused with lossless decoding", "why"], [[", ".join(names), why] for why, names in merged.items()])


def refused_by(method: Method) -> list[list[str]]:
    """Return the features that a method refuses and some other method does not, with reasons."""
    return [
        [", ".join(things), reason]
        for (reason, names), things in _refusing().items()
        if method.label in names and names != _everyone()
    ]


def name_of(method: Method) -> str:
    """Return a method's name in the marks of its page; a prefill method may have a decode method's name."""
    twin = method.prefill and Method(method.name, False) in methods()
    return f"{method.name}-prefill" if twin else method.name


def about(method: Method) -> str:
    """Return the docstring of the method's module in Markdown: its computation, source and differences."""
    _, _, text = (inspect.getdoc(inspect.getmodule(load(method))) or "").partition("\n\n")
    return text.replace("``", "`")


def config(method: Method) -> str:
    """Return the fields of the method's config, their defaults and meanings."""
    fields = load(method).config_class.model_fields.items()
    rows = [[f"`{name}`", f"`{json.dumps(field.default)}`", field.description or ""] for name, field in fields]
    return table(["field", "default", "meaning"], rows)


def served(method: Method) -> str:
    """Return the table of models, machines, methods and flags that a method supports."""
    answers = {**properties(), **features()}
    return table(["", "served"], [[name, answer(method)] for name, answer in answers.items()])


def refused(method: Method) -> str:
    """Return the table of `refused_by`."""
    return table(["refused", "why"], refused_by(method))


PARTS: Mapping[str, Callable[[Method], str]] = {
    "about": about,
    "config": config,
    "served": served,
    "refused": refused,
}

BLOCK = re.compile(r"(<!-- check: ([\w-]+) -->\n)(.*?)(<!-- check end -->)", re.S)
BLOCKS: Mapping[str, Callable[[], str]] = {
    "glance": glance_table,
    "methods": methods_table,
    "features": features_table,
    "gpus": gpus_table,
    "refusals": refusals_table,
    "drafts": drafts_table,
}


def block(name: str) -> str:
    """Return the text between the marks of a name: one of ``BLOCKS``, or a part of a method's page.

    Raises:
        ValueError: the name is unknown.
    """
    if name in BLOCKS:
        return BLOCKS[name]()
    part, _, asked = name.partition("-")
    method = next((method for method in methods() if name_of(method) == asked), None)
    if part not in PARTS or method is None:
        parts = ", ".join(f"{part}-METHOD" for part in PARTS)
        raise ValueError(f"no table is called {name!r}; allowed: {', '.join(BLOCKS)}, {parts}")
    return PARTS[part](method)


def fill(document: str) -> str:
    """Return a document with regenerated tables.

    Raises:
        ValueError: a table has an unknown name.
    """
    return BLOCK.sub(lambda match: f"{match[1]}{block(match[2])}\n{match[4]}", document)
