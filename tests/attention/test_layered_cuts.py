"""Prefill methods by layer where passes cut prompts, and methods of third parties among them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusals import refused

from sglang_sparse.attention.prefill import PrefillPath
from sglang_sparse.config.settings import build
from sglang_sparse.methods.anchor import Anchor, AnchorConfig
from sglang_sparse.methods.groups import PrefillGroups
from sglang_sparse.scheduler import prefill_chunks

TOKENS, HEADS, DIM, PAGE, LAYERS = 600, 2, 16, 16, 4
GENERATOR = torch.Generator().manual_seed(0)
CACHE = torch.randn(TOKENS, 1, DIM, generator=GENERATOR)
QUERIES = torch.randn(LAYERS, TOKENS, HEADS * DIM, generator=GENERATOR)


def anchor(step: int, theta: float) -> dict[str, Any]:
    return {"method": "anchor", "block_size": 16, "step": step, "theta": theta}


RULES = {
    "0": anchor(2, 1.0),
    "1": anchor(8, 2.0),
    "2": {"method": "skip_softmax", "threshold_scale_factor": 300.0},
    "3": anchor(16, 1.5),
}


def run(method: PrefillGroups, layers: list[int], ends: list[int]) -> tuple[dict[int, torch.Tensor], list[int]]:
    """A prompt in passes that end there: outputs by layer, NaN where the dense backend attends, and pairs."""
    pool = SimpleNamespace(get_key_buffer=lambda _: CACHE, get_value_buffer=lambda _: CACHE)
    path = PrefillPath(method, layers, pool, torch.arange(TOKENS).view(1, TOKENS), PAGE, HEADS)
    state: Any = SimpleNamespace(cut=None)
    start, found = 0, {layer: torch.full((ends[-1], HEADS * DIM), torch.nan) for layer in layers}
    for end in ends:
        cuts = prefill_chunks.follow_cuts(state, start, end, ends[-1], method)
        path.begin(
            [*prefill_chunks.split_prompt(0, start, end, ends[-1], method, cuts)], torch.zeros(1, dtype=torch.int64)
        )
        for layer_id in filter(path.takes, layers):
            layer: Any = SimpleNamespace(layer_id=layer_id, tp_q_head_num=HEADS, qk_head_dim=DIM, v_head_dim=DIM)
            layer.scaling, layer.k_scale_float, layer.v_scale_float, layer.logit_cap = 0.25, None, None, 0.0
            query = QUERIES[layer_id, start:end]
            found[layer_id][start:end] = path.attend(query, query, query, layer, torch.arange(end - start), False)
        start = end
    return found, [*path.device_totals(path.pairs.tolist()).values()][:2]


@settings(max_examples=12, deadline=None)
@given(
    ends=st.lists(st.integers(1, TOKENS - 1), max_size=6, unique=True),
    crossover=st.sampled_from([0, 256, 300]),
    tail=st.sampled_from([0, 20]),
    partial=st.booleans(),
)
def test_layers_of_a_cut_prompt_are_those_of_their_part_alone(
    ends: list[int], crossover: int, tail: int, partial: bool
) -> None:
    fields = {"crossover_tokens": crossover, "dense_tail": tail, "share_partial_groups": partial}
    method = build(None, {}, "anchor", {"layers": RULES, **fields}).prefill
    assert method is not None and method.group_tokens == 256
    # Where a pass ends between two groups of a part, and within a common one, the part alone has nothing to go on with.
    whole = [end for end in ends if any(part.boundary(end) == end for part in method.methods)]
    assume(partial or all(method.boundary(end) == end for end in whole))
    ends = [*sorted(ends), TOKENS]
    found, pairs = run(method, [*range(LAYERS)], ends)
    alone = [run(PrefillGroups(["one"], [part]), [layer], ends) for layer, part in enumerate(method.methods)]
    for layer, (own, _) in enumerate(alone):
        torch.testing.assert_close(found[layer], own[layer], equal_nan=True)
    assert pairs == [sum(counted) for counted in zip(*(own for _, own in alone), strict=True)]


class Late(Anchor):
    """Begins a group after it is told to."""

    @property
    def dense_below(self) -> int:
        return super().dense_below + self.group_tokens


class Sharing(Anchor):
    """Shares by a rule of its own."""

    def boundary(self, position: int) -> int:
        return position


@pytest.mark.parametrize("other", [Late, Sharing])
def test_methods_that_begin_or_share_by_rules_of_their_own_stand_alone(other: type[Anchor]) -> None:
    parts = [other(AnchorConfig(layers="0")), Anchor(AnchorConfig(layers="1"))]
    with refused("layers", "late"):
        PrefillGroups(["late", "anchor"], parts)


def test_groups_that_no_prompt_has_are_refused() -> None:
    method = build(None, {}, "anchor", {"layers": {"0": {"step": 61}, "1": {"step": 59}}}).prefill
    model: Any = SimpleNamespace(
        attention_arch=SimpleNamespace(name="MHA"), num_hidden_layers=2, context_len=131072, hf_config=None
    )
    assert method is not None
    said = str(method.refuse(model))
    assert (
        "groups of all layers have 460672 tokens (7808 of anchor, 7552 of anchor), and the context has 131072" in said
    )
