"""Ask, with a start's checks, which flags, models and other methods each method can be combined with.

This module has only the questions; the answers are those of ``hooks/judge.py``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from sglang_sparse.config import arguments
from sglang_sparse.config.arguments import SPARSE_SELF
from sglang_sparse.config.machine import Gpu
from sglang_sparse.config.settings import Settings
from sglang_sparse.errors import SparseArgumentError
from sglang_sparse.hooks import dsa_flags, judge
from sglang_sparse.hooks.backends import DENSE_BACKENDS, dense_backends
from sglang_sparse.hooks.server_args import SparseServerArgs, resolve
from sglang_sparse.methods import registry
from sglang_sparse.methods.support import KINDS

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import Arguments
    from sglang_sparse.methods.base import DecodeMethod
    from sglang_sparse.methods.prefill import PrefillMethod

# Flags of a server that some methods support; the others are in ``limits.FLAG_LIMITS``.
FLAGS: tuple[Mapping[str, object], ...] = (
    {"tp_size": 2},
    {"disable_radix_cache": True},
    {"chunked_prefill_size": -1},
    {"disable_cuda_graph": True},
    {"disable_overlap_schedule": True},
    {"kv_cache_dtype": "fp8_e4m3"},
    # No prefill method takes it without scales.
    {"kv_cache_dtype": "fp8_e4m3", "quantization_param_path": "scales.json"},
    {"enable_mixed_chunk": True},
    {"enable_return_hidden_states": True},
    {"kv_events_config": "{}"},
    {"enable_lora": True},
    {"speculative_algorithm": SPARSE_SELF},
    {"speculative_algorithm": "EAGLE3"},
    {"enable_deterministic_inference": True},
)
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
# Fields that may make a method fit.
UNCALIBRATED = {"allow_uncalibrated": True}
UNRECTIFIED = {"rectify_interval": 0}


@dataclass(frozen=True)
class Method:
    """A method as the command line names it.

    Attributes:
        name: its name in the registry.
        prefill: whether it is a prefill method.
    """

    name: str
    prefill: bool

    @property
    def option(self) -> str:
        """Field of ``ServerArgs`` that asks for it."""
        return "sparse_prefill_method" if self.prefill else "sparse_method"

    @property
    def flag(self) -> str:
        """The flag and value that ask for it."""
        return flag_text({self.option: self.name})

    @property
    def label(self) -> str:
        """Its name in tables, with a suffix for a prefill method that shares a decode method's name."""
        return f"{self.name} (prefill)" if self.prefill and self.name in registry.decode_methods() else self.name

    def takes(self, fields: Mapping[str, object]) -> bool:
        """Whether its config has these fields."""
        return set(fields) <= set(load(self).config_class.model_fields)


@dataclass(frozen=True)
class Place:
    """The model and machine for which a method is asked about flags.

    Attributes:
        kind: kind of attention, see ``KINDS``.
        gpu: whether the machine has a GPU, or its compute capability.
        fields: fields of the method's config.
    """

    kind: str
    gpu: Gpu
    fields: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """An answer to "can these be combined?".

    Attributes:
        served: whether they can.
        fields: fields of the method's config that are needed for it.
        reason: why not, or why not without these fields.
    """

    served: bool
    fields: Mapping[str, object] = dataclasses.field(default_factory=dict)
    reason: str | None = None


@cache
def load(method: Method) -> type[DecodeMethod] | type[PrefillMethod]:
    """Return a method's class."""
    return (registry.load_prefill_method if method.prefill else registry.load_decode_method)(method.name)


def methods() -> tuple[Method, ...]:
    """Return all registered methods that load, decode methods first."""
    broken = broken_methods()
    return tuple(method for method in _registered() if method not in broken)


def broken_methods() -> dict[Method, str]:
    """Return registered methods that fail to load, with the reasons."""
    found = {}
    for method in _registered():
        try:
            load(method)
        except ValueError as error:
            found[method] = str(error).removeprefix(f"{method.flag}: ")
    return found


def _registered() -> tuple[Method, ...]:
    return (
        *(Method(name, False) for name in registry.decode_methods()),
        *(Method(name, True) for name in registry.prefill_methods()),
    )


def flag_text(changes: Mapping[str, object]) -> str:
    """Return fields of ``ServerArgs`` in the form of a command line."""
    return " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in changes.items()
    )


@cache
def _checkpoint(kind: str) -> TemporaryDirectory[str]:
    folder = TemporaryDirectory(prefix="sglang-sparse-")
    (Path(folder.name) / "config.json").write_text(json.dumps(KINDS[kind]))
    return folder


def _server(kind: str, changes: Mapping[str, object]) -> Arguments:
    """Return SGLang's arguments unresolved, since resolving would inspect this machine."""
    return arguments.of(SparseServerArgs(**{"model_path": _checkpoint(kind).name, **changes}))


def refusal(method: Method, place: Place, changes: Mapping[str, object] | None = None) -> str | None:
    """Return why a server would not start with a method, or None.

    Args:
        method: the method.
        place: the model and the machine.
        changes: fields of ``ServerArgs`` that differ from the defaults. A decode method is configured to the page size,
            and the attention backend is one that the method supports on such a machine.
    """
    try:
        args, settings = _asked(method, place, changes or {})
    except SparseArgumentError as error:
        return str(error)
    return judge.refusal(args, settings, place.gpu, stand_in=True)


def _asked(method: Method, place: Place, changes: Mapping[str, object]) -> tuple[Arguments, Settings]:
    fields = dict(place.fields)
    if "page_size" in changes and not method.prefill:
        fields["page_size"] = changes["page_size"]
    config = "sparse_prefill_config" if method.prefill else "sparse_config"
    args = _server(place.kind, {method.option: method.name, config: fields, **changes})
    settings = resolve(args)
    if args.page_size is None:
        args.page_size = settings.config.page_size
    if args.attention_backend is None:
        args.attention_backend = dense_backends(settings.decode.attention, bool(place.gpu))[-1]
    return args, settings


def stages(method: Method, place: Place) -> Mapping[str, str]:
    """Return the kernels of each stage of a method with a choice; empty for others."""
    args, settings = _asked(method, place, {})
    return getattr(dsa_flags.choose_kernels(args, settings, place.gpu).method, "stages", {})


def answer(method: Method, place: Place, changes: Mapping[str, object] | None = None) -> Answer:
    """Ask whether a method supports some changes, and with which fields of its config.

    Args:
        method: the method.
        place: the model and the machine.
        changes: see ``refusal``.
    """
    first = None
    for more in ({}, UNRECTIFIED, UNCALIBRATED):
        if not method.takes(more):
            continue
        reason = refusal(method, dataclasses.replace(place, fields={**place.fields, **more}), changes)
        if reason is None:
            return Answer(True, more, first)
        first = first or reason
    return Answer(False, {}, first)


@cache
def place_of(method: Method) -> Place:
    """Return a place that a method serves: with a GPU if possible, and its first kind of attention."""
    for gpu in (True, False):
        for kind in KINDS:
            found = answer(method, Place(kind, gpu))
            if found.served:
                return Place(kind, gpu, found.fields)
    # A third party's method of another kind: the answers have the reason.
    return Place(next(iter(KINDS)), False)


def flag_answer(method: Method, flag: Mapping[str, object], place: Place | None = None) -> Answer:
    """Ask whether a method supports a flag, by default in ``place_of(method)``."""
    return answer(method, place or place_of(method), flag)


def backends(method: Method, gpu: bool) -> tuple[str, ...]:
    """Return the dense attention backends that a method supports, with or without a GPU."""
    place = dataclasses.replace(place_of(method), gpu=gpu)
    known = dict.fromkeys(name for names in DENSE_BACKENDS.values() for name in names)
    return tuple(name for name in known if refusal(method, place, {"attention_backend": name}) is None)


def page_sizes(method: Method) -> tuple[int, ...]:
    """Return the page sizes that a method supports, in tokens."""
    return tuple(size for size in PAGE_SIZES if refusal(method, place_of(method), {"page_size": size}) is None)


def partners(method: Method) -> tuple[str, ...]:
    """Return the methods of the other phase that can be combined with a method on some machine."""
    place = place_of(method)
    return tuple(
        other.name
        for other in methods()
        if other.prefill != method.prefill
        and any(
            answer(method, dataclasses.replace(place, gpu=gpu), {other.option: other.name}).served
            for gpu in (True, False)
        )
    )


# By method, the fields of a second rule that differs from the first one.
OTHER_FIELDS: Mapping[str, Mapping[str, object]] = {
    "resa": {"active_ratio": 0.2},
    "robsa": {"theta1": 0.8},
    "rocketkv": {"topk": 32},
    "skip_softmax": {"threshold_scale_factor": {"decode": 50}},
    "dsa": {"implementation": "portable"},
}
OTHER_PREFILL_FIELDS: Mapping[str, Mapping[str, object]] = {
    "anchor": {"theta": 8.0},
    "skip_softmax": {"threshold_scale_factor": 50.0},
}


def rule_partners(method: Method) -> tuple[str, ...]:
    """Return the methods that can run in the other layers by rules, on some machine.

    Returns:
        "dense", "itself with other fields", or the name of another method of the phase.
    """
    names = registry.prefill_methods() if method.prefill else registry.decode_methods()
    fields = (OTHER_PREFILL_FIELDS if method.prefill else OTHER_FIELDS).get(method.name, {})
    others: dict[str, object] = {"dense": "dense", "itself with other fields": fields}
    others |= {name: {"method": name} for name in names if name != method.name}
    place = place_of(method)

    def served(rule: object) -> bool:
        fields = {**place.fields, "layers": {"0-3": {}, "4-": rule}}
        fields |= UNRECTIFIED if method.takes(UNRECTIFIED) else {}
        places = (dataclasses.replace(place, fields=fields, gpu=gpu) for gpu in (True, False))
        return any(refusal(method, place) is None for place in places)

    return tuple(name for name, rule in others.items() if rule and served(rule))
