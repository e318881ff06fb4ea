"""Checks of a KT selection that allow for the rounding of its scores."""

from typing import Any

import torch

from sglang_sparse_kernels.kt_select import TABLES
from sglang_sparse_kernels.kt_select.reference import kt_score, visible_blocks

# By which rounding may change a score.
TOLERANCE = 1e-3


def selected(found: Any, arguments: dict[str, Any]) -> list[list[list[int]]]:
    """The logical blocks that each KV head of each row selects, of a result."""
    tables = zip(arguments["block_table"].tolist(), arguments["n_blocks"].tolist(), strict=True)
    rows = zip(tables, found[0].tolist(), found[1].tolist(), strict=True)
    return [
        [[table[:held].index(block) for block in head[:count]] for head, count in zip(blocks, counts, strict=True)]
        for (table, held), blocks, counts in rows
    ]


def check(found: Any, arguments: dict[str, Any]) -> None:
    """Of ``indices``, ``counts`` and counters: the highest of the visible blocks in their order, nothing beyond."""
    indices, counts, stats = (tensor.cpu() for tensor in found)
    given: dict[str, Any] = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
    }
    shape, expected = indices.shape, torch.zeros(3, dtype=torch.int64)
    options: dict[str, Any] = {"dtype": torch.int32}
    lists = torch.empty(shape, **options), torch.empty(shape[:2], **options), torch.empty(shape[:2], **options)
    visible, held, wanted = visible_blocks(*(given[name] for name in TABLES), out=lists, stats=expected)
    assert torch.equal(counts, wanted) and torch.equal(stats, expected)
    scores = torch.empty(shape)
    if scores.numel():
        kt_score(given["q"], given["summary"], visible, held, given["topr"], given["sm_scale"], scores)
    for row in range(shape[0]):
        for head in range(shape[1]):
            blocks = visible[row, head, : held[row, head]].tolist()
            chosen = indices[row, head, : wanted[row, head]].tolist()
            place_of = {block: place for place, block in enumerate(blocks)}
            places = [place_of[block] for block in chosen]
            assert places == sorted(set(places)) and (indices[row, head, len(chosen) :] == -1).all()
            others = sorted(set(range(len(blocks))) - set(places))
            if places and others:
                own = scores[row, head]
                assert places[-1] == len(blocks) - 1, "the newest"
                least, most = own[places].min(), own[others].max()
                assert least >= most - TOLERANCE * max(1.0, abs(float(most)) * 1e-2), (row, head, least, most)
