"""SGLang on the CPU platform: parts against SGLang's own, whole servers against transformers."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import sglang_cpu_platform
import torch
from checkpoints import random_mla, random_qwen3
from forked_server import Forked, ForkedServer
from server_fixtures import STRICT_MEMORY
from server_requests import assert_nothing_leaked, logprobs

from launch.server import ServerProcess

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform stays inactive next to CUDA")

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def random_prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, 1024, (length,), generator=generator).tolist()


PROMPTS = [random_prompt(n) for n in (17, 130, 400)]


def expected_tokens(checkpoint: Path, tokens: int = 16) -> list[list[int]]:
    """Greedy continuations of ``PROMPTS`` from transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


@pytest.fixture(scope="module")
def mla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_mla(tmp_path_factory.mktemp("random-mla"))


@pytest.fixture(scope="module")
def server(mla: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """An MLA server whose pool is too small for many requests: long prompts come in chunks, decoding retracts."""
    flags = ["--page-size=16", "--chunked-prefill-size=128", "--max-total-tokens=768", "--schedule-conservativeness=0"]
    flags.append("--constrained-json-disable-any-whitespace")
    log = tmp_path_factory.mktemp("server") / "log"
    with ForkedServer(mla, *flags, log_path=log, env=STRICT_MEMORY) as server:
        yield server
        assert_nothing_leaked(server)


def greedy(server: ServerProcess, prompt: list[int], tokens: int = 16, **options: Any) -> dict[str, Any]:
    params = {**GREEDY, "max_new_tokens": tokens, **options.pop("sampling", {})}
    return server.generate(input_ids=prompt, sampling_params=params, **options)


def test_mla_equals_transformers_cold_warm_and_batched(server: ServerProcess, mla: Path) -> None:
    expected = expected_tokens(mla)
    server.flush_cache()
    cold = [greedy(server, prompt) for prompt in PROMPTS]
    assert [answer["output_ids"] for answer in cold] == expected
    assert [answer["meta_info"]["cached_tokens"] for answer in cold] == [0, 0, 0]
    warm = greedy(server, PROMPTS[2])
    assert warm["output_ids"] == expected[2]
    assert warm["meta_info"]["cached_tokens"] == 384
    server.flush_cache()
    batch = server.generate(input_ids=PROMPTS, sampling_params={**GREEDY, "max_new_tokens": 16})
    assert [answer["output_ids"] for answer in batch] == expected


def test_retracted_requests_end_as_if_alone(server: ServerProcess) -> None:
    prompts = [random_prompt(20 + i) for i in range(8)]
    # SGLang reserves all tokens of a request with ignore_eos, and would run fewer at once.
    params = {"temperature": 0.0, "min_new_tokens": 120, "max_new_tokens": 120}
    server.flush_cache()
    together = server.generate(input_ids=prompts, sampling_params=params)
    retracted = [i for i, answer in enumerate(together) if answer["meta_info"]["num_retractions"]]
    assert retracted
    server.flush_cache()
    for i in retracted[:2]:
        alone = server.generate(input_ids=prompts[i], sampling_params=params)
        assert alone["output_ids"] == together[i]["output_ids"]


def test_regex_constrains_the_output(server: ServerProcess) -> None:
    answer = server.generate(text="be", sampling_params={"max_new_tokens": 32, "regex": "(cat|dog)[0-9]{3}!"})
    assert answer["text"][:3] in ("cat", "dog")
    assert answer["text"][3:6].isdigit()
    assert answer["text"][6:] == "!"


def test_json_schema_constrains_the_output(server: ServerProcess) -> None:
    schema = {"type": "object", "properties": {"cat": {"type": "boolean"}}, "required": ["cat"]}
    schema["additionalProperties"] = False
    answer = server.generate(text="be", sampling_params={"max_new_tokens": 64, "json_schema": json.dumps(schema)})
    assert isinstance(json.loads(answer["text"])["cat"], bool)


def test_logprobs_equal_transformers(server: ServerProcess, mla: Path) -> None:
    from transformers import AutoModelForCausalLM

    answer = greedy(server, PROMPTS[0], return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
    model = AutoModelForCausalLM.from_pretrained(mla, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0] + answer["output_ids"]])).logits[0].log_softmax(-1)
    want = [float(logits[len(PROMPTS[0]) - 1 + i, token]) for i, token in enumerate(answer["output_ids"])]
    assert logprobs(answer) == pytest.approx(want, abs=1e-4)
    assert len(answer["meta_info"]["input_token_logprobs"]) == len(PROMPTS[0])


def test_sampling_options(server: ServerProcess) -> None:
    plain = greedy(server, PROMPTS[0])
    penalised = greedy(server, PROMPTS[0], sampling={"frequency_penalty": 2.0, "presence_penalty": 1.0})
    assert len(set(penalised["output_ids"])) > len(set(plain["output_ids"]))
    biased = greedy(server, PROMPTS[0], sampling={"logit_bias": {"5": 100.0}, "min_new_tokens": 4})
    assert set(biased["output_ids"]) == {5}
    several = greedy(server, PROMPTS[0], sampling={"temperature": 1.0, "n": 3, "top_k": 50, "top_p": 0.9})
    assert len({tuple(answer["output_ids"]) for answer in several}) > 1
    stop = plain["text"][3:5]
    stopped = greedy(server, PROMPTS[0], sampling={"stop": stop})
    assert stopped["text"] == plain["text"][: plain["text"].index(stop)]
    assert stopped["meta_info"]["finish_reason"]["type"] == "stop"


def test_streaming_and_chat(server: ServerProcess) -> None:
    whole = greedy(server, PROMPTS[0])
    request = {"input_ids": PROMPTS[0], "sampling_params": {**GREEDY, "max_new_tokens": 16}, "stream": True}
    with server.client.stream("POST", "/generate", json=request) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    assert len(events) > 2
    assert json.loads(events[-2])["text"] == whole["text"]
    message = [{"role": "user", "content": "be"}]
    chat = server.openai().chat.completions.create(model="default", messages=message, max_tokens=4)
    assert chat.usage.completion_tokens == 4


def test_abort_ends_a_running_request(server: ServerProcess) -> None:
    sampling = {**GREEDY, "max_new_tokens": 700, "ignore_eos": True}
    request = {"input_ids": PROMPTS[0], "sampling_params": sampling, "rid": "long", "stream": True}
    with server.client.stream("POST", "/generate", json=request) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        httpx.post(f"{server.url}/abort_request", json={"rid": "long"}).raise_for_status()
        *_, last, done = lines
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"


ENGINE = """
import json, sys, sglang

if __name__ == "__main__":
    checkpoint, prompts, params = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    engine = sglang.Engine(model_path=checkpoint, log_level="error")
    answers = engine.generate(input_ids=prompts, sampling_params=params)
    answers.append(engine.generate(input_ids=prompts[-1], sampling_params=params))
    names = ("device", "attention_backend", "dtype", "max_total_tokens", "max_running_requests")
    print(json.dumps({"answers": answers, "info": [engine.get_server_info()[name] for name in names]}))
    engine.shutdown()
"""


def test_engine_with_defaults_equals_transformers(tmp_path: Path) -> None:
    checkpoint = random_qwen3(tmp_path / "random-qwen3")
    expected = expected_tokens(checkpoint)
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    # In a process of its own: Engine.shutdown() kills all children of its process, also other tests' servers.
    command = [str(script), str(checkpoint), json.dumps(PROMPTS), json.dumps({**GREEDY, "max_new_tokens": 16})]
    assert Forked(command, dict(os.environ), str(tmp_path / "log")).wait(300.0) == 0, (tmp_path / "log").read_text()
    (told,) = (line for line in (tmp_path / "log").read_text().splitlines() if line.startswith('{"answers"'))
    result = json.loads(told)
    assert [answer["output_ids"] for answer in result["answers"]] == [*expected, expected[-1]]
    assert [answer["meta_info"]["cached_tokens"] for answer in result["answers"]] == [0, 0, 0, 399]
    assert result["info"] == ["cpu", "torch_native", "float32", 32768, 32]


def test_inactive_next_to_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sglang_cpu_platform.activate() == "sglang_cpu_platform.platform:TorchCpuPlatform"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sglang_cpu_platform.activate() is None


def test_a_gguf_file_is_refused_with_what_to_give(tmp_path: Path) -> None:
    from resolved import prepare_server_args

    file = tmp_path / "model.gguf"
    field, value = (struct.pack("<Q", len(text)) + text for text in (b"general.architecture", b"qwen2"))
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field + struct.pack("<I", 8) + value)
    with pytest.raises(ValueError, match=r"model\.gguf: SGLang reads GGUF .* give the folder, .* in safetensors"):
        prepare_server_args(["--model-path", str(file)])


def test_refuses_another_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.platforms  # noqa: F401 - SGLang imports the platform, not the other way round
    from sglang_cpu_platform import platform

    monkeypatch.setattr(platform, "version", lambda name: "0.5.17")
    with pytest.raises(RuntimeError, match=r"supports sglang 0\.5\.23, found sglang 0\.5\.17"):
        platform.TorchCpuPlatform()


def test_says_which_patch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.platforms  # noqa: F401
    from sglang_cpu_platform import patches

    monkeypatch.setattr(patches.HookRegistry, "_patched", set())
    with pytest.raises(RuntimeError, match=r"could not patch .*get_rope_wrapper"):
        patches.require_applied()


@pytest.mark.parametrize(
    ("window", "chunk", "sunk", "cap"),
    [
        (None, None, True, 0.0),
        (63, None, True, 0.0),
        (None, 96, True, 0.0),
        (None, None, True, 1.5),
        (63, None, False, 2),
    ],
)
def test_attention_with_sinks_and_caps(window: int | None, chunk: int | None, sunk: bool, cap: float) -> None:
    """A prefill and a decode step of two rows, 330 and 210 tokens long, against a softmax of one more column."""
    from sglang_cpu_platform import attention

    torch.manual_seed(0)
    keys, values, sinks = (
        torch.randn(700, 2, 32),
        torch.randn(700, 2, 32),
        torch.randn(4).bfloat16() + 3 if sunk else None,
    )
    table, rows, lengths = torch.randperm(700)[:660].view(2, 330), torch.arange(2), torch.tensor([330, 210])
    options = {"scaling": 0.3, "enable_gqa": True, "is_cross_attn": False, "sliding_window_size": window}
    query, backend = torch.randn(380, 4, 32), SimpleNamespace(token_to_kv_pool=None, chunk_size=96)
    layer = SimpleNamespace(use_irope=chunk is not None, logit_cap=cap)
    caches, extends = (keys, values, table, rows, lengths), torch.tensor([200, 180])

    def run(backend: Any, query: torch.Tensor, hook: Any, _: Any, layer: Any, *more: Any, causal: bool) -> torch.Tensor:
        return hook(None, backend, query, torch.empty_like(query), *caches, *more, causal=causal, **options)

    prefills = (query, attention.extend, None, layer, lengths - extends, extends)
    found = attention.note_layer(run, backend, *prefills, sinks=sinks, causal=True)
    steps = torch.cat([query[199:200], query[379:]])
    last = attention.note_layer(run, backend, steps, attention.decode, None, layer, sinks=sinks, causal=False)
    torch.testing.assert_close(last, found[[199, 379]])
    for token, (row, position) in enumerate([(0, i) for i in range(130, 330)] + [(1, i) for i in range(30, 210)]):
        first = 0 if window is None else max(0, position - window)
        first = position // chunk * chunk if chunk else first
        slots = table[row, first : position + 1]
        logits = torch.einsum("hd,khd->hk", query[token], keys[slots].repeat_interleave(2, 1)) * 0.3
        logits = cap * (logits / cap).tanh() if cap else logits
        column = torch.full((4,), -torch.inf) if sinks is None else sinks.float()
        weights = torch.cat([logits, column[:, None]], 1).softmax(1)[:, :-1]
        expected = torch.einsum("hk,khd->hd", weights, values[slots].repeat_interleave(2, 1))
        torch.testing.assert_close(found[token], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kv_heads", "key_dim", "value_dim"), [(2, 64, 64), (1, 576, 512)])
def test_attention_equals_stock(kv_heads: int, key_dim: int, value_dim: int) -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang_cpu_platform import attention

    torch.manual_seed(0)
    lengths, new = torch.tensor([700, 40]), torch.tensor([560, 40])
    keys = torch.randn(900, kv_heads, key_dim)
    args = (keys, keys[..., :value_dim], torch.randperm(900)[: 2 * 450].view(2, 450).repeat(1, 2))
    rows = (torch.tensor([0, 1]), lengths, lengths - new, new, None)
    options = {"scaling": key_dim**-0.5, "enable_gqa": True, "causal": True, "sliding_window_size": None}
    stock = TorchNativeAttnBackend._run_sdpa_forward_extend
    stock = getattr(stock, "__wrapped__", stock)
    query = torch.randn(600, 8, key_dim)
    want = stock(None, query, torch.empty(600, 8, value_dim), *args, *rows, **options)
    got = attention.extend(stock, None, query, torch.empty(600, 8, value_dim), *args, *rows, **options)
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-5)

    stock = TorchNativeAttnBackend._run_sdpa_forward_decode
    stock = getattr(stock, "__wrapped__", stock)
    options["causal"] = False
    want = stock(None, query[:2], torch.empty(2, 8, value_dim), *args, *rows[:2], **options)
    got = attention.decode(stock, None, query[:2], torch.empty(2, 8, value_dim), *args, *rows[:2], **options)
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-5)
