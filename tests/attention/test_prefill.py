"""Tests of which tokens of an extend pass count as prefill, and of the chunk length next to decoding rows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_sparse.attention.prefill import PrefillPath
from sglang_sparse.methods.anchor import Anchor, AnchorConfig
from sglang_sparse.methods.groups import PrefillGroups
from sglang_sparse.methods.prefill import PrefillSpan
from sglang_sparse.scheduler import prefill_chunks

GROUP, HEADS, DIM, LAYERS, PAGE = 32, 2, 16, (0, 2), 16
FIELDS = {"block_size": 16, "step": 2, "theta": 1e9, "crossover_tokens": GROUP}
ANCHOR = PrefillGroups(["anchor"], [Anchor(AnchorConfig.model_validate(FIELDS))])


def causal(start: int, end: int) -> int:
    return sum(range(start + 1, end + 1)) * HEADS * len(LAYERS)


def path(rows: int = 2, tokens: int = 128) -> PrefillPath:
    slots = torch.arange(rows * tokens).view(rows, tokens)
    cache = torch.randn(rows * tokens, 1, DIM)
    pool = SimpleNamespace(get_key_buffer=lambda _: cache, get_value_buffer=lambda _: cache)
    return PrefillPath(ANCHOR, LAYERS, pool, slots, PAGE, HEADS)


def run(at_work: PrefillPath, spans: list[PrefillSpan], counted: bool = True) -> None:
    """A pass through all layers of a model of three."""
    at_work.begin(spans, torch.arange(1 + max((span.row for span in spans), default=0)), counted)
    tokens = sum(span.tokens for span in spans)
    for layer_id in filter(at_work.takes, range(3)):
        layer: Any = SimpleNamespace(layer_id=layer_id, tp_q_head_num=HEADS, qk_head_dim=DIM, v_head_dim=DIM)
        layer.scaling, layer.k_scale_float, layer.v_scale_float, layer.logit_cap = 0.25, None, None, 0.0
        query = torch.randn(tokens, HEADS * DIM)
        at_work.attend(query, query, query, layer, torch.arange(tokens), save_kv_cache=False)


def counts(at_work: PrefillPath) -> tuple[int, int, int, int]:
    attended, pairs = at_work.pairs.tolist()
    return at_work.sparse_tokens, at_work.dense_tokens, attended, pairs


def test_a_pass_that_is_dense_throughout_counts_as_one_that_left_nothing_out() -> None:
    found = path()
    run(found, [PrefillSpan(0, 0, GROUP, ANCHOR), PrefillSpan(1, 7, 50, None)])
    pairs = causal(0, GROUP) + causal(7, 50)
    assert counts(found) == (0, GROUP + 43, pairs, pairs)
    run(found, [PrefillSpan(0, GROUP, 3 * GROUP + 5, ANCHOR), PrefillSpan(1, 50, 60, None)])
    pairs = causal(0, 3 * GROUP + 5) + causal(7, 60)
    # Infinite thresholds leave nothing out.
    assert counts(found) == (2 * GROUP + 5, GROUP + 53, pairs, pairs)


def test_the_kernels_run_once_before_a_request_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[torch.Size] = []
    sinks = torch.zeros(HEADS)
    attend = Anchor.attend

    def seen(self: Anchor, plan: Any, layer_id: int, inputs: Any) -> None:
        ran.append(inputs.query.shape)
        assert inputs.sinks is sinks
        attend(self, plan, layer_id, inputs)

    monkeypatch.setattr(Anchor, "attend", seen)
    found = path()
    found.warm_up(torch.float32, sinks)
    assert ran == [(GROUP, HEADS, DIM)] and counts(found) == (0, 0, 0, 0) and not found.takes(0)
    # Of a context that is dense throughout there is nothing to run.
    path(tokens=GROUP).warm_up(torch.float32)
    assert len(ran) == 1


@pytest.mark.parametrize("start", [0, GROUP])
def test_a_row_that_decodes_counts_for_no_prefill(start: int) -> None:
    found = path()
    run(found, [PrefillSpan(0, start, start + GROUP, ANCHOR), PrefillSpan(1, 100, 101, None, decodes=True)])
    pairs = causal(start, start + GROUP)
    assert counts(found) == (start, GROUP - start, pairs, pairs)


def test_passes_that_serve_no_prompt_count_for_nothing() -> None:
    found = path()
    run(found, [])
    run(found, [PrefillSpan(0, 0, 20, None)], counted=False)
    run(found, [PrefillSpan(0, GROUP, 2 * GROUP, ANCHOR)], counted=False)
    run(found, [PrefillSpan(1, 90, 91, None, decodes=True)])
    assert counts(found) == (0, 0, 0, 0)


def test_a_verification_is_no_prefill() -> None:
    """Its lengths are those of the last prefill."""
    found: list[list[PrefillSpan]] = []
    backend: Any = SimpleNamespace(prefill=SimpleNamespace(begin=lambda spans, rows: found.append(spans)))
    request = SimpleNamespace(origin_input_ids=[0] * 300)
    for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DECODE, ForwardMode.EXTEND):
        batch: Any = SimpleNamespace(
            forward_mode=mode, reqs=[request], decoding_reqs=None, prefix_lens=[0], extend_lens=[300]
        )
        prefill_chunks.begin(backend, SimpleNamespace(req_pool_indices=None), batch)
    assert [len(spans) for spans in found] == [0, 0, 1]


@pytest.mark.parametrize(
    ("mixed", "chunk", "before", "begun", "memory", "expected"),
    [
        # A group fits beside the rows.
        (True, 2 * GROUP, 5 * GROUP, [], 999, GROUP),
        (False, GROUP, 5 * GROUP, [], 999, GROUP),
        # It does not: the first prompt gets what it would have without them.
        (True, GROUP, 5 * GROUP, [], 999, GROUP),
        (True, 3, 5 * GROUP, [], 999, None),
        # A second prompt waits.
        (True, GROUP, 5 * GROUP, ["first"], 999, None),
        # Rows are no memory: the chunk ends within a group, which add_chunk has to take.
        (True, GROUP, 5 * GROUP, [], GROUP - 1, None),
        # The end of a prompt.
        (True, GROUP, GROUP - 3, [], 999, GROUP),
        (True, GROUP, GROUP - 4, [], 999, None),
    ],
)
@pytest.mark.parametrize("bound", ["rem_total_tokens", "chunked_req_limit"])
def test_a_chunk_has_room_for_a_group(
    monkeypatch: pytest.MonkeyPatch,
    bound: str,
    mixed: bool,
    chunk: int,
    before: int,
    begun: list[str],
    memory: int,
    expected: int | None,
) -> None:
    """Four rows decode, and SGLang has taken them off the chunk. None: the budget stays as it is."""
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: SimpleNamespace(enable_mixed_chunk=mixed))
    monkeypatch.setattr(prefill_chunks, "sharing_method", lambda _: ANCHOR)
    adder = SimpleNamespace(
        rem_chunk_tokens=chunk - 4 if mixed else chunk,
        running_batch=SimpleNamespace(reqs=[None] * 4),
        can_run_list=begun,
        page_size=4,
        **{"rem_total_tokens": 999, "chunked_req_limit": None, bound: memory},
    )
    prompt = [0] * (2 * GROUP + before)
    request = SimpleNamespace(prefix_len=2 * GROUP, full_untruncated_fill_ids=prompt, origin_input_ids=prompt)
    budget = adder.rem_chunk_tokens
    prefill_chunks.add_chunk(lambda adder, _: adder.rem_chunk_tokens, adder, request)
    assert adder.rem_chunk_tokens == (budget if expected is None else expected)
