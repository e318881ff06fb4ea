"""A budget that covers the context equals dense attention, and the counters prove that the sparse path ran."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_requests import RETRACT, assert_nothing_leaked, greedy, sparse_state

from eval import identity
from launch.server import ServerProcess

LAYERS = 4
EVERYTHING = {"active_ratio": 1.0, "dense_fallback": "never"}
CHUNKS = ("--chunked-prefill-size", "512")


@pytest.fixture(scope="module")
def dense_outputs(serve, checkpoint, prompts) -> list[list[int]]:
    with serve(checkpoint, *CHUNKS) as server:
        assert "sparse" not in server.server_info()["internal_states"][0]
        return greedy(server, prompts)


@pytest.fixture(scope="module")
def server(serve, checkpoint, dense_outputs) -> Iterator[ServerProcess]:
    with serve(checkpoint, *CHUNKS, config=EVERYTHING) as server:
        yield server


def test_equal_one_by_one(server, prompts, dense_outputs) -> None:
    before = sparse_state(server)
    assert greedy(server, prompts) == dense_outputs
    after = sparse_state(server)
    rows = after["decode_rows"] - before["decode_rows"]
    assert rows >= len(prompts) * 23
    assert after["sparse_layer_rows"] - before["sparse_layer_rows"] == rows * LAYERS
    assert after["dense_fallback_rows"] == 0
    assert after["pages_attended"] == after["pages_held"]


def test_equal_with_eight_at_once(server, prompts, dense_outputs) -> None:
    server.flush_cache()
    assert greedy(server, prompts, at_once=8) == dense_outputs
    assert sparse_state(server)["dense_fallback_rows"] == 0
    assert_nothing_leaked(server)


def test_the_command_asks_a_dense_server(
    serve, checkpoint, server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One with the method, too, if it runs dense when it is asked to; the sparse one attends sparse in any case."""
    common = [
        "--base-url",
        server.url,
        "--prompts",
        "3",
        "--tokens",
        "8",
        "--compare-custom-params",
        '{"sparse": false}',
    ]
    with serve(checkpoint, *CHUNKS, config={}) as other:
        asked = [*common, "--compare-url", other.url, "--out", str(tmp_path / "dense.jsonl")]
        assert identity.main(asked) == 0 and sparse_state(other)["decode_rows"] >= 3 * 7
    assert identity.main([*common, "--compare-url", server.url, "--out", str(tmp_path / "sparse.jsonl")]) == 1
    assert "the dense answers were not dense: {'sparse_layer_rows': " in capsys.readouterr().err


def test_equal_when_prefixes_are_cached(server, prompts, dense_outputs) -> None:
    server.flush_cache()
    greedy(server, prompts, tokens=1)
    before = sparse_state(server)["extend_pages_summarised"]
    assert greedy(server, prompts) == dense_outputs
    # A hit covers all whole pages but leaves at least one token to prefill, so one page is made again, if any.
    assert sparse_state(server)["extend_pages_summarised"] - before <= len(prompts)


def test_equal_under_forced_retraction(serve, checkpoint, prompts, dense_outputs) -> None:
    with serve(checkpoint, *CHUNKS, config=EVERYTHING, env=RETRACT) as server:
        assert greedy(server, prompts, 12, at_once=8) == [output[:12] for output in dense_outputs]
        assert "Testing retraction" in server.log()
        assert_nothing_leaked(server)
