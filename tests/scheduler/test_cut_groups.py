"""Tests of the state kept from pass to pass for prompts with groups that passes may cut, and of its end."""

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_sparse.attention.counters import RectifyCounts
from sglang_sparse.attention.prefill import PrefillPath
from sglang_sparse.config.request_options import parse_options
from sglang_sparse.config.settings import build
from sglang_sparse.methods.groups import PrefillGroups
from sglang_sparse.scheduler import exact_kv, prefill_chunks
from sglang_sparse.scheduler.request_state import ATTRIBUTE, RequestState

GROUP, BLOCK, HEADS, DIM, LAYERS, TOKENS = 64, 16, 2, 16, (0, 2), 256
FIELDS = {"block_size": BLOCK, "step": GROUP // BLOCK, "crossover_tokens": 0, "dense_tail": 0, "theta": 1.25}
SETTINGS = build(None, {}, "anchor", {**FIELDS, "share_partial_groups": True})


class Server:
    """A prefill path over prompts whose queries, keys and values are there from the start, a row of the pool each."""

    def __init__(self, rows: int = 2):
        slots = torch.arange(rows * TOKENS).view(rows, TOKENS)
        generator = torch.Generator().manual_seed(3)
        # Queries of a block are alike, so that their mean says which keys they want.
        blocks, cache = (
            torch.randn(rows * TOKENS // n, heads, DIM, generator=generator) for n, heads in ((BLOCK, HEADS), (1, 1))
        )
        self.query = 1.5 * blocks.repeat_interleave(BLOCK, 0)
        pool = SimpleNamespace(get_key_buffer=lambda _: cache, get_value_buffer=lambda _: cache)
        assert SETTINGS.prefill is not None
        self.path = PrefillPath(SETTINGS.prefill, LAYERS, pool, slots, BLOCK, HEADS)

    def run(self, *passed: tuple[Any, int, int]) -> list[torch.Tensor]:
        """Prefill tokens ``start`` to ``end`` of requests in a pass; returns the output of the last layer."""
        batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            reqs=[request for request, _, _ in passed],
            decoding_reqs=None,
            prefix_lens=[start for _, start, _ in passed],
            extend_lens=[end - start for _, start, end in passed],
        )
        indices = torch.tensor([request.kv.req_pool_idx for request, _, _ in passed])
        self.begin(batch, indices)
        rows = [range(r.kv.req_pool_idx * TOKENS + start, r.kv.req_pool_idx * TOKENS + end) for r, start, end in passed]
        query = torch.cat([self.query[list(row)] for row in rows])
        out = query
        for layer_id in LAYERS:
            layer: Any = SimpleNamespace(layer_id=layer_id, tp_q_head_num=HEADS, qk_head_dim=DIM, v_head_dim=DIM)
            layer.scaling, layer.k_scale_float, layer.v_scale_float, layer.logit_cap = DIM**-0.5, None, None, 0.0
            # Layers have queries of their own.
            mine = (query * (1 + layer_id / 4)).flatten(1)
            out = self.path.attend(mine, mine, mine, layer, indices, save_kv_cache=False)
        return list(out.split([len(row) for row in rows]))

    def begin(self, batch: Any, indices: torch.Tensor) -> None:
        prefill_chunks.begin(SimpleNamespace(prefill=self.path), SimpleNamespace(req_pool_indices=indices), batch)

    def decode(self) -> None:
        """Another pass."""
        self.begin(SimpleNamespace(forward_mode=ForwardMode.DECODE), torch.zeros(0, dtype=torch.int64))

    def whole(self, request: Any, start: int, end: int) -> torch.Tensor:
        """Output of tokens of a prompt where one pass has all before ``end``, by a request of its own."""
        return self.whole_from(request, 0, end)[start:]

    def whole_from(self, request: Any, start: int, end: int) -> torch.Tensor:
        """The same behind a cached prefix that ends at ``start``."""
        prompt, params = len(request.origin_input_ids), request.sampling_params.custom_params
        return self.run((make_request(request.kv.req_pool_idx, prompt, params), start, end))[0]


def make_request(row: int, prompt: int = TOKENS, params: dict[str, Any] | None = None) -> Any:
    request = SimpleNamespace(
        origin_input_ids=[0] * prompt,
        kv=ReqKvInfo(req_pool_idx=row),
        sampling_params=SimpleNamespace(custom_params=params),
        custom_logit_processor=None,
    )
    setattr(request, ATTRIBUTE, RequestState(parse_options(SETTINGS, params), RectifyCounts()))
    return request


def cut_of(request: Any) -> Any:
    return getattr(request, ATTRIBUTE).cut


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_each_chunk_sees_the_group_so_far_whatever_runs_between() -> None:
    server, first, second = Server(), make_request(0), make_request(1, 200, {"theta": 0.75})
    ends, start = (100, 110, 120, 150, 192, 199, 230, 256), 0
    for end in ends:
        if end == 150:
            mine, other = server.run((first, start, end), (second, 0, 70))
            assert_same(other, server.whole(second, 0, 70))
        elif end == 256:
            other, mine = server.run((second, 70, 200), (first, start, end))
            assert_same(other, server.whole(second, 70, 200))
        else:
            (mine,) = server.run((first, start, end))
        server.decode()
        assert_same(mine, server.whole(first, start, end))
        assert (cut_of(first) is None) == (end == 256)
        start = end
    assert cut_of(second) is None


def test_a_part_goes_by_what_its_group_will_have() -> None:
    """Three eighths of four blocks are two, one more than such a part knows; of two blocks it is one, which it has."""
    (method,) = anchor().methods
    for prompt, means in ((TOKENS, 2), (192, 2), (160, 1), (150, 1)):
        request, plans = make_request(0, prompt), []
        for start, end in ((0, 96), (96, 140)):
            cuts = prefill_chunks.follow_cuts(getattr(request, ATTRIBUTE), start, end, prompt, method)
            spans = [*prefill_chunks.split_prompt(0, start, end, prompt, method, cuts)]
            plans.append(method.plan(spans, torch.device("cpu")).op)
        assert plans[1].slices[0].parts[-1].num_means == means, prompt


def test_what_was_cached_of_a_group_hands_nothing_on() -> None:
    server, request, other = Server(), make_request(0), make_request(0)
    (after,) = server.run((request, 150, 180))
    (more,) = server.run((request, 180, 192))
    assert cut_of(request).start == 150
    server.run((other, 0, 150))
    (known,) = server.run((other, 150, 180))
    assert not torch.allclose(after, known)
    assert_same(known, server.whole(other, 150, 180))
    # From there on as ever: as in one piece from where the cached prefix ends, which is where its group begins.
    assert cut_of(other).start == GROUP
    (piece,) = server.run((make_request(0), 150, 192))
    assert_same(more, piece[30:])
    assert not torch.allclose(more, server.run((make_request(0), 180, 192))[0])
    third, start = make_request(0), 150
    for end in (160, 170, 192):
        (part,) = server.run((third, start, end))
        assert_same(part, server.whole_from(third, 150, end)[start - 150 :])
        start = end


def test_a_cut_that_ends_elsewhere_is_not_gone_on_with() -> None:
    server, request = Server(), make_request(0)
    server.run((request, 0, 150))
    (after,) = server.run((request, 160, 180))
    assert_same(after, server.whole_from(request, 160, 180))
    assert cut_of(request).start == 160


@pytest.mark.parametrize("how", ["retracted", "aborted", "at the end of the prompt"])
def test_what_is_kept_ends_with_the_request(how: str) -> None:
    server, request = Server(), make_request(0)
    server.run((request, 0, 150))
    tensors = [weakref.ref(kept.queries) for kept in cut_of(request).kept.values()]
    assert len(tensors) == len(LAYERS)
    if how == "retracted":
        exact_kv.forget_exact_length(None, request)
        # It happens to go on where it was.
        assert not torch.allclose(server.run((request, 150, 160))[0], server.whole(request, 150, 160))
        request = None
    elif how == "aborted":
        request = None
    else:
        server.run((request, 150, 256))
    server.decode()
    assert [tensor() for tensor in tensors] == [None] * len(LAYERS)


def test_a_prompt_that_another_method_prefills_keeps_nothing() -> None:
    server, request = Server(), make_request(0, params={"exact_prefix": True})
    state = getattr(request, ATTRIBUTE)
    assert state.options.prefill is None
    server.begin(
        SimpleNamespace(
            forward_mode=ForwardMode.EXTEND, reqs=[request], decoding_reqs=None, prefix_lens=[0], extend_lens=[150]
        ),
        torch.zeros(1, dtype=torch.int64),
    )
    assert state.cut is None
    # Nor does one whose dense tail has begun.
    method = anchor(dense_tail=20)
    state.options = replace(state.options, prefill=method)
    assert prefill_chunks.follow_cuts(state, 0, 237, TOKENS, method) == (None, None)
    assert prefill_chunks.follow_cuts(state, 0, 235, TOKENS, method)[1] is state.cut is not None


def test_a_prompt_that_goes_on_in_whole_groups_keeps_nothing() -> None:
    request, method = make_request(0), anchor(share_partial_groups=False)
    state = getattr(request, ATTRIBUTE)
    assert prefill_chunks.follow_cuts(state, 0, 128, TOKENS, method) == (None, None)
    # For want of memory one may be cut.
    _, cut = prefill_chunks.follow_cuts(state, 128, 150, TOKENS, method)
    assert cut is not None and (cut.start, cut.end) == (128, 150)
    assert prefill_chunks.follow_cuts(state, 150, 192, TOKENS, method) == (cut, None)
    # The first group is dense.
    assert prefill_chunks.follow_cuts(state, 0, 40, TOKENS, anchor()) == (None, None)


def anchor(**fields: Any) -> PrefillGroups:
    assert SETTINGS.prefill is not None
    return SETTINGS.prefill.with_configs([SETTINGS.prefill.config.model_copy(update=fields)])


def test_the_memory_is_that_of_the_means() -> None:
    server, request = Server(), make_request(0)
    server.run((request, 0, 150))
    kept = [tensor for means in cut_of(request).kept.values() for tensor in (means.queries, means.anchors)]
    shape: Any = SimpleNamespace(num_q_heads=HEADS, head_dim=DIM)
    (method,) = anchor().methods
    assert sum(tensor.nbytes for tensor in kept) == method.kept_bytes(shape, len(LAYERS), torch.float32)
