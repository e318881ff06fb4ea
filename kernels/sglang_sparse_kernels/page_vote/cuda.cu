// Votes by centroids on tensor cores: see cuda.py for the method and the launch.
//
// Compile-time: DIM (64 or 128), GROUP (query heads of a KV head, at most 8), COUNT (centroids of a page), QUERY (of the
// queries: BFLOAT16 or FLOAT16), RESIDENT (blocks that a multiprocessor is to run at once).
//
// A warp takes 16 pages at a time, the rows of its products; the query heads are the columns. Four lanes read a record,
// each a quarter of every centroid, and multiply what they have read as it lies in memory: which of its numbers the
// hardware takes for which place of a sum does not matter where those of the queries are placed alike. The first centroid
// is float8, the others are levels of four bits, which two operations make float16.

#include "hopper.cuh"
#include "ampere.cuh"

#define BFLOAT16 0
#define FLOAT16 1
#define KIND FLOAT16  // of what is multiplied
#include "products.cuh"

#define WARPS 4
#define PAGES 16
#define COLUMNS 8
#define HEADER 16                        // bytes of a record before its first centroid
#define OTHERS (COUNT - 1)
#define RECORD (HEADER + DIM + OTHERS * DIM / 2)
#define STEPS (DIM / 16)                 // products for a centroid
#define WORDS (DIM / 32)                 // of a lane, for a centroid of four bits
#define PADDING 16                       // so that the columns lie in different banks
#define INFINITE __uint_as_float(0x7F800000u)

struct Shared {
    // The numbers of a query as products with the first centroid take them, and as those with the others do.
    alignas(16) unsigned short entries[COLUMNS][2 * DIM + PADDING];
};

// Fills the columns; those without a head have zeros. All threads call it.
__device__ void place_queries(const unsigned short* q, long long stride_head, Shared& shared) {
    for (int i = threadIdx.x; i < COLUMNS * DIM; i += 32 * WARPS) {
        int column = i / DIM, dim = i % DIM;
        unsigned bits = column < GROUP ? q[column * stride_head + dim] : 0;
        if (QUERY == BFLOAT16) bits = pack(__uint_as_float(bits << 16), 0.0f) & 0xFFFF;
        unsigned short* entries = shared.entries[column];
        int step = dim / 64 * 4 + dim % 16 / 4, lane = dim % 64 / 16;
        entries[(step * 4 + lane) * 4 + dim % 4] = bits;
        // A word has bytes of four neighbours; of these the first and the third lie in one operand.
        int upper = dim / (DIM / 2), byte = dim % (DIM / 2), place = byte % 4;
        step = STEPS + byte % (DIM / 8) / 4 * 2 + upper, lane = byte / (DIM / 8);
        entries[(step * 4 + lane) * 4 + (place == 1 ? 2 : place == 2 ? 1 : place)] = bits;
    }
    __syncthreads();
}

// Records of two pages, as far as this lane reads them.
struct Records {
    uint2 steps[2];
    uint4 first[2][DIM / 64];
    unsigned others[2][COUNT > 1 ? OTHERS : 1][WORDS];
};

__device__ void load_records(const unsigned char* records, long long stride_page, const int (&page)[2], Records& found) {
    int lane = threadIdx.x % 4;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const unsigned char* record = records + page[row] * stride_page;
        found.steps[row] = *(const uint2*)record;
        record += HEADER;
#pragma unroll
        for (int i = 0; i < DIM / 64; i++) found.first[row][i] = load(record + i * 64 + lane * 16);
#pragma unroll
        for (int other = 0; other < OTHERS; other++) {
            const unsigned char* place = record + DIM + other * (DIM / 2) + lane * (4 * WORDS);
            if (WORDS == 4) {
                uint4 words = load(place);
                found.others[row][other][0] = words.x, found.others[row][other][1] = words.y;
                found.others[row][other][WORDS - 2] = words.z, found.others[row][other][WORDS - 1] = words.w;
            } else {
                uint2 words = *(const uint2*)place;
                found.others[row][other][0] = words.x, found.others[row][other][1] = words.y;
            }
        }
    }
}

// Products of the 16 pages' centroids with the queries: a lane has two pages, and of each two heads.
__device__ void multiply_records(const Records& found, const Shared& shared, float (&sums)[COUNT][4]) {
    const unsigned short* query = shared.entries[threadIdx.x % 32 / 4] + threadIdx.x % 4 * 4;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint4 one = found.first[0][step / 4], other = found.first[1][step / 4];
        unsigned first = step % 4 == 0 ? one.x : step % 4 == 1 ? one.y : step % 4 == 2 ? one.z : one.w;
        unsigned second = step % 4 == 0 ? other.x : step % 4 == 1 ? other.y : step % 4 == 2 ? other.z : other.w;
        const unsigned operand[4] = {of_e4m3(first & 0xFFFF), of_e4m3(second & 0xFFFF), of_e4m3(first >> 16),
                                     of_e4m3(second >> 16)};
        multiply(sums[0], operand, *(const uint2*)(query + step * 16));
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint2 entries = *(const uint2*)(query + (STEPS + step) * 16);
        int shift = step % 2 * 4;
#pragma unroll
        for (int other = 0; other < OTHERS; other++) {
            unsigned first = found.others[0][other][step / 2] >> shift;
            unsigned second = found.others[1][other][step / 2] >> shift;
            const unsigned operand[4] = {of_levels(first), of_levels(second), of_levels(first >> 8),
                                         of_levels(second >> 8)};
            multiply(sums[other + 1], operand, entries);
        }
    }
}

// The mass of a page for a head, to the base 2; `place` is theirs among the sums. The last byte of the steps is the
// exponent of the page's scale.
__device__ float mass_of(const float (&sums)[COUNT][4], uint2 steps, int place, float factor) {
    factor *= __uint_as_float(steps.y >> 24 << 23);
    float base = sums[0][place] * factor, highest = base, total = 1.0f;
#pragma unroll
    for (int other = 0; other < OTHERS; other++) {
        unsigned byte = (other < 4 ? steps.x : steps.y) >> other % 4 * 8 & 0xFF;
        float logit = base + sums[other + 1][place] * (of_float16(byte << 8) * factor) - (other + 1);
        float higher = logit > highest ? logit : highest;
        total = total * exp2_of(highest - higher) + exp2_of(logit - higher);
        highest = higher;
    }
    return highest + log2_of(total);
}

__device__ float of_other(float number, int mask) {
    return __uint_as_float(__shfl_xor_sync(0xFFFFFFFFu, __float_as_uint(number), mask));
}

// Of 16 pages: the largest mass and the sum of all, relative to it, in every lane that has the head.
__device__ void sum_votes(const float (&masses)[2], const bool (&votes)[2], float& most, float& total) {
    most = -INFINITE;
#pragma unroll
    for (int row = 0; row < 2; row++)
        if (votes[row]) most = max(most, masses[row]);
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) most = max(most, of_other(most, mask));
    float base = most == -INFINITE ? 0.0f : most;
    total = 0.0f;
#pragma unroll
    for (int row = 0; row < 2; row++)
        if (votes[row]) total += exp2_of(masses[row] - base);
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) total += of_other(total, mask);
}

// No pointer is __restrict__: what the kernel before this one wrote must not be read as constant, or before the wait.
// With `summaries_ready` the records, the page table and the numbers of pages are older, and the first of them are read
// while that kernel still runs.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
page_vote(const unsigned short* q, const unsigned char* records, const int* page_table, const int* n_pages_ptr,
          float* logits, float* parts, long long q_stride_row, long long q_stride_head, long long table_stride,
          long long width, long long tiles, long long heads, long long factor_bits, long long summaries_ready) {
    launch_dependents();
    if (!summaries_ready) await_inputs();
    // Heads vary fastest: the blocks that read neighbouring memory run together.
    int head = blockIdx.x % (int)heads, row = blockIdx.y, lane = threadIdx.x % 32, place = lane / 4;
    int stride = gridDim.x / (int)heads * (WARPS * PAGES);
    int first = (blockIdx.x / (int)heads * WARPS + threadIdx.x / 32) * PAGES;
    long long stride_page = heads * RECORD, at = (row * heads + head) * GROUP;
    int n_pages = n_pages_ptr[row];
    float factor = __uint_as_float((unsigned)factor_bits);
    page_table += row * table_stride;
    records += head * RECORD;
    q += row * q_stride_row + (long long)head * GROUP * q_stride_head;
    SHARED(Shared, shared);
    Records found;
    int page[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int logical = first + place + 8 * i;
        page[i] = logical < n_pages ? page_table[logical] : 0;
    }
    if (first < n_pages) load_records(records, stride_page, page, found);
    if (summaries_ready) await_inputs();
    place_queries(q, q_stride_head, shared);
    while (first < n_pages) {
        // Known one step before their records are wanted, or each step would wait for two loads.
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int logical = first + stride + place + 8 * i;
            page[i] = logical < n_pages ? page_table[logical] : 0;
        }
        float sums[COUNT][4] = {};
        multiply_records(found, shared, sums);
        uint2 steps[2] = {found.steps[0], found.steps[1]};
        int current = first;
        first += stride;
        if (first < n_pages) load_records(records, stride_page, page, found);
#pragma unroll
        for (int column = 0; column < 2; column++) {
            int member = lane % 4 * 2 + column;
            float masses[2], most, total;
            bool votes[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int logical = current + place + 8 * i;
                masses[i] = mass_of(sums, steps[i], 2 * i + column, factor);
                // Neither the newest page, whose record may be of another's keys, nor one with NaN takes votes.
                votes[i] = logical < n_pages - 1 && masses[i] == masses[i];
                if (member < GROUP && logical < n_pages) logits[(at + member) * width + logical] = masses[i];
            }
            sum_votes(masses, votes, most, total);
            if (place == 0 && member < GROUP) {
                float* part = parts + ((at + member) * tiles + current / PAGES) * 2;
                part[0] = most;
                part[1] = total;
            }
        }
    }
}
