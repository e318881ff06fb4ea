"""Models whose layers with windows or chunks have a KV pool of their own, which frees what lies before these."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from approximate import ask, assert_same
from checkpoints import by_transformers, random_eagle3
from server_requests import (
    RANKS,
    RETRACT,
    ask_all,
    asked_of,
    assert_agrees,
    assert_nothing_leaked,
    cold,
    forced,
    off,
    plugin,
    prompts_that_part,
    random_prompts,
    sparse_state,
    spent,
)
from window_checkpoints import random_chunked, random_gemma4, random_windowed

from launch.server import ServerProcess

PAGE, WINDOW = 16, 64
# With an interval of a page, or prompts that end early in a chunk, SGLang keeps what a pass reads of the chunk anyway.
INTERVAL, PROMPT = 32, 316
FLAGS = ("--chunked-prefill-size", "256", "--dtype", "float32")
RESA = {"active_ratio": 0.1, "min_pages": 2, "rectify_interval": INTERVAL, "dense_fallback": "never"}
SKIP_PREFILL = ("--sparse-prefill-method", "skip_softmax")
SKIP_PREFILL += ("--sparse-prefill-config", '{"threshold_scale_factor": 0, "crossover_tokens": 64}')
# SGLang frees a window's past every 128 tokens otherwise.
AT_ONCE = {"SGLANG_SWA_EVICTION_INTERVAL": "1"}
Likely = Callable[[list[int], list[int]], list[float]]


class Model(NamedTuple):
    """A checkpoint, and its layers of full attention."""

    folder: Path
    full: str


@pytest.fixture(scope="module", params=["Mellum", "Llama4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "Llama4":
        return Model(random_chunked(folder, WINDOW), "3,7")
    return Model(random_windowed(folder, request.param, WINDOW), "2,5")


@pytest.fixture(scope="module")
def likely(model: Model) -> Likely:
    return by_transformers(model.folder)


@pytest.fixture(scope="module")
def server(serve, model: Model) -> Iterator[ServerProcess]:
    with serve(model.folder, *FLAGS, config=RESA, env=AT_ONCE) as server:
        yield server


@pytest.mark.parametrize("tokens", [141, pytest.param(90, marks=pytest.mark.long)])
def test_follow_ups_hit_generated_tokens_and_agree(
    server: ServerProcess, model: Model, likely: Likely, tokens: int
) -> None:
    assert "Use sliding window memory pool" in server.log() and sparse_state(server)["config"]["layers"] == model.full
    (prompt,), (output,) = random_prompts(tokens, [PROMPT], 1000), random_prompts(tokens + 1, [tokens], 1000)
    assert_agrees(server, likely, prompt, output, INTERVAL + PAGE)
    # Without rectification the prompt alone is shared, and windows are freed as on a dense server.
    server.flush_cache()
    forced(server, prompt, output, rectify_interval=0)
    follow_up, last = [*prompt, *output, 20], output[:20]
    assert off(forced(server, follow_up, last, sparse=False), likely(follow_up, last)) < 1e-4
    assert_nothing_leaked(server)


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("GptOss", ("--moe-runner-backend", "triton")),
        # With sinks in its windows, and keys and values of different widths.
        pytest.param("MiMoV2Flash", (), marks=pytest.mark.long),
        pytest.param("Laguna", (), marks=pytest.mark.long),
    ],
)
def test_other_models_agree_as_they_are_served_by_default(
    serve, tmp_path: Path, family: str, flags: tuple[str, ...]
) -> None:
    likely = by_transformers(random_windowed(tmp_path, family, WINDOW))
    (prompt,), (output,) = random_prompts(1, [300], 1000), random_prompts(2, [141], 1000)
    with serve(tmp_path, *FLAGS, *flags, config=RESA, env=AT_ONCE) as server:
        assert "Use sliding window memory pool" in server.log()
        assert_agrees(server, likely, prompt, output, INTERVAL + PAGE)
        assert_nothing_leaked(server)


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "rank"),
    [(("--pp-size", "2"), None), (RANKS, 1)],
    ids=["stages", "ranks"],
)
def test_stages_and_ranks_agree(
    serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], rank: int | None
) -> None:
    """A stage has two pools for its own layers; a rank rectifies while the other one has no rows."""
    likely = by_transformers(random_windowed(tmp_path, "GptOss", WINDOW))
    (prompt,), (output,) = random_prompts(1, [300], 1000), random_prompts(2, [90], 1000)
    more = (*FLAGS, "--moe-runner-backend", "triton")
    with serve(tmp_path, *more, *flags, config=RESA, env=AT_ONCE) as server:
        assert "Use sliding window memory pool" in server.log()
        # Both ranks have rows, of which one prefills while the other one decodes and rectifies.
        with ThreadPoolExecutor() as pool:
            cut = [prompt[:length] for length in (300, 90, 200, 256)]
            found = pool.map(lambda one: forced(server, one, output, active_ratio=1.0), cut)
            for one, answer in zip(cut, found, strict=True):
                assert off(answer, likely(one, output)) < 1e-4
        asked_of(server, rank, monkeypatch)
        server.flush_cache()
        assert_agrees(server, likely, prompt, output, INTERVAL + PAGE)
        assert_nothing_leaked(server)


@pytest.mark.long
def test_drafts_are_verified(serve, tmp_path: Path) -> None:
    """By a head whose drafts are hardly ever right, then the model's own: all of these answers are a dense server's.

    And so are answers behind sparse ones, in windows that the head's verifications have kept.
    """
    model = random_windowed(tmp_path / "model", "GptOss", WINDOW)
    flags = (*FLAGS, "--moe-runner-backend", "triton")
    prompts, ends = random_prompts(9, (150, 280, 335), 1000), random_prompts(10, (3, 3, 3), 1000)

    def turns(answers: list[dict[str, Any]]) -> list[list[int]]:
        return [[*one, *got["output_ids"], *end] for one, got, end in zip(prompts, answers, ends, strict=True)]

    head = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path")
    head += (str(random_eagle3(tmp_path / "head", model)), "--speculative-num-steps", "3")
    head += ("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
    with serve(model, *flags, *head, config=RESA, env=AT_ONCE) as server:
        whole = ask_all(server, prompts, 60, {"active_ratio": 1.0})
        server.flush_cache()
        sparse = ask_all(server, prompts, 60)
        behind = ask_all(server, turns(sparse), 20, {"active_ratio": 1.0})
        for got, turn in zip(behind, turns(sparse), strict=True):
            # Keys of the tree are pairs of tokens, of whole pages.
            assert got["meta_info"]["cached_tokens"] > len(turn) - len(ends[0]) - INTERVAL - 2 * PAGE
        assert_nothing_leaked(server)
    own = ("--speculative-algorithm", "SPARSE_SELF", *SKIP_PREFILL)
    with serve(model, *flags, *own, config={**RESA, "rectify_interval": 0}, env=AT_ONCE) as server:
        lossless = ask_all(server, prompts, 60)
        later = ask_all(server, turns(lossless), 20)
        assert sparse_state(server)["accepted_tokens"] > 0
        assert_nothing_leaked(server)
    with serve(model, *flags, env=AT_ONCE) as server:
        for found, asked in ((whole, prompts), (lossless, prompts), (later, turns(lossless)), (behind, turns(sparse))):
            dense = ask_all(server, asked, len(found[0]["output_ids"]))
            assert [answer["output_ids"] for answer in found] == [answer["output_ids"] for answer in dense]
        assert all(one["output_ids"] != other["output_ids"] for one, other in zip(sparse, whole, strict=True))


@pytest.mark.long
def test_prompts_come_back_from_host_memory_and_a_store(serve, tmp_path: Path) -> None:
    """Two prompts fill the KV pool; what arrives has its summaries computed again, and no token changes."""
    model = random_windowed(tmp_path / "model", "Mellum", WINDOW)
    (store := tmp_path / "store").mkdir()
    flags = ("--max-total-tokens", "2048", "--context-length", "2048", *FLAGS, "--enable-hierarchical-cache")
    flags += ("--hicache-ratio", "6", "--hicache-storage-backend", "file")
    flags += ("--hicache-storage-prefetch-policy", "wait_complete")
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(store)}
    prompts, first = random_prompts(11, (900, 700, 801, 650, 930), 1000), []
    for place in ("host", "storage"):
        with serve(model, *flags, config=RESA, env=env) as server:
            first = first or [ask(server, prompt, 40) for prompt in prompts]
            for prompt, expected in zip(prompts, first, strict=True):
                before = sparse_state(server)
                answer = ask(server, prompt, 40)
                assert_same(answer, expected)
                arrived = answer["meta_info"]["cached_tokens_details"][place]
                assert arrived >= len(prompt) - PAGE
                assert spent(server, before)["arrived_pages_summarised"] == arrived // PAGE
            assert_nothing_leaked(server)
            written, deadline = None, time.monotonic() + 60
            while written != (written := len([*store.iterdir()])) and time.monotonic() < deadline:
                time.sleep(5)


@pytest.mark.parametrize("dim", [64, pytest.param(512, marks=pytest.mark.long)])
def test_text_of_gemma_4_agrees(serve, tmp_path: Path, dim: int) -> None:
    """Its layers of full attention have another dimension of heads and fewer KV heads than those with windows."""
    likely = by_transformers(random_gemma4(tmp_path, WINDOW, dim))
    (prompt,), (output,) = random_prompts(1, [300], 1000), random_prompts(2, [141], 1000)
    text = ("--json-model-override-args", '{"language_model_only": true}')
    with serve(tmp_path, *FLAGS, *text, config=RESA, env=AT_ONCE) as server:
        assert "Use sliding window memory pool" in server.log()
        state = sparse_state(server)
        assert state["config"]["layers"] == "2,5" and state["sparse_layers"] == 2
        assert_agrees(server, likely, prompt, output, INTERVAL + PAGE)
        assert_nothing_leaked(server)
    config = {"threshold_scale_factor": 0, "dense_fallback": "never"}
    with serve(tmp_path, *FLAGS, *text, method="skip_softmax", config=config, env=AT_ONCE) as server:
        assert off(forced(server, prompt, output), likely(prompt, output)) < 1e-4
        assert sparse_state(server)["sparse_layer_rows"] > 0


@pytest.mark.long
def test_without_the_kept_windows_follow_ups_are_wrong(serve, tmp_path: Path, model: Model, likely: Likely) -> None:
    """The control: rectification reads slots that SGLang has freed."""
    forget = plugin(
        tmp_path,
        "forget",
        "from sglang_sparse.scheduler import exact_kv",
        "exact_kv.kept_from = lambda request, length: length",
    )
    differences = []
    with serve(model.folder, *FLAGS, config=RESA, env={**AT_ONCE, **forget}) as server:
        for tokens in (90, 141, 200):
            (prompt,), (output,) = random_prompts(tokens, [PROMPT], 1000), random_prompts(tokens + 1, [tokens], 1000)
            forced(server, prompt, output)
            follow_up, last = [*prompt, *output, *range(20, 29)], output[:20]
            differences.append(off(forced(server, follow_up, last, sparse=False), likely(follow_up, last)))
    # SGLang takes what the tree has for what a prefill has just computed, too.
    assert max(differences) > 1e-3, differences


def test_requests_together_share_a_small_pool_of_windows(serve, model: Model, likely: Likely) -> None:
    """Requests are retracted, windows in the prefix cache are evicted, and follow-ups agree all the same."""
    flags = ("--max-total-tokens", "4096", "--swa-full-tokens-ratio", "0.25", "--max-running-requests", "6")
    with serve(model.folder, *FLAGS, *flags, config=RESA, env={**AT_ONCE, **RETRACT}) as server:
        prompts = random_prompts(5, (150, 180, 210, 250, 290, 335), 1000)
        before, shared = sparse_state(server), 0
        for tokens in (60, 120):
            answers = ask_all(server, prompts, tokens)
            for prompt, answer in zip(prompts, answers, strict=True):
                follow_up, last = [*prompt, *answer["output_ids"], 21, 22], answer["output_ids"][:10]
                found = forced(server, follow_up, last, sparse=False)
                assert off(found, likely(follow_up, last)) < 1e-4
                shared += found["meta_info"]["cached_tokens"]
        assert spent(server, before)["rectified_tokens"] > 0 < shared and "retracted" in server.log().lower()
        assert_nothing_leaked(server)


def test_prefill_runs_sparse_in_the_layers_of_full_attention(serve, model: Model, likely: Likely) -> None:
    group = 128
    prefill = {"block_size": 32, "step": group // 32, "dense_tail": 0, "theta": 0.5, "crossover_tokens": 2 * group}
    prompts = prompts_that_part(8, 4 * group, [(0, 100), (40, 129), (100, 300)])
    with serve(model.folder, *FLAGS, prefill=prefill, env=AT_ONCE) as server:
        found = [answer["output_ids"] for answer in ask_all(server, prompts, at_once=1)]
        state = sparse_state(server)["prefill"]
        assert state["config"]["layers"] == model.full and 0 < state["pairs_attended"] < state["pairs_causal"]
        again = ask_all(server, prompts, at_once=1)
        assert [answer["output_ids"] for answer in again] == found == cold(server, prompts)
        assert sum(answer["meta_info"]["cached_tokens"] for answer in again) > 3 * group
        for options in ({"exact_prefix": True}, {"theta": 1e9}):
            server.flush_cache()
            answer = forced(server, prompts[2], prompts[1][:20], **options)
            assert off(answer, likely(prompts[2], prompts[1][:20])) < 1e-4
        assert_nothing_leaked(server)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "config", "flags"),
    [
        ("resa", RESA, ("--disable-radix-cache", "--max-running-requests", "4")),
        ("rocketkv", {"prompt_budget": 10240, "topk": 10240, "dense_fallback": "never"}, ()),
        ("skip_softmax", {"threshold_scale_factor": 0, "dense_fallback": "never"}, SKIP_PREFILL),
    ],
)
def test_other_methods_and_an_unshared_pool_agree(
    serve, model: Model, likely: Likely, method: str, config: dict[str, object], flags: tuple[str, ...]
) -> None:
    (prompt,), (tokens,) = random_prompts(6, [300], 1000), random_prompts(7, [90], 1000)
    everything = {"active_ratio": 1.0} if method == "resa" else {}
    with serve(model.folder, *FLAGS, *flags, method=method, config=config, env=AT_ONCE) as server:
        before = sparse_state(server)
        assert off(forced(server, prompt, tokens, **everything), likely(prompt, tokens)) < 1e-4
        after, used = sparse_state(server), spent(server, before)
        assert used["sparse_layer_rows"] > 0 and (used["rectified_tokens"] > 0 or method != "resa")
        assert flags != SKIP_PREFILL or after["prefill"]["sparse_tokens"] > before["prefill"]["sparse_tokens"]
        assert_nothing_leaked(server)
