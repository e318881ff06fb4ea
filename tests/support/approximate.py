"""Methods that write approximate KV, with settings under which an answer shows whether any of it was shared.

All check that their radix tree is exact, select from short prompts, and never run dense.
"""

from pathlib import Path
from typing import Any

import pytest
from server_requests import logprobs

from launch.server import ServerProcess

ANCHOR = {"block_size": 32, "step": 2, "dense_tail": 0, "theta": 0.5, "crossover_tokens": 64, "check_exactness": True}
SELECTIVE: dict[str, Any] = {"dense_fallback": "never", "check_exactness": True}
METHODS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "resa": ("resa", {"active_ratio": 0.2, "min_pages": 2, "rectify_interval": 16, **SELECTIVE}, None),
    "resa and anchor": ("resa", {"active_ratio": 0.2, "min_pages": 2, **SELECTIVE}, ANCHOR),
    "robsa": (
        "robsa",
        {"allow_uncalibrated": True, "page_size": 64, "rope_copy": "on", "theta1": 0.6, **SELECTIVE},
        None,
    ),
    "rocketkv": ("rocketkv", {"prompt_budget": 256, "window_size": 16, "topk": 16, **SELECTIVE}, None),
    "skip_softmax": ("skip_softmax", {"threshold_scale_factor": {"decode": 50.0}, **SELECTIVE}, None),
}


def model_of(name: str) -> tuple[Path, str]:
    """The checkpoint of a method of `METHODS`, and the size of its pages."""
    model, page = ("tiny-mla", "64") if METHODS[name][0] == "robsa" else ("tiny-gqa", "16")
    return Path("eval/models") / model, page


def ask(
    server: ServerProcess, prompt: list[int], longest: int = 40, *, custom: dict[str, Any] | None = None, **given: Any
) -> dict[str, Any]:
    """Answer a prompt with as many tokens, and their log-probabilities; ``custom``: options of the request."""
    params = {"max_new_tokens": longest, "temperature": 0.0, "ignore_eos": True, "custom_params": custom}
    return server.generate(input_ids=prompt, sampling_params=params, return_logprob=True, **given)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["output_ids"] == expected["output_ids"]
    assert logprobs(found) == pytest.approx(logprobs(expected), abs=1e-3)
