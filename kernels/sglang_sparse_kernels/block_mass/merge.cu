// Block masses of the RoPE dimensions, their second half: from what pieces weigh in each head to the masses of blocks. See
// cuda.py for the launch.
//
// Compile-time: those of block_mass.cuh, and CLUSTER (blocks of a cluster; 1 before Hopper).

#include "ampere.cuh"
#include "block_mass.cuh"

#define WARPS 8
#define THREADS (32 * WARPS)
#define WORDS 16  // of a head that a lane takes at a time: 32 pieces, one for each lane in the end
#define LOADS 8   // totals on their way at once
#define PARTS (THREADS / HEADS)

// Adds a head's total over some splits to that over others, both relative to 2 to the power of a reference, which stands
// before them; so is the sum, for the higher one.
__device__ void add(float2& sum, float2 other) {
    float highest = fmaxf(sum.x, other.x);
    sum.y = sum.y * exp2_of(sum.x - highest) + other.y * exp2_of(other.x - highest);
    sum.x = highest;
}

struct Merged {
    float2 parts[PARTS][HEADS];
    unsigned totals[2][HEADS];  // of this block's splits
    float factors[HEADS];
};

// By what the words of a split are to be multiplied, for each head: shared.factors. The blocks of a cluster divide the
// splits whose totals they add up. All threads of the cluster call it, and afterwards cluster_wait().
__device__ void find_factors(const float2* totals, const Share& share, int split, Merged& shared) {
    int head = threadIdx.x % HEADS, part = threadIdx.x / HEADS, rank = blockIdx.x % CLUSTER;
    float2 sum = {LOWEST, 0.0f};
    if (part < PARTS) {
        for (int first = part * CLUSTER + rank; first < share.splits; first += LOADS * PARTS * CLUSTER) {
            float2 others[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                int place = first + i * PARTS * CLUSTER;
                others[i] = {LOWEST, 0.0f};
                if (place < share.splits) others[i] = totals[place * HEADS + head];
            }
#pragma unroll
            for (int i = 0; i < LOADS; i++) add(sum, others[i]);
        }
        shared.parts[part][head] = sum;
    }
    __syncthreads();
    if (part == 0) {
#pragma unroll
        for (int i = 1; i < PARTS; i++) add(sum, shared.parts[i][head]);
        shared.totals[0][head] = __float_as_uint(sum.x);
        shared.totals[1][head] = __float_as_uint(sum.y);
    }
    if (CLUSTER > 1) cluster_barrier();
    if (part == 0) {
        if (CLUSTER > 1) sum = {LOWEST, 0.0f};
#pragma unroll
        for (int i = 0; i < CLUSTER; i++)
            if (CLUSTER > 1)
                add(sum, {__uint_as_float(load_from(i, &shared.totals[0][head])),
                          __uint_as_float(load_from(i, &shared.totals[1][head]))});
        // A row without any weight has NaN alone.
        float reference = split < share.splits ? totals[split * HEADS + head].x : LOWEST;
        shared.factors[head] = exp2_of(reference - sum.x) * (1.0f / (sum.y * HEADS));
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive();
}

// Sums over lanes that differ in some bits of two times so many numbers as the highest of these bits is worth.
template <int BIT, int SIZE> __device__ void sum_lanes(float (&numbers)[SIZE]) {
#pragma unroll
    for (int i = 0; i < BIT; i++) numbers[i] = halve(numbers[i], numbers[i + BIT], BIT);
    if constexpr (BIT > 1) sum_lanes<BIT / 2>(numbers);
}

// What 32 pieces weigh in all heads: lane i gets that of the i-th one. Words at or beyond the end count as 0.
__device__ float merge_pieces(const unsigned* words, int held, const float (&factors)[HEADS]) {
    float masses[2 * WORDS] = {};
#pragma unroll
    for (int i = 0; i < (HEADS + 31) / 32; i++) {
        int head = i * 32 + threadIdx.x % 32;
        if (head >= HEADS) break;
        unsigned all[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; i++) all[i] = i < held ? words[i * HEADS + head] : 0;
        float factor = factors[head];
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            float unit = __uint_as_float(all[i] >> 1 & 0x7F800000u) * factor;
            unsigned ones = __float_as_uint(ONES);
            masses[2 * i] += (__uint_as_float((all[i] & FRACTION) | ones) - ONES) * unit;
            masses[2 * i + 1] += (__uint_as_float((all[i] >> 12 & FRACTION) | ones) - ONES) * unit;
        }
    }
    sum_lanes<WORDS>(masses);
    return masses[0];
}

// The masses of a split's blocks.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
block_mass_merge(const unsigned* words, const float2* totals, const int* n_blocks_ptr, float* out, long long row_words,
                 long long splits_wide, long long width, long long size_log2_wide) {
    launch_dependents();
    await_inputs();
    SHARED(Merged, shared);
    int row = blockIdx.y, split = blockIdx.x, splits = (int)splits_wide;
    int n_blocks = n_blocks_ptr[row], size_log2 = (int)size_log2_wide, lane = threadIdx.x % 32;
    if (n_blocks == 0) return;
    Share share(n_blocks, size_log2, splits, split);
    find_factors(totals + (long long)row * splits * HEADS, share, split, shared);
    words += row * row_words;
    out += row * width;
    int end = share.last * TOKEN_WARPS, pieces_log2 = size_log2 - 4;
    int first = share.first * TOKEN_WARPS + threadIdx.x / 32 * WORDS;
    for (; first < end; first += WARPS * WORDS) {
        float mass = merge_pieces(words + (long long)first * HEADS, end - first, shared.factors);
        if (pieces_log2 > 0) mass += swap(mass, 1);
        if (pieces_log2 > 1) mass += swap(mass, 2);
        int piece = 2 * first + lane, block = piece >> pieces_log2;
        if (lane < 2 * (end - first) && piece % (1 << pieces_log2) == 0 && block < n_blocks) out[block] = mass;
    }
    if (CLUSTER > 1) cluster_wait();
}
