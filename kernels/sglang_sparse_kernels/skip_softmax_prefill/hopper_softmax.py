"""The online softmax of half a query tile in the Gluon kernel of Skip-Softmax prefill for Hopper, by four warps.

The state of a half is ``[half]`` maxima, ``[half]`` sums of weights and ``[half, v_dim]`` sums of values. Maxima are
products of query and key; ``scale`` makes them exponents of 2.
"""

# Type checkers do not know a kernel's compile-time values.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportAssignmentType=false, reportReturnType=false

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from .plan import BLOCK_KEYS, TILE_QUERIES

HALF = gl.constexpr(TILE_QUERIES // 2)
KEYS = gl.constexpr(BLOCK_KEYS)
_NAN = gl.constexpr(tl.PropagateNan.ALL)
LOGITS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
ROWS = gl.constexpr(gl.SliceLayout(1, LOGITS.value))
VOTES = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))
# All four elements in every thread.
_EVERYWHERE = gl.constexpr(gl.DistributedLinearLayout([[1], [2]], [[0]] * 5, [[0]] * 2, [], [4]))


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=_NAN)


@gluon.jit
def vote(levels, votes):
    """Write down the largest of ``[half, 4]`` in each warp."""
    # By warp, register, and the lanes of a warp, as the accumulators of wgmma lie.
    parts = gl.max(gl.reshape(levels, [4, 2, 8, 4]), axis=1)
    votes.store(gl.max(gl.reshape(parts, [4, 32]), axis=1))


@gluon.jit
def highest(votes):
    """The largest of all warps, which have to be waited for."""
    return gl.max(votes.load(_EVERYWHERE), axis=0)


@gluon.jit
def hide(logits, seen):
    """-inf where row ``m`` of ``[half, keys]`` does not see a key, being the one ``seen + m`` or later."""
    # Keys as they lie in threads: what tells the keys of a thread apart then needs no register.
    by_thread = gl.reshape(logits, [HALF, 8, 4, 2])
    lanes: gl.constexpr = by_thread.type.layout
    eights = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, lanes))))[None, :, None, None]
    twos = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, lanes))))[None, None, :, None]
    ones = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, lanes))))[None, None, None, :]
    rows = gl.arange(0, HALF, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, lanes))))[:, None, None, None]
    hidden = seen + rows - 2 * twos <= 8 * eights + ones
    return gl.convert_layout(gl.reshape(gl.where(hidden, float("-inf"), by_thread), [HALF, KEYS]), LOGITS)


@gluon.jit
def levels_of(logits, state, gap, first, count):
    """Return each thread's largest logit of a query, and its level against the query's largest logit before.

    Level 0 is far below it, 1 near it, 2 above it. Threads can decide on a block before they exchange logits. ``first``
    of ``count`` queries come before.
    """
    largest = gl.reduce(gl.reduce(gl.reshape(logits, [HALF, 8, 4, 2]), 3, _larger), 1, _larger)
    by_thread: gl.constexpr = gl.SliceLayout(1, largest.type.layout)
    maximum = gl.convert_layout(state[0], by_thread)[:, None]
    # NaN is neither far below nor at most anything.
    level = gl.where(largest < maximum + gap, 0, gl.where(largest <= maximum, 1, 2))
    members = gl.arange(0, HALF, by_thread) < count - first
    return largest, gl.where(members[:, None], level, 0)


@gluon.jit
def _finite(maximum, scale):
    """Return the finite number to subtract from logits."""
    # Infinite keys may leave a query without any finite logit, and -inf - -inf would be NaN.
    return gl.where(maximum == float("-inf"), 0.0, maximum) * scale


@gluon.jit
def raise_maxima(state, largest, scale):
    """The sums of the online softmax, as they are to the maxima that are the largest from now on."""
    maximum, total, output = state
    new_maximum = _larger(maximum, gl.convert_layout(gl.reduce(largest, 1, _larger), ROWS))
    # A row with an infinite key is NaN, as one with a broken key: such a row keeps all blocks from then on.
    new_maximum = gl.where(new_maximum < float("inf"), new_maximum, float("nan"))
    decay = gl.exp2(maximum * scale - _finite(new_maximum, scale))
    total *= decay
    output = output * gl.convert_layout(decay, gl.SliceLayout(1, output.type.layout))[:, None]
    return new_maximum, total, output


@gluon.jit
def weigh(logits, state, scale):
    """The weights of a block, and the state with their sum."""
    maximum, total, output = state
    weights = gl.exp2(logits * scale - _finite(maximum, scale)[:, None])
    total += gl.sum(weights, axis=1)
    return weights, (maximum, total, output)


@gluon.jit
def add(weights, state, values):
    """Start the product of a block's weights with its values; also what must stay as it is until that has ended."""
    layout: gl.constexpr = gl.DotOperandLayout(0, state[2].type.layout, 2)
    weights = gl.convert_layout(weights.to(values.dtype), layout)
    return warpgroup_mma(weights, values, state[2], is_async=True), weights
