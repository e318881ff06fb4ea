// Top-p selection, a block of threads for each row; see cuda.py for the method and the launch.
//
// Compile-time: THREADS (a power of two, at least 64), ITEMS (masses that a thread holds in registers, a multiple of 4).

#include "hopper.cuh"
#include "block.cuh"

#define BINS 2048
#define WARPS (THREADS / 32)
#define EACH (BINS / THREADS)
#define ONE 1073741824.0f     // what a mass of 1 counts as
#define LIMIT 2147483136u     // see reference.py
#define LEAST (127 << 6)      // bin of 1, before it is subtracted
#define GROUP 4

struct Shared {
    unsigned histogram[BINS];
    unsigned warps[5][WARPS];
    unsigned bin, above, inside;
};

// The sum of what the warps have put into slots.
__device__ unsigned all_threads(const unsigned* slots) {
    int lane = threadIdx.x % 32;
    return __reduce_add_sync(ALL, lane < WARPS ? slots[lane] : 0u);
}

// A bin: 2^`bits` numbers from the lowest on, and the sum of what is higher.
struct Bin {
    unsigned low, above;
    int bits;
};

// Numbers with 7 leading bits in common, and all below 2^7 alone. Only whole numbers that a float32 holds are converted.
__device__ unsigned first_bin(unsigned number) {
    unsigned exact = number >> 24 ? number & ~127u : number;
    return (__float_as_uint((float)(int)exact) >> 17) - LEAST;
}

// The bin, from the highest down, in which the sum reaches what is needed: a number of it, what lies above, and its own
// sum. All threads call it, after a barrier behind the last addition; leaves the histogram empty.
__device__ void find(unsigned needed, Shared& shared) {
    unsigned sums[EACH], sum = 0;
    int first = BINS - 1 - threadIdx.x * EACH;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        sums[i] = shared.histogram[first - i];
        shared.histogram[first - i] = 0;
        sum += sums[i];
    }
    unsigned above = threads_before(sum, shared.warps[0]);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (above < needed && above + sums[i] >= needed) {
            shared.bin = first - i;
            shared.above = above;
            shared.inside = sums[i];
        }
        above += sums[i];
    }
    __syncthreads();
}

// What is selected beside the newest block: numbers above the threshold, and the first `ties` of those equal to it.
struct Threshold {
    unsigned number, ties;
    bool all;  // of those equal to it
};

__device__ Threshold find_threshold(const unsigned (&held)[ITEMS], int items, unsigned needed, Shared& shared) {
    find(needed, shared);
    // Where it is below 2^6 its leading bits are all that it has.
    int exponent = (int)(shared.bin >> 6);
    Bin bin = {(unsigned)__uint_as_float((shared.bin + LEAST) << 17), shared.above, max(exponent - 6, 0)};
    unsigned inside = shared.inside;
    while (bin.bits > 0) {
        int digit = min(bin.bits, 11), rest = bin.bits - digit;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            unsigned place = held[i] - bin.low;
            // What is below wraps to large numbers.
            if (i < items && place >> bin.bits == 0) atomicAdd(&shared.histogram[place >> rest], held[i]);
        }
        __syncthreads();
        find(needed - bin.above, shared);
        bin = {bin.low + (shared.bin << rest), bin.above + shared.above, rest};
        inside = shared.inside;
    }
    unsigned ties = (needed - bin.above + bin.low - 1) / bin.low;
    return {bin.low, ties, ties * bin.low == inside};
}

// A mass in units of 2^-30. What is no mass reaches the limit by itself.
__device__ unsigned fixed_of(float mass) {
    if (!(mass < 2.0f)) return LIMIT;
    return mass > 0.0f ? (unsigned)(mass * ONE) : 0u;
}

// Stores the blocks that are selected, if they are at most `capacity`; returns how many they are.
__device__ unsigned place(const unsigned (&held)[ITEMS], int items, int newest, const int* table, Threshold threshold,
                          unsigned capacity, int* indices, Shared& shared) {
    unsigned equal = 0, taken = 0;
    if (!threshold.all) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) equal += i < items && held[i] == threshold.number;
        equal = threads_before(equal, shared.warps[1]);
    }
    unsigned selected = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        bool is_tie = i < items && held[i] == threshold.number;
        bool chosen = is_tie && (threshold.all || equal < threshold.ties) || i < items && held[i] > threshold.number;
        equal += is_tie;
        chosen = chosen || i < items && i == newest;
        selected |= (unsigned)chosen << i;
        taken += chosen;
    }
    int* next = indices + threads_before(taken, shared.warps[4]);
    unsigned total = all_threads(shared.warps[4]);
    if (total > capacity) return total;
    // In groups whose loads are all on their way before the first of them is stored.
#pragma unroll
    for (int group = 0; group < ITEMS; group += GROUP) {
        if (group >= items) break;
        int ids[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            if (selected >> (group + i) & 1) ids[i] = table[group + i];
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            if (selected >> (group + i) & 1) *next++ = ids[i];
    }
    return total;
}

// Selects from a row; returns how many blocks, or 0 if the row has no such set.
__device__ unsigned select(const float* masses, const int* table, int n_blocks, float top_p, unsigned capacity,
                           int* indices, bool aligned, Shared& shared) {
    int items = (n_blocks + 4 * THREADS - 1) / (4 * THREADS) * 4, first = threadIdx.x * items;
    unsigned held[ITEMS];
    unsigned long long sum = 0;
#pragma unroll
    for (int group = 0; group < ITEMS; group += 4) {
        float some[4] = {};
        if (group < items) load_some<float4>(masses + first + group, n_blocks - first - group, aligned, some);
#pragma unroll
        for (int i = 0; i < 4; i++)
            held[group + i] = group < items && first + group + i < n_blocks ? fixed_of(some[i]) : 0;
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        sum += held[i];
        if (held[i] > 0) atomicAdd(&shared.histogram[first_bin(held[i])], held[i]);
    }
    // A warp's sum in two parts, as it may have more than 32 bits.
    unsigned lower = __reduce_add_sync(ALL, (unsigned)sum & 0xFFFF), upper = __reduce_add_sync(ALL, (unsigned)(sum >> 16));
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) {
        shared.warps[2][warp] = lower;
        shared.warps[3][warp] = upper;
    }
    __syncthreads();
    unsigned long long total = ((unsigned long long)all_threads(shared.warps[3]) << 16) + all_threads(shared.warps[2]);
    if (total == 0 || total >= LIMIT || !(top_p < 1.0f)) return 0;
    unsigned long long top_p_fixed = top_p > 0.0f ? (unsigned long long)(top_p * ONE) : 0;
    unsigned needed = (unsigned)((top_p_fixed * total + ((1u << 30) - 1)) >> 30);
    Threshold threshold = {0xFFFFFFFFu, 0, true};
    if (needed > 0) threshold = find_threshold(held, items, needed, shared);
    int newest = n_blocks - 1 - first;
    return place(held, items, newest, table + first, threshold, capacity, indices, shared);
}

// No pointer is __restrict__: what the kernel before this one wrote must not be read as constant, or before the wait.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
block_topp(const float* masses, const int* table, const int* n_blocks_ptr, const int* capacity_ptr, const float* top_p,
           int* indices, int* counts, unsigned long long* stats, long long mass_stride, long long table_stride,
           long long width, long long aligned) {
    SHARED(Shared, shared);
    launch_dependents();
    for (int i = threadIdx.x; i < BINS; i += THREADS) shared.histogram[i] = 0;
    __syncthreads();
    await_inputs();
    long long row = blockIdx.x;
    int n_blocks = n_blocks_ptr[row], capacity = capacity_ptr[row];
    masses += row * mass_stride;
    table += row * table_stride;
    indices += row * width;
    unsigned count = 0;
    if (capacity < n_blocks)
        count = select(masses, table, n_blocks, top_p[row], max(capacity, 0), indices, aligned, shared);
    bool overflowed = count > (unsigned)max(capacity, 0);
    if (count == 0 || overflowed) {
        count = n_blocks;
        for (int i = threadIdx.x; i < n_blocks; i += THREADS) indices[i] = table[i];
    }
    if (threadIdx.x > 0) return;
    counts[row] = count;
    if (stats && n_blocks > 0) {
        atomicAdd(stats, 1ull);
        atomicAdd(stats + 1, (unsigned long long)count);
        atomicAdd(stats + 2, (unsigned long long)n_blocks);
        if (overflowed) atomicAdd(stats + 3, 1ull);
    }
}
