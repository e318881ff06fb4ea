"""Models that are served with their towers: tiny Qwen3-VL and Qwen3.5 against transformers.

They are asked about texts, images and videos.
"""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VIDEO, VISION_END, VISION_START, by_transformers
from gif_videos import decoding, sampled
from media import FIRST, MORE, SECOND, THIRD, VIDEO_FILE, Showing, with_image
from media_checkpoints import VIDEO_BRACKETS, random_vision_language
from server_requests import (
    RANKS,
    RETRACT,
    asked_of,
    assert_agrees,
    assert_exact,
    assert_nothing_leaked,
    forced,
    logprobs,
    off,
    plugin,
    random_prompts,
    sparse_state,
    spent,
)
from transformers import AutoTokenizer

# A state is stored at multiples of the last one.
PAGE, INTERVAL, GRID = 16, 16, 64
FLAGS = ("--chunked-prefill-size", "256", "--dtype", "float32")
RESA = {"active_ratio": 0.1, "min_pages": 2, "rectify_interval": INTERVAL, "dense_fallback": "never"}
Likely = Callable[[list[int], list[int]], list[float]]
# And the tokens that are to be generated behind it.
Prompt = tuple[list[int], list[int]]


def drawn(seed: int, tokens: int, prompt: int = 300) -> Prompt:
    """A prompt without an image, and tokens behind it."""
    found, output = random_prompts(seed, [prompt, tokens], 1000)
    return found, output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_vision_language(tmp_path_factory.mktemp("qwen3_vl"), "Qwen3VL")


@pytest.fixture(scope="module")
def likely(model: Path) -> Likely:
    return by_transformers(model, FIRST, SECOND)


@pytest.fixture(scope="module")
def server(serve, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Showing]:
    env = decoding(tmp_path_factory.mktemp("decoder"))
    with serve(model, *FLAGS, config={**RESA, "check_exactness": True}, env=env) as server:
        yield Showing(server)


def test_texts_agree_with_transformers(server: Showing, likely: Likely) -> None:
    assert_agrees(server, likely, *drawn(90, 90), INTERVAL + PAGE)
    assert_exact(server)


@pytest.mark.parametrize("tokens", [141, *(pytest.param(count, marks=pytest.mark.long) for count in (90, 200))])
def test_answers_behind_an_image_agree_with_transformers(server: Showing, likely: Likely, tokens: int) -> None:
    prompt, output = drawn(tokens, tokens)
    assert_agrees(server, likely, with_image(prompt), output, INTERVAL + PAGE - MORE)
    assert_exact(server)
    assert "pages of images and behind them are not recomputed" in server.log()


def test_another_image_at_the_same_place_shares_what_is_before_it(server: Showing, model: Path) -> None:
    prompt, output = drawn(5, 40)
    server.flush_cache()
    for image in (FIRST, SECOND):
        answer = forced(Showing(server.server, image), with_image(prompt), output, sparse=False)
        assert answer["meta_info"]["cached_tokens"] == (0 if image is FIRST else 100 // PAGE * PAGE)
        assert off(answer, by_transformers(model, image)(with_image(prompt), output)) < 1e-4


def assert_several_images_agree(server: Showing, model: Path, lost: int) -> None:
    """Two in a prompt, and one more in the next turn, which finds the generated tokens of the turn before."""
    prompt, output = drawn(7, 90)
    shown = Showing(server.server, SECOND, THIRD, FIRST)
    likely = by_transformers(model, SECOND, THIRD, FIRST)
    first = with_image(with_image(prompt, 200), 60)
    more = MORE + 2 * 3 - 1
    server.flush_cache()
    assert off(forced(shown, first, output), likely(first, output)) > 1e-2
    text, second = drawn(8, 60, 40)
    turn = [*first, *output, *with_image(text, 20)]
    answer = forced(shown, turn, second, sparse=False)
    assert answer["meta_info"]["cached_tokens"] > len(first) + len(output) + more - lost
    assert off(answer, likely(turn, second)) < 1e-4
    server.flush_cache()
    assert_agrees(shown, likely, turn, second, lost - more - MORE)


def test_several_images_agree_with_transformers(server: Showing, model: Path) -> None:
    assert_several_images_agree(server, model, INTERVAL + PAGE)
    assert_exact(server)


def words(model: Path, seed: int, tokens: int) -> list[int]:
    """Tokens that are whole words each: with a video SGLang decodes a prompt and encodes it again."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = {token: tokenizer.decode([token]) for token in range(300, 1000)}
    whole = [token for token, text in found.items() if text[0] == " " and tokenizer.encode(text) == [token]]
    return random.Random(seed).choices(whole, k=tokens)


def assert_a_video_agrees(server: Showing, model: Path, lost: int) -> None:
    """Behind an image; a chunk of the prompt, of 256 tokens, ends within the video."""
    likely = by_transformers(model, FIRST, video=sampled(VIDEO_FILE))
    prompt, output = with_image(with_image(words(model, 1, 300), 220, VIDEO), 50), words(model, 2, 90)
    server.flush_cache()
    more = forced(server, prompt, output[:1], sparse=False)["meta_info"]["prompt_tokens"] - len(prompt)
    assert more > 60 + MORE
    assert_agrees(server, likely, prompt, output, lost - more)


def test_a_video_agrees_with_transformers(server: Showing, model: Path) -> None:
    assert_a_video_agrees(server, model, INTERVAL + PAGE)
    assert_exact(server)


def together(server: Showing, asked: list[tuple[Prompt, dict[str, Any]]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return [*pool.map(lambda one: forced(server, *one[0], **one[1]), asked)]


def assert_images_decode_as_if_alone(server: Showing) -> None:
    """Texts are rectified every few steps; in these steps the image decodes in a pass of the other rows."""
    image = with_image((found := drawn(1, 100))[0]), found[1]
    alone = forced(server, *image, rectify_interval=0)
    server.flush_cache()
    before = sparse_state(server)
    texts = [(drawn(seed, 120), {"rectify_interval": 4}) for seed in range(2, 5)]
    found = together(server, [(image, {"rectify_interval": 0}), *texts])
    assert spent(server, before)["second_passes"] > 10
    assert off(found[0], logprobs(alone)) < 1e-4


def assert_follow_ups_agree(
    server: Showing, likely: Likely, lost: int = INTERVAL + PAGE, draw: Callable[[int, int, int], Prompt] = drawn
) -> list[dict[str, Any]]:
    """Texts and images are rectified together, in passes that several share; returns the answers before.

    Follow-ups hit all tokens but ``lost``.
    """
    asked = [draw(seed, 60 + 7 * seed, 150 + 30 * seed) for seed in range(6)]
    asked = [(with_image(prompt, 40) if seed % 2 else prompt, output) for seed, (prompt, output) in enumerate(asked)]
    # Two images.
    asked[3] = with_image(asked[3][0], 200), asked[3][1]
    server.flush_cache()
    answers = together(server, [(one, {}) for one in asked])
    for prompt, output in asked:
        follow_up, last = [*prompt, *output, *range(20, 29)], output[:20]
        answer = forced(server, follow_up, last, sparse=False)
        assert answer["meta_info"]["cached_tokens"] > len(prompt) + len(output) - lost
        assert off(answer, likely(follow_up, last)) < 1e-4
    return answers


def test_texts_and_images_share_steps_and_rectifying_passes(server: Showing, likely: Likely) -> None:
    assert_images_decode_as_if_alone(server)
    assert_follow_ups_agree(server, likely)
    assert_nothing_leaked(server)


def test_retracted_requests_and_those_made_exact_at_their_end_agree(serve, model: Path, likely: Likely) -> None:
    """SGLang has forgotten the images of a request when its tail is encoded again."""
    with serve(model, *FLAGS, config={**RESA, "rectify_on_finish": True}, env=RETRACT) as server:
        before = sparse_state(server)
        answers = assert_follow_ups_agree(Showing(server), likely)
        assert any(answer["meta_info"]["num_retractions"] for answer in answers[1::2])
        assert spent(server, before)["finish_tokens_rectified"] > 0
        assert_nothing_leaked(server)


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [("--tp-size", "2"), RANKS, ("--pp-size", "2"), ("--disable-overlap-schedule",), ("--disable-radix-cache",)],
)
def test_other_servers_agree(
    serve, model: Path, likely: Likely, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    prompt, output = with_image((found := drawn(1, 90))[0]), found[1]
    with serve(model, *FLAGS, *flags, config=RESA) as server:
        if flags == RANKS:
            asked_of(server, 0, monkeypatch)
        if "--disable-radix-cache" in flags:
            assert off(forced(Showing(server), prompt, output, active_ratio=1.0), likely(prompt, output)) < 1e-4
        else:
            assert_agrees(Showing(server), likely, prompt, output, INTERVAL + PAGE - MORE)
        # Of ranks, which one's counts come first is left open.
        if flags != RANKS:
            assert_images_decode_as_if_alone(Showing(server))
        assert_nothing_leaked(server)


@pytest.mark.long
def test_turns_behind_images_that_come_back_from_host_memory_agree(serve, model: Path, likely: Likely) -> None:
    """Each prompt takes the place of the others, whose answers come back as far as they were rectified."""
    flags = ("--max-total-tokens", "1024", "--context-length", "1024", "--enable-hierarchical-cache")
    with serve(model, *FLAGS, *flags, "--hicache-ratio", "6", config=RESA) as server:
        shown, asked = Showing(server), [drawn(seed, 100, 500) for seed in (5, 6, 7)]
        first = [(with_image(prompt), output) for prompt, output in asked]
        for prompt, output in first:
            forced(shown, prompt, output)
        for prompt, output in first:
            turn, before = [*prompt, *output, *range(20, 29)], sparse_state(server)
            second = forced(shown, turn, output[:20], active_ratio=1.0)
            assert off(second, likely(turn, output[:20])) < 1e-4
            from_host = second["meta_info"]["cached_tokens_details"]["host"]
            assert from_host > len(prompt) + len(output) - INTERVAL - PAGE
            assert spent(server, before)["arrived_pages_summarised"] == from_host // PAGE
        assert_nothing_leaked(server)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("rocketkv", {"prompt_budget": 10240, "topk": 10240}),
        ("rocketkv", {"prompt_budget": 10240, "topk": 10240, "eviction": "compact"}),
        ("skip_softmax", {"threshold_scale_factor": 0}),
    ],
)
def test_other_methods_that_leave_nothing_out_agree(
    serve, model: Path, likely: Likely, method: str, config: dict[str, Any]
) -> None:
    config = {**config, "rectify_interval": 0, "dense_fallback": "never"}
    prompt, output = drawn(6, 90)
    with serve(model, *FLAGS, method=method, config=config) as server:
        before = sparse_state(server)
        for asked in (prompt, with_image(prompt), with_image(prompt, 290)):
            assert off(forced(Showing(server), asked, output), likely(asked, output)) < 1e-4
        assert spent(server, before)["sparse_layer_rows"] > 0
        assert_nothing_leaked(server)


@pytest.mark.parametrize(
    ("family", "flags", "env"),
    [
        ("Qwen3_5", (), {}),
        *(
            pytest.param(*of, marks=pytest.mark.long)
            for of in (
                ("Qwen3_5Moe", (), {}),
                ("Qwen3_5", (), RETRACT),
                ("Qwen3_5", ("--tp-size", "2"), {}),
                ("Qwen3_5", RANKS, {}),
            )
        ),
    ],
)
def test_models_with_states_agree(
    serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, flags: tuple[str, ...], env: dict[str, str]
) -> None:
    """What is shared of an answer ends where a state was stored."""
    model = random_vision_language(tmp_path / "model", family)
    likely, lost, env = by_transformers(model, FIRST, SECOND), GRID + 1, {**decoding(tmp_path), **env}
    with serve(model, *FLAGS, "--mamba-track-interval", str(GRID), *flags, config=RESA, env=env) as server:
        if flags == RANKS:
            asked_of(server, 0, monkeypatch)
        shown = Showing(server)
        assert_agrees(shown, likely, *drawn(7, 90), lost)
        answers = assert_follow_ups_agree(shown, likely, lost)
        if RETRACT.items() <= env.items():
            assert any(answer["meta_info"]["num_retractions"] for answer in answers[1::2])
        elif not flags:
            assert_images_decode_as_if_alone(shown)
            assert_several_images_agree(shown, model, lost)
            assert_a_video_agrees(shown, model, lost)
        assert_nothing_leaked(server)


def by_dense_decode(server: Showing) -> Likely:
    """What the server says dense, from an empty cache, once: for videos that transformers was not asked about."""
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}

    def likely(prompt: list[int], tokens: list[int]) -> list[float]:
        if (key := (tuple(prompt), tuple(tokens))) not in known:
            server.flush_cache()
            known[key] = logprobs(forced(server, prompt, tokens, sparse=False))
        return known[key]

    return likely


@pytest.mark.long
@pytest.mark.parametrize("family", ["Qwen3VLMoe", "Qwen2_5_VL", "Glm4v", "Glm4vMoe"])
def test_other_families_agree(serve, tmp_path: Path, family: str) -> None:
    """With prompts whose words are encoded as they were: SGLang encodes those of GLM again."""
    model = random_vision_language(tmp_path / "model", family)
    likely, prompt, output = by_transformers(model, FIRST, SECOND), words(model, 7, 300), words(model, 8, 90)
    begin, end = VIDEO_BRACKETS.get(family, (VISION_START, VISION_END))
    video = with_image([*prompt[:200], begin, VIDEO, end, *prompt[200:]], 50)

    def draw(seed: int, tokens: int, held: int = 300) -> Prompt:
        return words(model, seed, held), words(model, seed + 100, tokens)

    env = {**decoding(tmp_path), **RETRACT}
    with serve(model, *FLAGS, config={**RESA, "check_exactness": True}, env=env) as server:
        shown = Showing(server)
        assert_agrees(shown, likely, prompt, output, INTERVAL + PAGE)
        answers = assert_follow_ups_agree(shown, likely, draw=draw)
        assert any(answer["meta_info"]["num_retractions"] for answer in answers[1::2])
        more = forced(shown, video, output[:1], sparse=False)["meta_info"]["prompt_tokens"] - len(video)
        assert more > 2 * MORE
        assert_agrees(shown, by_dense_decode(shown), video, output, INTERVAL + PAGE - more)
        assert_exact(server)
        assert_nothing_leaked(server)


@pytest.mark.long
def test_without_the_positions_behind_images_follow_ups_are_wrong(
    serve, tmp_path: Path, model: Path, likely: Likely
) -> None:
    forget = "partial_batch.position_shift = lambda request: 0"
    environment = plugin(tmp_path, "forget", "from sglang_sparse.scheduler import partial_batch", forget)
    with serve(model, *FLAGS, config=RESA, env=environment) as server:
        assert_agrees(server, likely, *drawn(1, 90), INTERVAL + PAGE)
        prompt, output = drawn(2, 90)
        with pytest.raises(AssertionError):
            assert_agrees(Showing(server), likely, with_image(prompt), output, INTERVAL + PAGE - MORE)


@pytest.mark.long
def test_without_their_images_rows_decode_elsewhere(serve, tmp_path: Path, model: Path) -> None:
    environment = plugin(
        tmp_path,
        "forget",
        "from sglang_sparse.scheduler import rectification",
        "kept = rectification.decode_view",
        "def forget(batch, rows):",
        "    (view := kept(batch, rows)).multimodal_inputs = [None] * len(rows)",
        "    return view",
        "rectification.decode_view = forget",
    )
    with serve(model, *FLAGS, config=RESA, env=environment) as server, pytest.raises(AssertionError):
        assert_images_decode_as_if_alone(Showing(server))
