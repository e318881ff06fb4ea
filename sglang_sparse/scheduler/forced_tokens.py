"""Forced decoding: a request's output is decided beforehand, and only its log-probabilities are asked for.

Perplexity of *decode* needs it: log-probabilities of a prompt are computed in prefill and never meet sparse attention.
The model's logits stay as they are, so the returned log-probability of a token is what the model gave it; a custom
logit processor, which SGLang runs before every log-softmax, could only return 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse.attention.protocols import ForwardBatch, ModelRunner, ScheduleBatch
from sglang_sparse.config.settings import settings_of
from sglang_sparse_kernels.common.launch import to_device

if TYPE_CHECKING:
    from sglang_sparse.config.request_options import RequestOptions

# The attribute of the ForwardBatch that is sampled from. Passes that SGLang rebuilds from it are not.
ATTRIBUTE = "sglang_sparse_forced"


@dataclass(frozen=True)
class Forced:
    """The rows of a batch whose next token is decided.

    Attributes:
        rows: ``[n]`` int64 on the device.
        tokens: ``[n]`` int64 on the device.
    """

    rows: torch.Tensor
    tokens: torch.Tensor


def prepare(forward_batch: ForwardBatch, batch: ScheduleBatch, options: Sequence[RequestOptions]) -> None:
    """Leave on a batch which of its rows are forced, and to what.

    A row that holds n tokens of KV with the newest one samples output token n - prompt length.
    """
    found = []
    for row, (request, own) in enumerate(zip(batch.reqs, options, strict=True)):
        forced = own.forced_tokens
        position = int(batch.seq_lens_cpu[row]) - len(request.origin_input_ids) if forced else -1
        if 0 <= position < len(forced):
            found.append((row, forced[position]))
    if found:
        device = forward_batch.seq_lens.device
        rows, tokens = to_device(found, torch.int64, device).unbind(1)
        setattr(forward_batch, ATTRIBUTE, Forced(rows, tokens))


def sample(
    original: Callable[..., torch.Tensor], runner: ModelRunner, logits_output: Any, forward_batch: ForwardBatch
) -> torch.Tensor:
    """Around ``ModelRunner.sample``: replace the sampled tokens of forced rows, and their log-probabilities.

    Returns:
        ``[rows]``, the next token ids.
    """
    forced: Forced | None = getattr(forward_batch, ATTRIBUTE, None)
    if forced is None or settings_of(runner.server_args) is None:
        return original(runner, logits_output, forward_batch)
    # SGLang scales logits in place while it samples.
    logprobs = logits_output.next_token_logits[forced.rows].float().log_softmax(-1)
    next_tokens = original(runner, logits_output, forward_batch)
    next_tokens[forced.rows] = forced.tokens.to(next_tokens.dtype)
    if logits_output.next_token_logprobs is not None:
        chosen = logprobs.gather(1, forced.tokens[:, None])[:, 0]
        logits_output.next_token_logprobs[forced.rows] = chosen.to(logits_output.next_token_logprobs.dtype)
    return next_tokens
