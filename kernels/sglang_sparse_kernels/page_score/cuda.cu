// Page scores by tensor cores: see cuda.py for the method and the launch.
//
// Compile-time: DIM (64 or 128), GROUP (query heads of a KV head), KIND (of the summaries: BFLOAT16, FLOAT16, E4M3),
// QUERY (of the queries: BFLOAT16 or FLOAT16), RESIDENT (blocks that a multiprocessor is to run at once).
//
// A warp takes 16 pages at a time, the rows of a product; its columns are the parts of the one query, and the entries of
// a summary, maxima and then minima, are what is summed over. Four lanes read a page, 16 bytes each at a time. Which of
// its entries the hardware takes for which place of the sum does not matter where the query's are placed alike: so each
// lane multiplies what it has read, as it lies in memory.

#include "hopper.cuh"
#include "ampere.cuh"

#define BFLOAT16 0
#define FLOAT16 1
#define E4M3 2
#include "products.cuh"

#define WARPS 4
#define PAGES 16
#define BYTES (KIND == E4M3 ? 1 : 2)
#define EACH (16 / BYTES)                // entries of a load
#define LOADS (2 * DIM * BYTES / 64)     // of a lane, for a page
#define STEPS (EACH / 4)                 // products for a load: each takes four entries of a lane
#define PARTS (KIND == BFLOAT16 ? 3 : 2)  // columns of the query
#define PADDING (KIND == E4M3 ? 8 : 32)  // so that the columns lie in different banks
#define CHAINS 2                         // sums that run side by side
#define UNBOUNDED 3.402823466e38f
#define INFINITE __uint_as_float(0x7F800000u)
#define LOWER 4.8828125e-4f              // 2^-11, what a float16 leaves of a number

__device__ float of_bfloat16(unsigned bits) { return __uint_as_float(bits << 16); }

struct Shared {
    // The parts of the mean query's positive and then its negative entries, and zeros for the other columns.
    alignas(16) unsigned short parts[PARTS + 1][2 * DIM + PADDING];
    unsigned largest[WARPS];
};

// A number of the mean query of a group.
__device__ float mean_query(const unsigned short* q, long long stride_head, int dim) {
    float sum = 0.0f;
#pragma unroll
    for (int member = 0; member < GROUP; member++) {
        unsigned bits = q[member * stride_head + dim];
        sum += QUERY == BFLOAT16 ? of_bfloat16(bits) : of_float16(bits);
    }
    return sum / GROUP;
}

// A power of two by which the largest number of a query comes near the top of float16's range; one that is 0, or no
// number, stays what it is. All threads call it.
__device__ float scale_of(float number, Shared& shared) {
    if (KIND == BFLOAT16) return 1.0f;
    unsigned largest = __reduce_max_sync(ALL, __float_as_uint(number) & 0x7FFFFFFFu);
    if (threadIdx.x % 32 == 0) shared.largest[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) largest = max(largest, shared.largest[warp]);
    int exponent = max((int)(largest >> 23) - 127, -100);
    return __uint_as_float((unsigned)(127 + 13 - exponent) << 23);
}

// Stores what the columns have of a number: as bfloat16 three parts that add up to it, as float16 two, of which the
// second is 2^11 times as large.
__device__ void divide(float number, int entry, Shared& shared) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        unsigned bits = pack(number, 0.0f) & 0xFFFF;
        shared.parts[part][entry] = bits;
        number -= KIND == BFLOAT16 ? of_bfloat16(bits) : of_float16(bits);
        if (KIND != BFLOAT16) number /= LOWER;
    }
    shared.parts[PARTS][entry] = 0;
}

// Divides the mean query among the columns; returns what their sums are to be multiplied by. All threads call it.
__device__ float make_query(const unsigned short* q, long long stride_head, Shared& shared) {
    int dim = threadIdx.x;
    float number = dim < DIM ? mean_query(q, stride_head, dim) : 0.0f;
    float scale = scale_of(number, shared);
    number *= scale;
    if (dim < DIM) {
        // What is no number stays none: fmaxf would drop it.
        divide(number > 0.0f ? number : number * 0.0f, dim, shared);
        divide(number < 0.0f ? number : number * 0.0f, DIM + dim, shared);
    }
    __syncthreads();
    return 1.0f / scale;
}

// Summaries of two pages, as far as this lane reads them.
struct Pages {
    uint4 words[2][LOADS];
};

__device__ void load_pages(const unsigned char* summary, long long stride_page, const int (&page)[2], Pages& pages) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const unsigned char* place = summary + page[row] * stride_page + threadIdx.x % 4 * 16;
#pragma unroll
        for (int i = 0; i < LOADS; i++) pages.words[row][i] = load(place + i * 64);
    }
}

// The operand of a step: four entries of each of two pages.
__device__ void entries_of(const uint4& first, const uint4& second, int step, unsigned (&operand)[4]) {
    const unsigned one[4] = {first.x, first.y, first.z, first.w}, other[4] = {second.x, second.y, second.z, second.w};
    uint2 low = {one[2 * step % 4], one[2 * step % 4 + 1]}, high = {other[2 * step % 4], other[2 * step % 4 + 1]};
    if (KIND == E4M3) low = of_e4m3(one[step]), high = of_e4m3(other[step]);
    operand[0] = low.x, operand[1] = high.x, operand[2] = low.y, operand[3] = high.y;
}

// The scores of a lane's two pages, in the first lane of the four that have read them.
__device__ void score(const Pages& pages, const Shared& shared, float unscale, float (&scores)[2]) {
    float sums[CHAINS][4] = {};
    int column = threadIdx.x % 32 / 4;
    const unsigned short* query = shared.parts[column < PARTS ? column : PARTS] + threadIdx.x % 4 * EACH;
#pragma unroll
    for (int load = 0; load < LOADS; load++) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            unsigned operand[4];
            entries_of(pages.words[0][load], pages.words[1][load], step, operand);
            uint2 entries = *(const uint2*)(query + load * 4 * EACH + step * 4);
            multiply(sums[load % CHAINS], operand, entries);
        }
    }
#pragma unroll
    for (int row = 0; row < 2; row++) {
        float first = 0.0f, second = 0.0f;
#pragma unroll
        for (int chain = 0; chain < CHAINS; chain++) {
            first += sums[chain][2 * row];
            second += sums[chain][2 * row + 1];
        }
        if (KIND == BFLOAT16) {
            // The third part is in the next lane's first column.
            float third = __uint_as_float(__shfl_xor_sync(ALL, __float_as_uint(first), 1));
            scores[row] = first + (second + third);
        } else {
            scores[row] = (first + second * LOWER) * unscale;
        }
    }
}

// No pointer is __restrict__: what the kernel before this one wrote must not be read as constant, or before the wait.
// With `summaries_ready` the summaries, the page table and the numbers of pages are older, and the first of them are
// read while that kernel still runs.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
page_score(const unsigned short* q, const unsigned char* summary, const int* page_table, const int* n_pages_ptr,
           float* out, long long q_stride_row, long long q_stride_head, long long table_stride, long long width,
           long long heads, long long local_pages, long long summaries_ready) {
    launch_dependents();
    if (!summaries_ready) await_inputs();
    // Heads vary fastest: the blocks that read neighbouring memory run together.
    int head = blockIdx.x % (int)heads, row = blockIdx.y, lane = threadIdx.x % 32, place = lane / 4;
    int stride = gridDim.x / (int)heads * (WARPS * PAGES);
    int first = (blockIdx.x / (int)heads * WARPS + threadIdx.x / 32) * PAGES;
    long long stride_page = heads * (2 * DIM * BYTES);
    int n_pages = n_pages_ptr[row];
    page_table += row * table_stride;
    summary += head * (2 * DIM * BYTES);
    q += row * q_stride_row + (long long)head * GROUP * q_stride_head;
    out += (row * heads + head) * width;
    SHARED(Shared, shared);
    Pages pages;
    int page[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int logical = first + place + 8 * i;
        // Read before it is known how many pages there are. Page 0 is the pool's dummy and always readable.
        page[i] = logical < width ? page_table[logical] : 0;
        if (logical >= n_pages) page[i] = 0;
    }
    if (first < n_pages) load_pages(summary, stride_page, page, pages);
    if (summaries_ready) await_inputs();
    float unscale = make_query(q, q_stride_head, shared);
    while (first < n_pages) {
        // Known one step before their summaries are wanted, or each step would wait for two loads.
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int logical = first + stride + place + 8 * i;
            page[i] = logical < n_pages ? page_table[logical] : 0;
        }
        float scores[2];
        score(pages, shared, unscale, scores);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int logical = first + place + 8 * i;
            float found = scores[i] == scores[i] ? scores[i] : UNBOUNDED;
            if (logical >= n_pages - local_pages) found = INFINITE;
            if (lane % 4 == 0 && logical < n_pages) out[logical] = found;
        }
        first += stride;
        if (first < n_pages) load_pages(summary, stride_page, page, pages);
    }
}
