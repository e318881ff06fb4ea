"""What the tests of anchor attention share: its two implementations, and a pass in pieces."""

from typing import Any

import torch

from sglang_sparse_kernels.anchor_prefill import GroupMeans, anchor_prefill, cases, make_plan, reference

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


def empty_means(arguments: dict[str, Any], step: int, run: Any) -> GroupMeans:
    """For one row, in the dtype that an implementation runs in."""
    q = arguments["q"]
    return GroupMeans.allocate(step, *q.shape[1:], torch.float32 if run is run_reference else q.dtype, q.device)


def chunked(arguments: dict[str, Any], chunks: list[int], run: Any, prefix: int = 0) -> torch.Tensor:
    """A one-row pass in pieces, of which those within a group hand on its means."""
    outs, start, means = [], prefix, {0: empty_means(arguments, STEP, run)}
    for size, q in zip(chunks, arguments["q"].split(chunks), strict=True):
        carried = start - max(prefix, start // (BLOCK * STEP) * BLOCK * STEP)
        plan = make_plan([start], [size], BLOCK, STEP, q.device, carried=[carried])
        outs.append(run({**arguments, "q": q, "plan": plan, "means": means}))
        start += size
    return torch.cat(outs)
