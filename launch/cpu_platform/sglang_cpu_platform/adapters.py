"""LoRA: SGLang's backend in PyTorch, without pinned memory, and its kernels for absorbed latents in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

# The one of SGLang's backends that is plain PyTorch.
BACKEND = "torch_native"


class PageableTorch(ModuleType):
    """``torch`` for modules that ask for pinned memory, whatever the device is."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        """Make a tensor in memory that is not pinned."""
        return torch.tensor(*args, **options)

    def zeros(self, *args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        """Make a tensor of zeros likewise."""
        return torch.zeros(*args, **options)


def install() -> None:
    """Leave the host memory of adapters as it is, which SGLang pins for a GPU."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    tensors: Any = torch.Tensor
    tensors.pin_memory = lambda tensor, *_: tensor
    modules: tuple[Any, ...] = (layers, torch_backend)
    for module in modules:
        module.torch = PageableTorch("torch")


def use_torch(server_args: Any, defaults: dict[str, Any]) -> None:
    """Compute adapters in PyTorch, on a server that has any.

    Raises:
        ValueError: another backend is asked for.
    """
    if not (server_args.enable_lora or server_args.lora_paths):
        return
    if (got := server_args.lora_backend) not in (defaults["lora_backend"], BACKEND):
        raise ValueError(f"--lora-backend {got}: without a CUDA device adapters run in PyTorch; allowed: {BACKEND}")
    server_args.lora_backend = BACKEND


def correct_queries(attention: Any, q_nope: torch.Tensor, absorbed: torch.Tensor) -> torch.Tensor:
    """Return absorbed queries ``[tokens, heads, latent]`` with what adapters of ``kv_b_proj`` add to them."""
    found = absorbed.clone()
    for rows, down, up, scaling in _segments(attention):
        keys = up[:, : attention.qk_nope_head_dim]
        found[rows] += scaling * torch.einsum("thd,hdr,rl->thl", q_nope[rows], keys, down)
    return found


def correct_values(attention: Any, latents: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Return outputs ``[tokens, heads * v_head_dim]`` likewise, from those in latents ``[tokens, heads, latent]``."""
    found = flat.clone()
    for rows, down, up, scaling in _segments(attention):
        values = up[:, attention.qk_nope_head_dim :]
        found[rows] += scaling * torch.einsum("thl,rl,hdr->thd", latents[rows], down, values).flatten(1)
    return found


def _segments(attention: Any) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, float]]:
    """Yield the tokens of each adapter, its matrices ``[rank, latent]`` and ``[heads, dims, rank]``, and its factor."""
    layer = attention.kv_b_proj
    info = layer.lora_backend.batch_info if getattr(layer, "set_lora", False) else None
    if info is None:
        return
    first = 0
    for slot, tokens in zip(info.weight_indices_cpu.tolist(), info.seg_lens_cpu.tolist(), strict=True):
        if rank := int(info.lora_ranks_cpu[slot]):
            up = layer.B_buffer[slot, :, :rank].unflatten(0, (attention.num_local_heads, -1))
            scaling = float(info.scalings_cpu[slot])
            yield slice(first, first + tokens), layer.A_buffer[slot, :rank], up, scaling
        first += tokens
