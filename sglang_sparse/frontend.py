"""Sparse options for single requests, from the client's side.

For OpenAI's client, ``extra_body={"custom_params": frontend.options(active_ratio=0.05)}``; for SGLang's ``/generate``,
``sampling_params={"custom_params": frontend.options(sparse=False)}``. For SGLang's frontend language, whose sampling
parameters have no such field, an endpoint that adds it:

    precise = frontend.sparse_endpoint("http://127.0.0.1:30000", active_ratio=0.2)
    state = program.run(question="...", backend=precise)

Imports neither torch nor SGLang: a client may have neither.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

_FIELDS = {
    "active_ratio": ((int, float), "a number"),
    "rectify_interval": ((int,), "an integer"),
    "sparse": ((bool,), "True or False"),
}


def options(
    active_ratio: float | None = None, rectify_interval: int | None = None, sparse: bool | None = None
) -> dict[str, Any]:
    """Return the ``custom_params`` of a request; what is left out is as the server has it.

    Types are checked here and ranges by the server, which answers with status 400.

    Args:
        active_ratio: fraction of its pages that a decode step attends to.
        rectify_interval: generated tokens between dense rectifications; 0 for never.
        sparse: False for dense decode.

    Raises:
        ValueError: a value is of another type; names the field.
    """
    given = {"active_ratio": active_ratio, "rectify_interval": rectify_interval, "sparse": sparse}
    params = {name: value for name, value in given.items() if value is not None}
    for name, value in params.items():
        types, allowed = _FIELDS[name]
        # Not isinstance, to which True is an int.
        if type(value) not in types:
            raise ValueError(f"{name}: got {value!r}, allowed: {allowed}")
    return params


def sparse_endpoint(
    url: str,
    *,
    active_ratio: float | None = None,
    rectify_interval: int | None = None,
    sparse: bool | None = None,
    **endpoint: Any,
) -> RuntimeEndpoint:
    """Return a backend for SGLang's frontend language whose generations carry these options.

    Pass it to ``run``, ``run_batch`` or ``sglang.set_default_backend``; one server may have several such endpoints.
    What only prefills (choices, ``select``, the caching of prefixes) carries none: these options are for decode.

    Args:
        url: the server's, without a path.
        active_ratio: see ``options``.
        rectify_interval: see ``options``.
        sparse: see ``options``.
        **endpoint: passed to ``sglang.RuntimeEndpoint``, for example ``api_key``.

    Raises:
        ValueError: an option is of another type; names it.
        RuntimeError: the server answers with an error.
    """
    params = options(active_ratio, rectify_interval, sparse)
    backend = _endpoint_class()(url, **endpoint)
    backend.custom_params = params
    return backend


@cache
def _endpoint_class() -> Any:
    from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
    from sglang.lang.ir import SglSamplingParams

    @dataclass
    class SparseSamplingParams(SglSamplingParams):
        custom_params: dict[str, Any] = field(default_factory=dict)

        def to_srt_kwargs(self) -> dict[str, Any]:
            return {**super().to_srt_kwargs(), "custom_params": self.custom_params}

    class SparseEndpoint(RuntimeEndpoint):
        custom_params: dict[str, Any]

        def _sparse(self, params: SglSamplingParams) -> SparseSamplingParams:
            return SparseSamplingParams(**vars(params), custom_params=self.custom_params)

        def generate(self, s: Any, sampling_params: SglSamplingParams) -> Any:
            return super().generate(s, self._sparse(sampling_params))

        def generate_stream(self, s: Any, sampling_params: SglSamplingParams) -> Any:
            return super().generate_stream(s, self._sparse(sampling_params))

    return SparseEndpoint
