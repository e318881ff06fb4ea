// The blocks that a row's KV head attends to in a step, by a cluster of blocks of threads: lists what is visible,
// scores it by the KT cache and selects; see cuda.py for the method and the launch.
//
// Compile-time: CLUSTER (blocks of a cluster; 1 before Hopper), DIM (64 or 128), GROUP (query heads of a KV head, up to
// HEADS, the columns of a product), KIND (of the queries: BFLOAT16 or FLOAT16), CHOOSE (whether some dimensions do not
// count), HELD (candidates whose logits fit shared memory), THREADS (of a block, at least 256), RESIDENT (blocks that a
// multiprocessor is to run at once).
//
// A row of few candidates is its cluster's first block's alone. Of others the blocks hold consecutive parts; all take
// the same decisions from the same numbers, only read from one another, and none ends before all have read.
//
// A product's rows are candidates, its columns query heads. Its 16 dimensions are any that the query has in the same
// order: so four lanes hold a candidate's bounds as they were loaded, 16 bytes at a time.

#include "hopper.cuh"
#include "ampere.cuh"
#include "block.cuh"

#define BFLOAT16 0
#define TILE 16                      // candidates of a product
#define WARPS (THREADS / 32)
#define STEP (WARPS * TILE)          // candidates that all warps take at once
#define LOADS (DIM / 64)             // 16 bytes that a lane has of a candidate's maxima
#define COLUMN (DIM / 2 + 4)         // words between heads, so that they lie in different banks
#define LISTED 2048                  // candidates whose numbers fit shared memory
#define ALONE 1024                   // candidates of a row that one block takes
#define BINS 256
#define INFINITE __uint_as_float(0x7F800000u)
#define LARGEST 3.402823466e38f
#define ONE 4294967296.0f            // 2^32, what a weight of 1 counts as
#define LOW_BITS 20                  // of a thread's sum of weights, so that those of 4,096 threads fit a word

static_assert(HEADS == 8 && GROUP <= HEADS, "mma.sync has eight columns");
static_assert(THREADS * CLUSTER <= 4096, "sums of weights overflow");
#ifdef __CUDACC__
__device__ unsigned short to_float16(float number) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(number));
    return half;
}

// 16 candidates by 16 dimensions, times 16 dimensions by 8 heads.
__device__ void multiply(float (&sums)[4], const unsigned (&bounds)[4], uint2 query) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(bounds[0]), "r"(bounds[1]), "r"(bounds[2]), "r"(bounds[3]), "r"(query.x), "r"(query.y));
}
#endif

__device__ unsigned block_rank() { return blockIdx.x % CLUSTER; }

__device__ float of_query(unsigned bits) { return KIND == BFLOAT16 ? __uint_as_float(bits << 16) : of_float16(bits); }

// The blocks that a row and KV head may attend to, in ascending order, from `first` on.
struct List {
    const int *kept, *table;
    int n_kept, left_out, n_blocks, first;
    __device__ int page(int place) const {
        int position = first + place, logical = position + left_out;
        if (position < n_kept) logical = max(min(kept[position], n_blocks - 1), 0);
        return table[logical];
    }
};

struct Shared {
    float logits[HELD * GROUP];
    List list; // so that threads need not hold it
    uint4 query[HEADS * COLUMN / 4];        // float16, in the order of the products' dimensions
    uint4 upper[DIM / 16], lower[DIM / 16]; // bytes: of a dimension that counts with its maximum, or minimum, all ones
    int pages[LISTED];
    float magnitudes[DIM], factors[HEADS];
    unsigned maxima[HEADS], totals[2 * HEADS], range[2], histogram[BINS], taken[2];
    // What the blocks of a row have in common of these.
    struct {
        unsigned maxima[HEADS], totals[2 * HEADS], range[2], histogram[BINS];
    } common;
    unsigned warps[3][WARPS];
    unsigned bin, above, inside;
};

// All threads of the `blocks` that take a row come here before any of them goes on.
__device__ void meet(int blocks) {
    if (CLUSTER > 1 && blocks > 1) cluster_barrier();
    else __syncthreads();
}

__device__ unsigned sum_of(unsigned one, unsigned other) { return one + other; }
__device__ unsigned larger_of(unsigned one, unsigned other) { return max(one, other); }

// Combines what all blocks have at `own`; `common` is written where they are several. All threads call it.
template <typename Combine>
__device__ const unsigned* combined(const unsigned* own, unsigned* common, int count, int blocks, Combine combine) {
    meet(blocks);
    if (CLUSTER == 1 || blocks == 1) return own;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        unsigned number = load_from(0, own + i);
        for (int rank = 1; rank < blocks; rank++) number = combine(number, load_from(rank, own + i));
        common[i] = number;
    }
    __syncthreads();
    return common;
}

// Order of the keys is that of the numbers.
__device__ unsigned key_of(float number) {
    unsigned bits = __float_as_uint(number);
    return bits ^ ((int)bits < 0 ? 0xFFFFFFFFu : 0x80000000u);
}

__device__ float number_of(unsigned key) { return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xFFFFFFFFu)); }

__device__ int page_of(int position, const Shared& shared) {
    return position < LISTED ? shared.pages[position] : shared.list.page(position);
}

// Brings the group's queries into shared memory, multiplied by a power of two that lets float16 hold them, and what is
// chosen by them. All threads call it.
__device__ void prepare(const unsigned short* q, long long stride_head, int topr, float scale, Shared& shared) {
    int dim = threadIdx.x, warp = dim / 32, lane = dim % 32;
    float query[GROUP], sum = 0.0f, magnitude = 0.0f;
    unsigned largest = 0;
    if (dim < DIM) {
#pragma unroll
        for (int head = 0; head < GROUP; head++) {
            query[head] = of_query(q[head * stride_head + dim]);
            sum += query[head];
            magnitude += fabsf(query[head]);
            largest = max(largest, __float_as_uint(fabsf(query[head])));
        }
        shared.magnitudes[dim] = magnitude;
    }
    largest = __reduce_max_sync(ALL, largest);
    if (lane == 0) shared.warps[0][warp] = largest;
    __syncthreads();
    largest = __reduce_max_sync(ALL, lane < WARPS ? shared.warps[0][lane] : 0u);
    // The largest one is then 2^14 to 2^15.
    int exponent = max(min(14 - ((int)(largest >> 23) - 127), 126), -126);
    float unit = __uint_as_float((unsigned)(127 + exponent) << 23);
    if (dim < DIM) {
        bool counts = true;
        if (CHOOSE) {
            int before = 0;
            for (int i = 0; i < DIM; i++) {
                float other = shared.magnitudes[i];
                before += other > magnitude || other == magnitude && i < dim;
            }
            counts = before < topr;
        }
        unsigned short* halves = (unsigned short*)shared.query;
        int place = (dim / 4 * 2 + (dim % 2 ? 0 : 1)) * 2 + dim % 4 / 2;
#pragma unroll
        for (int head = 0; head < HEADS; head++)
            halves[head * COLUMN * 2 + place] = head < GROUP && counts ? to_float16(query[head % GROUP] * unit) : 0;
        ((unsigned char*)shared.upper)[dim] = counts && sum > 0.0f ? 0xFF : 0;
        ((unsigned char*)shared.lower)[dim] = counts && !(sum > 0.0f) ? 0xFF : 0;
    }
    if (dim < HEADS) {
        shared.maxima[dim] = key_of(-LARGEST);
        shared.totals[2 * dim] = shared.totals[2 * dim + 1] = 0;
        shared.factors[dim] = dim < GROUP ? scale / unit : 0.0f;
    }
    if (dim < 2) shared.range[dim] = shared.taken[dim] = 0;
    __syncthreads();
    if (!CHOOSE) return;
    // SparQ's temperature, of a head by a warp.
    if (warp < GROUP) {
        const unsigned char *upper = (const unsigned char*)shared.upper, *lower = (const unsigned char*)shared.lower;
        float whole = 0.0f, kept = 0.0f;
        for (int i = lane; i < DIM; i += 32) {
            float size = fabsf(of_query(q[warp * stride_head + i]));
            whole += size;
            if (upper[i] | lower[i]) kept += size;
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            whole += __uint_as_float(__shfl_xor_sync(ALL, __float_as_uint(whole), step));
            kept += __uint_as_float(__shfl_xor_sync(ALL, __float_as_uint(kept), step));
        }
        if (lane == 0 && kept > 0.0f) shared.factors[warp] *= sqrtf(whole / kept);
    }
    __syncthreads();
}

// What a lane has of two candidates of a product.
struct Bounds {
    uint4 upper[2][LOADS], lower[2][LOADS];
    // Those of the tile that begins at `first`, if there is one.
    __device__ void load_tile(int first, int count, const unsigned char* summary, int page_bytes,
                              const Shared& shared) {
        if (first >= count) return;
        int position = first + threadIdx.x % 32 / 4;
        summary += threadIdx.x % 4 * 16;
#pragma unroll
        for (int which = 0; which < 2; which++, position += TILE / 2) {
            // Page 0 is the pool's dummy page.
            int number = position < count ? page_of(position, shared) : 0;
            const unsigned char* page = summary + (long long)number * page_bytes;
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                upper[which][i] = load(page + 64 * i);
                lower[which][i] = load(page + DIM + 64 * i);
            }
        }
    }
};

__device__ unsigned word_of(const uint4& words, int i) { return ((const unsigned*)&words)[i]; }

// Products of two candidates' bounds with the lane's columns, before they are scaled.
__device__ void multiply_tile(const Bounds& bounds, const Shared& shared, float (&sums)[4]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = 0.0f;
#pragma unroll
    for (int load = 0; load < LOADS; load++) {
        uint4 is_upper = shared.upper[load * 4 + lane % 4], is_lower = shared.lower[load * 4 + lane % 4];
        const uint4* column = shared.query + (lane / 4 * COLUMN + load * 32 + lane % 4 * 8) / 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            unsigned operand[4];
#pragma unroll
            for (int which = 0; which < 2; which++) {
                unsigned mask = word_of(is_upper, i), other = CHOOSE ? word_of(is_lower, i) : ~mask;
                unsigned bytes =
                    word_of(bounds.upper[which][load], i) & mask | word_of(bounds.lower[which][load], i) & other;
                // A float8_e5m2 is the upper half of a float16.
                operand[which] = bytes & 0xFF00FF00u;
                operand[2 + which] = bytes << 8 & 0xFF00FF00u;
            }
            uint4 words = column[i / 2];
            uint2 query = {i % 2 ? words.z : words.x, i % 2 ? words.w : words.y};
            multiply(sums, operand, query);
        }
    }
}

// Logits (base 2) of all candidates, infinite in all heads for a broken block. `bounds` and `next` are those of the
// warp's first two tiles, which may still be on their way.
__device__ void score(int count, const unsigned char* summary, int page_bytes, Bounds& bounds, Bounds& next,
                      float* logits, Shared& shared) {
    int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
    for (int first = threadIdx.x / 32 * TILE; first < count; first += STEP) {
        float sums[4];
        multiply_tile(bounds, shared, sums);
        bounds = next;
        next.load_tile(first + 2 * STEP, count, summary, page_bytes, shared);
#pragma unroll
        for (int which = 0; which < 2; which++) {
            float numbers[2];
            bool finite = true;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                numbers[i] = sums[2 * which + i] * shared.factors[column + i];
                finite = finite && fabsf(numbers[i]) < INFINITE;
            }
            bool broken = (__ballot_sync(ALL, !finite) >> (lane & 28) & 15) != 0;
            int position = first + row + which * TILE / 2;
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (position < count && column + i < GROUP)
                    logits[(long long)position * GROUP + column + i] = broken ? INFINITE : numbers[i];
        }
    }
    __syncthreads();
}

// A candidate's logits, which lie at a multiple of their size.
__device__ void load_logits(const float* logits, float (&numbers)[GROUP]) {
#pragma unroll
    for (int head = 0; head < GROUP; head += 4)
        load_some<float4>(logits + head, GROUP - head, GROUP % 4 == 0, numbers + head);
}

// Keys of each head's highest logit.
__device__ const unsigned* look_up(int count, const float* logits, int blocks, Shared& shared) {
    unsigned highest[GROUP] = {};
    for (long long i = threadIdx.x; i < count; i += THREADS) {
        float numbers[GROUP];
        load_logits(logits + i * GROUP, numbers);
#pragma unroll
        for (int head = 0; head < GROUP; head++)
            if (numbers[head] < INFINITE) highest[head] = max(highest[head], key_of(numbers[head]));
    }
#pragma unroll
    for (int head = 0; head < GROUP; head++) {
        highest[head] = __reduce_max_sync(ALL, highest[head]);
        if (threadIdx.x % 32 == 0) atomicMax(&shared.maxima[head], highest[head]);
    }
    return combined(shared.maxima, shared.common.maxima, GROUP, blocks, larger_of);
}

// Each head's sum of weights, in two parts. In whole numbers, so that their order does not matter.
__device__ const unsigned* add_up(int count, const float* logits, const unsigned* maxima, int blocks, Shared& shared) {
    unsigned long long sums[GROUP] = {};
    for (long long i = threadIdx.x; i < count; i += THREADS) {
        float numbers[GROUP];
        load_logits(logits + i * GROUP, numbers);
#pragma unroll
        for (int head = 0; head < GROUP; head++)
            if (numbers[head] < INFINITE)
                sums[head] += (unsigned long long)(exp2_of(numbers[head] - number_of(maxima[head])) * ONE);
    }
#pragma unroll
    for (int head = 0; head < GROUP; head++) {
        unsigned low = __reduce_add_sync(ALL, (unsigned)sums[head] & (1u << LOW_BITS) - 1);
        unsigned high = __reduce_add_sync(ALL, (unsigned)(sums[head] >> LOW_BITS));
        if (threadIdx.x % 32 == 0) {
            atomicAdd(&shared.totals[2 * head], low);
            atomicAdd(&shared.totals[2 * head + 1], high);
        }
    }
    return combined(shared.totals, shared.common.totals, 2 * GROUP, blocks, sum_of);
}

// Replaces a candidate's first logit by the key of its score; finds the inverse of the lowest key, and the highest one.
// A score is the logarithm of the heads' mean but for what is the same for all.
__device__ const unsigned* rate(int count, float* logits, const unsigned* maxima, const unsigned* totals, int blocks,
                                Shared& shared) {
    float sums[GROUP];
    unsigned lowest = 0xFFFFFFFFu, highest = 0;
#pragma unroll
    for (int head = 0; head < GROUP; head++) {
        unsigned long long total = ((unsigned long long)totals[2 * head + 1] << LOW_BITS) + totals[2 * head];
        sums[head] = number_of(maxima[head]) + log2f((float)total / ONE);
    }
    for (long long i = threadIdx.x; i < count; i += THREADS) {
        float shares[GROUP], largest = -LARGEST, weight = 0.0f;
        load_logits(logits + i * GROUP, shares);
        bool broken = shares[0] == INFINITE;
#pragma unroll
        for (int head = 0; head < GROUP; head++) {
            shares[head] -= sums[head];
            largest = fmaxf(largest, shares[head]);
        }
#pragma unroll
        for (int head = 0; head < GROUP; head++) weight += exp2_of(shares[head] - largest);
        unsigned key = key_of(broken ? LARGEST : largest + log2f(weight));
        logits[i * GROUP] = __uint_as_float(key);
        lowest = min(lowest, key);
        highest = max(highest, key);
    }
    lowest = __reduce_min_sync(ALL, lowest);
    highest = __reduce_max_sync(ALL, highest);
    if (threadIdx.x % 32 == 0) {
        atomicMax(&shared.range[0], ~lowest);
        atomicMax(&shared.range[1], highest);
    }
    return combined(shared.range, shared.common.range, 2, blocks, larger_of);
}

// What is selected: all keys above `high`, and of those from `low` to `high`, which are equal or all taken, some.
struct Threshold { unsigned low, high, ties; };

// The range is divided into bins until that of the key of rank `wanted` is taken whole, or has one key.
__device__ Threshold find(int count, const float* logits, const unsigned* range, unsigned wanted, int blocks,
                          Shared& shared) {
    unsigned low = ~range[0], high = range[1];
    while (true) {
        if (threadIdx.x < BINS) shared.histogram[threadIdx.x] = 0;
        __syncthreads();
        unsigned span = high - low;
        int shift = max(0, 24 - __clz(span));
        for (long long i = threadIdx.x; i < count; i += THREADS) {
            unsigned distance = high - __float_as_uint(logits[i * GROUP]);
            if (distance <= span) atomicAdd(&shared.histogram[distance >> shift], 1u);
        }
        const unsigned* histogram = combined(shared.histogram, shared.common.histogram, BINS, blocks, sum_of);
        unsigned mine = threadIdx.x < BINS ? histogram[threadIdx.x] : 0;
        unsigned before = threads_before(mine, shared.warps[0]);
        if (before < wanted && wanted <= before + mine) {
            shared.bin = threadIdx.x;
            shared.above = before;
            shared.inside = mine;
        }
        // All have read this block's histogram as well.
        meet(blocks);
        unsigned start = shared.bin << shift;
        low = high - min(span, start + (1u << shift) - 1);
        high -= start;
        wanted -= shared.above;
        if (wanted == shared.inside || shift == 0) return Threshold{low, high, wanted};
    }
}

// Stores what is selected of a block's `count` candidates, in ascending order, behind what blocks before it select.
__device__ void place(int count, const float* logits, Threshold threshold, int blocks, int* indices, Shared& shared) {
    int lane = threadIdx.x % 32;
    unsigned sure_before = 0, ties_before = 0;
    if (CLUSTER > 1 && blocks > 1) {
        unsigned sure = 0, ties = 0;
        for (long long i = threadIdx.x; i < count; i += THREADS) {
            unsigned key = __float_as_uint(logits[i * GROUP]);
            sure += key > threshold.high;
            ties += key <= threshold.high && key >= threshold.low;
        }
        sure = __reduce_add_sync(ALL, sure);
        ties = __reduce_add_sync(ALL, ties);
        if (lane == 0) {
            atomicAdd(&shared.taken[0], sure);
            atomicAdd(&shared.taken[1], ties);
        }
        meet(blocks);
        for (unsigned rank = 0; rank < block_rank(); rank++) {
            sure_before += load_from(rank, &shared.taken[0]);
            ties_before += load_from(rank, &shared.taken[1]);
        }
    }
    for (int first = 0; first < count; first += THREADS) {
        int i = first + threadIdx.x;
        unsigned key = i < count ? __float_as_uint(logits[(long long)i * GROUP]) : 0;
        bool sure = i < count && key > threshold.high, tie = i < count && !sure && key >= threshold.low;
        // Where it was read last, all have been at a barrier since.
        unsigned* slots = shared.warps[1 + first / THREADS % 2];
        unsigned before = threads_before((unsigned)sure | (unsigned)tie << 16, slots);
        unsigned total = __reduce_add_sync(ALL, lane < WARPS ? slots[lane] : 0u);
        unsigned ties = ties_before + (before >> 16);
        if (sure || tie && ties < threshold.ties)
            indices[sure_before + (before & 0xFFFF) + min(ties, threshold.ties)] = page_of(i, shared);
        sure_before += total & 0xFFFF;
        ties_before += total >> 16;
    }
}

// Selects `wanted` of a row's `all` candidates, of which this one of its `blocks` has `count`.
__device__ void select(const unsigned short* q, long long q_head, const unsigned char* summary, int page_bytes,
                       int topr, float scale, int all, int wanted, int count, int blocks, float* logits, int* indices,
                       Shared& shared) {
    Bounds bounds, next;
    int first = threadIdx.x / 32 * TILE;
    bounds.load_tile(first, count, summary, page_bytes, shared);
    next.load_tile(first + STEP, count, summary, page_bytes, shared);
    prepare(q, q_head, topr, scale, shared);
    score(count, summary, page_bytes, bounds, next, logits, shared);
    const unsigned* maxima = look_up(count, logits, blocks, shared);
    const unsigned* totals = add_up(count, logits, maxima, blocks, shared);
    // The newest block, the last one, is selected whatever its score.
    bool has_last = count > 0 && shared.list.first + count == all;
    if (has_last && threadIdx.x == 0) indices[wanted - 1] = page_of(count - 1, shared);
    count -= has_last;
    const unsigned* range = rate(count, logits, maxima, totals, blocks, shared);
    Threshold threshold = {0xFFFFFFFFu, 0xFFFFFFFFu, 0};
    if (wanted > 1) threshold = find(count, logits, range, wanted - 1, blocks, shared);
    place(count, logits, threshold, blocks, indices, shared);
    // Others may still read what this block has taken.
    if (CLUSTER > 1 && blocks > 1) cluster_barrier();
}

// No pointer is __restrict__: what the kernel before this one wrote must not be read as constant, or before the wait.
// With `tables_ready` all that says which blocks are visible is older, and read while that kernel still runs.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
kt_select(const unsigned short* q, const unsigned char* summary, const int* kept, const int* n_kept_ptr,
          const int* first_visible_ptr, const long long* requests, const int* table, const int* n_blocks_ptr,
          const int* n_select_ptr, float* scratch, int* indices, int* counts, unsigned long long* stats,
          long long q_row, long long q_head, long long max_kept, long long table_stride, long long width,
          long long topr, long long scale, long long tables_ready) {
    SHARED(Shared, shared);
    launch_dependents();
    if (!tables_ready) await_inputs();
    int head = blockIdx.x / CLUSTER, heads = gridDim.x / CLUSTER, rank = block_rank();
    long long row = blockIdx.y, pair = row * heads + head, request = requests[row];
    List list;
    list.n_blocks = max(min(n_blocks_ptr[row], (int)width), 0);
    int n_select = max(n_select_ptr[row], 0), first_visible = 0;
    list.n_kept = 0;
    if (n_select < list.n_blocks) {
        first_visible = max(min(first_visible_ptr[request], list.n_blocks), 0);
        list.n_kept = max(min(min(n_kept_ptr[request], first_visible), (int)max_kept), 0);
    }
    list.left_out = first_visible - list.n_kept;
    list.kept = kept + (request * heads + head) * max_kept;
    list.table = table + row * table_stride;
    int all = list.n_blocks - list.left_out, wanted = min(n_select, all), blocks = all <= ALONE ? 1 : CLUSTER;
    int size = (all + blocks * TILE - 1) / (blocks * TILE) * TILE;
    list.first = rank * size;
    // Those of this block.
    int count = rank < blocks ? max(min(size, all - list.first), 0) : 0;
    for (int i = threadIdx.x; i < min(count, LISTED); i += THREADS) shared.pages[i] = list.page(i);
    // Nothing is written before it: the kernel before this one may still read what the last selection was.
    await_inputs();
    indices += pair * width;
    if (threadIdx.x == 0) {
        shared.list = list;
        if (rank == 0) counts[pair] = wanted;
        if (stats && head == 0 && rank == 0 && wanted > 0) {
            atomicAdd(stats, (unsigned long long)heads);
            atomicAdd(stats + 1, (unsigned long long)wanted * heads);
            atomicAdd(stats + 2, (unsigned long long)list.n_blocks * heads);
        }
    }
    if (wanted == 0 || rank >= blocks) return;
    if (wanted == all) {
        for (int i = threadIdx.x; i < count; i += THREADS) indices[list.first + i] = list.page(i);
        return;
    }
    // All of the list is in shared memory.
    __syncthreads();
    q += row * q_row + head * GROUP * q_head;
    float* logits = count <= HELD ? shared.logits : scratch + (pair * width + list.first) * GROUP;
    const unsigned char* bounds = summary + head * 2 * DIM;
    float factor = __uint_as_float((unsigned)scale);
    select(q, q_head, bounds, heads * 2 * DIM, (int)topr, factor, all, wanted, count, blocks, logits, indices, shared);
}
