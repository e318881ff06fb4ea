"""This project's selection behind SGLang's logits: the definition's, whatever form SGLang's attention wants it in."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sparse.attention.dsa import native_indexer
from sglang_sparse.config.settings import build

PAGE, TOPK = 64, 8
LENGTHS, NEW = [70, 5, 150], [3, 5, 2]
TABLE = torch.tensor([[4, 9, 0], [7, 0, 0], [2, 5, 8]], dtype=torch.int32)


def no_original(*_: Any, **__: Any) -> torch.Tensor:
    raise AssertionError("SGLang's own function ran")


def serve(monkeypatch: pytest.MonkeyPatch, fused: bool = True) -> Any:
    method = build("dsa", {"implementation": "auto"}).method
    backend = SimpleNamespace(method=method, view=None, dense=SimpleNamespace(use_fused_topk=fused))
    monkeypatch.setattr(native_indexer, "served_backend", lambda: backend)
    return backend


def best(logits: torch.Tensor) -> list[int]:
    """Positions of the highest, ties to the lowest, ascending."""
    return logits.sort(descending=True, stable=True).indices[:TOPK].sort().values.tolist()


class Extend:
    """A pass over the last tokens of some requests, as SGLang makes logits for it: side by side."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.rows = [row for row, new in enumerate(NEW) for _ in range(new)]
        self.seen = [length - new + i + 1 for length, new in zip(LENGTHS, NEW, strict=True) for i in range(new)]
        self.starts = torch.tensor([[0, 70, 75][row] for row in self.rows], dtype=torch.int32)
        # Whole numbers, so that many are equal; beyond a query's tokens SGLang leaves anything.
        self.logits = torch.randint(0, 6, (len(self.rows), sum(LENGTHS)), generator=generator).float()
        self.logits[0, 71], self.logits[4, 0] = float("inf"), float("nan")
        self.positions = [
            best(self.logits[query, start : start + seen])
            for query, (start, seen) in enumerate(zip(self.starts.tolist(), self.seen, strict=True))
        ]

    def metadata(self, offsets: torch.Tensor | None = None) -> Any:
        batch = SimpleNamespace(
            real_page_table=TABLE,
            token_to_batch_idx=torch.tensor(self.rows, dtype=torch.int32),
            topk_indices_offset=offsets,
        )
        seen = torch.tensor(self.seen, dtype=torch.int32)
        return SimpleNamespace(attn_metadata=batch, get_seqlens_expanded=lambda: seen)

    def padded(self, name: Any) -> list[list[int]]:
        found = [[name(query, position) for position in mine] for query, mine in enumerate(self.positions)]
        return [mine + [-1] * (TOPK - len(mine)) for mine in found]

    def slot(self, query: int, position: int) -> int:
        return int(TABLE[self.rows[query], position // PAGE]) * PAGE + position % PAGE


def test_slots_of_a_pass_of_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    extend = Extend()
    found = native_indexer.choose(no_original, extend.metadata(), extend.logits, TOPK, extend.starts)
    assert found.dtype == torch.int32 and found.tolist() == extend.padded(extend.slot)


def test_positions_where_sglang_looks_slots_up(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, fused=False)
    extend = Extend()
    found = native_indexer.choose(no_original, extend.metadata(), extend.logits, TOPK, extend.starts)
    assert found.tolist() == extend.padded(lambda _, position: position)


@pytest.mark.parametrize("offsets", [False, True], ids=["slots", "a copy of the cache"])
def test_a_part_of_a_pass(offsets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang cuts passes whose logits would be too large, through the middle of requests."""
    serve(monkeypatch)
    extend, part = Extend(), slice(2, 9)
    metadata = extend.metadata(extend.starts if offsets else None)
    some = torch.tensor(extend.rows, dtype=torch.int32)[part]
    lengths = torch.tensor(extend.seen, dtype=torch.int32)[part]
    given = {"topk_indices_offset_override": extend.starts[part]} if offsets else {"batch_idx_list": some}
    found = native_indexer.choose(
        no_original, metadata, extend.logits[part].clone(), TOPK, extend.starts[part], ke_offset=lengths, **given
    )
    starts = extend.starts.tolist()
    expected = extend.padded((lambda query, position: starts[query] + position) if offsets else extend.slot)
    assert found.tolist() == expected[part]


def test_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    logits = torch.arange(3 * 3 * PAGE).float().reshape(3, -1)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    batch = SimpleNamespace(real_page_table=TABLE, token_to_batch_idx=None, topk_indices_offset=None)
    metadata = SimpleNamespace(attn_metadata=batch, get_seqlens_expanded=lambda: lengths)
    # As of a wider buffer.
    found = native_indexer.choose(no_original, metadata, torch.cat([logits, logits], 1)[:, : 3 * PAGE], TOPK)
    first = [length - TOPK for length in LENGTHS]
    expected = [[int(TABLE[0, 0]) * PAGE + first[0] + i for i in range(2)]]
    expected[0] += [int(TABLE[0, 1]) * PAGE + i for i in range(6)]
    expected += [[int(TABLE[1, 0]) * PAGE + i for i in range(5)] + [-1] * 3]
    expected += [[int(TABLE[2, 2]) * PAGE + first[2] - 2 * PAGE + i for i in range(TOPK)]]
    assert found.tolist() == expected


@pytest.mark.parametrize("stage", ["indexer", "topk"])
def test_what_sglang_prepares_for_its_own_kernels_is_left_out_with_them(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SimpleNamespace(sparse_method="dsa", sparse_prefill_method=None, sparse_config=None)
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: args)
    prepared = torch.ones(3)
    lengths = torch.ones(2, 1, dtype=torch.int32)
    for choice in ("native", "portable"):
        args.sparse_config = f'{{"implementation": "{choice}"}}'
        if stage == "indexer":
            found = native_indexer.schedule(lambda *_: prepared)(lengths, 64, 132)
            assert (found is prepared) == (choice == "native") and isinstance(found, torch.Tensor)
        else:
            found = native_indexer.plan(lambda *_: prepared, None, lengths)
            assert found is (prepared if choice == "native" else None)


def test_sglangs_own_selection_is_asked_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_indexer, "served_backend", lambda: None)
    arguments = [object() for _ in range(8)]
    given: list[Any] = []

    def original(metadata: Any, logits: Any, topk: Any, ks: Any, q: Any, ke: Any, **some: Any) -> Any:
        given.extend([metadata, logits, topk, ks, q, ke, some["batch_idx_list"], some["topk_indices_offset_override"]])
        return "asked"

    choose: Any = native_indexer.choose
    assert choose(original, *arguments) == "asked" and given == arguments
