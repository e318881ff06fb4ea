"""Float8 latents of a DSA pass: what is written to SGLang's pool, and what the attention makes of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dsa_passes import PAGE, PAGES, PASSES, Model, Rows, no_original, runner
from sglang.srt import runtime_context

from sglang_sparse.attention.dsa import latents
from sglang_sparse.config.settings import build
from sglang_sparse_kernels.latent_rows import reference, row_bytes

LATENT, ROPE, HEADS = 128, 16, 2
SLOTS = (PAGES + 1) * PAGE


def pool(float8: bool = True) -> Any:
    """SGLang's, for what the hook reads of it."""
    return SimpleNamespace(dsa_kv_cache_store_fp8=float8)


@pytest.mark.parametrize("kind", ["decode within a graph", "prefill of a padded batch"])
@pytest.mark.parametrize("interpreted", [False, True])
def test_attention_reads_what_was_written(kind: str, interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the references and through Triton's interpreter: as over latents that were rounded beforehand."""
    rows = Rows(**PASSES[kind])
    backend = rows.backend(fused=True)
    runner(monkeypatch)(rows, backend, Model(rows), 0)
    if interpreted:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    selection = backend.indexed.selection
    slots = selection[selection >= 0].unique().long()
    latent, rotated = (torch.randn(len(slots), 1, dim, generator=rows.generator) for dim in (LATENT, ROPE))
    # What nobody wrote is NaN.
    cache = torch.full((SLOTS, 1, row_bytes(LATENT, ROPE)), 0xFF, dtype=torch.uint8)
    latents.write(no_original, pool(), cache, slots, latent, rotated)
    plain = reference.read_latents(cache, LATENT)
    assert torch.allclose(plain[slots, :, :LATENT], latent, atol=0.2)
    assert torch.equal(plain[slots, :, LATENT:].bfloat16(), rotated.bfloat16())
    query = torch.randn(rows.tokens, HEADS, LATENT + ROPE, generator=rows.generator)
    got, expected = (
        latents.attend(no_original, None, query, kv, LATENT, selection, 0.3)
        for kv in (cache.view(torch.float8_e4m3fn), plain)
    )
    assert torch.allclose(got, expected, atol=1e-5)


def test_what_sglang_writes_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In servers of other methods, with native attention, and with KV in the model's own dtype."""
    native = Rows(**PASSES["dense decode"]).backend({"implementation": "auto"})
    asked: list[int] = []
    for backend, float8 in ((None, True), (native, True), (Rows(**PASSES["dense decode"]).backend(), False)):
        monkeypatch.setattr(latents, "served_backend", lambda found=backend: found)
        latents.write(lambda *args: asked.append(len(args)), pool(float8), *[torch.zeros(1)] * 4)
    assert asked == [5] * 3


@pytest.mark.parametrize(
    ("implementation", "dtype", "width"),
    [
        ("portable", torch.float8_e4m3fn, row_bytes(LATENT, ROPE)),
        ("portable", torch.bfloat16, "SGLang's"),
        ("auto", torch.float8_e4m3fn, "SGLang's"),
    ],
)
def test_the_kv_pool_is_sized_by_rows_with_their_scales(
    implementation: str, dtype: torch.dtype, width: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: None)
    monkeypatch.setattr(latents, "hooked_settings_of", lambda _: build("dsa", {"implementation": implementation}))
    model = SimpleNamespace(kv_lora_rank=LATENT, qk_rope_head_dim=ROPE)
    assert latents.row_width(lambda **_: "SGLang's", model_config=model, kv_cache_dtype=dtype) == width


def test_rows_of_another_layout_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's backend trtllm keeps a byte a number, without scales."""
    rows = Rows(**PASSES["dense decode"])
    backend = rows.backend()
    runner(monkeypatch)(rows, backend, Model(rows), 0)
    cache = torch.zeros(SLOTS, 1, LATENT + ROPE, dtype=torch.uint8).view(torch.float8_e4m3fn)
    query = torch.zeros(rows.tokens, HEADS, LATENT + ROPE)
    selection = backend.indexed.selection
    with pytest.raises(ValueError, match=r"kv_cache must have the shape \(\d+, 164\), got \(\d+, 144\)"):
        latents.attend(no_original, None, query, cache, LATENT, selection, 0.3)
