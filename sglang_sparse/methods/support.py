"""Flags and models that methods refuse, and typical models to ask them about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

_SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
_LATENT = {
    **_SIZES,
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 8,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
# One config.json a kind of attention that some method may serve; the other kinds are in ``hooks/model_limits.py``.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "MHA/GQA": {
        **_SIZES,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "MLA": {**_LATENT, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    "DSA": {
        **_LATENT,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    "windowed MHA/GQA": {
        **_SIZES,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "sliding_window_pattern": 4,
    },
    "hybrid MHA/GQA": {
        **_SIZES,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "full_attention_interval": 4,
    },
    "chunked MHA/GQA": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": {
            **_SIZES,
            "model_type": "llama4_text",
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_chunk_size": 8192,
        },
        "vision_config": {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2},
    },
    "multimodal MHA/GQA": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {
            **_SIZES,
            "model_type": "qwen3_vl_text",
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
        },
        "vision_config": {"depth": 1, "hidden_size": 64, "num_heads": 2, "out_hidden_size": 4096},
    },
}


class Architecture(Protocol):
    """A model, as far as its config.json says it: SGLang's ``ModelConfig`` without a server."""

    context_len: int
    head_dim: Any
    hf_config: Any
    hf_text_config: Any
    num_hidden_layers: int

    @property
    def attention_arch(self) -> Enum:
        """The kind of attention, MHA (which GQA is one of) or MLA."""
        ...


class ModelConfig(Architecture, Protocol):
    """A server's model, with the place of its weights."""

    model_path: str
    revision: str | None


# Elements of a head. At 512 a tile of AnchorAttention or Skip-Softmax asks for 320 KiB of shared memory (Triton 3.8).
WIDEST_PREFILL = 256

# What a server's arguments ask for of some kind; None where they do not.
Judge = Callable[[Any], object | None]


@dataclass(frozen=True)
class FlagLimit:
    """A server flag that sparsity does not serve.

    Attributes:
        name: what the user calls it.
        got: returns the offending value, or None.
        reason: why not.
    """

    name: str
    got: Judge
    reason: str


def given(*fields: str) -> Judge:
    """Return what finds the first of some fields that is set."""
    return lambda args: next((value for field in fields if (value := getattr(args, field))), None)


def other_than(field: str, served: object) -> Judge:
    """Return what finds a value other than the one that is served."""
    return lambda args: None if getattr(args, field) == served else getattr(args, field)


def above_one(field: str) -> Judge:
    """Return what finds a number above 1."""
    return lambda args: getattr(args, field) if (getattr(args, field) or 1) > 1 else None


class _Roles(Protocol):
    disaggregation_mode: str
    enable_pd_role_switch: bool


def is_decode_server(args: _Roles) -> str | None:
    """The mode of a disaggregated pair's decode server, or of one that may become it."""
    mode = args.disaggregation_mode
    return mode if mode == "decode" or (mode != "null" and args.enable_pd_role_switch) else None


def soft_cap(model_config: Architecture) -> float | None:
    """Return the soft cap of a model's attention logits, in natural units, or None."""
    # SGLang caps those of Grok 1, whose config does not say it.
    grok = any(name.startswith("Grok1") for name in getattr(model_config.hf_config, "architectures", None) or ())
    cap = getattr(model_config.hf_text_config, "attn_logit_softcapping", 30.0 if grok else None)
    return cap if cap and cap > 0 else None


def refuse_soft_cap(name: str, model_config: Architecture) -> str | None:
    """Refuse a model with a soft cap for a method whose kernels compare logits without it, or return None."""
    cap = soft_cap(model_config)
    lacking = f"{name}'s kernels lack this model's soft cap of {cap} on logits; allowed: resa, skip_softmax"
    return None if cap is None else lacking


def refuse_wide_heads(name: str, model_config: Architecture) -> str | None:
    """Refuse heads for which a tile of prefill does not fit the shared memory of a GPU, or return None."""
    if (dim := model_config.head_dim) <= WIDEST_PREFILL:
        return None
    return f"{name} prefills heads of at most {WIDEST_PREFILL} dimensions, this model's have {dim}"


def refuse_sizes(model_config: object, allowed: Mapping[str, Sequence[int]]) -> str | None:
    """Say which size of a model's text config the kernels of a method lack, or None.

    Args:
        model_config: the text config.
        allowed: the sizes that are served, by the name of their field.
    """
    for name, sizes in allowed.items():
        found = getattr(model_config, name, None)
        if found not in sizes:
            return f"its {name} is {found}; allowed: {', '.join(map(str, sizes))}"
    return None
