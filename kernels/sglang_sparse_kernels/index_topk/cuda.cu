// The best tokens of one query per cluster of blocks; see cuda.py for the method and the launch.
//
// Compile-time: CLUSTER (blocks of a cluster; a power of two, 1 before Hopper), THREADS (of a block; a power of two, at
// least 32), RESIDENT (blocks that a multiprocessor is to run at once), CANDIDATES (that a block keeps; it can have 32
// tokens for each of them at most), PAGE (tokens of a page).
//
// A cluster's blocks hold consecutive parts of a row. All take the same decisions from the same numbers, so that they
// meet at the same barriers. They only read from one another, and none ends before all have read.

#include "hopper.cuh"
#include "block.cuh"

#define BINS 2048
#define WARPS (THREADS / 32)
// Loads of a thread that are on their way at once, of four logits each.
#define VECTORS 4
#define TILE (4 * VECTORS * THREADS)
// Such loads of a sample; of all but the longest rows it is 1,024 at most.
#define SAMPLED (1024 / THREADS)
#define INFINITE __uint_as_float(0x7F800000u)
#define LARGEST 3.402823466e38f
// A thread says of each of its candidates whether it is chosen by a bit.
static_assert(CANDIDATES <= 32 * THREADS && BINS % THREADS == 0 && THREADS <= 1024, "more than a thread can hold");

// See hopper.cuh.
#ifdef __CUDACC__
// Four logits that are read once: they leave the caches first. Volatile, so that all loads are on their way before the
// first of them is used, and none before the kernel's inputs are there.
__device__ float4 load_four(const float* place) {
    float4 four;
    asm volatile("ld.global.cs.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w) : "l"(place) : "memory");
    return four;
}
#endif

__device__ unsigned block_rank() { return blockIdx.x % CLUSTER; }

// Order of the keys is that of the logits, of which NaN counts as +inf and -0.0 as 0.0.
__device__ unsigned key_of(float logit) {
    unsigned bits = __float_as_uint(logit == logit ? logit + 0.0f : INFINITE);
    return bits ^ ((int)bits >> 31 | 0x80000000u);
}

__device__ float logit_of(unsigned key) { return __uint_as_float(key ^ (~((int)key >> 31) | 0x80000000u)); }

struct Bin {
    unsigned index, above, inside;  // how many keys are higher, how many in it
};

struct Shared {
    // First a sample of the row, two logits a pair; then candidates, each with its place in the block's part of the
    // row; at last in the first number of each pair a word of the bitmap of what was chosen.
    alignas(16) uint2 pairs[CANDIDATES];
    alignas(16) unsigned histogram[BINS];
    unsigned warp[WARPS];
    unsigned count, low, high, above, equal, cut;
    Bin bin;
};

// The part of a row that a block holds: `logits[begin]` to `logits[end - 1]`, where `logits` is a multiple of 16 bytes;
// `origin` is the position of `logits[0]`, which may lie before the row.
struct Part {
    const float* logits;
    int begin, end, origin;
    __device__ Part(const float* row, int length) {
        int shift = (unsigned long long)row / 4 % 4;
        int size = (shift + length + 4 * CLUSTER - 1) / (4 * CLUSTER) * 4;
        origin = (int)block_rank() * size - shift;
        logits = row + origin;
        begin = max(0, -origin);
        end = max(begin, min(size, length - origin));
    }
};

// All threads of the cluster come here before any goes on, and see what the others wrote to their shared memory.
__device__ void meet() {
    if (CLUSTER > 1) cluster_barrier();
    else __syncthreads();
}

__device__ void clear(Shared& shared) {
    for (int i = threadIdx.x; i < BINS / 4; i += THREADS) ((uint4*)shared.histogram)[i] = uint4{0, 0, 0, 0};
    __syncthreads();
}

// Which bin holds the key of rank `wanted` from the top, where `above` keys are higher than all bins. With OF_ALL the
// histograms of the cluster's blocks are added up.
template <bool OF_ALL> __device__ Bin find_bin(unsigned wanted, unsigned above, Shared& shared) {
    constexpr int EACH = BINS / THREADS;
    unsigned counts[EACH], total = 0, first = threadIdx.x * EACH;
#pragma unroll
    for (unsigned i = 0; i < EACH; i++) {
        counts[i] = OF_ALL ? 0 : shared.histogram[first + i];
        if (OF_ALL)
            for (unsigned rank = 0; rank < CLUSTER; rank++) counts[i] += load_from(rank, &shared.histogram[first + i]);
        total += counts[i];
    }
    above += threads_before(total, shared.warp);
#pragma unroll
    for (unsigned i = 0; i < EACH; i++) {
        if (above < wanted && wanted <= above + counts[i]) shared.bin = Bin{first + i, above, counts[i]};
        above += counts[i];
    }
    __syncthreads();
    return shared.bin;
}

// What is chosen: all keys from `low` on or, where it is not `whole`, the keys above `low` and the first `ties` of
// those equal to it.
struct Threshold {
    unsigned low, ties;
    bool whole;
};

// Where the `wanted` highest keys end, by dividing a range of keys until a bin is taken whole, or has one key; up to
// `slack` keys more may be taken. `keys` are those of this thread: of all together, or with OF_ALL of those that this
// block holds. Those above `top`, which is `high` or ALL, are counted with the highest bin.
template <bool OF_ALL, typename Keys>
__device__ Threshold find(const Keys& keys, unsigned wanted, unsigned low, unsigned high, unsigned top, unsigned slack,
                          Shared& shared) {
    unsigned above = 0;
    while (true) {
        // Everybody has read this block's histogram.
        if (OF_ALL && CLUSTER > 1) cluster_barrier();
        clear(shared);
        unsigned span = high - low;
        int shift = max(0, 21 - __clz(span));
        keys.each([&](unsigned key) {
            unsigned distance = high - min(key, top);
            if (distance <= span) atomicAdd(&shared.histogram[distance >> shift], 1u);
        });
        if (OF_ALL) meet();
        else __syncthreads();
        Bin bin = find_bin<(OF_ALL && CLUSTER > 1)>(wanted, above, shared);
        unsigned start = bin.index << shift, ties = wanted - bin.above;
        low = high - min(span, start + (1u << shift) - 1);
        high = bin.index == 0 && top != ALL ? ALL : high - start;
        top = ALL;
        above = bin.above;
        if (bin.inside - ties <= slack || low == high) return Threshold{low, ties, bin.inside - ties <= slack};
    }
}

// Keys of a sample.
struct Sample {
    const float* logits;
    unsigned count;
    template <typename Visit> __device__ void each(Visit visit) const {
        for (unsigned i = threadIdx.x; i < count; i += THREADS) visit(key_of(logits[i]));
    }
};

// Where about the `rank` highest of a sample end. By equal bins, which one pass over it tells enough of, unless there
// are outliers.
__device__ unsigned divide(Sample sample, unsigned rank, unsigned low, unsigned high, Shared& shared) {
    float highest = logit_of(high), range = highest - logit_of(low), scale = BINS / range;
    unsigned slack = rank / 16;
    if (range <= LARGEST && scale <= LARGEST) {
        clear(shared);
        for (unsigned i = threadIdx.x; i < sample.count; i += THREADS)
            atomicAdd(&shared.histogram[min((unsigned)((highest - sample.logits[i]) * scale), BINS - 1u)], 1u);
        __syncthreads();
        Bin bin = find_bin<false>(rank, 0, shared);
        if (bin.above + bin.inside <= rank + slack) return key_of(highest - (bin.index + 1) / scale);
    }
    return find<false>(sample, rank, low, high, ALL, slack, shared).low;
}

// A key that the `wanted` highest of a row most likely are not below, and few others, from a sample of the row; and the
// highest key of the sample. The same in all blocks of a cluster.
__device__ unsigned guess(const float* row, int length, unsigned wanted, unsigned& high, Shared& shared) {
    int skipped = (4 - (int)((unsigned long long)row / 4 % 4)) % 4, vectors = (length - skipped) / 4;
    // Pieces of 32 bytes, as memory is read, all over the row: neighbours are alike.
    int pieces = min(min(length > 3 << 16 ? 1024 : length > 3 << 14 ? 512 : 256, CANDIDATES / 4), vectors / 4);
    // Four at least, so that a piece too far to the right by rounding is in the row.
    float apart = (float)vectors / pieces;
    float* sample = (float*)shared.pairs;
    float lowest = INFINITE, highest = -INFINITE;
    for (int begin = threadIdx.x; begin < 2 * pieces; begin += SAMPLED * THREADS) {
        float4 fours[SAMPLED];
#pragma unroll
        for (int j = 0; j < SAMPLED; j++) {
            int i = begin + j * THREADS;
            if (i < 2 * pieces) fours[j] = load_four(row + skipped + 4 * ((int)(i / 2 * apart) + i % 2));
        }
#pragma unroll
        for (int j = 0; j < SAMPLED; j++) {
            int i = begin + j * THREADS;
            if (i >= 2 * pieces) break;
            float4 four = fours[j];
            *(float4*)(sample + 4 * i) = four;
            bool numbers = four.x == four.x && four.y == four.y && four.z == four.z && four.w == four.w;
            lowest = fminf(lowest, fminf(fminf(four.x, four.y), fminf(four.z, four.w)));
            highest = fmaxf(highest, numbers ? fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)) : INFINITE);
        }
    }
    unsigned low = __reduce_min_sync(ALL, key_of(lowest));
    high = __reduce_max_sync(ALL, key_of(highest));
    if (threadIdx.x % 32 == 0) {
        atomicMin(&shared.low, low);
        atomicMax(&shared.high, high);
    }
    __syncthreads();
    low = shared.low;
    high = shared.high;
    unsigned samples = 8 * pieces;
    float expected = (float)wanted * samples / length;
    // Four times the deviation of a random sample.
    unsigned rank = min((unsigned)(expected + 4.0f * sqrtf(expected) + 4.0f), samples);
    return divide(Sample{sample, samples}, rank, low, high, shared);
}

__device__ void load_into(float (&held)[4], const float* place) {
    float4 four = load_four(place);
    held[0] = four.x;
    held[1] = four.y;
    held[2] = four.z;
    held[3] = four.w;
}

// Loads of a thread for a tile of a part: consecutive threads have consecutive fours. Returns by bits which logits
// belong to the part; only its first and its last tile have others.
__device__ unsigned load_tile(const Part& part, int first, float (&held)[VECTORS][4]) {
    int place = first + 4 * (int)threadIdx.x;
    if (first >= part.begin && first + TILE <= part.end) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) load_into(held[i], part.logits + place + i * (4 * THREADS));
        return (1u << 4 * VECTORS) - 1;
    }
    unsigned inside = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++, place += 4 * THREADS) {
        if (place >= part.begin && place + 4 <= part.end) {
            load_into(held[i], part.logits + place);
            inside |= 15u << 4 * i;
            continue;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            bool own = place + j >= part.begin && place + j < part.end;
            held[i][j] = own ? part.logits[place + j] : 0.0f;
            inside |= (unsigned)own << (4 * i + j);
        }
    }
    return inside;
}

// Keeps the logits of a part that are not below `least`, in any order; `held` has those of its first tile, which are
// `inside`. `shared.count` says how many there are, even if they do not fit; then nobody reads them.
__device__ void collect(const Part& part, float least, float (&held)[VECTORS][4], unsigned inside, Shared& shared) {
    for (int first = 0; first < part.end; first += TILE) {
        if (first > 0) inside = load_tile(part, first, held);
        unsigned kept = 0;
#pragma unroll
        for (int i = 0; i < 4 * VECTORS; i++) kept |= (unsigned)!(held[i / 4][i % 4] < least) << i;
        kept &= inside;
        if (!__ballot_sync(ALL, kept != 0)) continue;
        unsigned mine = __popc(kept), through = lanes_through(mine), begin = 0;
        if (threadIdx.x % 32 == 31) begin = atomicAdd(&shared.count, through);
        begin = __shfl_sync(ALL, begin, 31) + through - mine;
        if (begin + mine > CANDIDATES) kept = 0;
        uint2* next = shared.pairs + begin;
        unsigned place = first + 4 * threadIdx.x;
#pragma unroll
        for (int i = 0; i < 4 * VECTORS; i++)
            if (kept >> i & 1)
                *next++ = uint2{__float_as_uint(held[i / 4][i % 4]), place + i / 4 * (4 * THREADS) + i % 4};
    }
}

// Keys of the candidates of all blocks, which each block reads.
struct Candidates {
    const uint2* pairs;
    unsigned counts[CLUSTER], total, most;
    __device__ explicit Candidates(const Shared& shared) : pairs(shared.pairs), total(0), most(0) {
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) {
            counts[rank] = CLUSTER > 1 ? load_from(rank, &shared.count) : shared.count;
            total += counts[rank];
            most = max(most, counts[rank]);
        }
    }
    template <typename Visit> __device__ void each(Visit visit) const {
        for (unsigned i = threadIdx.x; i < most; i += THREADS) {
            unsigned bits[CLUSTER];
#pragma unroll
            for (int rank = 0; rank < CLUSTER; rank++)
                if (i < counts[rank]) bits[rank] = CLUSTER > 1 ? load_from(rank, &pairs[i].x) : pairs[i].x;
#pragma unroll
            for (int rank = 0; rank < CLUSTER; rank++)
                if (i < counts[rank]) visit(key_of(__uint_as_float(bits[rank])));
        }
    }
};

// Keys of a part.
struct Row {
    Part part;
    template <typename Visit> __device__ void each(Visit visit) const {
        for (int i = part.begin + (int)threadIdx.x; i < part.end; i += THREADS) visit(key_of(part.logits[i]));
    }
};

// What a block knows of its part: its candidates or, where these do not do, all of it.
struct Tokens {
    Part part;
    unsigned count;
    bool candidates;
};

// Of a thread's candidates, by bits: which are chosen, and which are equal to the last one that is.
struct Chosen {
    unsigned above, equal;
};

// Whether a key is chosen as all such are.
__device__ bool is_above(unsigned key, Threshold threshold) {
    return threshold.whole ? key >= threshold.low : key > threshold.low;
}

__device__ bool is_equal(unsigned key, Threshold threshold) { return !threshold.whole && key == threshold.low; }

// Counts them into `shared.above` and `shared.equal`, which others of the cluster read.
__device__ Chosen count(const Tokens& tokens, Threshold threshold, Shared& shared) {
    Chosen chosen = {0, 0};
    unsigned above = 0, equal = 0;
    if (tokens.candidates) {
        for (unsigned i = threadIdx.x, own = 0; i < tokens.count; i += THREADS, own++) {
            unsigned key = key_of(__uint_as_float(shared.pairs[i].x));
            chosen.above |= (unsigned)is_above(key, threshold) << own;
            chosen.equal |= (unsigned)is_equal(key, threshold) << own;
        }
        above = __popc(chosen.above);
        equal = __popc(chosen.equal);
    } else {
        Row{tokens.part}.each([&](unsigned key) {
            above += is_above(key, threshold);
            equal += is_equal(key, threshold);
        });
    }
    above = __reduce_add_sync(ALL, above);
    equal = __reduce_add_sync(ALL, equal);
    if (threadIdx.x % 32 == 0) {
        atomicAdd(&shared.above, above);
        atomicAdd(&shared.equal, equal);
    }
    meet();
    return chosen;
}

// Makes the bitmap of those tokens that are above (ABOVE), and of the equal ones before the place `cut`.
template <bool ABOVE>
__device__ void mark(const Tokens& tokens, Threshold threshold, Chosen chosen, unsigned cut, Shared& shared) {
    for (int word = threadIdx.x; word < (tokens.part.end + 31) / 32; word += THREADS) shared.pairs[word].x = 0;
    __syncthreads();
    auto add = [&](bool above, bool equal, unsigned token) {
        if ((ABOVE && above) || (equal && token < cut)) atomicOr(&shared.pairs[token / 32].x, 1u << token % 32);
    };
    if (tokens.candidates)
        // Their logits are gone.
        for (unsigned i = threadIdx.x, own = 0; i < tokens.count; i += THREADS, own++)
            add(chosen.above >> own & 1, chosen.equal >> own & 1, shared.pairs[i].y);
    else
        for (int i = tokens.part.begin + (int)threadIdx.x; i < tokens.part.end; i += THREADS) {
            unsigned key = key_of(tokens.part.logits[i]);
            add(is_above(key, threshold), is_equal(key, threshold), i);
        }
    __syncthreads();
}

// A thread's words of the bitmap: consecutive, and an odd number, so that the threads' lie in different banks.
struct Words {
    unsigned first, end, before;
    __device__ Words(const Part& part, Shared& shared) {
        unsigned words = (part.end + 31) / 32, size = (words + THREADS - 1) / THREADS | 1, mine = 0;
        first = min(words, threadIdx.x * size);
        end = min(words, first + size);
        for (unsigned word = first; word < end; word++) mine += __popc(shared.pairs[word].x);
        before = threads_before(mine, shared.warp);
    }
    // Calls a function for each token of these words, with how many of the bitmap are before it.
    template <typename Visit> __device__ void each(Shared& shared, Visit visit) const {
        unsigned place = before;
        for (unsigned word = first; word < end; word++)
            for (unsigned bits = shared.pairs[word].x; bits; bits &= bits - 1)
                visit(place++, 32 * word + __ffs(bits) - 1);
    }
};

// What is written of a query, as far as it is wanted; `table` is the row of the page table, or null.
struct Output {
    int *positions, *slots;
    const int* table;
    int offset;
    // Writes this thread's share of `number` tokens, from `place` on: those from `start` on, each `step`-th. Their
    // pages are on their way, four at a time, before the first of them is written.
    template <typename Position>
    __device__ void put(unsigned place, unsigned number, unsigned start, unsigned step, Position position_of) const {
        for (; start < number; start += VECTORS * step) {
            int found[VECTORS], page[VECTORS];
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                found[i] = start + i * step < number ? position_of(start + i * step) : 0;
                page[i] = table ? table[found[i] / PAGE] : 0;
            }
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                if (start + i * step >= number) break;
                unsigned target = place + start + i * step;
                if (positions) positions[target] = found[i];
                if (slots) slots[target] = table ? page[i] * PAGE + found[i] % PAGE : found[i] + offset;
            }
        }
    }
};

// Writes `number` tokens of the bitmap, from `place` on: first into shared memory, so that neighbours are written
// together.
__device__ void write(const Part& part, unsigned place, unsigned number, Output output, Shared& shared) {
    Words words(part, shared);
    for (unsigned begin = 0; begin < number; begin += BINS) {
        words.each(shared, [&](unsigned index, unsigned token) {
            if (index - begin < BINS) shared.histogram[index - begin] = token;
        });
        __syncthreads();
        output.put(place + begin, min(number - begin, (unsigned)BINS), threadIdx.x, THREADS,
                   [&](unsigned i) { return part.origin + (int)shared.histogram[i]; });
        __syncthreads();
    }
}

// Writes what of a part is chosen.
__device__ void place(const Tokens& tokens, Threshold threshold, Output output, Shared& shared) {
    Chosen chosen = count(tokens, threshold, shared);
    unsigned above = shared.above, equal = shared.equal, above_before = 0, equal_before = 0;
    if (CLUSTER > 1) {
        unsigned rank = threadIdx.x % 32, mine = block_rank();
        above_before = __reduce_add_sync(ALL, rank < mine ? load_from(rank, &shared.above) : 0u);
        equal_before = __reduce_add_sync(ALL, rank < mine ? load_from(rank, &shared.equal) : 0u);
        // From here on this block has read all that it reads of others.
        cluster_arrive();
    }
    unsigned ties = threshold.whole ? 0 : threshold.ties, taken_before = min(ties, equal_before), cut = ALL;
    unsigned taken = min(ties - taken_before, equal);
    if (taken < equal) {
        // The first ones only: those before the place of the next one.
        mark<false>(tokens, threshold, chosen, ALL, shared);
        Words(tokens.part, shared).each(shared, [&](unsigned index, unsigned token) {
            if (index == taken) shared.cut = token;
        });
        __syncthreads();
        cut = shared.cut;
    }
    mark<true>(tokens, threshold, chosen, cut, shared);
    write(tokens.part, above_before + taken_before, above + taken, output, shared);
    if (CLUSTER > 1) cluster_wait();
}

// Chooses `wanted` of `length` tokens, of which there are more.
__device__ void choose(const float* row, int length, unsigned wanted, Output output, Shared& shared) {
    Part part(row, length);
    // On their way while a sample is looked at.
    float held[VECTORS][4];
    unsigned inside = load_tile(part, 0, held), low = 0, high = ALL;
    if (length > CANDIDATES) low = guess(row, length, wanted, high, shared);
    collect(part, low ? logit_of(low) : -INFINITE, held, inside, shared);
    meet();
    Candidates candidates(shared);
    Tokens tokens = {part, shared.count, candidates.total >= wanted && candidates.most <= CANDIDATES};
    Threshold threshold;
    if (tokens.candidates) threshold = find<false>(candidates, wanted, low, high, high, 0, shared);
    // Few rows come here: those with very many equal logits, or of which the sample said nothing.
    else threshold = find<true>(Row{part}, wanted, 0, ALL, ALL, 0, shared);
    place(tokens, threshold, output, shared);
}

// No pointer is __restrict__: what the kernel before this one wrote must not be read as constant, or before the wait.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
index_topk(const float* logits, const int* lengths, const int* first, const int* wanted_ptr, const int* page_table,
           const int* rows, const int* offsets, int* positions, int* counts, int* slots, unsigned long long* stats,
           long long stride, long long width, long long topk, long long table_stride, long long nothing) {
    SHARED(Shared, shared);
    launch_dependents();
    if (threadIdx.x == 0) {
        shared.count = shared.high = shared.above = shared.equal = 0;
        shared.low = ALL;
    }
    __syncthreads();
    await_inputs();
    long long query = blockIdx.x / CLUSTER;
    int begin = first ? first[query] : 0, length = max(0, min(lengths[query], (int)width - begin));
    int wanted = min(length, (int)topk);
    if (wanted_ptr) wanted = max(0, min(wanted, wanted_ptr[query]));
    Output output = {positions ? positions + query * topk : nullptr, slots ? slots + query * topk : nullptr, nullptr,
                     offsets ? offsets[query] : 0};
    // The row of a query without tokens may be any number.
    if (slots && !offsets && wanted > 0) output.table = page_table + (rows ? rows[query] : query) * table_stride;
    int start = block_rank() * THREADS + threadIdx.x;
    if (start == 0) {
        if (counts) counts[query] = wanted;
        if (stats && wanted > 0) {
            atomicAdd(stats, 1ull);
            atomicAdd(stats + 1, (unsigned long long)wanted);
            atomicAdd(stats + 2, (unsigned long long)length);
        }
    }
    for (int i = wanted + start; i < topk; i += CLUSTER * THREADS) {
        if (positions) positions[query * topk + i] = -1;
        if (slots) slots[query * topk + i] = i == 0 ? (int)nothing : -1;
    }
    if (wanted == length)
        output.put(0, wanted, start, CLUSTER * THREADS, [](unsigned i) { return (int)i; });
    else if (wanted > 0) choose(logits + query * stride + begin, length, wanted, output, shared);
}
