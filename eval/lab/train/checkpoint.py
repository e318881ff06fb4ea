"""Checkpoints of the tiny models, as transformers and SGLang read them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eval.lab.train.dsa_model import TinyDSA
from eval.lab.train.layers import EPS, HIDDEN, LAYERS, MLP, ROPE_THETA, TinyModel
from eval.lab.train.mla_model import TinyMLA
from eval.lab.train.model import TinyGQA
from eval.lab.train.tokenizer import MAX_LENGTH, VOCAB_SIZE
from eval.texts.text import IM_END, SPECIAL_TOKENS

MODELS: dict[str, type[TinyGQA] | type[TinyMLA]] = {m.architecture: m for m in (TinyGQA, TinyMLA, TinyDSA)}
WEIGHTS = "model.safetensors"
# Readers prefer a file named as WEIGHTS to an index, so that the link to the trunk must have another name.
TRUNK, INDEXER = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


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
    if isinstance(model, TinyDSA):
        write_json(folder / INDEX, shard_index(model))
    save_weights(model, folder / (INDEXER if isinstance(model, TinyDSA) else WEIGHTS))


def shard_index(model: TinyDSA) -> dict[str, Any]:
    """Which of both files has which weight."""
    shards = {TRUNK: model.trunk_weights(), INDEXER: model.named_weights()}
    size = sum(2 * weight.numel() for weights in shards.values() for weight in weights.values())
    where = {name: file for file, weights in shards.items() for name in weights}
    return {"metadata": {"total_size": size}, "weight_map": where}


def link_trunk(trunk: Path, folder: Path) -> None:
    """Links weights and tokenizer of a model that is built on another one, by relative paths.

    Raises:
        ValueError: if the trunk is no tiny MLA model.
    """
    found = architecture(trunk)
    if found != TinyMLA.architecture:
        raise ValueError(f"the trunk {trunk} is no tiny MLA model: got {found}, allowed is {TinyMLA.architecture}")
    folder.mkdir(parents=True, exist_ok=True)
    links = {TRUNK: WEIGHTS} | {name: name for name in ("tokenizer.json", "tokenizer_config.json")}
    for name, target in links.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(os.path.relpath((trunk / target).resolve(), folder.resolve()))


def save_weights(model: TinyModel, path: Path) -> None:
    """Writes the weights in bfloat16."""
    weights = {name: weight.to(torch.bfloat16).contiguous().cpu() for name, weight in model.named_weights().items()}
    save_file(weights, path, metadata={"format": "pt"})


def load_weights(model: TinyModel, path: Path) -> None:
    """Fills a model, whatever its type and device.

    Raises:
        KeyError: if the file lacks a weight.
    """
    _fill(model.named_weights(), path)


def load_trunk(model: TinyDSA, folder: Path) -> None:
    """Fills what is not the indexers' from the folder of a tiny MLA model; errors as in `load_weights`."""
    _fill(model.trunk_weights(), folder / WEIGHTS)


@torch.no_grad()
def _fill(weights: dict[str, torch.Tensor], path: Path) -> None:
    stored = load_file(path)
    for name, weight in weights.items():
        weight.copy_(stored[name])


def architecture(folder: Path) -> str:
    """Class of a checkpoint."""
    (found,) = json.loads((folder / "config.json").read_text())["architectures"]
    return found


def load(folder: Path, device: torch.device, dtype: torch.dtype) -> TinyModel:
    """Reads a checkpoint for measuring; weights, activations and matrix products all in `dtype`.

    Raises:
        ValueError: if config.json names an architecture that is none of the tiny models'.
    """
    found = architecture(folder)
    if found not in MODELS:
        raise ValueError(f"{folder} is no tiny model: got {found}, allowed are {', '.join(MODELS)}")
    model = MODELS[found](compute=dtype)
    if isinstance(model, TinyDSA):
        _fill(model.trunk_weights(), folder / TRUNK)
    load_weights(model, folder / (INDEXER if isinstance(model, TinyDSA) else WEIGHTS))
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)
