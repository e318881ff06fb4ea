"""Sparse options for single requests, from the client's side.

For OpenAI's client, ``extra_body={"custom_params": frontend.options(active_ratio=0.05)}``; for SGLang's ``/generate``,
``sampling_params={"custom_params": frontend.options(sparse=False)}``. With a custom logit processor, options stand next
to its parameters: ``{"sparse": frontend.options(active_ratio=0.05), "ngram_size": 3}``. For SGLang's frontend language,
whose sampling parameters have no such field, an endpoint that adds it, and what a single state or fork asks for on such
an endpoint:

    precise = frontend.sparse_endpoint("http://127.0.0.1:30000", active_ratio=0.2)
    state = program.run(question="...", backend=precise)

    def program(s, question):
        fast, dense = s.fork(2)
        frontend.set_options(dense, sparse=False)

Imports neither torch nor SGLang: a client may have neither.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypedDict

from sglang_sparse.errors import SparseArgumentError

if TYPE_CHECKING:
    from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
    from sglang.lang.interpreter import ProgramState
    from typing_extensions import Unpack

PHASES = ("decode", "prefill")


class Options(TypedDict, total=False):
    """Options of a request: the fields of all methods; the server answers one that its method lacks with status 400.

    Attributes:
        sparse: False for dense attention.
        lossless: False accepts all drafts, on a server that verifies them (``--speculative-algorithm SPARSE_SELF``).
        active_ratio: fraction of its pages that a decode step attends to (resa).
        token_budget: tokens of a row that a decode step attends to, instead of a share (resa).
        rectify_interval: generated tokens between dense rectifications; 0 for never.
        theta1: share of the attention mass that a decode step's blocks have (robsa).
        topk: blocks that a decode step attends to (rocketkv).
        theta: how far below the anchor's a key's score may be in prefill (anchor).
        threshold_scale_factor: of Skip-Softmax, for the phases that it has on the server, or by phase.
        exact_prefix: True for dense prefill.
        forced_tokens: token ids of the output, decided beforehand.
    """

    sparse: bool | None
    lossless: bool | None
    active_ratio: float | None
    token_budget: int | None
    rectify_interval: int | None
    theta1: float | None
    topk: int | None
    theta: float | None
    threshold_scale_factor: float | Mapping[str, float] | None
    exact_prefix: bool | None
    forced_tokens: list[int] | None


# Not isinstance, to which True is an int.
def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_integer(value: object) -> bool:
    return type(value) is int


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _is_number_by_phase(value: object) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and set(value) <= set(PHASES) and all(map(_is_number, value.values()))
    return _is_number(value)


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_integer, value))


_NUMBER, _INTEGER, _BOOL = (_is_number, "a number"), (_is_integer, "an integer"), (_is_bool, "True or False")
FIELDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "sparse": _BOOL,
    "lossless": _BOOL,
    "active_ratio": _NUMBER,
    "token_budget": _INTEGER,
    "rectify_interval": _INTEGER,
    "theta1": _NUMBER,
    "topk": _INTEGER,
    "theta": _NUMBER,
    "threshold_scale_factor": (_is_number_by_phase, f"a number, or a mapping with {' or '.join(PHASES)} or both"),
    "exact_prefix": _BOOL,
    "forced_tokens": (_is_tokens, "a list of token ids"),
}


def options(**fields: Unpack[Options]) -> dict[str, object]:
    """Return the ``custom_params`` of a request; what is left out, or None, is as the server has it.

    Types are checked here; ranges, and whether its method has a field, by the server, which answers with status 400.

    Args:
        **fields: see ``Options``.

    Raises:
        SparseArgumentError: a field is unknown, or its value of another type; names the field.
    """
    params = {name: value for name, value in fields.items() if value is not None}
    for name, value in params.items():
        if name not in FIELDS:
            raise SparseArgumentError(f"unknown option {name!r}, allowed: {', '.join(FIELDS)}", field=name, got=value)
        fits, allowed = FIELDS[name]
        if not fits(value):
            raise SparseArgumentError(field=name, got=value, allowed=allowed)
    return params


def sparse_endpoint(url: str, **given: Any) -> RuntimeEndpoint:
    """Return a backend for SGLang's frontend language whose requests carry these options.

    Pass it to ``run``, ``run_batch`` or ``sglang.set_default_backend``; one server may have several such endpoints.
    What only prefills (choices, ``select``, the caching of prefixes) carries them, too, but for ``forced_tokens``.

    Args:
        url: the server's, without a path.
        **given: options, see ``Options``; what is none is passed to ``sglang.RuntimeEndpoint``, such as ``api_key``.

    Raises:
        SparseArgumentError: an option is of another type; names it.
        RuntimeError: the server answers with an error.
    """
    params = options(**{name: given.pop(name) for name in FIELDS if name in given})
    backend = _endpoint_class()(url, **given)
    backend.custom_params = params
    return backend


def set_options(state: ProgramState, **fields: Unpack[Options]) -> None:
    """Have a state of SGLang's frontend language, and its forks, ask for these options from now on.

    They take the place of the endpoint's, and of those that were set before; without any it is the endpoint's again.
    Waits until what the state has asked for so far is generated.

    Args:
        state: one whose backend is a ``sparse_endpoint``; a program's ``s``, or one of its forks.
        **fields: see ``Options``.

    Raises:
        SparseArgumentError: an option is unknown or of another type, or the backend is another one.
    """
    params = options(**fields)
    executor = state.stream_executor
    if not isinstance(executor.backend, _endpoint_class()):
        backend = type(executor.backend).__name__
        message = f"set_options: the state's backend is a {backend}"
        raise SparseArgumentError(message, field="backend", got=backend, allowed="frontend.sparse_endpoint(url)")
    executor.sync()
    # Forks get it from their state, and other states of the program, which have the same one, must not.
    executor.default_sampling_para = copy.copy(executor.default_sampling_para)
    executor.default_sampling_para.custom_params = params


@cache
def _endpoint_class() -> Any:
    from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

    class SparseEndpoint(RuntimeEndpoint):
        custom_params: dict[str, object]

        def cache_prefix(self, prefix_str: str) -> None:
            nothing: Any = SimpleNamespace(images_=[], default_sampling_para=None)
            data = {"text": prefix_str, "sampling_params": {"max_new_tokens": 0}}
            self._generate_http_request(nothing, data)

        def _add_images(self, s: Any, data: dict[str, Any]) -> None:
            # Whatever is posted comes by here, with the state that asks.
            super()._add_images(s, data)
            params = dict(getattr(s.default_sampling_para, "custom_params", None) or self.custom_params)
            if data["sampling_params"]["max_new_tokens"] == 0:
                params.pop("forced_tokens", None)
            if params:
                data["sampling_params"] = {**data["sampling_params"], "custom_params": params}

    return SparseEndpoint
