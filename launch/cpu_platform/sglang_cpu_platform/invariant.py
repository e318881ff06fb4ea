"""Deterministic inference in plain PyTorch: what a token gets does not depend on the other tokens of its pass.

A product of matrices adds up a row in an order that depends on the number of rows. So all products have `BLOCK` rows
here, of which some may be padding; and a query attends by itself, see `attention`. SGLang's own mode needs a GPU.
"""

from __future__ import annotations

import torch

BLOCK = 32
# What replaces PyTorch's own, as long as it lives; empty where the mode is off.
_replaced: list[torch.library.Library] = []


def enabled() -> bool:
    """Whether this process serves deterministically."""
    return bool(_replaced)


def allow(backend: str) -> None:
    """Put an attention backend on SGLang's lists of those that serve deterministically, with a prefix cache."""
    from sglang.srt.arg_groups import choices

    for names in (
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        names.extend({backend}.difference(names))


def enable(enable_bmm: bool = True) -> None:
    """Replace SGLang's ``enable_batch_invariant_mode``, which a process with the flag calls once.

    Args:
        enable_bmm: whether products of batches are replaced, too.
    """
    if _replaced:
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", product, "CPU")
    library.impl("addmm", _add_product, "CPU")
    if enable_bmm:
        library.impl("bmm", product, "CPU")
        library.impl("bmm.out", _write_product, "CPU")
    _replaced.append(library)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply ``[rows, inner]`` by ``[inner, columns]``, or batches of them, each row as it would be alone."""
    if left.dim() == 2:
        return product(left[None], right[None])[0]
    (batch, rows, _), columns = left.shape, right.shape[-1]
    padded = torch.nn.functional.pad(left, (0, 0, 0, -rows % BLOCK))
    nothing, out = left.new_zeros(1), left.new_empty(batch, rows, columns)
    # One call for each block: of a batch a library may again choose by its size. Not one that is replaced here.
    for first in range(0, rows, BLOCK):
        found = torch.baddbmm(nothing, padded[:, first : first + BLOCK].contiguous(), right, beta=0)
        out[:, first : first + BLOCK] = found[:, : rows - first]
    return out


def _write_product(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(product(left, right))


def _add_product(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return bias * beta + product(left, right) * alpha
