"""Models by name that have the shapes of public ones and no weights: speeds are real, texts are noise.

The sizes are those of the ``config.json`` that each model was published with; ``max_position_embeddings`` and YaRN's
factor, which are not what a step costs, allow every context that is measured here. SGLang starts such a folder with
``--load-format dummy``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from eval.live.counters import EvaluationError

MAX_POSITION = 288 * 1024

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "attention_bias": False,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_DEEPSEEK = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_ORIGINAL = 4096
# The published factor is 40; positions beyond factor times original would have no rotation.
_YARN = {
    "type": "yarn",
    "factor": MAX_POSITION // _ORIGINAL,
    "original_max_position_embeddings": _ORIGINAL,
    "beta_fast": 32,
    "beta_slow": 1,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": {
        **_QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    # Every width of gpt-oss-120b, and 16 of the 128 experts of each layer: not quantized, all would need 230 GB.
    "gpt-oss-120b-16-experts": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {**_YARN, "rope_type": "yarn", "truncate": False},
        "attention_bias": True,
        "tie_word_embeddings": False,
        "bos_token_id": 199998,
        "eos_token_id": 200002,
    },
    # Every width of Qwen3-Next-80B-A3B, and 128 of the 512 experts of each layer: all would need 160 GB.
    "qwen3-next-80b-128-experts": {
        **_QWEN3,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "v2-lite": {
        **_DEEPSEEK,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "bos_token_id": 100000,
        "eos_token_id": 100001,
    },
    "llama-3.1-70b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    # Every width of Kimi-K2, its dense layer and three of its 60 layers of experts.
    "kimi-k2-slice": {
        **_DEEPSEEK,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "first_k_dense_replace": 1,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "rope_theta": 50000,
        "bos_token_id": 163584,
        "eos_token_id": 163585,
    },
    # Every width of DeepSeek-V3.2, its three dense layers and one of its 58 layers of experts.
    "v32-slice": {
        **_DEEPSEEK,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Have a command take the model that it serves: one of ``SHAPES``, or a checkpoint."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=list(SHAPES), help="a public model's shape, without its weights")
    model.add_argument("--model-path", help="a checkpoint")


def folder_of(args: argparse.Namespace, scratch: Path) -> Path:
    """The folder of the model that a command serves; that of a shape is made in `scratch`."""
    return write(args.shape, scratch) if args.shape else Path(args.model_path)


def load_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags by which a command's server loads its model: dummy weights for a shape, which has none."""
    return ["--load-format", "dummy"] if args.shape else []


def write(name: str, folder: Path) -> Path:
    """Write ``config.json`` and a tokenizer that has a word for each id of the vocabulary.

    With fewer words an output of other ids would be an empty text, which benchmark clients take for no output.

    Args:
        name: of ``SHAPES``.
        folder: where to make the model's folder.

    Returns:
        The model's folder.

    Raises:
        EvaluationError: no shape has this name.
    """
    if name not in SHAPES:
        raise EvaluationError(f"no shape is called {name!r}: there are {', '.join(SHAPES)}")
    common = {"max_position_embeddings": MAX_POSITION, "torch_dtype": "bfloat16", "use_cache": True}
    config = {**common, **SHAPES[name]}
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(config, path)
    return path


def write_tokenizer(config: dict[str, Any], path: Path) -> None:
    """Write a tokenizer that has a word for each id of a model's vocabulary into the model's folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {config["bos_token_id"]: "<bos>", config["eos_token_id"]: "<eos>", config["vocab_size"] - 1: "<unk>"}
    words = {special.get(i, f"w{i}"): i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Not special to the tokenizer: a server leaves special tokens out of the text.
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "model_max_length": MAX_POSITION}
    (path / "tokenizer_config.json").write_text(json.dumps(about, indent=1))
    tokenizer.save(str(path / "tokenizer.json"))
