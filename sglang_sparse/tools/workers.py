"""Compare the servers behind one router: they must run the same methods, with the same configs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypedDict, cast

import requests

from sglang_sparse.config.digest import Published, differences, fields_of
from sglang_sparse.errors import SparseArgumentError

FLAG = "--workers"
# Seconds for one answer of a server.
TIMEOUT = 10.0
ALLOWED = "the address of an SGLang server that needs no API key"


class Worker(TypedDict):
    """The part of ``/server_info`` that is read."""

    page_size: int
    internal_states: list[dict[str, dict[str, object]]]


def compare(urls: Sequence[str]) -> int:
    """Ask each server for its digest, and print whether all agree or which fields differ.

    Args:
        urls: base addresses, as ``http://127.0.0.1:30000``.

    Returns:
        The exit status: 0 if all agree, 1 if fields differ, 2 if a server does not say.
    """
    try:
        if not urls:
            message = f"{FLAG}: got no address; type {FLAG} http://HOST:PORT http://HOST:PORT"
            raise SparseArgumentError(message, field=FLAG, got=[])
        found = {name: fields for url in urls for name, fields in _fields(url).items()}
    except SparseArgumentError as error:
        print(error, file=sys.stderr)
        return 2
    differing = differences(found)
    if not differing:
        digest = next(iter(found.values()))["digest"]
        print(f"{len(urls)} workers agree (digest {digest})" if len(urls) > 1 else f"one worker (digest {digest})")
        return 0
    print("workers differ:")
    for field, values in differing.items():
        print(f"  {field}: {values}")
    return 1


def _fields(url: str) -> dict[str, dict[str, object]]:
    """Return the fields that decide a server's answers, by its address, and those of each replica where it has several.

    Raises:
        SparseArgumentError: there is no server, or it runs no sparse method.
    """
    try:
        answer = requests.get(f"{url.rstrip('/')}/server_info", timeout=TIMEOUT)
        answer.raise_for_status()
        info = cast("Worker", answer.json())
        states = [state.get("sparse") for state in info["internal_states"]]
        page_size = info["page_size"]
    except (requests.RequestException, KeyError, TypeError, AttributeError) as error:
        what = error if isinstance(error, requests.HTTPError) else type(error).__name__
        message = f"{FLAG} {url}: got no /server_info of SGLang ({what})"
        raise SparseArgumentError(
            message, field=FLAG, got=url, allowed="the address of an SGLang server that needs no API key"
        ) from error
    found = {}
    for replica, sparse in enumerate(states):
        if sparse is None or "digest" not in sparse:
            message = f"{FLAG} {url}: got a server that publishes no digest of a sparse method"
            allowed = "servers of this version of the plugin with --sparse-method or --sparse-prefill-method"
            raise SparseArgumentError(message, field=FLAG, got=url, allowed=allowed)
        name = f"{url} replica {replica}" if len(states) > 1 else url
        fields = fields_of(cast("Published", sparse), page_size)
        found[name] = fields | {"digest": sparse["digest"]}
    return found
