"""Models of the shapes of DeepSeek-V3.2 and GLM-5, cut down to few layers and experts, for random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoints import byte_tokenizer

VOCABULARY = 4096
# What both have: an indexer over MLA, dense layers first, and experts of which few are left.
_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "first_k_dense_replace": 2,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "index_topk": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}
_OWN: dict[str, dict[str, Any]] = {
    "deepseek-v3.2": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "hidden_size": 7168,
        "index_n_heads": 64,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "rope_theta": 10000,
        "v_head_dim": 128,
    },
    "glm-5": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "hidden_size": 6144,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
        "v_head_dim": 256,
    },
}
MODELS = tuple(_OWN)


def dsa_slice(folder: Path, name: str) -> Path:
    """Write the config and a tokenizer of one of `MODELS`, for ``--load-format dummy``, and return its path."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**_COMMON, **_OWN[name]}, indent=1))
    byte_tokenizer(path, VOCABULARY)
    return path
