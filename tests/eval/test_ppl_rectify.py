"""The perplexity command without a server: settings, requests, refusals, figures and the plot."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval import ppl_rectify
from eval.live.client import checked
from eval.live.counters import COUNTED, EvaluationError, density, moved, require_dense, require_sparse
from eval.live.forced import bound_requests, custom_params, forced_logprobs, forced_request, prefill_logprobs
from eval.scores.ppl_summary import Cell, closing_fraction, drifts, plot, summarise
from eval.scores.stats import resamples, standard_error
from eval.texts.windows import SCORED, Window

NOTHING: dict[str, int] = dict.fromkeys(COUNTED, 0)


def counts(**given: int) -> dict[str, int]:
    return {**NOTHING, **given}


def params_of(request: dict[str, Any]) -> dict[str, Any]:
    return request["sampling_params"]["custom_params"]


def test_settings_leave_intervals_beyond_the_suffix_out() -> None:
    cells = ppl_rectify.make_cells("book", [0.1, 0.2], [0, 64, 8, 32], suffix=64)
    assert cells == [
        Cell("book", "dense"),
        *(
            cell
            for ratio in (0.1, 0.2)
            for cell in (
                Cell("book", "off", ratio, 0),
                Cell("book", "rectified", ratio, 8),
                Cell("book", "rectified", ratio, 32),
                Cell("book", "bound", ratio),
            )
        ),
    ]
    assert custom_params(cells[0], "active_ratio") == {"sparse": False}
    asked = [custom_params(cell, "active_ratio") for cell in cells[1:5]]
    assert [params["rectify_interval"] for params in asked] == [0, 8, 32, 0]
    assert all(params["active_ratio"] == 0.1 for params in asked)


def test_bound_requests_decode_one_scored_token_each() -> None:
    tokens = list(range(100, 300))
    window = Window("book", 0, tuple(tokens))
    requests = bound_requests(window, 64, {"active_ratio": 0.1})
    assert len(requests) == SCORED
    for p, request in zip(range(168, 200), requests, strict=True):
        assert request["input_ids"] == tokens[: p - 1]
        assert request["sampling_params"]["custom_params"] == {
            "active_ratio": 0.1,
            "forced_tokens": tokens[p - 1 : p + 1],
        }
        assert request["sampling_params"]["max_new_tokens"] == 2
    # With a suffix of 32 the first scored token is the first after the prompt, in every setting.
    first, second = bound_requests(window, SCORED, {})[:2]
    assert first["input_ids"] == second["input_ids"] == tokens[:168]
    assert len(bound_requests(replace(window, scored=8), 64, {})) == 8
    assert params_of(first) == {"forced_tokens": [268]} and params_of(second) == {"forced_tokens": [268, 269]}


def test_forced_output_is_checked() -> None:
    assert forced_request([1], [7, 8], {})["sampling_params"]["ignore_eos"]
    answer = {"meta_info": {"output_token_logprobs": [[-1.0, 7, None], [-2.0, 8, None]]}}
    assert forced_logprobs(answer, [7, 8]) == [-1.0, -2.0]
    with pytest.raises(EvaluationError, match="does not know `forced_tokens`"):
        forced_logprobs(answer, [7, 9])
    answer["meta_info"]["output_token_logprobs"][1][0] = math.nan
    with pytest.raises(EvaluationError, match="1 of 2 log-probabilities"):
        forced_logprobs(answer, [7, 8])


@pytest.mark.parametrize(
    # The vocabulary's last token is named 0.
    ("named", "right", "wrong"),
    [(7, [7, 8], [[8, 9]]), (0, [4095, 8], [[7, 8], [9, 4095], [4095, 4094, 8]])],
)
def test_prefill_logprobs_are_of_the_tokens_expected(named: int, right: list[int], wrong: list[list[int]]) -> None:
    answer = {"meta_info": {"input_token_logprobs": [(None, 5, None), (-1.0, named, None), (-2.0, 8, None)]}}
    assert prefill_logprobs(answer, right) == [-1.0, -2.0]
    for expected in wrong:
        with pytest.raises(EvaluationError, match="other tokens"):
            prefill_logprobs(answer, expected)


def test_answers_are_whole_or_refused() -> None:
    whole = {"meta_info": {"finish_reason": {"type": "length"}, "num_retractions": 0}}
    assert checked(whole) is whole
    for broken, message in (
        ({"error": {"message": "too long"}}, "too long"),
        ({"meta_info": {"finish_reason": {"type": "abort"}}}, "abort"),
        ({"meta_info": {"finish_reason": None}}, "not finished"),
        ({"meta_info": {"finish_reason": {"type": "length"}, "num_retractions": 1}}, "lower the concurrency"),
    ):
        with pytest.raises(EvaluationError, match=message):
            checked(broken)


def test_counters_prove_what_ran() -> None:
    before, after = counts(pages_held=5, decode_rows=1), {**counts(pages_held=25, decode_rows=9), "config": {}}
    assert moved(before, after) == counts(pages_held=20, decode_rows=8)
    sparse = counts(decode_rows=8, sparse_layer_rows=32, pages_attended=5, pages_held=20)
    assert density(sparse) == 0.25 and density(NOTHING) is None
    require_sparse("off", sparse, rectifying=False)
    require_sparse("f=8", {**sparse, "rectified_tokens": 8}, rectifying=True)
    require_dense("dense", counts(decode_rows=8, dense_fallback_rows=8))
    require_dense("dense", {**sparse, "pages_attended": 20})


@pytest.mark.parametrize(
    ("changed", "rectifying", "message"),
    [
        ({"sparse_layer_rows": 0, "pages_attended": 0, "pages_held": 0}, False, "nothing ran sparse"),
        ({"pages_attended": 20}, False, "nothing ran sparse"),
        ({"dense_fallback_rows": 2}, False, "2 of 8 rows ran dense"),
        ({"rectified_tokens": 8}, False, "rectified 8 tokens, wanted none"),
        ({}, True, "rectified nothing"),
    ],
)
def test_sparse_settings_without_proof_are_refused(changed: dict[str, int], rectifying: bool, message: str) -> None:
    sparse = counts(decode_rows=8, sparse_layer_rows=32, pages_attended=5, pages_held=20)
    with pytest.raises(EvaluationError, match=f"the setting: .*{message}"):
        require_sparse("the setting", {**sparse, **changed}, rectifying)


def test_dense_settings_without_proof_are_refused() -> None:
    with pytest.raises(EvaluationError, match="attended to 5 of 20 pages"):
        require_dense("dense", counts(pages_attended=5, pages_held=20))
    with pytest.raises(EvaluationError, match="rectified 4 tokens"):
        require_dense("dense", counts(rectified_tokens=4))


def test_servers_that_would_run_dense_are_refused() -> None:
    limits = {"page_size": 16, "dense_fallback": "auto", "min_seq_len": 0, "crossover_tokens": 0}
    config = {**limits, "active_ratio": 0.1, "min_pages": 4}
    assert ppl_rectify.require_settings(config, 3840, 4096, [0.02, 0.05, 0.1]) == "active_ratio"
    assert ppl_rectify.require_settings({**limits, "theta1": 0.9}, 3840, 4096, [0.9, 0.95]) == "theta1"
    with pytest.raises(EvaluationError, match="none of active_ratio, theta1"):
        ppl_rectify.require_settings({**limits, "topk": 64}, 3840, 4096, [0.1])
    ppl_rectify.require_settings({**config, "dense_fallback": "never", "min_seq_len": 9999}, 3840, 4096, [0.1])
    for field in ("min_seq_len", "crossover_tokens"):
        with pytest.raises(EvaluationError, match=f"its {field} is 4096"):
            ppl_rectify.require_settings({**config, field: 4096}, 3840, 4096, [0.1])
    with pytest.raises(EvaluationError, match="min_pages 16"):
        ppl_rectify.require_settings({**config, "min_pages": 16}, 3840, 4096, [0.02, 0.05, 0.1])
    with pytest.raises(EvaluationError, match="fewer than all"):
        ppl_rectify.require_settings({**config, "min_pages": 16}, 256, 512, [0.1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--base-url and --out are needed"),
        (["--from", "x.jsonl"], "--from needs --plot"),
        (["--suffix", "31"], "--suffix must be at least 32"),
        (["--length", "256", "--suffix", "256"], "below --length"),
        (["--intervals=-8,0"], "--intervals"),
        (["--ratios", "0.1,1"], "--ratios must be between 0 and 1"),
        (["--kind", "book,poem"], "--kind: got poem, allowed: book, repeat"),
        (["--windows", "0"], "--windows"),
        (["--stride", "255"], "--stride must be at least --suffix"),
        (["--concurrency", "0"], "--concurrency"),
        (["--book", "a/x.txt", "--book", "b/x.txt"], "--book: two files have the same name, a/x.txt and b/x.txt"),
    ],
)
def test_command_line(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["--base-url", "http://127.0.0.1:1", "--out", "x.jsonl"]
    with pytest.raises(SystemExit, match="2"):
        ppl_rectify.parse(given if message.startswith(("--base", "--from")) else [*needed, *given])
    assert message in capsys.readouterr().err


def test_defaults() -> None:
    args = ppl_rectify.parse(["--base-url", "http://127.0.0.1:1", "--out", "x.jsonl"])
    assert args.book is None and args.intervals == [8, 16, 32, 64, 128, 0] and args.ratios == [0.02, 0.05, 0.1]
    assert (
        args.kind == ["book", "repeat", "records"]
        and args.windows is None
        and (args.length, args.suffix) == (4096, 256)
    )


def test_no_server_ends_with_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--base-url", "http://127.0.0.1:1", "--out", str(tmp_path / "x.jsonl")]
    assert ppl_rectify.main(arguments) == 1
    assert "eval.ppl_rectify: " in capsys.readouterr().err
    assert not (tmp_path / "x.jsonl").exists()


def nll_rows(text: str, values: dict[tuple[str, float | None, int | None], list[float]]) -> list[dict[str, Any]]:
    return [
        {"kind": "item", **Cell(text, *setting)._asdict(), "window": i, "scores": {"nll": nll}}
        for setting, nlls in values.items()
        for i, nll in enumerate(nlls)
    ]


ROWS = nll_rows(
    "book",
    {
        ("dense", None, None): [1.0, 2.0, 3.0, 4.0],
        ("off", 0.1, 0): [1.5, 2.4, 3.6, 4.5],
        ("rectified", 0.1, 8): [1.1, 2.2, 3.1, 4.2],
        ("rectified", 0.1, 32): [1.3, 2.3, 3.3, 4.3],
        ("bound", 0.1, None): [1.1, 2.0, 3.2, 4.1],
    },
)


def test_closing_fraction() -> None:
    weights = resamples(4, seed=0)
    bound = np.array([1.0, 2.0, 3.0, 4.0])
    off = bound + np.array([0.4, 0.6, 0.4, 0.6])
    half = bound + np.array([0.2, 0.3, 0.2, 0.3])
    for rectified, expected in ((off, 0.0), (half, 0.5), (bound, 1.0)):
        value, spread = closing_fraction(off, rectified, bound, weights)
        # The same share is won back in every window, so that no resample differs.
        assert value == pytest.approx(expected)
        assert spread == pytest.approx((expected, expected), abs=1e-9)
    value, spread = closing_fraction(off, bound + np.array([0.0, 0.6, 0.0, 0.6]), bound, weights)
    assert value == pytest.approx(0.4)
    assert spread is not None and spread[0] == pytest.approx(0.0) and spread[1] == pytest.approx(1.0)


def test_closing_fraction_of_nothing() -> None:
    weights, bound = resamples(2, seed=0), np.array([1.0, 2.0])
    assert closing_fraction(bound, bound, bound, weights) == (None, None)
    value, spread = closing_fraction(bound + np.array([0.5, -0.1]), bound, bound, weights)
    assert value == pytest.approx(1.0) and spread is None


def test_drift_rule() -> None:
    bound = np.zeros(4)
    # Mean .5, standard error .1 and a little less or more.
    error = 0.1 * math.sqrt(3)
    for factor, expected in ((0.99, True), (1.01, False)):
        lost = 0.5 + factor * error * np.array([1.0, -1.0, 1.0, -1.0])
        assert standard_error(lost) == pytest.approx(0.1 * factor * 2 / math.sqrt(4))
        assert drifts(lost, bound) is expected
    assert not drifts(bound, bound)
    assert not drifts(bound - 1, bound)


def test_summary() -> None:
    given = [*ROWS, {"kind": "counters", **Cell("book", "off", 0.1, 0)._asdict(), "density": 0.11}, {"kind": "header"}]
    summary = summarise(given, seed=0)
    assert summary == summarise(given, seed=0)
    dense, off, often, seldom, bound = summary
    assert dense["nll"] == 2.5 and dense["ppl"] == pytest.approx(math.exp(2.5)) and dense["windows"] == 4
    assert dense["diff"] == 0 and dense["diff_interval"] == (0, 0) and "drifts" not in dense
    assert off["diff"] == pytest.approx(0.5) and off["density"] == 0.11 and "closing" not in off
    assert off["diff_interval"][0] == pytest.approx(0.425, abs=0.02) and off["drifts"]
    assert often["closing"] == pytest.approx((3.0 - 2.65) / (3.0 - 2.6)) and seldom["closing"] == pytest.approx(0.5)
    assert often["closing_interval"][0] < often["closing"] < often["closing_interval"][1]
    assert bound["drifts"] and "closing" not in bound


def test_summary_refuses_missing_windows() -> None:
    with pytest.raises(EvaluationError, match="has 3 windows where dense has 4"):
        summarise(ROWS[:-1])
    with pytest.raises(EvaluationError, match="where dense has 0"):
        summarise(ROWS[4:])


@pytest.mark.parametrize("name", ["ppl.png", "ppl.svg"])
def test_plot_from_a_file(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    repeat = [{**row, "task": "repeat"} for row in ROWS]
    (tmp_path / "ppl.jsonl").write_text("\n".join(json.dumps(row) for row in [{"kind": "header"}, *ROWS, *repeat]))
    arguments = ["--from", str(tmp_path / "ppl.jsonl"), "--plot", str(tmp_path / name)]
    assert ppl_rectify.main(arguments) == 0
    assert (tmp_path / name).stat().st_size > 5000
    assert capsys.readouterr().out.count("rectified") == 4


def test_plot_shows_all_settings(tmp_path: Path) -> None:
    plot(summarise(ROWS), tmp_path / "ppl.svg")
    text = (tmp_path / "ppl.svg").read_text()
    for label in ("dense", "ratio 0.1", "bound, ratio 0.1", "never", "32", "perplexity"):
        assert f"<!-- {label} -->" in text
