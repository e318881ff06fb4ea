"""Tiny random checkpoints with a vision tower, and with a processor of images and videos."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from checkpoints import EXPERTS, IMAGE, byte_tokenizer, fields, hybrid_sizes, remember, save

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# The tokens of media and those before and behind them, by their names in a config. Their ids are the first ones behind
# the three of every tokenizer, in this order.
_QWEN = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
_GLM = {"image": "image", "video": "video", "image_start": "begin_of_image", "image_end": "end_of_image"}
_GLM |= {"video_start": "begin_of_video", "video_end": "end_of_video"}
# The ids of the tokens before and behind a video, where these are not those of images.
VIDEO_BRACKETS = dict.fromkeys(("Glm4v", "Glm4vMoe"), (IMAGE + len(_GLM) - 2, IMAGE + len(_GLM) - 1))


def random_vision_language(path: Path, family: str, seed: int = 0, **sizes: Any) -> Path:
    """Random float32 checkpoint with a small vision tower.

    Args:
        path: its folder.
        family: "Qwen2_5_VL", "Qwen3VL", "Glm4v", with M-RoPE and a processor, or "Qwen3VLMoe" and "Glm4vMoe", with
            experts; "Qwen3_5" and "Qwen3_5Moe", with the states of `random_hybrid` besides; "Gemma3", with windows.
        seed: of the weights.
        **sizes: fields of its config of text.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    text, vision, tokens = _config_of(family)
    ids = {f"{name}_token_id": IMAGE + place for place, name in enumerate(tokens)}
    config = getattr(transformers, f"{family}Config")(
        text_config={"pad_token_id": 0, "num_key_value_heads": 2, "head_dim": 32, **text, **sizes},
        vision_config={"hidden_size": 64, "intermediate_size": 128, "num_heads": 2, **vision},
        tie_word_embeddings=True,
        **ids,
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    remember(model)
    if tokens is _GLM:
        # SGLang's epsilon of the norm behind it is a tenth of transformers'; of such small values that would show.
        model.model.visual.merger.proj.weight.data *= 30
    # As in `random_hybrid`.
    unwritten = {"text_config": {**config.text_config.to_dict(), "full_attention_interval": 4}}
    save(path, model, 1024, unwritten if family.startswith("Qwen3_5") else {})
    if tokens:
        _save_processor(path, family, tokens.values(), config.vision_config.patch_size)
    if family in ("Gemma3", "Qwen3VLMoe"):
        _name_as_published(path, family)
    return path


def _config_of(family: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The fields of a family's configs of text and of its tower, and its tokens of media."""
    text = fields(6, 1024)
    if family == "Gemma3":
        text |= {"sliding_window": 64, "sliding_window_pattern": 3, "query_pre_attn_scalar": 32}
        vision = {"num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 56, "patch_size": 14}
        return text, vision | {"vision_use_head": False}, {}
    # SGLang takes three layers of Qwen3-VL's deep stack whatever the config says, if the model has experts.
    vision = {"depth": 3, "out_hidden_size": 256, "patch_size": 16}
    if family.startswith("Glm4v"):
        text["rope_parameters"] = {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        # As wide as the merger behind the tower.
        vision |= {"image_size": 128, "intermediate_size": 256}
        return text | (experts if family == "Glm4vMoe" else {}), vision, _GLM
    if family == "Qwen2_5_VL":
        text["rope_parameters"] = {**_ROPE, "mrope_section": [8, 4, 4]}
        return text, vision | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}, _QWEN
    vision |= {"num_attention_heads": 2, "num_position_embeddings": 64}
    if family.startswith("Qwen3_5"):
        return hybrid_sizes(family, 5), vision | {"deepstack_visual_indexes": []}, _QWEN
    # Weights of experts of other sizes than the model's show which way round they are.
    experts = {**EXPERTS, "moe_intermediate_size": 64} if family == "Qwen3VLMoe" else {}
    text["rope_parameters"] = {**_ROPE, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    return text | experts, vision | {"deepstack_visual_indexes": [0, 1, 2]}, _QWEN


def _save_processor(path: Path, family: str, tokens: Iterable[str], patch: int) -> None:
    """Save the tokenizer with tokens of media, and what turns images of at least 2 x 2 patches into patches."""
    import transformers

    tokenizer = byte_tokenizer(path, 1024, [f"<|{token}|>" for token in tokens])
    kinds = {
        "Qwen2_5_VL": ("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor"),
        "Glm4v": ("Glm4vImageProcessor", "Glm4vVideoProcessor", "Glm4vProcessor"),
        "Qwen3": ("Qwen2VLImageProcessor", "Qwen3VLVideoProcessor", "Qwen3VLProcessor"),
    }
    (image, video, both) = next(names for start, names in kinds.items() if family.startswith(start))
    sizes = {"patch_size": patch, "size": {"shortest_edge": (2 * patch) ** 2, "longest_edge": 256 * 256}}
    images, videos = (getattr(transformers, name)(**sizes) for name in (image, video))
    getattr(transformers, both)(images, tokenizer, videos, chat_template=tokenizer.chat_template).save_pretrained(path)


def _name_as_published(path: Path, family: str) -> None:
    """Name and lay out weights as published checkpoints have what transformers 5 writes otherwise."""
    from safetensors.torch import load_file, save_file

    weights = load_file(file := path / "model.safetensors")
    if family == "Gemma3":
        weights = {name.replace("vision_tower.", "vision_tower.vision_model."): of for name, of in weights.items()}
    else:
        weights |= {name: of.mT.contiguous() for name, of in weights.items() if ".experts." in name}
    save_file(weights, file, {"format": "pt"})
