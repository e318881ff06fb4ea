"""DSA on a trained indexer whose selections serve several decode steps."""

from collections.abc import Iterator

import pytest
import torch
from server_requests import assert_nothing_leaked, sparse_state
from tiny_dsa import FLAGS, GREEDY, LAYERS, MODEL, PAGE, TOPK, moved

from eval import niah
from eval.live.record import read_rows
from launch.server import ServerProcess

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="refused next to CUDA")


@pytest.fixture(scope="module")
def reusing(serve) -> Iterator[ServerProcess]:
    """Selections serve three steps more; requests are retracted again and again."""
    retract = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
    config = {"index_reuse_steps": 4, "measure_reuse": True}
    with serve(MODEL, *FLAGS, method="dsa", config=config, env=retract) as server:
        yield server


def test_needles_are_found_by_selections_of_steps_before(reusing, tmp_path) -> None:
    out = tmp_path / "niah.jsonl"
    arguments = ["--base-url", reusing.url, "--tasks", "multikey", "--lengths", "1k", "--n", "1", "--concurrency", "5"]
    assert niah.main([*arguments, "--expect", "dsa", "--out", str(out)]) == 0
    (summary,) = (row for row in read_rows(out) if row["kind"] == "summary")
    assert (summary["n"], summary["score"], summary["dense_rows"]) == (5, 1.0, 0)
    reuse = sparse_state(reusing)["reuse"]
    # Neighbouring steps choose more alike than neighbouring layers do.
    assert reuse["tokens"] and 0.7 < reuse["recall"] < 1.0
    assert_nothing_leaked(reusing)


def test_what_steps_write_that_chose_before_is_not_shared(reusing) -> None:
    reusing.flush_cache()
    before = sparse_state(reusing)
    prompt = [11 + i * i % 3900 for i in range(600)]
    answer = reusing.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": 80})
    rows, attended = moved(reusing, before, "decode_rows", "pages_attended")
    # One of four chooses three less, and each that follows has one more.
    assert TOPK - 3 < attended / (rows * LAYERS) < TOPK
    turn = [*prompt, *answer["output_ids"], 5, 6, 7]
    hit = reusing.generate(input_ids=turn, sampling_params={**GREEDY, "max_new_tokens": 1})
    assert hit["meta_info"]["cached_tokens"] == 600 // PAGE * PAGE
