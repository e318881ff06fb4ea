"""Exact lengths: what moves them and what a finished request may insert."""

from types import SimpleNamespace

import pytest
import torch

from sglang_sparse import config, rectify
from sglang_sparse.plan import plan_decode


def follow(mode: str, requests: list[SimpleNamespace], lengths: list[int], prefixes: list[int] | None = None) -> None:
    args = SimpleNamespace(
        sparse_method="resa", sparse_config='{"active_ratio": 0.1, "min_pages": 4, "dense_fallback": "never"}'
    )
    settings = config.settings_of(args)
    backend = SimpleNamespace(plan=lambda seq_lens: plan_decode(settings.method, 16, seq_lens))
    runner = SimpleNamespace(server_args=args, is_draft_worker=False, attn_backend=backend)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: mode == "decode", is_extend=lambda: mode == "extend"),
        reqs=requests,
        seq_lens_cpu=torch.tensor(lengths),
        prefix_lens=prefixes,
        extend_lens=[n - p for n, p in zip(lengths, prefixes, strict=True)] if prefixes else None,
    )
    rectify.follow_exact_lengths(None, type(None), batch, runner)


def exact(request: SimpleNamespace, committed: int) -> int:
    return rectify.exact_committed_len(lambda _: committed, request)


def test_prefill_chunks_are_exact() -> None:
    request = SimpleNamespace()
    follow("extend", [request], [512], [192])
    follow("extend", [request], [700], [512])
    assert exact(request, 700) == 700


def test_a_sparse_step_stops_the_exact_length_for_good() -> None:
    request = SimpleNamespace()
    follow("extend", [request], [700], [0])
    follow("decode", [request], [701])
    follow("decode", [request], [702])
    assert exact(request, 702) == 700


def test_covered_steps_move_it_until_a_sparse_one() -> None:
    request = SimpleNamespace()
    follow("extend", [request], [62], [0])
    for length in range(63, 67):
        follow("decode", [request], [length])
    # Four pages are always attended to, so the step that opens the fifth page is the first sparse one.
    assert exact(request, 66) == 64


def test_rows_are_judged_one_by_one() -> None:
    short, long = SimpleNamespace(), SimpleNamespace()
    follow("extend", [short, long], [20, 500], [0, 0])
    follow("decode", [short, long], [21, 501])
    assert (exact(short, 21), exact(long, 501)) == (21, 500)


def test_a_decode_row_in_a_mixed_batch_is_exact_only_behind_exact_kv() -> None:
    clean, drifted = SimpleNamespace(), SimpleNamespace()
    follow("extend", [clean, drifted], [30, 500], [0, 0])
    follow("decode", [clean, drifted], [31, 501])
    follow("extend", [clean, drifted], [32, 502], [31, 501])
    assert (exact(clean, 32), exact(drifted, 502)) == (32, 500)


def test_retraction_starts_over() -> None:
    request = SimpleNamespace()
    follow("extend", [request], [500], [0])
    follow("decode", [request], [501])
    rectify.forget_exact_length(None, request)
    follow("extend", [request], [501], [0])
    assert exact(request, 501) == 501


@pytest.mark.parametrize(("exact_len", "freed"), [(35, (48, 70)), (32, (32, 70)), (64, (64, 70)), (70, None)])
def test_the_inexact_tail_is_freed_by_whole_pages(exact_len: int, freed: tuple[int, int] | None) -> None:
    calls = []
    allocator = SimpleNamespace(page_size=16, free_segment=lambda slots, start_pos: calls.append((slots, start_pos)))
    tree = SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(200).view(2, 100)),
    )
    request = SimpleNamespace(req_pool_idx=1, **{rectify.ATTRIBUTE: exact_len})
    rectify.release_inexact_tail(lambda *_: pytest.fail("SGLang's own function asserts"), request, exact_len, 70, tree)
    if freed is None:
        assert calls == []
    else:
        ((slots, start),) = calls
        assert start == freed[0] and slots.tolist() == list(range(100 + freed[0], 100 + freed[1]))


def test_a_request_of_a_dense_server_is_left_to_sglang() -> None:
    called = []
    rectify.release_inexact_tail(lambda *arguments: called.append(arguments), SimpleNamespace(), 1, 2, None)
    assert len(called) == 1
    assert exact(SimpleNamespace(), 17) == 17
