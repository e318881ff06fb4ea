"""Loads of the Gluon kernel of Skip-Softmax prefill for Hopper: one warp brings queries, keys and values by TMA."""

# Type checkers do not know a kernel's compile-time values.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .plan import BLOCK_KEYS, TILE_QUERIES

# Elements of a row that one TMA copy brings: what 128 bytes, the widest swizzle of shared memory, hold.
SLAB = gl.constexpr(64)
SMEM = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_TILE = gl.constexpr(TILE_QUERIES)
_HALF = gl.constexpr(TILE_QUERIES // 2)
_KEYS = gl.constexpr(BLOCK_KEYS)
# Rows of a piece of values that are cleared at a time.
_PIECE = gl.constexpr(8)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the place of the block after a stage's, and the phase of its barriers."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _load_slots(table_ptr, block, last_page, PAGE: gl.constexpr):
    """The first slots of a block's pages; those past the row's last page are that one again."""
    PAGES: gl.constexpr = _KEYS // PAGE
    slots = (gl.load(table_ptr + gl.minimum(block * PAGES, last_page)) * PAGE,)
    for page in gl.static_range(1, PAGES):
        slots = slots + (gl.load(table_ptr + gl.minimum(block * PAGES + page, last_page)) * PAGE,)  # noqa: RUF005
    return slots


@gluon.jit
def _copy(desc, slots, column, ready, slabs, stage, PAGE: gl.constexpr, DIM: gl.constexpr):
    """Start the copies of a block's pages."""
    PAGES: gl.constexpr = _KEYS // PAGE
    for page in gl.static_range(PAGES):
        for slab in gl.static_range(DIM // SLAB):
            to = slabs.index((stage * (DIM // SLAB) + slab) * PAGES + page)
            tma.async_copy_global_to_shared(desc, [slots[page], column + slab * SLAB], ready, to)


@gluon.jit
def _clear(values, stage, first, DIM: gl.constexpr):
    """Zero a block's values from row ``first`` on: slots that were never written may hold NaN."""
    SLABS: gl.constexpr = DIM // SLAB
    PIECES: gl.constexpr = _KEYS // _PIECE
    pieces = values._reinterpret(values.dtype, [values.shape[0] * SLABS * PIECES, _PIECE, SLAB], SMEM)
    lanes: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, 1], [1, 0])
    rows = gl.arange(0, _PIECE, gl.SliceLayout(1, lanes))
    for i in range(first // _PIECE, PIECES):
        for slab in gl.static_range(SLABS):
            piece = pieces.index((stage * SLABS + slab) * PIECES + i)
            kept = (i * _PIECE + rows < first)[:, None]
            piece.store(gl.where(kept, piece.load(lanes), 0.0))


@gluon.jit
def produce(descs, shared, table_ptr, end, first_query, columns, PAGE: gl.constexpr):
    """Bring the queries, and block after block of keys and values, by one warp."""
    q_desc, k_desc, v_desc = descs
    queries, keys, values, keys_ready, values_ready, free, q_ready, _votes = shared
    q_column, q_step, k_column, v_column = columns
    STAGES: gl.constexpr = keys.shape[0]
    DIM: gl.constexpr = keys.shape[2]
    V_DIM: gl.constexpr = values.shape[2]
    element: gl.constexpr = keys.dtype
    q_slabs = queries._reinterpret(element, [4 * (DIM // SLAB), _HALF, SLAB], SMEM)
    k_slabs = keys._reinterpret(element, [STAGES * (DIM // SLAB) * (_KEYS // PAGE), PAGE, SLAB], SMEM)
    v_slabs = values._reinterpret(element, [STAGES * (V_DIM // SLAB) * (_KEYS // PAGE), PAGE, SLAB], SMEM)
    mbarrier.expect(q_ready, 2 * _TILE * DIM * 2)
    for part in gl.static_range(4):
        for slab in gl.static_range(DIM // SLAB):
            to = q_slabs.index(part * (DIM // SLAB) + slab)
            place = [first_query + part % 2 * _HALF, q_column + part // 2 * q_step + slab * SLAB]
            tma.async_copy_global_to_shared(q_desc, place, q_ready, to)
    blocks = (end + _KEYS - 1) // _KEYS
    last_page = (end - 1) // PAGE
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for i in range(blocks):
        # Before anything is waited for.
        block = gl.where(i == 0, 0, blocks - i)
        slots = _load_slots(table_ptr, block, last_page, PAGE)
        # Values of skipped blocks are waited for by nobody else, and have to be there before others take their place.
        mbarrier.wait(values_ready.index(stage), phase ^ 1, pred=i >= STAGES)
        mbarrier.wait(free.index(stage), phase ^ 1)
        k_ready = keys_ready.index(stage)
        mbarrier.expect(k_ready, _KEYS * DIM * 2)
        _copy(k_desc, slots, k_column, k_ready, k_slabs, stage, PAGE, DIM)
        rows = end - block * _KEYS
        v_ready = values_ready.index(gl.where(rows < _KEYS, STAGES, stage))
        mbarrier.expect(v_ready, _KEYS * V_DIM * 2)
        _copy(v_desc, slots, v_column, v_ready, v_slabs, stage, PAGE, V_DIM)
        if rows < _KEYS:
            # Only the row's last block is cut: the barrier behind the others is used once.
            mbarrier.wait(v_ready, 0)
            _clear(values, stage, rows, V_DIM)
            fence_async_shared()
            gl.barrier()
            mbarrier.arrive(values_ready.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    # Nor may they come when the next program has this memory.
    for i in range(blocks, blocks + STAGES):
        mbarrier.wait(values_ready.index(stage), phase ^ 1, pred=i >= STAGES)
        stage, phase = next_stage(stage, phase, STAGES)
