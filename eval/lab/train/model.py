"""The tiny GQA model: Qwen3's architecture, with the names of transformers' ``Qwen3ForCausalLM``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.lab.train.layers import HIDDEN, MLP_SHAPES, TinyModel, causal, rms_norm
from eval.lab.train.sparse import SELECTORS, Rows, sparse_rows

Q_HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over x (n, heads, d) with cos and sin (n, 1, d), halves rotated against each other."""
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


def project(x: Tensor, w: list[Tensor], cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x (n, HIDDEN) -> q (n, Q_HEADS, d), k and v (n, KV_HEADS, d)."""
    norm, wq, wk, wv, q_norm, k_norm = w
    h = rms_norm(x, norm).to(dtype)
    q = F.linear(h, wq.to(dtype)).view(-1, Q_HEADS, HEAD_DIM)
    k = F.linear(h, wk.to(dtype)).view(-1, KV_HEADS, HEAD_DIM)
    v = F.linear(h, wv.to(dtype)).view(-1, KV_HEADS, HEAD_DIM)
    return rotate(rms_norm(q, q_norm), cos, sin), rotate(rms_norm(k, k_norm), cos, sin), v


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; q (B, T, Q_HEADS, d), k and v (B, T, KV_HEADS, d) -> (B, T, Q_HEADS, d)."""
    k, v = (x.repeat_interleave(Q_HEADS // KV_HEADS, 2) for x in (k, v))
    return causal(q, k, v, HEAD_DIM)


class TinyGQA(TinyModel):
    """The model; `compute` is the type of matrix products (the weights may be float32)."""

    shapes = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (Q_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.k_norm": (HEAD_DIM,),
        "self_attn.o_proj": (HIDDEN, Q_HEADS * HEAD_DIM),
        **MLP_SHAPES,
    }
    rope, neox, selectors = HEAD_DIM, True, SELECTORS
    name, architecture = "tiny-gqa", "Qwen3ForCausalLM"

    def __init__(self, compute: torch.dtype = torch.float32, compiled: bool = False) -> None:
        super().__init__(project, compute, compiled)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows | None) -> Tensor:
        """See TinyModel; keys and values have KV_HEADS heads."""
        out = dense(q, k, v)
        return out if rows is None else sparse_rows(out, q, k, v, rows)

    @classmethod
    def shape_config(cls) -> dict[str, Any]:
        """See TinyModel."""
        return {
            "architectures": [cls.architecture],
            "model_type": "qwen3",
            "num_attention_heads": Q_HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "use_sliding_window": False,
        }
