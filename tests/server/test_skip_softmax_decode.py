"""Skip-Softmax in both phases on real servers: dense at a threshold of zero, needles, prefixes, company, retraction."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard import assert_dashboard_shows
from server_requests import (
    RETRACT,
    ask,
    assert_exact,
    assert_nothing_leaked,
    assert_refused,
    cold,
    find_needles,
    greedy,
    sparse_state,
)

from launch.server import ServerProcess
from sglang_sparse import calibrate
from sglang_sparse.methods.skip_softmax.calibration_file import resolved_fields
from sglang_sparse.tools.calibration.mix import long_mix
from sglang_sparse.tools.calibration.prompts import Prompts

pytestmark = pytest.mark.long

MODEL = Path(__file__).parent.parent.parent / "eval" / "models" / "tiny-gqa"
PAGE, LAYERS, TILE = 16, 4, 128
FLAGS = ("--dtype", "float32", "--context-length", "4096")
FACTORS = {"prefill": 250.0, "decode": 100.0}
CONFIG = {"threshold_scale_factor": FACTORS, "dense_fallback": "never", "check_exactness": True}
DENSE = {"sparse": False}
COUNTS = (
    "decode_rows",
    "dense_fallback_rows",
    "sparse_layer_rows",
    "pages_attended",
    "pages_held",
    "blocks_visited",
    "blocks_skipped",
    "rectified_tokens",
)
PREFILL_COUNTS = ("sparse_tokens", "blocks_visited", "blocks_skipped")


def factor(**phases: float) -> dict[str, Any]:
    return {"threshold_scale_factor": phases}


def spent(server: ServerProcess, before: dict[str, int] | None = None) -> dict[str, int]:
    """Return the counts, since ``before`` if given."""
    state = sparse_state(server)
    found = {name: state[name] for name in COUNTS}
    found |= {f"prefill_{name}": state["prefill"][name] for name in PREFILL_COUNTS if "prefill" in state}
    return {name: count - (before[name] if before else 0) for name, count in found.items()}


def each(server: ServerProcess, prompts: list[list[int]], options: dict[str, Any] | None) -> list[list[int]]:
    return [ask(server, prompt, 24, options)["output_ids"] for prompt in prompts]


@pytest.fixture(scope="module")
def some() -> list[list[int]]:
    """Random prompts at and around the ends of blocks, tiles and chunks, and two that part within a tile."""
    rng = random.Random(11)
    found = [[rng.randrange(10, 4000) for _ in range(length)] for length in (40, 192, 257, 512, 705, 1100, 1500)]
    return [*found, [*found[-1][: 9 * TILE + 40], *(rng.randrange(10, 4000) for _ in range(150))]]


@pytest.fixture(scope="module")
def server(serve) -> Iterator[ServerProcess]:
    """Both phases by one flag."""
    flags = ("--chunked-prefill-size", "512", "--enable-metrics")
    with serve(MODEL, *FLAGS, *flags, method="skip_softmax", config=CONFIG) as server:
        yield server


@pytest.fixture(scope="module")
def alone(server, some) -> list[list[int]]:
    return cold(server, some, 24)


def test_a_threshold_of_zero_is_dense_in_both_phases(server, some) -> None:
    server.flush_cache()
    before = spent(server)
    found = each(server, some, {"threshold_scale_factor": 0})
    used = spent(server, before)
    assert used["decode_rows"] >= 23 * len(some) and used["dense_fallback_rows"] == 0
    assert used["sparse_layer_rows"] == LAYERS * used["decode_rows"]
    assert used["prefill_sparse_tokens"] >= 4000 and used["prefill_blocks_skipped"] == 0
    # Rows of no threshold look at no block to skip it.
    assert used["blocks_visited"] == used["blocks_skipped"] == 0 < used["pages_attended"] == used["pages_held"]
    before = spent(server)
    assert each(server, some, DENSE) == found
    used = spent(server, before)
    assert used["dense_fallback_rows"] == used["decode_rows"] and used["prefill_sparse_tokens"] == 0


def test_the_dashboard_shows_what_it_exports(server) -> None:
    assert_dashboard_shows(server, "Decode", "Rectification", "Prefill", "Skip-Softmax")


def test_needles_are_found_while_both_phases_skip_blocks(server, tmp_path: Path) -> None:
    before = spent(server)
    lines = find_needles(server, tmp_path)
    assert all(0.3 < line["skipped"] < 1 and line["density"] == 1.0 for line in lines)
    used = spent(server, before)
    assert 0.3 * used["blocks_visited"] < used["blocks_skipped"] < used["blocks_visited"]
    assert 0.3 * used["prefill_blocks_visited"] < used["prefill_blocks_skipped"] < used["prefill_blocks_visited"]


def test_a_request_sets_each_phase_for_itself(server, some) -> None:
    def counted(options: dict[str, Any] | None) -> tuple[int, int]:
        server.flush_cache()
        before = spent(server)
        ask(server, some[4], 4, options)
        used = spent(server, before)
        return used["prefill_blocks_skipped"], used["blocks_skipped"]

    own = counted(None)
    assert min(own) > 0
    for more, less in ((1000, 10), (200, 1)):
        (high, same_prefill), (low, _) = (counted(factor(decode=value))[::-1] for value in (more, less))
        assert high > low > 0 and same_prefill == own[0]
    high, low = (counted(factor(prefill=value))[0] for value in (1000, 10))
    assert high > own[0] > low > 0
    assert counted(factor(decode=0)) == (own[0], 0) and counted({"threshold_scale_factor": 0}) == (0, 0)


def test_prefixes_and_company_change_nothing(server, some, alone) -> None:
    server.flush_cache()
    each(server, some, None)
    before = spent(server)
    hits = [ask(server, prompt, 24) for prompt in some]
    assert [hit["output_ids"] for hit in hits] == alone
    # The last token must be forwarded, and with it its tile.
    assert [hit["meta_info"]["cached_tokens"] for hit in hits] == [(len(prompt) - 1) // TILE * TILE for prompt in some]
    assert spent(server, before)["prefill_sparse_tokens"] <= len(some) * TILE
    server.flush_cache()
    assert greedy(server, [*some, *some], at_once=8) == [*alone, *alone]
    used = spent(server, before)
    assert used["dense_fallback_rows"] == 0 and used["sparse_layer_rows"] == LAYERS * used["decode_rows"]
    # Another threshold of decode shares the prompt, not the answer.
    assert ask(server, some[-1], 4, factor(decode=7))["meta_info"]["cached_tokens"] == 10 * TILE
    assert_exact(server, 2 * TILE)
    assert_nothing_leaked(server)


def test_rectified_answers_are_exact(server, some) -> None:
    """And shared behind a dense prompt; of what is not rectified nothing is."""
    prompt = some[-2]
    for rectified, more in ((0, 0), (8, 56)):
        asked = {"exact_prefix": True, "rectify_interval": rectified}
        server.flush_cache()
        before = spent(server)
        first = ask(server, prompt, 60, asked)["output_ids"]
        used = spent(server, before)
        assert used["rectified_tokens"] >= more and used["blocks_skipped"] > 0
        cached = ask(server, [*prompt, *first, *some[0]], 2, asked)["meta_info"]["cached_tokens"]
        assert cached == (len(prompt) + more) // PAGE * PAGE
    assert_exact(server, 2 * TILE)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (factor(decode=-1), "threshold_scale_factor: got -1; must be a number from 0 to 1e30"),
        (factor(decode=1, both=2), "allowed on this server: a number, or a mapping with decode and prefill"),
        ({"threshold_scale_factor": "high"}, "threshold_scale_factor: got 'high'"),
    ],
)
def test_bad_options_are_refused(server, options: dict[str, Any], said: str) -> None:
    assert_refused(server, options, said)


def test_two_ranks_without_a_prefix_cache(serve, server, some) -> None:
    """Short rows are dense beside long ones, which skip what they skip on one rank; prefill has a config of its own."""
    short = [prompt for prompt in some if len(prompt) < 600]
    long = [prompt for prompt in some if len(prompt) >= 600]
    expected = [*cold(server, short, 24, factor(prefill=90, decode=0)), *cold(server, long, 24, factor(prefill=90))]
    config = {"threshold_scale_factor": FACTORS, "min_seq_len": 630, "crossover_tokens": 0}
    own = {"threshold_scale_factor": 90, "dense_fallback": "never"}
    flags = ("--tp", "2", "--disable-radix-cache", "--chunked-prefill-size", "512")
    flags += ("--sparse-prefill-method", "skip_softmax", "--sparse-prefill-config", json.dumps(own))
    with serve(MODEL, *FLAGS, *flags, method="skip_softmax", config=config) as ranks:
        assert sparse_state(ranks)["prefill"]["config"]["threshold_scale_factor"] == 90
        assert greedy(ranks, [*short, *long], at_once=8) == expected
        used = spent(ranks)
        assert 0 < used["prefill_blocks_skipped"] < used["prefill_blocks_visited"]
        assert 0 < used["blocks_skipped"] < used["blocks_visited"]
        assert 23 * len(short) <= used["dense_fallback_rows"] < used["decode_rows"]
        assert used["sparse_layer_rows"] > LAYERS * (used["decode_rows"] - used["dense_fallback_rows"])
        assert_nothing_leaked(ranks)


def test_sparse_prefill_in_mixed_batches_under_forced_retraction(serve, server, some) -> None:
    """And without overlap. Decode never skips, and what a retracted request generated is prefilled densely."""
    expected = cold(server, some, 24, factor(decode=0))
    flags = ("--enable-mixed-chunk", "--disable-overlap-schedule", "--chunked-prefill-size", "256")
    config = {**CONFIG, "threshold_scale_factor": {**FACTORS, "decode": 0}}
    with serve(MODEL, *FLAGS, *flags, method="skip_softmax", config=config, env=RETRACT) as mixed:
        assert greedy(mixed, some, at_once=8) == expected
        assert "Testing retraction" in mixed.log()
        used = spent(mixed)
        assert 0 < used["prefill_blocks_skipped"] < used["prefill_blocks_visited"]
        assert used["blocks_visited"] == used["dense_fallback_rows"] == 0
        # The others were decoded beside prompts.
        assert used["decode_rows"] < 23 * len(some)
        assert_exact(mixed, 2 * TILE)
        assert_nothing_leaked(mixed)


def test_a_share_that_was_asked_for_is_skipped(server, tmp_path: Path) -> None:
    """By a calibration of the model, on other prompts than those that it ran.

    It may be off by as much as the file says that the formula is at its worst factor, and by two hundredths more: the
    texts are others, and rows of decode are generated here and a prompt's last ones there.
    """
    file, shares = tmp_path / "skip.json", {"prefill": 0.3, "decode": 0.5}
    config = {"dense_fallback": "never"}
    flags = ["--method", "skip_softmax", "--model-path", str(MODEL), "--lengths", "1k,1500", "--n", "2"]
    assert calibrate.main([*flags, "--sparse-config", json.dumps(config), "--out", str(file)]) == 0
    source = Prompts([], str(MODEL))
    made = [one for n in (1024, 1500) for one in long_mix(2, [n], 1, lambda text: len(source.encode(text)))]
    prompts = [source.encode_messages(one.messages) for one in made]
    resolved = resolved_fields({"calibration_file": str(file), "target_sparsity": shares}, dict)
    server.flush_cache()
    before = spent(server)
    each(server, prompts, factor(**resolved["threshold_scale_factor"]))
    used = spent(server, before)
    for phase, prefix in (("prefill", "prefill_"), ("decode", "")):
        share = used[f"{prefix}blocks_skipped"] / used[f"{prefix}blocks_visited"]
        assert abs(share - shares[phase]) < resolved["calibration"]["fits"][phase]["error"] + 0.02
