"""With SGLang's own kernels, the same flags with and without the method give the same answers, feature by feature."""

import random
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from dsa_slices import MODELS, VOCABULARY, dsa_slice
from server_requests import logprobs, random_prompts, sparse_state

from launch.server import ServerProcess, free_port

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FLAGS = ("--load-format", "dummy", "--page-size", "64", "--mem-fraction-static", "0.6", "--context-length", "40960")
FLAGS += ("--max-total-tokens", "131072", "--cuda-graph-max-bs-decode", "4", "--max-running-requests", "8")
NATIVE = {"implementation": "native"}
CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
# By NCCL alone, see ``test_two_gpus.py``.
NCCL = ("--enforce-disable-flashinfer-allreduce-fusion", "--disable-custom-all-reduce")
ON_ONE: dict[str, tuple[str, ...]] = {
    "float8": ("--kv-cache-dtype", "fp8_e4m3"),
    "mtp": ("--speculative-algorithm", "EAGLE", *CHAIN),
    "hierarchical-cache": ("--enable-hierarchical-cache", "--hicache-ratio", "1.5"),
    "metrics": ("--enable-metrics",),
}
ON_TWO: dict[str, tuple[str, ...]] = {
    "dp-attention": ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", *NCCL),
    "tp": ("--tp-size", "2", *NCCL),
    "pp": ("--pp-size", "2"),
}
# As DeepSeek-V3.2 is usually launched.
ON_TWO["dp-attention-mtp"] = (*ON_TWO["dp-attention"], *ON_ONE["mtp"])
# A prefill server on the first GPU, a decode server on the second.
PAIR = (("--disaggregation-mode", "prefill"), ("--disaggregation-mode", "decode", "--base-gpu-id", "1"))
TOKENS = 24
# The second is not selected from; of the third, 2,048 of 9,000 are.
PROMPTS = random_prompts(3, (40, 2000, 9000), VOCABULARY - 10)


@contextmanager
def servers(
    serve, model: Path, *flags: str, roles: Sequence[tuple[str, ...]] = ((),), **options: Any
) -> Iterator[Sequence[ServerProcess]]:
    """Start a server for each role, all at once."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        started: list[AbstractContextManager[ServerProcess]] = [
            serve(model, *FLAGS, *flags, *role, **options) for role in roles
        ]
        yield [*pool.map(stack.enter_context, started)]


def answers(servers: Sequence[ServerProcess], port: int) -> list[dict[str, Any]]:
    """The answers of the last server; a pair's two, which meet at a port, are asked at once."""
    found = []
    with ThreadPoolExecutor() as pool:
        for server in servers:
            server.flush_cache()
        for prompt in PROMPTS:
            params = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
            request: dict[str, Any] = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
            if len(servers) > 1:
                request |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": port}
                request["bootstrap_room"] = random.getrandbits(62)
            found.append([*pool.map(lambda server, request=request: server.generate(**request), servers)][-1])
    return found


def compared(
    serve, model: Path, flags: tuple[str, ...], roles: Sequence[tuple[str, ...]] = ((),), port: int = 0
) -> None:
    """SGLang's selection leaves open which of two equal tokens it takes, so that a long answer may part from itself."""
    with servers(serve, model, *flags, roles=roles) as stock:
        dense, again = answers(stock, port), answers(stock, port)
    with servers(serve, model, *flags, roles=roles, method="dsa", config=NATIVE) as ours:
        found = answers(ours, port)
        for server in ours:
            assert sparse_state(server)["method"] == "dsa"
        assert sparse_state(ours[-1])["decode_rows"] > 0
    for one, same, other in zip(dense, again, found, strict=True):
        if one["output_ids"] == same["output_ids"]:
            assert other["output_ids"] == one["output_ids"]
            assert statistics.fmean(abs(a - b) for a, b in zip(logprobs(one), logprobs(other), strict=True)) < 1e-3


@pytest.mark.parametrize("model", MODELS)
def test_models(serve, tmp_path: Path, model: str) -> None:
    compared(serve, dsa_slice(tmp_path, model), ())


@pytest.mark.parametrize("feature", ON_ONE)
def test_features_on_one_gpu(serve, tmp_path: Path, feature: str) -> None:
    compared(serve, dsa_slice(tmp_path, MODELS[0]), ON_ONE[feature])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("feature", ON_TWO)
def test_features_on_two_gpus(serve, tmp_path: Path, feature: str) -> None:
    compared(serve, dsa_slice(tmp_path, MODELS[0]), ON_TWO[feature])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_pair_on_two_gpus(serve, tmp_path: Path) -> None:
    pytest.importorskip("nixl", reason="the pair's transfer needs the package nixl")
    port = free_port()
    flags = ("--disaggregation-transfer-backend", "nixl", "--disaggregation-bootstrap-port", str(port))
    compared(serve, dsa_slice(tmp_path, MODELS[0]), flags, PAIR, port)
