"""SPARSE_SELF as SGLang sees it: registered once, complete, and with state that follows its rows."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import get_spec

from sglang_sparse.config.arguments import SPARSE_SELF
from sglang_sparse.scheduler.speculation import algorithm, graphs
from sglang_sparse.scheduler.speculation import relay as module
from sglang_sparse.scheduler.speculation.algorithm import Carried, SparseSelf
from sglang_sparse.scheduler.speculation.worker import SparseSelfWorker


@pytest.fixture
def registered() -> SparseSelf:
    algorithm.register()
    found = get_spec(SPARSE_SELF)
    assert isinstance(found, SparseSelf)
    return found


def test_it_is_registered_once(registered: SparseSelf) -> None:
    """Plugins are loaded in each process, and again where a test loads them."""
    algorithm.register()
    assert get_spec(SPARSE_SELF) is registered
    assert SpeculativeAlgorithm.from_string("sparse_self") is registered
    assert registered.create_worker(SimpleNamespace(disable_overlap_schedule=False)) is SparseSelfWorker


def test_it_answers_what_the_scheduler_asks(registered: SparseSelf) -> None:
    assert registered.is_some() and not registered.is_none() and registered.supports_grammar_overlap()
    # What another algorithm would be asked for, and what mixed batches of it would be.
    asked = ("is_eagle", "is_dflash", "is_ngram", "is_uno", "is_standalone", "supports_mixed_chunk")
    assert [name for name in asked if getattr(registered, name)()] == []
    assert not (registered.need_topk() or registered.carries_draft_hidden_states() or registered.has_draft_kv())
    pool: Any = SimpleNamespace(req_to_token=torch.zeros(4, 8, dtype=torch.int32), size=3)
    relay = registered.create_future_map(torch.device("cpu"), pool)
    assert isinstance(relay, FutureMap)


def test_the_host_gets_bounds_first_and_lengths_when_it_asks(
    registered: SparseSelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=7))
    pool: Any = SimpleNamespace(req_to_token=torch.zeros(14, 8, dtype=torch.int32), size=13)
    relay = registered.create_future_map(torch.device("cpu"), pool)
    batch: Any = SimpleNamespace(
        spec_info=carried(3, 1, future=True),
        req_pool_indices_cpu=torch.tensor([13, 11]),
        reqs=[SimpleNamespace(kv=SimpleNamespace(kv_committed_len=length)) for length in (100, 50)],
    )
    relay.new_seq_lens_buf[torch.tensor([13, 11])] = torch.tensor([104, 57])
    relay.resolve_seq_lens_cpu(batch)
    assert batch.seq_lens.tolist() == [104, 57] and batch.seq_lens_cpu.tolist() == [107, 57]
    assert batch.seq_lens_sum == 164 and batch.spec_info.late_lengths().tolist() == [104, 57]


def test_without_overlap_the_lengths_are_known(registered: SparseSelf) -> None:
    pool: Any = SimpleNamespace(req_to_token=torch.zeros(4, 8, dtype=torch.int32), size=3)
    batch: Any = SimpleNamespace(spec_info=carried(1), seq_lens_cpu=torch.tensor([5]))
    registered.create_future_map(torch.device("cpu"), pool).resolve_seq_lens_cpu(batch)
    assert batch.seq_lens_cpu.tolist() == [5] and batch.spec_info.late_lengths is None


@pytest.mark.parametrize(("given", "steps"), [(None, 6), (1, 1), (16, 16)])
def test_its_numbers_follow_from_the_drafts(registered: SparseSelf, given: int | None, steps: int) -> None:
    args: Any = SimpleNamespace(speculative_num_steps=given, speculative_eagle_topk=None)
    registered.handle_server_args(args)
    assert (args.speculative_num_steps, args.speculative_num_draft_tokens) == (steps, steps + 1)
    assert args.speculative_eagle_topk == 1


def carried(*rows: int, future: bool = False) -> Carried:
    """The state of rows: row r has token r and 100 + r tokens of KV, and place 10 + r in the relay."""
    found = Carried(torch.tensor(rows), torch.tensor(rows) + 100)
    found.future_indices = torch.tensor(rows) + 10 if future else None
    return found


def rows_of(state: Carried) -> tuple[list[int], list[int]]:
    return state.bonus_tokens.tolist(), [length - 100 for length in state.new_seq_lens.tolist()]


Change = Callable[[Carried], None]
CHANGES: list[tuple[Change, list[int]]] = [
    (lambda state: state.filter_batch(torch.tensor([2, 0])), [3, 1]),
    (lambda state: state.filter_batch(torch.tensor([1]), [1]), [2]),
    (lambda state: state.filter_batch(torch.tensor([], dtype=torch.int64)), []),
    (lambda state: state.merge_batch(carried(8, 9)), [1, 2, 3, 8, 9]),
]


@pytest.mark.parametrize(("change", "left"), CHANGES)
def test_state_follows_rows_that_leave_and_join(change: Change, left: list[int]) -> None:
    state = carried(1, 2, 3)
    change(state)
    assert rows_of(state) == (left, left)


def test_with_overlap_places_of_the_relay_follow_the_rows() -> None:
    """The tensors are those of the round before; the relay has the state by then."""
    state = carried(1, 2, 3, future=True)
    state.filter_batch(torch.tensor([2, 1]))
    state.merge_batch(carried(7, future=True))
    assert state.future_indices is not None and state.future_indices.tolist() == [13, 12, 17]
    assert rows_of(state) == ([1, 2, 3], [1, 2, 3])


def test_graphs_of_verifications_are_recorded_for_this_algorithm_alone(registered: SparseSelf) -> None:
    def runner_of(name: str | None) -> object:
        runner: Any = SimpleNamespace(server_args=SimpleNamespace(speculative_algorithm=name))
        return graphs.verify_runner(DecodeCudaGraphRunner, runner)

    assert runner_of(SPARSE_SELF) is graphs.VerifyGraphs
    assert runner_of("EAGLE") is runner_of(None) is DecodeCudaGraphRunner
    found = graphs.dummy_input(None, registered, None, 7, False)
    assert found is not None and found.draft_token_num == 7  # pyright: ignore[reportAttributeAccessIssue]
    other: Any = object()
    assert graphs.dummy_input(other, SpeculativeAlgorithm.EAGLE, None, 7, False) is other
