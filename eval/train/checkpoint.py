"""Checkpoints of the tiny models, as transformers and SGLang read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eval.text import IM_END, SPECIAL_TOKENS
from eval.train.layers import EPS, HIDDEN, LAYERS, MLP, ROPE_THETA, TinyModel
from eval.train.mla_model import TinyMLA
from eval.train.model import TinyGQA
from eval.train.tokenizer import MAX_LENGTH, VOCAB_SIZE

MODELS: dict[str, type[TinyGQA] | type[TinyMLA]] = {model.architecture: model for model in (TinyGQA, TinyMLA)}
WEIGHTS = "model.safetensors"


def config(model: TinyModel) -> dict[str, Any]:
    """The content of config.json."""
    return {
        **model.shape_config(),
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index(IM_END),
        "pad_token_id": SPECIAL_TOKENS.index("<|pad|>"),
        "torch_dtype": "bfloat16",
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file as all of a checkpoint's are written."""
    path.write_text(json.dumps(content, indent=1) + "\n")


def save(model: TinyModel, folder: Path) -> None:
    """Writes config, generation config and bfloat16 weights; the tokenizer's files are left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config(model))
    stop = [SPECIAL_TOKENS.index(token) for token in (IM_END, "<|endoftext|>")]
    generation = {"do_sample": False, "eos_token_id": stop, "pad_token_id": SPECIAL_TOKENS.index("<|pad|>")}
    write_json(folder / "generation_config.json", generation)
    save_weights(model, folder / WEIGHTS)


def save_weights(model: TinyModel, path: Path) -> None:
    """Writes the weights in bfloat16."""
    weights = {name: weight.to(torch.bfloat16).contiguous().cpu() for name, weight in model.named_weights().items()}
    save_file(weights, path, metadata={"format": "pt"})


@torch.no_grad()
def load_weights(model: TinyModel, path: Path) -> None:
    """Fills a model, whatever its type and device.

    Raises:
        KeyError: if the file lacks a weight.
    """
    stored = load_file(path)
    for name, weight in model.named_weights().items():
        weight.copy_(stored[name])


def load(folder: Path, device: torch.device, dtype: torch.dtype) -> TinyModel:
    """Reads a checkpoint for measuring; weights, activations and matrix products all in `dtype`.

    Raises:
        ValueError: if config.json names an architecture that is none of the tiny models'.
    """
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    if architecture not in MODELS:
        raise ValueError(f"{folder} is no tiny model: got {architecture}, allowed are {', '.join(MODELS)}")
    model = MODELS[architecture](compute=dtype)
    load_weights(model, folder / WEIGHTS)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)
