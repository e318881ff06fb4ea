"""The table of ``eval.lab.bench_kernels``: who does which operation, this project and its peers; and its rows.

To add a peer: a function that gets the `Step` and returns a call for each of its layers, and a line in `TABLE`. What
is not installed, or does not take the shape, raises there or at its first call and is reported. What a server does
once for all layers of a batch (FlashInfer's plan, FA3's schedule) is done beforehand and not timed; nor is the
translation of page ids into a peer's own numbering, which a selection could write at once.

Where this project has several kernels for an operation, each has a row of its own beside that of the operation, which
picks one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from eval.lab.kernels import kernel_attention, kernel_selection, kernel_votes
from eval.lab.kernels.harness import OURS, Implementation, Row, strongest
from eval.lab.kernels.kernel_inputs import WHOLE, Layer, Scoring, Shape, Step
from sglang_sparse_kernels.common.checks import use_reference
from sglang_sparse_kernels.common.launch import dependent_launch
from sglang_sparse_kernels.common.timing import Run
from sglang_sparse_kernels.page_score import cuda as score_cuda
from sglang_sparse_kernels.page_score import triton as score_triton
from sglang_sparse_kernels.page_topk import cuda as topk_cuda

DENSE = "dense_decode"
# What replaces dense attention, so that a ratio to it means something.
AGAINST_DENSE = (DENSE, "sparse_decode", WHOLE)
SHAPE_FIELDS = tuple(Shape(1, 1).facts())
QUALITY = ("relative_l2", "dense_l2", "recall", "agreement", "score_error")


def _calls(step: Step, method: Callable[[Step, Layer], torch.Tensor | None]) -> list[Run]:
    step.forget()
    return [partial(method, step, layer) for layer in step.layers]


def _ours(op: str, method: Callable[[Step, Layer], torch.Tensor | None]) -> Implementation[Step]:
    return Implementation(op, OURS, lambda step: _calls(step, method), peer=False)


def _by_cuda(method: Callable[[Step, Layer, Scoring], torch.Tensor], step: Step) -> list[Run]:
    first = step.layers[0]
    if not score_cuda.takes(first.q, first.summary):
        raise ValueError("page_score's CUDA kernel does not take these inputs here")
    return _calls(step, lambda step, layer: method(step, layer, score_cuda.page_score))


def _by_triton(step: Step) -> list[Run]:
    if use_reference(step.layers[0].q):
        raise ValueError("Triton's kernels do not run here")
    return _calls(step, lambda step, layer: step.score(layer, score_triton.page_score))


def _by_votes(op: str, calls: Callable[[str, Step], list[Run]]) -> list[Implementation[Step]]:
    names = (kernel_votes.VOTES, kernel_votes.CENTROIDS)
    return [Implementation(op, name, partial(calls, name), peer=False) for name in names]


def _by_topk_shape(cluster: int, threads: int, step: Step) -> list[Run]:
    scores = step.view.scores
    if not topk_cuda.takes(scores) or (cluster > 1 and not dependent_launch(scores.device)):
        raise ValueError(f"page_topk's CUDA kernel does not take these inputs here, or no clusters of {cluster}")
    shape = topk_cuda.shape_of(step.view.max_select, 0, 0, cluster, threads)
    selecting = partial(topk_cuda.page_topk, shape=shape)
    return _calls(step, lambda step, layer: step.whole(layer, selecting=selecting))


def topk_table(shapes: Sequence[tuple[int, int]]) -> list[Implementation[Step]]:
    """The chain with page_topk's CUDA kernel launched in given ways, by names such as ``cuda-2x512``.

    Args:
        shapes: blocks of a cluster, and threads of a block.
    """
    return [
        Implementation(WHOLE, f"cuda-{cluster}x{threads}", partial(_by_topk_shape, cluster, threads), peer=False)
        for cluster, threads in shapes
    ]


_DENSE, _FOLDED = kernel_attention.dense_calls, kernel_attention.folded_calls
TABLE = (
    Implementation("dense_decode", "fa3", partial(kernel_attention.fa3, _DENSE, False)),
    Implementation("dense_decode", "fa3-scheduled", partial(kernel_attention.fa3, _DENSE, True)),
    Implementation("dense_decode", "flashinfer", partial(kernel_attention.flashinfer, _DENSE, torch.bfloat16)),
    Implementation(
        "dense_decode",
        "flashinfer-fp8",
        partial(kernel_attention.flashinfer, _DENSE, torch.float8_e4m3fn),
        kv_dtype=torch.float8_e4m3fn,
    ),
    _ours("page_summary", Step.summarise),
    Implementation("page_summary", kernel_votes.CENTROIDS, kernel_votes.update_calls, peer=False),
    _ours("page_score", Step.score),
    Implementation("page_score", "cuda", partial(_by_cuda, Step.score), peer=False),
    Implementation("page_score", "triton", _by_triton, peer=False),
    *_by_votes("page_score", kernel_votes.vote_calls),
    _ours("page_topk", Step.select),
    Implementation("page_topk", "torch", kernel_selection.torch_topk),
    Implementation("page_topk", "flashinfer", kernel_selection.flashinfer_topk),
    Implementation("page_topk", "sgl_kernel", kernel_selection.sgl_kernel_topk),
    Implementation("page_topk", "deepseek-v4", kernel_selection.deepseek_v4_topk),
    _ours("sparse_decode", Step.attend),
    Implementation("sparse_decode", "fa3", partial(kernel_attention.fa3, _FOLDED, False)),
    Implementation("sparse_decode", "fa3-scheduled", partial(kernel_attention.fa3, _FOLDED, True)),
    Implementation("sparse_decode", "flashinfer", partial(kernel_attention.flashinfer, _FOLDED, torch.bfloat16)),
    Implementation("sparse_decode", "minimax", kernel_attention.minimax),
    _ours(WHOLE, Step.whole),
    Implementation(WHOLE, "cuda", partial(_by_cuda, Step.whole), peer=False),
    *_by_votes(WHOLE, kernel_votes.chain_calls),
)


def identity(shape: Shape, one: Implementation) -> Row:
    """Return the fields that identify a row."""
    facts = shape.facts()
    settings = f"{shape.name}/p{shape.page_size}/r{shape.active_ratio}/{facts['summary_dtype']}"
    return {"id": f"kernels/{settings}/{one.op}/{one.name}", **one.facts(), **facts}


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows of one shape with ``dense_ratio``: the time of the strongest dense peer over theirs.

    The strongest is the fastest over the same bfloat16 cache; dense attention over an fp8 cache stands beside.
    """
    dense = strongest(row for row in rows if row["op"] == DENSE)
    if dense is None:
        return list(rows)
    return [
        {**row, "dense_ratio": dense["us"] / row["us"]} if "us" in row and row["op"] in AGAINST_DENSE else row
        for row in rows
    ]


def summarise(items: Sequence[Mapping[str, Any]]) -> list[Row]:
    """For each shape and operation what a server of this project runs, and who it is compared with.

    Args:
        items: rows of kind ``item``.

    Returns:
        Rows with the settings of the shape, ``op``, ``implementation``, its figures and quality; ``dense``,
        ``dense_us`` and ``dense_ratio`` for the strongest dense peer, and ``best_peer``, ``best_peer_us`` and
        ``best_peer_ratio`` for the fastest peer at the same operation. For dense attention the implementation is the
        strongest peer itself. What this project could not do is left out.
    """
    found = []
    for shape in dict.fromkeys(row["shape"] for row in items):
        rows = [dict(row) for row in items if row["shape"] == shape]
        dense = strongest(row for row in rows if row["op"] == DENSE)
        for op in dict.fromkeys(row["op"] for row in rows):
            best = strongest(row for row in rows if row["op"] == op and (op == DENSE or row["implementation"] == OURS))
            peer = strongest(row for row in rows if row["op"] == op and op != DENSE and row["peer"])
            if best is None:
                continue
            kept = ("op", "implementation", *SHAPE_FIELDS, "us", "spread", "gbps", "dense_ratio", *QUALITY)
            line = {name: best[name] for name in kept if name in best}
            if dense is not None:
                line |= {"dense": dense["implementation"], "dense_us": dense["us"]}
            if peer is not None:
                line |= {"best_peer": peer["implementation"], "best_peer_us": peer["us"]}
                line["best_peer_ratio"] = peer["us"] / best["us"]
            found.append(line)
    return found
