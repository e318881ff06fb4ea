"""Parts of servers with rules by layer on a GPU, CUDA graphs and all: each is counted, and needles are found."""

from pathlib import Path

import pytest
import torch
from server_requests import ask, assert_nothing_leaked, greedy, sparse_state

from eval import niah
from eval.live.record import read_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MODELS = Path("eval/models")
KV_HEADS = 2
FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3")
SHARED = {"rectify_interval": 0, "dense_fallback": "never"}
ROCKET = {"method": "rocketkv", "prompt_budget": 256, "topk": 16}
WIDER = {"method": "rocketkv", "window_size": 48, "prompt_budget": 512, "topk": 24, "kt_page_size": 8}
RESA = {"method": "resa", "active_ratio": 0.1, "min_pages": 4}
RULES = {"0": RESA, "1": ROCKET, "2": WIDER, "3": {"method": "skip_softmax"}}


def test_needles_are_found_by_resa_rocketkv_and_skip_softmax(serve, tmp_path: Path) -> None:
    flags = (*FLAGS, "--context-length", "10240", "--max-total-tokens", "100000")
    with serve(MODELS / "tiny-gqa", *flags, method="rocketkv", config={**SHARED, "layers": RULES}) as server:
        before = sparse_state(server)["decode_rows"]
        arguments = ["--base-url", server.url, "--out", str(tmp_path / "niah.jsonl"), "--concurrency", "3"]
        assert niah.main([*arguments, "--tasks", "single,multikey", "--lengths", "2k", "--n", "4"]) == 0
        lines = [row for row in read_rows(tmp_path / "niah.jsonl") if row["kind"] == "summary"]
        assert [line["score"] for line in lines] == [1.0, 1.0]
        state = sparse_state(server)
        assert state["dense_fallback_rows"] == 0
        assert abs(state["aux_bytes_measured"] / state["aux_bytes_accounted"] - 1) < 0.01
        resa, rocket, wider, skip = state["parts"]
        rows = state["decode_rows"] - before
        assert all(part["sparse_layer_rows"] >= rows > 0 for part in state["parts"])
        assert rocket["pages_attended"] <= 16 * KV_HEADS * rocket["sparse_layer_rows"]
        assert wider["pages_attended"] <= 24 * KV_HEADS * wider["sparse_layer_rows"]
        assert rocket["pages_held"] > 1.9 * wider["pages_held"] > 3 * resa["pages_held"]
        assert 0 < skip["blocks_skipped"] < skip["blocks_visited"]
        assert rocket["kept"]["prompts"] >= 8 and rocket["kept"]["whole_prompts"] == 0
        prompt = [*range(10, 1500)]
        assert ask(server, prompt, 24)["output_ids"] == ask(server, prompt, 24)["output_ids"]
        assert_nothing_leaked(server)


def test_two_parts_of_robsa(serve) -> None:
    rules = {"0": "dense", "1": {"theta1": 0.8, "block_size": 16}, "2-": {"theta1": 0.6, "block_size": 32}}
    config = {**SHARED, "allow_uncalibrated": True, "max_active_ratio": 0.9, "page_size": 64, "layers": rules}
    # FA3, which SGLang takes by itself, prefills no keys of 128 beside values of 64.
    flags = (*FLAGS, "--attention-backend", "flashmla", "--page-size", "64", "--max-total-tokens", "100000")
    with serve(MODELS / "tiny-mla", *flags, method="robsa", config=config) as server:
        prompts = [[*range(10, 10 + length)] for length in (300, 700, 1500)]
        assert len(greedy(server, prompts, at_once=3)) == 3
        small, large = sparse_state(server)["parts"]
        assert 0 < small["pages_attended"] < small["pages_held"] and 0 < large["pages_attended"] < large["pages_held"]
        assert 0.9 * large["pages_held"] < small["pages_held"] < 1.1 * large["pages_held"], (
            "half as large, half as many"
        )
        assert_nothing_leaked(server)
