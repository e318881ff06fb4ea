"""Where the kernel of sparse MLA decode attention for Hopper is chosen."""

from types import ModuleType

import torch

from .. import gluon_kernels

# Not before it was measured.
USES_HOPPER_KERNEL = False


def hopper_kernel(
    batch: int, num_heads: int, latent_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> ModuleType | None:
    """The module of the kernel where calls of these sizes come to it, if it ``takes`` their tensors; None elsewhere."""
    if not USES_HOPPER_KERNEL:
        return None
    hopper = gluon_kernels.hopper_kernel(str(__package__), "sparse MLA decode attention", device)
    serves = hopper is not None and hopper.serves(batch, num_heads, latent_dim, block_size, dtype)
    return hopper if serves else None
