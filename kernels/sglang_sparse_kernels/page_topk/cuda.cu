// Page selection for one row and KV head per cluster of blocks; see cuda.py for the method and the launch.
//
// Compile-time: CLUSTER (blocks of a cluster; a power of two, 1 before Hopper), THREADS (of a block; a power of two, at
// least 32), ITEMS (scores a thread holds in registers, multiple of 4), VOTERS (query heads whose votes make a score, at
// most 8, or 0 where scores are given). A block is bound by the instructions that it issues for each score, so these are
// what the code saves, and what a cluster divides.
//
// A cluster's blocks hold consecutive parts of a row. All take the same decisions from the same numbers, so that they
// meet at the same barriers. They only read from one another, and none ends before all have read.

#include "hopper.cuh"
#include "ampere.cuh"
#include "block.cuh"

#define BINS 2048
#define LIST 256
#define WARPS (THREADS / 32)
// Whether registers are left for the page table.
#define PAGES_HELD (ITEMS <= 8)
// Pages that are loaded together where they are not held.
#define GROUP (PAGES_HELD ? 4 : 8)
#define PAGES_SIZE (PAGES_HELD ? ITEMS : 4)
// Pages whose logits are on their way before the sums of all votes are known.
#define AHEAD (ITEMS <= 8 && ITEMS * VOTERS * THREADS <= 32768 ? ITEMS : 4)
#define NOT_A_NUMBER __uint_as_float(0x7FC00000u)

#include "votes.cuh"

// See hopper.cuh.
#ifdef __CUDACC__
// Hides where a score comes from: knowing which are missing, the compiler would keep that in registers.
__device__ void hide(float& score) { asm("" : "+f"(score)); }
#endif

__device__ unsigned block_rank() { return blockIdx.x % CLUSTER; }

// A score that counts as +inf if it is NaN, and as 0.0 if it is -0.0.
__device__ float clean(float score) { return score == score ? score + 0.0f : INFINITE; }

// Order of the keys is that of clean scores; bits in which every score has one key.
__device__ unsigned key_of(float score) {
    unsigned bits = __float_as_uint(score);
    return bits ^ ((int)bits >> 31 | 0x80000000u);
}

__device__ float score_of(unsigned key) { return __uint_as_float(key ^ (~((int)key >> 31) | 0x80000000u)); }

// Bins over a range of scores, equal and from the highest down; what lies outside is in the first or the last. Rounding
// may shift the bins, but never changes the order.
struct Bins {
    float scale, offset;
    __device__ unsigned operator()(float score) const {
        // From 2^23 on, a float's last bit is worth one.
        float place = fminf(fmaxf(fmaf(score, scale, offset), 8388608.0f), 8388608.0f + BINS - 1);
        return __float_as_uint(place) & (BINS - 1);
    }
};

struct Range {
    unsigned low, high;  // keys
};

// A bin: how many scores are higher, how many in it, and how many of each the blocks before this one hold.
struct Bin {
    unsigned index, above, inside, above_before, inside_before;
};

struct Shared {
    unsigned histogram[BINS];
    unsigned sums[32];  // of the histogram's 32 parts
    unsigned warp[2][WARPS];
    unsigned list[LIST], merged[CLUSTER == 1 ? 1 : LIST];
    unsigned listed, threshold, low, high;
    Bin bin;
    Wholes wholes;
};

// What is selected: all scores from the threshold on or, of those equal to it, the first `ties` only. The blocks before
// this one hold so many higher and equal ones.
struct Threshold {
    float score;
    unsigned ties, higher_before, equal_before;
    bool all;
};

// Lowest and highest key of the scores that `wanted` takes; never of a missing score, which is NaN.
template <int SIZE, typename Wanted>
__device__ Range key_range(const float (&scores)[SIZE], int items, Shared& shared, Wanted wanted) {
    float low = INFINITE, high = -INFINITE;
#pragma unroll
    for (int group = 0; group < SIZE; group += 4) {
        if (group >= items) break;
#pragma unroll
        for (int i = group; i < group + 4; i++) {
            bool taken = wanted(scores[i]);
            low = fminf(low, taken ? scores[i] : INFINITE);
            high = fmaxf(high, taken ? scores[i] : -INFINITE);
        }
    }
    unsigned lowest = __reduce_min_sync(ALL, key_of(low)), highest = __reduce_max_sync(ALL, key_of(high));
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) {
        shared.warp[0][warp] = lowest;
        shared.warp[1][warp] = highest;
    }
    __syncthreads();
    lowest = __reduce_min_sync(ALL, lane < WARPS ? shared.warp[0][lane] : ALL);
    highest = __reduce_max_sync(ALL, lane < WARPS ? shared.warp[1][lane] : 0u);
    return Range{lowest, highest};
}

// The range of all blocks' ranges.
__device__ Range over_cluster(Range range, Shared& shared) {
    if (threadIdx.x == 0) {
        shared.low = range.low;
        shared.high = range.high;
    }
    cluster_barrier();
    for (unsigned rank = 0; rank < CLUSTER; rank++) {
        range.low = min(range.low, load_from(rank, &shared.low));
        range.high = max(range.high, load_from(rank, &shared.high));
    }
    return range;
}

// Which bin holds the score of rank `wanted` from the top, by one block.
__device__ Bin find_bin_alone(unsigned wanted, unsigned above, Shared& shared) {
    constexpr int EACH = BINS / THREADS;
    unsigned counts[EACH], total = 0, first = threadIdx.x * EACH;
#pragma unroll
    for (unsigned i = 0; i < EACH; i++) total += counts[i] = shared.histogram[first + i];
    unsigned before = above + threads_before(total, shared.warp[0]);
#pragma unroll
    for (unsigned i = 0; i < EACH; i++) {
        if (before < wanted && wanted <= before + counts[i]) shared.bin = Bin{first + i, before, counts[i]};
        before += counts[i];
    }
    __syncthreads();
    return Bin{shared.bin.index, shared.bin.above, shared.bin.inside, 0, 0};
}

// One warp: which of 32 * EACH counts, of all blocks together, holds the score of rank `wanted`. `bin` has what comes
// before the counts, and then what is found.
template <int EACH>
__device__ void descend(const unsigned* counts, unsigned wanted, Bin& bin) {
    unsigned lane = threadIdx.x % 32, sums[EACH] = {}, before[EACH] = {}, total = 0;
#pragma unroll
    for (unsigned rank = 0; rank < CLUSTER; rank++) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            unsigned count = load_from(rank, counts + lane * EACH + i);
            sums[i] += count;
            total += count;
            if (rank < block_rank()) before[i] += count;
        }
    }
    unsigned above = bin.above + lanes_through(total) - total, above_before = 0;
    bool found = false;
    Bin mine = {};
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (above < wanted && wanted <= above + sums[i]) {
            mine = Bin{lane * EACH + i, above, sums[i], above_before, before[i]};
            found = true;
        }
        above += sums[i];
        above_before += before[i];
    }
    unsigned source = 31 - __clz(__ballot_sync(ALL, found));
    bin.above_before += __reduce_add_sync(ALL, lane < source ? above_before : mine.above_before);
    bin.index = __shfl_sync(ALL, mine.index, source);
    bin.above = __shfl_sync(ALL, mine.above, source);
    bin.inside = __shfl_sync(ALL, mine.inside, source);
    bin.inside_before = __shfl_sync(ALL, mine.inside_before, source);
}

// The same by a cluster: from sums over parts of the blocks' histograms and then from one part, since to read all of
// the others' histograms would take longer than to make them.
__device__ Bin find_bin(unsigned wanted, unsigned above, unsigned above_before, Shared& shared) {
    if (CLUSTER == 1) return find_bin_alone(wanted, above, shared);
    constexpr int PART = BINS / 32;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int part = threadIdx.x / 32; part < 32; part += WARPS) {
        unsigned count = 0;
#pragma unroll
        for (int i = lane; i < PART; i += 32) count += shared.histogram[part * PART + i];
        count = __reduce_add_sync(ALL, count);
        if (lane == 0) shared.sums[part] = count;
    }
    cluster_barrier();
    if (threadIdx.x < 32) {
        Bin bin = {0, above, 0, above_before, 0};
        descend<1>(shared.sums, wanted, bin);
        unsigned part = bin.index * PART;
        descend<PART / 32>(shared.histogram + part, wanted, bin);
        bin.index += part;
        if (lane == 0) shared.bin = bin;
    }
    __syncthreads();
    return shared.bin;
}

__device__ void clear(Shared& shared) {
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.histogram[bin] = 0;
}

// The list of all blocks: each has its part where it belongs, and zeros elsewhere.
__device__ const unsigned* merge(unsigned count, Shared& shared) {
    cluster_barrier();
    for (unsigned i = threadIdx.x; i < count; i += THREADS) {
        unsigned key = 0;
#pragma unroll
        for (unsigned rank = 0; rank < CLUSTER; rank++) key |= load_from(rank, &shared.list[i]);
        shared.merged[i] = key;
    }
    __syncthreads();
    cluster_arrive();
    return shared.merged;
}

// The score of rank `wanted` among the at most LIST ones of a bin, which `inside` takes: ranked against one another in
// each block, which gets them from all.
template <typename Inside>
__device__ Threshold rank_all(const float (&scores)[ITEMS], int items, Bin bin, unsigned wanted, Shared& shared,
                              Inside inside) {
#pragma unroll
    for (int group = 0; group < ITEMS; group += 4) {
        if (group >= items) break;
#pragma unroll
        for (int i = group; i < group + 4; i++)
            if (inside(scores[i]))
                shared.list[bin.inside_before + atomicAdd(&shared.listed, 1u)] = key_of(scores[i]);
    }
    const unsigned* list = shared.list;
    if (CLUSTER == 1) __syncthreads();
    else list = merge(bin.inside, shared);
    for (unsigned mine = threadIdx.x; mine < bin.inside; mine += THREADS) {
        unsigned key = list[mine], higher = 0, equal = 0, earlier = 0, higher_before = 0, equal_before = 0;
        for (unsigned i = 0; i < bin.inside; i++) {
            unsigned other = list[i];
            higher += other > key;
            equal += other == key;
            earlier += other == key && i < mine;
            if (CLUSTER > 1 && i < bin.inside_before) {
                higher_before += other > key;
                equal_before += other == key;
            }
        }
        higher += bin.above;
        if (earlier == 0 && higher < wanted && wanted <= higher + equal) {
            shared.threshold = key;
            shared.bin = Bin{0, higher, equal, bin.above_before + higher_before, equal_before};
        }
    }
    __syncthreads();
    bin = shared.bin;
    unsigned ties = wanted - bin.above;
    return Threshold{score_of(shared.threshold), ties, CLUSTER == 1 ? 0 : bin.above_before,
                     CLUSTER == 1 ? 0 : bin.inside_before, ties == bin.inside};
}

// The same among any number of scores in a range of keys, by dividing the range until few are left, or one key.
__device__ Threshold divide(const float (&scores)[ITEMS], int items, Range range, Bin bin, unsigned wanted,
                            Shared& shared) {
    while (true) {
        // Everybody has read this block's histogram.
        if (CLUSTER > 1) cluster_barrier();
        clear(shared);
        __syncthreads();
        unsigned span = range.high - range.low;
        int shift = max(0, 21 - __clz(span));
#pragma unroll
        for (int group = 0; group < ITEMS; group += 4) {
            if (group >= items) break;
#pragma unroll
            for (int i = group; i < group + 4; i++) {
                unsigned distance = range.high - key_of(scores[i]);
                if (distance <= span) atomicAdd(&shared.histogram[distance >> shift], 1u);
            }
        }
        __syncthreads();
        bin = find_bin(wanted, bin.above, bin.above_before, shared);
        unsigned start = bin.index << shift, ties = wanted - bin.above;
        range = Range{range.high - min(span, start + (1u << shift) - 1), range.high - start};
        // A bin that is taken whole, or whose scores are equal.
        if (ties == bin.inside || shift == 0) {
            if (CLUSTER > 1) cluster_arrive();
            return Threshold{score_of(range.low), ties, bin.above_before, bin.inside_before, ties == bin.inside};
        }
        if (bin.inside <= LIST)
            return rank_all(scores, items, bin, wanted, shared, [=](float score) {
                return range.high - key_of(score) <= range.high - range.low;
            });
    }
}

// `sample` is some of the row's scores, the same in all blocks; they say how wide the bins are. The caller still has to
// wait for the cluster.
__device__ Threshold find_threshold(const float (&scores)[ITEMS], const float (&sample)[4], int items, unsigned wanted,
                                    Shared& shared) {
    Range range = key_range(sample, 4, shared, [](float score) { return fabsf(score) < INFINITE; });
    float low = score_of(range.low), high = score_of(range.high);
    Bins bins = {(BINS - 3) / (low - high), 0.0f};
    bins.offset = 8388609.0f - high * bins.scale;
    // Equal scores, or such a range that its bins cannot be said in floats: one bin, divided by its keys.
    if (!(bins.scale < 0.0f && fabsf(bins.offset) <= LARGEST)) bins = Bins{0.0f, 8388608.0f};
#pragma unroll
    for (int group = 0; group < ITEMS; group += 4) {
        if (group >= items) break;
#pragma unroll
        for (int i = group; i < group + 4; i++)
            if (scores[i] == scores[i]) atomicAdd(&shared.histogram[bins(scores[i])], 1u);
    }
    __syncthreads();
    Bin bin = find_bin(wanted, 0, 0, shared);
    unsigned index = bin.index;
    auto inside = [=](float score) { return score == score && bins(score) == index; };
    if (bin.inside <= LIST) return rank_all(scores, items, bin, wanted, shared, inside);
    range = key_range(scores, items, shared, inside);
    if (CLUSTER > 1) range = over_cluster(range, shared);
    return divide(scores, items, range, bin, wanted, shared);
}

// Stores the selected pages in logical order. `pages` are those of `page_table`, where they are held.
template <bool TIES>
__device__ void place(const float (&scores)[ITEMS], const int* pages, int items, const int* page_table,
                      Threshold threshold, int* indices, Shared& shared) {
    // At most 32,768 pages of a block, which fit a half: see cuda.py.
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
    unsigned before = threads_before(mine, shared.warp[1]);
    unsigned equal = threshold.equal_before + (before >> 16);
    unsigned taken = TIES ? min(equal, threshold.ties) : threshold.equal_before;
    int* next = indices + threshold.higher_before + (before & 0xFFFF) + taken;
    // In groups whose loads are all on their way before the first of them is stored.
#pragma unroll
    for (int group = 0; group < ITEMS; group += GROUP) {
        if (group >= items) break;
        int chosen[GROUP];
        bool selected[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            float score = scores[group + i];
            selected[i] = TIES ? score > threshold.score : score >= threshold.score;
            if (TIES && score == threshold.score) selected[i] = equal++ < threshold.ties;
            if (PAGES_HELD) chosen[i] = pages[group + i];
            else if (selected[i]) chosen[i] = page_table[group + i];
        }
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            if (selected[i]) *next++ = chosen[i];
    }
}

// A thread's consecutive pages, in fours, of those that its block holds.
struct Part {
    int items, first, left;
    __device__ explicit Part(int n_pages) {
        unsigned size = (n_pages + 4 * CLUSTER - 1u) / (4 * CLUSTER) * 4;
        items = (size + 4 * THREADS - 1) / (4 * THREADS) * 4;
        first = block_rank() * size + threadIdx.x * items;
        left = min(n_pages, (int)(block_rank() * size + size)) - first;
    }
};

template <typename Four, typename Number, int SIZE>
__device__ void load_part(const Number* source, const Part& part, bool aligned, Number (&target)[SIZE]) {
#pragma unroll
    for (int group = 0; group < SIZE; group += 4) {
        if (group >= part.items) break;
        load_some<Four>(source + part.first + group, part.left - group, aligned, target + group);
    }
}

// A thread's scores, and four of the row's sample from `start` on; what lies beyond the row is left as it is.
__device__ void load_scores(const Scores& scores, const Part& part, int start, int n_pages, float (&held)[ITEMS],
                            float (&sample)[4], Shared& shared) {
#if VOTERS
    float logits[AHEAD / 4][VOTERS][4], sampled[VOTERS][4];
#pragma unroll
    for (int group = 0; group < AHEAD; group += 4)
        load_logits(scores, part.first + group, part.left - group, logits[group / 4]);
    if (CLUSTER > 1) load_logits(scores, start, n_pages - start, sampled);
    sum_votes(scores, shared.wholes);
#pragma unroll
    for (int group = 0; group < ITEMS; group += 4) {
        if (group >= part.items) break;
        int page = part.first + group;
        if (group >= AHEAD) load_logits(scores, page, part.left - group, logits[0]);
        tally(logits[group < AHEAD ? group / 4 : 0], scores, page, shared.wholes, held + group);
    }
    if (CLUSTER > 1) tally(sampled, scores, start, shared.wholes, sample);
#else
    load_part<float4>(scores.first, part, scores.aligned, held);
    if (CLUSTER > 1) load_some<float4>(scores.first + start, n_pages - start, scores.aligned, sample);
#endif
}

// Selects `wanted` of `n_pages` pages.
__device__ void select(const Scores& scores, const int* page_table, const int (&pages)[PAGES_SIZE], Part part,
                       int n_pages, int wanted, int* indices, Shared& shared) {
    float held[ITEMS], sample[4];
    int start = threadIdx.x * ((n_pages + 4 * THREADS - 1u) / (4 * THREADS) * 4);
    load_scores(scores, part, start, n_pages, held, sample, shared);
#pragma unroll
    for (int group = 0; group < ITEMS; group += GROUP) {
        if (group >= part.items) break;
#pragma unroll
        for (int i = group; i < group + GROUP; i++) {
            held[i] = i < part.items && i < part.left ? clean(held[i]) : NOT_A_NUMBER;
            hide(held[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        sample[i] = CLUSTER == 1 ? held[i] : start + i < n_pages ? clean(sample[i]) : NOT_A_NUMBER;
    Threshold threshold = find_threshold(held, sample, part.items, wanted, shared);
    if (threshold.all) place<false>(held, pages, part.items, page_table + part.first, threshold, indices, shared);
    else place<true>(held, pages, part.items, page_table + part.first, threshold, indices, shared);
    if (CLUSTER > 1) cluster_wait();
}

// No pointer is __restrict__: what the kernel before this one wrote must not be read as constant, or before the wait.
// With `tables_ready` the page table and the numbers of pages are older, and read while that kernel still runs.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
page_topk(const float* scores, const int* page_table, const int* n_pages_ptr, const int* n_select_ptr, int* indices,
          int* counts, unsigned long long* stats, const float* parts, long long table_stride, long long width,
          long long max_select_wide, long long aligned, long long tables_ready, long long num_parts, long long local) {
    SHARED(Shared, shared);
    launch_dependents();
    clear(shared);
    if (CLUSTER > 1)
        for (int i = threadIdx.x; i < LIST; i += THREADS) shared.list[i] = 0;
    if (threadIdx.x == 0) shared.listed = 0;
    if (!tables_ready) await_inputs();
    int head = blockIdx.x / CLUSTER, row = blockIdx.y, heads = gridDim.x / CLUSTER;
    long long pair = (long long)row * heads + head;
    int n_pages = n_pages_ptr[row], max_select = (int)max_select_wide;
    int wanted = max(0, min(min(n_select_ptr[row], n_pages), max_select));
    page_table += row * table_stride;
    indices += pair * max_select;
    Part part(n_pages);
    int pages[PAGES_SIZE];
    if (PAGES_HELD) load_part<int4>(page_table, part, aligned, pages);
    // Nothing is written before it either: the kernel before this one may still read what the last selection was.
    await_inputs();
    if (threadIdx.x == 0 && block_rank() == 0) {
        counts[pair] = wanted;
        if (stats && head == 0 && wanted > 0) {
            atomicAdd(stats, (unsigned long long)heads);
            atomicAdd(stats + 1, (unsigned long long)wanted * heads);
            atomicAdd(stats + 2, (unsigned long long)n_pages * heads);
        }
    }
    if (wanted == 0) return;
    if (wanted == n_pages) {
        int start = block_rank() * THREADS + threadIdx.x;
        for (int i = start; i < n_pages; i += CLUSTER * THREADS) indices[i] = page_table[i];
        return;
    }
#if VOTERS
    const float2* sums = (const float2*)parts + pair * VOTERS * num_parts;
    Scores source = {scores + pair * VOTERS * width, aligned != 0, sums, width, (int)num_parts, n_pages - (int)local};
#else
    Scores source = {scores + pair * width, aligned != 0};
#endif
    select(source, page_table, pages, part, n_pages, wanted, indices, shared);
}
