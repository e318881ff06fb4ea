"""Scratch of sparse decode in SGLang's sizing of the KV pool."""

import dataclasses
import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.model_executor.model_runner_components.layer_setup import ModelLayerInfo
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import SpecAuxHiddenStateConfig
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import SpawnRanks, create_context, get_context, use_context
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_sparse.attention import memory
from sglang_sparse.attention.batch import allocate_view
from sglang_sparse.attention.plan import usual_selection
from sglang_sparse.config.settings import build
from sglang_sparse.methods.base import ModelShape
from sglang_sparse_kernels import sparse_decode, sparse_mla_decode
from sglang_sparse_kernels.common import launch

TINY_MLA = "eval/models/tiny-mla"
GIB = 2**30
SHAPE = ModelShape(61, 128, 1, 576, torch.bfloat16, 64)
CONTEXT, EXTRA = 131072, 4
OPEN = {"allow_uncalibrated": True}
SIZES = [1, 2, 4, 8, 16, 24, 256]


@pytest.fixture(autouse=True)
def published() -> Iterator[None]:
    """Arguments of the process, which SGLang asks how wide a row of its token table is."""
    with get_context().override_server_args(page_size=16):
        yield


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "model_shape", lambda *_: SHAPE)


def configurator(
    method: str | None = "robsa", running: int | None = 24, captured: list[int] | None = None, **kwargs: Any
) -> Any:
    graphs = SimpleNamespace(backend="full" if captured else "disabled", bs=captured)
    args = SimpleNamespace(
        sparse_method=method,
        sparse_config=json.dumps(kwargs.pop("config", OPEN if method == "robsa" else {})),
        page_size=16,
        max_running_requests=running,
        attn_dp_size=kwargs.pop("replicas", 1),
        cuda_graph_config=SimpleNamespace(decode=graphs),
        disable_cuda_graph_padding=kwargs.pop("unpadded", False),
        chunked_prefill_size=8192,
        enable_mixed_chunk=False,
        speculative_algorithm="STANDALONE" if (drafts := kwargs.pop("draft_tokens", None)) else None,
        speculative_num_draft_tokens=drafts,
    )
    text = SimpleNamespace(index_topk=2048)
    model = SimpleNamespace(context_len=CONTEXT, v_head_dim=128, hf_text_config=text)
    stand_in = {"model_config": model, "kv_cache_dtype": torch.bfloat16, "model_dtype": torch.bfloat16}
    return SimpleNamespace(**{"server_args": args, "device": "cpu", "is_draft_worker": False, **stand_in, **kwargs})


def by_rows(config: dict[str, Any] | None = None, context: int = CONTEXT, model: ModelShape = SHAPE) -> Any:
    """Return a function that gives the scratch bytes of a RoBSA step by its number of rows."""
    method = build("robsa", {**OPEN, **(config or {})}).method
    blocks = -(-(context + EXTRA) // 16)
    limits = (1, blocks, usual_selection(method, blocks), 16)

    def taken(rows: int, dtype: torch.dtype = torch.bfloat16) -> int:
        view = allocate_view(rows, *limits, torch.zeros(4, dtype=torch.int64, device="meta"))
        return method.scratch_bytes(model, view, dtype, torch.device("cpu"))

    return taken


def static(rows: int) -> int:
    """Return the bytes of the CUDA graph view for so many rows: page table, scores, selection, a few numbers a row."""
    width = -(-(CONTEXT + EXTRA) // 256) * 16
    return rows * (3 * 4 * width + 36)


def charge(**kwargs: Any) -> int:
    return 20 * GIB - memory.charge_scratch(20 * GIB, configurator(**kwargs), 80.0)


def test_batches_by_the_servers_flags() -> None:
    def batches(**kwargs: Any) -> tuple[list[int], list[int]]:
        captured, eager = memory.decode_batches(configurator(**kwargs).server_args)
        return captured, list(eager)

    assert batches(running=3) == ([], [1, 2, 3])
    assert batches(running=None, captured=SIZES) == (SIZES, list(range(257, 4097)))
    # SGLang captures the limit itself.
    assert batches(running=20, captured=SIZES) == ([1, 2, 4, 8, 16, 20], [])
    assert batches(running=20, captured=[1, 8], unpadded=True) == ([1, 8], list(range(1, 21)))
    # Each rank of data-parallel attention runs its share.
    assert batches(running=20, captured=SIZES, replicas=4) == ([1, 2, 4, 5], [])


@pytest.mark.usefixtures("one_rank")
def test_the_pool_leaves_what_the_largest_batches_take() -> None:
    taken = by_rows()
    # Tables of 128 heads: for each tile of eight blocks their float16 sums and a float32 maximum; a page more than
    # the context, and the width is a multiple of 16 blocks.
    tables = 24 * 8208 // 8 * 128 * (8 * 2 + 4)
    assert tables < taken(24) < tables + 2**20
    assert charge(running=24) == taken(24) == max(map(taken, range(1, 25)))
    assert charge(running=24, captured=SIZES) == taken(24) + static(24)
    both = charge(running=None, captured=SIZES) - static(256)
    assert both == taken(256) + max(map(taken, range(257, 4097)))
    assert 2 * 250 * 2**20 < both < 2 * 265 * 2**20, "256 MiB for the graphs and again beside them"


@pytest.mark.usefixtures("one_rank")
def test_methods_that_need_nothing_are_charged_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert charge(method=None) == charge(is_draft_worker=True) == 0
    assert charge(method="dsa", config={"implementation": "native"}) == 0
    assert "kept free" not in caplog.text


@pytest.mark.usefixtures("one_rank")
def test_dsa_is_charged_its_portable_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a part of the logits of a prefill; its own of decode are no larger than those of SGLang's indexer."""
    # So many processors that rows of 128 heads are taken apart.
    monkeypatch.setattr(launch, "stand_in", launch.Properties((9, 0), 132, 232448))
    sizes = (128, 512, 2048, 1, torch.bfloat16, torch.device("cpu"))
    taken = [sparse_mla_decode.scratch_bytes(rows, *sizes) for rows in range(1, 25)]
    width = -(-(CONTEXT + EXTRA) // 64) * 64
    logits = 4 * width * (32 * 2**20 // (4 * width))
    assert charge(method="dsa", config={"implementation": "portable"}) == max(taken) + logits and max(taken) > 0
    # Each of a request's drafts is a row.
    drafted = charge(method="dsa", config={"implementation": "portable"}, running=6, draft_tokens=4)
    assert drafted == max(taken[3::4]) + logits
    # Behind SGLang's logits: a mask and a copy, however wide they are, and a copy of those of a decode step.
    assert charge(method="dsa", config={"implementation": "auto"}) == 5 * 8 * 2**20 + 24 * 4 * width


def test_resa_is_charged_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape(36, 4, 1, 128, torch.bfloat16)
    monkeypatch.setattr(memory, "model_shape", lambda *_: shape)
    # A tenth of the longest row's pages.
    sizes = (4, 1, 128, 128, -(-(CONTEXT + EXTRA) // 160), 16, torch.bfloat16, torch.bfloat16, torch.device("cpu"))
    expected = max(sparse_decode.scratch_bytes(rows, *sizes) for rows in range(1, 25))
    paper = {"summary": "minmax", "group": "mean_query"}
    assert charge(method="resa", config=paper) == expected > 0
    # Votes leave a logit of every head and page.
    assert charge(method="resa") > max(expected, 24 * 4 * 4 * (CONTEXT + EXTRA) // 16)


def test_tokens_that_a_verification_asks_for_together_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charges cover split results, queries and outputs by KV head, and the selecting query, with or without graphs."""
    shape = ModelShape(36, 4, 1, 128, torch.bfloat16)
    monkeypatch.setattr(memory, "model_shape", lambda *_: shape)
    sizes = (20, 1, 128, 128, -(-(CONTEXT + EXTRA) // 160), 16, torch.bfloat16, torch.bfloat16, torch.device("cpu"))
    kernels = max(sparse_decode.scratch_bytes(rows, *sizes) for rows in range(1, 25))
    one_each = charge(method="resa", config={"summary": "minmax", "group": "mean_query"})
    given = {"method": "resa", "config": {"summary": "minmax", "group": "mean_query", "rectify_interval": 0}}
    regrouped = 24 * (2 * 5 + 1) * 4 * 128 * 2
    assert charge(**given, draft_tokens=5) == kernels + regrouped > one_each
    graphs = charge(**given, captured=SIZES, draft_tokens=5) - charge(**given, captured=SIZES)
    assert graphs == kernels + regrouped - one_each


def test_a_full_score_and_a_copy_of_the_keys_are_counted() -> None:
    given = {"calibration": "deepseek-v3-paper-ruler", "allow_uncalibrated": False, "head_scope": "rank"}
    both_parts = 24 * 128 * 576 * 2
    plain, full = by_rows(given), by_rows({**given, "insensitive": "full_score"})
    assert full(24) > plain(24) and full(24) - both_parts < plain(24) + 2**20
    # So short a context that copying a page is the most that is taken.
    short = by_rows({"rope_copy": "on"}, 12, ModelShape(4, 1, 1, 576, torch.bfloat16, 64))
    assert short(24) == 24 * (16 * 64 * 2 + 8)


@pytest.mark.usefixtures("one_rank")
def test_too_little_memory_names_the_flags() -> None:
    with refused("--mem-fraction-static", 40 * 2**20) as caught:
        memory.charge_scratch(40 * 2**20, configurator(), 80.0)
    assert str(caught.value) == (
        "--sparse-method robsa needs 60 MiB for batches of up to 24 rows at a context of 131072, and 40 MiB are left "
        "for it and the KV cache; allowed: a smaller --max-running-requests or --context-length, a larger "
        "--mem-fraction-static"
    )
    with refused("--mem-fraction-static", 40 * 2**20) as caught:
        memory.charge_scratch(40 * 2**20, configurator(running=None, captured=SIZES), 80.0)
    assert "CUDA graphs of up to 256 rows, other batches of up to 4096 rows" in str(caught.value)
    assert "--cuda-graph-max-bs-decode or --context-length" in caught.value.allowed


@pytest.mark.parametrize("running", [8, 24])
def test_a_real_server_sizes_its_pool_by_what_remains(
    running: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's own sizing on the CPU platform, of a machine with 1 GiB left; 0.1 GiB stay free."""
    caplog.set_level(logging.INFO)
    assert any("_profile_available_bytes" in target for target in HookRegistry._patched)
    args: Any = ServerArgs(
        model_path=TINY_MLA,
        sparse_method="robsa",
        sparse_config=json.dumps(OPEN),
        max_running_requests=running,
        mem_fraction_static=0.9,
    )
    context = create_context(args.record, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    context.parallel.override_permanently(world_group=SimpleNamespace(world_size=1, cpu_group=None))
    with use_context(context):
        kvc = real_configurator(args, monkeypatch)
        tokens = kvc._resolve_memory_pool_config(1.0).max_total_num_tokens
        model = memory.model_shape(kvc.model_config, torch.float32)
    taken = by_rows(context=kvc.model_config.context_len, model=model)
    need = max(taken(rows, torch.float32) for rows in range(1, running + 1))
    cell = 4 * model.head_dim * model.num_layers
    assert tokens == (int(0.9 * GIB) - need) // cell // 16 * 16
    assert f"{need / 2**20:.1f} MiB kept free for the scratch of sparse decode (batches of up to {running} rows)" in (
        caplog.text
    )


def real_configurator(args: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's ``KVCacheConfigurator`` of one rank, without a model."""
    monkeypatch.setattr(kv_cache_configurator, "get_available_gpu_memory", lambda *_, **__: 1.0)
    kind = kv_cache_configurator.KVCacheConfigurator
    fields = dict.fromkeys(field.name for field in dataclasses.fields(kind) if field.init)
    model = ModelConfig.from_server_args(args.record)
    layers = model.num_hidden_layers
    known = {
        "device": "cpu",
        "attn_dp_size": 1,
        "pp_size": 1,
        "page_size": args.page_size,
        "model_config": model,
        "server_args": args.record,
        "kv_cache_dtype": torch.float32,
        "model_dtype": torch.float32,
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "is_draft_worker": False,
        "is_hybrid_swa": False,
        "post_capture_kv_active": False,
        "use_mla_backend": True,
        "spec_aux_config": SpecAuxHiddenStateConfig(),
        "layer_info": ModelLayerInfo(start_layer=0, end_layer=layers, num_effective_layers=layers),
    }
    return kind(**{**fields, **known})


@pytest.mark.usefixtures("one_rank")
def test_parts_take_turns_in_the_scratch_of_the_largest() -> None:
    """The view of the graphs has a count and a value a row more for the second."""
    parts = [{"active_ratio": 0.1}, {"active_ratio": 0.5, "min_pages": 32}]
    alone = [charge(method="resa", config=fields) for fields in parts]
    rules = {"0": parts[0], "1-": parts[1]}
    assert charge(method="resa", config={"layers": rules}) == max(alone) > 0
    graphs = charge(method="resa", config=parts[1], captured=SIZES)
    assert charge(method="resa", config={"layers": rules}, captured=SIZES) == graphs + 24 * 8
