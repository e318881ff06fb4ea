"""RocketKV that compacts, on real servers: the answers of visibility, while the prompts' memory is free for others."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoints import random_qwen3
from dashboard import assert_dashboard_shows, exported
from server_requests import (
    RETRACT,
    ask,
    assert_nothing_leaked,
    assert_refused,
    forced,
    greedy,
    logprobs,
    random_prompts,
    sparse_state,
    spent,
)

from launch.server import ServerProcess

pytestmark = pytest.mark.long

MODEL = Path(__file__).parent.parent.parent / "eval" / "models" / "tiny-gqa"
PAGE, BLOCK, WINDOW, BUDGET, TOPK, CHUNK = 16, 4, 32, 256, 16, 128
FLAGS = ("--dtype", "float32", "--context-length", "10240", "--chunked-prefill-size", str(CHUNK))
CONFIG: dict[str, object] = {"prompt_budget": BUDGET, "topk": TOPK, "dense_fallback": "never"}
COMPACT = {**CONFIG, "eviction": "compact"}
TOKENS = 24
# Of the small server, in tokens: two long prompts fill it.
POOL, LONG = 3584, 1504


def kept(server: ServerProcess) -> dict[str, int]:
    """Return the counters of kept and compacted prompts."""
    return sparse_state(server)["kept"]


def since(server: ServerProcess, before: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in kept(server).items()}


def held(prompt: int) -> int:
    """Tokens of the pages that a request of this prompt holds instead of it: budget, window and what fills pages up."""
    boundary = (prompt - WINDOW) // BLOCK * BLOCK
    return prompt // PAGE * PAGE - (boundary - (BUDGET - WINDOW)) // PAGE * PAGE


def in_use(server: ServerProcess, begin: int) -> list[tuple[int, int]]:
    """Requests and the KV tokens that they hold, by SGLang's count, in each decode step that the log has from there."""
    found = re.findall(r"Decode batch, #running-req: (\d+), #token: (\d+)", server.log()[begin:])
    return [(int(requests), int(tokens)) for requests, tokens in found]


@pytest.fixture(scope="module")
def some() -> list[list[int]]:
    """Random prompts at and around the ends of budget, blocks, pages and chunks."""
    return random_prompts(5, (40, BUDGET, BUDGET + 1, 288, 511, 544, 549, 1023, 1504))


@pytest.fixture(scope="module")
def long() -> list[list[int]]:
    return random_prompts(6, [LONG] * 6)


@pytest.fixture(scope="module")
def expected(serve, some, long) -> tuple[list[list[int]], list[list[int]]]:
    """Return the answers with eviction by visibility."""
    with serve(MODEL, *FLAGS, method="rocketkv", config=CONFIG) as server:
        return greedy(server, some, TOKENS), greedy(server, long, 3 * TOKENS, at_once=2)


@pytest.fixture(scope="module")
def server(serve) -> Iterator[ServerProcess]:
    flags = ("--max-total-tokens", "16384", "--decode-log-interval", "1", "--enable-metrics")
    with serve(MODEL, *FLAGS, *flags, method="rocketkv", config=COMPACT) as server:
        yield server


def test_the_answers_are_those_of_visibility(server, some, expected) -> None:
    """Cold and in chunks, with a cached prefix, and eight at once."""
    before = kept(server)
    assert greedy(server, some, TOKENS) == expected[0]
    assert greedy(server, some, TOKENS) == expected[0]
    assert greedy(server, [*some, *some], TOKENS, at_once=8) == [*expected[0], *expected[0]]
    found = since(server, before)
    # A prompt of about the budget frees nothing.
    freed = [tokens for prompt in some if (tokens := len(prompt) // PAGE * PAGE - held(len(prompt))) > 0]
    # Who runs beside a twin lets go only where two copies are less than what they share.
    assert 3 * len(freed) <= found["compacted"] <= 4 * len(freed)
    assert 3 * sum(freed) <= found["freed_tokens"] <= 4 * sum(freed)
    assert found["compact_waits"] == 0 and found["prompts"] == 4 * sum(len(prompt) > BUDGET for prompt in some)
    assert_nothing_leaked(server)


def test_after_prefill_a_request_holds_its_budget(server, some, expected) -> None:
    server.flush_cache()
    begin = len(server.log())
    assert greedy(server, some[-1:], TOKENS) == expected[0][-1:]
    # The last lines may come after its end.
    tokens = [tokens for _, tokens in in_use(server, begin) if tokens]
    # The prompt ends with a page, and what it generates takes one and then two.
    assert tokens == sorted(tokens) and {*tokens} == {held(LONG) + PAGE, held(LONG) + 2 * PAGE}
    assert held(LONG) == BUDGET


def test_the_dashboard_shows_what_became_of_prompts(server, some) -> None:
    ask(server, some[-1], TOKENS)
    # The scheduler answers between steps: at its second answer the last report is out.
    kept(server)
    found = kept(server)
    assert_dashboard_shows(server, "Decode", "Rectification", "RocketKV")
    shown = exported(server)
    counted = {name: shown[f"sglang:sparse_kept_{name}_total"] for name in found if name != "bytes"}
    assert counted == {name: found[name] for name in counted} and counted["freed_tokens"] > 0


def test_a_prompt_may_be_shared_after_it_was_let_go(server, some) -> None:
    """By its next turn, which finds what the tree still has of it, and by nothing that was made of it."""
    server.flush_cache()
    prompt = some[-2]
    first = ask(server, prompt, 60)["output_ids"]
    turn = [*prompt, *first, *range(500, 550)]
    hit = ask(server, turn, TOKENS)
    assert hit["meta_info"]["cached_tokens"] == len(prompt) // PAGE * PAGE
    server.flush_cache()
    assert ask(server, turn, TOKENS)["output_ids"] == hit["output_ids"]


def test_who_attends_to_all_lets_go_of_nothing(server, some) -> None:
    before = kept(server)
    dense = ask(server, some[-1], TOKENS, {"sparse": False})["output_ids"]
    assert ask(server, some[-1], TOKENS, {"topk": 10**6})["output_ids"] == dense
    assert since(server, before)["compacted"] == 0
    assert_refused(server, {"rectify_interval": 8}, 'must be \\"visibility\\" with rectify_interval 8')


def test_an_abort_leaks_nothing(server, some) -> None:
    """While it decodes, after it let go of its prompt; and before, among others."""
    server.flush_cache()
    before, compacted = sparse_state(server), kept(server)
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(ask, server, some[-1], 3000, None, "it")
        others = [pool.submit(ask, server, prompt, 60) for prompt in some[-4:-1]]
        while spent(server, before)["decode_rows"] < 300:
            assert not running.done(), server.log_tail()
        server.client.post("/abort_request", json={"rid": "it"}).raise_for_status()
        assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
        assert all(len(other.result()["output_ids"]) == 60 for other in others)
    assert since(server, compacted)["compacted"] == 4
    assert_nothing_leaked(server)


def test_more_prompts_run_than_the_pool_holds(serve, some, long, expected) -> None:
    """On two ranks: prompts are evicted while their requests run, and others take their place."""
    flags = ("--tp", "2", "--max-total-tokens", str(POOL), "--decode-log-interval", "1")
    with serve(MODEL, *FLAGS, *flags, method="rocketkv", config=COMPACT) as server:
        begin = len(server.log())
        with ThreadPoolExecutor(len(long)) as pool:
            # Of requests that ignore stop tokens SGLang reserves all that they may generate, and five run at once.
            answers = [*pool.map(lambda prompt: ask(server, prompt, 3 * TOKENS, ignore_eos=False), long)]
        assert [answer["output_ids"] for answer in answers] == expected[1]
        assert not any(answer["meta_info"].get("num_retractions") for answer in answers)
        most = max(requests for requests, _ in in_use(server, begin))
        # Visible throughout they would run two by two.
        assert most == len(long)
        found = kept(server)
        assert (found["compacted"], found["freed_tokens"]) == (len(long), len(long) * (LONG - held(LONG)))
        assert found["compact_waits"] == 0
        assert [ask(server, prompt, TOKENS)["output_ids"] for prompt in some] == expected[0]
        assert_nothing_leaked(server)


def test_under_forced_retraction(serve, tmp_path_factory, some) -> None:
    """With one layer KV depends on no attention, and a log-probability shows what its own step has attended to.

    The step that a retracted request is prefilled with attends to all; every other one must see what it would have
    seen without.
    """
    model = random_qwen3(tmp_path_factory.mktemp("one-layer"), layers=1, vocab_size=4096, initializer_range=0.2)
    flags = ("--disable-overlap-schedule", "--max-total-tokens", "8192")
    asked = [*zip(some[-6:], random_prompts(2, [40] * 6), strict=True)]
    config = {**COMPACT, "kt_cache_dtype": "bfloat16"}
    with serve(model, *FLAGS, *flags, method="rocketkv", config=config, env=RETRACT) as server:
        solo, dense = (
            [logprobs(forced(server, *one, **options)) for one in asked] * 2 for options in ({}, {"sparse": False})
        )
        before = kept(server)
        with ThreadPoolExecutor(8) as pool:
            answers = [*pool.map(lambda one: forced(server, *one), asked * 2)]
        retracted = [answer["meta_info"].get("num_retractions", 0) for answer in answers]
        found = since(server, before)
        assert sum(retracted) > 0 and len(answers) < found["compacted"] <= len(answers) + sum(retracted)
        told = 0
        for answer, sparse, full, times in zip(answers, solo, dense, retracted, strict=True):
            steps = [*zip(logprobs(answer), sparse, full, strict=True)]
            unlike = [abs(one - other) for one, other, _ in steps]
            assert sum(difference > 1e-3 for difference in unlike) <= times
            assert all(min(abs(one - other), abs(one - all_seen)) < 1e-3 for one, other, all_seen in steps)
            told += sum(abs(other - all_seen) > 0.02 for _, other, all_seen in steps)
        assert told > 5 * sum(retracted)
        assert_nothing_leaked(server)
