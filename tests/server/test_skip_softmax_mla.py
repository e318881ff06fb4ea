"""Skip-Softmax decodes MLA models: dense where nothing is below the threshold, right where blocks are skipped."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_requests import (
    ask,
    ask_all,
    assert_exact,
    assert_nothing_leaked,
    assert_refused,
    find_needles,
    greedy,
    random_prompts,
    sparse_state,
    spent,
)

from launch.server import ServerProcess

pytestmark = pytest.mark.long

MODEL = Path(__file__).parent.parent.parent / "eval" / "models" / "tiny-mla"
LAYERS = 4
FLAGS = ("--dtype", "float32", "--context-length", "4096", "--chunked-prefill-size", "512")
CONFIG = {"threshold_scale_factor": {"decode": 100.0}, "dense_fallback": "never", "check_exactness": True}


@pytest.fixture(scope="module")
def mixed() -> list[list[int]]:
    return random_prompts(7, (17, 512, 513, 1500))


@pytest.fixture(scope="module")
def server(serve) -> Iterator[ServerProcess]:
    """By the usual factors: that of prefill, which the model does not have, is left out."""
    config = {**CONFIG, "threshold_scale_factor": 100.0}
    with serve(MODEL, *FLAGS, method="skip_softmax", config=config) as server:
        yield server


def test_decode_alone_is_set_and_said(server) -> None:
    state = sparse_state(server)
    assert state["method"] == "skip_softmax" and "prefill" not in state
    assert "--sparse-method skip_softmax sets decode alone" in server.log()


def test_a_factor_of_next_to_nothing_equals_dense(server, mixed) -> None:
    expected = [ask(server, prompt, 24, {"sparse": False})["output_ids"] for prompt in mixed]
    server.flush_cache()
    before = sparse_state(server)
    for at_once in (1, 6):
        found = ask_all(server, mixed, 24, {"threshold_scale_factor": 1e-30}, at_once)
        assert [answer["output_ids"] for answer in found] == expected
    used = spent(server, before)
    assert used["decode_rows"] >= 2 * 23 * len(mixed) and used["dense_fallback_rows"] == 0
    assert used["sparse_layer_rows"] == LAYERS * used["decode_rows"]
    assert used["blocks_skipped"] == 0 < used["blocks_visited"]


def test_needles_are_found_while_blocks_are_skipped(server, tmp_path: Path) -> None:
    before = sparse_state(server)
    find_needles(server, tmp_path, "1k")
    used = spent(server, before)
    assert 0.1 * used["blocks_visited"] < used["blocks_skipped"] < used["blocks_visited"]


def test_a_request_sets_its_own_factor(server, mixed) -> None:
    def skipped(factor: object) -> int:
        before = sparse_state(server)
        ask(server, mixed[-1], 8, {"threshold_scale_factor": factor})
        return spent(server, before)["blocks_skipped"]

    assert skipped(1e6) > skipped({"decode": 30}) >= skipped(1e-30) == 0
    assert_refused(server, {"threshold_scale_factor": {"prefill": 2}}, "a mapping with decode")


def test_company_and_prefixes_change_nothing(server, mixed) -> None:
    server.flush_cache()
    alone = [ask(server, prompt, 24)["output_ids"] for prompt in mixed]
    assert [ask(server, prompt, 24)["output_ids"] for prompt in mixed] == alone
    server.flush_cache()
    assert greedy(server, mixed, at_once=6) == alone
    assert_exact(server, 1500 // 16 * 16)
    assert_nothing_leaked(server)


def test_robsa_has_other_layers(serve, mixed) -> None:
    """Both with nothing left out: all layers run sparse, in blocks of two sizes, and the tokens are those of dense."""
    robsa = {"method": "robsa", "theta1": 1.0, "allow_uncalibrated": True}
    rules = {"0-1": {"threshold_scale_factor": {"decode": 1e-30}}, "2-": robsa}
    config = {"layers": rules, "page_size": 64, "dense_fallback": "never"}
    with serve(MODEL, *FLAGS, "--page-size", "64", method="skip_softmax", config=config) as server:
        expected = [ask(server, prompt, 24, {"sparse": False})["output_ids"] for prompt in mixed]
        server.flush_cache()
        before = sparse_state(server)
        assert greedy(server, mixed, at_once=6) == expected
        used = spent(server, before)
        assert used["sparse_layer_rows"] == LAYERS * used["decode_rows"] and used["dense_fallback_rows"] == 0
        assert used["blocks_skipped"] == 0 < used["blocks_visited"]
