"""Common parts of the commands that measure a live server: requests, streams and counters."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import httpx
from tqdm import tqdm

from eval.live.counters import COUNTED, PREFILL_COUNTED, EvaluationError, Unreachable, counts_of
from eval.live.record import server_facts

Item = TypeVar("Item")
Result = TypeVar("Result")

ATTEMPTS = 4
# What a command ends with one line for: what it refuses, a server that fails, a file that cannot be read or written.
FAILURES = (EvaluationError, httpx.HTTPError, httpx.InvalidURL, OSError)
RETRIED_STATUS = {429, 502, 503, 504}
# Above every vocabulary, and still what the server's request schema takes.
NO_TOKEN = 2**31 - 1


@dataclass(frozen=True)
class Chunk:
    """One event of a stream: when it came, in seconds of ``time.perf_counter``, and how many tokens there were then."""

    seconds: float
    tokens: int


@dataclass(frozen=True)
class Stream:
    """A streamed answer: when the request was sent, its chunks, each with at least one new token, and its tokens."""

    sent: float
    chunks: list[Chunk]
    cached_tokens: int
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        text: the output, special tokens left out.
        finish: why it ended: "stop" or "length".
        completion_tokens: as the server counts them.
        seconds: from when the request was sent until the answer was there, on this client's clock.
    """

    text: str
    finish: str
    completion_tokens: int
    seconds: float


class LiveServer:
    """A server under measurement: blocking calls for what it says about itself, concurrent ones for generation.

    `each` works on at most `concurrency` items at a time; `timeout` is that of one request, in seconds.
    """

    def __init__(self, base_url: str, concurrency: int = 1, timeout: float = 1800.0) -> None:
        self.concurrency = concurrency
        self._options: dict[str, Any] = {"base_url": base_url, "timeout": timeout, "trust_env": False}
        self._http = httpx.Client(**self._options)

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._http.close()

    def facts(self) -> dict[str, Any]:
        """Version, model, flags and counters, see `eval.live.record.server_facts`."""
        return server_facts(self._http)

    def ask(self, question: Callable[[httpx.Client], Result]) -> Result:
        """Call a function with a client of the server, and return its result."""
        return question(self._http)

    def info(self) -> dict[str, Any]:
        """All that it says about itself."""
        return self._http.get("/server_info").raise_for_status().json()

    def sparse_state(self) -> dict[str, Any]:
        """The counters and the configs of the sparse methods, counts summed over data-parallel ranks.

        Refused if the server runs no sparse method, or one without rectification.
        """
        states = self.info()["internal_states"]
        found = [state.get("sparse") for state in states]
        if any(state is None for state in found):
            raise EvaluationError(f"{self._options['base_url']} does not run a sparse method")
        missing = [name for name in COUNTED if name not in found[0]]
        if missing:
            raise EvaluationError(f"{self._options['base_url']} does not count {', '.join(missing)}")
        summed = found[0] | {name: sum(state[name] for state in found) for name in COUNTED}
        if prefill := [state["prefill"] for state in found if state.get("prefill")]:
            summed["prefill"] = prefill[0] | {name: sum(one[name] for one in prefill) for name in PREFILL_COUNTED}
        return summed

    def counters(self, patience: float = 30.0) -> dict[str, Any]:
        """`sparse_state` once it stands still: the server may run a step that no request waits for any more.

        A server that still counts after `patience` seconds is refused.
        """
        deadline = time.monotonic() + patience
        state = self.sparse_state()
        while time.monotonic() < deadline:
            time.sleep(0.2)
            earlier, state = state, self.sparse_state()
            if counts_of(earlier) == counts_of(state):
                return state
        raise EvaluationError(f"the server decodes although nothing was asked for {patience} s: somebody else uses it")

    def tokenize(self, text: str) -> list[int]:
        """Token ids by the server's own tokenizer, without special tokens."""
        request = {"model": "default", "prompt": text, "add_special_tokens": False}
        return self._http.post("/tokenize", json=request).raise_for_status().json()["tokens"]

    def vocabulary_size(self, wanted: int | None = None) -> int:
        """Return the number of token ids to draw from: the model's vocabulary size, or `wanted`; refused if too few.

        No endpoint names the size, so it is read from the server's refusal of a token id beyond it.
        """
        request = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "token_ids_logprob": [NO_TOKEN],
        }
        answer = self._http.post("/generate", json=request)
        found = re.search(r"valid range is \[0, (\d+)\)", answer.text)
        size = int(found[1]) if found else wanted
        if size is None:
            raise EvaluationError("the server does not say how large the model's vocabulary is: give --vocab")
        if wanted and wanted > size:
            raise EvaluationError(f"--vocab {wanted}: the model has {size} tokens")
        return wanted or size

    def each(
        self,
        work: Callable[[httpx.AsyncClient, Item], Awaitable[Result]],
        items: Sequence[Item],
        label: str = "",
    ) -> list[Result]:
        """Work on all items, at most ``concurrency`` at a time, started in order, with a progress bar for a `label`.

        The results are in the order of the items; whatever `work` raises first is raised, so that nothing is left out.
        """

        async def work_on_all() -> list[Result]:
            gate = asyncio.Semaphore(self.concurrency)
            limits = httpx.Limits(max_connections=self.concurrency)
            with tqdm(total=len(items), desc=label, disable=not label) as bar:
                async with httpx.AsyncClient(**self._options, limits=limits) as client:

                    async def one(item: Item) -> Result:
                        async with gate:
                            result = await work(client, item)
                        bar.update()
                        return result

                    return await asyncio.gather(*map(one, items))

        return asyncio.run(work_on_all())


async def generate(client: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
    """POST ``/generate``, see `post` and `checked`.

    A retracted request prefills its output again, which is a rectification that nobody asked for.
    """
    return checked(await post(client, "/generate", request))


async def post(client: httpx.AsyncClient, path: str, request: dict[str, Any], pause: float = 0.5) -> dict[str, Any]:
    """POST a request; tried again a few times where the connection broke or the server was not available.

    The second attempt follows after `pause` seconds, and each further one after twice as many.

    Raises:
        Unreachable: no attempt got an answer.
        EvaluationError: the answer is an error.
    """
    failure = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(pause * 2 ** (attempt - 1))
        try:
            response = await client.post(path, json=request)
        except httpx.TransportError as error:
            failure = f"{type(error).__name__} {error}"
            continue
        if response.status_code not in RETRIED_STATUS:
            if response.is_error:
                raise EvaluationError(f"the server refused a request: {response.status_code} {response.text}")
            return response.json()
        failure = f"{response.status_code} {response.text}"
    raise Unreachable(f"a request failed {ATTEMPTS} times, the last time by: {failure}")


async def complete(
    client: httpx.AsyncClient, model: str, tokens: Sequence[int], max_new_tokens: int, options: Mapping[str, Any]
) -> Completion:
    """POST ``/v1/completions`` with token ids, to which the server must add nothing; see `post`."""
    request = {"model": model, "prompt": list(tokens), "max_tokens": max_new_tokens, **options}
    sent = time.perf_counter()
    answer = await post(client, "/v1/completions", request)
    seconds = time.perf_counter() - sent
    if "choices" not in answer:
        raise EvaluationError(f"the server refused a request: {answer.get('message', answer)}")
    choice, usage = answer["choices"][0], answer["usage"]
    if choice["finish_reason"] not in ("stop", "length"):
        raise EvaluationError(f"a request was not finished: {choice['finish_reason']}")
    if usage["prompt_tokens"] != len(tokens):
        raise EvaluationError(
            f"the server read a prompt of {usage['prompt_tokens']} tokens where {len(tokens)} were sent"
        )
    return Completion(choice["text"], choice["finish_reason"], usage["completion_tokens"], seconds)


def served_model(client: httpx.Client, wanted: str | None) -> tuple[str, int | None]:
    """Name and context length, in tokens, of the model to ask, which must be there; None where it is not said."""
    models = {model["id"]: model.get("max_model_len") for model in client.get("/v1/models").json()["data"]}
    name = wanted or next(iter(models))
    if name not in models:
        raise EvaluationError(f"--model {name}: {client.base_url} has {', '.join(models)}")
    return name, models[name]


def checked(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer, if it is whole and was decoded in one go; refuses errors, aborts and retractions."""
    if "error" in answer:
        raise EvaluationError(f"the server refused a request: {answer['error']}")
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    if reason is None or reason["type"] == "abort":
        raise EvaluationError(f"a request was not finished: {reason}")
    if meta.get("num_retractions"):
        raise EvaluationError("the server ran out of KV memory and retracted a request: lower the concurrency")
    return answer


async def stream(
    client: httpx.AsyncClient, request: dict[str, Any], begun: Callable[[], None] = lambda: None
) -> Stream:
    """POST ``/generate`` as a stream and time its chunks; never tried again; see `parse_stream`.

    `begun` is called whenever a piece has come, so first when the answer begins.
    """
    raw: list[tuple[float, bytes]] = []
    sent = time.perf_counter()
    async with client.stream("POST", "/generate", json={**request, "stream": True}) as response:
        if response.is_error:
            raise EvaluationError(f"the server refused a request: {response.status_code} {await response.aread()!r}")
        # Parsed when all is over: the clock must not wait for a parser.
        async for data in response.aiter_raw():
            raw.append((time.perf_counter(), data))
            begun()
    return parse_stream(sent, raw)


def parse_stream(sent: float, raw: Iterable[tuple[float, bytes]]) -> Stream:
    """The chunks of a stream of server-sent events, from the times and the pieces of its body.

    An event has the time of its last byte. Refused if the last one is missing, or says that the request failed.
    """
    chunks: list[Chunk] = []
    rest, answer = b"", None
    for seconds, data in raw:
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            body = event.removeprefix(b"data:").strip()
            if body == b"[DONE]":
                continue
            answer = json.loads(body)
            tokens = answer.get("meta_info", {}).get("completion_tokens", 0)
            if tokens > (chunks[-1].tokens if chunks else 0):
                chunks.append(Chunk(seconds, tokens))
    if answer is None:
        raise EvaluationError("a stream ended without an answer")
    cached = checked(answer)["meta_info"].get("cached_tokens", 0)
    return Stream(sent, chunks, cached, answer.get("output_ids", []))


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keep the description as it is written, and say the defaults."""


def command_line(
    command: str,
    description: str | None,
    formatter: type[argparse.HelpFormatter] = argparse.RawDescriptionHelpFormatter,
) -> argparse.ArgumentParser:
    """The parser of a command that writes a file, with ``--label`` and ``--revision``."""
    parser = argparse.ArgumentParser(prog=command, description=description, formatter_class=formatter)
    parser.add_argument("--label", help="kept in the file's header")
    parser.add_argument("--revision", help="of this code, where its git history is not at hand")
    return parser


def shown(command: str, measure: Callable[[], list[dict[str, Any]]], gate: str = "passed", **how: Any) -> int:
    """Print the rows that a command measures as a table.

    Returns:
        The exit status: 1 where it fails, after one line on stderr, and where the field `gate` of a row is false.
    """
    import pandas as pd

    try:
        rows = measure()
    except FAILURES as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 1
    print(pd.DataFrame(rows).to_string(index=False, **how))
    return 0 if all(row.get(gate, True) for row in rows) else 1


def list_of(
    kind: Callable[[str], Item], allowed: Collection[Item] | None = None, some: bool = False
) -> Callable[[str], list[Item]]:
    """Parser of a comma-separated list on the command line, each item by `kind`.

    Items must be among those `allowed`, if these are given. Then, or with `some`, the list must not be empty.
    """

    def parse(value: str) -> list[Item]:
        found = [kind(part) for part in value.split(",") if part]
        wrong = [str(item) for item in found if allowed is not None and item not in allowed]
        if wrong or not (found or (allowed is None and not some)):
            names = "one or more" if allowed is None else ", ".join(map(str, allowed))
            raise argparse.ArgumentTypeError(f"got {','.join(wrong) or 'none'}, allowed: {names}")
        return found

    # argparse names the parser where it complains.
    parse.__name__ = "list"
    return parse


def positive(text: str) -> int:
    """A number of at least 1 on the command line."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def percent(text: str) -> float:
    """A percentage on the command line."""
    if not 0 <= (number := float(text)) <= 100:
        raise argparse.ArgumentTypeError(f"must be a percentage from 0 to 100, got {text}")
    return number


def request_of(prompt: list[int], tokens: int, params: dict[str, Any]) -> dict[str, Any]:
    """Body of a request for exactly `tokens` greedy tokens."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "custom_params": params}
    return {"input_ids": prompt, "sampling_params": sampling}
