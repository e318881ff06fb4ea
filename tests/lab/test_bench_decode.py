"""Stream parsing, arithmetic of times, refusals and prompts of the decode benchmark, without a server."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.lab import bench_decode
from eval.lab.bench_decode import parse, random_prompts, request_of, require_capacity
from eval.lab.servers.decode_peers import Peer, bound_ratio, summarise
from eval.lab.servers.server_facts import allocated
from eval.live.client import Chunk, Stream, parse_stream
from eval.live.counters import EvaluationError
from eval.serving.measurement import decode_figures, shared_window, whole_periods

FACTS = {"max_total_num_tokens": 10_000, "page_size": 16, "disable_radix_cache": False}


def steady(first: float, step: float, tokens: int, sent: float = 0.0) -> Stream:
    """A stream of one token a chunk at even distances."""
    return Stream(sent, [Chunk(first + i * step, i + 1) for i in range(tokens)], cached_tokens=0)


def event(tokens: int, reason: str | None = None, **meta: Any) -> bytes:
    finish = None if reason is None else {"type": reason}
    body = {"meta_info": {"finish_reason": finish, "completion_tokens": tokens, "cached_tokens": 48, **meta}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def test_streams_are_parsed_by_token_counts() -> None:
    two = event(4) + event(5)
    last = event(6, "length") + b"data: [DONE]\n\n"
    # Merged tokens, two events in one piece, an event in two pieces, and one without a new token.
    raw = [(1.0, event(1)), (2.0, event(3)), (3.0, two), (3.5, event(5)), (4.0, last[:20]), (4.1, last[20:])]
    assert parse_stream(0.5, raw) == Stream(
        0.5, [Chunk(1, 1), Chunk(2, 3), Chunk(3, 4), Chunk(3, 5), Chunk(4.1, 6)], 48
    )


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "without an answer"),
        (event(1), "not finished"),
        (event(1) + event(1, "abort"), "abort"),
        (event(2, "length", num_retractions=1), "retracted"),
        (b'data: {"error": {"message": "too long"}}\n\ndata: [DONE]\n\n', "too long"),
    ],
)
def test_broken_streams_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        parse_stream(0.0, [(1.0, raw)])


def test_the_window_is_where_all_decode() -> None:
    assert shared_window([steady(1.0, 1.0, 10), steady(4.0, 1.0, 10)]) == (4.0, 10.0)
    with pytest.raises(EvaluationError, match="does not run the batch"):
        shared_window([steady(1.0, 1.0, 3), steady(4.0, 1.0, 3)])


def test_time_per_token_counts_in_the_window_alone() -> None:
    # Alone the first request takes .1 s a token, together with the second .5 s.
    first = Stream(
        0.0, [Chunk(1.0, 1), Chunk(1.1, 2), Chunk(1.2, 3), *(Chunk(1.5 + i / 2, 4 + i) for i in range(9))], 0
    )
    second = Stream(0.0, [Chunk(1.5 + i / 2, 1 + i) for i in range(9)], 0)
    second.chunks.extend([Chunk(5.6, 10), Chunk(5.7, 11)])
    figures = decode_figures([first, second])
    assert figures["tpot"] == pytest.approx([0.5, 0.5]) and figures["tpot_mean"] == pytest.approx(0.5)
    assert figures["ttft"] == [1.0, 1.5] and figures["tokens"] == [8, 8]
    assert figures["itl_p50"] == figures["itl_max"] == pytest.approx(0.5) and figures["merged"] == 0


def test_merged_chunks_are_counted_as_their_tokens() -> None:
    merged = Stream(0.0, [Chunk(1.0, 1), Chunk(2.0, 2), Chunk(4.0, 4), Chunk(5.0, 5)], 0)
    figures = decode_figures([merged])
    assert figures["tpot_mean"] == pytest.approx(1.0) and figures["tokens"] == [4]
    assert figures["itl_p99"] == pytest.approx(1.0) and figures["itl_max"] == pytest.approx(2.0)
    assert figures["merged"] == pytest.approx(1 / 3)


def test_whole_intervals_hold_their_share_of_rectifications() -> None:
    # A step takes 1 s, every fourth one 5 s: 2 s on average. 15 gaps hold three of the four long steps.
    chunks = [Chunk(i + 4 * (i // 4), i + 1) for i in range(16)]
    assert decode_figures([Stream(-1.0, chunks, 0)])["tpot_mean"] == pytest.approx(27 / 15)
    figures = decode_figures([Stream(-1.0, chunks, 0)], period=4)
    assert figures["tpot_mean"] == pytest.approx(2.0) and figures["tokens"] == [12]
    for offset in range(4):
        assert decode_figures([Stream(-1.0, chunks[offset:], 0)], period=4)["tpot_mean"] == pytest.approx(2.0)
    assert whole_periods(chunks[:4], 4) == [] and len(whole_periods(chunks[:5], 4)) == 5


def test_windows_of_few_tokens_are_refused() -> None:
    with pytest.raises(EvaluationError, match="only 3 of 10 tokens"):
        decode_figures([steady(1.0, 1.0, 10), steady(7.0, 1.0, 10)])
    with pytest.raises(EvaluationError, match="only 0 of 4 tokens"):
        decode_figures([steady(1.0, 1.0, 4)], period=4)


def test_bound_ratio() -> None:
    # Dense attention over the context is 8 of 10 s, one of 32 tokens pays for it.
    assert bound_ratio(3.3, 2.75, 10.0, 2.0, 32) == pytest.approx(1.1)


TPOTS = {
    "dense": [10.0, 11.0, 9.0],
    "dense_short": [2.0] * 3,
    "sparse": [2.75, 2.7, 2.8],
    "rectified": [3.3, 3.2, 3.4],
}
ROUNDS = [
    {"arm": arm, "round": i, "tpot_mean": values[i], "ttft": [0.1, 0.1 * i], "density": 0.1}
    for i in range(3)
    for arm, values in TPOTS.items()
]


def test_summary() -> None:
    summary = {row["arm"]: row for row in summarise(ROUNDS, interval=32, backend="fa3")}
    assert list(summary) == list(TPOTS) and summary["sparse"]["dense"] == "fa3"
    rectified = summary["rectified"]
    assert rectified["tpot"] == 3.3 and rectified["tpot_range"] == (3.2, 3.4) and rectified["rounds"] == 3
    assert rectified["dense_ratio"] == pytest.approx(10 / 3.3)
    assert rectified["dense_ratio_range"] == pytest.approx((9 / 3.4, 11 / 3.2))
    assert rectified["bound_ratio"] == pytest.approx(1.1)
    assert rectified["bound_ratio_range"] == pytest.approx((3.2 / (2.7 + 9 / 32), 3.4 / (2.8 + 7 / 32)))
    assert summary["dense"]["dense_ratio"] == 1 and "bound_ratio" not in summary["sparse"]
    assert rectified["ttft"] == pytest.approx(0.1)
    no_short = {row["arm"]: row for row in summarise([row for row in ROUNDS if row["arm"] != "dense_short"], 32)}
    assert "bound_ratio" not in no_short["rectified"]


def test_summary_against_peers() -> None:
    peers = [Peer("triton", "t.jsonl", 5, 40.0, (39.0, 41.0)), Peer("flashinfer", "f.jsonl", 3, 8.0, (7.0, 8.5))]
    alone, summary = summarise(ROUNDS, 32, "fa3"), summarise(ROUNDS, 32, "fa3", peers)
    dense, triton, flashinfer, short, sparse, rectified = summary
    assert {row.get("dense") for row in summary} == {"flashinfer (peer)", None} and "dense_ratio" not in short
    assert rectified["dense_ratio"] == pytest.approx(8 / 3.3)
    assert rectified["dense_ratio_range"] == pytest.approx((8 / 3.4, 8 / 3.2))
    assert sparse["dense_ratio"] == pytest.approx(8 / 2.75)
    # What is rectified on this server costs what its own dense arm says.
    assert rectified["bound_ratio"] == alone[-1]["bound_ratio"] == pytest.approx(1.1)
    assert dense["dense_ratio"] == 0.8 and dense["dense_ratio_range"] == pytest.approx((8 / 11, 8 / 9))
    assert triton["arm"] == flashinfer["arm"] == "peer" and triton["dense_ratio"] == 0.2
    assert flashinfer["dense_ratio"] == 1 and flashinfer["tpot"] == 8 and flashinfer["tpot_range"] == (7.0, 8.5)
    assert flashinfer["backend"] == "flashinfer" and flashinfer["file"] == "f.jsonl" and flashinfer["rounds"] == 3
    # A peer that is slower, or as fast, is a row and nothing else.
    tie = Peer("flashinfer", "f.jsonl", 3, 10.0, (9.0, 11.0))
    own, *beside, _, _, last = summarise(ROUNDS, 32, "fa3", [peers[0], tie])
    assert own["dense"] == last["dense"] == "fa3" and last["dense_ratio_range"] == alone[-1]["dense_ratio_range"]
    assert [row["dense_ratio"] for row in beside] == [0.25, 1] and beside[1]["dense_ratio_range"] == (0.9, 1.1)


def test_what_the_allocator_did_between_two_states() -> None:
    before = {"decode_steps": 10, "allocator": {"allocations": 100, "held_bytes": 5, "peak_bytes": 7}}
    after = {"decode_steps": 30, "allocator": {"allocations": 150, "held_bytes": 5, "peak_bytes": 9}}
    assert allocated(before, after) == {"allocations_per_step": 2.5, "peak_bytes": 9}
    assert allocated(before, {**after, "decode_steps": 10})["allocations_per_step"] is None
    nothing = {"allocations_per_step": None, "peak_bytes": None}
    assert allocated({**before, "allocator": None}, {**after, "allocator": None}) == nothing
    assert allocated({}, {}) == nothing


def test_prompts_share_no_prefix() -> None:
    prompts = random_prompts(50, 20, 60, seed=0)
    assert {len(prompt) for prompt in prompts} == {20} and all(
        0 <= token < 60 for prompt in prompts for token in prompt
    )
    assert len({prompt[0] for prompt in prompts}) == 50
    assert prompts == random_prompts(50, 20, 60, seed=0) != random_prompts(50, 20, 60, seed=1)
    with pytest.raises(EvaluationError, match="batch of 61"):
        random_prompts(61, 20, 60, seed=0)


def test_requests_are_of_fixed_length() -> None:
    request = request_of([1, 2], 64, {"sparse": False})
    assert request["sampling_params"] == {
        "temperature": 0,
        "max_new_tokens": 64,
        "ignore_eos": True,
        "custom_params": {"sparse": False},
    }


def test_servers_without_room_are_refused() -> None:
    require_capacity(FACTS, batch=2, context=3844, short=100, tokens=256)
    with pytest.raises(EvaluationError, match="needs 10002 tokens of KV, the server has 10000"):
        require_capacity(FACTS, batch=2, context=3945, short=0, tokens=256)
    with pytest.raises(EvaluationError, match="no prefix cache"):
        require_capacity({**FACTS, "disable_radix_cache": True}, batch=2, context=3844, short=100, tokens=256)


def test_arms() -> None:
    needed = ["--base-url", "http://127.0.0.1:1", "--out", "x.jsonl", "--shape", "x", "--batch", "2", "--context", "64"]
    args = parse([*needed, "--short", "16", "--active-ratio", "0.05"])
    arms = {arm.name: arm for arm in bench_decode.make_arms(args, 100)}
    assert list(arms) == ["dense", "dense_short", "sparse", "rectified"]
    assert arms["dense"].params == arms["dense_short"].params == {"sparse": False}
    assert arms["sparse"].params == {"rectify_interval": 0, "active_ratio": 0.05}
    assert arms["rectified"].params == {"rectify_interval": 32, "active_ratio": 0.05}
    assert arms["dense"].prompts == arms["sparse"].prompts == arms["rectified"].prompts
    assert [len(prompt) for prompt in arms["dense_short"].prompts] == [16, 16]
    dense_only = parse([*needed, "--dense-only"])
    assert dense_only.short == 0
    (stock,), (own,) = (bench_decode.make_arms(dense_only, 100, counted) for counted in (False, True))
    assert (stock.name, stock.params, stock.prompts) == ("dense", {}, arms["dense"].prompts)
    assert own.params == {"sparse": False} and own.counted and not stock.counted
    no_short = parse([*needed, "--short", "0"])
    assert [arm.params for arm in bench_decode.make_arms(no_short, 100)][1:] == [
        {"rectify_interval": 0},
        {"rectify_interval": 32},
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tokens", "255"], "--tokens must be at least 8 times --interval, got 255"),
        (["--interval", "64"], "--tokens must be at least 8 times --interval, got 256"),
        (["--interval", "0"], "--interval must be at least 1"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--context", "1024"], "--short must be 0, or more and below --context"),
        (["--dense-only", "--short", "16"], "--short is of the arms that --dense-only leaves out"),
        (["--dense-only", "--active-ratio", ".1"], "--active-ratio is of the arms that --dense-only leaves out"),
        (["--dense-only", "--peer", "x.jsonl"], "--peer is of the arms that --dense-only leaves out"),
        (["--shape", ""], "--base-url needs --shape"),
        (["--again", "y.jsonl"], "argument --again: not allowed with argument --base-url"),
    ],
)
def test_command_line(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--base-url", "http://127.0.0.1:1", "--out", "x.jsonl", "--shape", "x", *given])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--again needs --peer"),
        (["--peer", "p.jsonl", "--batch", "6"], "--batch is of a measurement: --again takes that of its file"),
        (["--peer", "p.jsonl", "--shape", "x"], "--shape is of a measurement"),
        (["--peer", "p.jsonl", "--revision", "x"], "--revision is of a measurement"),
        (["--peer", "p.jsonl", "--out", "./in.jsonl"], "is what --again reads: give another file"),
    ],
)
def test_what_does_not_go_with_again(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--again", "in.jsonl", "--out", "out.jsonl", *given])
    assert message in capsys.readouterr().err


def test_no_server_ends_with_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--base-url", "http://127.0.0.1:1", "--out", str(tmp_path / "x.jsonl"), "--shape", "x"]
    assert bench_decode.main(arguments) == 1
    assert "eval.lab.bench_decode: " in capsys.readouterr().err
    assert not (tmp_path / "x.jsonl").exists()
