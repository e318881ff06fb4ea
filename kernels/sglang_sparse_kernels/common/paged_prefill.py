"""Shared parts of the Triton kernels of prefill attention: reads of a paged cache, and the online softmax."""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false, reportArgumentType=false

import triton
import triton.language as tl

from .flash_decode import load_sinks


@triton.jit
def load_slots(table_ptr, positions, end, PAGE: tl.constexpr):
    """Slots of one row's positions; positions from ``end`` on get any valid one."""
    page = tl.load(table_ptr + positions // PAGE, mask=positions < end, other=0)
    return page.to(tl.int64) * PAGE + positions % PAGE


@triton.jit
def load_rows(pointers, valid, dims, DIM: tl.constexpr):
    """Rows of ``DIM`` elements; those that are not valid, and what pads the dimension, are 0."""
    if dims.shape[0] == DIM:
        return tl.load(pointers, mask=valid[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=valid[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def softmax_step(query, logits, v_rows, valid, scale, maximum, total, output, V_DIM: tl.constexpr):
    """One step of the online softmax: the state of a tile of queries after some more keys.

    The maximum stays a product of query and key: one fused multiply-add then scales (to base 2) and subtracts.
    """
    v_dims = tl.arange(0, output.shape[1])
    new_maximum = tl.maximum(maximum, tl.max(logits, axis=1))
    # Infinite keys may leave a query without any finite logit, and -inf - -inf would be NaN.
    finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) * scale
    decay = tl.exp2(maximum * scale - finite)
    weights = tl.exp2(logits * scale - finite[:, None])
    values = load_rows(v_rows[:, None] + v_dims[None, :], valid, v_dims, V_DIM)
    total = total * decay + tl.sum(weights, axis=1)
    output = tl.dot(weights.to(query.dtype), values.to(query.dtype), output * decay[:, None], input_precision="ieee")
    return new_maximum, total, output


@triton.jit
def finish(scale, v_scale, sinks_ptr, head, maximum, total, output):
    """The output of a tile of queries of one head, which may have an attention sink, from their last state."""
    if sinks_ptr is not None:
        total += tl.exp2(load_sinks(sinks_ptr, head, True) - maximum * scale)
    return output * (v_scale / total)[:, None]
