"""The pass that ranks of data-parallel attention run together: its sizes, and whether all replay a graph."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

from sglang_sparse.config.settings import build
from sglang_sparse.scheduler import joint_pass
from sglang_sparse.scheduler.due_rows import Rectification
from sglang_sparse.scheduler.partial_batch import STEP

# Tokens, rows, urgency and graph of each rank, behind a number of SGLang's.
RANKS = {
    "graphs everywhere": ([[9, 32, 2, 1, 1], [9, 20, 1, 0, 1]], True),
    "one without": ([[9, 32, 2, 1, 1], [9, 20, 1, 0, 0]], False),
    "one idle": ([[9, 32, 2, 1, 1], [9, 0, 0, 0, 0]], False),
    "nothing left": ([[9, 32, 4, 1, 1], [9, 20, 4, 0, 1]], True),
}


@pytest.fixture(autouse=True)
def resa(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = build("resa", {})
    monkeypatch.setattr(joint_pass, "current_settings", lambda: settings)


@pytest.mark.parametrize("name", RANKS)
def test_all_ranks_replay_a_graph_or_none(name: str) -> None:
    gathered, graph = RANKS[name]
    batch: Any = SimpleNamespace(global_num_tokens=[4, 4], global_num_tokens_for_logprob=[4, 4])
    info = SimpleNamespace(tp0_info_cpu=torch.tensor(gathered), global_num_tokens=batch.global_num_tokens)
    joint_pass.attach(None, batch, info)
    joint = getattr(batch, STEP)
    rows = [row[2] for row in gathered]
    assert batch.global_num_tokens == [4 - count for count in rows] and joint.whole_step is (rows == [4, 4])
    view = joint.set_sizes(SimpleNamespace())
    assert view.can_run_dp_prefill_cuda_graph is graph and not view.can_run_decode_cuda_graph
    assert (view.global_num_tokens, view.global_num_tokens_for_logprob) == ([row[1] for row in gathered], rows)


def test_nothing_is_joined_before_a_deadline() -> None:
    batch: Any = SimpleNamespace(global_num_tokens=[4, 4], global_num_tokens_for_logprob=[4, 4])
    joint_pass.attach(None, batch, SimpleNamespace(tp0_info_cpu=torch.tensor([[9, 32, 2, 0, 1]] * 2)))
    assert getattr(batch, STEP) is None and batch.global_num_tokens == [4, 4]


@pytest.mark.parametrize("holds", [True, False])
def test_a_rank_asks_the_graphs_runner_as_it_is_asked_later(monkeypatch: pytest.MonkeyPatch, holds: bool) -> None:
    """The vote before the pass and SGLang's own question within it must have one answer."""
    asked: list[dict[str, object]] = []

    class Graphs(PrefillCudaGraphRunner):
        def __init__(self) -> None:
            pass

        def can_replay_locally(self, **of: object) -> bool:
            asked.append(of)
            return holds

    spans = [SimpleNamespace(start=96, end=130, tokens=34), SimpleNamespace(start=16, end=20, tokens=4)]
    batch: Any = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    plan = Rectification(batch, [0, 1], spans, [0, 0], [[0, 1]])  # type: ignore[arg-type]
    monkeypatch.setattr(joint_pass, "plan_step", lambda *_, **__: plan)
    settings = joint_pass.current_settings()
    monkeypatch.setattr(joint_pass, "hooked_settings_of", lambda _: settings)
    monkeypatch.setattr(joint_pass, "pass_tokens", lambda _: 8192)
    runner: Any = SimpleNamespace(server_args=None, prefill_cuda_graph_runner=Graphs())

    def gather(*_: object) -> torch.Tensor:
        return joint_pass.append_plan(torch.tensor([7]))

    row: Any = joint_pass.plan_first(gather, batch, runner)  # type: ignore[arg-type]
    assert row.tolist() == [7, 38, 2, 1, int(holds)]
    (of,) = asked
    assert of["batch_size"] == 2 and of["num_tokens"] == 38 and of["prefix_lens"] == [96, 16]
    assert of["batch_max_context_len"] == 130 and not of["return_logprob"] and not of["is_target_verify"]
    assert joint_pass.append_plan(torch.tensor([7])).tolist() == [7, 0, 0, 0, 0]
