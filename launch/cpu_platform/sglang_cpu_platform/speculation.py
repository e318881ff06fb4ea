"""Speculative decoding with chains of drafts: SGLang's kernels for slots, trees and acceptance in PyTorch.

With one draft a step (``--speculative-eagle-topk 1``) the tree of drafts is a chain, whose attention is causal. So
EAGLE, EAGLE3 and STANDALONE run on torch_native, and each step of a drafter needs one token more than the step before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE")
STEPS = 3  # where the user gives no number; SGLang would choose a tree for some models


def use_chains(server_args: Any) -> None:
    """Complete the numbers of SGLang's own drafters to those of a chain.

    Raises:
        ValueError: they ask for a tree, or the drafter needs kernels of a GPU.
    """
    name = server_args.speculative_algorithm.upper()
    if name == "NGRAM":
        raise ValueError("--speculative-algorithm NGRAM: SGLang has its kernels for GPUs alone")
    if name not in (*ALGORITHMS, "NEXTN"):
        return
    if (topk := server_args.speculative_eagle_topk) not in (None, 1):
        raise ValueError(f"--speculative-eagle-topk {topk}: without a CUDA device drafts are chains; allowed: 1")
    steps = server_args.speculative_num_steps or STEPS
    server_args.speculative_num_steps, server_args.speculative_eagle_topk = steps, 1
    server_args.speculative_num_draft_tokens = steps + 1


def draft_slots(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    topk: int,
    columns: int,
    **_: Any,
) -> None:
    """Copy each row's slots from its start on to ``slots``, ``[rows * topk * columns]``."""
    slots.copy_(_following(rows, table, starts, topk * columns))


def extend_slots(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    draft_token_num: int,
    **_: Any,
) -> torch.Tensor:
    """Return the slots that a verification writes, ``[rows * draft_token_num]`` int64."""
    return _following(req_pool_indices, req_to_token, start_offset, draft_token_num)


def _following(rows: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, count: int) -> torch.Tensor:
    positions = starts.to(torch.int64)[:, None] + torch.arange(count)
    return table[rows.to(torch.int64)[:, None], positions].reshape(-1).to(torch.int64)


def last_slots(table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the slot of each row's last token, -1 of an empty one, as SGLang's attention on torch_native gets it."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(table, rows, lengths)


def seen_lengths(new: torch.Tensor, lengths: torch.Tensor, total_len: int, max_q_len: int) -> torch.Tensor:
    """Return how many tokens each of some new tokens sees, ``[total_len]`` int32; ``lengths`` have the new ones."""
    within = torch.arange(total_len) - torch.repeat_interleave(new.cumsum(0) - new, new)
    return (torch.repeat_interleave(lengths - new, new) + within + 1).to(torch.int32)


def carried(indices: torch.Tensor, *kept: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return rows of what requests carry from one round to the next."""
    return tuple(rows if rows is None else rows[indices] for rows in kept)


def build_chain(
    parents: torch.Tensor,
    chosen: torch.Tensor,
    seq_lens: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    topk: int,
    steps: int,
    width: int,
    mode: int,
) -> None:
    """Fill positions and links of a chain; the mask is not read, as attention is causal."""
    steps_along = torch.arange(width)
    positions.copy_((seq_lens.to(torch.int64)[:, None] + steps_along).reshape(-1))
    index.copy_(torch.arange(index.numel()).view_as(index))
    next_token.copy_(torch.cat([steps_along[1:], steps_along.new_full((1,), -1)]).expand_as(next_token))


def verify_chain(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept the drafts of each row up to the first one that the target does not choose, and write the target's tokens.

    Returns:
        The first three arguments, which it has filled.
    """
    right = (candidates[:, 1:] == target_predict[:, :-1]).to(torch.int32).cumprod(1)
    count, width = right.sum(1), accept_index.shape[1]
    taken = torch.arange(width) <= count[:, None]
    index = torch.arange(candidates.numel()).view_as(candidates)[:, :width]
    accept_index.copy_(torch.where(taken, index, -1))
    accept_token_num.copy_(count)
    predicts.copy_(target_predict.reshape(-1))
    return predicts, accept_index, accept_token_num


def sample_chain(*, target_probs: torch.Tensor, **filled: Any) -> None:
    """Draw the target's tokens from ``[rows, width, vocabulary]``, and accept the drafts that are the same."""
    drawn = torch.multinomial(target_probs.flatten(0, 1), 1).view(target_probs.shape[:2])
    verify_chain(target_predict=drawn, **filled)


def keep_top_k(probs: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of each row's likeliest tokens, so many of them, which sum to 1; zeros elsewhere."""
    ranks = probs.argsort(-1, descending=True).argsort(-1)
    kept = probs.where(ranks < counts.view(-1, 1), 0)
    return kept / kept.sum(-1, keepdim=True)


def last_accepted(accepted: torch.Tensor, lengths: torch.Tensor, bonus: torch.Tensor, stride: int, rows: int) -> None:
    """Write each row's last accepted token to ``bonus``; ``accepted`` has ``stride`` tokens a row."""
    last = accepted.view(rows, stride).gather(1, lengths.to(torch.int64)[:, None] - 1)
    bonus.copy_(last[:, 0])


def draft_backends(factory: Any) -> Any:
    """Return what SGLang asks the attention of all steps of; None for a single one, which attends to nothing."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    if factory.speculative_num_steps <= 1:
        return None
    steps = [TorchNativeAttnBackend(factory.draft_model_runner) for _ in range(factory.speculative_num_steps - 1)]
    for step, backend in enumerate(steps):
        backend._run_sdpa_forward_decode = partial(_attend_to_more, backend._run_sdpa_forward_decode, step + 1)
    return SimpleNamespace(attn_backends=steps, init_forward_metadata=lambda _: None, needs_cpu_seq_lens=False)


def _attend_to_more(decode: Callable[..., torch.Tensor], tokens: int, *args: Any, **options: Any) -> torch.Tensor:
    """Decode rows that have so many tokens more: those of the steps before, and the one that this step writes."""
    *tensors, seq_lens, encoder_lens = args
    return decode(*tensors, seq_lens + tokens, encoder_lens, **options)


def no_extend_backend(factory: Any) -> None:
    """Leave the pass that writes a drafter's KV of prompts and accepted tokens to its own backend."""
