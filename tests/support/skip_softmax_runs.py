"""Code shared by tests of Skip-Softmax: its two implementations, and the keys that decode keeps."""

import math
from typing import Any

import torch

from sglang_sparse_kernels.skip_softmax_prefill import reference, triton
from sglang_sparse_kernels.skip_softmax_prefill.cases import Case

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
INF, NAN = float("inf"), float("nan")
# Relative L2 error by the dtype of the query; bfloat16 also rounds the weights of the softmax.
TOLERANCE = {FP32: 1e-5, FP16: 2e-3, BF16: 1e-2}
PLAIN = Case((0,), (90,), 16, 1, 2, 64, FP16, FP16)


def counts(device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int64, device=device)


def run_reference(arguments: dict[str, Any], stats: torch.Tensor | None = None) -> torch.Tensor:
    """The reference in float32, so that only the kernel under test rounds."""
    q = arguments["q"].float()
    out = torch.full((*q.shape[:2], arguments["v_cache"].shape[2]), NAN, device=q.device)
    return reference.skip_softmax_prefill(reference.Inputs(**{**arguments, "q": q}), out, stats)


def run_triton(arguments: dict[str, Any], stats: torch.Tensor | None = None) -> torch.Tensor:
    """Triton's kernel, on GPUs that have another one too."""
    q, dim = arguments["q"], arguments["v_cache"].shape[2]
    out = torch.full((*q.shape[:2], dim), NAN, dtype=q.dtype, device=q.device)
    return triton.skip_softmax_prefill(reference.Inputs(**arguments), out, stats)


def with_factor(arguments: dict[str, Any], *factors: float) -> dict[str, Any]:
    given = torch.tensor(factors, dtype=FP32, device=arguments["page_table"].device)
    return {**arguments, "threshold_scale_factor": given.expand(len(arguments["page_table"])).contiguous()}


def kept_keys(logits: torch.Tensor, factor: float) -> tuple[list[int], int]:
    """The keys that a group of heads attends to in decode, by a loop over blocks, and the number of those skipped."""
    length = logits.shape[1]
    blocks = [list(range(a, min(a + 64, length))) for a in range(0, length, 64)]
    always = {0, len(blocks) - 1, max(len(blocks) - 2, 0)}
    reach = [max(float(head[i]) for block in always for i in blocks[block]) for head in logits]
    log_lambda = math.log(min(1.0, factor / length)) if factor > 0 else -INF
    skipped, kept = 0, []
    for block, keys in enumerate(blocks):
        below = [float(head[keys].max()) < most + log_lambda for head, most in zip(logits, reach, strict=True)]
        if block not in always and all(below):
            skipped += 1
        else:
            kept += keys
    return kept, skipped


def garbled_table(arguments: dict[str, Any]) -> torch.Tensor:
    """A page table, not contiguous, whose entries past a row name no page."""
    table = torch.nn.functional.pad(arguments["page_table"], (0, 9))
    entries = torch.arange(table.shape[1], device=table.device)
    garbage = torch.where(entries % 2 > 0, 2**31 - 1, -(2**31)).int()
    return torch.where(entries < arguments["n_pages"][:, None], table, garbage)[:, :-1]
