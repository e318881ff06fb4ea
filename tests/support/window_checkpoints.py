"""Random checkpoints of models whose layers attend within windows or chunks, but for some."""

from pathlib import Path
from typing import Any

from checkpoints import EXPERTS, fields, save


def random_windowed(
    path: Path, family: str, window: int = 64, seed: int = 0, dtype: str = "float32", **config: Any
) -> Path:
    """Random float32 checkpoint of six layers; 2 and 5 attend to all tokens and the others within a window.

    Hidden 256, 8 query and 2 KV heads of 32; ``config`` overrides. Sinks, which SGLang keeps in bfloat16, are such
    that half of the weight of a few dozen tokens is theirs.

    Args:
        path: its folder.
        family: the beginning of its classes in transformers, see ``_OF_FAMILY``.
        window: tokens that a windowed layer sees, the newest among them.
        seed: of the weights.
        dtype: that its config names; SGLang's gpt-oss keeps weights in it whatever ``--dtype`` says.
        **config: fields of its config.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    kinds = (["sliding_attention"] * 2 + ["full_attention"]) * 2
    own = {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": window, "layer_types": kinds, "pad_token_id": 0}
    text = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    model = getattr(transformers, f"{family}ForCausalLM")(text(**fields(6, 1024) | own | _OF_FAMILY[family] | config))
    for name, parameter in model.named_parameters():
        if name.endswith(".sinks"):
            parameter.data.copy_(torch.randn_like(parameter).add(4).bfloat16())
    published = _published_mimo(window) if family == "MiMoV2Flash" else {}
    return save(path, model, 1024, {"dtype": dtype} | published)


def _published_mimo(window: int) -> dict[str, Any]:
    """Return the fields of MiMo-V2's published configs that SGLang reads and transformers does not write."""
    windowed = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 48, "v_head_dim": 32}
    found = {f"swa_{name}": size for name, size in windowed.items()} | {"swa_rope_theta": 10000.0}
    # SGLang's window does not count the newest token.
    found |= {"hybrid_layer_pattern": [1, 1, 0] * 2, "sliding_window_size": window - 1, "layernorm_epsilon": 1e-5}
    found |= {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "moe_layer_freq": [0] * 6}
    # SGLang reads one rotation for both kinds of layers, transformers one for each.
    return found | {"partial_rotary_factor": 0.334, "rope_parameters": _MIMO_ROPE | _MIMO_ROPE["full_attention"]}


def random_chunked(path: Path, chunk: int = 64, seed: int = 0, towers: bool = True, **config: Any) -> Path:
    """Random float32 checkpoint of Llama 4: 3 and 7 of eight layers attend to all tokens, the others within chunks.

    Hidden 256, 8 query and 2 KV heads of 32. The temperature of the former changes every 48 tokens. Without CUDA SGLang
    has no experts of this kind, and norms of queries and keys in bfloat16 alone: there are none.

    Args:
        path: its folder.
        chunk: tokens of a chunk.
        seed: of the weights.
        towers: whether it has a vision tower, as published ones; else it is of the class for text.
        **config: fields of its text config.
    """
    import torch
    from transformers import Llama4Config, Llama4ForCausalLM, Llama4ForConditionalGeneration, Llama4TextConfig

    torch.manual_seed(seed)
    text = {**fields(8, 1024), "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0, "use_qk_norm": False}
    text |= {"attention_chunk_size": chunk, "floor_scale": 48, "attn_scale": 0.5, "intermediate_size_mlp": 512}
    text |= {"interleave_moe_layer_step": 9, **config}
    if not towers:
        return save(path, Llama4ForCausalLM(Llama4TextConfig(**text)), 1024, {})
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 56, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}
    both = Llama4Config(text_config=text, vision_config=vision)
    return save(path, Llama4ForConditionalGeneration(both), 1024, {})


def random_gemma4(path: Path, window: int = 64, head_dim: int = 64, seed: int = 0) -> Path:
    """Random float32 checkpoint of Gemma 4 with its tower: 2 and 5 of six layers attend to all tokens.

    Hidden 256, 8 query heads; 2 KV heads of 32 in windows, and one of ``head_dim`` in the other layers, which project
    keys and values by the same weights. Queries are normed so that logits are as small as those of other models.

    Args:
        path: its folder.
        window: tokens that a windowed layer sees, the newest among them.
        head_dim: as said.
        seed: of the weights.
    """
    import torch
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    torch.manual_seed(seed)
    kinds = (["sliding_attention"] * 2 + ["full_attention"]) * 2
    text = {**fields(6, 1024), "num_key_value_heads": 2, "head_dim": 32, "sliding_window": window, "pad_token_id": 0}
    text |= {"layer_types": kinds, "tie_word_embeddings": True, "hidden_size_per_layer_input": 0}
    text |= {"global_head_dim": head_dim, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    text |= {"num_kv_shared_layers": 0}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 32}
    model = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=vision, audio_config=None))
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            # Attention has no other scale.
            parameter.data.fill_(len(parameter) ** -0.5)
    return save(path, model, 1024, {})


# What SGLang takes where transformers 5 writes a theta by the kind of layer; published checkpoints have one for both.
_ROPE = {f"{kind}_attention": {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full", "sliding")}
_MIMO_ROPE = {kind: {**rope, "partial_rotary_factor": 0.334} for kind, rope in _ROPE.items()}
_OF_FAMILY: dict[str, dict[str, Any]] = {
    # SGLang windows every other layer. Logits of random weights are small: a cap of 50 would hardly bend them.
    "Gemma2": {
        "query_pre_attn_scalar": 32,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 0.1,
        # SGLang has a kernel of Triton for this one.
        "final_logit_softcapping": None,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "Gemma3": {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "Olmo3": {"rope_parameters": _ROPE},
    "Cohere2": {"tie_word_embeddings": True},
    # SGLang's choice of its experts needs a GPU.
    "Afmoe": {**EXPERTS, "num_dense_layers": 6, "num_shared_experts": 1},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _ROPE["full_attention"]},
    "GraniteSWA": {"layer_rope_theta": [10000.0] * 6, "rope_parameters": _ROPE["full_attention"]},
    "Laguna": {**EXPERTS, "shared_expert_intermediate_size": 128},
    # Keys of 48 dimensions, values of 32, and in the layers with windows twice the KV heads.
    "MiMoV2Flash": {
        "head_dim": 48,
        "v_head_dim": 32,
        "mlp_layer_types": ["dense"] * 6,
        "rope_parameters": _MIMO_ROPE,
    },
    "Mellum": {**EXPERTS, "rope_parameters": _ROPE, "mlp_layer_types": ["sparse"] * 6},
}
