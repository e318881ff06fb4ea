"""Choose tokens so that a draft and its verification choose alike: both add the same noise to their log-probabilities.

The noise is Gumbel's, a function of the request's seed, the position and the token. The token with the largest sum is a
sample of the distribution, and what the verification chooses is the output: it follows the dense distribution whatever
was drafted, and equals token by token what dense passes alone would choose with the same noise. Where the sparse
distribution is close to the dense one, the same noise mostly finds the same token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.sampler import multinomial_with_seed

from sglang_sparse_kernels.common.launch import to_device

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from sglang_sparse.attention.protocols import Req

# Rows of noise at a time: each is of float64, as long as the vocabulary, and there are several.
ROWS = 32


@lru_cache(maxsize=4096)
def seed_of(request_id: str, server_seed: int) -> int:
    """Return a request's seed where it gives none: equal on all ranks, and after a retraction."""
    digest = hashlib.blake2b(f"{server_seed} {request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seeds_of(requests: Sequence[Req], server_seed: int, device: torch.device) -> torch.Tensor:
    """Return the seed of each request, ``[requests]`` int64."""
    given = [request.sampling_params.sampling_seed for request in requests]
    seeds = [
        seed_of(request.rid, server_seed) if seed is None else int(seed)
        for request, seed in zip(requests, given, strict=True)
    ]
    return to_device(seeds, torch.int64, device)


def choose(
    logits: torch.Tensor, positions: torch.Tensor, info: SamplingBatchInfo, seeds: torch.Tensor | None, width: int = 1
) -> torch.Tensor:
    """Choose a token for each row of logits.

    Args:
        logits: ``[requests * width, vocabulary]``, with bias and grammar applied.
        positions: ``[requests * width]`` int64, the position of the token before.
        info: SGLang's sampling parameters of the requests.
        seeds: ``[requests]`` int64; None where all are greedy.
        width: rows of logits of each request.

    Returns:
        ``[requests * width]`` int64.
    """
    greedy = logits.argmax(-1)
    if info.is_all_greedy or seeds is None:
        return greedy
    top_ks = info.top_ks.repeat_interleave(width)
    chosen = torch.empty_like(greedy)
    for first in range(0, len(logits), ROWS):
        rows = torch.arange(first, min(first + ROWS, len(logits)), device=logits.device)
        request = rows // width
        probabilities = torch.softmax(logits[rows].float() / info.temperatures[request], -1)
        weights = _filtered(probabilities, info, request)
        found = multinomial_with_seed(weights.double().log_(), seeds[request], positions[rows])
        chosen[rows] = found[:, 0]
    return torch.where(top_ks == 1, greedy, chosen)


def _filtered(probabilities: torch.Tensor, info: SamplingBatchInfo, request: torch.Tensor) -> torch.Tensor:
    """Zero what top-k, top-p and min-p leave out, as SGLang's PyTorch sampler does: each by the whole distribution."""
    if not (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling):
        return probabilities
    if info.max_top_k is not None and info.max_top_k < probabilities.shape[1]:
        # No token behind these is kept, and to find them is faster than to sort a vocabulary.
        ordered, tokens = probabilities.topk(info.max_top_k, dim=-1)
    else:
        ordered, tokens = probabilities.sort(stable=True, dim=-1, descending=True)
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    left_out = ranks >= info.top_ks[request][:, None]
    left_out |= ordered.cumsum(-1) - ordered > info.top_ps[request][:, None]
    if info.need_min_p_sampling:
        left_out |= ordered < ordered[:, :1] * info.min_ps[request][:, None]
    return torch.zeros_like(probabilities).scatter_(1, tokens, ordered.masked_fill_(left_out, 0.0))


def simulated(mean: float, rows: int, width: int, device: torch.device) -> torch.Tensor:
    """Draw how many drafts count as right where ``SGLANG_SIMULATE_ACC_LEN`` says it, to measure speed without a model.

    Args:
        mean: tokens of a round in which all that a verification holds was drafted.
        rows: of the batch.
        width: of a verification.

    Returns:
        ``[rows]`` int32.
    """
    rights = torch.rand(rows, width - 1, device=device) < _rate(mean, width)
    return rights.to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)


@lru_cache
def _rate(mean: float, width: int) -> float:
    """Return the acceptance of a draft that gives so many tokens a round: the sum of its powers, from the zeroth on."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(middle**power for power in range(width)) > mean else (middle, high)
    return high
