"""The consumers of the Gluon kernel of sparse MLA decode attention, see ``hopper``.

Each has half of the dimensions of the output, and every other tile of a segment is its own, the first one the first
consumer's. A half of the dimensions of a tile has the place ``2 * owner + half`` in shared memory, and its barriers.
"""

# Type checkers know neither the launch options of a kernel nor its compile-time values.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .segments import TILE_HEADS, TILE_TOKENS

LATENT_DIM, ROPE_DIM = 512, 64
TILE = gl.constexpr(TILE_HEADS)
TOKENS = gl.constexpr(TILE_TOKENS)
LATENT = gl.constexpr(LATENT_DIM)
HALF_LATENT = gl.constexpr(LATENT_DIM // 2)
ROPE = gl.constexpr(ROPE_DIM)
SMEM = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_LOGITS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
_OUTPUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))
_BY_HEAD = gl.constexpr(gl.SliceLayout(1, _LOGITS.value))
_BY_TOKEN = gl.constexpr(gl.SliceLayout(0, _LOGITS.value))
_OUT_HEADS = gl.constexpr(gl.SliceLayout(1, _OUTPUT.value))
_OUT_DIMS = gl.constexpr(gl.SliceLayout(0, _OUTPUT.value))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, _OUTPUT.value, 2))
_LOADED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def tile_blocks(indices_ptr, tile, count, last_slot, BLOCK: gl.constexpr):
    """The first slots of a tile's blocks, and how many of each one's tokens count, from its first on.

    Blocks past the count are the last one again, of which nothing counts.
    """
    BLOCKS: gl.constexpr = TOKENS // BLOCK
    slots = ()
    kept = ()
    for i in gl.static_range(BLOCKS):
        position = tile * BLOCKS + i
        slot = gl.load(indices_ptr + gl.minimum(position, count - 1)) * BLOCK
        written = gl.where((slot <= last_slot) & (last_slot < slot + BLOCK), last_slot + 1 - slot, BLOCK)
        slots = slots + (slot,)  # noqa: RUF005
        kept = kept + (gl.where(position < count, written, 0),)  # noqa: RUF005
    return slots, kept


@gluon.jit
def _zero():
    """Zero, which the compiler takes for another number each time.

    Descriptors of places in shared memory that stay the same would all be computed before the loop, which would be more
    than there are registers for.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def total_of(numbers):
    """The sum of a tuple."""
    total = numbers[0]
    for i in gl.static_range(1, len(numbers)):
        total += numbers[i]
    return total


@gluon.jit
def _decay(maximum, new_maximum):
    """What earlier weights shrink by, and the new maxima for weights: those of heads without any token are 0."""
    # -inf - -inf would be NaN.
    finite = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    return gl.exp2(maximum - finite), finite


@gluon.jit
def _shrink(output, decay):
    return output * gl.convert_layout(decay, _OUT_HEADS)[:, None]


@gluon.jit
def _hide(logits, kept, BLOCK: gl.constexpr):
    """-inf at the tokens that do not count."""
    tokens = gl.arange(0, TOKENS, _BY_TOKEN)
    for i in gl.static_range(len(kept)):
        hidden = (tokens >= i * BLOCK + kept[i]) & (tokens < (i + 1) * BLOCK)
        logits = gl.where(hidden[None, :], float("-inf"), logits)
    return logits


@gluon.jit
def _take_weights(shared, barriers, state, phase, zero, HALF: gl.constexpr):
    """Start the product of the other consumer's weights with a half of the values of its tile."""
    _, _, keys, _, weights, maxima, _ = shared
    _, ready, _, given, _ = barriers
    maximum, total, output = state
    mbarrier.wait(given.index(1 - HALF), phase)
    mbarrier.wait(ready.index(2 * (1 - HALF) + HALF), phase)
    new_maximum = maxima.load(_BY_HEAD)
    decay, _ = _decay(maximum, new_maximum)
    values = keys.index(2 * (1 - HALF) + HALF + zero)
    product = warpgroup_mma(weights.index(zero), values, _shrink(output, decay), is_async=True)
    return new_maximum, total * decay, product


@gluon.jit
def _own_tile(
    shared,
    barriers,
    state,
    phase,
    other_phase,
    kept,
    scale,
    BLOCK: gl.constexpr,
    HALF: gl.constexpr,
    AFTER: gl.constexpr,
):
    """A tile of this consumer's own; with ``AFTER`` the other one's tile before it as well, once its weights are there.

    What the tensor cores have to do for the own tile's logits fills the time in which the other one exponentiates.
    """
    query, query_rope, keys, keys_rope, weights, maxima, _ = shared
    _, ready, free, given, _ = barriers
    maximum, total, output = state
    # Of nothing; where the output is used, the compiler would wait for the logits too, as it has lost track by then.
    output = warpgroup_mma_wait(0, deps=(output,))
    zero = _zero()
    mbarrier.wait(ready.index(2 * HALF + HALF), phase)
    nothing = gl.zeros([TILE, TOKENS], gl.float32, _LOGITS)
    block = keys.index(2 * HALF + HALF + zero).permute((1, 0))
    logits = warpgroup_mma(query.index(HALF + zero), block, nothing, use_acc=False, is_async=True)
    block = keys_rope.index(HALF + zero).permute((1, 0))
    logits = warpgroup_mma(query_rope.index(zero), block, logits, is_async=True)
    if AFTER:
        state = (maximum, total, output)
        maximum, total, product = _take_weights(shared, barriers, state, other_phase, zero, HALF)
    mbarrier.wait(ready.index(2 * HALF + 1 - HALF), phase)
    block = keys.index(2 * HALF + 1 - HALF + zero).permute((1, 0))
    logits = warpgroup_mma(query.index(1 - HALF + zero), block, logits, is_async=True)
    if AFTER:
        output = warpgroup_mma_wait(1, deps=(product,))
        mbarrier.arrive(free.index(2 * (1 - HALF) + HALF), count=1)
    logits = warpgroup_mma_wait(0, deps=(logits,))
    if total_of(kept) < TOKENS:
        logits = _hide(logits, kept, BLOCK)
    new_maximum = gl.maximum(maximum, gl.max(logits, axis=1) * scale)
    decay, finite = _decay(maximum, new_maximum)
    exponentials = gl.exp2(logits * scale - finite[:, None])
    total = total * decay + gl.sum(exponentials, axis=1)
    own_weights = exponentials.to(weights.dtype)
    weights.index(0).store(own_weights)
    maxima.store(new_maximum)
    fence_async_shared()
    mbarrier.arrive(given.index(HALF), count=1)
    own_weights = gl.convert_layout(own_weights, _WEIGHTS)
    product = warpgroup_mma(own_weights, keys.index(2 * HALF + HALF + zero), _shrink(output, decay), is_async=True)
    output, _ = warpgroup_mma_wait(0, deps=(product, own_weights))
    mbarrier.arrive(free.index(2 * HALF + HALF), count=1)
    return new_maximum, total, output


@gluon.jit
def _other_tile(shared, barriers, state, phase, HALF: gl.constexpr):
    """The other consumer's tile, where no own one follows."""
    _, _, free, _, _ = barriers
    maximum, total, product = _take_weights(shared, barriers, state, phase, _zero(), HALF)
    output = warpgroup_mma_wait(0, deps=(product,))
    mbarrier.arrive(free.index(2 * (1 - HALF) + HALF), count=1)
    return maximum, total, output


@gluon.jit
def _load_query(shared, q_nope_ptr, q_rope_ptr, heads_left, nope_stride_head, rope_stride_head, HALF: gl.constexpr):
    """Half of the query's latent dimensions, and for the first consumer the rotated ones; 0 for missing heads."""
    query, query_rope, _, _, _, _, _ = shared
    heads = gl.arange(0, TILE, gl.SliceLayout(1, _LOADED))
    members = (heads < heads_left)[:, None]
    dims = HALF * HALF_LATENT + gl.arange(0, HALF_LATENT, gl.SliceLayout(0, _LOADED))
    latent = gl.load(q_nope_ptr + heads[:, None] * nope_stride_head + dims[None, :], mask=members, other=0.0)
    query.index(HALF).store(latent)
    if HALF == 0:
        dims = gl.arange(0, ROPE, gl.SliceLayout(0, _LOADED))
        rotated = gl.load(q_rope_ptr + heads[:, None] * rope_stride_head + dims[None, :], mask=members, other=0.0)
        query_rope.index(0).store(rotated)


@gluon.jit
def _attend(
    shared,
    barriers,
    indices_ptr,
    count,
    last_slot,
    first,
    last,
    uses,
    scale,
    BLOCK: gl.constexpr,
    VALUES_FIRST: gl.constexpr,
    HALF: gl.constexpr,
):
    """A segment's tiles: row maxima (base 2), sums of the own tiles' weights and half of the unnormalised output."""
    maximum = gl.full([TILE], float("-inf"), gl.float32, _BY_HEAD)
    total = gl.zeros([TILE], gl.float32, _BY_HEAD)
    output = gl.zeros([TILE, HALF_LATENT], gl.float32, _OUTPUT)
    state = (maximum, total, output)
    tiles = last - first
    if HALF == 0:
        _, kept = tile_blocks(indices_ptr, first, count, last_slot, BLOCK)
        state = _own_tile(shared, barriers, state, uses[0] & 1, 0, kept, scale, BLOCK, HALF, False)
    for i in range(1 - HALF, (tiles + 1 - HALF) // 2):
        _, kept = tile_blocks(indices_ptr, first + 2 * i + HALF, count, last_slot, BLOCK)
        phase = (uses[HALF] + i) & 1
        other_phase = (uses[1 - HALF] + i - 1 + HALF) & 1
        if VALUES_FIRST:
            state = _other_tile(shared, barriers, state, other_phase, HALF)
            state = _own_tile(shared, barriers, state, phase, 0, kept, scale, BLOCK, HALF, False)
        else:
            state = _own_tile(shared, barriers, state, phase, other_phase, kept, scale, BLOCK, HALF, True)
    if tiles % 2 == HALF:
        state = _other_tile(shared, barriers, state, (uses[1 - HALF] + (tiles - 1) // 2) & 1, HALF)
    return state


@gluon.jit
def _write(
    shared,
    barriers,
    state,
    segment,
    out_ptr,
    partial_ptr,
    lse_ptr,
    place,
    heads_left,
    kv_scale,
    whole,
    HALF: gl.constexpr,
):
    """Normalise half of a segment's output and store it: in ``out_ptr`` where the segment is a row's only one."""
    _, _, _, _, _, _, totals = shared
    _, _, _, _, done = barriers
    maximum, total, output = state
    totals.index(HALF).store(total)
    mbarrier.arrive(done, count=1)
    mbarrier.wait(done, segment & 1)
    total += totals.index(1 - HALF).load(_BY_HEAD)
    output = _shrink(output, kv_scale / gl.where(total == 0.0, 1.0, total)).to(out_ptr.dtype.element_ty)
    heads = gl.arange(0, TILE, _OUT_HEADS)
    dims = HALF * HALF_LATENT + gl.arange(0, HALF_LATENT, _OUT_DIMS)
    offsets = heads[:, None] * LATENT + dims[None, :]
    members = (heads < heads_left)[:, None]
    gl.store(gl.where(whole, out_ptr, partial_ptr + place * LATENT) + offsets, output, mask=members)
    if HALF == 0:
        logarithms = maximum + gl.log2(total)
        heads = gl.arange(0, TILE, _BY_HEAD)
        gl.store(lse_ptr + place + heads, logarithms, mask=(heads < heads_left) & ~whole)


@gluon.jit
def consume(
    shared,
    barriers,
    work,
    inputs,
    outputs,
    strides,
    scales,
    HEADS: gl.constexpr,
    BLOCK: gl.constexpr,
    VALUES_FIRST: gl.constexpr,
    HALF: gl.constexpr,
):
    """Half of the output's dimensions of every segment of a program, by four warps."""
    q_ready, _, _, _, _ = barriers
    first_row, last_row, row_start, start, end = work
    q_nope_ptr, q_rope_ptr, indices_ptr, counts_ptr, last_slots_ptr = inputs
    out_ptr, partial_ptr, lse_ptr = outputs
    nope_stride_row, nope_stride_head, rope_stride_row, rope_stride_head, max_blocks = strides
    scale, kv_scale = scales
    first_head = gl.program_id(0) * TILE
    heads_left = HEADS - first_head
    q_nope_ptr += first_head.to(gl.int64) * nope_stride_head
    q_rope_ptr += first_head.to(gl.int64) * rope_stride_head
    uses = (gl.to_tensor(0), gl.to_tensor(0))
    segment = gl.to_tensor(0)
    for row in range(first_row, last_row + 1):
        count = gl.load(counts_ptr + row)
        last_slot = gl.load(last_slots_ptr + row).to(gl.int32)
        tiles = (count * BLOCK + TOKENS - 1) // TOKENS
        first = gl.maximum(start - row_start, 0)
        last = gl.minimum(end - row_start, tiles)
        if first < last:
            wide_row = gl.to_tensor(row).to(gl.int64)
            nope_ptr = q_nope_ptr + wide_row * nope_stride_row
            rope_ptr = q_rope_ptr + wide_row * rope_stride_row
            _load_query(shared, nope_ptr, rope_ptr, heads_left, nope_stride_head, rope_stride_head, HALF)
            fence_async_shared()
            mbarrier.arrive(q_ready, count=1)
            mbarrier.wait(q_ready, segment & 1)
            blocks_ptr = indices_ptr + wide_row * max_blocks
            state = _attend(
                *(shared, barriers, blocks_ptr, count, last_slot, first, last, uses, scale), BLOCK, VALUES_FIRST, HALF
            )
            whole = (first == 0) & (last == tiles)
            # A program's first segment may be of a row that began before it, all others begin with their rows.
            place = (2 * gl.program_id(1) + gl.where(row_start > start, 1, 0)).to(gl.int64) * HEADS + first_head
            head_ptr = out_ptr + (wide_row * HEADS + first_head) * LATENT
            _write(
                *(shared, barriers, state, segment, head_ptr, partial_ptr, lse_ptr, place, heads_left, kv_scale, whole),
                HALF,
            )
            uses = (uses[0] + (last - first + 1) // 2, uses[1] + (last - first) // 2)
            segment += 1
        row_start += tiles
