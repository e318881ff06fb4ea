"""RocketKV and RoBSA as parts of servers with rules by layer: each part does what a server of its own would do."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server_requests import (
    RETRACT,
    ask,
    assert_exact,
    assert_nothing_leaked,
    by_part,
    find_needles,
    forced,
    greedy,
    logprobs,
    random_prompts,
    sparse_state,
    sparse_steps,
)

from launch.server import ServerProcess

pytestmark = pytest.mark.long

MODELS = Path(__file__).parent.parent.parent / "eval" / "models"
GQA, MLA = MODELS / "tiny-gqa", MODELS / "tiny-mla"
PAGE, KV_HEADS = 16, 2
WINDOW, BUDGET, TOPK = 32, 256, 16
FLAGS = ("--dtype", "float32", "--context-length", "10240")
ROCKET = {"method": "rocketkv", "prompt_budget": BUDGET, "topk": TOPK}
# Blocks of another size, another window, and more of both budgets.
WIDER = {"method": "rocketkv", "window_size": 48, "prompt_budget": 512, "topk": 24, "kt_page_size": 8}
RESA = {"method": "resa", "active_ratio": 0.1, "min_pages": 4}
SKIP = {"method": "skip_softmax", "threshold_scale_factor": {"decode": 2000}}
MIXED = {"0": "dense", "1": RESA, "2": ROCKET, "3": SKIP}
SHARED = {"rectify_interval": 0, "dense_fallback": "never"}
DENSE = {"sparse": False}
# Nothing is left out.
EVERYTHING = {"topk": 10**6, "active_ratio": 1.0, "threshold_scale_factor": 0}


@pytest.fixture(scope="module")
def some() -> list[list[int]]:
    """Random prompts at and around the ends of budgets, blocks, pages and chunks."""
    return random_prompts(5, (40, BUDGET, BUDGET + 1, 288, 511, 513, 1023, 1504))


@pytest.fixture(scope="module")
def server(serve) -> Iterator[ServerProcess]:
    config = {"layers": MIXED, **SHARED, "check_exactness": True}
    with serve(GQA, *FLAGS, "--chunked-prefill-size", "128", method="rocketkv", config=config) as server:
        yield server


@pytest.fixture(scope="module")
def alone(server, some) -> list[list[int]]:
    """Cold, in chunks of 128 tokens."""
    server.flush_cache()
    return greedy(server, some)


def test_rocketkv_beside_dense_resa_and_skip_softmax_is_counted_by_part(server, some, alone) -> None:
    state = sparse_state(server)
    assert [(part["method"], part["layers"]) for part in state["parts"]] == [
        ("resa", [1]),
        ("rocketkv", [2]),
        ("skip_softmax", [3]),
    ]
    server.flush_cache()
    before, state = by_part(server), sparse_state(server)
    assert greedy(server, some[-2:]) == alone[-2:]
    resa, rocket, skip = by_part(server, before)
    rows = sparse_state(server)["decode_rows"] - state["decode_rows"]
    assert resa["sparse_layer_rows"] == rocket["sparse_layer_rows"] == skip["sparse_layer_rows"] == rows > 0
    # Each in its own blocks.
    assert rocket["pages_attended"] == TOPK * KV_HEADS * rows
    assert 3.7 * resa["pages_held"] < rocket["pages_held"] <= 4 * resa["pages_held"]
    assert resa["pages_attended"] < 0.12 * resa["pages_held"]
    assert 0 < skip["blocks_skipped"] < skip["blocks_visited"] and skip["pages_held"] == resa["pages_held"]
    assert (rocket["prompts"], rocket["whole_prompts"]) == (2, 0)
    after = sparse_state(server)
    assert after["kept"]["prompts"] == after["parts"][1]["kept"]["prompts"]
    # Added up in blocks of four tokens.
    sums = sum(part["pages_held"] * (1 if part["method"] == "rocketkv" else 4) for part in after["parts"])
    assert after["pages_held"] == sums
    shares = [part["max_active_fraction"] for part in after["parts"]]
    assert shares[2] is None and after["max_active_fraction"] == max(shares[:2]) > 0


def test_layers_that_leave_nothing_out_are_dense(server, some, alone) -> None:
    dense = [ask(server, prompt, 24, DENSE)["output_ids"] for prompt in some]
    before = by_part(server)
    assert [ask(server, prompt, 24, EVERYTHING)["output_ids"] for prompt in some] == dense != alone
    resa, rocket, skip = by_part(server, before)
    assert resa["pages_attended"] == resa["pages_held"] > 0 and rocket["pages_attended"] == rocket["pages_held"] > 0
    assert skip["blocks_visited"] == 0


def test_what_a_prompt_keeps_is_a_function_of_it_alone(server, some, alone) -> None:
    """Whatever is cached of it, in whatever company it runs, and in a second turn."""
    prompt = some[-1]
    for cached in (1, WINDOW, WINDOW + 40, 0):
        server.flush_cache()
        ask(server, [*prompt[: len(prompt) - cached], *([7] if cached else [])], 1)
        answer = ask(server, prompt, 24)
        assert answer["output_ids"] == alone[-1]
        assert answer["meta_info"]["cached_tokens"] == (len(prompt) - max(cached, WINDOW)) // PAGE * PAGE
    server.flush_cache()
    before = by_part(server)
    assert greedy(server, [*some, *some], at_once=8) == [*alone, *alone]
    rocket = by_part(server, before)[1]
    assert (rocket["prompts"], rocket["whole_prompts"]) == (2 * sum(len(one) > BUDGET for one in some), 0)
    turn = [*some[-2], *alone[-2], *range(20, 70)]
    hit = ask(server, turn, 24)
    assert hit["meta_info"]["cached_tokens"] == len(some[-2]) // PAGE * PAGE
    server.flush_cache()
    assert ask(server, turn, 24)["output_ids"] == hit["output_ids"]


def test_fields_go_to_the_parts_that_have_them_and_what_is_shared_is_exact(server, some) -> None:
    before = by_part(server)
    ask(server, some[-1], 8, {"topk": 4})
    resa, rocket, _ = by_part(server, before)
    assert rocket["pages_attended"] == 4 * KV_HEADS * rocket["sparse_layer_rows"]
    assert resa["pages_attended"] < 0.12 * resa["pages_held"]
    server.flush_cache()
    first = ask(server, some[-1], 60, {"rectify_interval": 8})["output_ids"]
    # So many more that what was decoded lies before the window.
    cached = ask(server, [*some[-1], *first, *range(20, 70)], 1)["meta_info"]["cached_tokens"]
    assert cached == (len(some[-1]) + 56) // PAGE * PAGE
    assert_exact(server)
    assert_nothing_leaked(server)


def test_needles_are_found_by_all_parts_together(serve, tmp_path: Path) -> None:
    rules = {"0": RESA, "1": ROCKET, "2": WIDER, "3": {"method": "skip_softmax"}}
    config = {"layers": rules, **SHARED}
    with serve(GQA, *FLAGS, method="rocketkv", config=config) as server:
        find_needles(server, tmp_path)
        resa, rocket, wider, skip = by_part(server)
        assert rocket["pages_attended"] < 0.04 * rocket["pages_held"]
        assert wider["pages_attended"] < 0.12 * wider["pages_held"]
        assert resa["pages_attended"] < 0.12 * resa["pages_held"] and skip["blocks_visited"] > 0
        assert sparse_state(server)["dense_fallback_rows"] == 0 and rocket["prompts"] >= 6


@pytest.mark.parametrize("whole", [0, 1])
def test_a_part_that_keeps_everything_leaves_the_other_as_on_its_own_server(serve, some, whole) -> None:
    """Two parts of RocketKV, with blocks of two sizes; also on two ranks, in another order of chunks."""
    rules = [dict(ROCKET), dict(WIDER)]
    rules[whole] |= {"prompt_budget": 10240, "topk": 10240}
    flags = ("--tp", "2", "--chunked-prefill-size", "208") if whole else ("--chunked-prefill-size", "256")
    config = {"layers": {"0-1": rules[0], "2-": rules[1]}, **SHARED}
    single = {name: value for name, value in rules[1 - whole].items() if name != "method"}
    own = {**single, **SHARED, "layers": "2-" if whole == 0 else "0-1"}
    with serve(GQA, *FLAGS, *flags, method="rocketkv", config=own) as solo:
        expected = greedy(solo, some, 10)
        attended = sparse_state(solo)["pages_attended"]
    with serve(GQA, *FLAGS, *flags, method="rocketkv", config=config) as server:
        assert greedy(server, some, 10) == expected
        parts = by_part(server)
        # Not counted: whether a row of a batch takes a step more than it needs is a matter of time.
        assert greedy(server, some, 10, at_once=4) == expected
        cut = sum(len(prompt) > single["prompt_budget"] for prompt in some)
        assert parts[whole]["pages_attended"] == parts[whole]["pages_held"] and parts[whole]["prompts"] == 0
        assert parts[1 - whole]["prompts"] == cut > 0
        # What the server of its own has attended to.
        assert parts[1 - whole]["pages_attended"] == attended > 0
        assert_nothing_leaked(server)


def test_what_is_kept_is_chosen_anew_after_a_retraction(serve, some) -> None:
    """The last layer alone leaves something out: KV is dense, and a log-probability shows what its own step has seen.

    The step that a retracted request is prefilled with attends to all; every other one must see what it would have
    seen without.
    """
    config = {"layers": {"2": {**RESA, "active_ratio": 1.0}, "3": ROCKET}, **SHARED}
    prompts = some[-5:] * 2
    tokens = random_prompts(2, [40] * len(prompts))
    flags = ("--chunked-prefill-size", "208", "--disable-overlap-schedule")
    with serve(GQA, *FLAGS, *flags, method="rocketkv", config=config, env=RETRACT) as server:
        sparse, dense = (
            [logprobs(forced(server, *one, **options)) for one in zip(prompts, tokens, strict=True)]
            for options in ({}, DENSE)
        )
        before = by_part(server)
        with ThreadPoolExecutor(8) as pool:
            answers = [*pool.map(lambda one: forced(server, *one), zip(prompts, tokens, strict=True))]
        retracted = sum(answer["meta_info"].get("num_retractions", 0) for answer in answers)
        rocket = by_part(server, before)[1]
        assert retracted > 0 and rocket["whole_prompts"] == 0
        assert len(prompts) <= rocket["prompts"] <= len(prompts) + retracted
        told, ran_sparse = sparse_steps(answers, sparse, dense)
        assert told - 2 * retracted - len(prompts) <= ran_sparse <= told and ran_sparse > 0
        assert_nothing_leaked(server)


def test_skip_softmax_with_two_factors(serve, some) -> None:
    """One that skips nothing is dense attention, and the other one what it is on its own server."""
    factor = {"threshold_scale_factor": {"decode": 2000}}
    with serve(GQA, *FLAGS, method="skip_softmax", config={**factor, **SHARED, "layers": "2-"}) as solo:
        expected = greedy(solo, some[-4:])
        skipped = sparse_state(solo)["blocks_skipped"]
    rules = {"0-1": {"threshold_scale_factor": {"decode": 0}}, "2-": factor}
    with serve(GQA, *FLAGS, method="skip_softmax", config={**SHARED, "layers": rules}) as server:
        assert greedy(server, some[-4:]) == expected
        nothing, some_blocks = by_part(server)
        assert nothing["blocks_visited"] == 0 < some_blocks["blocks_skipped"] == skipped < some_blocks["blocks_visited"]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return random_prompts(3, (17, 32, 513, 1500))


LATENT = {"allow_uncalibrated": True, "rope_copy": "on"}


def test_robsa_with_two_shares_beside_dense_layers(serve, texts) -> None:
    """Blocks of two sizes; the part at theta1 1 is dense attention, and the other one what it is on its own server."""
    flags = ("--chunked-prefill-size", "512")
    heavy = {"theta1": 0.8, "max_active_ratio": 0.9}
    with serve(MLA, *flags, method="robsa", config={**LATENT, **heavy, **SHARED, "layers": [1]}) as solo:
        expected = greedy(solo, texts, 10)
        attended, held = (sparse_state(solo)[name] for name in ("pages_attended", "pages_held"))
    rules = {"0": "dense", "1": heavy, "2-3": {"theta1": 1.0, "rope_copy": "off", "block_size": 16}}
    config = {**LATENT, **SHARED, "layers": rules, "check_exactness": True}
    with serve(MLA, *flags, method="robsa", config=config) as server:
        assert greedy(server, texts, 10) == expected
        some, everything = by_part(server)
        assert (some["pages_attended"], some["pages_held"]) == (attended, held) and attended < held
        assert everything["pages_attended"] == everything["pages_held"] == 2 * held
        server.flush_cache()
        assert greedy(server, texts, 10, at_once=6) == expected
        before = by_part(server)
        ask(server, texts[-1], 8, {"theta1": 0.5})
        more = [part["pages_attended"] / part["pages_held"] for part in by_part(server, before)]
        assert max(more) < 0.8, "a field of a request is for both parts"
        dense = ask(server, texts[-1], 10, DENSE)["output_ids"]
        assert ask(server, texts[-1], 10, {"theta1": 1.0})["output_ids"] == dense
        ask(server, texts[-1], 20, {"rectify_interval": 8})
        assert sparse_state(server)["rectified_tokens"] > 0
        assert_exact(server)
        assert_nothing_leaked(server)


def test_robsa_with_two_sizes_of_blocks_on_two_ranks(serve, texts) -> None:
    """Both leave something out, and the ranks agree with one another and with a single one."""
    rules = {"1": {"theta1": 0.8, "block_size": 16}, "3": {"theta1": 0.7, "block_size": 32}}
    config = {**LATENT, **SHARED, "max_active_ratio": 0.9, "page_size": 64, "layers": rules}
    flags = ("--page-size", "64", "--chunked-prefill-size", "512")
    with serve(MLA, *flags, method="robsa", config=config) as single:
        expected = greedy(single, texts, 10)
        small, large = by_part(single)
        assert 1.5 * large["pages_held"] < small["pages_held"] <= 2 * large["pages_held"]
        assert all(0 < part["pages_attended"] < part["pages_held"] for part in (small, large))
    with serve(MLA, *flags, "--tp", "2", method="robsa", config=config) as ranks:
        assert greedy(ranks, texts, 10, at_once=3) == expected
        assert_nothing_leaked(ranks)
