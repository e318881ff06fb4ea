"""Completions of token ids over the OpenAI API, which SGLang and other servers speak."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from eval.live.client import post
from eval.live.counters import EvaluationError


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


async def complete(
    client: httpx.AsyncClient, model: str, tokens: Sequence[int], max_new_tokens: int, options: Mapping[str, Any]
) -> Completion:
    """POST ``/v1/completions`` with a prompt of token ids, so that the server adds nothing to it.

    Raises:
        Unreachable: no attempt got an answer.
        EvaluationError: the server refused, or read another prompt than was sent.
    """
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
