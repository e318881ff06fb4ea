"""SPARSE_SELF on real servers: sparse drafts that are often wrong, and yet all that is answered is a dense server's."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from server_requests import (
    RETRACT,
    ask,
    assert_abort_leaks_nothing,
    assert_exact,
    assert_nothing_leaked,
    assert_refused,
    greedy,
    logprobs,
    random_prompts,
    sparse_state,
    spent,
)

from launch.server import ServerProcess

MODELS = Path("eval/models")
PAGE, TOKENS, CONTEXT, STEPS = 16, 24, 800, 6
FLAGS = ("--chunked-prefill-size", "256", "--context-length", str(CONTEXT))
SELF = (*FLAGS, "--speculative-algorithm", "SPARSE_SELF")
# Every row is sparse from its first step, and sees so little that most drafts are wrong.
COMMON = {"min_seq_len": 0, "crossover_tokens": 0, "check_exactness": True}
RESA = {**COMMON, "active_ratio": 0.05, "min_pages": 2}
ROBSA = {**COMMON, "allow_uncalibrated": True, "theta1": 0.5}
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": TOKENS}
SAMPLINGS = [{}, {"top_p": 0.9}, {"top_k": 20, "temperature": 1.5}, {"min_p": 0.02}, {"logit_bias": {"77": 4.0}}]


@pytest.fixture(scope="module")
def some() -> list[list[int]]:
    """Prompts of one chunk and of several, at and around borders of pages."""
    return random_prompts(5, (40, 257, 512, 700))


@pytest.fixture(scope="module")
def dense(serve) -> Iterator[ServerProcess]:
    with serve(MODELS / "tiny-gqa", *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def outputs(dense, some) -> list[list[int]]:
    return greedy(dense, some, TOKENS)


@pytest.fixture(scope="module")
def server(serve, outputs) -> Iterator[ServerProcess]:
    with serve(MODELS / "tiny-gqa", *SELF, config=RESA) as server:
        yield server


def generate(server: ServerProcess, prompt: list[int], sampling: dict[str, Any], **more: Any) -> Any:
    return server.generate(input_ids=prompt, sampling_params=sampling, **more)


def assert_often_wrong(used: dict[str, int]) -> None:
    """Assert that each row drafted, and that equal answers are not for want of sparsity."""
    assert used["undrafted_steps"] == 0 < used["verified_rounds"]
    assert used["drafted_tokens"] >= STEPS * used["verified_rounds"]
    assert 0 < used["accepted_tokens"] < 0.8 * used["drafted_tokens"]
    assert used["pages_attended"] < used["pages_held"] / 4 and used["dense_fallback_rows"] == 0


def assert_shares(server: ServerProcess, prompt: list[int]) -> None:
    """Assert that of a request's drafts the first of a round alone selects, once a layer."""
    before = sparse_state(server)
    greedy(server, [prompt], TOKENS)
    used = spent(server, before)
    assert used["sparse_layer_rows"] == used["verified_rounds"] * sparse_state(server)["sparse_layers"]


def assert_as_dense(server: ServerProcess, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    """One by one, and in a batch whose rows come and go at different times."""
    before = sparse_state(server)
    assert greedy(server, prompts, len(outputs[0])) == outputs
    assert_often_wrong(spent(server, before))
    server.flush_cache()
    asked = [(row, 3 + 9 * turn + 3 * row) for turn in range(2) for row in range(len(prompts))]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda one: ask(server, prompts[one[0]], one[1])["output_ids"], asked)]
    assert found == [outputs[row][:tokens] for row, tokens in asked]
    assert sparse_state(server)["tail_tokens_dropped"] == 0, "a token that no dense pass has written"


def test_greedy_answers_are_a_dense_servers(server, some, outputs) -> None:
    assert len({tuple(output) for output in outputs}) == len(some) and len({*outputs[-1]}) > TOKENS // 2
    assert_as_dense(server, some, outputs)
    assert_shares(server, some[0])


def test_latent_drafts_are_verified(serve) -> None:
    prompts = random_prompts(6, (64, 200))
    with serve(MODELS / "tiny-mla", *FLAGS) as dense:
        outputs = greedy(dense, prompts, 16)
    with serve(MODELS / "tiny-mla", *SELF, method="robsa", config=ROBSA) as server:
        assert_as_dense(server, prompts, outputs)
        assert_exact(server)
        assert_nothing_leaked(server)


def ends(answer: dict[str, Any]) -> tuple[object, ...]:
    """Return the parts of an answer that show a client how it ended."""
    info = answer["meta_info"]
    return answer["text"], answer["output_ids"], info["finish_reason"], info["completion_tokens"]


def test_an_end_in_the_middle_of_a_round(server, dense, some, outputs) -> None:
    prompt, output = some[0], outputs[0]
    text = ask(dense, prompt, TOKENS)["text"]
    samplings: list[dict[str, Any]] = [{"stop_token_ids": [output[place]]} for place in (2, 4, 5)]
    samplings += [{"stop": text[place : place + 4]} for place in (4, 11)]
    samplings += [{"max_new_tokens": tokens} for tokens in (1, 2, 4, 7, 8)]
    # Ends of the text that this makes likely.
    samplings += [{"ignore_eos": ignored, "logit_bias": {"2": 9.0}} for ignored in (False, True)]
    wanted = [{**GREEDY, "max_new_tokens": 9, **sampling} for sampling in samplings]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda sampling: ends(generate(server, prompt, sampling)), wanted)]
        expected = [*pool.map(lambda sampling: ends(generate(dense, prompt, sampling)), wanted)]
    for sampling, *both in zip(wanted, found, expected, strict=True):
        assert both[0] == both[1], sampling


def test_the_end_of_the_context(server, dense) -> None:
    """Drafts beyond the context have positions that the model does not know."""
    for left in (7, 12):
        (prompt,) = random_prompts(left, [CONTEXT - left])
        wanted = {**GREEDY, "max_new_tokens": left}
        found = ends(generate(server, prompt, wanted))
        # SGLang takes two tokens less than there is room for.
        assert found == ends(generate(dense, prompt, wanted)) and found[2] == {"type": "length", "length": left - 2}
    assert_nothing_leaked(server)


def test_grammars(server, dense, some) -> None:
    """Among rows without one; drafts know no grammar, so that most of them are wrong."""
    schema = {"type": "object", "properties": {"cat": {"type": "boolean"}}, "required": ["cat"]}
    compact = json.dumps({**schema, "additionalProperties": False})
    samplings = [{"regex": "[0-9]{9}"}, {"regex": "(cat|dog)[a-f]{1,7}!"}, {"json_schema": compact}, {}]
    undrafted = {"temperature": 0.0, "max_new_tokens": 14, "regex": "[0-9]{5}"}
    alone = generate(server, some[0], {**undrafted, "custom_params": {"sparse": False}})
    assert ends(alone) == ends(generate(dense, some[0], undrafted))
    wanted: list[dict[str, Any]] = [{"temperature": 0.0, "max_new_tokens": 14, **sampling} for sampling in samplings]
    expected = [ends(generate(dense, some[0], sampling)) for sampling in wanted]
    sampled = [{**SAMPLED, "ignore_eos": False, "regex": "[0-9]{9}", "sampling_seed": seed} for seed in (1, 2)]
    with ThreadPoolExecutor(6) as pool:
        *found, one, other = pool.map(lambda sampling: ends(generate(server, some[0], sampling)), wanted + sampled)
    assert found == expected
    assert all(len(text) == 9 and text.isdigit() for text in (one[0], other[0])) and one[0] != other[0]


def test_log_probabilities(server, dense, some) -> None:
    asked = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 99], "logprob_start_len": 20}
    wanted = {**GREEDY, "max_new_tokens": TOKENS}
    with ThreadPoolExecutor(2) as pool:
        # Beside a row that asks for none.
        other = pool.submit(generate, server, some[0], wanted)
        found = generate(server, some[1], wanted, **asked)
        other.result()
    expected = generate(dense, some[1], wanted, **asked)
    for name in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "input_token_logprobs"):
        assert flat(found["meta_info"][name]) == pytest.approx(flat(expected["meta_info"][name]), abs=1e-3), name
        assert len(flat(found["meta_info"][name])) >= TOKENS


def flat(entries: Any) -> list[float]:
    """All numbers of log-probabilities and of their tokens, one behind the other."""
    if isinstance(entries, list | tuple):
        return [number for entry in entries for number in flat(entry)]
    return [] if entries is None else [float(entries)]


def test_several_answers_and_streaming(server, some, outputs) -> None:
    wanted = {**GREEDY, "max_new_tokens": TOKENS}
    several = generate(server, some[3], {**wanted, "n": 3})
    assert [answer["output_ids"] for answer in several] == [outputs[3]] * 3
    sampled = generate(server, some[3], {**SAMPLED, "n": 3})
    assert len({tuple(answer["output_ids"]) for answer in sampled}) == 3, "each has noise of its own"
    request = {"input_ids": some[3], "sampling_params": wanted, "stream": True}
    with server.client.stream("POST", "/generate", json=request) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    parts = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert parts[-1]["output_ids"] == outputs[3] and len(parts) > 2
    assert all(later["text"].startswith(one["text"]) for one, later in pairwise(parts))


def test_an_abort_leaks_nothing(server, some) -> None:
    assert_abort_leaks_nothing(server, input_ids=some[2][:300])


def test_generated_text_is_shared_as_by_a_dense_server(server, dense, some, outputs) -> None:
    """All of it, since all of it is exact."""
    hits = []
    for one in (server, dense):
        one.flush_cache()
        for prompt, output in zip(some[:2], outputs, strict=False):
            first = ask(one, prompt, TOKENS - 3)
            second = ask(one, [*prompt, *first["output_ids"], 11, 12], 6)
            cached = second["meta_info"]["cached_tokens"]
            assert first["output_ids"] == output[:-3] and cached == (len(prompt) + TOKENS - 4) // PAGE * PAGE
            hits.append((cached, second["output_ids"]))
    assert hits[:2] == hits[2:]
    assert_exact(server)


def test_a_request_that_asks_for_dense_decode_among_others(server, some, outputs) -> None:
    before = sparse_state(server)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, server, some[row], TOKENS, {"sparse": row != 1}) for row in range(4)]
        assert [answer.result()["output_ids"] for answer in asked] == outputs
    used = spent(server, before)
    assert used["dense_fallback_rows"] > 0 < used["verified_rounds"]
    before = sparse_state(server)
    assert ask(server, some[1], TOKENS, {"sparse": False})["output_ids"] == outputs[1]
    used = spent(server, before)
    # The overlapped scheduler launches one step before it knows that the request has ended.
    assert used["verified_rounds"] == used["drafted_tokens"] == 0 and used["undrafted_steps"] in (TOKENS - 1, TOKENS)


def test_a_seed_decides_whatever_is_drafted(server, some, outputs) -> None:
    """Equal to what dense steps alone choose with the same noise, in company and alone; greedy rows among them."""

    def answer(place: int, sparse: bool) -> dict[str, Any]:
        sampling = SAMPLINGS[place] if place < len(SAMPLINGS) else {"temperature": 0.0}
        own = {"sampling_seed": (-1, 2, 2**62)[place % 3], "custom_params": {"sparse": sparse}}
        return generate(server, some[0], {**SAMPLED, **sampling, **own}, return_logprob=True)

    places = range(len(SAMPLINGS) + 1)
    before = sparse_state(server)
    with ThreadPoolExecutor(len(places)) as pool:
        drafted = [*pool.map(lambda place: answer(place, True), places)]
    assert spent(server, before)["accepted_tokens"] > 0
    before = sparse_state(server)
    dense = [answer(place, False) for place in places]
    assert spent(server, before)["drafted_tokens"] == 0
    assert [one["output_ids"] for one in drafted] == [one["output_ids"] for one in dense]
    for one, other in zip(drafted, dense, strict=True):
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-3)
    assert drafted[-1]["output_ids"] == outputs[0]
    assert len({tuple(one["output_ids"]) for one in drafted}) == len(places)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -0.5}, "presence_penalty"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"min_new_tokens": 3}, "min_new_tokens"),
        ({"sampling_seed": 3, "n": 2, "temperature": 1.0}, "sampling_seed"),
        ({"beam_width": 2}, "beam_width"),
    ],
)
def test_what_a_verification_cannot_apply_is_status_400(server, sampling, field) -> None:
    request = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, **sampling}}
    response = server.client.post("/generate", json=request)
    assert response.status_code == 400 and f"{field}: got {sampling[field]}" in response.text
    # A model may bring one, without which clients could not tell why their requests are refused.
    assert ("--sampling-defaults openai" in response.text) is (field == "repetition_penalty")


def test_options_that_a_verification_excludes_are_status_400(server) -> None:
    assert_refused(server, {"forced_tokens": [5, 6]}, "forced_tokens: got")
    assert_refused(server, {"rectify_interval": 8}, "rectify")
    body = {"model": "default", "prompt": "be", "max_tokens": 2, "presence_penalty": 1.0}
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 400 and "presence_penalty" in response.text


def test_a_request_that_keeps_its_drafts(server, some, outputs) -> None:
    """It answers otherwise, and shares KV that dense passes wrote; those beside it stay lossless."""
    before = sparse_state(server)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, server, some[row], TOKENS, {"lossless": row != 1}) for row in range(4)]
        answers = [answer.result()["output_ids"] for answer in asked]
    assert [answer == output for answer, output in zip(answers, outputs, strict=True)] == [True, False, True, True]
    assert 0 < spent(server, before)["accepted_tokens"] < spent(server, before)["drafted_tokens"]
    before = sparse_state(server)
    assert ask(server, some[1], TOKENS, {"lossless": False})["output_ids"] == answers[1]
    used = spent(server, before)
    assert used["verified_rounds"] > 0 == used["drafted_tokens"], "counted are drafts that are verified"
    again = ask(server, some[1] + answers[1], 2)
    assert again["meta_info"]["cached_tokens"] == (len(some[1]) + TOKENS - 1) // PAGE * PAGE
    assert_exact(server)
    grammar = {"input_ids": some[0], "sampling_params": {"regex": "a+", "custom_params": {"lossless": False}}}
    response = server.client.post("/generate", json=grammar)
    assert response.status_code == 400 and "lossless: got False" in response.text
    assert_refused(server, {"lossless": 1}, "lossless: got 1")


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.soak)])
def test_retracted_rows_end_as_if_alone(serve, some, outputs, ranks) -> None:
    """Rows without a seed have one of their name, so that they draw the same again, and alike on all ranks."""
    flags = ("--tp", ranks, "--disable-overlap-schedule", "--max-total-tokens", "1900", "--random-seed", "7")
    retract = {**RETRACT, "SGLANG_TEST_RETRACT_INTERVAL": "4"}

    def draw(one: ServerProcess, row: int) -> list[int]:
        return generate(one, some[row], SAMPLED, rid=f"row-{row}")["output_ids"]

    with serve(MODELS / "tiny-gqa", *SELF, *flags, config=RESA, env=retract) as server:
        with ThreadPoolExecutor(6) as pool:
            drawn = [pool.submit(draw, server, row) for row in range(2)]
            assert greedy(server, some, TOKENS, at_once=4) == outputs
            together = [one.result() for one in drawn]
        assert "Testing retraction" in server.log()
        assert [draw(server, row) for row in range(2)] == together
        assert sparse_state(server)["tail_tokens_dropped"] == 0
        assert_exact(server)
        assert_nothing_leaked(server)
