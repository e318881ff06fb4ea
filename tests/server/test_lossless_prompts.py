"""Lossless decoding over 200 prompts of 400 to 12,000 tokens, one by one and in batches: a dense server's tokens.

``test_lossless.py`` has the short form.
"""

import math
import random
from pathlib import Path
from typing import Any

import pytest
from server_requests import ask_all, assert_nothing_leaked, random_prompts, sparse_state
from suites import TOKENS

from eval.texts.text import read_book

ROOT = Path(__file__).parents[2]
EACH, PARTS, ANSWER, SHORTEST, LONGEST = 100, 4, 32, 400, 12_000
SELF = ("--speculative-algorithm", "SPARSE_SELF")
FLAGS = ("--chunked-prefill-size", "2048", "--max-total-tokens", "150000")
COMMON = {"min_seq_len": 0, "crossover_tokens": 0}
METHODS: list[tuple[str, str, dict[str, Any]]] = [
    ("tiny-gqa", "resa", {"active_ratio": 0.1, "min_pages": 4}),
    ("tiny-mla", "robsa", {"allow_uncalibrated": True, "theta1": 0.8}),
]

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]


@pytest.fixture(scope="module")
def long() -> list[list[int]]:
    """Half of them pages of a book, half random tokens; as many of each length as of twice the length."""
    rng = random.Random(45)
    span = math.log(SHORTEST), math.log(LONGEST)
    lengths = [SHORTEST, LONGEST, *(round(math.exp(rng.uniform(*span))) for _ in range(EACH - 2))]
    book = TOKENS.encode(read_book(ROOT / "eval" / "data" / "white-fang.txt.xz"))
    found = random_prompts(46, lengths[::2])
    for length in lengths[1::2]:
        start = rng.randrange(len(book) - length)
        found.append(list(book[start : start + length]))
    return found


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("model", "method", "config"), METHODS, ids=["gqa", "mla"])
def test_answers_are_a_dense_servers(serve, long, model, method, config, part) -> None:
    """Alone, and in a batch over what is cached by then."""
    folder, prompts = ROOT / "eval" / "models" / model, long[part::PARTS]
    with serve(folder, *FLAGS) as dense:
        expected = [answer["output_ids"] for answer in ask_all(dense, prompts, ANSWER, at_once=4)]
    with serve(folder, *FLAGS, *SELF, method=method, config={**COMMON, **config}) as server:
        for at_once in (1, 8):
            found = [answer["output_ids"] for answer in ask_all(server, prompts, ANSWER, at_once=at_once)]
            assert [place for place, one in enumerate(expected) if found[place] != one] == [], at_once
        state = sparse_state(server)
        print(
            {name: state[name] for name in ("verified_rounds", "drafted_tokens", "accepted_tokens", "active_fraction")}
        )
        assert 0 < state["accepted_tokens"] < state["drafted_tokens"] and state["undrafted_steps"] == 0
        assert state["active_fraction"] < 0.5 and state["tail_tokens_dropped"] == 0
        assert_nothing_leaked(server)
