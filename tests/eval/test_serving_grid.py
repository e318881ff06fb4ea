"""What a grid needs of servers, and what is made of its figures."""

from typing import Any

import pytest
from serving_stubs import after, result

from eval.bench_serving import parse
from eval.live.client import Chunk
from eval.live.counters import EvaluationError
from eval.serving.grid import Cell, server_flags, short_contexts, streams, summarise, unfit


def test_flags_follow_from_the_grid() -> None:
    args = parse(["--model-path", "m", "--contexts", "4k,256k", "--batch", "1,4", "--out", "x", "--prefix", "0"])
    flags = server_flags(args)
    assert int(after(flags, "--context-length")) >= 256 * 1024 + 256
    tokens = int(after(flags, "--max-total-tokens"))
    assert tokens >= 4 * (256 * 1024 + 256) and tokens % 64 == 0
    assert unfit({"max_total_num_tokens": tokens}, Cell(256 * 1024, 4).tokens(256)) is None
    assert after(flags, "--cuda-graph-max-bs-decode") == "4"
    # One more than are asked: see `batch_flags`.
    assert after(flags, "--max-running-requests") == "5"
    assert "--sleep-on-idle" not in flags
    args = parse(["--model-path", "m", "--contexts", "4k", "--batch", "1", "--out", "x", "--prefix", "128k"])
    assert int(after(server_flags(args), "--max-total-tokens")) > 128 * 1024
    assert int(after(server_flags(args), "--context-length")) > 128 * 1024
    args.both = True
    assert "--sleep-on-idle" in server_flags(args)


def test_streams_of_the_client_are_ours() -> None:
    one, two = streams(result(64, 2, 0.5, output_lens=[257, 256]))
    # The first chunk of the first answer had two tokens.
    assert (one.chunks[0], one.chunks[-1].tokens) == (Chunk(1.0, 2), 257)
    assert two.chunks[:2] == [Chunk(2.0, 1), Chunk(2.5, 2)]
    with pytest.raises(EvaluationError, match="a request failed: gone"):
        streams(result(64, 1, 0.5, errors=["Traceback\ngone\n"]))
    with pytest.raises(EvaluationError, match="a request failed: no text came"):
        streams(result(64, 1, 0.5, ttfts=[0.0]))
    with pytest.raises(EvaluationError, match="an answer has 200 tokens, asked for were 256"):
        streams(result(64, 1, 0.5, output_lens=[200]))


def item(arm: str, run: int, tpot: float, context: int = 4096, **more: Any) -> dict[str, Any]:
    names = ("ttft_median", "ttft_p99", "output_throughput", "request_throughput", "tpot_median", "tpot_p99")
    times = dict.fromkeys((*names, "itl_median", "itl_p99", "decode_itl_p50", "decode_itl_p99"), tpot * (1 + run))
    place = {"arm": arm, "context": context, "batch": 1, "run": run, "decode_tpot": tpot}
    return {**place, **times, "density": None, "dense_rows": None, **more}


def test_of_several_runs_the_first_and_the_median_count() -> None:
    runs = [item("sparse", i, tpot) for i, tpot in enumerate((1.0, 3.0, 2.0))]
    dense = [item("dense", i, 4.0) for i in range(3)]
    (row,) = summarise([*runs, *dense])
    assert row["runs"] == 3 and row["decode_tpot_ratio"] == 2.0 and row["decode_tpot_range"] == (1.0, 3.0)
    assert row["ttft_median_ratio"] == 4.0 and row["output_throughput_ratio"] == 0.25
    assert summarise(runs) == [] and summarise(dense) == []
    runs = [item("sparse", i, tpot, dense_rows=1.0) for i, tpot in enumerate((1.0, 3.0, 2.0))]
    others = [item("sparse", 0, 5.0, 8192, dense_rows=1.0), item("dense", 0, 4.0, 8192)]
    # However it was decoded; no server need measure longer contexts for this.
    others += [item("sparse", 0, 2.0, 6144, dense_rows=0.0), item("dense", 0, 4.0, 6144)]
    others += [item("sparse", 0, 9.0, 16384, dense_rows=1.0), item("dense", 0, 4.0, 16384)]
    (short,) = short_contexts(summarise([*runs, *dense, *others]))
    assert short["decode_tpot_ratio"] == 0.8 and short["cell"] == "sparse/1x8k" and short["dense_rows"] == 1.0
    assert short["ratios"] == {"1x4k": 2.0, "1x8k": 0.8, "1x6k": 2.0}
    assert short_contexts([]) == []


def test_servers_that_took_turns_have_an_interval_of_their_ratio() -> None:
    def measured(runs: int, in_turn: bool) -> dict[str, Any]:
        # The machine slows down; the sparse server is 2 % faster all the same, but for one run.
        pace = [1 + i / 10 for i in range(runs)]
        dense = [item("dense", i, tpot, in_turn=in_turn) for i, tpot in enumerate(pace)]
        mine = [item("sparse", i, tpot * (1.2 if i == 3 else 0.98), in_turn=in_turn) for i, tpot in enumerate(pace)]
        (row,) = summarise([*dense, *mine])
        return row

    low, high = measured(9, True)["decode_tpot_ratio_interval"]
    assert 0.8 < low <= 1 / 0.98 <= high < 1.2
    assert measured(4, True)["decode_tpot_ratio_interval"] is None
    assert measured(9, False)["decode_tpot_ratio_interval"] is None
    (short,) = short_contexts([measured(9, True)])
    assert short["decode_tpot_ratio_interval"] == (low, high)
