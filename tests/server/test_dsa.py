"""DSA on a trained indexer: what it chooses is found, whatever SGLang does with the request meanwhile."""

import random
from collections.abc import Iterator

import plain_dsa
import pytest
import torch
from server_requests import assert_abort_leaks_nothing, assert_refused, logprobs, read_logprobs, sparse_state
from tiny_dsa import (
    FLAGS,
    GREEDY,
    LAYERS,
    MODEL,
    PAGE,
    RETRACTING,
    TOPK,
    assert_only_long_rows_are_sparse,
    long_texts,
    moved,
)

from eval import niah
from eval.live.record import read_rows
from eval.live.tokens import Tokens
from eval.texts.text import FORMS, random_number, read_book, unique_keys
from eval.texts.windows import BOOK
from launch.server import ServerProcess

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="refused next to CUDA")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return long_texts()


@pytest.fixture(scope="module")
def server(serve) -> Iterator[ServerProcess]:
    with serve(MODEL, *FLAGS, method="dsa", config={}, env=RETRACTING) as server:
        yield server


@pytest.fixture(scope="module")
def small(serve) -> Iterator[ServerProcess]:
    """Prompts are read in one piece, and little is kept of them."""
    flags = (*FLAGS, "--chunked-prefill-size", "2048", "--max-total-tokens", "2560")
    with serve(MODEL, *flags, method="dsa", config={}) as server:
        yield server


def test_needles_are_found_at_once_and_retracted(server, tmp_path) -> None:
    out = tmp_path / "niah.jsonl"
    arguments = ["--base-url", server.url, "--tasks", "multikey", "--lengths", "1k", "--n", "1", "--concurrency", "5"]
    assert niah.main([*arguments, "--expect", "dsa", "--out", str(out)]) == 0
    (summary,) = (row for row in read_rows(out) if row["kind"] == "summary")
    assert (summary["n"], summary["score"], summary["dense_rows"]) == (5, 1.0, 0)
    assert 0.4 < summary["density"] < 0.6


def chat(text: str, question: str) -> list[int]:
    return Tokens(str(MODEL)).chat([{"role": "user", "content": f"{text}\n{question}"}])


def some_pairs(rng: random.Random, count: int) -> tuple[str, str, str]:
    """So many pairs, a key of them and its value."""
    form, keys = FORMS["json"], unique_keys(rng, count, lambda rng: random_number(rng, rng.randint(5, 8)))
    pairs = {key: random_number(rng) for key in keys}
    asked = rng.choice(keys)
    return "\n".join(form.record(key, value=value) for key, value in pairs.items()), asked, pairs[asked]


def test_an_eighth_of_four_thousand_tokens_holds_the_answers(server) -> None:
    """Of a book with a needle, and then pairs: read once before, as each retraction would read it again."""
    needle, book = FORMS["needle"], read_book(BOOK)[:6500]
    place = book.index(". ", len(book) // 2) + 2
    pairs, asked, value = some_pairs(random.Random(1), 95)
    text = f"{book[:place]}{needle.record('lantern-hill', value='4821937')} {book[place:]}\n{pairs}"
    prompts = [chat(text, needle.question("lantern-hill")), chat(text, FORMS["json"].question(asked))]
    assert all(3700 < len(prompt) < 4300 for prompt in prompts)
    params = {"temperature": 0.0, "max_new_tokens": 1}
    server.generate(input_ids=prompts[0], sampling_params=params)
    before = sparse_state(server)
    answers = server.generate(input_ids=prompts, sampling_params={**params, "max_new_tokens": 12})
    assert "4821937" in answers[0]["text"] and answers[1]["text"].strip() == value
    attended, held = moved(server, before, "pages_attended", "pages_held")
    assert 0.11 < attended / held < 0.14


def test_values_are_found_by_their_keys_eight_at_once(server) -> None:
    """A thousand tokens of pairs each; the card's figure is 1.0 at that length, "json_95%"."""
    rng = random.Random(0)
    texts, keys, values = zip(*(some_pairs(rng, 46) for _ in range(8)), strict=True)
    prompts = [chat(text, FORMS["json"].question(key)) for text, key in zip(texts, keys, strict=True)]
    assert all(len(prompt) > 950 for prompt in prompts)
    before = sparse_state(server)
    answers = server.generate(input_ids=prompts, sampling_params={"temperature": 0.0, "max_new_tokens": 12})
    assert [answer["text"].strip() for answer in answers] == list(values)
    (dense,) = moved(server, before, "dense_fallback_rows")
    assert dense == 0


def test_prefixes_bring_their_keys_along_and_retraction_changes_nothing(server, texts) -> None:
    params = {**GREEDY, "max_new_tokens": 16}
    server.flush_cache()
    together = server.generate(text=texts, sampling_params=params)
    assert any(answer["meta_info"]["num_retractions"] for answer in together)
    for text, first in zip(texts, together, strict=True):
        before = sparse_state(server)
        again = server.generate(text=text, sampling_params={**params, "max_new_tokens": 2})
        tokens, cached = again["meta_info"]["prompt_tokens"], again["meta_info"]["cached_tokens"]
        assert tokens > TOPK and cached == (tokens - 1) // PAGE * PAGE
        assert moved(server, before, "index_keys_prefilled") == [(tokens - cached) * LAYERS]
        again = server.generate(text=text, sampling_params=params)
        assert again["output_ids"] == first["output_ids"]


def test_decoded_tokens_are_shared_too(server) -> None:
    """The model was trained with this selection, so nothing of an answer is approximate."""
    server.flush_cache()
    prompt = [11 + i * i % 3900 for i in range(600)]
    answer = server.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": 80})
    turn = [*prompt, *answer["output_ids"], 5, 6, 7]
    params = {"sampling_params": {**GREEDY, "max_new_tokens": 8}, "return_logprob": True}
    hit = server.generate(input_ids=turn, **params)
    assert hit["meta_info"]["cached_tokens"] == (600 + 79) // PAGE * PAGE
    server.flush_cache()
    cold = server.generate(input_ids=turn, **params)
    assert cold["meta_info"]["cached_tokens"] == 0 and cold["output_ids"] == hit["output_ids"]
    assert logprobs(hit) == pytest.approx(logprobs(cold), abs=1e-3)


def test_it_computes_what_transformers_computes(server, monkeypatch) -> None:
    """In float32, in chunks and token by token; transformers gets the rotation and the float8 that it leaves out."""
    decoded, text = 8, read_book(BOOK)[60000:65000]
    prompt = server.client.post("/tokenize", json={"model": "x", "prompt": text}).json()["tokens"]
    assert len(prompt) > 2 * TOPK + 100
    server.flush_cache()
    asked = {"return_logprob": True, "logprob_start_len": 0}
    answer = server.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": decoded}, **asked)
    read = read_logprobs(answer)
    found = torch.tensor([*read, *logprobs(answer)])
    ids = torch.tensor([*prompt, *answer["output_ids"]])
    plain = plain_dsa.load(MODEL)

    def differences() -> torch.Tensor:
        with torch.no_grad():
            expected = plain(ids[None]).logits[0].float().log_softmax(-1)
        assert answer["output_ids"] == expected[-decoded - 1 : -1].argmax(-1).tolist()
        return (found - expected[:-1].gather(1, ids[1:, None]).flatten()).abs()

    # It chooses other tokens, which the limits below have to tell.
    others = differences()
    assert others[:TOPK].max() < 1e-4 and others[TOPK:].median() > 1e-4
    monkeypatch.setattr(plain_dsa.modeling.DeepseekV32Indexer, "forward", plain_dsa.indexer_forward)
    same = differences()
    # Where a key lies between two float8 values, rounding decides.
    assert same.median() < 1e-5 and same.quantile(0.95) < 1e-4 and same.max() < 0.1
    assert same[-decoded:].max() < 1e-2


def test_decode_computes_what_prefill_computes(server, texts) -> None:
    """With its own keys among those that are chosen: 60 tokens are decoded, and then read as a prompt."""
    params = {**GREEDY, "max_new_tokens": 60}
    server.flush_cache()
    answer = server.generate(text=texts[1], sampling_params=params, return_logprob=True)
    prompt = server.client.post("/tokenize", json={"model": "x", "prompt": texts[1]}).json()["tokens"]
    assert len(prompt) == answer["meta_info"]["prompt_tokens"]
    asked = {"return_logprob": True, "logprob_start_len": len(prompt) - 1}
    server.flush_cache()
    read = server.generate(
        input_ids=[*prompt, *answer["output_ids"]], sampling_params={**GREEDY, "max_new_tokens": 1}, **asked
    )
    prefilled = read_logprobs(read)
    differences = sorted(abs(a - b) for a, b in zip(logprobs(answer), prefilled, strict=True))
    assert differences[54] < 1e-3 and differences[-1] < 0.2


def test_the_same_request_gives_the_same_bits(server, texts) -> None:
    params = {**GREEDY, "max_new_tokens": 8}
    answers, together = [], []
    for _ in range(2):
        server.flush_cache()
        answers.append(server.generate(text=texts[0], sampling_params=params, return_logprob=True))
        server.flush_cache()
        together.append([one["output_ids"] for one in server.generate(text=texts, sampling_params=params)])
    first, second = (answer["meta_info"]["output_token_logprobs"] for answer in answers)
    assert first == second and together[0] == together[1]


def test_it_computes_what_a_stock_server_computes(serve, server, texts) -> None:
    """The CPU platform has an implementation of its own; of two logits that are nearly equal it may take the other."""
    params, asked = {**GREEDY, "max_new_tokens": 1}, {"return_logprob": True, "logprob_start_len": 0}
    server.flush_cache()
    with serve(MODEL, *FLAGS) as stock:
        found = [one.generate(text=texts[1], sampling_params=params, **asked) for one in (server, stock)]
    ours, theirs = map(read_logprobs, found)
    differences = sorted(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    assert differences[len(differences) * 9 // 10] < 1e-3 and differences[-1] < 0.2


def test_only_long_rows_are_sparse(server) -> None:
    assert_only_long_rows_are_sparse(server)


@pytest.mark.parametrize(("field", "value"), [("sparse", False), ("rectify_interval", 8)])
def test_a_request_that_asks_for_something_else_is_status_400(server, field, value) -> None:
    assert_refused(server, {field: value}, field)


def test_an_abort_leaks_nothing(server, texts) -> None:
    assert_abort_leaks_nothing(server, text=texts[2])


def test_it_says_which_kernels_run(server) -> None:
    assert sparse_state(server)["config"]["implementation"] == "portable"
    (line,) = (line for line in server.log_path.read_text().splitlines() if "sglang_sparse: method dsa" in line)
    assert line.endswith("kernels indexer reference, topk reference, attention reference")


def test_keys_go_with_the_pages_that_are_evicted(small, texts) -> None:
    params = {**GREEDY, "max_new_tokens": 4}
    small.flush_cache()
    first = small.generate(text=texts[0], sampling_params=params)
    small.generate(input_ids=[11 + i * i % 3900 for i in range(1950)], sampling_params=params)
    before = sparse_state(small)
    again = small.generate(text=texts[0], sampling_params=params)
    tokens, cached = again["meta_info"]["prompt_tokens"], again["meta_info"]["cached_tokens"]
    assert cached < (tokens - 1) // PAGE * PAGE and again["output_ids"] == first["output_ids"]
    assert moved(small, before, "index_keys_prefilled") == [(tokens - cached) * LAYERS]


def test_prompts_are_read_the_same_in_pieces_and_in_one(server, small, texts) -> None:
    params, asked = {**GREEDY, "max_new_tokens": 1}, {"return_logprob": True, "logprob_start_len": 0}
    found = []
    for one in (server, small):
        one.flush_cache()
        answer = one.generate(text=texts[1], sampling_params=params, **asked)
        found.append(read_logprobs(answer))
    assert found[0] == found[1]
    assert_refused(small, {"sparse": False}, "sparse")
