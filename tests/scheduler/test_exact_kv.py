"""Exact lengths: what moves them and what a finished request may insert."""

import json
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from sglang_sparse.attention.backend import SparseAttentionBackend
from sglang_sparse.attention.batch import rows_and_queries
from sglang_sparse.attention.counters import RectifyCounts
from sglang_sparse.attention.plan import PLAN
from sglang_sparse.config import settings as config
from sglang_sparse.config.arguments import SPARSE_SELF
from sglang_sparse.methods.resa import Resa
from sglang_sparse.scheduler import exact_kv, request_state
from sglang_sparse.scheduler.speculation import algorithm

SPARSE = {"active_ratio": 0.1, "min_pages": 4, "min_seq_len": 0, "crossover_tokens": 0}


def request(**options: object) -> SimpleNamespace:
    return SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=options),
        custom_logit_processor=None,
        finished=lambda: True,
        kv=SimpleNamespace(retraction_backup=None),
    )


def follow(
    mode: str,
    requests: list[SimpleNamespace],
    lengths: list[int],
    prefixes: list[int] | None = None,
    fields: dict[str, object] = SPARSE,
    algorithm: object = SpeculativeAlgorithm.NONE,
    verified: int = 0,
    args: SimpleNamespace | None = None,
    draft: bool = False,
    **more: object,
) -> SimpleNamespace:
    """A pass, begun, of the model or a drafter; ``more`` of its batch. Verifications of so many tokens run sparse."""
    args = args or SimpleNamespace(sparse_method="resa", sparse_config=json.dumps(fields))
    settings = config.settings_of(args)
    backend = SimpleNamespace(
        groups=settings.decode,
        counters=SimpleNamespace(rectify=RectifyCounts()),
        rectifying=None,
        exact_states=None,
        prefill=None,
        keeps=(),
        verified=verified,
        rows_each=rows_and_queries(settings.method, verified)[0],
    )
    backend.lengths = MethodType(SparseAttentionBackend.lengths, backend)
    backend.decodes = MethodType(SparseAttentionBackend.decodes, backend)
    backend.begin = lambda batch: setattr(batch, "begun", getattr(batch, PLAN, None))
    runner = SimpleNamespace(server_args=args, is_draft_worker=draft, attn_backend=backend)
    batch = SimpleNamespace(
        forward_mode=ForwardMode[mode.upper()],
        spec_algorithm=algorithm,
        reqs=requests,
        seq_lens_cpu=torch.tensor(lengths),
        prefix_lens=prefixes,
        extend_lens=[n - p for n, p in zip(lengths, prefixes, strict=True)] if prefixes else None,
    )
    vars(batch).update(more)
    forward_batch = SimpleNamespace()
    exact_kv.begin_pass(forward_batch, type(None), batch, runner)
    return forward_batch


def exact(request: SimpleNamespace, committed: int) -> int:
    return exact_kv.exact_committed_len(lambda _: committed, request)


def test_prefill_chunks_are_exact() -> None:
    one = request()
    follow("extend", [one], [512], [192])
    follow("extend", [one], [700], [512])
    assert exact(one, 700) == 700


def test_a_sparse_step_stops_the_exact_length_for_good() -> None:
    one = request()
    follow("extend", [one], [700], [0])
    follow("decode", [one], [701])
    follow("decode", [one], [702])
    assert exact(one, 702) == 700


def test_covered_steps_move_it_until_a_sparse_one() -> None:
    one = request()
    follow("extend", [one], [62], [0])
    for length in range(63, 67):
        follow("decode", [one], [length])
    # Four pages are always attended to, so the step that opens the fifth page is the first sparse one.
    assert exact(one, 66) == 64


def test_what_a_model_was_trained_to_compute_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Resa, "exact", True)
    one = request()
    follow("extend", [one], [700], [0])
    follow("decode", [one], [701])
    assert exact(one, 701) == 701


def test_rows_are_judged_one_by_one() -> None:
    short, long = request(), request()
    follow("extend", [short, long], [20, 500], [0, 0])
    follow("decode", [short, long], [21, 501])
    assert (exact(short, 21), exact(long, 501)) == (21, 500)


def test_a_decode_row_in_a_mixed_batch_is_exact_only_behind_exact_kv() -> None:
    clean, drifted = request(), request()
    follow("extend", [clean, drifted], [30, 500], [0, 0])
    follow("decode", [clean, drifted], [31, 501])
    follow("extend", [clean, drifted], [32, 502], [31, 501])
    assert (exact(clean, 32), exact(drifted, 502)) == (32, 500)


def test_retraction_starts_over() -> None:
    one = request()
    follow("extend", [one], [500], [0])
    follow("decode", [one], [501])
    exact_kv.forget_exact_length(None, one)
    follow("extend", [one], [501], [0])
    assert exact(one, 501) == 501


def test_a_retracted_request_that_is_taken_back_is_as_exact_as_it_was() -> None:
    one = request()
    follow("extend", [one], [500], [0])
    follow("decode", [one], [501])
    one.kv.retraction_backup = "in host memory"
    exact_kv.forget_exact_length(None, one)
    assert exact(one, 501) == 500


@pytest.mark.parametrize(("shareable_len", "freed"), [(35, (48, 70)), (32, (32, 70)), (64, (64, 70)), (70, None)])
def test_the_inexact_tail_is_freed_by_whole_pages(shareable_len: int, freed: tuple[int, int] | None) -> None:
    calls = []
    tree = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(page_size=16, free_segments=calls.extend),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(200).view(2, 100)),
    )
    tree.free_kv_row = MethodType(BasePrefixCache.free_kv_row, tree)
    follow("extend", [one := request()], [shareable_len], [0])
    one.kv = ReqKvInfo(req_pool_idx=1, kv_committed_len=70, kv_allocated_len=70)
    one.origin_input_ids, one.output_ids_through_stop = [0] * 30, [0] * 41
    exact_kv.release_inexact_tail(lambda *_: pytest.fail("SGLang's own function asserts"), one, shareable_len, 70, tree)
    assert request_state.state_of(one).counts.tail_tokens_dropped == 70 - shareable_len
    if freed is None:
        assert calls == []
    else:
        ((slots, start),) = calls
        assert start == freed[0] and slots.tolist() == list(range(100 + freed[0], 100 + freed[1]))


def test_a_request_of_a_dense_server_is_left_to_sglang() -> None:
    called = []
    exact_kv.release_inexact_tail(lambda *arguments: called.append(arguments), SimpleNamespace(), 1, 2, None)
    assert len(called) == 1
    assert exact(SimpleNamespace(), 17) == 17


def test_a_request_that_asked_for_dense_decode_stays_exact() -> None:
    dense, sparse = request(sparse=False), request()
    never = {**SPARSE, "dense_fallback": "never"}
    follow("extend", [dense, sparse], [500, 500], [0, 0], never)
    follow("decode", [dense, sparse], [501, 501], None, never)
    assert (exact(dense, 501), exact(sparse, 501)) == (501, 500)


def test_never_dense_is_never_exact_even_where_every_page_is_selected() -> None:
    everything = {"active_ratio": 1.0, "dense_fallback": "never"}
    follow("extend", [one := request()], [500], [0], everything)
    follow("decode", [one], [501], None, everything)
    assert exact(one, 501) == 500


def test_below_the_crossover_decode_is_as_exact_as_prefill() -> None:
    follow("extend", [one := request()], [2000], [0], {})
    for length in range(2001, 2050):
        follow("decode", [one], [length], None, {})
    assert exact(one, 2049) == 2049


@pytest.fixture
def self_drafts() -> CustomSpecAlgo:
    algorithm.register()
    found = get_spec(SPARSE_SELF)
    assert found is not None
    return found


def test_a_round_moves_the_exact_length_to_what_it_wrote(self_drafts) -> None:
    """A round's exact KV is what its dense pass wrote; SGLang commits no more than that."""
    one = request()
    follow("extend", [one], [700], [512], algorithm=self_drafts)
    assert exact(one, 700) == 700
    for length in (701, 702, 703):
        found = follow("decode", [one], [length], algorithm=self_drafts)
        assert getattr(found, PLAN).sparse and exact(one, 800) == length
    # Of the last prefill: stale.
    stale = {"prefix_lens": [512], "extend_lens": [188]}
    found = follow("target_verify", [one], [704], algorithm=self_drafts, **stale)
    assert not hasattr(found, PLAN) and (exact(one, 702), exact(one, 800)) == (702, 704)
    # Two of the three drafts were wrong.
    follow("decode", [one], [702], algorithm=self_drafts, **stale)
    assert exact(one, 800) == 702
    follow("target_verify", [one], [705], algorithm=self_drafts, **stale)
    exact_kv.forget_exact_length(None, one)
    follow("extend", [one], [702], [0], algorithm=self_drafts)
    assert exact(one, 702) == 702


def test_a_step_that_drafts_nothing_is_dense(self_drafts) -> None:
    one = request()
    follow("extend", [one], [700], [0], algorithm=self_drafts)
    found = follow("decode", [one], [701], algorithm=self_drafts, dense_pass=True)
    assert not getattr(found, PLAN).sparse and exact(one, 800) == 701


def test_a_verification_of_others_moves_nothing_that_a_prefix_says() -> None:
    """On a server whose drafts are another algorithm's its stale lengths would."""
    one = request()
    follow("extend", [one], [700], [0])
    follow("decode", [one], [701])
    follow("target_verify", [one], [701], prefix_lens=[650], extend_lens=[64])
    assert exact(one, 800) == 700


def test_sparse_verifications_leave_the_exact_length_at_the_prompts_end() -> None:
    """Their lengths are without the drafts, and those that a prefill has left on the batch are stale."""
    drafts = {"algorithm": SpeculativeAlgorithm.STANDALONE, "verified": 4}
    follow("extend", [one := request()], [700], [0], **drafts)
    for length in (700, 703, 704):
        found = follow("target_verify", [one], [length], **drafts, prefix_lens=[0], extend_lens=[700])
        plan = getattr(found, PLAN)
        assert plan.sparse and plan is found.begun and int(plan.groups[0].n_pages) == -(-(length + 4) // 16)
        assert exact(one, length) == 700


def test_a_rank_without_requests_follows_no_earlier_plan() -> None:
    """SGLang replays a verification there, too."""
    drafts = {"algorithm": SpeculativeAlgorithm.STANDALONE, "verified": 4}
    assert follow("idle", [], [], **drafts).begun is None


def test_each_draft_of_a_model_that_chooses_is_a_row_of_its_own() -> None:
    """All that a round has committed is shared, as the model was trained to choose."""
    args = SimpleNamespace(sparse_method="dsa", sparse_config='{"implementation": "portable"}')
    method = config.settings_of(args).method
    method.adopt(SimpleNamespace(hf_text_config=SimpleNamespace(index_topk=512)))
    drafts = {"algorithm": SpeculativeAlgorithm.STANDALONE, "verified": 4, "args": args}
    follow("extend", [one := request(), other := request()], [510, 600], [0, 0], **drafts)
    plan = getattr(follow("target_verify", [one, other], [510, 600], **drafts), PLAN)
    assert plan.groups[0].n_pages.tolist() == [511, 512, 513, 514, 601, 602, 603, 604]
    assert plan.groups[0].n_select.tolist() == [511, *[512] * 7]
    assert plan.covered.tolist() == [True, True, *[False] * 6]
    assert (exact(one, 513), exact(other, 604)) == (513, 604)


def test_dense_verifications_move_it_once_it_is_known_what_they_committed() -> None:
    short, long = request(), request()
    drafts = {"algorithm": SpeculativeAlgorithm.STANDALONE, "verified": 4}
    follow("extend", [short, long], [20, 500], [0, 0], **drafts)
    for lengths, moved in (((20, 500), 20), ((23, 501), 23), ((24, 505), 24)):
        follow("target_verify", [short, long], [*lengths], **drafts)
        assert (exact(short, 999), exact(long, 999)) == (moved, 500)
    # Five pages are more than are always attended to: what this one writes is approximate for good.
    follow("target_verify", [short], [61], **drafts)
    follow("target_verify", [short], [64], **drafts)
    follow("target_verify", [short], [66], **drafts)
    assert exact(short, 999) == 61


def test_a_dense_verification_over_an_approximate_tail_is_not_exact_once_that_is_rectified() -> None:
    one, drafts = request(), {"algorithm": SpeculativeAlgorithm.STANDALONE, "verified": 4}
    dense = {**SPARSE, "dense_fallback": "auto", "crossover_tokens": 10**6}
    follow("extend", [one], [300], [0], **drafts)
    follow("target_verify", [one], [300], **drafts)
    follow("target_verify", [one], [320], **drafts, fields=dense)
    # Behind the round that runs: its tokens were computed over the KV as it was.
    follow("extend", [one], [320], [300], **drafts)
    assert exact(one, 320) == 320
    follow("target_verify", [one], [324], **drafts, fields=dense)
    assert exact(one, 324) == 320


def test_a_retracted_request_forgets_what_was_verified() -> None:
    drafts = {"algorithm": SpeculativeAlgorithm.STANDALONE, "verified": 4}
    follow("extend", [one := request()], [20], [0], **drafts)
    follow("target_verify", [one], [20], **drafts)
    exact_kv.forget_exact_length(None, one)
    follow("extend", [one], [20], [0], **drafts)
    follow("target_verify", [one], [500], **drafts)
    assert exact(one, 999) == 20


PREFILL = {"block_size": 16, "step": 2, "crossover_tokens": 64, "dense_tail": 0}
ALONE = SimpleNamespace(
    sparse_method=None, sparse_prefill_method="anchor", sparse_prefill_config=json.dumps(PREFILL), page_size=16
)


@pytest.mark.parametrize("algorithm", [SpeculativeAlgorithm.EAGLE3, SpeculativeAlgorithm.NGRAM])
@pytest.mark.parametrize("mode", ["target_verify", "draft_extend_v2", "decode", "idle"])
def test_all_that_others_commit_behind_a_sparse_prompt_is_exact(algorithm: object, mode: str) -> None:
    """Shared are whole groups of the prompt. Its lengths are stale, and the device alone has those of now."""
    one = request()
    one.origin_input_ids = [0] * 200
    follow("extend", [one], [150], [0], algorithm=algorithm, args=ALONE)
    assert exact(one, 150) == 150
    follow("extend", [one], [200], [150], algorithm=algorithm, args=ALONE)
    stale = {"prefix_lens": torch.tensor([150]), "extend_lens": torch.tensor([50]), "seq_lens_cpu": None}
    if mode != "decode":
        follow(mode, [one], [207], algorithm=algorithm, args=ALONE, **stale)
    # Of the drafter, whose KV is not ours.
    follow(mode, [one], [207], algorithm=algorithm, args=ALONE, draft=True, **stale)
    assert exact(one, 180) == 180 and exact(one, 207) == 192
    short = request()
    short.origin_input_ids = [0] * 40
    follow("extend", [short], [40], [0], algorithm=algorithm, args=ALONE)
    follow("target_verify", [short], [43], algorithm=algorithm, args=ALONE, **stale)
    assert [exact(short, committed) for committed in (40, 47, 64, 90)] == [40, 47, 64, 64]
    exact_kv.forget_exact_length(None, one)
    follow("extend", [one], [203], [0], algorithm=algorithm, args=ALONE)
    assert exact(one, 203) == 192


def test_rows_that_decode_within_a_mixed_batch_are_exact_as_far_as_it_goes() -> None:
    one = request()
    one.origin_input_ids = [0] * 40
    eagle = {"algorithm": SpeculativeAlgorithm.EAGLE, "args": ALONE}
    follow("extend", [one], [40], [0], **eagle)
    follow("target_verify", [one], [40], seq_lens_cpu=None, **eagle)
    follow("mixed", [one], [45], [44], decoding_reqs=[one], **eagle)
    assert exact(one, 45) == 45


def test_tokens_behind_the_end_are_no_inexact_tail(self_drafts) -> None:
    """A verification commits what it accepted, and the text may end before."""
    follow("extend", [one := request()], [64], [0], algorithm=self_drafts)
    follow("target_verify", [one], [70], algorithm=self_drafts)
    one.kv = ReqKvInfo(req_pool_idx=1, kv_committed_len=70, kv_allocated_len=80)
    one.origin_input_ids, one.output_ids_through_stop = [0] * 60, [0] * 7
    calls: list[object] = []
    tree: Any = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(page_size=16, free_segments=calls.extend),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(200).view(2, 100)),
    )
    tree.free_kv_row = MethodType(BasePrefixCache.free_kv_row, tree)
    exact_kv.release_inexact_tail(lambda *_: pytest.fail("SGLang's own function asserts"), one, 67, 80, tree)
    assert request_state.state_of(one).counts.tail_tokens_dropped == 0 and len(calls) == 0
