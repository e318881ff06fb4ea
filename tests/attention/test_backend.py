"""Tests of the refresh of a method's buffers: before each selection where asked, and once at the end of a pass."""

from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_utils.capture_mode import _set_capture_attention_variant

from sglang_sparse.attention import cuda_graphs
from sglang_sparse.attention.backend import SparseAttentionBackend
from sglang_sparse.attention.batch import allocate_view, views_nbytes
from sglang_sparse.attention.decode import DecodePath
from sglang_sparse.attention.delegation import DelegatingBackend
from sglang_sparse.attention.plan import plan_decode
from sglang_sparse.config.request_options import parse_options
from sglang_sparse.config.settings import build
from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.methods.base import VIEW_BUFFERS, AuxSpec, ModelShape, SparseIndices, ViewBuffer

LAYERS, SLOTS, HEADS, DIM, PAGE = (1, 3), 32, 1, 16, 4
SLOT = 17


def last_key(k_caches: Any, buffers: Any, last_slots: torch.Tensor, page_size: int, overflow: torch.Tensor) -> None:
    """An entry is its page's newest key; every refresh counts as an overflow."""
    for k_cache, buffer in zip(k_caches, buffers, strict=True):
        buffer[last_slots // page_size] = k_cache[last_slots, 0]
    overflow += 1


class Keep:
    """Attends to one page, and keeps what it saw in its buffers."""

    selects_in_model, block_size, more_counts = False, PAGE, ()

    def __init__(self) -> None:
        self.seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.sparse_layers = lambda num_layers: LAYERS
        self.n_select = torch.ones_like

    def select(self, view: Any, layer_id: int, query: torch.Tensor, pools: AuxBuffers) -> SparseIndices:
        early, late = (pools.buffer(name, layer_id)[SLOT // PAGE].clone() for name in ("early", "late"))
        self.seen.append((layer_id, early, late))
        return SparseIndices(
            torch.full((1, 1, 1), SLOT // PAGE, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32)
        )


class Pool:
    """K and V of every layer."""

    def __init__(self) -> None:
        self.keys, self.values = ({layer: torch.zeros(SLOTS, HEADS, DIM) for layer in range(5)} for _ in range(2))

    def set_kv_buffer(self, layer: Any, location: Any, k: torch.Tensor, v: torch.Tensor, *scales: Any) -> None:
        self.keys[layer.layer_id][SLOT], self.values[layer.layer_id][SLOT] = k[0], v[0]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values[layer_id]


class Dense:
    """The dense backend: writes K and V."""

    def __init__(self) -> None:
        self.token_to_kv_pool = Pool()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, *rest: Any) -> torch.Tensor:
        self.token_to_kv_pool.set_kv_buffer(layer, None, k, v)
        return q


def make_backend() -> SparseAttentionBackend:
    """A backend over two sparse layers of a model of five, in a decode step of one row."""
    backend = object.__new__(SparseAttentionBackend)
    backend._latent = False
    dense = Dense()
    object.__setattr__(backend, "dense", dense)
    specs = [AuxSpec(name, (DIM,), torch.float32, last_key, name == "early") for name in ("early", "late")]
    backend._pools = AuxBuffers(tuple(specs), LAYERS, SLOTS // PAGE, PAGE, "cpu")
    method: Any = Keep()
    backend.method, backend.groups = method, SimpleNamespace(methods=(method,))  # pyright: ignore
    model = ModelShape(5, 1, HEADS, DIM, torch.float32)
    backend.decoding = DecodePath([method], backend._pools, dense.token_to_kv_pool, model)
    backend.prefill = backend._captured = None
    backend._graph_tokens = 0
    backend.keeps = ()
    backend._views = (allocate_view(1, HEADS, SLOTS // PAGE, 1, PAGE, torch.zeros(4, dtype=torch.int64)),)
    return backend


def forward(backend: SparseAttentionBackend, layer_id: int, mode: ForwardMode = ForwardMode.DECODE) -> torch.Tensor:
    """One layer of the step; its key is 1 + its id in every dimension. Returns that key."""
    layer = SimpleNamespace(
        layer_id=layer_id, tp_q_head_num=1, qk_head_dim=DIM, scaling=1.0, k_scale=None, v_scale=None
    )
    vars(layer).update(k_scale_float=None, v_scale_float=None, logit_cap=0.0)
    batch = SimpleNamespace(forward_mode=mode, out_cache_loc=torch.tensor([SLOT]))
    key = torch.full((1, HEADS, DIM), 1.0 + layer_id)
    backend.forward(torch.ones(1, DIM), key, key, layer, batch)
    return key[0, 0]


@pytest.mark.parametrize("sparse", [True, False])
def test_buffers_are_refreshed_when_their_spec_says(sparse: bool) -> None:
    backend = make_backend()
    if not sparse:
        backend._views = None
    keys = {layer: forward(backend, layer) for layer in range(4)}
    for layer in LAYERS:
        for name in ("early", "late"):
            assert torch.equal(backend._pools.buffer(name, layer)[SLOT // PAGE], keys[layer])
    # Two specs at the end of the pass; what came before a selection is not counted twice.
    assert int(backend._pools.overflow) == 2
    seen = backend.method.seen  # pyright: ignore[reportAttributeAccessIssue]
    assert [layer for layer, *_ in seen] == (list(LAYERS) if sparse else [])
    for layer, early, late in seen:
        assert torch.equal(early, keys[layer]) and late.count_nonzero() == 0


def test_a_verification_is_dense_and_refreshes_what_it_writes() -> None:
    """It is an extend pass by its mode, and yet no prefill: nothing is selected, kept, left out or counted."""
    backend, untouched = make_backend(), SimpleNamespace()
    backend.keeps = (untouched,)  # pyright: ignore[reportAttributeAccessIssue]
    # Of an earlier pass: a graph must not read it.
    backend._last_slots = {PAGE: torch.tensor([1])}
    backend.prefill = SimpleNamespace(layers=range(5), takes=lambda _: True)  # pyright: ignore
    backend.counters = untouched  # pyright: ignore[reportAttributeAccessIssue]
    keys = {layer: forward(backend, layer, ForwardMode.TARGET_VERIFY) for layer in range(4)}
    assert backend.method.seen == []  # pyright: ignore[reportAttributeAccessIssue]
    for layer, name in product(LAYERS, ("early", "late")):
        assert torch.equal(backend._pools.buffer(name, layer)[SLOT // PAGE], keys[layer])
    counted: list[torch.Tensor] = []
    backend.counters = SimpleNamespace(add_extend=counted.append)  # pyright: ignore[reportAttributeAccessIssue]
    backend.prefill, backend.keeps, backend._last_slots = None, (), None
    for layer in range(4):
        forward(backend, layer, ForwardMode.EXTEND)
    assert len(counted) == 1


def test_a_sparse_layer_asks_for_nothing_that_the_loaded_model_does_not_show() -> None:
    backend = make_backend()
    backend._views = None
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, out_cache_loc=torch.tensor([SLOT]))
    key = torch.ones(1, HEADS, DIM)
    layer = SimpleNamespace(layer_id=LAYERS[0])
    missing: Any = None
    with pytest.raises(RuntimeError, match=f"layer {LAYERS[0]} uses KV shared with another layer"):
        backend.forward(torch.ones(1, DIM), missing, key, layer, batch)
    with pytest.raises(RuntimeError, match=rf"layer {LAYERS[0]} uses arguments \['mask'\].* a bug of sglang_sparse"):
        backend.forward(torch.ones(1, DIM), key, key, layer, batch, sinks=key, mask=key)
    backend._latent = True
    with pytest.raises(RuntimeError, match=r"uses arguments \['sinks'\]"):
        backend.forward(torch.ones(1, DIM), key, key, layer, batch, q_rope=key, k_rope=key, sinks=key)
    layer.layer_id = 0
    assert backend.forward(torch.ones(1, DIM), key, key, layer, batch).shape == (1, DIM)


@pytest.mark.parametrize(("layers", "static"), [(LAYERS, True), ((), False)])
def test_decode_graphs_have_buffers_of_their_own_wherever_a_layer_is_sparse(
    layers: tuple[int, ...], static: bool
) -> None:
    """Also for a method that keeps nothing beside the KV pool."""
    backend = make_backend()
    backend.dense.init_cuda_graph_state = lambda *_: None
    backend._pools = AuxBuffers((), layers, SLOTS // PAGE, PAGE, "cpu")
    backend._kv_heads, backend._tokens, backend._graph_views = HEADS, 4 * PAGE, None
    backend._buffers = {PAGE: VIEW_BUFFERS}
    backend.counters = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        select_stats=torch.zeros(4, dtype=torch.int64)
    )
    backend.init_cuda_graph_state(2, 14)
    found = backend._graph_views
    assert (found is not None) == static
    # Those of decode steps, after those of verifications.
    backend.dense.init_cuda_graph_state = lambda *_: pytest.fail("what the first graphs read would be gone")
    backend.init_cuda_graph_state(2, 2)
    assert backend._graph_views is found


@pytest.mark.parametrize("buffers", [VIEW_BUFFERS, ("page_table",), ()])
def test_what_a_method_does_not_use_is_neither_allocated_nor_reported(
    buffers: tuple[ViewBuffer, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Per row 2**19 pages of 4 bytes in each of the large buffers: 2 MiB; its numbers are 20 bytes, the counts 12."""
    backend = make_backend()
    backend._buffers = {PAGE: buffers}
    backend.dense.init_cuda_graph_state = lambda *_: None
    backend._kv_heads, backend._tokens = HEADS, 2**19 * PAGE
    backend._graph_views = backend._eager_views = None
    backend.counters = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        select_stats=torch.zeros(4, dtype=torch.int64)
    )
    with caplog.at_level("INFO"):
        backend.init_cuda_graph_state(3, 3)
    assert f"{2 * 3 * len(buffers)}.0 MiB of static buffers" in caplog.text
    assert backend._graph_views is not None
    assert views_nbytes(backend._graph_views) == 3 * (len(buffers) * 2**21 + 20 + 16)
    # A batch that no graph holds is no larger.
    found = backend._rows(5)
    assert views_nbytes(found) == 5 * (len(buffers) * 2**21 + 20 + 16)
    assert backend._rows(5) is found


def test_a_selection_in_the_model_leaves_every_layer_to_the_dense_backend() -> None:
    """Whatever it is asked for: what is refused elsewhere is the dense backend's to judge."""
    backend = make_backend()
    backend._pools = AuxBuffers((), LAYERS, SLOTS // PAGE, PAGE, "cpu")
    dense, method = backend.dense, backend.method
    method.selects_in_model = True  # pyright: ignore[reportAttributeAccessIssue]
    model = ModelShape(5, 1, HEADS, DIM, torch.float32)
    backend.decoding = DecodePath([method], backend._pools, dense.token_to_kv_pool, model)
    dense.forward = lambda q, k, v, layer, batch, save, **chosen: (layer.layer_id, chosen)
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    query = torch.ones(1, DIM)
    for layer_id in range(4):
        layer = SimpleNamespace(layer_id=layer_id)
        found: Any = backend.forward(query, query, query, layer, batch, topk_indices=5)
        assert found == (layer_id, {"topk_indices": 5})
    assert backend.method.seen == []  # pyright: ignore[reportAttributeAccessIssue]


def test_an_mla_layer_may_come_in_two_parts() -> None:
    backend = make_backend()
    backend._views = None
    backend.prefill = None
    dense: Any = backend.dense
    dense.forward = lambda q, k, v, layer, batch, save, **parts: sorted(parts)
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, out_cache_loc=torch.tensor([SLOT]))
    layer = SimpleNamespace(layer_id=LAYERS[0])
    part = torch.ones(1, HEADS, DIM)

    def attend(**more: Any) -> Any:
        return backend.forward(part, part, part, layer, batch, **{"q_rope": part, "k_rope": part, **more})

    with pytest.raises(RuntimeError, match=r"arguments \['k_rope', 'q_rope'\]"):
        attend()
    backend._latent = True
    assert attend() == ["k_rope", "q_rope"]
    with pytest.raises(RuntimeError, match=r"arguments \['cos_sin_cache'\]"):
        attend(cos_sin_cache=part)


def test_both_graphs_of_a_size_are_captured_over_what_the_dense_backend_prepared_once() -> None:
    """FlashInfer's plans replays in the wrappers of the last capture of a size."""
    wrappers: dict[int, object] = {}
    backend, captured, prepared = make_backend(), {}, []

    def prepare(batch: Any, in_capture: bool) -> None:
        wrappers[batch.batch_size] = object()
        prepared.append(batch.forward_mode)

    vars(backend.dense).update(init_forward_metadata_out_graph=prepare, req_to_token_pool=SimpleNamespace())
    backend.dense.req_to_token_pool.req_to_token = torch.zeros(1, SLOTS, dtype=torch.int32)
    backend._graph_views = (allocate_view(2, HEADS, SLOTS // PAGE, 1, PAGE, torch.zeros(4, dtype=torch.int64)),)
    config, decode = SimpleNamespace(dense_fallback="auto"), SimpleNamespace(deterministic=False)
    settings: Any = SimpleNamespace(name="resa", config=config, decode=decode)
    variants = cuda_graphs.GraphVariants(backend, settings)
    try:
        for size in (2, 1, 2, 1):
            for label in variants.capture_labels:
                _set_capture_attention_variant(label)
                batch = SimpleNamespace(batch_size=size, forward_mode=ForwardMode.DECODE)
                backend.init_forward_metadata_out_graph(batch, in_capture=True)
                captured[size, label] = wrappers[size], backend.view is not None
            assert captured[size, cuda_graphs.DENSE] == (wrappers[size], False)
            assert captured[size, cuda_graphs.SPARSE] == (wrappers[size], True)
    finally:
        _set_capture_attention_variant(None)
    assert wrappers[1] is not wrappers[2]
    # A verification of that size has plans of its own, of as many tokens a row as it has.
    del prepared[:]
    for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.TARGET_VERIFY, ForwardMode.DECODE):
        batch = SimpleNamespace(batch_size=1, forward_mode=mode)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    assert prepared == [ForwardMode.TARGET_VERIFY, ForwardMode.DECODE]


@pytest.mark.parametrize("alone", [True, False])
def test_the_dense_backend_prepares_what_it_has_a_part_in(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    backend, prepared = make_backend(), []
    names = ("init_forward_metadata", "init_forward_metadata_out_graph")
    vars(backend.dense).update({name: lambda *_, name=name: prepared.append(name) for name in names})
    backend.attends_alone = alone
    for views in (None, ("some",)):
        monkeypatch.setattr(backend, "_prepare", lambda _, views=views: setattr(backend, "_views", views))
        for name in names:
            getattr(backend, name)(SimpleNamespace(batch_size=1))
    assert prepared == [*names, *([] if alone else names)]


@pytest.mark.parametrize(
    ("name", "fallback", "alone", "labels"),
    [
        ("resa", "auto", False, (cuda_graphs.DENSE, cuda_graphs.SPARSE)),
        ("resa", "never", False, (cuda_graphs.SPARSE,)),
        ("resa", "auto", True, (cuda_graphs.SPARSE,)),
        (None, "auto", False, (cuda_graphs.DENSE,)),
    ],
)
def test_graphs_that_no_batch_would_replay_are_not_captured(
    name: str | None, fallback: str, alone: bool, labels: Any
) -> None:
    config, decode = SimpleNamespace(dense_fallback=fallback), SimpleNamespace(deterministic=alone)
    settings: Any = SimpleNamespace(name=name, config=config, decode=decode)
    variants = cuda_graphs.GraphVariants(make_backend(), settings)
    assert variants.capture_labels == labels
    if name is None:
        unknown: Any = SimpleNamespace(seq_lens_cpu=None)
        assert variants.select(unknown) == cuda_graphs.DENSE, "lengths of a verification may be the device's alone"


def test_variants_are_those_of_the_model_that_they_were_offered_for() -> None:
    model, draft, variants = object(), object(), cast("cuda_graphs.GraphVariants", object())
    cuda_graphs.offer(model, variants)
    assert cuda_graphs.add_variants(None, model) is variants
    assert cuda_graphs.add_variants(None, draft) is None


def test_nothing_is_offered_while_a_verification_is_recorded() -> None:
    model, variants = object(), cast("cuda_graphs.GraphVariants", object())
    with cuda_graphs.withheld(model):
        assert cuda_graphs.add_variants(None, model) is None
    cuda_graphs.offer(model, variants)
    with cuda_graphs.withheld(model):
        assert cuda_graphs.add_variants(None, model) is None
    assert cuda_graphs.add_variants(None, model) is variants


def test_a_pass_runs_by_the_plan_of_its_own_batch() -> None:
    """Two batches may have equal lengths and ask for other things."""
    settings = build("resa", {"crossover_tokens": 0, "min_seq_len": 0})
    backend, lengths = make_backend(), torch.tensor([4000])
    backend.groups = settings.decode
    first, second, made_up = SimpleNamespace(), SimpleNamespace(), SimpleNamespace()
    for batch, sparse in ((first, False), (second, True)):
        batch.sparse_plan = plan_decode(settings.decode, lengths, [parse_options(settings, {"sparse": sparse})])
    for batch, sparse in ((first, False), (second, True), (first, False), (made_up, True)):
        backend.begin(batch)
        assert backend.plan(lengths).sparse is sparse
    assert backend.plan(lengths) is not second.sparse_plan


def test_what_a_wrapper_sets_while_it_is_made_is_its_own() -> None:
    class Wrapper(SparseAttentionBackend):
        def __init__(self, dense: Any):
            DelegatingBackend.__init__(self, dense)
            self.added = 1
            self.seal()

    dense: Any = SimpleNamespace(added=0, tables=None)
    wrapper: Any = Wrapper(dense)
    wrapper.added, wrapper.tables, wrapper.fresh = 2, 3, 4
    assert vars(dense) == {"added": 0, "tables": 3, "fresh": 4} and (wrapper.added, wrapper.tables) == (2, 3)
    with pytest.raises(AttributeError):
        _ = object.__new__(Wrapper).added
