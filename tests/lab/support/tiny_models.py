"""Tiny models and their books, for tests."""

import random
from pathlib import Path

import torch

from eval.lab.train.mla_model import TinyMLA
from eval.texts import text


def write_books(folder: Path, lines: int) -> Path:
    """A folder with a book of random sentences for each split."""
    for split in ("train", "heldout"):
        (folder / "books" / split).mkdir(parents=True)
        rng = random.Random(split)
        sentences = (" ".join(rng.choices(text.words("train"), k=9)).capitalize() + "." for _ in range(lines))
        (folder / "books" / split / "book.txt").write_text(" ".join(sentences))
    return folder


def lively(model: TinyMLA) -> TinyMLA:
    """The model with weights that make its attention uneven and its layers matter."""
    torch.manual_seed(1)
    with torch.no_grad():
        for i in range(4):
            weights = model.layer_weights(i)
            weights["self_attn.q_b_proj"].mul_(3)
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                weights[name].normal_(std=0.06)
            for name in ("self_attn.q_a_layernorm", "self_attn.kv_a_layernorm", "input_layernorm"):
                weights[name].uniform_(0.5, 1.5)
        model.embed.normal_(std=0.1)
    return model
