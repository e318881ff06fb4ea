// Page selection for one row and KV head per block; see cuda.py for the method and the launch.
//
// Compile-time: THREADS (multiple of 32, a divisor of BINS), ITEMS (scores a thread holds in registers).

#define BINS 2048
#define LIST 256
#define WARPS (THREADS / 32)
#define GROUP (ITEMS < 8 ? ITEMS : 8)
#define ALL 0xFFFFFFFFu
#define INFINITE 0xFF800000u  // key of +inf
#define NO_KEY 0u             // below the key of every score

// Order of the keys is that of the scores: NaN counts as +inf, 0.0 and -0.0 are equal.
__device__ unsigned key_of(float score) {
    if (score != score) return INFINITE;
    unsigned bits = score == 0.0f ? 0u : __float_as_uint(score);
    return bits ^ (bits >> 31 ? ALL : 0x80000000u);
}

struct Range {
    unsigned low, high, above;  // candidates lie in [low, high]; `above` keys lie higher
};

struct Shared {
    unsigned histogram[BINS];
    unsigned warp[3][WARPS];
    unsigned list[LIST];
    unsigned bin, above, inside, threshold, listed;
};

// Lowest key, highest key below +inf, and the number of keys at +inf.
__device__ Range key_range(const unsigned (&keys)[ITEMS], int items, Shared& shared) {
    unsigned low = ALL, high = NO_KEY, infinite = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        if (i < items && keys[i] != NO_KEY) {
            low = min(low, keys[i]);
            if (keys[i] < INFINITE) high = max(high, keys[i]);
            else infinite++;
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
    Range range;
    range.low = __reduce_min_sync(ALL, lane < WARPS ? shared.warp[0][lane] : ALL);
    range.high = __reduce_max_sync(ALL, lane < WARPS ? shared.warp[1][lane] : NO_KEY);
    range.above = __reduce_add_sync(ALL, lane < WARPS ? shared.warp[2][lane] : 0u);
    return range;
}

// Sum over the warps before this one of a value that each warp has once; all threads call it.
__device__ unsigned warps_before(unsigned mine, unsigned* slots) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) slots[warp] = mine;
    __syncthreads();
    return __reduce_add_sync(ALL, lane < warp ? slots[lane] : 0u);
}

// Which bin holds the key of rank `wanted` from the top: shared.bin, with shared.above keys over it and
// shared.inside keys in it.
__device__ void find_bin(unsigned wanted, unsigned above, Shared& shared) {
    constexpr int EACH = BINS / THREADS;
    int lane = threadIdx.x % 32;
    unsigned counts[EACH], total = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        // Bins in falling order.
        counts[i] = shared.histogram[BINS - 1 - (threadIdx.x * EACH + i)];
        total += counts[i];
    }
    unsigned running = total;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        unsigned other = __shfl_up_sync(ALL, running, step);
        if (lane >= step) running += other;
    }
    unsigned warp_total = __shfl_sync(ALL, running, 31);
    unsigned before = above + warps_before(warp_total, shared.warp[0]) + running - total;
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
        int shift = max(0, 21 - __clz(range.high - range.low));
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (i < items && keys[i] >= range.low && keys[i] <= range.high)
                atomicAdd(&shared.histogram[(keys[i] - range.low) >> shift], 1u);
        __syncthreads();
        find_bin(wanted, range.above, shared);
        unsigned above = shared.above, inside = shared.inside;
        unsigned low = range.low + (shared.bin << shift);
        if (inside == wanted - above) {
            ties = 0;
            return low - 1;
        }
        if (shift == 0) {
            ties = wanted - above;
            return low;
        }
        unsigned high = min(range.high, low + ((1u << shift) - 1));
        if (inside <= LIST) {
#pragma unroll
            for (int i = 0; i < ITEMS; i++)
                if (i < items && keys[i] >= low && keys[i] <= high) shared.list[atomicAdd(&shared.listed, 1u)] = keys[i];
            __syncthreads();
            if (threadIdx.x < inside) {
                unsigned key = shared.list[threadIdx.x], higher = above, equal = 0;
                for (unsigned i = 0; i < inside; i++) {
                    higher += shared.list[i] > key;
                    equal += shared.list[i] == key;
                }
                if (higher < wanted && wanted <= higher + equal) {
                    shared.threshold = key;
                    shared.above = higher;
                }
            }
            __syncthreads();
            ties = wanted - shared.above;
            return shared.threshold;
        }
        range = Range{low, high, above};
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.histogram[bin] = 0;
        __syncthreads();
    }
}

// No pointer is __restrict__: what the kernel before this one wrote must not be read as constant, or before the wait.
extern "C" __global__ void __launch_bounds__(THREADS)
page_topk(const float* scores, const int* page_table, const int* n_pages_ptr,
          const int* n_select_ptr, int* indices, int* counts,
          unsigned long long* stats, long long table_stride, long long width, long long max_select_wide) {
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
    // Each warp holds consecutive pages, each of its loads 32 neighbours.
    int items = (n_pages + THREADS - 1) / THREADS;
    int first = (threadIdx.x / 32) * items * 32 + threadIdx.x % 32;
    scores += pair * width;
    float values[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        if (i < items && first + i * 32 < n_pages) values[i] = scores[first + i * 32];
    unsigned keys[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) keys[i] = i < items && first + i * 32 < n_pages ? key_of(values[i]) : NO_KEY;
    unsigned ties;
    unsigned threshold = find_threshold(keys, items, wanted, shared, ties);
    unsigned sure = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        if (i < items) {
            sure += __popc(__ballot_sync(ALL, keys[i] > threshold));
            equal += __popc(__ballot_sync(ALL, keys[i] == threshold));
        }
    }
    // At most 65,535 pages fit a half: see cuda.py.
    unsigned before = warps_before(sure + (equal << 16), shared.warp[1]);
    sure = before & 0xFFFF;
    equal = before >> 16;
    unsigned lower = (1u << (threadIdx.x % 32)) - 1;
    // In groups whose loads are all on their way before the first of them is stored.
#pragma unroll
    for (int group = 0; group < ITEMS; group += GROUP) {
        int pages[GROUP], places[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            unsigned key = keys[group + i];
            unsigned sure_mask = __ballot_sync(ALL, key > threshold);
            unsigned tie_mask = __ballot_sync(ALL, key == threshold);
            unsigned tie = equal + __popc(tie_mask & lower);
            bool selected = key > threshold || (key == threshold && tie < ties);
            places[i] = selected ? (int)(sure + __popc(sure_mask & lower) + min(tie, ties)) : -1;
            pages[i] = selected ? page_table[first + (group + i) * 32] : 0;
            sure += __popc(sure_mask);
            equal += __popc(tie_mask);
        }
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            if (places[i] >= 0) indices[places[i]] = pages[i];
        if (group + GROUP >= items) break;
    }
}
