"""SGLang's features on a server that attends to a tenth of its pages on every decode step."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_requests import RETRACT, assert_nothing_leaked, greedy, sparse_state, spent

from launch.server import ServerProcess
from sglang_sparse import frontend
from sglang_sparse.hooks import prometheus

REQUESTS = Path(__file__).parents[2] / "sglang_sparse" / "docs" / "requests.md"
PAGE = 16
TENTH = {"active_ratio": 0.1, "min_pages": 4, "dense_fallback": "never"}
METRICS = ("--enable-metrics", "--decode-log-interval", "4")
LINE = re.compile(
    r"Sparse decode, active fraction: ([\d.]+|n/a), pages attended/held: (\d+)/(\d+), "
    r"rectified: \d+ requests (\d+) tokens .* dense rows: \d+/(\d+),"
)


@pytest.fixture(scope="module")
def server(serve, checkpoint) -> Iterator[ServerProcess]:
    with serve(checkpoint, "--chunked-prefill-size", "512", *METRICS, config=TENTH) as server:
        yield server


@pytest.fixture(scope="module")
def solo(server, prompts) -> list[list[int]]:
    return greedy(server, prompts)


def test_a_tenth_is_attended(server, prompts) -> None:
    before = sparse_state(server)
    greedy(server, prompts[-2:])
    used = spent(server, before)
    # Of two heads and four layers.
    selections = used["decode_rows"] * 2 * 4
    assert 125 <= used["pages_held"] / selections <= 127
    assert used["pages_attended"] == 13 * selections


def test_sparse_is_not_dense(server, solo, prompts) -> None:
    params = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True, "custom_params": {"sparse": False}}
    answers = [server.generate(input_ids=prompt, sampling_params=params)["output_ids"] for prompt in prompts[-4:]]
    assert answers != solo[-4:]


def test_prefix_hit_summarises_nothing_again(server, prompts) -> None:
    server.flush_cache()
    prefix = prompts[-1][:1600]
    params = {"max_new_tokens": 4, "temperature": 0.0}
    first = server.generate(input_ids=[*prefix, 5], sampling_params=params)
    between = sparse_state(server)["extend_pages_summarised"]
    second = server.generate(input_ids=[*prefix, 6, 7, 8], sampling_params=params)
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] == 1600
    assert sparse_state(server)["extend_pages_summarised"] - between == 1


def test_eight_at_once_equal_solo(server, prompts, solo) -> None:
    server.flush_cache()
    assert greedy(server, prompts, at_once=8) == solo
    assert_nothing_leaked(server)


def test_two_ranks_without_chunks_or_prefix_cache_equal_one_with_both(serve, checkpoint, prompts, solo) -> None:
    """Each rank selects for its own KV head: what it selects, one rank selects for that head too."""
    flags = ("--tp", "2", "--chunked-prefill-size", "4096", "--disable-radix-cache")
    with serve(checkpoint, *flags, config=TENTH) as server:
        assert greedy(server, prompts[::4], at_once=5) == solo[::4]
        state = sparse_state(server)
        assert_nothing_leaked(server)
    # Counted by the first rank, which has one of two KV heads, in all of four layers.
    assert state["dense_fallback_rows"] == 0 and state["sparse_layer_rows"] == 4 * state["decode_rows"]
    assert 0 < state["pages_attended"] < state["pages_held"] / 4


def test_without_rectification_a_second_turn_hits_the_whole_pages_of_the_first_prompt(server, prompts) -> None:
    server.flush_cache()
    prompt = prompts[-2]
    params = {"max_new_tokens": 60, "temperature": 0.0, "ignore_eos": True, "custom_params": {"rectify_interval": 0}}
    first = server.generate(input_ids=prompt, sampling_params=params)
    second = server.generate(input_ids=[*prompt, *first["output_ids"], 11, 12], sampling_params={"max_new_tokens": 1})
    assert second["meta_info"]["cached_tokens"] == len(prompt) // PAGE * PAGE


def test_streaming_equals_one_answer(server, prompts, solo) -> None:
    request = {
        "input_ids": prompts[-1],
        "sampling_params": {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True},
        "stream": True,
    }
    chunks = []
    with server.client.stream("POST", "/generate", json=request) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunks.append(json.loads(line.removeprefix("data: ")))
    assert len(chunks) > 1
    assert chunks[-1]["output_ids"] == solo[-1]


def test_n_logprobs_and_stop(server, prompts, solo) -> None:
    params = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    several = server.generate(input_ids=prompts[-1], sampling_params={**params, "n": 3}, return_logprob=True)
    assert [answer["output_ids"] for answer in several] == [solo[-1]] * 3
    logprobs = several[0]["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in logprobs] == solo[-1]
    assert all(logprob <= 0.0 for logprob, _, _ in logprobs)
    stopping = {"max_new_tokens": 24, "temperature": 0.0, "stop_token_ids": [solo[-1][5]]}
    stopped = server.generate(input_ids=prompts[-1], sampling_params=stopping)
    assert stopped["output_ids"][-1] == solo[-1][5] and len(stopped["output_ids"]) <= 6
    text = server.generate(input_ids=prompts[-1], sampling_params=params)["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    by_string = server.generate(input_ids=prompts[-1], sampling_params={**params, "stop": [stop]})
    assert by_string["text"] == text[: text.index(stop)]


def test_abort_frees_everything(server, prompts) -> None:
    params = {"max_new_tokens": 4000, "temperature": 0.0, "ignore_eos": True}
    threads = [
        threading.Thread(
            target=server.generate, kwargs={"input_ids": prompt, "sampling_params": params, "rid": f"r{i}"}
        )
        for i, prompt in enumerate(prompts[-4:])
    ]
    before = sparse_state(server)["decode_rows"]
    for thread in threads:
        thread.start()
    while sparse_state(server)["decode_rows"] < before + 8:
        assert any(thread.is_alive() for thread in threads)
    # Again and again: on a busy machine some of them may not have arrived yet.
    while any(thread.is_alive() for thread in threads):
        assert server.client.post("/abort_request", json={"rid": "", "abort_all": True}).status_code == 200
        threads[0].join(0.2)
    assert sparse_state(server)["decode_rows"] < before + 4 * 3999
    assert_nothing_leaked(server)


def test_embeddings_are_refused_in_float32(serve, checkpoint) -> None:
    with serve(checkpoint, "--disable-radix-cache", config=TENTH) as server:
        body = {"input_embeds": [[0.1] * 64] * 5, "sampling_params": {"max_new_tokens": 2}}
        response = server.client.post("/generate", json=body)
        assert response.status_code == 400 and "allowed with a model in float32: none" in response.text


def test_the_log_leaves_out_questions_for_readiness(server) -> None:
    assert server.client.get("/health").status_code == server.client.get("/model_info").status_code == 200
    assert "GET /model_info" in server.log() and "GET /health" not in server.log()


def test_a_bad_request_leaves_the_server_unharmed(server) -> None:
    client = server.openai()
    messages = [{"role": "user", "content": "bado cedi"}]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="default", messages=messages, max_tokens=8, temperature=-1)
    beams = server.client.post("/generate", json={"text": "bado", "sampling_params": {"beam_width": 2}})
    assert beams.status_code == 400 and "beam_width: got 2, allowed on this server: 1" in beams.text
    answer = client.chat.completions.create(model="default", messages=messages, max_tokens=8, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


MESSAGES = {"messages": [{"role": "user", "content": "ba"}], "max_tokens": 6}
# Requests for six tokens or more; some of SGLang's classes of them have no custom_params.
ENTRIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": ["ba", "bo"], "sampling_params": {"max_new_tokens": 6}},
    "/v1/completions": {"prompt": "ba", "max_tokens": 6},
    "/v1/chat/completions": MESSAGES,
    "/v1/responses": {"input": "ba", "max_output_tokens": 16},
    "/v1/messages": MESSAGES,
    "/invocations": MESSAGES,
    "/vertex_generate": {"instances": [{"text": "ba"}], "parameters": {"sampling_params": {"max_new_tokens": 6}}},
    "/api/chat": {"messages": MESSAGES["messages"], "options": {"num_predict": 6}, "stream": False},
    "/api/generate": {"prompt": "ba", "options": {"num_predict": 6}, "stream": False},
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_takes_options(server: ServerProcess, entry: str) -> None:
    model = server.client.get("/v1/models").json()["data"][0]["id"]
    tokens = [300, 301, 302, 303, 304, 305]
    text = server.client.post("/detokenize", json={"model": model, "tokens": tokens}).json()["text"]
    body = {"model": model, **ENTRIES[entry], "custom_params": {"forced_tokens": tokens}}
    response = server.client.post(entry, json=body)
    assert response.status_code == 200 and text in json.dumps(response.json(), ensure_ascii=False)
    for given in ({"active_ratio": 7}, {"sparse": {"active_ratio": 7}}, [7]):
        # The server ends the connection after an error that SGLang does not handle.
        response = server.client.post(entry, json={**body, "custom_params": given}, headers={"Connection": "close"})
        # SGLang's entries of Ollama's form have no other status for a bad parameter.
        assert response.status_code == (500 if entry.startswith("/api") else 400)
    assert server.client.post(entry, json={**body, "custom_params": None}).status_code == 200


def test_scores_take_options(server: ServerProcess) -> None:
    body = {"query": "ba", "items": ["bo", "bi"], "label_token_ids": [5, 6], "model": "default"}
    for given, status in ((None, 200), ({"sparse": False}, 200), ({"active_ratio": 7}, 400)):
        assert server.client.post("/v1/score", json={**body, "custom_params": given}).status_code == status


def test_forced_retraction_with_mixed_chunks_and_without_overlap(serve, checkpoint, prompts) -> None:
    flags = ("--chunked-prefill-size", "512", "--enable-mixed-chunk", "--disable-overlap-schedule")
    with serve(checkpoint, *flags, config={**TENTH, "rectify_interval": 0}, env=RETRACT) as server:
        outputs = greedy(server, prompts, 12, at_once=8)
        assert all(len(output) == 12 for output in outputs)
        assert "Testing retraction" in server.log()
        assert_nothing_leaked(server)


def test_frontend_program_forks_share_the_prefix(server, prompts) -> None:
    import sglang as sgl

    server.flush_cache()

    @sgl.function
    def ask(s, text: str):
        s += text
        branches = s.fork(3)
        for i, branch in enumerate(branches):
            branch += f" question {i}:" + sgl.gen("answer", max_tokens=6, temperature=0)
        branches.join()
        s += " ".join(branch["answer"] for branch in branches)

    text = " bada ceci" * 400
    backend = sgl.RuntimeEndpoint(server.url)
    backend.cache_prefix(text)
    before = sparse_state(server)["extend_pages_summarised"]
    state = ask.run(text=text, backend=backend)
    assert state.text().startswith(text)
    made = sparse_state(server)["extend_pages_summarised"] - before
    # Each of the three forks prefills only its own question, at most three pages, and the shared text nothing.
    assert made <= 3 * 3, made


def test_the_pages_program_asks_twice_and_one_fork_is_dense(server) -> None:
    (program,) = re.findall(r"```python\n(import sglang\n.*?)```", REQUESTS.read_text(), re.S)
    asked = sparse_state(server)
    space: dict[str, Any] = {"frontend": frontend}
    exec(program.replace("http://127.0.0.1:30000", server.url), space)
    assert isinstance(space["state"]["fast"], str) and isinstance(space["state"]["dense"], str)
    used = spent(server, asked)
    assert 0 < used["dense_fallback_rows"] < used["decode_rows"]
    # Outputs of one length, over a text of many pages.
    asked = sparse_state(server)
    space["twice"].run(question=" bada ceci" * 400, backend=space["endpoint"], ignore_eos=True)
    used = spent(server, asked)
    assert used["dense_fallback_rows"] >= 15 and used["decode_rows"] == 2 * used["dense_fallback_rows"]


def samples(server: ServerProcess) -> dict[str, Any]:
    text = server.client.get("/metrics").raise_for_status().text
    return {sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples}


def test_a_live_server_shows_all_of_it(server: ServerProcess) -> None:
    params = {"max_new_tokens": 42, "temperature": 0.0, "ignore_eos": True}
    server.generate(input_ids=list(range(10, 810)), sampling_params=params)
    # A step's answer leaves before its line is logged, and the overlapped step behind it logs later still. The
    # scheduler answers questions between steps, so at its second answer both have been logged.
    for _ in range(2):
        server.server_info()
    log = server.log()
    assert log.count("Decode batch") >= 10
    # An interval whose rows all asked for dense attention has no fraction.
    found = [[float(value.replace("n/a", "nan")) for value in groups] for groups in LINE.findall(log)]
    assert len(found) == log.count("Decode batch")
    shown = samples(server)
    labels = shown["sglang:num_running_reqs"].labels
    assert labels["tp_rank"] == "0"
    for name in [*(f"{name}_total" for name in prometheus.COUNTERS), *prometheus.GAUGES]:
        assert shown[f"sglang:sparse_{name}"].labels == labels
    for name, column in (("pages_attended", 1), ("pages_held", 2), ("rectified_tokens", 3), ("decode_rows", 4)):
        assert shown[f"sglang:sparse_{name}_total"].value == sum(line[column] for line in found)
    assert shown["sglang:sparse_rectified_tokens_total"].value >= 32, "the interval"
    assert shown["sglang:sparse_active_fraction"].value == pytest.approx(found[-1][0], abs=5e-4)
    state = server.server_info()["internal_states"][0]["sparse"]
    assert shown["sglang:sparse_aux_bytes"].value == state["aux_bytes"]
    for name in prometheus.COUNTERS:
        assert shown[f"sglang:sparse_{name}_total"].value <= state[name]
