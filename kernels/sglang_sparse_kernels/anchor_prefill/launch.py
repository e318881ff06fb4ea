"""Launches of the Triton kernels of anchor attention."""

from dataclasses import dataclass

import torch
import triton
from triton import knobs

from ..common.launch import properties
from .plan import AnchorPlan, Slice

# Bytes that a program takes with a head dimension of 256 and more than one stage.
_PIPELINED = 136 * 1024


@dataclass(frozen=True)
class Config:
    """Launch parameters: keys per step, warps, pipeline stages and most registers of a thread (None for as many as the
    compiler likes) of the attention, and warps of the identification, whose keys per step are the plan's.
    """

    block_keys: int = 64
    num_warps: int = 8
    num_stages: int = 3
    max_registers: int | None = None
    identify_warps: int = 8


def default_config(block_size: int, dim: int, device: torch.device) -> Config:
    """Tiles and warps such that nothing is spilled on Hopper up to a head dimension of 128.

    Of larger ones the pipeline has one stage where the device's shared memory holds no more.
    """
    warps = 8 if block_size == 128 else 4
    if dim <= 128:
        return Config(num_warps=warps)
    fits = properties(device).shared_memory >= _PIPELINED
    return Config(block_keys=32, num_warps=warps, num_stages=3 if fits else 1)


@dataclass(frozen=True)
class Launch:
    """One slice of a call: ``q`` holds the slice's queries alone, ``scale`` makes natural units of a product."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    plan: AnchorPlan
    piece: Slice
    page_size: int
    scale: float
    config: Config

    @property
    def attention_options(self) -> dict[str, int | None]:
        """Triton's launch options of the two attention kernels."""
        config = self.config
        return {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.max_registers}

    def strides(self, *names: str) -> list[int]:
        """Those of the first two dimensions of each tensor."""
        return [stride for name in names for stride in getattr(self, name).stride()[:2]]

    def constants(self, *names: str) -> dict[str, int]:
        """Compile-time values by name."""
        heads, dim = self.q.shape[1:]
        v_dim = self.v_cache.shape[2]
        values = {
            "HEADS": heads,
            "GROUP": heads // self.k_cache.shape[1],
            "BLOCK": self.plan.block_size,
            "DIM": dim,
            "V_DIM": v_dim,
            "BLOCK_HEADS": triton.next_power_of_2(heads),
            "BLOCK_DIM": triton.next_power_of_2(dim),
            "BLOCK_V_DIM": triton.next_power_of_2(v_dim),
            "PAGE": self.page_size,
            "TILE": min(self.config.block_keys, self.plan.block_size),
            # The interpreter multiplies the bit patterns of bfloat16.
            "UPCAST": knobs.runtime.interpret,
        }
        return {name: values[name] for name in ("HEADS", "BLOCK", *names)}
