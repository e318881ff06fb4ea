"""Skip-Softmax and MLA models: decode alone, sizes that are refused, a layer, and what it takes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_configs import write_config
from refusals import refused
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs

from sglang_sparse.attention.batch import allocate_view, load_views
from sglang_sparse.attention.decode import DecodePath
from sglang_sparse.attention.plan import plan_decode, usual_selection
from sglang_sparse.config import settings as config
from sglang_sparse.config.settings import build
from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.methods.base import ModelShape
from sglang_sparse.methods.views import SELECT_STATS
from sglang_sparse_kernels.skip_softmax_mla_decode import scratch_bytes, skip_softmax_mla_decode

FACTOR = "threshold_scale_factor"
PAGE, HEADS, LATENT, ROPE, CONTEXT = 16, 20, 64, 16, 512
SHAPE = ModelShape(4, HEADS, 1, LATENT + ROPE, torch.float32, ROPE)


def resolve(model: str, **kwargs: object) -> Any:
    return ServerArgs(model_path=model, **{"sparse_method": "skip_softmax", "chunked_prefill_size": 2048, **kwargs})


def test_mla_models_are_decoded_alone(tmp_path: Path) -> None:
    """The prefill that would come along is left out, in a scheduler too; one that is named is refused."""
    model = write_config(tmp_path, "mla")
    backend = {"attention_backend": "torch_native"}
    args = resolve(model, **backend, sparse_config=json.dumps({FACTOR: {"prefill": 7, "decode": 9}}))
    assert args.sparse_prefill_method is None and args.sparse_prefill_config is None
    settings = config.settings_of(args)
    assert settings is not None and settings.prefill is None and settings.method.row_threshold == 9.0
    for prefill in ("skip_softmax", "anchor"):
        with refused("--model-path", "DeepseekV3ForCausalLM"):
            resolve(model, sparse_prefill_method=prefill)


def test_other_latents_are_refused(tmp_path: Path) -> None:
    path = Path(write_config(tmp_path, "mla"))
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, "kv_lora_rank": 96}))
    with refused("--model-path", "DeepseekV3ForCausalLM") as caught:
        resolve(str(path))
    assert "kv_lora_rank" in str(caught.value)


@pytest.mark.parametrize("fused", [False, True])
def test_a_layer_is_the_op(fused: bool) -> None:
    """With the query in one tensor or in two, a short row that is dense, and one that pads a graph."""
    torch.manual_seed(0)
    settings = build("skip_softmax", {FACTOR: {"decode": 200.0}, "min_seq_len": 100, "crossover_tokens": 0})
    method = settings.method
    lengths, pages = [500, 99], CONTEXT // PAGE
    stats = torch.zeros(SELECT_STATS + 2, dtype=torch.int64)
    view = allocate_view(3, 1, pages, usual_selection(method, pages), PAGE, stats, method.view_buffers)
    plan = plan_decode(settings.decode, torch.tensor(lengths))
    table = torch.arange(2 * CONTEXT, dtype=torch.int32).view(2, CONTEXT)
    load_views((view,), plan, SimpleNamespace(req_pool_indices=torch.tensor([0, 1, 1])), table)
    cache, query = torch.randn(2 * CONTEXT, 1, LATENT + ROPE), torch.randn(3, HEADS, LATENT + ROPE)
    # Rows look for their first token.
    query[:, :, 0], cache[::CONTEXT, :, 0] = 4.0, 20.0
    newest = torch.tensor([499, CONTEXT + 98, 0])
    pool: Any = SimpleNamespace(get_key_buffer=lambda _: cache)
    path = DecodePath([method], AuxBuffers((), (1,), 2 * pages, PAGE, "cpu"), pool, SHAPE)
    layer: Any = SimpleNamespace(layer_id=1, tp_q_head_num=HEADS, scaling=0.25)
    nope, rope = query[..., :LATENT], query[..., LATENT:]
    asked = query if fused else nope
    got = path.attend(asked.flatten(1), asked, asked, layer, newest, (view,), False, {} if fused else {"q_rope": rope})
    counted, factors = torch.zeros(2, dtype=torch.int64), torch.tensor([200.0, 0.0])
    rows = (torch.arange(2 * pages, dtype=torch.int32).view(2, -1), plan.groups[0].n_pages, newest[:2], factors)
    expected = skip_softmax_mla_decode(nope[:2], rope[:2], cache[:, 0], *rows, PAGE, 0.25, stats=counted)
    assert torch.equal(got[:2], expected.flatten(1)) and not got[2].any()
    # Two groups of heads.
    assert torch.equal(view.method_stats, counted) and counted.tolist() == [2 * 8, 2 * 5]


def test_the_op_is_charged() -> None:
    method, cpu = build("skip_softmax", {}).method, torch.device("cpu")
    view = allocate_view(2, 1, 4096, 4000, PAGE, torch.zeros(6, dtype=torch.int64), method.view_buffers)
    expected = scratch_bytes(2, HEADS, LATENT, 4000, PAGE, torch.bfloat16, cpu)
    assert method.scratch_bytes(SHAPE, view, torch.bfloat16, cpu) == expected > 0
