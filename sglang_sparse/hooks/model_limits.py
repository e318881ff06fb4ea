"""The table of the kinds of models that a sparse server refuses, with reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_sparse.methods.layers import BOUNDED, CHUNKED

if TYPE_CHECKING:
    from sglang_sparse.config.arguments import ModelConfig


@dataclass(frozen=True)
class ModelLimit:
    """A kind of model that no method serves.

    Attributes:
        name: the kind.
        applies: whether SGLang's ``ModelConfig`` is of this kind.
        reason: why it is refused.
        own_selection: whether methods for trained indexers serve it.
    """

    name: str
    applies: Callable[[ModelConfig], bool]
    reason: str
    own_selection: bool = False


_STATES_AND_TOWERS = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
# Those of models whose layers with recurrent states stay dense.
WITH_STATES = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", *_STATES_AND_TOWERS)
# Of those with towers, it alone needs M-RoPE positions for text, too, and SGLang computes none without a tower.
QWEN2_5_VL = "Qwen2_5_VLForConditionalGeneration"
# Those that are served with their towers: images attend as text does, to what lies before.
WITH_TOWERS = (
    QWEN2_5_VL,
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    *_STATES_AND_TOWERS,
)
TEXT_ALONE = """--json-model-override-args '{"language_model_only": true}'"""


def has_towers(model: ModelConfig) -> bool:
    """Whether a model is served with its towers for media."""
    return model.is_multimodal and not set(WITH_TOWERS).isdisjoint(model.hf_config.architectures or ())


def _unproven_states(model: ModelConfig) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model) is not None and not _has_states(model)


def _has_states(model: ModelConfig) -> bool:
    return not set(WITH_STATES).isdisjoint(model.hf_config.architectures or ())


def state_layers(model: ModelConfig) -> frozenset[int]:
    """Return the layers of a served model that have a recurrent state and no KV."""
    attending = model.hf_text_config.full_attention_layer_ids if _has_states(model) else range(model.num_hidden_layers)
    return frozenset(range(model.num_hidden_layers)).difference(attending)


def _own_sparse_attention(model: ModelConfig) -> bool:
    from sglang.srt.configs.model_config import is_deepseek_dsa, is_deepseek_v4, is_minimax_sparse
    from sglang.srt.layers.attention.qsa.config import is_qwen_qsa

    config = model.hf_config
    known = (is_deepseek_dsa, is_deepseek_v4, is_minimax_sparse, is_qwen_qsa)
    # MiniCPM's class has a flag for it.
    own = getattr(config, "has_minicpm_sparse_attention", False) or config.model_type == "dots3_note"
    return own or any(asks(config) for asks in known)


# SGLang's table of them is inside a function. It refuses --dllm-algorithm for all others.
_DIFFUSING = ("LLaDA2MoeModelLM", "SDARForCausalLM", "SDARMoeForCausalLM", "DiffusionGemmaForBlockDiffusion")


def _diffuses(model: ModelConfig) -> bool:
    return not set(_DIFFUSING).isdisjoint(model.hf_config.architectures or ())


def _dual_chunk(model: ModelConfig) -> bool:
    return bool(getattr(model.hf_text_config, "dual_chunk_attention_config", None))


# As the recipe of Qwen2.5-7B-1M has it.
_DUAL_CHUNK = (
    "SGLang has no kernels for it; up to the length of its training, without sparse_attention_config.json in its "
    """folder: --json-model-override-args '{"dual_chunk_attention_config": null, "max_position_embeddings": 262144}'"""
)


def _shares_kv(model: ModelConfig) -> bool:
    return bool(getattr(model.hf_text_config, "num_kv_shared_layers", None))


def _repeated_layers(model: ModelConfig) -> bool:
    return model.num_attention_layers != model.num_hidden_layers


def windowed_layers(model: ModelConfig) -> frozenset[int]:
    """Return the layers that attend within a sliding window or a chunk, as far as the model's config names them.

    A window without ``layer_types`` says nothing: SGLang ignores that of Mistral and Phi-3. What a loaded layer does is
    for ``layer_checks.require_layers``.
    """
    if model.is_hybrid_swa:
        return frozenset(model.swa_attention_layer_ids or ())
    kinds = _layer_types(model) if model.sliding_window_size or model.is_local_attention_model else ()
    layers = zip(range(model.num_hidden_layers), kinds, strict=False)
    return frozenset(layer for layer, kind in layers if kind in BOUNDED)


def _layer_types(model: ModelConfig) -> Sequence[str]:
    return getattr(model.hf_text_config, "layer_types", None) or ()


def _unseen_chunks(model: ModelConfig) -> bool:
    return CHUNKED in _layer_types(model) and (not model.is_local_attention_model or model.model_impl == "transformers")


def _needs_positions(model: ModelConfig) -> bool:
    config = model.hf_text_config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    without = {*WITH_TOWERS} - {QWEN2_5_VL}
    return model.is_lm_only and "mrope_section" in rope and without.isdisjoint(model.hf_config.architectures or ())


MODEL_LIMITS = (
    ModelLimit("encoder-only or embedding model", lambda m: not m.is_generation, "nothing is decoded"),
    ModelLimit("diffusion language model", _diffuses, "tokens are not decoded one by one"),
    ModelLimit("encoder-decoder model", lambda m: m.is_encoder_decoder, "cross attention has no separate pages"),
    ModelLimit(
        "multimodal model",
        lambda m: m.is_multimodal and not has_towers(m),
        "its media towers are not proven yet; proven: those of Qwen2.5-VL, Qwen3-VL, Qwen3.5, GLM-4.1V and GLM-4.5V; "
        f"models without M-RoPE serve text alone with {TEXT_ALONE}",
    ),
    ModelLimit(
        "model that needs M-RoPE for text",
        _needs_positions,
        "SGLang computes no M-RoPE positions for it without its towers; Qwen2.5-VL is served with them, without "
        "language_model_only",
    ),
    ModelLimit(
        "hybrid SSM or linear-attention model",
        _unproven_states,
        f"its states are not proven yet; proven: {', '.join(WITH_STATES)}",
    ),
    ModelLimit(
        "model of windowed layers alone",
        lambda m: len(windowed_layers(m)) == m.num_hidden_layers,
        "no layer attends to all earlier tokens",
    ),
    ModelLimit("model with dual chunk attention", _dual_chunk, _DUAL_CHUNK),
    ModelLimit(
        "model whose chunks SGLang does not see",
        _unseen_chunks,
        "it has chunks in its own Llama4ForConditionalGeneration alone: leave out --model-impl, or add "
        """--json-model-override-args '{"architectures": ["Llama4ForConditionalGeneration"]}'""",
    ),
    ModelLimit(
        "model with its own sparse attention",
        _own_sparse_attention,
        "it selects tokens itself; for DSA use --sparse-method dsa",
        True,
    ),
    ModelLimit("model whose layers share KV", _shares_kv, "a layer that reads another layer's pages is not proven yet"),
    ModelLimit("model with several attentions a layer", _repeated_layers, "its layers are counted differently"),
)
