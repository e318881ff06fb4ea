"""Requests that pass no tokenizer with the plugin: the scheduler validates their options and keeps their KV apart."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from forked_server import ForkedServer
from google.protobuf.struct_pb2 import Struct
from sglang.srt.sampling.custom_logit_processor import (
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
)
from smg_grpc_proto import sglang_scheduler_pb2 as messages
from smg_grpc_proto import sglang_scheduler_pb2_grpc as services

from launch.server import ServerProcess

pytestmark = [pytest.mark.long, pytest.mark.skipif(torch.cuda.is_available(), reason="refused next to CUDA")]
MODEL = Path("eval/models/tiny-gqa")
CONFIG = {"active_ratio": 0.2, "min_pages": 2, "dense_fallback": "never", "rectify_interval": 16}
PREFILL = {"block_size": 32, "step": 2, "dense_tail": 0, "theta": 0.5, "crossover_tokens": 64}
FLAGS = ("--max-total-tokens", "16384", "--context-length", "4096", "--page-size", "16")
FLAGS += ("--enable-custom-logit-processor", "--sparse-method", "resa", "--sparse-config", json.dumps(CONFIG))
FLAGS += ("--sparse-prefill-method", "anchor", "--sparse-prefill-config", json.dumps(PREFILL))
PROMPT = list(range(5, 400))
# Workers are processes of the HTTP server, which it cannot start from a fork.
WAYS: dict[str, tuple[type[ServerProcess], tuple[str, ...], dict[str, str]]] = {
    "tokenizer workers": (ServerProcess, ("--tokenizer-worker-num", "2"), {}),
    "the Rust server": (ForkedServer, (), {"SGLANG_RUST_SERVER": "1"}),
}

# Requests that would end SGLang's scheduler, with the field that is named.
ENDING = {
    '{"input_ids": [5, 4096]}': "input_ids",
    '{"input_ids": [5, -1]}': "input_ids",
    '{"return_logprob": true, "top_logprobs_num": 4097}': "top_logprobs_num",
    '{"top_logprobs_num": 4097}': "top_logprobs_num",
    '{"sampling_params": {"stop_token_ids": [4098], "min_new_tokens": 4}}': "stop_token_ids",
}
LOGPROBS = {
    "input_ids": PROMPT,
    "return_logprob": True,
    "top_logprobs_num": 2,
    "sampling_params": {"max_new_tokens": 200, "ignore_eos": True},
}


def ask(server: ServerProcess, **options: Any) -> dict[str, Any]:
    params = {"max_new_tokens": 24, "temperature": 0.0, "custom_params": options}
    return server.generate(input_ids=PROMPT, sampling_params=params)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the answers through the main process's own tokenizer, sparse and dense."""
    with ForkedServer(MODEL, *FLAGS, log_path=tmp_path_factory.mktemp("expected") / "log") as server:
        found = [ask(server), ask(server, sparse=False)]
        assert found[0]["output_ids"] != found[1]["output_ids"] and not found[1]["meta_info"]["cached_tokens"]
        return found


@pytest.mark.parametrize("way", WAYS)
def test_options_are_validated_behind_the_tokenizers(tmp_path: Path, expected: list[dict[str, Any]], way: str) -> None:
    kind, flags, env = WAYS[way]
    with kind(MODEL, *FLAGS, *flags, env=env, log_path=tmp_path / "log") as server:
        # Of two workers each gets some of them.
        for _ in range(4):
            assert ask(server)["text"] == expected[0]["text"]
            bad = {"max_new_tokens": 2, "custom_params": {"active_ratio": 1.5}}
            request = {"input_ids": PROMPT, "sampling_params": bad, "return_logprob": True, "logprob_start_len": 300}
            for stream in (False, True):
                response = server.client.post("/generate", json={**request, "stream": stream})
                assert "active_ratio: got 1.5" in response.text and (response.status_code == 400 or stream)
        # They would be read as the name of a config of prefill, and as that of an adapter.
        for key in ("sglang_sparse:x", "sglang_sparse_adapter:x"):
            request = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}, "extra_key": key}
            response = server.client.post("/generate", json=request)
            assert response.status_code == 400 and f"extra_key: got '{key}'" in response.text
        # Next to others, whose batch an aborted request may join.
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(lambda: server.generate(**LOGPROBS))
            for fields, named in ENDING.items():
                response = server.client.post("/generate", json={"input_ids": PROMPT, **json.loads(fields)})
                assert response.status_code == 400 and named in response.text
            assert len(beside.result()["output_ids"]) == 200
        # It cannot do without what it names.
        params = {"max_new_tokens": 2, "custom_params": {"token_ids": [5], "sparse": {"active_ratio": 1.5}}}
        request = {"input_ids": PROMPT, "sampling_params": params}
        request["custom_logit_processor"] = DisallowedTokensLogitsProcessor.to_str()
        response = server.client.post("/generate", json=request)
        assert response.status_code == 400 and "active_ratio: got 1.5" in response.text
        dense = ask(server, sparse=False)
        assert dense["text"] == expected[1]["text"]
        # No KV of a sparse prefill.
        assert dense["meta_info"]["cached_tokens"] == 0
        body = {"messages": [{"role": "user", "content": "ba"}], "custom_params": {"rectify_interval": -1}}
        response = server.client.post("/v1/chat/completions", json={"model": "default", **body})
        assert response.status_code == 400 and "rectify_interval" in response.text


def test_a_custom_logit_processor_has_its_params(tmp_path: Path, expected: list[dict[str, Any]]) -> None:
    own = {"ngram_size": 3, "window_size": 90}

    def answer(server: ServerProcess, **options: Any) -> list[int]:
        params = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True, "custom_params": {**own, **options}}
        processor = DeepseekOCRNoRepeatNGramLogitProcessor.to_str()
        # Of two pages, all of which are attended to.
        found = server.generate(input_ids=[9] * 6, sampling_params=params, custom_logit_processor=processor)
        return found["output_ids"]

    with ForkedServer(MODEL, *FLAGS[: FLAGS.index("--sparse-method")], log_path=tmp_path / "dense") as server:
        dense = answer(server)
        assert dense != answer(server, ngram_size=0)
    with ForkedServer(MODEL, *FLAGS, log_path=tmp_path / "sparse") as server:
        assert answer(server) == answer(server, sparse=False) == dense
        assert answer(server, active_ratio=7, sparse={"rectify_interval": 0}) == dense
        assert answer(server, sparse={"forced_tokens": [7, 8, 9] * 8}) == [7, 8, 9] * 8
        assert ask(server, sparse={"theta": 0.5})["output_ids"] == expected[0]["output_ids"]


class GrpcServer(ForkedServer):
    """A server that speaks gRPC alone, as a router's workers may."""

    def _wait(self, deadline: float) -> None:
        self.stub = services.SglangSchedulerStub(grpc.insecure_channel(f"127.0.0.1:{self.port}"))
        while time.monotonic() < deadline:
            assert self.process is not None and self.process.poll() is None, self.log_tail()
            try:
                if self.stub.HealthCheck(messages.HealthCheckRequest(), timeout=3.0).healthy:
                    return
            except grpc.RpcError:
                time.sleep(0.2)
        raise TimeoutError(self.log_tail())

    def ask(self, name: str, **options: Any) -> list[int]:
        params = Struct()
        params.update(options)
        sampling = messages.SamplingParams(
            top_p=1.0, top_k=-1, repetition_penalty=1.0, max_new_tokens=24, n=1, custom_params=params
        )
        prompt = messages.TokenizedInput(input_ids=PROMPT)
        request = messages.GenerateRequest(request_id=name, tokenized=prompt, sampling_params=sampling)
        (answer,) = self.stub.Generate(request, timeout=60.0)
        return list(answer.complete.output_ids)


def test_grpc_alone(tmp_path: Path, expected: list[dict[str, Any]]) -> None:
    with GrpcServer(MODEL, *FLAGS, "--smg-grpc-mode", log_path=tmp_path / "log") as server:
        assert server.ask("sparse") == expected[0]["output_ids"]
        assert server.ask("dense", sparse=False) == expected[1]["output_ids"]
        # Its messages have one type of numbers, a float.
        assert server.ask("as the config says", rectify_interval=16) == expected[0]["output_ids"]
        assert server.ask("in a mapping", sparse={"rectify_interval": 16}) == expected[0]["output_ids"]
        with pytest.raises(grpc.RpcError, match=r"INVALID_ARGUMENT[\s\S]*active_ratio: got 1.5"):
            server.ask("bad", active_ratio=1.5)
        assert server.ask("forced", forced_tokens=[7, 8, 9] * 8) == [7, 8, 9] * 8
