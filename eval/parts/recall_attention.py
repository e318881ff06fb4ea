"""The attention of a checkpoint, one layer at a time, and how much of it a selection of tokens keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eval.live.counters import EvaluationError

# The name under which transformers finds the attention function of this module.
IMPLEMENTATION = "captured"
# What transformers tells attention functions about a sliding window, a soft cap of the logits and attention sinks.
OTHER_ATTENTION = ("sliding_window", "softcap", "s_aux")
SELECTORS = ("method", "best", "random")


@dataclass(frozen=True)
class Captured:
    """What one layer's attention was computed from, after RoPE.

    Attributes:
        layer: its id.
        query: ``[queries, q_heads, head_dim]`` of the last positions.
        key: ``[tokens, kv_heads, head_dim]`` of all positions.
        value: ``[tokens, kv_heads, value_dim]``.
        scaling: factor of q·k.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float

    @property
    def positions(self) -> Tensor:
        """``[queries]`` int64, the position of each query; it sees the keys up to its own."""
        tokens = self.key.shape[0]
        return torch.arange(tokens - self.query.shape[0], tokens, device=self.key.device)


@dataclass(frozen=True)
class Selection:
    """What each KV head of each query attends to.

    Attributes:
        kept: ``[queries, kv_heads, tokens]`` bool.
        counts: ``[queries, kv_heads]`` int64, how many units that is.
        unit: tokens of a unit, which begin at its multiples: the page size, or 1.
    """

    kept: Tensor
    counts: Tensor
    unit: int


@dataclass(frozen=True)
class Judged:
    """How well each query head of a layer was served, by selector (see `judge`).

    Attributes:
        mass: ``[q_heads, queries]``, share of the attention mass that was kept.
        error: ``[q_heads, queries]``, relative L2 distance of the attention output to that of all tokens.
    """

    mass: dict[str, Tensor]
    error: dict[str, Tensor]


def load_model(path: str, device: str, dtype: torch.dtype) -> Any:
    """A causal language model of transformers whose attention can be captured.

    Raises:
        EvaluationError: it cannot be loaded, or computes attention in a way of its own.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, sdpa_attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=IMPLEMENTATION)
    except (OSError, ValueError) as error:
        raise EvaluationError(f"--model-path {path}: {str(error).splitlines()[0]}") from error
    return model.to(device).eval()


@torch.inference_mode()
def capture(model: Any, tokens: Sequence[int], queries: int, visit: Callable[[Captured], None]) -> None:
    """Run a prompt through a model of `load_model` and show every layer's attention to `visit` before it goes on.

    Nothing of a layer is kept, so that memory holds one of them.

    Args:
        model: as said.
        tokens: ids of the prompt.
        queries: how many of the last positions.
        visit: called once for each layer, in their order.

    Raises:
        EvaluationError: a layer does not let its attention be captured, or attends to something else than all tokens
            up to its own with a softmax of q·k; a server refuses such models.
    """
    from transformers import AttentionInterface

    seen: list[int] = []

    def show(captured: Captured) -> None:
        seen.append(captured.layer)
        visit(captured)

    AttentionInterface.register(IMPLEMENTATION, partial(_attend, show, queries))
    ids = torch.tensor([tokens], device=model.device)
    model.base_model(input_ids=ids, use_cache=False)
    layers = list(range(model.config.num_hidden_layers))
    if seen != layers:
        raise EvaluationError(f"{type(model).__name__} shows the attention of layers {seen}, it has {layers}")


def _attend(
    show: Callable[[Captured], None],
    queries: int,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layer = int(getattr(module, "layer_idx"))  # noqa: B009
    odd = [name for name in OTHER_ATTENTION if options.get(name) is not None]
    # All tokens up to one's own need no mask.
    odd += ["a mask of its own"] if attention_mask is not None else []
    if odd:
        raise EvaluationError(
            f"--model-path: the attention of layer {layer} has {odd[0]}, which no sparse server serves"
        )
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    last, keys, values = (part[0].transpose(0, 1) for part in (query[:, :, -queries:], key, value))
    show(Captured(layer, last, keys, values, scaling))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def judge(captured: Captured, selection: Selection, seed: int) -> Judged:
    """What a selection keeps, beside the best one of the same size and a random one.

    Both are made for each query and KV head alone. The best one has the units with the most attention mass, summed over
    the query heads of the group. The random one has the newest unit, which holds the query's own token, and any others.

    Args:
        captured: of a layer.
        selection: of the method under judgement ("method"); "best" and "random" have as many units.
        seed: of the random units.
    """
    generator = torch.Generator().manual_seed(seed)
    mass: dict[str, list[Tensor]] = {name: [] for name in SELECTORS}
    error: dict[str, list[Tensor]] = {name: [] for name in SELECTORS}
    for head in range(captured.key.shape[1]):
        weights = head_weights(captured, head)
        value = captured.value[:, head].float()
        dense = weights @ value
        for name, kept in _selections(captured, selection, head, weights, generator).items():
            chosen = weights * kept[:, None]
            total = chosen.sum(-1)
            # Without any mass the output is taken as 0, and the error is 1.
            output = chosen @ value / total[..., None].clamp_min(torch.finfo(total.dtype).tiny)
            mass[name].append(total)
            error[name].append((output - dense).norm(dim=-1) / dense.norm(dim=-1))
    return Judged(*({name: torch.cat(parts, 1).T for name, parts in found.items()} for found in (mass, error)))


def head_weights(captured: Captured, head: int) -> Tensor:
    """Attention weights ``[queries, group, tokens]`` float32 of the query heads of a KV head."""
    key = captured.key[:, head].float()
    group = captured.query.shape[1] // captured.key.shape[1]
    query = captured.query[:, head * group : (head + 1) * group].float()
    later = torch.arange(key.shape[0], device=key.device) > captured.positions[:, None]
    return (query @ key.T * captured.scaling).masked_fill(later[:, None], -torch.inf).softmax(-1)


def _selections(
    captured: Captured, selection: Selection, head: int, weights: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """``[queries, tokens]`` bool of every selector."""
    unit, counts, positions = selection.unit, selection.counts[:, head], captured.positions
    tokens = weights.shape[-1]
    padded = torch.nn.functional.pad(weights.sum(1), (0, -tokens % unit))
    masses = padded.unflatten(-1, (-1, unit)).sum(-1)
    own = (positions // unit)[:, None]
    place = torch.arange(masses.shape[1], device=masses.device)
    drawn = torch.rand(masses.shape, generator=generator).to(masses.device).masked_fill(place == own, torch.inf)
    found = {"best": masses, "random": drawn}
    seen = torch.arange(tokens, device=masses.device) <= positions[:, None]
    return {"method": selection.kept[:, head]} | {
        name: _highest(scores.masked_fill(place > own, -torch.inf), counts).repeat_interleave(unit, 1)[:, :tokens]
        & seen
        for name, scores in found.items()
    }


def _highest(scores: Tensor, counts: Tensor) -> Tensor:
    """Mask of the ``counts[i]`` highest scores of each row i."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    first = torch.arange(scores.shape[1], device=scores.device) < counts[:, None]
    return torch.zeros_like(first).scatter(-1, order, first)
