"""The definition of anchor attention in plain torch."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .means import GroupMeans, earlier_means
from .plan import AnchorPlan, GroupPart, QueryBlock, Slice


class State(NamedTuple):
    """Online softmax of some queries: maximum (natural units) and sum ``[Hkv, G, n]``, output ``[Hkv, G, n, dv]``."""

    maximum: torch.Tensor
    total: torch.Tensor
    output: torch.Tensor


class Means(NamedTuple):
    """Mean query ``[n, Hkv, G, d]`` and mean anchor ``[n, Hkv, G]``, in natural units, of the last blocks of a row."""

    query: torch.Tensor
    anchor: torch.Tensor

    @classmethod
    def read(cls, held: GroupMeans | None, num_kv_heads: int, scale: float) -> "Means | None":
        """Those that an earlier pass has handed on, if it has."""
        if held is None:
            return None
        queries, anchors = (kept.unflatten(1, (num_kv_heads, -1)).float() for kept in (held.queries, held.anchors))
        return cls(queries, anchors * scale)

    def hand_on(self, held: GroupMeans, scale: float) -> None:
        """Leave them for a later pass."""
        count = min(len(self.query), len(held.queries))
        held.queries[-count:] = self.query[-count:].flatten(1, 2)
        held.anchors[-count:] = self.anchor[-count:].flatten(1, 2) / scale


class Row(NamedTuple):
    """One row's keys and values: the pool, and the slot of each position up to the last one in use."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor

    def read(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[Hkv, T, d]`` and values ``[Hkv, T, dv]`` in float32."""
        slots = self.slots[positions]
        return self.k_cache[slots].float().transpose(0, 1), self.v_cache[slots].float().transpose(0, 1)


def anchor_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    plan: AnchorPlan,
    theta: torch.Tensor,
    page_size: int,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    out: torch.Tensor,
    stats: torch.Tensor | None = None,
    means: Mapping[int, GroupMeans] | None = None,
    replace: Callable[[torch.Tensor, int, int], torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``anchor_prefill.anchor_prefill``.

    For controls, ``replace`` gets the keys before a query block that are attended to, ``[Hkv, G, keys]`` bool, and how
    many of the first and of the last are so whatever their score; it returns as many others to take instead. Groups
    that have nothing to choose from are left as they are.
    """
    attended = plan.anchor_pairs * q.shape[1]
    scale = sm_scale * k_scale
    means, latest = means or {}, dict[int, Means]()
    for piece in plan.slices:
        window = slice(piece.first_query, piece.first_query + piece.num_queries)
        queries, results = _by_kv_head(q[window], k_cache.shape[1]), out[window]
        for number, part in enumerate(piece.parts):
            blocks = piece.blocks[part.first_block : part.first_block + part.num_blocks]
            row = _row(k_cache, v_cache, page_table, part, blocks, page_size)
            states = [_anchor(queries, row, block, plan.block_size, scale) for block in blocks]
            before = latest.get(part.row) or Means.read(means.get(part.row), k_cache.shape[1], scale)
            latest[part.row] = known = _means(queries, states, piece, number, before)
            active = _hit(_gaps(known, row, part, plan.block_size, scale), theta[part.row]).any(0)
            attended += int(active.sum()) * part.num_queries
            for block, state in zip(blocks, states, strict=True):
                query, keys, first = _of_block(queries, block), active, plan.block_size
                if replace and part.candidates:
                    start = block.block * plan.block_size
                    last = start - block.window + min(first, part.candidates)
                    keys = replace(F.pad(active, (first, start - block.window), value=True), first, last)
                    state, first = _anchor(queries, row, block._replace(window=start), 0, scale), 0
                state = _resume(query, row, keys, state, first, scale)
                total = _with_sinks(state, sinks)
                result = (state.output / total[..., None] * v_scale).flatten(0, 1)
                results[block.first_query : block.first_query + block.num_queries] = result.transpose(0, 1)
    for row in latest.keys() & means.keys():
        latest[row].hand_on(means[row], scale)
    if stats is not None:
        stats += torch.tensor([attended, plan.causal_pairs * q.shape[1]], device=stats.device)
    return out


def key_gaps(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    plan: AnchorPlan,
    page_size: int,
    sm_scale: float,
    k_scale: float,
    row: int,
    group: int,
    means: Mapping[int, GroupMeans] | None = None,
) -> torch.Tensor:
    """Return the distance of each candidate key of a row's group below the anchor, in natural logarithm units.

    Returns:
        ``[means, Hq, candidates]`` float32: mean anchor of the query block minus its mean query's logit; negative
        infinity for the block before the group. Candidate ``c`` is the key at position ``block_size + c``. Blocks whose
        means are carried come first.

    Raises:
        ValueError: the pass has no sparse query of this group.
    """
    scale, heads = sm_scale * k_scale, k_cache.shape[1]
    known = Means.read((means or {}).get(row), heads, scale)
    for piece in plan.slices:
        queries = _by_kv_head(q[piece.first_query : piece.first_query + piece.num_queries], heads)
        for number, part in enumerate(piece.parts):
            # What comes before the group before has no part in it.
            if part.row != row or part.group < group - 1:
                continue
            blocks = piece.blocks[part.first_block : part.first_block + part.num_blocks]
            keys = _row(k_cache, k_cache, page_table, part, blocks, page_size)
            states = [_anchor(queries, keys, block, plan.block_size, scale) for block in blocks]
            known = _means(queries, states, piece, number, known)
            # The dense part of a group that a sparse range cuts looks for no keys.
            if (part.group, blocks[0].window) == (group, group * plan.step * plan.block_size):
                return _gaps(known, keys, part, plan.block_size, scale).flatten(1, 2)
    raise ValueError(f"row {row} has no sparse query of group {group} in this pass")


def active_keys(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    plan: AnchorPlan,
    theta: torch.Tensor,
    page_size: int,
    sm_scale: float,
    k_scale: float,
    row: int,
    group: int,
    means: Mapping[int, GroupMeans] | None = None,
) -> torch.Tensor:
    """Return the active candidate keys of a row's group, ``[Hq, candidates]`` bool; see ``key_gaps``."""
    gaps = key_gaps(q, k_cache, page_table, plan, page_size, sm_scale, k_scale, row, group, means)
    return _hit(gaps, theta[row]).any(0)


def _with_sinks(state: State, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return state.total
    return state.total + (sinks.float().view(*state.total.shape[:2], 1) - state.maximum).exp()


def _by_kv_head(q: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    return q.float().transpose(0, 1).unflatten(0, (num_kv_heads, -1))


def _of_block(queries: torch.Tensor, block: QueryBlock) -> torch.Tensor:
    return queries[:, :, block.first_query : block.first_query + block.num_queries]


def _row(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    part: GroupPart,
    blocks: tuple[QueryBlock, ...],
    page_size: int,
) -> Row:
    positions = torch.arange(blocks[-1].first_position + blocks[-1].num_queries, device=page_table.device)
    pages = page_table[part.row, positions // page_size].long()
    return Row(k_cache, v_cache, pages * page_size + positions % page_size)


def _anchor(queries: torch.Tensor, row: Row, block: QueryBlock, initial: int, scale: float) -> State:
    """Attention of one block over so many initial keys and its group's keys up to the diagonal."""
    query = _of_block(queries, block)
    start, end = block.window, block.first_position + block.num_queries
    local = torch.arange(start, end, device=query.device)
    keys = torch.cat([torch.arange(min(initial, start), device=query.device), local])
    causal = keys <= torch.arange(block.first_position, end, device=query.device)[:, None]
    shape = query.shape[:3]
    empty = State(
        query.new_full(shape, float("-inf")), query.new_zeros(shape), query.new_zeros(*shape, row.v_cache.shape[2])
    )
    return _continue(empty, query, *row.read(keys), causal, scale)


def _means(queries: torch.Tensor, states: list[State], piece: Slice, number: int, latest: Means | None) -> Means:
    """Means of the blocks that look for a part's keys, of which ``latest`` has those before its own as its last."""
    part = piece.parts[number]
    blocks = piece.blocks[part.first_block : part.first_block + part.num_blocks]
    query = torch.stack([_of_block(queries, block).mean(2) for block in blocks])
    anchor = torch.stack([state.maximum.mean(2) for state in states])
    count = earlier_means(piece, number)
    if latest is None or not count:
        return Means(query, anchor)
    before = Means(latest.query[-count:], latest.anchor[-count:])
    if earlier := blocks[0].earlier:
        total = earlier + blocks[0].num_queries
        query[0] = (query[0] * blocks[0].num_queries + before.query[-1] * earlier) / total
        anchor[0] = (anchor[0] * blocks[0].num_queries + before.anchor[-1] * earlier) / total
    whole = part.num_means - part.num_blocks
    return Means(torch.cat([before.query[:whole], query]), torch.cat([before.anchor[:whole], anchor]))


def _gaps(means: Means, row: Row, part: GroupPart, block_size: int, scale: float) -> torch.Tensor:
    """``[means, Hkv, G, candidates]``."""
    keys = row.k_cache[row.slots[block_size : block_size + part.candidates]].float()
    gaps = means.anchor[..., None] - means.query @ keys.permute(1, 2, 0) * scale
    # The block right before the group is as near as a key can be.
    gaps[..., max(0, part.candidates - block_size) :] = float("-inf")
    return gaps


def _hit(gaps: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    """A key whose gap is infinite or NaN counts as hit, so that it shows in the output as in dense attention."""
    return ~((gaps > theta) & (gaps < float("inf")))


def _resume(query: torch.Tensor, row: Row, active: torch.Tensor, state: State, first: int, scale: float) -> State:
    """Go on over the keys from the ``first`` on that are active for any head, each head over its own of them."""
    union = active.flatten(0, 1).any(0).nonzero().flatten()
    if not len(union):
        return state
    keys, values = row.read(first + union)
    return _continue(state, query, keys, values, active[:, :, None, union], scale)


def _continue(
    state: State, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, allowed: torch.Tensor, scale: float
) -> State:
    heads, group, count, _ = query.shape
    logits = (query.flatten(1, 2) @ keys.transpose(1, 2)).view(heads, group, count, -1).mul_(scale)
    logits.masked_fill_(~allowed, float("-inf"))
    maximum = torch.maximum(state.maximum, logits.amax(-1))
    # Infinite keys may leave a query without any finite logit, and -inf - -inf would be NaN.
    finite = maximum.masked_fill(maximum == float("-inf"), 0.0)
    weights = logits.sub_(finite[..., None]).exp_()
    decay = (state.maximum - finite).exp()
    output = (weights.flatten(1, 2) @ values).view(heads, group, count, -1)
    return State(maximum, state.total * decay + weights.sum(-1), state.output * decay[..., None] + output)
