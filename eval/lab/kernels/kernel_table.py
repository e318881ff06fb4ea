"""The table of ``eval.lab.bench_kernels``: who does which operation, this project and its peers.

To add a peer: a function that gets the `Step` and returns a call for each of its layers, and a line in `TABLE`. What
is not installed, or does not take the shape, raises there or at its first call and is reported. What a server does
once for all layers of a batch (FlashInfer's plan, FA3's schedule) is done beforehand and not timed; nor is the
translation of page ids into a peer's own numbering, which a selection could write at once.

Where this project has several kernels for an operation, each has a row of its own beside that of the operation, which
picks one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from tqdm import tqdm
from triton.errors import TritonError

from eval.lab.kernels import kernel_attention, kernel_selection, kernel_votes
from eval.lab.kernels.kernel_inputs import OPS, WHOLE, Layer, Scoring, Step
from eval.live.counters import EvaluationError
from sglang_sparse_kernels.common.checks import use_reference
from sglang_sparse_kernels.common.launch import dependent_launch
from sglang_sparse_kernels.common.timing import Run
from sglang_sparse_kernels.page_score import cuda as score_cuda
from sglang_sparse_kernels.page_score import triton as score_triton
from sglang_sparse_kernels.page_topk import cuda as topk_cuda

StepT = TypeVar("StepT")
# What a server of this project runs: the public entry of an operation, which picks the kernel.
OURS = "sglang_sparse"
# All that a library that is absent, too old, not made for a shape, or not able to build its kernels was seen to raise.
UNAVAILABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    TritonError,
    subprocess.SubprocessError,
)


@dataclass(frozen=True)
class Implementation(Generic[StepT]):
    """One way to do an operation.

    Attributes:
        op: which.
        name: `OURS`, that of one of this project's kernels for it, or the peer's.
        prepare: makes the calls, one a layer, from the inputs.
        peer: whether it is somebody else's.
        kv_dtype: element type of the KV cache that it reads.
    """

    op: str
    name: str
    prepare: Callable[[StepT], list[Run]]
    peer: bool = True
    kv_dtype: torch.dtype = torch.bfloat16


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


def chosen(
    ops: Sequence[str],
    peers: Sequence[str],
    table: Sequence[Implementation[StepT]] = TABLE,
    known_ops: Sequence[str] = OPS,
) -> list[Implementation[StepT]]:
    """What to measure: some operations, by this project and by some peers.

    Args:
        ops: of `known_ops`.
        peers: names of the table.
        table: all there is.
        known_ops: operations that the command has.

    Raises:
        EvaluationError: an operation or a peer is unknown, or nothing is left to measure.
    """
    known = list(dict.fromkeys(one.name for one in table if one.peer))
    for option, names, allowed in (("--ops", ops, known_ops), ("--peers", peers, known)):
        for name in names:
            if name not in allowed:
                raise EvaluationError(f"{option}: there is no {name!r}, there are {', '.join(allowed)}")
    found = [one for one in table if one.op in ops and (not one.peer or one.name in peers)]
    if not found:
        raise EvaluationError(f"none of the peers {', '.join(peers)} does {', '.join(ops)}")
    return found


def report_unavailable(command: str, what: str, error: BaseException, usable: Callable[[], bool]) -> str:
    """Say on stderr that an implementation is not there, and why.

    Args:
        command: that says it.
        what: is missing, such as "1x128k, page_topk: no flashinfer".
        error: of `UNAVAILABLE`.
        usable: whether the machine can go on.

    Returns:
        The reason.

    Raises:
        EvaluationError: the machine cannot go on.
    """
    why = reason(error)
    if not usable():
        raise EvaluationError(
            f"{what}: {why}; nothing can be measured after it in this process: leave it out with --peers"
        ) from error
    tqdm.write(f"{command}: {what}: {why}", file=sys.stderr)
    return why


def reason(error: BaseException) -> str:
    """Why an implementation is not there, on one line and without the paths of the machine."""
    first = next((line for line in str(error).splitlines() if line.strip()), "").strip()
    return re.sub(r"(?<![\w.:/])/(?:[^\s/:'\"]+/)+", "", ": ".join(filter(None, (type(error).__name__, first)))[:300])
