"""A random DeepSeek-V3.2 checkpoint, small, with an attention and an indexer that are not even.

Dummy weights would not do: SGLang draws them so small that every logit is nearly the same. Each matrix keeps the
variance of what it multiplies, but for three:

- queries are twice as large, so that a token attends to a few dozen others, and attention matters to what follows;
- ``lm_head`` likewise, so that the next token is not a matter of chance;
- some dimensions of all embeddings are the same, and the indexer's gates, which are of either sign in a random matrix,
  lean on them and are positive. The logits of all tokens are then so, too, as sums of what ``relu`` leaves. Otherwise
  the k-th one would be near 0 for some queries, and a distance relative to it would say nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from eval.lab.servers.model_shapes import write_tokenizer

# What SGLang's kernels on Hopper take: 64 index heads of 128, pages of 64, and 64 query heads, which are not padded.
SIZES: Mapping[str, int] = {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
# Of DeepSeek-V3.2, but for its experts.
_SHAPE: Mapping[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_interleave": True,
    "indexer_rope_interleave": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    # What loaders read of experts, although no layer has any.
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "max_position_embeddings": 32768,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
# Dimensions of an embedding that are the same for all tokens, one in so many, and what they are.
_SAME, _LEVEL = 32, 2.0
# A gate is about this, and varies by a third of it.
_GATE = 1.0


def write(folder: Path, sizes: Mapping[str, int], seed: int) -> Path:
    """Write config, tokenizer and bfloat16 weights.

    Args:
        folder: of the checkpoint; made if it is not there.
        sizes: fields of the config, all those of `SIZES`.
        seed: of the weights.

    Returns:
        The folder.
    """
    from safetensors.torch import save_file

    heads, layers = sizes["num_attention_heads"], sizes["num_hidden_layers"]
    config = {**_SHAPE, **sizes, "num_key_value_heads": heads, "first_k_dense_replace": layers}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(config, folder)
    weights = {name: tensor.bfloat16().contiguous() for name, tensor in _weights(sizes, seed)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(sizes: Mapping[str, int], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(seed)

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=random) * (gain * inputs**-0.5)

    hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
    embedding = torch.randn(vocabulary, hidden, generator=random)
    embedding[:, ::_SAME] = _LEVEL
    yield "model.embed_tokens.weight", embedding
    for i in range(sizes["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, tensor in _layer(sizes, matrix).items():
            yield layer + name, tensor
    yield "model.norm.weight", torch.ones(hidden)
    yield "lm_head.weight", matrix(vocabulary, hidden, 2.0)


def _layer(sizes: Mapping[str, int], matrix: Any) -> dict[str, torch.Tensor]:
    hidden, heads, inner = sizes["hidden_size"], sizes["num_attention_heads"], sizes["intermediate_size"]
    q_rank, rank = sizes["q_lora_rank"], sizes["kv_lora_rank"]
    nope, rope, value = sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"], sizes["v_head_dim"]
    index_heads, index_dim = sizes["index_n_heads"], sizes["index_head_dim"]
    gates = matrix(index_heads, hidden, _GATE / 3)
    gates[:, ::_SAME] += _GATE / (_LEVEL * len(range(0, hidden, _SAME)))
    return {
        "input_layernorm.weight": torch.ones(hidden),
        "self_attn.q_a_proj.weight": matrix(q_rank, hidden),
        "self_attn.q_a_layernorm.weight": torch.ones(q_rank),
        "self_attn.q_b_proj.weight": matrix(heads * (nope + rope), q_rank, 2.0),
        "self_attn.kv_a_proj_with_mqa.weight": matrix(rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": torch.ones(rank),
        "self_attn.kv_b_proj.weight": matrix(heads * (nope + value), rank),
        # What a few dozen values have in common is a fraction of one.
        "self_attn.o_proj.weight": matrix(hidden, heads * value, 2.0),
        "self_attn.indexer.wq_b.weight": matrix(index_heads * index_dim, q_rank),
        "self_attn.indexer.wk.weight": matrix(index_dim, hidden),
        "self_attn.indexer.k_norm.weight": torch.ones(index_dim),
        "self_attn.indexer.k_norm.bias": torch.zeros(index_dim),
        "self_attn.indexer.weights_proj.weight": gates,
        "post_attention_layernorm.weight": torch.ones(hidden),
        "mlp.gate_proj.weight": matrix(inner, hidden),
        "mlp.up_proj.weight": matrix(inner, hidden),
        "mlp.down_proj.weight": matrix(hidden, inner, 0.5),
    }
