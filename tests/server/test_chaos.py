"""Minutes of forced retraction and random aborts; ``test_rectify.py`` has the short form."""

import pytest
from server_load import TOKENS, chaos
from server_requests import greedy

EVERYTHING = {"active_ratio": 1.0, "dense_fallback": "never", "rectify_interval": 8, "check_exactness": True}
TENTH = {**EVERYTHING, "active_ratio": 0.1, "min_pages": 4}
SECONDS = 300.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def some(prompts) -> list[list[int]]:
    return [prompt[:700] for prompt in prompts[4:]]


def test_what_finishes_equals_a_quiet_run(serve, checkpoint, some) -> None:
    with serve(checkpoint, config=EVERYTHING) as server:
        quiet = greedy(server, some, tokens=TOKENS)
    load = chaos(serve, checkpoint, some, EVERYTHING, SECONDS)
    for index, output in load.finished:
        assert output == quiet[index], f"prompt {index} of {len(load.finished)} finished ones"


def test_what_finishes_of_lossless_decoding_equals_a_dense_server(serve, checkpoint, some) -> None:
    with serve(checkpoint) as server:
        quiet = greedy(server, some, tokens=TOKENS)
    lossless = ("--speculative-algorithm", "SPARSE_SELF")
    load = chaos(serve, checkpoint, some, {**TENTH, "rectify_interval": 0}, SECONDS, lossless)
    for index, output in load.finished:
        assert output == quiet[index], f"prompt {index} of {len(load.finished)} finished ones"


@pytest.mark.parametrize("on_finish", [False, True])
def test_at_a_tenth_what_is_shared_is_exact(serve, checkpoint, some, on_finish) -> None:
    chaos(serve, checkpoint, some, {**TENTH, "rectify_on_finish": on_finish}, SECONDS)
