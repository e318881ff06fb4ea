"""Tests of a DSA server's refusals before it takes memory: each is one message that states the allowed choices."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import save_file
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs

from sglang_sparse.attention.plan import plan_decode
from sglang_sparse.config.settings import build
from sglang_sparse.hooks import kv_dtypes
from sglang_sparse.methods.fingerprint import INDEX

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="refused next to CUDA")

TINY_DSA = "eval/models/tiny-dsa"


def refusal_of(model: str, config: str | None = None, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as caught:
        ServerArgs(model_path=model, sparse_method="dsa", sparse_config=config, **kwargs)
    return str(caught.value)


def test_a_model_with_an_indexer_resolves() -> None:
    args: Any = ServerArgs(model_path=TINY_DSA, sparse_method="dsa")
    assert (args.attention_backend, args.page_size) == ("dsa", 64)
    config = json.loads(args.sparse_config)
    assert config["min_seq_len"] == 0 and config["implementation"] == "portable"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"index_head_dim": 64}, "its index_head_dim is 64; allowed: 128"),
        ({"index_n_heads": 128}, "its index_n_heads is 128; allowed: 1 to 64"),
        ({"index_topk": 8192}, "its index_topk is 8192; allowed: 1 to 4096"),
        ({"index_topk_freq": 2}, "its indexer has index_topk_freq 2, which is not served yet"),
        ({"cli_factor": 2}, "its indexer has cli_factor 2"),
        ({"index_local_tokens": 1}, "its indexer has index_local_tokens 1"),
        ({"index_init_tokens": 16, "index_local_tokens": 64}, "has index_init_tokens 16, index_local_tokens 64"),
        ({"indexer_rope_interleave": True}, "indexer_rope_interleave"),
        ({"max_position_embeddings": 512}, "its index_topk is 512 and the context length is 512: every token would"),
        ({"kv_lora_rank": 384}, "its kv_lora_rank is 384; allowed: 64, 128, 256, 512"),
    ],
)
def test_indexers_that_are_not_served(tmp_path: Path, change: dict[str, int], expected: str) -> None:
    config = json.loads((Path(TINY_DSA) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    assert expected in refusal_of(str(tmp_path))


LAYER = "model.layers.{}.self_attn"
PARTS = {"wq_b": [4096, 192], "wk": [128, 256], "k_norm": [128], "weights_proj": [32, 256]}


def save(folder: Path, *files: dict[str, torch.Tensor]) -> None:
    """tiny-dsa's config beside other weights, in files that an index names."""
    shutil.copy(Path(TINY_DSA) / "config.json", folder)
    names = [f"model-{i}.safetensors" for i in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / name)
    places = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def indexers(layers: int = 4, kind: str = "weight", dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """The weights of tiny-dsa's indexers in its first layers."""
    found = {f"{LAYER.format(i)}.indexer.{part}": shape for i in range(layers) for part, shape in PARTS.items()}
    return {f"{name}.{kind}": torch.zeros(shape, dtype=dtype) for name, shape in found.items()}


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("weights_proj", [64, 256], "[64, 256], and index_n_heads 32 with index_head_dim 128 makes 32 rows; allowed:"),
        ("wk", [64, 256], "[64, 256], and index_n_heads 32 with index_head_dim 128 makes 128 rows"),
        ("k_norm", [64], "[64], and index_n_heads 32 with index_head_dim 128 makes 128 rows"),
        ("wq_b", [8192, 192], "[8192, 192], and index_n_heads 32 with index_head_dim 128 makes 4096 rows"),
        ("wk", [], "wk.weight has the shape [], and"),
    ],
)
def test_weights_of_another_indexer(tmp_path: Path, name: str, shape: list[int], expected: str) -> None:
    folder, link = tmp_path / "model", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    tensor, other = f"{LAYER.format(2)}.indexer.{name}.weight", {"model.norm.weight": torch.zeros(1)}
    save(folder, other, {**indexers(), tensor: torch.zeros(shape)})
    for path in (folder, link):
        message = refusal_of(str(path))
        assert "its weights have another indexer than its config says" in message and expected in message
    # As at random as those of `--load-format dummy`.
    ServerArgs(model_path=str(folder), sparse_method="dsa", load_format="dummy")
    # Elements that share a byte.
    save(folder, other, {**indexers(), tensor: torch.zeros(shape, dtype=torch.uint8)})
    ServerArgs(model_path=str(folder), sparse_method="dsa")
    # What is still to be downloaded is not there to be judged.
    (folder / "model-1.safetensors").unlink()
    ServerArgs(model_path=str(folder), sparse_method="dsa")


def test_weights_without_an_indexer(tmp_path: Path) -> None:
    save(tmp_path, {f"{LAYER.format(0)}.o_proj.weight": torch.zeros(1)})
    assert "its weights have no indexer: no tensor has '.indexer.' in its name" in refusal_of(str(tmp_path))


def test_weights_with_indexers_in_some_layers_or_parts_of_one(tmp_path: Path) -> None:
    """And those of a layer beyond the model's, for speculative decoding, are no matter."""
    save(tmp_path, indexers(1) | {f"{LAYER.format(4)}.indexer.wk.weight": torch.zeros(1)})
    message = refusal_of(str(tmp_path))
    assert "no tensor of layers.1.indexer.wq_b, layers.1.indexer.wk, layers.1.indexer.k_norm and 9 more" in message
    assert "allowed: weights with wq_b, wk, k_norm, weights_proj in each of its 4 layers" in message
    for part in PARTS:
        some = {
            name: tensor for name, tensor in indexers().items() if f"layers.3.self_attn.indexer.{part}." not in name
        }
        save(tmp_path, some)
        assert f"no tensor of layers.3.indexer.{part}; allowed" in refusal_of(str(tmp_path))
    for kind in ("qweight", "weight_packed"):
        save(
            tmp_path, indexers(kind=kind, dtype=torch.uint8) | {f"{LAYER.format(4)}.indexer.wk.weight": torch.zeros(1)}
        )
        ServerArgs(model_path=str(tmp_path), sparse_method="dsa")


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    shutil.copy(Path(TINY_DSA) / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    assert "model.safetensors: cannot be read as safetensors" in refusal_of(str(tmp_path))
    header = b'{"a": {"data_offsets": [0, 0]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "model.safetensors: cannot be read as safetensors" in refusal_of(str(tmp_path))


def test_a_name_is_judged_by_what_the_cache_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, {f"{LAYER.format(0)}.indexer.wk.weight": torch.zeros(64, 256)})
    config = json.loads((Path(TINY_DSA) / "config.json").read_text())
    model: Any = SimpleNamespace(hf_text_config=SimpleNamespace(**config), model_path="someone/model", revision=None)
    model.num_hidden_layers = config["num_hidden_layers"]
    method = build("dsa", {}).method
    asked = []
    for cached, expected in ((None, False), (str(tmp_path / "config.json"), True)):
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *a, **_: asked.append(a) or cached)  # noqa: B023
        assert bool(method.refuse_weights(model)) is expected
    assert asked == [("someone/model", "config.json")] * 2


def test_a_cache_that_a_method_does_not_take_is_refused_by_its_contract() -> None:
    model = SimpleNamespace(dtype=torch.bfloat16)
    args: Any = SimpleNamespace(
        get_model_config=lambda: model,
        kv_cache_dtype="fp8_e4m3",
        quantization_param_path=None,
        get_attention_backends=lambda: ["dsa"],
    )
    with refused("--kv-cache-dtype", "fp8_e4m3"):
        kv_dtypes.require_dtypes(args, build("rocketkv", {}))
    for method in ("resa", "dsa"):
        kv_dtypes.require_dtypes(args, build(method, {}))


def test_what_a_model_decides_is_taken_when_a_scheduler_starts() -> None:
    settings = build("dsa", {})
    assert "crossover_tokens" not in settings.config.limits and "crossover_tokens" in build("resa", {}).config.limits
    text: Any = SimpleNamespace(hf_text_config=SimpleNamespace(index_topk=48))
    settings.method.adopt(text)
    plan = plan_decode(settings.decode, torch.tensor([100, 48, 49]))
    assert plan.sparse and plan.groups[0].n_select.tolist() == [48, 48, 48]
    assert plan.covered.tolist() == [False, True, False]
    assert not plan_decode(settings.decode, torch.tensor([48, 3])).sparse
