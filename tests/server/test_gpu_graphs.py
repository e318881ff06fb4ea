"""On a GPU both decode graphs of a batch size attend to all that they should, whatever the dense backend."""

from pathlib import Path
from typing import Any

import pytest
import torch
from server_requests import assert_nothing_leaked, logprobs, sparse_state, spent

from eval.texts.text import FORMS, NOISE, prompt_text

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MODELS = Path("eval/models")
FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.2", "--max-total-tokens", "65536")
FLAGS += ("--cuda-graph-max-bs-decode", "4", "--disable-prefill-cuda-graph")
# Half of the layers, so that a sparse graph attends densely too; most blocks, so that it has the same answer.
SPARSE: dict[str, Any] = {"layers": "2-", "min_seq_len": 0, "crossover_tokens": 0, "rectify_interval": 0}
METHODS: dict[str, dict[str, Any]] = {
    "resa": {**SPARSE, "active_ratio": 0.9},
    "robsa": {**SPARSE, "theta1": 0.99, "max_active_ratio": 0.95, "allow_uncalibrated": True, "page_size": 64},
}
KEY, NUMBER, NEEDLE = "lantern-hill", "4821937", FORMS["needle"]


# The model drafts for itself: a round of four tokens is then one decode step.
DRAFTS = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(MODELS / "tiny-gqa"))


@pytest.mark.parametrize(
    ("method", "model", "backend", "page", "drafts"),
    [
        *(("resa", "tiny-gqa", backend, "16", ()) for backend in ("fa3", "flashinfer", "triton")),
        *(("resa", "tiny-gqa", backend, "16", DRAFTS) for backend in ("fa3", "flashinfer", "triton")),
        *(("robsa", "tiny-mla", backend, "64", ()) for backend in ("flashinfer", "flashmla", "triton")),
    ],
)
def test_decode_is_as_likely_as_in_prefill(
    serve, method: str, model: str, backend: str, page: str, drafts: tuple[str, ...]
) -> None:
    """Tokens generated dense and sparse have the log-probabilities of a prompt that ends in them."""
    flags = (*FLAGS, "--attention-backend", backend, "--page-size", page, *drafts)
    with serve(MODELS / model, *flags, method=method, config=METHODS[method]) as server:
        for noise in (60, 200):
            record = NEEDLE.record(KEY, value=NUMBER)
            haystack = " ".join([*[NOISE] * noise, record, *[NOISE] * (noise // 2)])
            text = prompt_text(NEEDLE, haystack, NEEDLE.question(KEY))
            for sparse in (False, True):
                before, params = sparse_state(server), {"max_new_tokens": len(NUMBER), "temperature": 0.0}
                asked = {"sampling_params": {**params, "custom_params": {"sparse": sparse}}, "return_logprob": True}
                answer = server.generate(text=text, **asked)
                moved = spent(server, before)
                assert answer["text"] == NUMBER
                # A round of right drafts is one step; the first token is the prefill's.
                rounds = answer["meta_info"]["spec_verify_ct"] if drafts else len(NUMBER) - 1
                assert rounds <= moved["decode_rows"] and (not drafts or rounds < len(NUMBER) - 1)
                assert moved["dense_fallback_rows"] == (0 if sparse else moved["decode_rows"])
                start = answer["meta_info"]["prompt_tokens"]
                whole = server.generate(text=text + NUMBER, **asked, logprob_start_len=start - 1)
                prefilled = [entry[0] for entry in whole["meta_info"]["input_token_logprobs"][-len(NUMBER) :]]
                assert logprobs(answer) == pytest.approx(prefilled, abs=0.05)
        assert_nothing_leaked(server)
