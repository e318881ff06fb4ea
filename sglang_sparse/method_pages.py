"""The parts of a method's page in ``docs/`` that are made: from its docstring, its config and what a start answers."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping

from sglang_sparse.tools import doc_tables
from sglang_sparse.tools.support_matrix import Method, load, methods


def name_of(method: Method) -> str:
    """What a method is called where its page asks for it; a prefill method may have a decode method's name."""
    twin = method.prefill and Method(method.name, False) in methods()
    return f"{method.name}-prefill" if twin else method.name


def about(method: Method) -> str:
    """Return what the method computes, its source and its differences: the docstring of its module, in Markdown."""
    _, _, text = (inspect.getdoc(inspect.getmodule(load(method))) or "").partition("\n\n")
    return text.replace("``", "`")


def config(method: Method) -> str:
    """Return the fields of the method's config, their defaults and meanings."""
    fields = load(method).config_class.model_fields.items()
    rows = [[f"`{name}`", f"`{json.dumps(field.default)}`", field.description or ""] for name, field in fields]
    return doc_tables.table(["field", "default", "meaning"], rows)


def served(method: Method) -> str:
    """Return what the method goes with."""
    answers = {**doc_tables.properties(), **doc_tables.features()}
    return doc_tables.table(["", "served"], [[name, answer(method)] for name, answer in answers.items()])


def refused(method: Method) -> str:
    """Return what is refused with the method beside what is refused with all, and why."""
    return doc_tables.table(["refused", "why"], doc_tables.refused_by(method))


PARTS: Mapping[str, Callable[[Method], str]] = {
    "about": about,
    "config": config,
    "served": served,
    "refused": refused,
}
