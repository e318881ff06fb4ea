"""RoBSA on MLA: everything selected equals dense, and SGLang's features hold while only the heaviest blocks are."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rope_calibrations import calibration
from server_requests import (
    RETRACT,
    ask,
    assert_abort_leaks_nothing,
    assert_exact,
    assert_nothing_leaked,
    assert_refused,
    greedy,
    random_prompts,
    sparse_state,
)

from launch.server import ServerProcess
from sglang_sparse.methods.fingerprint import fingerprint

MODEL = Path("eval/models/tiny-mla")
LAYERS = 4
CHUNKS = ("--chunked-prefill-size", "512")
PAGE = 64


@pytest.fixture(scope="module")
def mixed() -> list[list[int]]:
    """Seven random prompts whose lengths are at and around borders of blocks and chunks."""
    return random_prompts(3, (17, 32, 33, 512, 513, 777, 1500))


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    """Layers 1 and 3 run sparse, for rows of 200 tokens or more."""
    known = calibration([0.9, 1.0, 0.9, 1.0], fingerprint(str(MODEL)))
    short = {"min_seq_len": 200, "crossover_tokens": 0}
    return {"calibration": known, "theta1": 0.8, "max_active_ratio": 0.9, **short}


@pytest.fixture(scope="module")
def server(serve, config) -> Iterator[ServerProcess]:
    """Four blocks a page, and the rotary keys a second time."""
    own = {"page_size": PAGE, "rope_copy": "on", "check_exactness": True}
    with serve(MODEL, *CHUNKS, "--page-size", str(PAGE), method="robsa", config=config | own) as server:
        yield server


@pytest.fixture(scope="module")
def alone(server, mixed) -> list[list[int]]:
    return greedy(server, mixed)


def test_everything_selected_equals_dense_under_forced_retraction_too(serve, mixed) -> None:
    """No mass is looked at here: what is proven is the attention kernel and its place in the server."""
    with serve(MODEL, *CHUNKS) as dense:
        expected = greedy(dense, mixed)
    everything = {"allow_uncalibrated": True, "dense_fallback": "never", "theta1": 1.0}
    with serve(MODEL, *CHUNKS, method="robsa", config=everything, env=RETRACT) as server:
        assert greedy(server, mixed) == expected
        state = sparse_state(server)
        assert state["decode_rows"] >= len(mixed) * 23
        assert state["sparse_layer_rows"] == state["decode_rows"] * LAYERS
        assert state["dense_fallback_rows"] == 0 and state["pages_attended"] == state["pages_held"]
        server.flush_cache()
        assert greedy(server, mixed, at_once=8) == expected
        assert "Testing retraction" in server.log()
        assert_nothing_leaked(server)


def test_forced_retraction_while_blocks_are_left_out(serve, config, mixed) -> None:
    own = {"page_size": PAGE, "rope_copy": "on", "check_exactness": True}
    flags = (*CHUNKS, "--page-size", str(PAGE))
    with serve(MODEL, *flags, method="robsa", config=config | own, env=RETRACT) as server:
        assert all(len(answer) == 24 for answer in greedy(server, mixed[-4:], at_once=4))
        state = sparse_state(server)
        assert "Testing retraction" in server.log() and 0 < state["pages_attended"] < state["pages_held"]
        assert_exact(server, 5 * PAGE)
        assert_nothing_leaked(server)


def test_the_heaviest_blocks_of_the_calibrated_layers_are_attended(server, mixed) -> None:
    before = sparse_state(server)
    greedy(server, mixed[-2:])
    after = sparse_state(server)
    assert after["sparse_layers"] == 2 and after["max_active_fraction"] is None
    names = ("decode_rows", "sparse_layer_rows", "pages_held", "pages_attended")
    rows, layer_rows, held, attended = (after[name] - before[name] for name in names)
    assert rows >= 2 * 23 and layer_rows == 2 * rows
    assert 777 / 16 < held / layer_rows < 1524 / 16, "blocks, not pages"
    assert 0.02 < attended / held < 0.8
    # 64 rotary dimensions in float32, in each of two layers.
    assert "rope_copy float32; aux memory 512 bytes per token" in server.log()


def test_a_request_may_ask_for_more(server, mixed) -> None:
    def counted(**options: object) -> tuple[int, int]:
        before = sparse_state(server)
        ask(server, mixed[-1], 8, options)
        after = sparse_state(server)
        return tuple(after[name] - before[name] for name in ("pages_attended", "dense_fallback_rows"))

    assert 0 < counted(theta1=0.5)[0] < counted()[0]
    for everything in ({"theta1": 1.0}, {"sparse": False}):
        attended, dense = counted(**everything)
        assert attended == 0 and dense >= 7
    assert_refused(server, {"theta1": 2}, "theta1: got 2")


def test_prefixes_are_shared_and_exact(server, mixed, alone) -> None:
    server.flush_cache()
    assert greedy(server, mixed, at_once=8) == alone
    hit = ask(server, mixed[-1], 24)
    prompt = 1500 // PAGE * PAGE
    assert hit["output_ids"] == alone[-1] and hit["meta_info"]["cached_tokens"] == prompt
    # Decoded KV is approximate and not shared, unless it is rectified.
    turn = [*mixed[-1], *alone[-1], *range(7, 60)]
    assert ask(server, turn, 2)["meta_info"]["cached_tokens"] == prompt
    ask(server, mixed[-1], 40, {"rectify_interval": 8})
    assert sparse_state(server)["rectified_tokens"] > 0
    assert_exact(server, 5 * PAGE)
    assert_nothing_leaked(server)


@pytest.mark.parametrize("scope", ["global", "rank"])
def test_two_ranks_of_other_pages(serve, config, alone, mixed, scope) -> None:
    """By the mean over the heads of both they select as one, from the latent cache itself."""
    with serve(MODEL, *CHUNKS, "--tp", "2", method="robsa", config={**config, "head_scope": scope}) as ranks:
        assert (greedy(ranks, mixed[-4:], at_once=4) == alone[-4:]) is (scope == "global")
        assert 0 < sparse_state(ranks)["active_fraction"] < 0.8
        assert_nothing_leaked(ranks)


def test_weights_that_the_calibration_is_not_of_are_refused(server, mixed, alone, tmp_path) -> None:
    def update(model: Path) -> httpx.Response:
        return server.client.post("/update_weights_from_disk", json={"model_path": str(model.resolve())})

    other = shutil.copytree(MODEL, tmp_path / "other")
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    # The last bytes of the last tensor.
    content[-2] ^= 1
    weights.write_bytes(content)
    response = update(other)
    assert response.status_code == 400 and "the calibration was made on other weights" in response.json()["message"]
    assert update(MODEL).status_code == 200
    assert greedy(server, mixed[-1:]) == alone[-1:]
    assert update(tmp_path / "none").status_code == 400
    assert greedy(server, mixed[-1:]) == alone[-1:]


def test_an_abort_leaks_nothing(server, mixed) -> None:
    assert_abort_leaks_nothing(server, input_ids=mixed[-1])
