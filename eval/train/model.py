"""The tiny GQA model: Qwen3's architecture in plain functions, for training and for measuring.

`save` writes the weights under the names of transformers' ``Qwen3ForCausalLM``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eval.text import IM_END, SPECIAL_TOKENS
from eval.train.sparse import Rows, sparse_rows
from eval.train.tokenizer import MAX_LENGTH, VOCAB_SIZE

HIDDEN, LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, MLP = 256, 4, 8, 2, 64, 640
ROPE_THETA, EPS = 1e6, 1e-6
SHAPES = {
    "input_layernorm": (HIDDEN,),
    "self_attn.q_proj": (Q_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.q_norm": (HEAD_DIM,),
    "self_attn.k_norm": (HEAD_DIM,),
    "self_attn.o_proj": (HIDDEN, Q_HEADS * HEAD_DIM),
    "post_attention_layernorm": (HIDDEN,),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}


def initial(name: str, shape: tuple[int, ...]) -> Tensor:
    """First value of a weight; layers start as the identity, so that the small embedding is not drowned."""
    if len(shape) == 1:
        return torch.ones(shape)
    return (
        torch.zeros(shape) if name in ("self_attn.o_proj", "mlp.down_proj") else torch.randn(shape) * shape[1] ** -0.5
    )


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm over the last dimension, in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight.to(x.dtype)


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


def finish(x: Tensor, attended: Tensor, w: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Output projection, residual and MLP; x (n, HIDDEN), attended (n, Q_HEADS * d)."""
    wo, norm, gate, up, down = w
    x = x + F.linear(attended, wo.to(dtype))
    h = rms_norm(x, norm).to(dtype)
    return x + F.linear(F.silu(F.linear(h, gate.to(dtype))) * F.linear(h, up.to(dtype)), down.to(dtype))


def losses(
    x: Tensor, norm: Tensor, embed: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Weighted means of the next-token loss; x (n, HIDDEN), targets (n,), weights (2, n): text, answers."""
    logits = F.linear(rms_norm(x, norm).to(dtype), embed.to(dtype)).float()
    loss = F.cross_entropy(logits, targets, reduction="none")
    text, answer = (weights * loss).sum(-1) / weights.sum(-1).clamp(min=1e-6)
    return text, answer


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; q (B, T, Q_HEADS, d), k and v (B, T, KV_HEADS, d) -> (B, T, Q_HEADS, d)."""
    k, v = (x.repeat_interleave(Q_HEADS // KV_HEADS, 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2)


class TinyGQA(nn.Module):
    """The model; `compute` is the type of matrix products (the weights may be float32)."""

    def __init__(self, compute: torch.dtype = torch.float32, compiled: bool = False) -> None:
        super().__init__()
        self.compute = compute
        self.embed = nn.Parameter(torch.randn(VOCAB_SIZE, HIDDEN) * 0.02)
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        self.layers = nn.ModuleList()
        for _ in range(LAYERS):
            made = {n.replace(".", "__"): nn.Parameter(initial(n, shape)) for n, shape in SHAPES.items()}
            self.layers.append(nn.ParameterDict(made))
        self.functions = [project, finish, losses]
        if compiled:
            self.functions = [torch.compile(f, dynamic=False) for f in self.functions]
        self._table: tuple[Tensor, Tensor] | None = None

    def layer_weights(self, i: int) -> dict[str, Tensor]:
        """Weights of layer `i` by the names and in the order of SHAPES."""
        layer = cast(nn.ParameterDict, self.layers[i])
        return {name: layer[name.replace(".", "__")] for name in SHAPES}

    def matrices(self) -> list[nn.Parameter]:
        """Weights of the layers without norms and embedding."""
        return [w for layer in self.layers for w in layer.parameters() if w.ndim == 2]

    def _rope(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin (rows * length, 1, d), the same for every row."""
        if self._table is None:
            powers = torch.arange(0, HEAD_DIM, 2, device=self.embed.device).float() / HEAD_DIM
            angle = torch.arange(MAX_LENGTH, device=self.embed.device)[:, None] * ROPE_THETA**-powers
            angle = torch.cat([angle, angle], -1)[:, None]
            self._table = (angle.cos().to(self.compute), angle.sin().to(self.compute))
        cos, sin = (table[:length].repeat(rows, 1, 1) for table in self._table)
        return cos, sin

    def forward(self, tokens: Tensor, rows: Rows | None = None, plain: bool = True) -> Tensor:
        """tokens (B, T) -> hidden states before the last norm (B * T, HIDDEN).

        Args:
            rows: queries that attend to chosen blocks only; all others attend densely.
            plain: with the functions as they are rather than compiled.
        """
        b, t = tokens.shape
        cos, sin = self._rope(b, t)
        pre, post = (project, finish) if plain else self.functions[:2]
        x = F.embedding(tokens.flatten(), self.embed)
        for i in range(LAYERS):
            w = list(self.layer_weights(i).values())
            q, k, v = (y.view(b, t, -1, HEAD_DIM) for y in pre(x, w[:6], cos, sin, self.compute))
            out = dense(q, k, v)
            if rows is not None:
                out = sparse_rows(out, q, k, v, rows)
            x = post(x, out.reshape(b * t, -1), w[6:], self.compute)
        return x

    def loss(
        self, tokens: Tensor, lm_weight: Tensor, answer_weight: Tensor, rows: Rows | None = None, plain: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Mean next-token loss of text and of answers; weights (B, T) belong to predicting the next token."""
        x = self(tokens, rows, plain)
        weights = torch.stack([lm_weight.flatten(), answer_weight.flatten()])
        function = losses if plain else self.functions[2]
        return function(x, self.norm, self.embed, tokens.flatten().roll(-1), weights, self.compute)

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states (..., HIDDEN) -> logits (..., VOCAB_SIZE)."""
        return F.linear(rms_norm(x, self.norm).to(self.compute), self.embed.to(self.compute))

    def named_weights(self) -> dict[str, Tensor]:
        """Weights by the names of transformers' Qwen3ForCausalLM; the output layer shares the embedding."""
        named = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        for i in range(LAYERS):
            named |= {f"model.layers.{i}.{name}.weight": w for name, w in self.layer_weights(i).items()}
        return {name: weight.detach() for name, weight in named.items()}


def config() -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": Q_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "eos_token_id": SPECIAL_TOKENS.index(IM_END),
        "pad_token_id": SPECIAL_TOKENS.index("<|pad|>"),
        "torch_dtype": "bfloat16",
    }


def save(model: TinyGQA, folder: Path) -> None:
    """Writes config, generation config and bfloat16 weights; the tokenizer's files are left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(), indent=1) + "\n")
    stop = [SPECIAL_TOKENS.index(token) for token in (IM_END, "<|endoftext|>")]
    generation = {"do_sample": False, "eos_token_id": stop, "pad_token_id": SPECIAL_TOKENS.index("<|pad|>")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    weights = {name: weight.to(torch.bfloat16).contiguous().cpu() for name, weight in model.named_weights().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, device: torch.device, dtype: torch.dtype) -> TinyGQA:
    """Reads a checkpoint for measuring; weights, activations and matrix products all in `dtype`."""
    model = TinyGQA(compute=dtype).to(device=device, dtype=dtype)
    stored = load_file(folder / "model.safetensors", device=str(device))
    for name, weight in model.named_weights().items():
        weight.copy_(stored[name])
    return model.eval().requires_grad_(False)
