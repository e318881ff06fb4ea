// What decode attention of a few query heads has in common: products of 16 keys or values by tensor cores.
//
// Compile-time: DIM (of keys and values, 64 or 128), GROUP (query heads of a KV head, up to HEADS, the columns of a
// product), KIND (of all elements: BFLOAT16 or FLOAT16).

#include "hopper.cuh"
#include "ampere.cuh"

#define BFLOAT16 0
#include "products.cuh"
#define HEADS 8
#define PIECE 16                  // keys or values of a product
#define ROW (2 * DIM)             // bytes of a key
#define PIECE_BYTES (PIECE * ROW)
#define CHUNK 16                  // bytes of a copy
#define ROW_CHUNKS (ROW / CHUNK)
#define COPIED (32 / ROW_CHUNKS)  // keys that a warp copies at once
#define TILES (DIM / 16)          // products of a piece
#define INFINITE __uint_as_float(0x7F800000u)

static_assert(GROUP <= HEADS, "a product has eight columns");

__device__ float swap(float number, int mask) {
    return __uint_as_float(__shfl_xor_sync(ALL, __float_as_uint(number), mask));
}

// What lanes of the same columns have found, in all of them.
__device__ float highest_of(float number) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) number = fmaxf(number, swap(number, mask));
    return number;
}

__device__ float sum_of(float number) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) number += swap(number, mask);
    return number;
}

// What is not a number counts as infinite: a maximum would drop it.
__device__ float reach_of(float logit) { return logit < INFINITE ? logit : INFINITE; }

// A logarithm to base 2 without what was subtracted from all; where there is no finite one, 0 and not NaN.
__device__ float base_of(float maximum, float scale) { return maximum == -INFINITE ? 0.0f : maximum * scale; }

// The query as columns of a product; each lane has some dimensions of one head.
struct Query {
    uint2 tiles[TILES];
    __device__ Query(const unsigned short* q, long long stride_head) {
        int lane = threadIdx.x % 32, head = lane / 4;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            tiles[tile] = uint2{0, 0};
            if (head >= GROUP) continue;
            const unsigned short* place = q + head * stride_head + tile * 16 + lane % 4 * 2;
            tiles[tile] = uint2{*(const unsigned*)place, *(const unsigned*)(place + 8)};
        }
    }
};

// Keys or values of a row and KV head.
struct Rows {
    const unsigned char* first;  // of slot 0, from this lane's chunk on
    long long stride;            // of a slot, in bytes
    __device__ Rows(const unsigned char* cache, long long stride)
        : first(cache + threadIdx.x % ROW_CHUNKS * CHUNK), stride(stride) {}
};

// Places of a piece's rows for each lane: chunks of a row lie in another order for each of eight rows, so that eight
// rows' chunks of the same dimensions are in all banks.
__device__ unsigned key_place() {
    int lane = threadIdx.x % 32;
    return (lane / 8 % 2 * 8 + lane % 8) * ROW + (lane / 16 ^ lane % 8) * CHUNK;
}

__device__ unsigned value_place() {
    int lane = threadIdx.x % 32;
    return (lane / 16 * 8 + lane % 8) * ROW + (lane / 8 % 2 ^ lane % 8) * CHUNK;
}

// Logits of a piece before they are scaled: a lane has two heads of two keys.
__device__ void multiply_keys(const Query& query, Place keys, float (&logits)[4]) {
    float sums[2][4] = {};
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        unsigned words[4];
        load_matrices(keys ^ tile * 2 * CHUNK, words);
        multiply(sums[tile % 2], words, query.tiles[tile]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) logits[i] = sums[0][i] + sums[1][i];
}

// Adds a piece's values by their weights, those of `columns_of`: rows of the sums are dimensions, columns heads.
__device__ void multiply_values(Place values, uint2 weights, float (&sums)[TILES][4]) {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        unsigned words[4];
        load_transposed(values ^ tile * 2 * CHUNK, words);
        multiply(sums[tile], words, weights);
    }
}

// Weights as a lane has logits, as columns of a product.
__device__ uint2 columns_of(const float (&weights)[4]) {
    return uint2{transpose(pack(weights[0], weights[1])), transpose(pack(weights[2], weights[3]))};
}

// Stores a warp's sums and totals, those of its lanes added up.
__device__ void store_found(const float (&sums)[TILES][4], const float (&maximum)[2], const float (&total)[2],
                            float* into, float* maxima, float* totals) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4 * TILES; i++) {
        int dim = i / 4 * 16 + i % 4 / 2 * 8 + lane / 4, head = lane % 4 * 2 + i % 2;
        if (head < GROUP) into[head * DIM + dim] = sums[i / 4][i % 4];
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float whole = sum_of(total[i]);
        if (lane >= 4) continue;
        maxima[lane * 2 + i] = maximum[i];
        totals[lane * 2 + i] = whole;
    }
}

// What all warps have found in two dimensions of a head: their sum divided by the total, and the logarithm of the sum of
// weights, to base 2. Their sums lie `stride` floats from each other.
template <int WARP_COUNT>
__device__ float2 merge_warps(const float* sums, int stride, const float (*maxima)[HEADS], const float (*totals)[HEADS],
                              int head, int dim, float scale, float v_scale, float& logarithm) {
    float maximum = -INFINITE, total = 0.0f;
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int warp = 0; warp < WARP_COUNT; warp++) maximum = fmaxf(maximum, maxima[warp][head]);
    float base = base_of(maximum, scale);
#pragma unroll
    for (int warp = 0; warp < WARP_COUNT; warp++) {
        float weight = exp2_of(maxima[warp][head] * scale - base);
        float2 part = *(const float2*)(sums + warp * stride + head * DIM + dim);
        total += totals[warp][head] * weight;
        sum.x += part.x * weight;
        sum.y += part.y * weight;
    }
    logarithm = maximum * scale + log2f(total);
    float factor = v_scale / (total == 0.0f ? 1.0f : total);
    return float2{sum.x * factor, sum.y * factor};
}
