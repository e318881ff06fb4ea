"""DSA left to SGLang: the same answers and log lines as a server without the method, which is counted all the same."""

import re
from collections.abc import Iterator

import pytest
import torch
from server_requests import assert_nothing_leaked, assert_refused, settled_log, sparse_state
from tiny_dsa import FLAGS, GREEDY, MODEL, assert_only_long_rows_are_sparse, long_texts

from launch.server import ServerProcess

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform computes SGLang's part")

NATIVE = {"implementation": "native"}
SERVED = (*FLAGS, "--enable-metrics", "--decode-log-interval", "1")
OURS = re.compile("sglang_sparse|Sparse decode")


@pytest.fixture(scope="module")
def stock(serve) -> Iterator[ServerProcess]:
    with serve(MODEL, *SERVED) as server:
        yield server


@pytest.fixture(scope="module")
def native(serve) -> Iterator[ServerProcess]:
    with serve(MODEL, *SERVED, method="dsa", config=NATIVE) as server:
        yield server


# What depends on the requests of the tests above, and a server's own arguments.
PASSING = re.compile(r"INFO: |Prefill batch|Decode batch|it/s|server_args=")


def lines(server: ServerProcess) -> set[str]:
    """Return the log lines of a server's processes, without numbers."""
    kept = [line for line in settled_log(server).splitlines() if not PASSING.search(line)]
    return {re.sub(r"-?\d+(\.\d+)?(e-\d+)?", "N", line).strip() for line in kept}


def test_answers_and_log_probabilities_are_stocks(stock, native) -> None:
    texts = long_texts()
    asked = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {**GREEDY, "max_new_tokens": 12}}
    names = ("output_token_logprobs", "input_token_logprobs")
    for given in ({"text": texts}, {"input_ids": list(range(10, 140))}, {"text": texts[0]}):
        found = [server.generate(**given, **asked) for server in (stock, native)]
        first, second = (one if isinstance(one, list) else [one] for one in found)
        for ours, theirs in zip(first, second, strict=True):
            assert [ours["meta_info"][name] for name in names] == [theirs["meta_info"][name] for name in names]
            assert ours["meta_info"]["cached_tokens"] == theirs["meta_info"]["cached_tokens"]
    assert_nothing_leaked(stock)
    assert_nothing_leaked(native)


def test_it_starts_as_stock_does_but_for_a_line(stock, native) -> None:
    theirs, own = lines(stock), lines(native)
    assert {line for line in own if not OURS.search(line)} == {line for line in theirs if not OURS.search(line)}
    (line,) = (line for line in native.log_path.read_text().splitlines() if "sglang_sparse: method dsa" in line)
    assert "method dsa: SGLang runs DSA unchanged" in line
    assert line.endswith("kernels indexer native, topk native, attention native")
    infos = [server.server_info() for server in (stock, native)]
    names = ("max_total_num_tokens", "page_size", "attention_backend", "kv_cache_dtype", "cuda_graph_config")
    assert [infos[0][name] for name in names] == [infos[1][name] for name in names]


def test_rows_are_counted_by_their_lengths(native) -> None:
    state = sparse_state(native)
    assert state["config"]["implementation"] == "native" and state["aux_bytes"] == 0
    assert_only_long_rows_are_sparse(native)
    assert re.search(r"Sparse decode, active fraction: 0\.8\d\d", native.log_path.read_text())
    assert "sglang:sparse_pages_attended_total{" in native.client.get("/metrics").text


def test_tokens_are_forced(stock, native) -> None:
    forced = [7, 8, 9, 10]
    given = {"input_ids": list(range(10, 140)), "return_logprob": True}
    answer = native.generate(
        **given, sampling_params={**GREEDY, "max_new_tokens": 4, "custom_params": {"forced_tokens": forced}}
    )
    assert answer["output_ids"] == forced
    read = stock.generate(
        input_ids=[*given["input_ids"], *forced],
        return_logprob=True,
        logprob_start_len=len(given["input_ids"]) - 1,
        sampling_params={**GREEDY, "max_new_tokens": 1},
    )
    expected = [value for value, *_ in read["meta_info"]["input_token_logprobs"][-4:]]
    assert [value for value, *_ in answer["meta_info"]["output_token_logprobs"]] == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("field", "value"), [("sparse", False), ("rectify_interval", 8), ("forced_tokens", [-1])])
def test_a_request_that_asks_for_something_else_is_status_400(native, field, value) -> None:
    assert_refused(native, {field: value}, field)
