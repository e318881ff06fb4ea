"""DeepSeek Sparse Attention on the CPU platform: parts against their definition, a server against transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import plain_dsa
import pytest
import torch
from checkpoints import random_dsa
from forked_server import ForkedServer
from server_fixtures import STRICT_MEMORY
from server_requests import RETRACT, assert_nothing_leaked, read_logprobs
from sglang_cpu_platform import sparse_mla

from eval import niah
from eval.live.record import read_rows
from eval.texts.text import read_book
from eval.texts.windows import BOOK
from launch.server import ServerProcess

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform stays inactive next to CUDA")

TOPK = 64


def random_prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, 1024, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_dsa(tmp_path_factory.mktemp("random-dsa"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Requests are retracted again and again."""
    env = STRICT_MEMORY | RETRACT
    log = tmp_path_factory.mktemp("trained") / "log"
    with ForkedServer("eval/models/tiny-dsa", "--chunked-prefill-size=512", log_path=log, env=env) as server:
        yield server
        assert_nothing_leaked(server)


def test_logprobs_are_those_of_transformers(checkpoint, tmp_path, monkeypatch) -> None:
    """Most positions are equal, and the others are nearer than to a model without rotation and float8.

    Where a key lies between two float8 values, rounding decides, and with random weights any key may be chosen.
    """
    prompts = [random_prompt(length) for length in (130, 200, 300, 400)]
    params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 1}
    log = tmp_path / "log"
    with ForkedServer(checkpoint, "--chunked-prefill-size=128", log_path=log, env=STRICT_MEMORY) as server:
        asked = {"sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        answers = [server.generate(input_ids=prompt, **asked) for prompt in prompts]
        assert_nothing_leaked(server)
    got = [logprob for answer in answers for logprob in read_logprobs(answer)]
    unquantised = plain_dsa.load(checkpoint)
    far = torch.tensor(got) - prompt_logprobs(unquantised, prompts)
    monkeypatch.setattr(plain_dsa.modeling.DeepseekV32Indexer, "forward", plain_dsa.indexer_forward)
    near = torch.tensor(got) - prompt_logprobs(unquantised, prompts)
    assert (near.abs() < 1e-3).float().mean() > 0.6
    assert near.abs().mean() < 0.2 * far.abs().mean()


def prompt_logprobs(model: torch.nn.Module, prompts: list[list[int]]) -> torch.Tensor:
    """Of every token but each prompt's first."""
    found = []
    for prompt in prompts:
        ids = torch.tensor(prompt)
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        found.append(logprobs[:-1].gather(1, ids[1:, None]).flatten())
    return torch.cat(found)


def test_a_trained_indexer_finds_its_needles_at_once_and_retracted(trained, tmp_path) -> None:
    out = tmp_path / "niah.jsonl"
    arguments = ["--base-url", trained.url, "--tasks", "multikey", "--lengths", "1k", "--n", "1", "--concurrency", "5"]
    assert niah.main([*arguments, "--expect", "any", "--out", str(out)]) == 0
    (summary,) = (row for row in read_rows(out) if row["kind"] == "summary")
    assert (summary["n"], summary["score"]) == (5, 1.0)


def test_prefixes_bring_their_keys_along_and_retraction_changes_nothing(trained) -> None:
    book = read_book(BOOK)
    texts = [book[first : first + 2500] for first in (0, 20000, 40000)]
    params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 16}
    trained.flush_cache()
    together = trained.generate(text=texts, sampling_params=params)
    assert any(answer["meta_info"]["num_retractions"] for answer in together)
    for text, first in zip(texts, together, strict=True):
        again = trained.generate(text=text, sampling_params=params)
        tokens = again["meta_info"]["prompt_tokens"]
        assert tokens > 512 and again["meta_info"]["cached_tokens"] == (tokens - 1) // 64 * 64
        assert again["output_ids"] == first["output_ids"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-cache-dtype", "fp8_e5m2"], "--kv-cache-dtype fp8_e5m2: .* takes auto, bfloat16 or fp8_e4m3"),
        (["--dsa-decode-backend", "fa3"], "--dsa-decode-backend fa3: without a CUDA device"),
        (["--dsa-topk-backend", "flashinfer"], "--dsa-topk-backend flashinfer: without a CUDA device"),
        (["--dsa-paged-mqa-logits-backend", "deepgemm"], "--dsa-paged-mqa-logits-backend deepgemm: without a CUDA"),
    ],
)
def test_what_needs_a_gpu_is_refused_by_name(flags: list[str], message: str) -> None:
    from resolved import prepare_server_args

    with pytest.raises(ValueError, match=message):
        prepare_server_args(["--model-path", "eval/models/tiny-dsa", *flags])


@pytest.mark.parametrize(
    ("field", "value"), [("index_local_tokens", 64), ("index_kpool", 2), ("indexer_types", ["full", "shared"])]
)
def test_an_indexer_of_another_kind_is_refused_by_its_field(field: str, value: object, tmp_path: Path) -> None:
    from resolved import prepare_server_args

    config = json.loads(Path("eval/models/tiny-dsa/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ValueError, match=f"the model's {field} .* not served without a CUDA device"):
        prepare_server_args(["--model-path", str(tmp_path)])


def test_rows_are_rotated_and_rounded_by_definition() -> None:
    x = torch.randn(50, 3, 128, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sparse_mla.rotate(x), plain_dsa.rotate(x), rtol=1e-5, atol=1e-5)
    x *= torch.logspace(-6, 4, 50)[:, None, None]
    x[0] = 0.0
    x[1, 0] = 448.0 * 2.0**-9  # the largest value is a power of two times 448 itself
    values, scales = sparse_mla.quantize(x)
    assert torch.equal(values.float() * scales[..., None], plain_dsa.round_to_fp8(x))
    assert scales[1, 0] == 2.0**-9


def test_keys_are_stored_by_page_with_their_scales() -> None:
    keys = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([3, 0, 11, 7, 4])
    buffer = torch.full((3, 4 * (128 + 4)), 0xFF, dtype=torch.uint8)
    sparse_mla.store_keys(buffer, slots, keys)
    values, scales = sparse_mla.quantize(keys)
    assert torch.equal(sparse_mla.read_keys(buffer, slots), values.float() * scales[:, None])
    assert torch.equal(buffer[1, : 4 * 128].view(4, 128)[3], values[3].view(torch.uint8))
    assert torch.equal(buffer[1, 4 * 128 :].view(torch.float32)[[0, 3]], scales[[4, 3]])


@pytest.mark.parametrize("length", [1, TOPK, TOPK + 1, 300])
def test_the_best_tokens_are_chosen_and_ties_go_to_the_lowest(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    # Few values, so that most logits have equals.
    query = torch.randint(-1, 2, (5, 4, 128), generator=generator).float()
    keys = torch.randint(-1, 2, (length, 1), generator=generator).float().expand(-1, 128).contiguous()
    gates = torch.rand(5, 4, generator=generator)
    lengths = torch.arange(length - 4, length + 1).clamp(min=1).int()
    got = sparse_mla.choose(query, gates, keys, lengths, TOPK)
    logits = torch.einsum("qh,qhl->ql", gates, (query @ keys.T).relu()).tolist()
    for i, seen in enumerate(lengths.tolist()):
        best = sorted(range(seen), key=lambda place, row=logits[i]: (-row[place], place))[:TOPK]
        assert got[i].tolist() == sorted(best) + [-1] * (TOPK - len(best))


def test_attention_is_a_softmax_over_the_chosen_slots() -> None:
    generator = torch.Generator().manual_seed(0)
    cache, query = torch.randn(300, 1, 96, generator=generator), torch.randn(70, 4, 96, generator=generator)
    slots = torch.stack([torch.randperm(300, generator=generator)[:20] for _ in range(70)]).int()
    slots[3, 5:] = -1
    got = sparse_mla.attend(None, query, cache, 64, slots, 0.3)
    for i in range(70):
        latents = cache[[slot for slot in slots[i].tolist() if slot >= 0], 0]
        want = (query[i] @ latents.T * 0.3).softmax(-1) @ latents[:, :64]
        torch.testing.assert_close(got[i], want, rtol=1e-5, atol=1e-5)


def test_float8_rows_hold_latents_with_a_scale_for_each_tile() -> None:
    generator = torch.Generator().manual_seed(0)
    latent, rotated = torch.randn(9, 1, 256, generator=generator), torch.randn(9, 1, 16, generator=generator)
    latent[0, 0, :128], latent[1, 0, 128:] = 0.0, 100 * latent[1, 0, 128:]
    rows = torch.full((12, 1, 256 + 8 + 32), 0xFF, dtype=torch.uint8)
    rows[3:] = torch.cat(sparse_mla.quantize_latents(latent, rotated), -1)
    # As a server's first page, which is read where nothing is chosen.
    rows[0] = 0
    found = sparse_mla.expand(rows[3:, 0].view(torch.float8_e4m3fn), 256)
    assert torch.equal(found[:, 256:], rotated[:, 0].bfloat16().float())
    for got, want in zip(found[:, :256].reshape(-1, 128), latent.reshape(-1, 128), strict=True):
        scale = want.abs().max() / 448
        expected = (want / scale).to(torch.float8_e4m3fn).float() * scale if scale else want
        # Where a value lies between two others, a product with the inverse may round elsewhere.
        assert (got - expected).abs().max() <= 32 * scale and ((got - expected).abs() > 1e-6 * scale).sum() < 3
    query = torch.randn(4, 2, 272, generator=generator)
    slots = torch.tensor([[3, 5, -1], [4, 6, 7], [11, -1, -1], [8, 9, 10]], dtype=torch.int32)
    plain = torch.zeros(12, 1, 272)
    plain[3:, 0] = found
    got, want = (
        sparse_mla.attend(None, query, cache, 256, slots, 0.1) for cache in (rows.view(torch.float8_e4m3fn), plain)
    )
    assert torch.equal(got, want)


def test_a_row_of_float8_has_room_for_its_scales() -> None:
    config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=TOPK)
    dense = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], index_topk=None)
    widths = [
        sparse_mla.row_width(
            lambda **_: 272,
            model_config=SimpleNamespace(hf_config=found, kv_lora_rank=256, qk_rope_head_dim=16),
            kv_cache_dtype=dtype,
        )
        for found, dtype in [(config, torch.float8_e4m3fn), (config, torch.float32), (dense, torch.float8_e4m3fn)]
    ]
    assert widths == [256 + 2 * 4 + 2 * 16, 272, 272]


def test_positions_become_slots() -> None:
    table = torch.tensor([[70, 71, 72], [90, 91, 0]], dtype=torch.int32)
    chosen = torch.tensor([[0, -1], [0, 1], [1, 0]], dtype=torch.int32)
    extend = sparse_mla.slots_of_extend(page_table=table, topk_indices=chosen, extend_lens_cpu=[2, 1], page_size=1)
    assert extend.tolist() == [[70, -1], [70, 71], [91, 90]]
    decode = sparse_mla.slots_of_decode(page_table=table, topk_indices=chosen[1:], page_size=1)
    assert decode.tolist() == [[70, 71], [91, 90]]
