"""Rounds of lossless decoding with a toy model, whose sparse passes see less than its dense ones.

Each slot remembers whether a dense pass wrote it, and a verification must read no other.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers import sampler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang_cpu_platform import patches

from sglang_sparse.attention import memory
from sglang_sparse.attention.counters import DraftCounts
from sglang_sparse.config.settings import build
from sglang_sparse.scheduler.request_state import ATTRIBUTE
from sglang_sparse.scheduler.speculation import worker as module
from sglang_sparse.scheduler.speculation.sampling import choose
from sglang_sparse.scheduler.speculation.worker import SparseSelfWorker

VOCABULARY, STEPS, TOKENS = 13, 4, 40
PROMPTS = [[1, 5, 2], [7, 7, 3, 9, 4, 4], [2]]
SEEDS = [11, -4, 2**40]
WEIGHTS = torch.randn(97, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2


def logits_of(tokens: Sequence[int], sparse: bool = False) -> torch.Tensor:
    """Return the logits behind a text; a sparse pass sees its last five tokens alone, so its best one often differs."""
    seen = tokens[-5:] if sparse else tokens
    place = sum(seen) if sparse else sum((7 + position) * token for position, token in enumerate(seen))
    return WEIGHTS[-1] + (0.3 if sparse else 1.0) * WEIGHTS[place % 96]


class Target:
    """The model's worker: passes over slots, each with its token and whether a dense pass wrote it."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table, self.slots, self.passes = table, dict[int, tuple[int, bool]](), list[str]()
        self.bounded = 0
        backend = SimpleNamespace(counters=SimpleNamespace(drafts=DraftCounts()), attends_alone=True)
        self.model_runner = SimpleNamespace(attn_backend=backend, shared_read_done_event="of an earlier pass")

    def forward_batch_generation(self, batch: Any, forward_batch: Any, is_verify: bool) -> Any:
        assert is_verify and self.model_runner.shared_read_done_event is None
        self.model_runner.shared_read_done_event = "of this pass"
        view, found = forward_batch, []
        sparse = view.forward_mode.is_decode() and not getattr(view, "dense_pass", False)
        self.passes.append("sparse" if sparse else "verify" if view.forward_mode.is_target_verify() else "dense")
        width = len(view.input_ids) // len(view.seq_lens)
        held = view.seq_lens - 1 if view.forward_mode.is_decode() else view.seq_lens
        bound = STEPS * getattr(view, "bounded_lengths", False)
        self.bounded += bool(bound)
        assert torch.equal(view.seq_lens_cpu, held + width + bound)
        assert view.forward_mode.is_target_verify() or view.seq_lens_sum == int(view.seq_lens_cpu.sum())
        for row, place in enumerate(view.req_pool_indices.tolist()):
            for step in range(width):
                token = row * width + step
                slot, length = int(view.out_cache_loc[token]), int(held[row]) + step
                assert slot == self.table[place, length]
                self.slots[slot] = int(view.input_ids[token]), not sparse
                text = [self.slots[int(one)] for one in self.table[place, : length + 1]]
                assert sparse or all(exact for _, exact in text), "a dense pass over what a draft wrote"
                found.append(logits_of([one for one, _ in text], sparse))
        output = SimpleNamespace(next_token_logits=torch.stack(found))
        return SimpleNamespace(logits_output=output, can_run_cuda_graph=False)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(sampler, "murmur_hash32", patches.hash_noise)
    monkeypatch.setattr(module, "get_spec", lambda: SimpleNamespace(speculative_num_steps=STEPS))
    alone = SimpleNamespace(tp_group=SimpleNamespace(world_size=1), tp_size=1)
    monkeypatch.setattr(module, "get_parallel", lambda: alone)
    monkeypatch.setattr(module, "ForwardBatch", SimpleNamespace(init_new=lambda view, *_, **__: view))
    return Target(torch.randperm(3 * 400, generator=torch.Generator().manual_seed(3)).view(3, 400).int())


def info_of(sampled: Sequence[bool]) -> Any:
    ones = torch.ones(len(sampled))
    top_ks = torch.tensor([TOP_K_ALL if one else 1 for one in sampled], dtype=torch.int32)
    needs = dict.fromkeys(("need_top_k_sampling", "need_top_p_sampling", "need_min_p_sampling"), False)
    common = {"temperatures": ones[:, None], "top_ps": ones, "min_ps": 0 * ones, "top_ks": top_ks}
    return SimpleNamespace(**common, **needs, is_all_greedy=not any(sampled), logit_bias=None, max_top_k=None)


def plain(sampled: Sequence[bool]) -> list[list[int]]:
    """Return the tokens that dense steps alone generate, one token of one row at a time."""
    outputs = []
    for prompt, seed, one in zip(PROMPTS, SEEDS, sampled, strict=True):
        text = list(prompt)
        for _ in range(TOKENS):
            position = torch.tensor([len(text) - 1])
            text.append(int(choose(logits_of(text)[None], position, info_of([one]), torch.tensor([seed]))))
        outputs.append(text[len(prompt) :])
    return outputs


def request_of(seed: int, lossless: bool) -> Any:
    request = SimpleNamespace(rid=str(seed), sampling_params=SimpleNamespace(sampling_seed=seed))
    setattr(request, ATTRIBUTE, SimpleNamespace(options=SimpleNamespace(lossless=lossless)))
    return request


def generate(
    target: Target,
    sampled: Sequence[bool],
    steps: Callable[[int], int],
    lossless: Sequence[bool] = (True,) * 3,
    late: bool = False,
) -> list[list[int]]:
    """Run rounds of ``steps(round)`` drafts until each row has its tokens. If ``late``, the host has bounds first."""
    worker = SparseSelfWorker(SimpleNamespace(random_seed=1), 0, 0, target)  # pyright: ignore[reportArgumentType]
    worker._steps = lambda batch: steps(turn)  # pyright: ignore[reportAttributeAccessIssue]
    outputs, turn = list[list[int]](), 0
    for place, prompt in enumerate(PROMPTS):
        for position, token in enumerate(prompt):
            target.slots[int(target.table[place, position])] = token, True
        info, seed = info_of([sampled[place]]), torch.tensor([SEEDS[place]])
        outputs.append([int(choose(logits_of(prompt)[None], torch.tensor([len(prompt) - 1]), info, seed))])
    carried: Any = SimpleNamespace(bonus_tokens=torch.tensor([output[0] for output in outputs]))
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    reqs = [request_of(seed, one) for seed, one in zip(SEEDS, lossless, strict=True)]
    while min(map(len, outputs)) < TOKENS:
        carried.late_lengths = lengths.clone if late else None
        batch: Any = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            reqs=reqs,
            seq_lens=lengths,
            seq_lens_cpu=lengths + STEPS * late,
            sampling_info=info_of(sampled),
            req_to_token_pool=SimpleNamespace(req_to_token=target.table),
            req_pool_indices=torch.arange(len(PROMPTS), dtype=torch.int32),
            spec_info=carried,
            has_grammar=False,
            return_logprob=False,
        )
        published: list[torch.Tensor] = []
        result: Any = worker.forward_batch_generation(batch, published.append)
        width, taken = result.speculative_num_draft_tokens, result.accept_lens.tolist()
        for row, count in enumerate(taken):
            outputs[row] += result.next_token_ids[row * width : row * width + count].tolist()
        lengths, carried = result.new_seq_lens, result.next_draft_input
        assert torch.equal(published[0], lengths) and torch.equal(carried.new_seq_lens, lengths)
        held = [len(prompt) + len(output) - 1 for prompt, output in zip(PROMPTS, outputs, strict=True)]
        assert lengths.tolist() == held and carried.bonus_tokens.tolist() == [output[-1] for output in outputs]
        worker.on_verify_complete_cpu([count - 1 for count in taken])
        turn += 1
    return [output[:TOKENS] for output in outputs]


SAMPLED = [(False, False, False), (True, True, True), (True, False, True)]


@pytest.mark.parametrize("sampled", SAMPLED, ids=str)
@pytest.mark.parametrize("steps", [lambda turn: STEPS, lambda turn: 0, lambda turn: turn % (STEPS + 1)])
def test_whatever_is_drafted_dense_steps_alone_say_what_comes(target, steps, sampled) -> None:
    assert generate(target, sampled, steps) == plain(sampled)
    counts = target.model_runner.attn_backend.counters.drafts
    assert counts.rounds == target.passes.count("verify") and counts.dense_steps == target.passes.count("dense")
    assert counts.drafted == len(PROMPTS) * target.passes.count("sparse")
    if counts.drafted:
        assert 0 < counts.accepted < 0.9 * counts.drafted, "drafts are neither useless nor right by themselves"


@pytest.mark.parametrize("alone", [True, False])
def test_a_first_draft_does_not_wait_for_lengths(target, alone: bool) -> None:
    target.model_runner.attn_backend.attends_alone = alone
    found = generate(target, SAMPLED[2], lambda turn: turn % (STEPS + 1), late=True)
    assert found == plain(SAMPLED[2])
    assert target.bounded == (target.passes.count("verify") if alone else 0)


@pytest.mark.parametrize("sampled", SAMPLED[:2], ids=str)
def test_a_row_may_keep_its_drafts_and_the_others_do_not_see_it(target, sampled) -> None:
    found, wanted = generate(target, sampled, lambda turn: STEPS, (True, False, True)), plain(sampled)
    assert found[0] == wanted[0] and found[2] == wanted[2] and found[1] != wanted[1]
    counts = target.model_runner.attn_backend.counters.drafts
    # Of the row that keeps its drafts none is judged.
    assert counts.drafted == 2 * target.passes.count("sparse")


@pytest.mark.parametrize("sampled", SAMPLED[:2], ids=str)
def test_a_wrong_token_that_is_accepted_is_noticed(target, sampled, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above fails where a verification takes the drafts' word."""
    drafts: list[torch.Tensor] = []

    def credulous(logits: Any, positions: Any, info: Any, seeds: Any, width: int = 1) -> torch.Tensor:
        chosen = choose(logits, positions, info, seeds, width)
        if width == 1:
            drafts.append(chosen)
            return chosen
        own = torch.stack([*drafts[-STEPS:], chosen.view(-1, width)[:, -1]], 1)
        return own.flatten()

    monkeypatch.setattr(module, "choose", credulous)
    assert generate(target, sampled, lambda turn: STEPS) != plain(sampled)
    counts = target.model_runner.attn_backend.counters.drafts
    assert counts.accepted == counts.drafted


@pytest.mark.parametrize(
    ("context", "fields", "shares", "steps"),
    [
        # A long context beside small weights, shorter ones, and one whose config says itself that sparse steps pay.
        (200_000, {}, True, STEPS),
        (20_000, {}, True, 3),
        (20_000, {}, False, 0),
        (16_500, {}, True, 0),
        (20_000, {"crossover_tokens": 0}, False, STEPS),
        (200_000, {"sparse": False}, True, 0),
    ],
)
def test_how_much_is_drafted(target: Target, context: int, fields: dict[str, Any], shares: bool, steps: int) -> None:
    config = {name: value for name, value in fields.items() if name != "sparse"}
    groups = build("resa", {"rectify_interval": 0, **config}).decode
    options = SimpleNamespace(decode=groups, sparse=fields.get("sparse", True), lossless=True)
    weights = torch.nn.Module()
    weights.weight = torch.nn.Parameter(torch.empty(2**26, dtype=torch.bfloat16, device="meta"))
    pool = SimpleNamespace(size=2**18)
    setattr(pool, memory.ATTRIBUTE, SimpleNamespace(kv_bytes_per_token=2**17, entry_bytes=2**18 * 2**13))
    target.model_runner = SimpleNamespace(
        attn_backend=SimpleNamespace(groups=groups, shares=lambda *_: shares),
        model_config=SimpleNamespace(num_hidden_layers=28),
        model=weights,
        token_to_kv_pool=pool,
    )
    request = SimpleNamespace()
    setattr(request, ATTRIBUTE, SimpleNamespace(options=options))
    worker = SparseSelfWorker(SimpleNamespace(random_seed=1), 0, 0, target)  # pyright: ignore[reportArgumentType]
    batch: Any = SimpleNamespace(reqs=[request], seq_lens_cpu=torch.tensor([context]))
    assert worker._steps(batch) == steps


def test_ranks_take_the_tokens_of_the_first(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Tensor] = []

    def broadcast(tokens: torch.Tensor, src: int) -> torch.Tensor:
        asked.append(tokens.clone())
        assert src == 0
        return tokens

    ranks = SimpleNamespace(tp_group=SimpleNamespace(world_size=2, broadcast=broadcast), tp_size=2)
    monkeypatch.setattr(module, "get_parallel", lambda: ranks)
    assert generate(target, SAMPLED[1], lambda turn: STEPS) == plain(SAMPLED[1])
    # Each draft and each verification.
    assert len(asked) == len(target.passes)
