"""A server's layers get the generated tensors by position, whatever the model computed."""

import sys
from enum import Enum
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eval.lab.structured.generator import make_mla, make_qkv
from eval.lab.structured.structure import Recipe

# Without an MLP.
MODEL = torch.nn.Identity()
SERVER = Path(__file__).parent.parent.parent / "eval" / "lab" / "structured" / "server"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SERVER))
    import structured_inputs

    yield structured_inputs
    sys.modules.pop("structured_inputs", None)


class Type(Enum):
    DECODER = "decoder"


def make_layer(layer_id: int, q_heads: int = 4, kv_heads: int = 2, dim: int = 64, v_dim: int = 64, **other: Any) -> Any:
    """A ``RadixAttention`` as far as anybody looks."""
    usual: dict[str, Any] = {"is_cross_attention": False, "attn_type": Type.DECODER, "sliding_window_size": -1}
    sizes = {"tp_q_head_num": q_heads, "tp_k_head_num": kv_heads, "qk_head_dim": dim, "v_head_dim": v_dim}
    return SimpleNamespace(layer_id=layer_id, scaling=dim**-0.5, logit_cap=0.0, **sizes, **(usual | other))


def make_runner(mla: bool = False, positions: int = 300) -> Any:
    config = SimpleNamespace(attention_arch=SimpleNamespace(name="MLA" if mla else "MHA"), hf_config=SimpleNamespace())
    if mla:
        config.kv_lora_rank = 512
    table = SimpleNamespace(req_to_token=torch.zeros(3, positions))
    return SimpleNamespace(model_config=config, req_to_token_pool=table, device="cpu", dtype=torch.float32)


def make_batch(positions: list[int], idle: bool = False, decodes: bool = True, **other: Any) -> Any:
    mode = SimpleNamespace(is_idle=lambda: idle)
    slots = torch.arange(len(positions)) + 16
    made = {"positions": torch.tensor(positions), "out_cache_loc": slots, "decodes": decodes}
    return SimpleNamespace(forward_mode=mode, **made, **other)


class Pool:
    def __init__(self) -> None:
        self.written: dict[tuple[int, int], torch.Tensor] = {}

    def set_mla_kv_buffer(self, layer: Any, slots: torch.Tensor, k: torch.Tensor, rope: torch.Tensor) -> None:
        self.set_kv_buffer(layer, slots, torch.cat((k, rope), -1), None)

    def set_kv_buffer(self, layer: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> None:
        self.written |= {(layer.layer_id, int(slot)): row for slot, row in zip(slots, k, strict=True)}


class Backend:
    """Keeps what reaches it."""

    def __init__(self) -> None:
        self.token_to_kv_pool = Pool()
        self.calls: list[dict[str, Any]] = []

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        way = self.forward_decode if forward_batch.decodes else self.forward_extend
        return way(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        self.calls.append({"q": q, "k": k, "v": v, "save": save_kv_cache, **kwargs})
        return q

    forward_decode = forward_extend


class Wrapper:
    """Passes assignments on, as the sparse backend does."""

    def __init__(self, dense: Backend):
        object.__setattr__(self, "dense", dense)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dense, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dense, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.dense.forward(*args, **kwargs)


def noise(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


@pytest.mark.parametrize("layer_ids", [(3, 4), (0,)])
@pytest.mark.parametrize("wrapped", [False, True])
def test_every_layer_gets_the_rows_of_its_positions(module, wrapped: bool, layer_ids: tuple[int, ...]) -> None:
    inner = Backend()
    backend: Any = Wrapper(inner) if wrapped else inner
    inputs = module.make_inputs({"seed": 7}, map(make_layer, layer_ids), make_runner())
    module.install(backend, inputs, MODEL)
    q, k, v = make_qkv(300, 4, 2, 64, Recipe(), seed=7, dtype=torch.float32)
    assert backend.structured_inputs["positions"] == 300 and backend.structured_inputs["shape"]["mla"] is False
    assert ("forward" in vars(inner)) is not wrapped
    # A chunk of two requests, two decode steps, one in which the batch is padded.
    for positions in ([100, 101, 102, 0, 1], [150, 299], [151, 12, 0]):
        inner.calls.clear()
        rows = len(positions) - (positions[-1] == 0)
        batch, at = make_batch(positions), torch.tensor(positions[:rows])
        for layer_id in layer_ids:
            given = noise(rows, 4 * 64), noise(rows, 2, 64), noise(rows, 2, 64)
            assert backend.forward(*given, make_layer(layer_id), batch, save_kv_cache=False).shape == (rows, 256)
        for call in inner.calls:
            assert torch.equal(call["q"].view(rows, 4, 64), q[at]) and call["save"]
            assert torch.equal(call["k"], k[at]) and torch.equal(call["v"], v[at])
        # Gathered once for all layers.
        assert len({id(call["k"]) for call in inner.calls}) == 1


@pytest.mark.parametrize("split", [False, True])
def test_mla_gets_both_forms_and_expanded_prefill_leaves_latents(module, split: bool) -> None:
    backend: Any = Backend()
    layers = [make_layer(0, 8, 1, 576, 512), make_layer(0, 8, 8, 192, 128), make_layer(1, 8, 1, 576, 512)]
    inputs = module.make_inputs({}, layers, make_runner(mla=True))
    module.install(backend, inputs, MODEL)
    q, k = make_mla(300, 8, Recipe(), 576**-0.5, dtype=torch.float32)
    batch, at = make_batch([20, 21]), torch.tensor([20, 21])
    given = noise(2, 8, 192), noise(2, 8, 192), noise(2, 8, 128)
    backend.forward(*given, layers[1], batch, save_kv_cache=False)
    # That attention keeps what the model computed.
    assert backend.calls[0]["q"] is given[0] and not backend.calls[0]["save"]
    written = backend.token_to_kv_pool.written
    assert sorted(written) == [(0, 16), (0, 17)] and torch.equal(written[0, 17], k[21])
    width = 512 if split else 576
    rope = {"q_rope": noise(2, 8, 64), "k_rope": noise(2, 1, 64)} if split else {}
    backend.forward(noise(2, 8, width), noise(2, 1, width), noise(2, 1, 512), layers[0], batch, **rope)
    call = backend.calls[1]
    assert torch.equal(call["q"], q[at, :, :width]) and torch.equal(call["k"], k[at, :, :width])
    assert torch.equal(call["v"], k[at, :, :512])
    if split:
        assert torch.equal(call["q_rope"], q[at, :, 512:]) and torch.equal(call["k_rope"], k[at, :, 512:])
        assert call["q"].is_contiguous() and call["k_rope"].is_contiguous()


@pytest.mark.parametrize("wrapped", [False, True])
def test_skipped_prefill_writes_the_rows_and_attends_to_nothing(module, wrapped: bool) -> None:
    inner = Backend()
    backend: Any = Wrapper(inner) if wrapped else inner
    module.install(backend, module.make_inputs({"prefill": "skip"}, [make_layer(0)], make_runner()), MODEL)
    assert backend.structured_inputs["prefill"] == "skip"
    q, k, _ = make_qkv(300, 4, 2, 64, Recipe(), dtype=torch.float32)
    given = noise(2, 256), noise(2, 2, 64), noise(2, 2, 64)
    output = backend.forward(*given, make_layer(0), make_batch([20, 21], decodes=False))
    assert not inner.calls and torch.equal(output, torch.zeros(2, 256))
    written = inner.token_to_kv_pool.written
    assert sorted(written) == [(0, 16), (0, 17)] and torch.equal(written[0, 17], k[21])
    backend.forward(*given, make_layer(0), make_batch([22, 23]))
    assert torch.equal(inner.calls[0]["q"].view(2, 4, 64), q[22:24])


def test_skipped_prefill_of_mla_in_both_forms(module) -> None:
    backend: Any = Backend()
    layers = [make_layer(0, 8, 1, 576, 512), make_layer(1, 8, 8, 192, 128)]
    module.install(backend, module.make_inputs({"prefill": "skip"}, layers, make_runner(mla=True)), MODEL)
    _, k = make_mla(300, 8, Recipe(), 576**-0.5, dtype=torch.float32)
    rope = {"q_rope": noise(2, 8, 64), "k_rope": noise(2, 1, 64)}
    latent = noise(2, 8, 512), noise(2, 1, 512), noise(2, 1, 512)
    output = backend.forward(*latent, layers[0], make_batch([5, 6], decodes=False), **rope)
    assert torch.equal(output, torch.zeros(2, 8 * 512))
    expanded = noise(2, 8, 192), noise(2, 8, 192), noise(2, 8, 128)
    # What goes on with cached prefixes merges outputs by their log-sum-exp.
    batch = make_batch([5, 6], decodes=False, mha_return_lse=True)
    output, lse = backend.forward(*expanded, layers[1], batch, save_kv_cache=False)
    assert torch.equal(output, torch.zeros(2, 8, 128)) and torch.equal(lse, torch.zeros(2, 8))
    written = backend.token_to_kv_pool.written
    assert all(torch.equal(written[layer, 17].flatten(), k[6].flatten()) for layer in (0, 1)) and not backend.calls


def test_what_a_layer_must_not_get(module) -> None:
    backend: Any = Backend()
    module.install(backend, module.make_inputs({}, [make_layer(0)], make_runner()), MODEL)
    given = noise(1, 256), noise(1, 2, 64), noise(1, 2, 64)
    backend.forward(*given, make_layer(0), make_batch([0], idle=True))
    assert backend.calls[0]["q"] is given[0]
    for change, kwargs, message in (
        ({}, {"sinks": torch.zeros(4)}, "cannot replace what layer 0 gets as sinks"),
        ({}, {"q_rope": noise(1), "k_rope": noise(1)}, "gets as k_rope, q_rope"),
        ({"q_heads": 8}, {}, "layer 0 has no keys of its own or other heads"),
    ):
        with pytest.raises(RuntimeError, match=message):
            backend.forward(*given, make_layer(0, **change), make_batch([0]), **kwargs)
    with pytest.raises(RuntimeError, match="no keys of its own"):
        backend.forward(given[0], None, None, make_layer(0), make_batch([0]))


@pytest.mark.parametrize(
    ("value", "layers", "message"),
    [
        ("on", [make_layer(0)], "got 'on', allowed is an object with an integer seed, a recipe and prefill"),
        ({"tokens": 5}, [make_layer(0)], "got {'tokens': 5}"),
        ({"seed": "1"}, [make_layer(0)], "an integer seed"),
        ({"prefill": "none"}, [make_layer(0)], "prefill: got 'none', allowed are 'attend' and 'skip'"),
        ({"recipe": {"sink": 0.5}}, [make_layer(0)], "must add up to 1"),
        ({}, [], "layers of one shape, got none"),
        ({}, [make_layer(0), make_layer(1, q_heads=8)], "layers of one shape, got .'Shape"),
        ({}, [make_layer(0, sliding_window_size=127)], "layer 0 uses a sliding window"),
        ({}, [make_layer(0, dim=16, v_dim=16)], "at least 20 dimensions"),
    ],
)
def test_refused_at_start(module, value: Any, layers: list[Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"structured_inputs.*{message}"):
        module.make_inputs(value, layers, make_runner())


def test_refused_flags(module) -> None:
    flags = dict.fromkeys(("enable_two_batch_overlap", "enable_pdmux", "enable_torch_compile"), False)
    module.refuse_arguments(SimpleNamespace(speculative_algorithm=None, **flags))
    with pytest.raises(RuntimeError, match="under --speculative-algorithm, --enable-pdmux: leave that out"):
        module.refuse_arguments(SimpleNamespace(speculative_algorithm="EAGLE", **(flags | {"enable_pdmux": True})))


def test_rows_that_decode_in_prefill_are_not_skipped(module) -> None:
    flags = dict.fromkeys(("enable_two_batch_overlap", "enable_pdmux", "enable_torch_compile"), False)
    asked = SimpleNamespace(speculative_algorithm=None, enable_mixed_chunk=True, **flags)
    module.refuse_arguments(asked)
    with pytest.raises(RuntimeError, match="under --enable-mixed-chunk: leave that out"):
        module.refuse_arguments(asked, skips=True)


def test_without_the_key_nothing_happens(module) -> None:
    backend = Backend()
    module.replace_inputs(SimpleNamespace(attn_backend=backend), model_runner=make_runner())
    runner = SimpleNamespace(attn_backend=backend)
    result, scheduler = (
        SimpleNamespace(internal_state={}),
        SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner)),
    )
    module.report(result, scheduler, None)
    assert "forward" not in vars(backend) and result.internal_state == {}
    module.install(backend, module.make_inputs({}, [make_layer(0)], make_runner()), MODEL)
    module.report(result, scheduler, None)
    assert result.internal_state["structured_inputs"]["recipe"]["sink"] == 0.3


def test_the_folder_is_a_plugin(module) -> None:
    (found,) = distributions(path=[str(SERVER)])
    (entry,) = found.entry_points
    assert (entry.group, entry.value) == ("sglang.srt.plugins", "structured_inputs:register")
    assert entry.load() is module.register


@pytest.mark.gpu
def test_a_graph_fetches_the_rows_of_the_positions_at_replay(module) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    backend: Any = Backend()
    runner = make_runner()
    runner.device = "cuda"
    inputs = module.make_inputs({}, [make_layer(0), make_layer(1)], runner)
    module.install(backend, inputs, MODEL)
    batch = make_batch([1, 2])
    batch.positions = batch.positions.cuda()
    given = [tensor.cuda() for tensor in (noise(2, 256), noise(2, 2, 64), noise(2, 2, 64))]
    backend.forward(*given, make_layer(0), batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [backend.forward(*given, make_layer(layer_id), batch) for layer_id in (0, 1)]
    for positions in ([5, 299], [7, 0]):
        batch.positions.copy_(torch.tensor(positions))
        graph.replay()
        for output in outputs:
            assert torch.equal(output.view(2, 4, 64), inputs.q[positions])
