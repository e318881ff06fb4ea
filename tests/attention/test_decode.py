"""Sparse decode of a layer: what is written, what the method is asked, and what comes out, in blocks and in tokens."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sparse.attention import decode
from sglang_sparse.attention.batch import allocate_view
from sglang_sparse.attention.decode import DecodePath
from sglang_sparse.attention.memory import model_shape
from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.methods.base import ModelShape, SparseIndices
from sglang_sparse.methods.views import BatchView, LatentQuery
from sglang_sparse_kernels.sparse_decode import sparse_decode
from sglang_sparse_kernels.sparse_mla_decode import sparse_mla_decode

LATENT, ROPE, HEADS, BLOCK, SLOTS, LAYER = 64, 16, 4, 16, 128, 2
SCALING = 0.3
# A row's blocks and newest slot.
ROWS = (((3, 1, 6), 6 * BLOCK + 4), ((5,), 5 * BLOCK))


class Chooses:
    """Selects the blocks of `ROWS` and keeps what it was asked."""

    selects_in_model, sparse_layers = False, staticmethod(lambda num_layers: (LAYER,))

    def select(self, view: Any, layer_id: int, query: LatentQuery, pools: AuxBuffers) -> SparseIndices:
        self.asked, self.layer_id = query, layer_id
        indices = torch.zeros(len(ROWS), 1, 8, dtype=torch.int32)
        for row, (blocks, _) in enumerate(ROWS):
            indices[row, 0, : len(blocks)] = torch.tensor(blocks)
        return SparseIndices(indices, torch.tensor([[len(blocks)] for blocks, _ in ROWS], dtype=torch.int32))


class Pool:
    """SGLang's latent pool."""

    def __init__(self) -> None:
        self.buffer = torch.randn(SLOTS, 1, LATENT + ROPE)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.buffer

    def set_kv_buffer(self, layer: Any, location: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.buffer[location.loc if hasattr(location, "loc") else location[0]] = k

    def set_mla_kv_buffer(self, layer: Any, slots: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor) -> None:
        self.buffer[slots] = torch.cat([nope, rope], dim=-1)


def batch() -> BatchView:
    """A view of which the selection here reads nothing."""
    return allocate_view(len(ROWS), 1, SLOTS // BLOCK, 4, BLOCK, torch.zeros(4, dtype=torch.int64))


def attention(query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """``[heads, latent]`` of one row in float64, by the definition."""
    weights = (query.double() @ cache.double().T * SCALING).softmax(-1)
    return weights @ cache[:, :LATENT].double()


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_sparse.attention.decode._mean_over_ranks", lambda values: values)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("save", [True, False])
def test_an_mla_layer(split: bool, save: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a selection the attention is told what its order says: that the newest block is the last one."""
    torch.manual_seed(0)
    told: list[bool] = []

    def attend(*arguments: Any, newest_last: bool, **options: Any) -> torch.Tensor:
        told.append(newest_last)
        return sparse_mla_decode(*arguments, newest_last=newest_last, **options)

    monkeypatch.setattr(decode, "sparse_mla_decode", attend)
    method: Any = Chooses()
    pool, slots = Pool(), torch.tensor([slot for _, slot in ROWS])
    aux = AuxBuffers((), (LAYER,), SLOTS // BLOCK, BLOCK, "cpu")
    path = DecodePath([method], aux, pool, ModelShape(4, HEADS, 1, LATENT + ROPE, torch.float32, ROPE))
    query, key = torch.randn(2, HEADS, LATENT + ROPE), torch.randn(2, 1, LATENT + ROPE)
    before = pool.buffer.clone()
    layer = SimpleNamespace(layer_id=LAYER, tp_q_head_num=HEADS, scaling=SCALING)
    views = (batch(),)
    latent = key[..., :LATENT]
    if split:
        rotated = {"q_rope": query[..., LATENT:].contiguous(), "k_rope": key[..., LATENT:].contiguous()}
        output = path.attend(query[..., :LATENT].flatten(1), latent, latent, layer, slots, views, save, rotated)
    else:
        output = path.attend(query.flatten(1), key, latent, layer, slots, views, save, {})
    expected = before.clone()
    if save:
        expected[slots] = key
    assert torch.equal(pool.buffer, expected)
    assert path.last_layer == -1 and method.layer_id == LAYER and told == [True]
    asked = method.asked
    assert torch.equal(asked.nope, query[..., :LATENT]) and torch.equal(asked.rope, query[..., LATENT:])
    assert asked.cache.data_ptr() == pool.buffer.data_ptr() and asked.cache.shape == (SLOTS, LATENT + ROPE)
    assert torch.equal(asked.last_slots, slots) and (asked.scaling, asked.kv_scale) == (SCALING, 1.0)
    for row, (blocks, last) in enumerate(ROWS):
        tokens = [slot for block in blocks for slot in range(block * BLOCK, (block + 1) * BLOCK)]
        seen = expected[[slot for slot in tokens if slot // BLOCK != last // BLOCK or slot <= last], 0]
        assert torch.allclose(output[row].view(HEADS, LATENT).double(), attention(query[row], seen), atol=1e-5)


class ChoosesTokens:
    """Selects `slots` for all KV heads, and keeps which slots it was told the rows end in."""

    selects_in_model, sparse_layers = False, staticmethod(lambda num_layers: (LAYER,))

    slots = ((4, 60, 61, 99), (81,))

    def select(self, view: BatchView, layer_id: int, query: Any, pools: AuxBuffers) -> SparseIndices:
        self.asked = view.last_slots
        heads = view.arrivals.shape[1]
        indices = torch.zeros(len(self.slots), heads, SLOTS, dtype=torch.int32)
        for row, chosen in enumerate(self.slots):
            indices[row, :, : len(chosen)] = torch.tensor(chosen)
        counts = torch.tensor([[len(chosen)] * heads for chosen in self.slots], dtype=torch.int32)
        return SparseIndices(indices, counts, unit="token")


@pytest.mark.parametrize("latent", [True, False])
def test_tokens_are_attended_to_one_by_one(latent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the blocks of a usual row have, for which the work is split."""
    torch.manual_seed(1)
    told: list[tuple[int, int]] = []

    def watched(attend: Any, size: str, usual: str) -> Any:
        def call(*arguments: Any, **options: Any) -> torch.Tensor:
            told.append((options[size], options[usual]))
            return attend(*arguments, **options)

        return call

    monkeypatch.setattr(decode, "sparse_mla_decode", watched(sparse_mla_decode, "block_size", "usual_blocks"))
    monkeypatch.setattr(decode, "sparse_decode", watched(sparse_decode, "page_size", "usual_pages"))
    method: Any = ChoosesTokens()
    pool: Any = Pool()
    # The latent cache has both in one: so has this model, whose values are a part of its keys.
    pool.get_value_buffer = lambda layer_id: pool.buffer[..., :LATENT]
    slots = torch.tensor([slot for _, slot in ROWS])
    aux = AuxBuffers((), (LAYER,), SLOTS // BLOCK, BLOCK, "cpu")
    shape = ModelShape(4, HEADS, 1, LATENT + ROPE, torch.float32, ROPE if latent else 0)
    layer = SimpleNamespace(layer_id=LAYER, tp_q_head_num=HEADS, scaling=SCALING, qk_head_dim=LATENT + ROPE)
    layer.k_scale_float, layer.v_scale_float, layer.logit_cap = None, None, 0.0
    query, key = torch.randn(2, HEADS, LATENT + ROPE), torch.randn(2, 1, LATENT + ROPE)
    path = DecodePath([method], aux, pool, shape)
    output = path.attend(query.flatten(1), key, key, layer, slots, (batch(),), False, {})
    assert torch.equal(method.asked, slots) and told == [(1, 4 * BLOCK)]
    for row, chosen in enumerate(method.slots):
        expected = attention(query[row], pool.buffer[list(chosen), 0])
        assert torch.allclose(output[row].view(HEADS, LATENT).double(), expected, atol=1e-5)


def test_the_mean_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    group = SimpleNamespace(world_size=2, all_reduce=lambda values: values + 3.0)
    state = SimpleNamespace(get_attn_tp_group=lambda: group)
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed.parallel_state", state)
    values = torch.tensor([1.0, 5.0])
    assert decode._mean_over_ranks(values).tolist() == [2.0, 4.0]
    group.world_size = 1
    assert decode._mean_over_ranks(values) is values


def test_latent_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = SimpleNamespace(attn_tp_size=2, pp_size=1)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    config = SimpleNamespace(attention_arch=SimpleNamespace(name="MLA"), num_hidden_layers=4)
    config.kv_lora_rank, config.qk_rope_head_dim = LATENT, ROPE
    config.get_num_attention_heads = lambda ranks: 16 // ranks
    found = model_shape(config, torch.bfloat16)
    assert found == ModelShape(4, 8, 1, LATENT + ROPE, torch.bfloat16, ROPE)
    assert found.here((0, 3)) == (0, 3)
    parallel.pp_size, parallel.pp_rank = 2, 1
    assert model_shape(config, torch.bfloat16).here((0, 2, 3)) == (2, 3)
