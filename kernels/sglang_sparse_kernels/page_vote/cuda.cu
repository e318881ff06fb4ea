// Votes by centroids on tensor cores: see cuda.py for the method and the launch.
//
// Compile-time: DIM (64, 128 or 256), GROUP (query heads of a KV head, at most 8), COUNT (centroids of a page), RECORD
// (bytes of a page's record), QUERY (of the queries: BFLOAT16 or FLOAT16), RESIDENT (blocks that a multiprocessor is to
// run at once), DEPTH (pieces of a warp that are on their way).
//
// A warp takes 16 pages at a time, the rows of its products; the query heads are the columns. Records come by copies to
// shared memory: loads into registers take room in L1 while they are on their way, of which the attention before this
// kernel leaves little. Four lanes read a record, each a quarter of every centroid, and multiply what they have read as
// it lies in memory: which of its numbers the hardware takes for which place of a sum does not matter where those of the
// queries are placed alike. The first centroid is float8, which one operation makes float16. The others are levels of
// four bits, which are bytes after less than half an operation each; the queries are then integers of 16 bits, whose
// upper and lower bytes are multiplied apart.

#include "hopper.cuh"
#include "ampere.cuh"

#define BFLOAT16 0
#define FLOAT16 1
#define KIND FLOAT16  // of what is multiplied
#include "products.cuh"

#define WARPS 4
#define PAGES 16
#define HEADER 16                        // bytes of a record before its first centroid
#define OTHERS (COUNT - 1)
#define QUARTER (DIM / 8)                // numbers of a lane in each half of a vector
#define WORDS (DIM / 32)                 // bytes of as many, by fours
#define CHUNKS (RECORD / 16)             // of a record
#define ZERO_LEVEL 8
#define LARGEST 32512.0f                 // integer of a query: both of its bytes are then within -128 and 127
#define SHIFT 12582912.0f                // added to a small number it leaves the nearest integer in the lowest bits
#define INFINITE __uint_as_float(0x7F800000u)

struct Shared {
    alignas(16) unsigned char records[WARPS][DEPTH][PAGES][RECORD];
};

// What a lane multiplies by, of the head that is its column: for each word of the first centroid and of the others.
// And of the two heads whose sums it has: the number that one step of their integers stands for, its inverse, and what
// the sums of levels begin with.
struct Query {
    uint2 halves[2 * WORDS], upper[WORDS], lower[WORDS];
    float unit[2], inverse[2];
    int before[4];
};

__device__ float of_other(float number, int mask) {
    return __uint_as_float(__shfl_xor_sync(ALL, __float_as_uint(number), mask));
}

// The bytes of four integers that lie `shift` bits up.
__device__ unsigned bytes_of(const unsigned* integers, int shift) {
    unsigned word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) word |= (integers[i] >> shift & 0xFF) << 8 * i;
    return word;
}

// Reads a head's numbers; columns without a head have zeros.
__device__ void read_head(const unsigned short* q, long long stride_head, float (&numbers)[2][QUARTER]) {
    int head = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2 * QUARTER; i += 8) {
        const unsigned short* place = q + head * stride_head + i / QUARTER * (DIM / 2) + lane * QUARTER + i % QUARTER;
        uint4 eight = {};
        if (head < GROUP) eight = *(const uint4*)place;
        const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int two = 0; two < 4; two++) {
            float* pair = numbers[i / QUARTER] + i % QUARTER + 2 * two;
            pair[0] = QUERY == BFLOAT16 ? __uint_as_float(words[two] << 16) : of_float16(words[two] & 0xFFFF);
            pair[1] = QUERY == BFLOAT16 ? __uint_as_float(words[two] & 0xFFFF0000u) : of_float16(words[two] >> 16);
        }
    }
}

__device__ void prepare_query(const unsigned short* q, long long stride_head, Query& query) {
    float numbers[2][QUARTER], most = 0.0f;
    read_head(q, stride_head, numbers);
#pragma unroll
    for (int i = 0; i < 2 * QUARTER; i++) {
        float number = numbers[i / QUARTER][i % QUARTER];
        most = max(most, number < 0.0f ? -number : number);
    }
    for (int mask = 1; mask < 4; mask *= 2) most = max(most, of_other(most, mask));
    // What is less than this is zero as float16 as well.
    float inverse = most > 1e-30f ? LARGEST / most : 0.0f;
    unsigned sum = 0;
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
        unsigned lower[2], upper[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float* four = numbers[half] + 4 * word;
            query.halves[half * WORDS + word] = {pack(four[0], four[1]), pack(four[2], four[3])};
            unsigned integers[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                integers[i] = __float_as_uint(four[i] * inverse + SHIFT);
                sum += integers[i] - __float_as_uint(SHIFT);
            }
            lower[half] = bytes_of(integers, 0);
            // The lower byte is signed.
#pragma unroll
            for (int i = 0; i < 4; i++) integers[i] += 0x80;
            upper[half] = bytes_of(integers, 8);
        }
        query.lower[word] = {lower[0], lower[1]};
        query.upper[word] = {upper[0], upper[1]};
    }
    for (int mask = 1; mask < 4; mask *= 2) sum += __shfl_xor_sync(ALL, sum, mask);
#pragma unroll
    for (int column = 0; column < 2; column++) {
        int holder = (threadIdx.x % 4 * 2 + column) * 4;
        query.unit[column] = __uint_as_float(__shfl_sync(ALL, __float_as_uint(most), holder)) / LARGEST;
        query.inverse[column] = __uint_as_float(__shfl_sync(ALL, __float_as_uint(inverse), holder));
        query.before[column] = query.before[column + 2] = -ZERO_LEVEL * (int)__shfl_sync(ALL, sum, holder);
    }
}

// Copies the records of 16 pages, of which each lane knows one; half of a warp copies one of two pages at a time.
__device__ void copy_records(unsigned char (&target)[PAGES][RECORD], const unsigned char* records, long long stride_page,
                             int page) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < PAGES; i += 2) {
        int row = i + lane / 16;
        const unsigned char* record = records + (int)__shfl_sync(ALL, page, row) * stride_page;
#pragma unroll
        for (int chunk = lane % 16; chunk < CHUNKS; chunk += 16)
            copy(place_of(target[row]) + chunk * 16, record + chunk * 16, true);
    }
}

// A lane's words in half of the first centroid, or in another one.
__device__ void take(const unsigned char* place, unsigned (&words)[WORDS]) {
#if DIM == 64
    uint2 loaded = *(const uint2*)place;
    words[0] = loaded.x, words[1] = loaded.y;
#else
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
        uint4 loaded = *(const uint4*)(place + 4 * i);
        words[i] = loaded.x, words[i + 1] = loaded.y, words[i + 2] = loaded.z, words[i + 3] = loaded.w;
    }
#endif
}

// Products with the first centroids, a lane's of two pages and of each with two heads.
__device__ void multiply_first(const unsigned char* one, const unsigned char* other, const Query& query,
                               float (&sums)[4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        unsigned words[2][WORDS];
        take(one + half * (DIM / 2), words[0]);
        take(other + half * (DIM / 2), words[1]);
#pragma unroll
        for (int word = 0; word < WORDS; word++) {
            uint2 low = of_e4m3(words[0][word]), high = of_e4m3(words[1][word]);
            const unsigned operand[4] = {low.x, high.x, low.y, high.y};
            multiply(sums, operand, query.halves[half * WORDS + word]);
        }
    }
}

// The same with others, in integers.
__device__ void multiply_other(const unsigned char* one, const unsigned char* other, const Query& query,
                               int (&sums)[4]) {
    unsigned words[2][WORDS];
    int upper[4] = {};
    take(one, words[0]);
    take(other, words[1]);
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = query.before[i];
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
        unsigned low = words[0][word], high = words[1][word];
        const unsigned operand[4] = {low & 0x0F0F0F0Fu, high & 0x0F0F0F0Fu, low >> 4 & 0x0F0F0F0Fu,
                                     high >> 4 & 0x0F0F0F0Fu};
        multiply_bytes(upper, operand, query.upper[word]);
        multiply_bytes(sums, operand, query.lower[word]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] += upper[i] * 256;
}

// The masses of 16 pages, to the base 2: a lane has those of two pages, and of each for two heads. The last byte of the
// steps is the exponent of the page's scale. Logits stay in steps of the queries' integers until `unit` scales them.
__device__ void masses_of(const unsigned char (&records)[PAGES][RECORD], const Query& query, float factor,
                          float (&masses)[4]) {
    int row = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
    const unsigned char *one = records[row], *other = records[row + 8];
    const uint2 steps[2] = {*(const uint2*)one, *(const uint2*)other};
    one += HEADER + lane * QUARTER;
    other += HEADER + lane * QUARTER;
    float logits[COUNT][4] = {}, highest[4];
    multiply_first(one, other, query, logits[0]);
#pragma unroll
    for (int i = 0; i < 4; i++) highest[i] = logits[0][i] *= query.inverse[i % 2];
#pragma unroll
    for (int number = 1; number < COUNT; number++) {
        int place = DIM + (number - 1) * (DIM / 2), sums[4], shift = (number - 1) % 4 * 8;
        multiply_other(one + place, other + place, query, sums);
        float step[2];
#pragma unroll
        for (int i = 0; i < 2; i++) step[i] = of_float16((number <= 4 ? steps[i].x : steps[i].y) >> shift << 8 & 0xFF00);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            logits[number][i] = logits[0][i] + (float)sums[i] * step[i / 2];
            highest[i] = max(highest[i], logits[number][i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float unit = query.unit[i % 2] * factor * __uint_as_float(steps[i / 2].y >> 24 << 23);
        float less = highest[i] * unit, total = exp2_of(logits[0][i] * unit - less);
#pragma unroll
        for (int number = 1; number < COUNT; number++)
            total += exp2_of(logits[number][i] * unit - less) * (1.0f / (1 << number));
        masses[i] = less + log2_of(total);
    }
}

// The sum of what some lanes, or pages, have for a head, relative to the largest mass of them.
struct Votes {
    float most = -INFINITE, total = 0.0f;
    __device__ void rescale(float highest) {
        // Zero times anything where there has been nothing.
        total *= exp2_of(most - (highest == -INFINITE ? 0.0f : highest));
        most = highest;
    }
};

// Adds two pages, of which either may take no votes.
__device__ void add_pages(Votes& votes, const float (&masses)[2], const bool (&taken)[2]) {
    float highest = votes.most;
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (taken[i]) highest = max(highest, masses[i]);
    votes.rescale(highest);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (taken[i]) votes.total += exp2_of(masses[i] - highest);
}

// The sum of a warp, in every lane that has the head.
__device__ void add_lanes(Votes& votes) {
    float highest = votes.most;
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) highest = max(highest, of_other(highest, mask));
    votes.rescale(highest);
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) votes.total += of_other(votes.total, mask);
}

// No pointer is __restrict__: what the kernel before this one wrote must not be read as constant, or before the wait.
// With `summaries_ready` the records, the page table and the numbers of pages are older, and the first of them are read
// while that kernel still runs.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
page_vote(const unsigned short* q, const unsigned char* records, const int* page_table, const int* n_pages_ptr,
          float* logits, float* parts, long long q_stride_row, long long q_stride_head, long long table_stride,
          long long width, long long warps, long long heads, long long factor_bits, long long summaries_ready) {
    launch_dependents();
    if (!summaries_ready) await_inputs();
    DYNAMIC_SHARED(Shared, shared);
    // Heads vary fastest: the blocks that read neighbouring memory run together.
    int head = blockIdx.x % (int)heads, row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int place = lane / 4, stride = gridDim.x / (int)heads * (WARPS * PAGES);
    int first = (blockIdx.x / (int)heads * WARPS + warp) * PAGES;
    long long stride_page = heads * RECORD, at = (row * heads + head) * GROUP;
    int n_pages = n_pages_ptr[row];
    float factor = __uint_as_float((unsigned)factor_bits);
    page_table += row * table_stride;
    records += head * RECORD;
    q += row * q_stride_row + (long long)head * GROUP * q_stride_head;
    // Beyond the row's last page, page 0 is read and its mass dropped.
    auto page_of = [&](int piece) {
        int logical = piece + lane % PAGES;
        return logical < n_pages ? page_table[logical] : 0;
    };
    int pages[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) pages[i] = page_of(first + i * stride);
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        if (first + i * stride < n_pages) copy_records(shared.records[warp][i], records, stride_page, pages[i]);
        end_of_copies();
    }
    // Known one piece before its records are wanted, or each would wait for two loads.
    int page = page_of(first + DEPTH * stride);
    if (summaries_ready) await_inputs();
    Query query;
    prepare_query(q, q_stride_head, query);
    Votes votes[2];
    for (int stage = 0; first < n_pages; first += stride, stage = stage == DEPTH - 1 ? 0 : stage + 1) {
        auto& mine = shared.records[warp][stage];
        await_copies<DEPTH - 1>();
        __syncwarp();
        float all[4];
        masses_of(mine, query, factor, all);
        // All lanes have used it.
        __syncwarp();
        if (first + DEPTH * stride < n_pages) copy_records(mine, records, stride_page, page);
        end_of_copies();
        page = page_of(first + (DEPTH + 1) * stride);
#pragma unroll
        for (int column = 0; column < 2; column++) {
            int member = lane % 4 * 2 + column;
            float masses[2];
            bool taken[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int logical = first + place + 8 * i;
                masses[i] = all[2 * i + column];
                // Neither the newest page, whose record may be of another's keys, nor one with NaN takes votes.
                taken[i] = logical < n_pages - 1 && masses[i] == masses[i];
                if (member < GROUP && logical < n_pages) logits[(at + member) * width + logical] = masses[i];
            }
            add_pages(votes[column], masses, taken);
        }
    }
#pragma unroll
    for (int column = 0; column < 2; column++) {
        int member = lane % 4 * 2 + column;
        add_lanes(votes[column]);
        if (place != 0 || member >= GROUP) continue;
        float* part = parts + ((at + member) * warps + blockIdx.x / (int)heads * WARPS + warp) * 2;
        part[0] = votes[column].most;
        part[1] = votes[column].total;
    }
}
