// Page selection for one row and KV head per block; see cuda.py for the method and the launch.
//
// Compile-time: THREADS (multiple of 32, a divisor of BINS), ITEMS (scores a thread holds in registers, multiple of 4).
// A block is bound by the instructions that it issues for each score, so these are what the code saves.

#define BINS 2048
#define LIST 256
#define WARPS (THREADS / 32)
#define GROUP (ITEMS < 8 ? ITEMS : 8)
#define ALL 0xFFFFFFFFu
#define INFINITE __uint_as_float(0x7F800000u)
#define LARGEST 3.402823466e38f

// A score that counts as +inf if it is NaN, and as 0.0 if it is -0.0.
__device__ float clean(float score) { return score == score ? score + 0.0f : INFINITE; }

// Order of the keys is that of clean scores; bits in which every score has one key.
__device__ unsigned key_of(float score) {
    unsigned bits = __float_as_uint(score);
    return bits ^ ((int)bits >> 31 | 0x80000000u);
}

__device__ float score_of(unsigned key) { return __uint_as_float(key ^ (~((int)key >> 31) | 0x80000000u)); }

// Equal bins over the finite scores, in their order; rounding may shift the bins, but never changes the order.
struct Bins {
    float scale, offset;
    __device__ unsigned operator()(float score) const {
        // From 2^23 on, a float's last bit is worth one.
        float place = fminf(fmaxf(fmaf(score, scale, offset), 8388608.0f), 8388608.0f + BINS - 1);
        return __float_as_uint(place) & (BINS - 1);
    }
};

struct Range {
    unsigned low, high, above;  // candidates have keys from `low` to `high`; `above` scores are higher
};

struct Shared {
    unsigned histogram[BINS];
    unsigned warp[4][WARPS];
    unsigned list[LIST];
    unsigned bin, above, inside, threshold, equal, listed;
};

// What is selected: all scores from the threshold on or, of those equal to it, the first `ties` only.
struct Threshold {
    float score;
    unsigned ties;
    bool all;
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

// Lowest and highest key of the finite scores that `wanted` takes, and the number of scores at +inf. A missing score is
// NaN, and so neither.
template <typename Wanted>
__device__ Range key_range(const float (&scores)[ITEMS], int items, Shared& shared, Wanted wanted) {
    float low = INFINITE, high = -INFINITE;
    unsigned infinite = 0;
#pragma unroll
    for (int group = 0; group < ITEMS; group += 4) {
        if (group >= items) break;
#pragma unroll
        for (int i = group; i < group + 4; i++) {
            bool taken = scores[i] < INFINITE && wanted(scores[i]);
            low = fminf(low, taken ? scores[i] : INFINITE);
            high = fmaxf(high, taken ? scores[i] : -INFINITE);
            infinite += scores[i] == INFINITE;
        }
    }
    unsigned lowest = __reduce_min_sync(ALL, key_of(low)), highest = __reduce_max_sync(ALL, key_of(high));
    infinite = __reduce_add_sync(ALL, infinite);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) {
        shared.warp[0][warp] = lowest;
        shared.warp[1][warp] = highest;
        shared.warp[2][warp] = infinite;
    }
    __syncthreads();
    lowest = __reduce_min_sync(ALL, lane < WARPS ? shared.warp[0][lane] : ALL);
    highest = __reduce_max_sync(ALL, lane < WARPS ? shared.warp[1][lane] : 0u);
    return Range{lowest, highest, __reduce_add_sync(ALL, lane < WARPS ? shared.warp[2][lane] : 0u)};
}

// Which bin holds the score of rank `wanted` from the top: shared.bin, with shared.above scores over it and
// shared.inside scores in it.
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

// Clears the histogram, which everybody has read.
__device__ void clear(Shared& shared) {
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.histogram[bin] = 0;
    __syncthreads();
}

// The score of rank `wanted` among the at most LIST ones that `inside` takes, ranked against one another. `above`
// scores are higher than they, `count` is how many they are.
template <typename Inside>
__device__ Threshold rank(const float (&scores)[ITEMS], int items, unsigned above, unsigned count, unsigned wanted,
                          Shared& shared, Inside inside) {
#pragma unroll
    for (int group = 0; group < ITEMS; group += 4) {
        if (group >= items) break;
#pragma unroll
        for (int i = group; i < group + 4; i++)
            if (inside(scores[i])) shared.list[atomicAdd(&shared.listed, 1u)] = key_of(scores[i]);
    }
    __syncthreads();
    for (unsigned mine = threadIdx.x; mine < count; mine += THREADS) {
        unsigned key = shared.list[mine], higher = above, equal = 0, earlier = 0;
        for (unsigned i = 0; i < count; i++) {
            higher += shared.list[i] > key;
            equal += shared.list[i] == key;
            earlier += shared.list[i] == key && i < mine;
        }
        if (earlier == 0 && higher < wanted && wanted <= higher + equal) {
            shared.threshold = key;
            shared.above = higher;
            shared.equal = equal;
        }
    }
    __syncthreads();
    unsigned ties = wanted - shared.above;
    return Threshold{score_of(shared.threshold), ties, ties == shared.equal};
}

// The same among any number of scores in a range of keys, by dividing the range until few are left, or one key.
__device__ Threshold divide(const float (&scores)[ITEMS], int items, Range range, unsigned wanted, Shared& shared) {
    while (true) {
        clear(shared);
        unsigned span = range.high - range.low;
        int shift = max(0, 21 - __clz(span));
#pragma unroll
        for (int group = 0; group < ITEMS; group += 4) {
            if (group >= items) break;
#pragma unroll
            for (int i = group; i < group + 4; i++) {
                unsigned distance = key_of(scores[i]) - range.low;
                if (distance <= span) atomicAdd(&shared.histogram[distance >> shift], 1u);
            }
        }
        __syncthreads();
        find_bin(wanted, range.above, shared);
        unsigned start = shared.bin << shift, count = shared.inside;
        range = Range{range.low + start, range.low + min(span, start + (1u << shift) - 1), shared.above};
        unsigned ties = wanted - range.above;
        // A bin that is taken whole, or whose scores are equal.
        if (ties == count || shift == 0) return Threshold{score_of(range.low), ties, ties == count};
        if (count <= LIST)
            return rank(scores, items, range.above, count, wanted, shared, [=](float score) {
                return key_of(score) - range.low <= range.high - range.low;
            });
    }
}

__device__ Threshold find_threshold(const float (&scores)[ITEMS], int items, unsigned wanted, Shared& shared) {
    if (threadIdx.x == 0) shared.listed = 0;
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.histogram[bin] = 0;
    Range range = key_range(scores, items, shared, [](float) { return true; });
    if (range.above >= wanted) return Threshold{INFINITE, wanted, range.above == wanted};
    float low = fmaxf(score_of(range.low), -LARGEST), high = score_of(range.high);
    Bins bins = {(BINS - 3) / (high - low), 0.0f};
    bins.offset = 8388609.0f - low * bins.scale;
    // Equal scores, or such a range that its bins cannot be said in floats: one bin, divided by its keys.
    if (!(fabsf(bins.offset) <= LARGEST)) bins = Bins{0.0f, 8388608.0f};
#pragma unroll
    for (int group = 0; group < ITEMS; group += 4) {
        if (group >= items) break;
#pragma unroll
        for (int i = group; i < group + 4; i++)
            if (scores[i] < INFINITE) atomicAdd(&shared.histogram[bins(scores[i])], 1u);
    }
    __syncthreads();
    find_bin(wanted, range.above, shared);
    unsigned bin = shared.bin, above = shared.above, count = shared.inside;
    auto inside = [=](float score) { return score < INFINITE && bins(score) == bin; };
    if (count <= LIST) return rank(scores, items, above, count, wanted, shared, inside);
    range = key_range(scores, items, shared, inside);
    return divide(scores, items, Range{range.low, range.high, above}, wanted, shared);
}

// Stores the selected pages in logical order.
template <bool TIES>
__device__ void place(const float (&scores)[ITEMS], int items, const int* page_table, Threshold threshold,
                      int* indices, Shared& shared) {
    // At most 65,535 pages fit a half: see cuda.py.
    unsigned mine = 0;
#pragma unroll
    for (int group = 0; group < ITEMS; group += 4) {
        if (group >= items) break;
#pragma unroll
        for (int i = group; i < group + 4; i++) {
            mine += TIES ? scores[i] > threshold.score : scores[i] >= threshold.score;
            if (TIES) mine += (unsigned)(scores[i] == threshold.score) << 16;
        }
    }
    unsigned before = threads_before(mine, shared.warp[3]);
    unsigned equal = before >> 16;
    int* next = indices + (before & 0xFFFF) + (TIES ? min(equal, threshold.ties) : 0u);
    // In groups whose loads are all on their way before the first of them is stored.
#pragma unroll
    for (int group = 0; group < ITEMS; group += GROUP) {
        if (group >= items) break;
        int pages[GROUP];
        bool selected[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            float score = scores[group + i];
            selected[i] = TIES ? score > threshold.score : score >= threshold.score;
            if (TIES && score == threshold.score) selected[i] = equal++ < threshold.ties;
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
    float held[ITEMS];
#pragma unroll
    for (int group = 0; group < ITEMS; group += 4) {
        if (group >= items || first + group >= n_pages) break;
        if (aligned) {
            // What lies between a row's last page and the next row may be read.
            float4 four = *(const float4*)(scores + first + group);
            held[group] = four.x;
            held[group + 1] = four.y;
            held[group + 2] = four.z;
            held[group + 3] = four.w;
        } else {
#pragma unroll
            for (int i = group; i < group + 4; i++) held[i] = first + i < n_pages ? scores[first + i] : 0.0f;
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        held[i] = i < items && first + i < n_pages ? clean(held[i]) : __uint_as_float(0x7FC00000u);
    Threshold threshold = find_threshold(held, items, wanted, shared);
    if (threshold.all)
        place<false>(held, items, page_table + first, threshold, indices, shared);
    else
        place<true>(held, items, page_table + first, threshold, indices, shared);
}
