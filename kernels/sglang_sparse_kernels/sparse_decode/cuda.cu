// Sparse decode of few tokens by tensor cores: see cuda.py for the method and the launch.
//
// Compile-time: those of attention.cuh, and WARPS, DEPTH (pieces whose keys and values a warp has on their way or in
// use), CLUSTER (blocks of threads that share a KV head of a row; 1 before Hopper), RESIDENT (blocks of threads that a
// multiprocessor is to run at once).
//
// A piece are 16 of the selected tokens, the rows of a product. Warps take pieces in turn; where there are no more than
// they have on their way, all of them are asked for at once.

#include "attention.cuh"

#define THREADS (32 * WARPS)
#define STEP (CLUSTER * WARPS)  // pieces that all warps take at once

static_assert(DEPTH >= 1 && DEPTH <= 4, "a word of 64 bits has which tokens of so many pieces count");

struct Own {
    alignas(256) unsigned char keys[DEPTH][PIECE_BYTES], values[DEPTH][PIECE_BYTES];
};

struct Shared {
    Own warps[WARPS];
    float maxima[WARPS][HEADS], totals[WARPS][HEADS];
    // What the cluster's other blocks read.
    float sums[GROUP * DIM], logarithms[GROUP];
};

// The selected tokens of a row's KV head.
struct Selection {
    const int* pages;
    int count, most, size_log2;
    long long last_slot;

    // The page of a token that counts; -1: none. Read before it is known how many there are.
    __device__ int page_of(int token) const {
        int position = token >> size_log2, page = position < most ? pages[position] : -1;
        long long slot = ((long long)page << size_log2) + (token & (1 << size_log2) - 1);
        bool counts = position < count && page >= 0 && (page != last_slot >> size_log2 || slot <= last_slot);
        return counts ? page : -1;
    }

    // Copies the 16 tokens from `token` on, whose pages the first lanes have.
    __device__ void copy_piece(Place target, const Rows& rows, int token, int page) const {
#pragma unroll
        for (int i = 0; i < PIECE; i += COPIED) {
            int key = i + threadIdx.x % 32 / ROW_CHUNKS, chunk = threadIdx.x % ROW_CHUNKS ^ key % 8;
            int held = (int)__shfl_sync(ALL, (unsigned)page, key);
            long long slot = ((long long)max(held, 0) << size_log2) + (token + key & (1 << size_log2) - 1);
            copy(target + key * ROW + chunk * CHUNK, rows.first + slot * rows.stride, held >= 0);
        }
    }
};

// Online softmax over a warp's pieces.
struct Attention {
    float sums[TILES][4] = {}, maximum[2] = {-INFINITE, -INFINITE}, total[2] = {};

    // The weights of a piece; bits say which of its tokens count.
    __device__ uint2 weigh(float (&logits)[4], unsigned counts, float scale) {
        int key = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (!(counts >> key + i / 2 * 8 & 1)) logits[i] = -INFINITE;
        float base[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float reached = fmaxf(maximum[i], highest_of(fmaxf(reach_of(logits[i]), reach_of(logits[2 + i]))));
            base[i] = base_of(reached, scale);
            float decay = exp2_of(maximum[i] * scale - base[i]);
            maximum[i] = reached;
            total[i] *= decay;
#pragma unroll
            for (int j = 0; j < 2 * TILES; j++) sums[j / 2][j % 2 * 2 + i] *= decay;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            logits[i] = exp2_of(logits[i] * scale - base[i % 2]);
            total[i % 2] += logits[i];
        }
        return columns_of(logits);
    }
};

// Attends to a warp's pieces, from `piece` on.
__device__ void attend(const Selection& selection, const unsigned short* q, long long q_head, const Rows& keys,
                       const Rows& values, int piece, float scale, Own& own, Attention& attention) {
    int token = piece * PIECE, lane = threadIdx.x % 32, tokens = selection.count << selection.size_log2;
    Place key_ring = place_of(own.keys), value_ring = place_of(own.values);
    unsigned long long counts = 0;
    int pages[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) pages[i] = selection.page_of(token + i * STEP * PIECE + lane % PIECE);
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        counts |= (unsigned long long)(__ballot_sync(ALL, pages[i] >= 0) & 0xFFFF) << 16 * i;
        selection.copy_piece(key_ring + i * PIECE_BYTES, keys, token + i * STEP * PIECE, pages[i]);
        end_of_copies();
        selection.copy_piece(value_ring + i * PIECE_BYTES, values, token + i * STEP * PIECE, pages[i]);
        end_of_copies();
    }
    Query query(q, q_head);
    for (int place = 0; token < tokens; token += STEP * PIECE) {
        int later = token + DEPTH * STEP * PIECE, page = selection.page_of(later + lane % PIECE);
        float logits[4];
        await_copies<2 * DEPTH - 1>();
        __syncwarp();
        multiply_keys(query, key_ring + place * PIECE_BYTES + key_place(), logits);
        uint2 weights = attention.weigh(logits, (unsigned)counts & 0xFFFF, scale);
        await_copies<2 * DEPTH - 2>();
        __syncwarp();
        multiply_values(value_ring + place * PIECE_BYTES + value_place(), weights, attention.sums);
        // All lanes have used it.
        __syncwarp();
        counts >>= 16;
        if (later < tokens) {
            counts |= (unsigned long long)(__ballot_sync(ALL, page >= 0) & 0xFFFF) << 16 * (DEPTH - 1);
            selection.copy_piece(key_ring + place * PIECE_BYTES, keys, later, page);
            end_of_copies();
            selection.copy_piece(value_ring + place * PIECE_BYTES, values, later, page);
        } else {
            end_of_copies();
        }
        end_of_copies();
        place = place == DEPTH - 1 ? 0 : place + 1;
    }
    // What came in vain may come late.
    await_copies<0>();
    __syncwarp();
}

__device__ float from(unsigned rank, const float* place) {
    return __uint_as_float(load_from(rank, (const unsigned*)place));
}

// Combines what the blocks of a cluster have found, each some of the dimensions.
__device__ void combine(const Shared& shared, unsigned* out) {
    cluster_barrier();
    for (int i = blockIdx.x % CLUSTER * THREADS + threadIdx.x; i < GROUP * DIM / 2; i += CLUSTER * THREADS) {
        int head = i / (DIM / 2);
        float logarithms[CLUSTER], parts[CLUSTER][2], maximum = -INFINITE, total = 0.0f, sum[2] = {};
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) {
            logarithms[rank] = from(rank, shared.logarithms + head);
            parts[rank][0] = from(rank, shared.sums + 2 * i);
            parts[rank][1] = from(rank, shared.sums + 2 * i + 1);
        }
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) maximum = fmaxf(maximum, logarithms[rank]);
        float base = base_of(maximum, 1.0f);
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) {
            float weight = exp2_of(logarithms[rank] - base);
            total += weight;
            sum[0] += parts[rank][0] * weight;
            sum[1] += parts[rank][1] * weight;
        }
        float factor = 1.0f / (total == 0.0f ? 1.0f : total);
        out[i] = pack(sum[0] * factor, sum[1] * factor);
    }
    // Others may still read what this block has found.
    cluster_barrier();
}

// No pointer is __restrict__: what the kernel before this one wrote must not be read as constant, or before the wait.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
sparse_decode(const unsigned short* q, const unsigned char* k_cache, const unsigned char* v_cache, const int* indices,
              const int* counts, const long long* last_slots, unsigned short* out, long long q_row, long long q_head,
              long long k_slot, long long k_head, long long v_slot, long long v_head, long long max_pages,
              long long size_log2, long long scale_bits, long long v_scale_bits) {
    launch_dependents();
    DYNAMIC_SHARED(Shared, shared);
    int head = blockIdx.x / CLUSTER, heads = gridDim.x / CLUSTER, warp = threadIdx.x / 32;
    long long row = blockIdx.y, pair = row * heads + head;
    float scale = __uint_as_float((unsigned)scale_bits), v_scale = __uint_as_float((unsigned)v_scale_bits);
    Rows keys(k_cache + head * k_head, k_slot), values(v_cache + head * v_head, v_slot);
    await_inputs();
    Selection selection = {indices + pair * max_pages, max(min(counts[pair], (int)max_pages), 0), (int)max_pages,
                           (int)size_log2, last_slots[row]};
    Attention attention;
    int piece = blockIdx.x % CLUSTER + CLUSTER * warp;
    attend(selection, q + row * q_row + head * GROUP * q_head, q_head, keys, values, piece, scale, shared.warps[warp],
           attention);
    // Its keys are not wanted any more.
    store_found(attention.sums, attention.maximum, attention.total, (float*)&shared.warps[warp], shared.maxima[warp],
                shared.totals[warp]);
    __syncthreads();
    unsigned* result = (unsigned*)(out + pair * GROUP * DIM);
    for (int i = threadIdx.x; i < GROUP * DIM / 2; i += THREADS) {
        int member = i / (DIM / 2), dim = i % (DIM / 2) * 2;
        float logarithm;
        float2 found = merge_warps<WARPS>((const float*)shared.warps, sizeof(Own) / sizeof(float), shared.maxima,
                                          shared.totals, member, dim, scale, v_scale, logarithm);
        if (CLUSTER == 1) {
            result[i] = pack(found.x, found.y);
        } else {
            *(float2*)(shared.sums + 2 * i) = found;
            if (dim == 0) shared.logarithms[member] = logarithm;
        }
    }
    if (CLUSTER > 1) combine(shared, result);
}
