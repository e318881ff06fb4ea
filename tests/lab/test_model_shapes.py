"""Models without weights: their sizes, and a tokenizer that makes text of every output."""

import json
from pathlib import Path

import pytest

from eval.lab.servers import model_shapes
from eval.live.counters import EvaluationError


@pytest.mark.parametrize("name", list(model_shapes.SHAPES))
def test_shapes_take_long_contexts_and_have_a_word_for_each_id(name: str, tmp_path: Path) -> None:
    folder = model_shapes.write(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    rope = config["rope_scaling"] or {"factor": 72, "original_max_position_embeddings": 4096}
    assert config["max_position_embeddings"] == rope["factor"] * rope["original_max_position_embeddings"] >= 270_000
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(words.values()) == list(range(config["vocab_size"]))


def test_shapes_are_those_of_the_published_models() -> None:
    def kv_bytes(name: str) -> int:
        """Of a token, as bfloat16."""
        config = model_shapes.SHAPES[name]
        latent = config.get("kv_lora_rank")
        width = (
            latent + config["qk_rope_head_dim"] if latent else 2 * config["num_key_value_heads"] * config["head_dim"]
        )
        return 2 * config["num_hidden_layers"] * width

    assert kv_bytes("qwen3-1.7b") == 114_688 and kv_bytes("qwen3-8b") == 147_456
    assert kv_bytes("v2-lite") == 31_104 and kv_bytes("v32-slice") == kv_bytes("kimi-k2-slice") == 4_608
    assert kv_bytes("llama-3.1-70b") == 327_680
    with pytest.raises(EvaluationError, match="no shape is called 'gpt': there are qwen3"):
        model_shapes.write("gpt", Path("x"))
