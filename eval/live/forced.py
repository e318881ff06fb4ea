"""Log-probabilities of tokens that a server is made to decode, through ``custom_params.forced_tokens``.

The *bound* of sparse decode is a request of its own for each scored position p: the tokens before p - 1 are its prompt,
so that their KV is exact, and the tokens at p - 1 and p are forced; the one decode step, sparse, scores p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import httpx

from eval.live.client import generate
from eval.live.counters import EvaluationError
from eval.scores.ppl_summary import Cell
from eval.texts.windows import Window


def custom_params(cell: Cell, field: str) -> dict[str, Any]:
    """Return the ``custom_params`` of a setting's requests; ``field`` is the name of its ratio there."""
    if cell.setting == "dense":
        return {"sparse": False}
    return {field: cell.ratio, "rectify_interval": cell.interval or 0}


def forced_request(prompt: Sequence[int], forced: Sequence[int], params: dict[str, Any]) -> dict[str, Any]:
    """Body of a request whose output is `forced`, with the log-probability of each of its tokens."""
    sampling = {"temperature": 0, "max_new_tokens": len(forced), "ignore_eos": True}
    sampling["custom_params"] = {**params, "forced_tokens": list(forced)}
    return {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}


def bound_requests(window: Window, suffix: int, params: dict[str, Any]) -> list[dict[str, Any]]:
    """One request for each scored position, in ascending order; the last log-probability of each counts."""
    tokens = window.tokens
    requests = []
    for p in range(len(tokens) - window.scored, len(tokens)):
        # The first token after the prompt is scored by prefill in all settings.
        split = p if p == len(tokens) - suffix else p - 1
        requests.append(forced_request(tokens[:split], tokens[split : p + 1], params))
    return requests


def forced_logprobs(answer: dict[str, Any], forced: Sequence[int]) -> list[float]:
    """Log-probabilities of the forced tokens ``[len(forced)]``; refuses another output, and what is no number."""
    found = answer["meta_info"]["output_token_logprobs"]
    if [token for _, token, _ in found] != list(forced):
        raise EvaluationError("the output is not the forced one: the server does not know `forced_tokens`")
    return _finite([logprob for logprob, _, _ in found])


def prefill_logprobs(answer: dict[str, Any], expected: Sequence[int]) -> list[float]:
    """Log-probabilities of the last prompt tokens ``[len(expected)]``, of a request with ``logprob_start_len``.

    Refused if they are of other tokens, or a value is no number.
    """
    found = answer["meta_info"]["input_token_logprobs"][-len(expected) :]
    named = [token for _, token, _ in found]
    # SGLang takes the last id of the vocabulary for a padding of images and names it 0; the value is its own.
    others = {(want, token) for want, token in zip(expected, named, strict=False) if want != token}
    if len(named) != len(expected) or not others <= {(max(expected), 0)}:
        raise EvaluationError("the prompt's log-probabilities are of other tokens")
    return _finite([logprob for logprob, _, _ in found])


def _finite(logprobs: list[float | None]) -> list[float]:
    values = [value for value in logprobs if value is not None and math.isfinite(value)]
    if len(values) != len(logprobs):
        raise EvaluationError(f"{len(logprobs) - len(values)} of {len(logprobs)} log-probabilities are no numbers")
    return values


async def suffix_logprobs(
    client: httpx.AsyncClient, tokens: Sequence[int], suffix: int, params: dict[str, Any]
) -> list[float]:
    """Log-probabilities of the last `suffix` tokens, forced through decode."""
    forced = tokens[-suffix:]
    return forced_logprobs(await generate(client, forced_request(tokens[:-suffix], forced, params)), forced)


async def mean_nll(client: httpx.AsyncClient, window: Window, suffix: int, cell: Cell, field: str) -> float:
    """Mean negative log-likelihood of the scored tokens of a window, in nats; ``field`` as of `custom_params`."""
    params = custom_params(cell, field)
    if cell.setting != "bound":
        return -fmean((await suffix_logprobs(client, window.tokens, suffix, params))[-window.scored :])
    scored = []
    for request in bound_requests(window, suffix, params):
        forced = request["sampling_params"]["custom_params"]["forced_tokens"]
        scored.append(forced_logprobs(await generate(client, request), forced)[-1])
    return -fmean(scored)


async def prefilled_suffix(
    client: httpx.AsyncClient, tokens: Sequence[int], suffix: int, params: dict[str, Any] | None = None
) -> list[float]:
    """Log-probabilities of the last `suffix` tokens as prefill gives them, dense unless `params` are given."""
    params = {"sparse": False} if params is None else params
    return prefill_logprobs(await generate(client, _read(tokens, suffix, params)), tokens[-suffix:])


async def prefilled_answer(
    client: httpx.AsyncClient, tokens: Sequence[int], given: Sequence[int], params: dict[str, Any]
) -> list[int]:
    """The likeliest token at each place of an answer ``[len(given)]`` that is read behind a prompt.

    All of them are right if, and only if, decode would answer so greedily, were each of its steps to attend as prefill
    does: it would then have written what stands before each place. Where a method chooses keys for several queries
    together, those of places behind have a say here, which decode would not have.
    """
    request = _read([*tokens, *given], len(given), params)
    answer = await generate(client, {**request, "top_logprobs_num": 1})
    # For what it refuses: other tokens, and values that are no numbers.
    prefill_logprobs(answer, given)
    found = (answer["meta_info"].get("input_top_logprobs") or [])[-len(given) :]
    if len(found) != len(given) or not all(found):
        raise EvaluationError(f"the server names no likeliest token at each of the last {len(given)} places")
    return [max(tops)[1] for tops in found]


def _read(tokens: Sequence[int], suffix: int, params: dict[str, Any]) -> dict[str, Any]:
    """Body of a request whose last `suffix` tokens get log-probabilities, and behind which nothing is decoded."""
    return {
        "input_ids": list(tokens),
        # With its scheduling overlapped, the server may run a decode step before it sees that none is wanted.
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "custom_params": params},
        "return_logprob": True,
        "logprob_start_len": len(tokens) - suffix - 1,
    }
