"""Models whose other layers have recurrent states: tiny ones against transformers."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checkpoints import by_transformers, random_hybrid
from server_requests import (
    RANKS,
    RETRACT,
    asked_of,
    assert_abort_leaks_nothing,
    assert_nothing_leaked,
    assert_refused,
    forced,
    off,
    plugin,
    random_prompts,
    sparse_state,
    spent,
)

from launch.server import ServerProcess

# A state is stored at multiples of 64 tokens: of a prompt the last one, and of an answer those behind.
PAGE, GRID = 16, 64
FLAGS = ("--chunked-prefill-size", "256", "--mamba-track-interval", str(GRID))
INTERVAL = 24
RECTIFIED = {"active_ratio": 0.1, "min_pages": 2, "dense_fallback": "never", "rectify_interval": INTERVAL}
RESA = {**RECTIFIED, "rectify_interval": 0}
# Rows run sparse from 350 tokens on: some states of an answer are exact, and the later ones are not.
LATER = {"active_ratio": 0.1, "min_pages": 2, "min_seq_len": 350, "crossover_tokens": 0, "rectify_interval": 0}
NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule", "--page-size", "1")
Likely = Callable[[list[int], list[int]], list[float]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_hybrid(tmp_path_factory.mktemp("qwen3-next"))


@pytest.fixture(scope="module")
def likely(model: Path) -> Likely:
    return by_transformers(model)


@pytest.fixture(scope="module")
def server(serve, model: Path) -> Iterator[ServerProcess]:
    with serve(model, *FLAGS, config=RESA) as server:
        yield server
        assert_nothing_leaked(server)


@pytest.fixture
def careless(tmp_path: Path) -> dict[str, str]:
    """The environment of a server that shares the states which this package keeps to their requests."""
    return plugin(
        tmp_path,
        "careless",
        "from sglang_sparse.hooks import model_kinds",
        "from sglang_sparse.scheduler import exact_kv",
        "model_kinds.MODEL_KINDS = ()",
        "exact_kv.exact_checkpoint = lambda original, tree, *of: original(tree, *of)",
    )


def test_the_layers_that_attend_run_sparse(server: ServerProcess) -> None:
    state = sparse_state(server)
    assert state["sparse_layers"] == 1 and state["config"]["layers"] == "3"
    # Two means of 32 bfloat16 elements for 16 tokens of each of 2 KV heads, in a layer of four.
    assert "aux memory 16 bytes per token" in server.log()
    before = sparse_state(server)
    forced(server, *random_prompts(1, (300, 20), 1000))
    used = spent(server, before)
    assert used["sparse_layer_rows"] == used["decode_rows"] > 0
    assert_refused(
        server, {"rectify_interval": 16}, "rectify_interval: got 16, allowed on this server: 0; it keeps no copies"
    )


@pytest.mark.parametrize("options", [{"sparse": False}, {"active_ratio": 1.0}], ids=["dense", "all"])
def test_dense_and_all_pages_agree_with_transformers(
    server: ServerProcess, likely: Likely, options: dict[str, Any]
) -> None:
    prompts, answers = random_prompts(1, (40, 300, 555), 1000), random_prompts(2, (30, 90, 40), 1000)
    for prompt, tokens in zip(prompts, answers, strict=True):
        server.flush_cache()
        assert off(forced(server, prompt, tokens, **options), likely(prompt, tokens)) < 1e-4


def stopped(server: ServerProcess, prompt: list[int], tokens: list[int]) -> None:
    """Have tokens generated whose last one ends the answer: SGLang has launched a further step by then."""
    end = {"stop_token_ids": [tokens[-1]], "custom_params": {"forced_tokens": [*tokens, 7, 7, 7]}}
    answer = server.generate(input_ids=prompt, sampling_params={"max_new_tokens": 400, "temperature": 0.0, **end})
    assert answer["output_ids"] == tokens


def assert_prompts_are_shared(
    server: ServerProcess, likely: Likely, lengths: tuple[int, ...], tokens: tuple[int, ...]
) -> list[int]:
    """Ask for sparse answers together, then for what follows on each; return how many tokens these hit."""
    prompts, answers = random_prompts(5, lengths, 1000), random_prompts(6, tokens, 1000)
    follow_ups = [[*prompt, *answer, *range(20, 29)] for prompt, answer in zip(prompts, answers, strict=True)]
    (last,) = random_prompts(7, [20], 1000)
    with ThreadPoolExecutor(len(prompts)) as pool:
        first = [*pool.map(lambda prompt, answer: forced(server, prompt, answer), prompts, answers)]
        second = [*pool.map(lambda prompt: forced(server, prompt, last, sparse=False), follow_ups)]
    differences = [off(got, likely(*asked)) for got, *asked in zip(first, prompts, answers, strict=True)]
    assert max(differences) > 1e-2, "a tenth of the pages gives other answers"
    for got, prompt in zip(second, follow_ups, strict=True):
        assert off(got, likely(prompt, last)) < 1e-4
    return [got["meta_info"]["cached_tokens"] for got in second]


@pytest.mark.parametrize(
    ("flags", "env", "shares"),
    [
        ((), {}, True),
        ((), RETRACT, True),
        (("--disable-radix-cache",), {}, False),
        pytest.param(("--tp-size", "2"), {}, True, marks=pytest.mark.long),
    ],
    ids=["plain", "retracted", "unshared", "two ranks"],
)
def test_follow_ups_hit_prompts_alone_and_agree(
    serve, model: Path, likely: Likely, flags: tuple[str, ...], env: dict[str, str], shares: bool
) -> None:
    """Six rows at once, on and off the grid of states, with answers that end on it and off it."""
    lengths, tokens = (128, 150, 256, 290, 335, 410), (64, 141, 90, 94, 200, 38)
    with serve(model, *FLAGS, *flags, config=RESA, env=env) as server:
        hits = assert_prompts_are_shared(server, likely, lengths, tokens)
        # What is prefilled again after a retraction is exact, with its states. Chunks may end off the grid.
        ends = [length + (answer if env else 0) for length, answer in zip(lengths, tokens, strict=True)]
        assert all(GRID <= hit <= end if shares else hit == 0 for hit, end in zip(hits, ends, strict=True)), hits
        assert_abort_leaks_nothing(server, input_ids=random_prompts(8, [200], 1000)[0])


@pytest.mark.parametrize(
    ("flags", "env"),
    [((), {}), ((), RETRACT), pytest.param(RANKS, {}, marks=pytest.mark.long)],
    ids=["plain", "retracted", "ranks"],
)
def test_rectified_answers_are_shared_up_to_their_last_state(
    serve, model: Path, likely: Likely, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], env: dict[str, str]
) -> None:
    """Six rows at once: a state is stored in the step that rectifies its row, at each multiple of 64 tokens."""
    lengths, tokens = (128, 150, 256, 290, 335, 410), (64, 141, 90, 94, 200, 38)
    with serve(model, *FLAGS, *flags, config=RECTIFIED, env=env) as server:
        if flags:
            asked_of(server, 1, monkeypatch)
        hits = assert_prompts_are_shared(server, likely, lengths, tokens)
        assert sum(state["sparse"]["rectified_tokens"] for state in server.server_info()["internal_states"]) > 0
        for length, answer, hit in zip(lengths, tokens, hits, strict=True):
            # The last token of an answer is not computed.
            end = (length + answer - 1) // GRID * GRID
            assert hit >= (end if end > length else GRID), hits
        if not flags:
            # Of ranks, which one's counts come first is left open.
            assert_abort_leaks_nothing(server, input_ids=random_prompts(8, [200], 1000)[0])
        assert_nothing_leaked(server)


@pytest.mark.parametrize(
    ("count", "flags", "is_careless"),
    [
        # Each row ends while the step that would store its next state is in flight.
        (127, (), False),
        (81, (), True),
        pytest.param(81, RANKS, False, marks=pytest.mark.long),
    ],
    ids=["kept", "control", "ranks"],
)
def test_states_that_no_pass_has_room_for_are_not_shared(
    serve,
    model: Path,
    likely: Likely,
    careless: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    flags: tuple[str, ...],
    is_careless: bool,
) -> None:
    """Six rows reach 320 tokens in one step, where a pass of 64 tokens has room for some."""
    small = ("--chunked-prefill-size", "64", "--mamba-track-interval", str(GRID), *flags)
    prompts, answers = random_prompts(5, (256,) * 6, 1000), random_prompts(6, (count,) * 6, 1000)
    follow_ups = [[*prompt, *answer, *range(20, 29)] for prompt, answer in zip(prompts, answers, strict=True)]
    (last,) = random_prompts(7, [20], 1000)
    with serve(model, *small, config=RECTIFIED, env=careless if is_careless else {}) as server:
        if flags:
            asked_of(server, 1, monkeypatch)
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda *asked: stopped(server, *asked), prompts, answers))
        second = [forced(server, prompt, last, sparse=False) for prompt in follow_ups]
        differences = [off(got, likely(prompt, last)) for got, prompt in zip(second, follow_ups, strict=True)]
        hits = [got["meta_info"]["cached_tokens"] for got in second]
        assert (max(differences) > 1e-3) == is_careless, differences
        assert is_careless or 0 < sum(hit >= 320 for hit in hits) < 6, hits
        assert_nothing_leaked(server)


@pytest.mark.parametrize(
    "taken", ["restore", *(pytest.param(name, marks=pytest.mark.long) for name in ("store", "save"))]
)
def test_without_a_copy_follow_ups_are_wrong(serve, tmp_path: Path, model: Path, likely: Likely, taken: str) -> None:
    """The control: rectification that goes on from other states, or stores none."""
    imported, removed = "from sglang_sparse.attention.exact_states import ExactStates", f"ExactStates.{taken}"
    environment = plugin(tmp_path, "spoilt", imported, f"{removed} = lambda *_: None")
    with serve(model, *FLAGS, config=RECTIFIED, env=environment) as server:
        differences = []
        for count in (90, 141, 200):
            prompt, tokens, last = random_prompts(count, (290, count, 20), 1000)
            forced(server, prompt, tokens)
            follow_up = [*prompt, *tokens, *range(20, 29)]
            differences.append(off(forced(server, follow_up, last, sparse=False), likely(follow_up, last)))
        assert max(differences) > 1e-3, differences


@pytest.mark.long
@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3_5Moe"])
def test_qwen3_5_for_text_agrees_with_transformers(serve, tmp_path: Path, family: str) -> None:
    """Its text requests have positions in three rows, all the same."""
    likely = by_transformers(random_hybrid(tmp_path, family))
    prompt, tokens = random_prompts(1, (300, 90), 1000)
    with serve(tmp_path, *FLAGS, config=RECTIFIED, env=RETRACT) as server:
        for options in ({"sparse": False}, {"active_ratio": 1.0}):
            assert off(forced(server, prompt, tokens, **options), likely(prompt, tokens)) < 1e-4
        server.flush_cache()
        assert_prompts_are_shared(server, likely, (128, 150, 410), (64, 141, 38))
        assert_nothing_leaked(server)


@pytest.mark.parametrize("is_careless", [False, True], ids=["kept", "control"])
def test_no_state_is_shared_that_a_step_overwrites(
    serve, model: Path, likely: Likely, careless: dict[str, str], is_careless: bool
) -> None:
    """Exact states end at 320 tokens, and the step behind the answer's end stores that of 448 in the same place."""
    with serve(model, *FLAGS, config=LATER, env=careless if is_careless else {}) as server:
        differences = []
        for count in (147, 148, 149):
            prompt, tokens, last = random_prompts(count, (300, count - 1, 20), 1000)
            stopped(server, prompt, [*tokens, 5])
            follow_up = [*prompt, *tokens, 5, *range(20, 29)]
            differences.append(off(forced(server, follow_up, last, sparse=False), likely(follow_up, last)))
        assert (max(differences) > 1e-3) == is_careless, differences
        assert_nothing_leaked(server)


def test_without_a_buffer_states_are_wrong(serve, model: Path, likely: Likely, careless: dict[str, str]) -> None:
    """The control of what is refused: the state at an answer's end is shared as that of its first tokens."""
    prompt, tokens, last = random_prompts(9, (300, 90, 20), 1000)
    with serve(model, *FLAGS, *NO_BUFFER, config={**LATER, "page_size": 1}, env=careless) as server:
        forced(server, prompt, tokens)
        follow_up = [*prompt, *tokens, *range(20, 29)]
        assert off(forced(server, follow_up, last, sparse=False), likely(follow_up, last)) > 1e-3


@pytest.mark.parametrize(
    ("method", "config"),
    [("rocketkv", {"prompt_budget": 10240, "topk": 10240}), ("skip_softmax", {"threshold_scale_factor": 0})],
)
def test_other_methods_that_leave_nothing_out_agree(
    serve, model: Path, likely: Likely, method: str, config: dict[str, Any]
) -> None:
    prompt, tokens = random_prompts(6, (300, 90), 1000)
    with serve(model, *FLAGS, method=method, config={**config, "dense_fallback": "never"}) as server:
        before = sparse_state(server)
        assert off(forced(server, prompt, tokens), likely(prompt, tokens)) < 1e-4
        used = spent(server, before)
        assert used["sparse_layer_rows"] == used["decode_rows"] > 0
        assert "prefill" not in sparse_state(server)
        assert_nothing_leaked(server)
