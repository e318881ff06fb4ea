// Page selection for one row and KV head per block; see cuda.py for the method and the launch.
//
// Compile-time: THREADS (multiple of 32, a divisor of BINS), ITEMS (scores a thread holds in registers, multiple of 4).
// A block is bound by the instructions that it issues for each score, so these are what the code saves.

#define BINS 2048
#define LIST 256
#define WARPS (THREADS / 32)
#define GROUP (ITEMS < 8 ? ITEMS : 8)
#define ALL 0xFFFFFFFFu
#define INFINITE 0xFF800000u  // key of +inf
#define NO_KEY 0u             // below the key of every score

// Order of the keys is that of the scores: NaN counts as +inf, 0.0 and -0.0 are equal.
__device__ unsigned key_of(float score) {
    unsigned bits = __float_as_uint(score == score ? score + 0.0f : __uint_as_float(0x7F800000u));
    return bits ^ ((int)bits >> 31 | 0x80000000u);
}

struct Range {
    unsigned low, span, above;  // candidates lie in [low, low + span]; `above` keys lie higher
};

struct Shared {
    unsigned histogram[BINS];
    unsigned warp[3][WARPS];
    unsigned list[LIST];
    unsigned bin, above, inside, threshold, listed;
};

// Sum over the warps before this one of a value that each warp has once; all threads call it.
__device__ unsigned warps_before(unsigned mine, unsigned* slots) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) slots[warp] = mine;
    __syncthreads();
    return __reduce_add_sync(ALL, lane < warp ? slots[lane] : 0u);
}

// Sum over the threads before this one; all threads call it.
__device__ unsigned threads_before(unsigned mine, unsigned* slots) {
    int lane = threadIdx.x % 32;
    unsigned running = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        unsigned other = __shfl_up_sync(ALL, running, step);
        if (lane >= step) running += other;
    }
    return warps_before(__shfl_sync(ALL, running, 31), slots) + running - mine;
}

// Lowest key, distance to the highest key below +inf, and the number of keys at +inf.
__device__ Range key_range(const unsigned (&keys)[ITEMS], int items, Shared& shared) {
    unsigned low = ALL, high = NO_KEY, infinite = 0;
#pragma unroll
    for (int group = 0; group < ITEMS; group += 4) {
        if (group >= items) break;
#pragma unroll
        for (int i = group; i < group + 4; i++) {
            bool finite = keys[i] < INFINITE;
            // Less one, a missing key is the highest of all.
            low = min(low, keys[i] - 1);
            high = max(high, finite ? keys[i] : NO_KEY);
            infinite += !finite;
        }
    }
    low = __reduce_min_sync(ALL, low);
    high = __reduce_max_sync(ALL, high);
    infinite = __reduce_add_sync(ALL, infinite);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) {
        shared.warp[0][warp] = low;
        shared.warp[1][warp] = high;
        shared.warp[2][warp] = infinite;
    }
    __syncthreads();
    low = __reduce_min_sync(ALL, lane < WARPS ? shared.warp[0][lane] : ALL) + 1;
    high = __reduce_max_sync(ALL, lane < WARPS ? shared.warp[1][lane] : NO_KEY);
    return Range{low, high - low, __reduce_add_sync(ALL, lane < WARPS ? shared.warp[2][lane] : 0u)};
}

// Which bin holds the key of rank `wanted` from the top: shared.bin, with shared.above keys over it and
// shared.inside keys in it.
__device__ void find_bin(unsigned wanted, unsigned above, Shared& shared) {
    constexpr int EACH = BINS / THREADS;
    unsigned counts[EACH], total = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        // Bins in falling order.
        counts[i] = shared.histogram[BINS - 1 - (threadIdx.x * EACH + i)];
        total += counts[i];
    }
    unsigned before = above + threads_before(total, shared.warp[0]);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (before < wanted && wanted <= before + counts[i]) {
            shared.bin = BINS - 1 - (threadIdx.x * EACH + i);
            shared.above = before;
            shared.inside = counts[i];
        }
        before += counts[i];
    }
    __syncthreads();
}

// The key of rank `wanted` among those of a bin, ranked against one another: shared.threshold, and shared.above keys
// higher than it. `above` keys are higher than the bin, which holds `inside`, at most LIST.
__device__ void rank_bin(const unsigned (&keys)[ITEMS], int items, Range bin, unsigned inside, unsigned wanted,
                         Shared& shared) {
#pragma unroll
    for (int group = 0; group < ITEMS; group += 4) {
        if (group >= items) break;
#pragma unroll
        for (int i = group; i < group + 4; i++)
            if (keys[i] - bin.low <= bin.span) shared.list[atomicAdd(&shared.listed, 1u)] = keys[i];
    }
    __syncthreads();
    if (threadIdx.x < inside) {
        unsigned key = shared.list[threadIdx.x], higher = bin.above, equal = 0;
        for (unsigned i = 0; i < inside; i++) {
            higher += shared.list[i] > key;
            equal += shared.list[i] == key;
        }
        if (higher < wanted && wanted <= higher + equal) {
            // Where all its equals are selected they need not be told apart.
            bool all = wanted == higher + equal;
            shared.threshold = key - all;
            shared.above = all ? wanted : higher;
        }
    }
    __syncthreads();
}

// The key of which all higher ones are selected, and of its equals the first `ties`.
__device__ unsigned find_threshold(const unsigned (&keys)[ITEMS], int items, unsigned wanted, Shared& shared,
                                   unsigned& ties) {
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.histogram[bin] = 0;
    if (threadIdx.x == 0) shared.listed = 0;
    Range range = key_range(keys, items, shared);
    if (range.above >= wanted) {
        ties = wanted;
        return INFINITE;
    }
    while (true) {
        int shift = max(0, 21 - __clz(range.span));
#pragma unroll
        for (int group = 0; group < ITEMS; group += 4) {
            if (group >= items) break;
#pragma unroll
            for (int i = group; i < group + 4; i++) {
                unsigned offset = keys[i] - range.low;
                if (offset <= range.span) atomicAdd(&shared.histogram[offset >> shift], 1u);
            }
        }
        __syncthreads();
        find_bin(wanted, range.above, shared);
        unsigned inside = shared.inside, start = shared.bin << shift;
        Range bin = {range.low + start, min(range.span - start, (1u << shift) - 1), shared.above};
        if (inside == wanted - bin.above) {
            ties = 0;
            return bin.low - 1;
        }
        if (shift == 0) {
            ties = wanted - bin.above;
            return bin.low;
        }
        if (inside <= LIST) {
            rank_bin(keys, items, bin, inside, wanted, shared);
            ties = wanted - shared.above;
            return shared.threshold;
        }
        range = bin;
        for (int i = threadIdx.x; i < BINS; i += THREADS) shared.histogram[i] = 0;
        __syncthreads();
    }
}

// Stores the selected pages in logical order; TIES where some keys at the threshold are not selected.
template <bool TIES>
__device__ void place(const unsigned (&keys)[ITEMS], int items, const int* page_table, int first, unsigned threshold,
                      unsigned ties, int* indices, Shared& shared) {
    // At most 65,535 pages fit a half: see cuda.py.
    unsigned mine = 0;
#pragma unroll
    for (int group = 0; group < ITEMS; group += 4) {
        if (group >= items) break;
#pragma unroll
        for (int i = group; i < group + 4; i++) {
            mine += keys[i] > threshold;
            if (TIES) mine += (unsigned)(keys[i] == threshold) << 16;
        }
    }
    unsigned before = threads_before(mine, shared.warp[1]);
    unsigned equal = before >> 16;
    int* next = indices + (before & 0xFFFF) + (TIES ? min(equal, ties) : 0u);
    page_table += first;
    // In groups whose loads are all on their way before the first of them is stored.
#pragma unroll
    for (int group = 0; group < ITEMS; group += GROUP) {
        if (group >= items) break;
        int pages[GROUP];
        bool selected[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            unsigned key = keys[group + i];
            selected[i] = key > threshold;
            if (TIES && key == threshold) selected[i] = equal++ < ties;
            if (selected[i]) pages[i] = page_table[group + i];
        }
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            if (selected[i]) *next++ = pages[i];
    }
}

// No pointer is __restrict__: what the kernel before this one wrote must not be read as constant, or before the wait.
extern "C" __global__ void __launch_bounds__(THREADS)
page_topk(const float* scores, const int* page_table, const int* n_pages_ptr, const int* n_select_ptr, int* indices,
          int* counts, unsigned long long* stats, long long table_stride, long long width, long long max_select_wide,
          long long aligned) {
    __shared__ Shared shared;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    int head = blockIdx.x, row = blockIdx.y, heads = gridDim.x;
    long long pair = (long long)row * heads + head;
    int n_pages = n_pages_ptr[row], max_select = (int)max_select_wide;
    int wanted = max(0, min(min(n_select_ptr[row], n_pages), max_select));
    page_table += row * table_stride;
    indices += pair * max_select;
    if (threadIdx.x == 0) {
        counts[pair] = wanted;
        if (stats && head == 0 && wanted > 0) {
            atomicAdd(stats, (unsigned long long)heads);
            atomicAdd(stats + 1, (unsigned long long)wanted * heads);
            atomicAdd(stats + 2, (unsigned long long)n_pages * heads);
        }
    }
    if (wanted == 0) return;
    if (wanted == n_pages) {
        for (int i = threadIdx.x; i < n_pages; i += THREADS) indices[i] = page_table[i];
        return;
    }
    // Each thread holds consecutive pages, in fours.
    int items = (n_pages + 4 * THREADS - 1) / (4 * THREADS) * 4;
    int first = threadIdx.x * items;
    scores += pair * width;
    float values[ITEMS];
#pragma unroll
    for (int group = 0; group < ITEMS; group += 4) {
        if (group >= items || first + group >= n_pages) break;
        if (aligned) {
            // What lies between a row's last page and the next row may be read.
            float4 four = *(const float4*)(scores + first + group);
            values[group] = four.x;
            values[group + 1] = four.y;
            values[group + 2] = four.z;
            values[group + 3] = four.w;
        } else {
#pragma unroll
            for (int i = group; i < group + 4; i++) values[i] = first + i < n_pages ? scores[first + i] : 0.0f;
        }
    }
    unsigned keys[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) keys[i] = i < items && first + i < n_pages ? key_of(values[i]) : NO_KEY;
    unsigned ties;
    unsigned threshold = find_threshold(keys, items, wanted, shared, ties);
    if (ties == 0)
        place<false>(keys, items, page_table, first, threshold, ties, indices, shared);
    else
        place<true>(keys, items, page_table, first, threshold, ties, indices, shared);
}
