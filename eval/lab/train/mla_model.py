"""The tiny MLA model: DeepSeek-V3's latent attention with plain MLPs, as transformers' ``DeepseekV3ForCausalLM``.

Keys and values are expanded to all heads from the latent (DeepSeek-V2, section 2.1), which is what training wants; a
server multiplies the expansion into the query instead, with the same result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.lab.train.latent import LATENT_SELECTORS, latent_rows
from eval.lab.train.layers import HIDDEN, LAYERS, MLP_SHAPES, TinyModel, causal, rms_norm
from eval.lab.train.sparse import Rows

HEADS, NOPE, ROPE, VALUE = 8, 64, 64, 64
Q_RANK, KV_RANK = 192, 512


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over x (n, heads, d) with cos and sin (n, 1, d), neighbours rotated against each other."""
    a, b = x[..., ::2], x[..., 1::2]
    return (x * cos + torch.stack([-b, a], -1).flatten(-2) * sin).to(x.dtype)


def project(x: Tensor, w: list[Tensor], cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x (n, HIDDEN) -> q and k (n, HEADS, NOPE + ROPE), rotated part last, and v (n, HEADS, VALUE)."""
    norm, wq_a, q_norm, wq_b, wkv_a, kv_norm, wkv_b = w
    h = rms_norm(x, norm).to(dtype)
    q = F.linear(rms_norm(F.linear(h, wq_a.to(dtype)), q_norm), wq_b.to(dtype)).view(-1, HEADS, NOPE + ROPE)
    latent, k_rope = F.linear(h, wkv_a.to(dtype)).split([KV_RANK, ROPE], -1)
    expanded = F.linear(rms_norm(latent, kv_norm), wkv_b.to(dtype)).view(-1, HEADS, NOPE + VALUE)
    k_nope, v = expanded.split([NOPE, VALUE], -1)
    q = torch.cat([q[..., :NOPE], rotate_pairs(q[..., NOPE:], cos, sin)], -1)
    k_rope = rotate_pairs(k_rope[:, None], cos, sin).expand(-1, HEADS, -1)
    return q, torch.cat([k_nope, k_rope], -1), v.contiguous()


# What loaders read of experts, although no layer has any.
NO_EXPERTS = {
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


class TinyMLA(TinyModel):
    """The model; `value_width` is what values are padded to for the dense attention's kernel."""

    shapes = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_a_proj": (Q_RANK, HIDDEN),
        "self_attn.q_a_layernorm": (Q_RANK,),
        "self_attn.q_b_proj": (HEADS * (NOPE + ROPE), Q_RANK),
        "self_attn.kv_a_proj_with_mqa": (KV_RANK + ROPE, HIDDEN),
        "self_attn.kv_a_layernorm": (KV_RANK,),
        "self_attn.kv_b_proj": (HEADS * (NOPE + VALUE), KV_RANK),
        "self_attn.o_proj": (HIDDEN, HEADS * VALUE),
        **MLP_SHAPES,
    }
    rope, neox, selectors = ROPE, False, LATENT_SELECTORS
    name, architecture = "tiny-mla", "DeepseekV3ForCausalLM"

    def __init__(self, compute: torch.dtype = torch.float32, compiled: bool = False) -> None:
        super().__init__(project, compute, compiled)
        self.value_width = NOPE + ROPE
        self._start_alike()

    @torch.no_grad()
    def _start_alike(self) -> None:
        """Give the unrotated parts of queries and keys the same projection, so that equal inputs attend to each other.

        With it lookups by words formed at step 1,800. They had not after 3,900 steps of Muon and 1,300 of AdamW from
        independent projections; AdamW was not given longer.
        """
        for i in range(LAYERS):
            w = self.layer_weights(i)
            w["self_attn.kv_a_proj_with_mqa"][:Q_RANK] = w["self_attn.q_a_proj"]
            queries = w["self_attn.q_b_proj"].view(HEADS, NOPE + ROPE, Q_RANK)
            keys = w["self_attn.kv_b_proj"].view(HEADS, NOPE + VALUE, KV_RANK)
            keys[:, :NOPE] = 0.0
            keys[:, :NOPE, :Q_RANK] = queries[:, :NOPE]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows | None) -> Tensor:
        """See TinyModel."""
        out = causal(q, k, v, self.value_width)
        return out if rows is None else latent_rows(out, q, k, v, rows, ROPE)

    @classmethod
    def shape_config(cls) -> dict[str, Any]:
        """See TinyModel."""
        return {
            "architectures": [cls.architecture],
            "model_type": "deepseek_v3",
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "q_lora_rank": Q_RANK,
            "kv_lora_rank": KV_RANK,
            "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": VALUE,
            "rope_interleave": True,
            "first_k_dense_replace": LAYERS,
            **NO_EXPERTS,
        }
