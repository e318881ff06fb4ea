"""What the tests of anchor attention share: its two implementations, and a pass in pieces."""

from typing import Any

import torch

from sglang_sparse_kernels.anchor_prefill import anchor_prefill, cases, make_plan, reference

BLOCK, STEP = 16, 2


def run_reference(arguments: dict[str, Any], stats: torch.Tensor | None = None) -> torch.Tensor:
    """The reference in float32, so that only the kernel under test rounds."""
    q = arguments["q"].float()
    out = torch.full((*q.shape[:2], arguments["v_cache"].shape[2]), float("nan"), device=q.device)
    return reference.anchor_prefill(**{"stats": stats, **arguments, "q": q}, out=out)


def run_triton(arguments: dict[str, Any]) -> torch.Tensor:
    return anchor_prefill(**arguments)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()


def row_slots(arguments: dict[str, Any], row: int, length: int) -> torch.Tensor:
    return cases.row_slots(arguments["page_table"], row, length, arguments["page_size"])


def chunked(arguments: dict[str, Any], chunks: list[int], run: Any, prefix: int = 0) -> torch.Tensor:
    """A one-row pass in pieces."""
    outs, first = [], 0
    for size in chunks:
        pass_plan = make_plan([prefix + first], [size], BLOCK, STEP, arguments["q"].device)
        outs.append(run({**arguments, "q": arguments["q"][first : first + size], "plan": pass_plan}))
        first += size
    return torch.cat(outs)
