"""Small config.json files of the kinds of models that start-up has to tell apart; no weights."""

import json
from pathlib import Path
from typing import Any

_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}

_GEMMA3 = {
    **_SIZES,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 64,
    "sliding_window": 1024,
    "query_pre_attn_scalar": 64,
}

# For text alone, with heads of 512 in the layers of full attention.
_GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "language_model_only": True,
    "text_config": {
        **_SIZES,
        "model_type": "gemma4_text",
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 1024,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "vision_config": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 32},
    "audio_config": None,
}

_VISION = {"depth": 1, "hidden_size": 64, "num_heads": 2, "out_hidden_size": 256}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**_SIZES, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64},
    "mla": {
        **_SIZES,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "kv_lora_rank": 512,
        "q_lora_rank": 192,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "first_k_dense_replace": 4,
        "moe_layer_freq": 1,
        "n_routed_experts": 8,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    # SGLang ignores its window.
    "ignored_window": {
        **_SIZES,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 1024,
    },
    "windows": {**_GEMMA3, "sliding_window_pattern": 2},
    "windows_alone": {**_GEMMA3, "sliding_window_pattern": 8},
    "two_pools": {
        **_SIZES,
        "architectures": ["MellumForCausalLM"],
        "model_type": "mellum",
        "head_dim": 64,
        "sliding_window": 1024,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "mlp_layer_types": ["sparse"] * 4,
    },
    "hybrid_ssm": {
        **_SIZES,
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "mamba_d_ssm": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
    },
    "states": {
        **_SIZES,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "head_dim": 64,
        "full_attention_interval": 2,
        "linear_num_value_heads": 6,
        "linear_num_key_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
    },
    "encoder_only": {
        **_SIZES,
        "architectures": ["BertModel"],
        "model_type": "bert",
        "type_vocab_size": 2,
        "hidden_act": "gelu",
    },
    "encoder_decoder": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": 256,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "vocab_size": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    },
    "multimodal": {
        **_SIZES,
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "vision_config": {"depth": 2, "embed_dim": 64, "hidden_size": 256, "num_heads": 2},
    },
    "towers": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {
            **_SIZES,
            "model_type": "qwen3_vl_text",
            "head_dim": 64,
            "rope_scaling": {"rope_type": "default", "mrope_section": [16, 8, 8], "mrope_interleaved": True},
        },
        "vision_config": _VISION,
    },
    "states_and_towers": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {**_SIZES, "model_type": "qwen3_5_text", "head_dim": 64, "full_attention_interval": 2},
        "vision_config": _VISION,
    },
    "positions_alone": {
        **_SIZES,
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "vision_config": {"depth": 2, "embed_dim": 64, "hidden_size": 256, "num_heads": 2},
        "language_model_only": True,
    },
    "diffusion": {**_SIZES, "architectures": ["SDARForCausalLM"], "model_type": "qwen3", "head_dim": 64},
    "soft_cap": {
        **_SIZES,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "head_dim": 64,
        "sliding_window": None,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 64,
    },
    "gemma4": _GEMMA4,
    "shared_kv": {**_GEMMA4, "text_config": {**_GEMMA4["text_config"], "num_kv_shared_layers": 2}},
    "attention_sinks": {
        **_SIZES,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "unseen_chunks": {
        **_SIZES,
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "head_dim": 64,
        "attention_chunk_size": 1024,
    },
    "local_attention": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": {**_SIZES, "model_type": "llama4_text", "head_dim": 64, "attention_chunk_size": 1024},
        "vision_config": {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2},
    },
    "several_attentions": {
        **_SIZES,
        "architectures": ["LongcatFlashForCausalLM"],
        "model_type": "longcat_flash",
        "num_layers": 4,
        "num_key_value_heads": 8,
    },
    "dual_chunk": {
        **_SIZES,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 1010000,
        "dual_chunk_attention_config": {
            "chunk_size": 262144,
            "local_size": 8192,
            "original_max_position_embeddings": 262144,
        },
    },
    "own_sparse_attention": {
        **_SIZES,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "kv_lora_rank": 512,
        "q_lora_rank": 192,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk": 64,
    },
}


def write_config(folder: Path, name: str) -> str:
    """Write the config.json of a kind of model and return the folder as a string."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return str(folder)
