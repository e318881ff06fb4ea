"""Models whose windowed layers stay dense in one KV pool, against transformers: tiny Gemma 3, gpt-oss and others.

Gpt-oss has attention sinks in all layers.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkpoints import by_transformers
from safetensors.torch import load_file, save_file
from server_requests import (
    ask,
    ask_all,
    assert_agrees,
    assert_exact,
    assert_nothing_leaked,
    cold,
    forced,
    off,
    prompts_that_part,
    random_prompts,
    sparse_state,
    spent,
)
from window_checkpoints import random_chunked, random_windowed

from launch.server import ServerProcess

PAGE, WINDOW, FULL, INTERVAL = 16, 64, 2, 16
CHUNKS = ("--chunked-prefill-size", "256", "--dtype", "float32")
RESA = {"active_ratio": 0.1, "min_pages": 2, "rectify_interval": INTERVAL, "dense_fallback": "never"}
ONE_POOL = ("--disable-hybrid-swa-memory", "--moe-runner-backend", "triton")
SKIP = {"threshold_scale_factor": 0, "dense_fallback": "never"}
SKIP_PREFILL = ("--sparse-prefill-method", "skip_softmax", "--sparse-prefill-config", json.dumps(SKIP))
ALL = {"active_ratio": 1.0, "rectify_interval": 0}
Likely = Callable[[list[int], list[int]], list[float]]


class Model(NamedTuple):
    """A checkpoint and the flags of its servers."""

    folder: Path
    flags: tuple[str, ...]


@pytest.fixture(scope="module", params=["Gemma3", "GptOss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = random_windowed(tmp_path_factory.mktemp(request.param), request.param, WINDOW)
    return Model(folder, (*CHUNKS, *(ONE_POOL if request.param == "GptOss" else ())))


@pytest.fixture(scope="module")
def likely(model: Model) -> Likely:
    return by_transformers(model.folder)


@pytest.fixture(scope="module")
def server(serve, model: Model) -> Iterator[ServerProcess]:
    with serve(model.folder, *model.flags, config={**RESA, "check_exactness": True}) as server:
        yield server


def test_the_layers_of_full_attention_run_sparse(server: ServerProcess) -> None:
    state = sparse_state(server)
    assert state["sparse_layers"] == FULL and state["config"]["layers"] == "2,5"
    assert "method resa, 2 of 6 layers (2, 5), page size 16" in server.log()
    # Bfloat16 summaries of two layers: two means of 32 elements for 16 tokens of each of 2 KV heads.
    assert state["aux_bytes_accounted"] == FULL * 16 * state["aux_bytes_accounted"] // 32
    before = sparse_state(server)
    ask(server, [*range(10, 310)], 20)
    used = spent(server, before)
    assert used["sparse_layer_rows"] == FULL * used["decode_rows"] > 0


@pytest.mark.parametrize("options", [{"sparse": False}, ALL], ids=["dense", "all"])
def test_dense_and_all_pages_agree_with_transformers(
    server: ServerProcess, likely: Likely, options: dict[str, Any]
) -> None:
    for prompt, tokens in zip(
        random_prompts(1, (40, 300, 555), 1000), random_prompts(2, (30, 90, 40), 1000), strict=True
    ):
        assert off(forced(server, prompt, tokens, **options), likely(prompt, tokens)) < 1e-4


@pytest.mark.parametrize("tokens", [90, 141, 200])
def test_follow_ups_hit_generated_tokens_and_agree(server: ServerProcess, likely: Likely, tokens: int) -> None:
    (prompt,) = random_prompts(tokens, [256], 1000)
    first = forced(server, prompt, output := random_prompts(tokens + 1, [tokens], 1000)[0])
    assert off(first, likely(prompt, output)) > 1e-2, "a tenth of the pages gives other answers"
    follow_up = [*prompt, *output, *range(20, 29)]
    last = random_prompts(3, [20], 1000)[0]
    second = forced(server, follow_up, last, sparse=False)
    assert second["meta_info"]["cached_tokens"] >= (256 + tokens - INTERVAL) // PAGE * PAGE
    assert off(second, likely(follow_up, last)) < 1e-4
    assert_exact(server)


def test_requests_together_are_those_alone(server: ServerProcess) -> None:
    prompts = random_prompts(5, (150, 210, 280, 290, 335, 410), 1000)
    server.flush_cache()
    together = ask_all(server, prompts, 60, {"active_ratio": 1.0})
    server.flush_cache()
    alone = ask_all(server, prompts, 60, {"sparse": False}, at_once=1)
    assert [answer["output_ids"] for answer in together] == [answer["output_ids"] for answer in alone]
    ask_all(server, prompts, 60)
    assert_exact(server)
    assert_nothing_leaked(server)


@pytest.mark.parametrize(
    ("family", "seen", "flags"),
    [
        ("Olmo3", WINDOW, ()),
        pytest.param("Cohere2", WINDOW + 1, (), marks=pytest.mark.long),
        pytest.param("GraniteSWA", WINDOW, ONE_POOL[:1], marks=pytest.mark.long),
        pytest.param("Afmoe", WINDOW, (), marks=pytest.mark.long),
        pytest.param("Mellum", WINDOW, ONE_POOL[:1], marks=pytest.mark.long),
    ],
)
def test_other_families_agree_with_transformers(
    serve, tmp_path: Path, family: str, seen: int, flags: tuple[str, ...]
) -> None:
    """In Cohere 2's windows SGLang sees one token more than transformers."""
    likely = by_transformers(random_windowed(tmp_path, family, WINDOW), sliding_window=seen)
    (prompt,), (tokens,) = random_prompts(6, [300], 1000), random_prompts(7, [90], 1000)
    with serve(tmp_path, *CHUNKS, *flags, config=RESA) as server:
        assert sparse_state(server)["config"]["layers"] == "2,5"
        assert_agrees(server, likely, prompt, tokens, INTERVAL + PAGE)
        assert_nothing_leaked(server)


@pytest.mark.parametrize(
    ("method", "config", "flags"), [("resa", RESA, ()), ("skip_softmax", SKIP, SKIP_PREFILL)], ids=["resa", "skip"]
)
def test_capped_logits_agree_with_transformers(
    serve, tmp_path: Path, method: str, config: dict[str, Any], flags: tuple[str, ...]
) -> None:
    """Gemma 2's other layers have windows. Without its cap it is another model, by more than is allowed here."""
    likely = by_transformers(random_windowed(tmp_path, "Gemma2", WINDOW))
    (prompt,), (tokens,) = random_prompts(6, [300], 1000), random_prompts(7, [90], 1000)
    found, other = likely(prompt, tokens), by_transformers(tmp_path, attn_logit_softcapping=None)(prompt, tokens)
    assert max(abs(one - two) for one, two in zip(found, other, strict=True)) > 0.1
    with serve(tmp_path, *CHUNKS, *flags, method=method, config=config) as server:
        assert sparse_state(server)["config"]["layers"] == "1,3,5"
        if method == "resa":
            assert_agrees(server, likely, prompt, tokens, INTERVAL + PAGE)
        else:
            assert off(forced(server, prompt, tokens), found) < 1e-4
            state = sparse_state(server)
            assert state["sparse_layer_rows"] > 0 and state["prefill"]["sparse_tokens"] > 0
        assert_nothing_leaked(server)


def test_text_of_llama_4_agrees_with_transformers_in_one_pool(serve, tmp_path: Path) -> None:
    """SGLang knows the chunks in the class with towers alone."""
    likely = by_transformers(random_chunked(tmp_path, WINDOW, towers=False))
    (prompt,), (tokens,) = random_prompts(6, [300], 1000), random_prompts(7, [90], 1000)
    class_ = ("--json-model-override-args", '{"architectures": ["Llama4ForConditionalGeneration"]}')
    with serve(tmp_path, *CHUNKS, *ONE_POOL[:1], *class_, config={**RESA, "check_exactness": True}) as server:
        assert sparse_state(server)["config"]["layers"] == "3,7"
        assert_agrees(server, likely, prompt, tokens, INTERVAL + PAGE)
        assert_exact(server)
        assert_nothing_leaked(server)


def test_without_its_sinks_gpt_oss_is_another_model(tmp_path: Path) -> None:
    """The sinks move log-probabilities by more than 0.1, so the agreement to 1e-4 above covers them."""
    prompt, tokens = random_prompts(6, [300, 90], 1000)
    found = by_transformers(random_windowed(tmp_path, "GptOss", WINDOW))(prompt, tokens)
    weights = load_file(file := tmp_path / "model.safetensors")
    save_file(
        {name: tensor - 100 * name.endswith(".sinks") for name, tensor in weights.items()}, file, {"format": "pt"}
    )
    without = by_transformers(tmp_path)(prompt, tokens)
    assert max(abs(one - other) for one, other in zip(found, without, strict=True)) > 0.1


def test_prefill_runs_sparse_in_the_same_layers(serve, model: Model, likely: Likely) -> None:
    group = 128
    prefill = {"block_size": 32, "step": group // 32, "dense_tail": 0, "theta": 0.5, "crossover_tokens": 2 * group}
    prompts = prompts_that_part(8, 4 * group, [(0, 100), (40, 129), (100, 300)])
    with serve(model.folder, *model.flags, prefill={**prefill, "check_exactness": True}) as server:
        state = sparse_state(server)["prefill"]
        assert state["sparse_layers"] == FULL and state["config"]["layers"] == "2,5"
        found = [answer["output_ids"] for answer in ask_all(server, prompts, at_once=1)]
        state = sparse_state(server)["prefill"]
        assert 0 < state["pairs_attended"] < state["pairs_causal"]
        assert cold(server, prompts) == found
        for options in ({"exact_prefix": True}, {"theta": 1e9}):
            server.flush_cache()
            answer = forced(server, prompts[2], prompts[1][:20], **options)
            assert off(answer, likely(prompts[2], prompts[1][:20])) < 1e-4
        assert_exact(server, 2 * group)
        assert_nothing_leaked(server)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "config", "flags"),
    [
        ("rocketkv", {"prompt_budget": 10240, "topk": 10240}, ()),
        ("skip_softmax", {"threshold_scale_factor": 0}, SKIP_PREFILL),
    ],
)
def test_other_methods_that_leave_nothing_out_agree(
    serve, model: Model, likely: Likely, method: str, config: dict[str, Any], flags: tuple[str, ...]
) -> None:
    config = {**config, "rectify_interval": 0, "dense_fallback": "never"}
    (prompt,), (tokens,) = random_prompts(6, [300], 1000), random_prompts(7, [90], 1000)
    with serve(model.folder, *model.flags, *flags, method=method, config=config) as server:
        before = sparse_state(server)
        assert off(forced(server, prompt, tokens), likely(prompt, tokens)) < 1e-4
        after = sparse_state(server)
        used = spent(server, before)
        assert used["sparse_layer_rows"] == FULL * used["decode_rows"] > 0
        assert not flags or after["prefill"]["sparse_tokens"] > before["prefill"]["sparse_tokens"]
        assert not flags or after["prefill"]["config"]["layers"] == "2,5"
        assert_nothing_leaked(server)


def test_lossless_answers_are_dense(serve, model: Model, server: ServerProcess) -> None:
    prompts = random_prompts(9, (150, 280, 335), 1000)
    dense = [answer["output_ids"] for answer in ask_all(server, prompts, 60, {"sparse": False})]
    config = {**RESA, "rectify_interval": 0, "check_exactness": True}
    with serve(model.folder, *model.flags, "--speculative-algorithm", "SPARSE_SELF", config=config) as drafting:
        assert [answer["output_ids"] for answer in ask_all(drafting, prompts, 60)] == dense
        assert sparse_state(drafting)["accepted_tokens"] > 0
        assert_exact(drafting)
        assert_nothing_leaked(drafting)
