// Block masses of the RoPE dimensions by tensor cores, their first half: what the pieces of a row weigh in each head. See
// cuda.py for the method and the launch, block_mass.cuh for what both halves have in common, merge.cu for the other one.
//
// Compile-time: those of block_mass.cuh, and KIND (of queries and keys: BFLOAT16 or FLOAT16), HEAD_TILES (16s of heads
// that a warp takes: 1 or 2; they divide HEADS), STAGES (tiles of keys on their way or in use), RESIDENT (blocks that a
// multiprocessor is to run at once).
//
// A product's rows are heads, its columns tokens. The queries stay in registers; a warp takes two pieces at a time, whose
// weights four lanes sum up.

#include "ampere.cuh"
#include "block_mass.cuh"

#define BFLOAT16 0

#define DIM 64
#define ROW (2 * DIM)  // bytes of a key
#define HEAD_WARPS (HEADS / (16 * HEAD_TILES))
#define THREADS (32 * HEAD_WARPS * TOKEN_WARPS)
#define CHUNK 16  // bytes of a copy
#define CHUNKS (TILE * ROW / CHUNK)
#define COPIES ((CHUNKS + THREADS - 1) / THREADS)
// A warp copies consecutive tokens, four at a time. If it does so 1, 2, 4 or 8 times, four in turn are of one block.
#define TOGETHER (COPIES & (COPIES - 1) ? 1 : 4)
#define IDS ((COPIES + TOGETHER - 1) / TOGETHER)

#define NOT_A_NUMBER __uint_as_float(0x7FC00000u)
// Weights are relative to 2 to the power of a reference. Of one that is this large the reference was too low.
#define LIMIT 1.8446744e19f  // 2^64
#define COARSE 4194304.0f

#ifdef __CUDACC__
// 16 heads by 16 dimensions, times 16 dimensions by 8 tokens.
__device__ void multiply(float (&sums)[4], const unsigned (&query)[4], uint2 keys) {
#define MULTIPLY(type)                                                                                 \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
        "{%8, %9}, {%0, %1, %2, %3};"                                                                  \
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                   \
        : "r"(query[0]), "r"(query[1]), "r"(query[2]), "r"(query[3]), "r"(keys.x), "r"(keys.y))
    if (KIND == BFLOAT16) MULTIPLY("bf16");
    else MULTIPLY("f16");
#undef MULTIPLY
}
#endif

struct Query {
    unsigned tiles[HEAD_TILES][DIM / 16][4];
    __device__ Query(const unsigned short* q, long long stride_head) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; tile++)
#pragma unroll
            for (int i = 0; i < DIM / 16 * 4; i++) {
                int head = tile * 16 + lane / 4 + i % 2 * 8, dim = i / 4 * 16 + i % 4 / 2 * 8 + lane % 4 * 2;
                tiles[tile][i / 4][i % 4] = *(const unsigned*)(q + head * stride_head + dim);
            }
    }
};

// What a lane has of its heads, those of the rows of its products.
struct Heads {
    float numbers[HEAD_TILES][2];
    // Of the head that is this lane's in the end; where a warp has 16, two lanes have the same.
    __device__ float own() const {
        bool second = threadIdx.x & 1, last = threadIdx.x & 2;
        float number = second ? numbers[0][1] : numbers[0][0];
        return last && HEAD_TILES == 2 ? (second ? numbers[HEAD_TILES - 1][1] : numbers[HEAD_TILES - 1][0]) : number;
    }
};

// What a lane reads of some tokens: the two halves of a key. Chunks of a key lie in another order for each of eight
// tokens, so that eight tokens' chunks of the same dimensions are in all banks.
struct Keys {
    Place halves[2];
    // `lane_place` is `place_of_lane()`, kept.
    __device__ Keys(Place tokens, unsigned lane_place) {
        halves[0] = tokens + lane_place;
        halves[1] = halves[0] ^ 4 * CHUNK;
    }
};

__device__ unsigned place_of_lane() {
    int lane = threadIdx.x % 32;
    return lane % 8 * ROW + (lane / 8 ^ lane % 8) * CHUNK;
}

// Logits of a piece before they are scaled: for each 16 heads two times 8 tokens.
__device__ void multiply_piece(const Query& query, const Keys& tokens, int piece, float (&logits)[HEAD_TILES][2][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        unsigned keys[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) load_matrices(tokens.halves[i] + (piece * PIECE + half * 8) * ROW, keys[i]);
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++) logits[tile][half][i] = 0.0f;
#pragma unroll
            for (int i = 0; i < DIM / 16; i++) {
                uint2 operand = {keys[i / 2][i % 2 * 2], keys[i / 2][i % 2 * 2 + 1]};
                multiply(logits[tile][half], query.tiles[tile][i], operand);
            }
        }
    }
}

// Takes the weight of tokens that do not count; the first `left` of the piece do.
__device__ void hide(float (&logits)[HEAD_TILES][2][4], int left) {
    int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; tile++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i / 4 * 8 + column + i % 2 >= left) logits[tile][i / 4][i % 4] = -__uint_as_float(0x7F800000u);
}

// Raises references to the highest logits of some pieces, NaN not counted, in whole numbers.
__device__ void raise(const Query& query, const Keys& tokens, int pieces, int left, float scale, Heads& references) {
    Heads highest;
#pragma unroll
    for (int i = 0; i < HEAD_TILES * 2; i++) highest.numbers[i / 2][i % 2] = LOWEST;
#pragma unroll 1
    for (int i = 0; i < pieces; i++) {
        float logits[HEAD_TILES][2][4];
        multiply_piece(query, tokens, i, logits);
        hide(logits, left - i * PIECE);
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; tile++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float& number = highest.numbers[tile][j % 4 / 2];
                number = fmaxf(number, logits[tile][j / 4][j % 4] * scale);
            }
    }
#pragma unroll
    for (int i = 0; i < HEAD_TILES * 2; i++) {
        float number = highest.numbers[i / 2][i % 2];
        number = fmaxf(number, swap(number, 1));
        number = fmaxf(number, swap(number, 2));
        references.numbers[i / 2][i % 2] = fmaxf(references.numbers[i / 2][i % 2], rintf(number));
    }
}

// Where logits are so large that rounding changes them by whole numbers, the product has to be rounded as that was which
// the reference comes from; one operation does not.
template <bool CAREFUL> __device__ float weight_of(float logit, float scale, float reference) {
    return exp2_of(CAREFUL ? __fmul_rn(logit, scale) - reference : fmaf(logit, scale, -reference));
}

// What the two pieces of a step weigh in this lane's head; if not `CAREFUL`, all tokens count.
template <bool CAREFUL>
__device__ void weigh(const Query& query, const Keys& step, int left, float scale, const Heads& references,
                      float (&weights)[2]) {
    float sums[2][HEAD_TILES][2];
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        float logits[HEAD_TILES][2][4];
        multiply_piece(query, step, piece, logits);
        if (CAREFUL) hide(logits, left - piece * PIECE);
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; tile++)
#pragma unroll
            for (int row = 0; row < 2; row++) {
                float reference = references.numbers[tile][row], some[2];
#pragma unroll
                for (int half = 0; half < 2; half++)
                    some[half] = weight_of<CAREFUL>(logits[tile][half][2 * row], scale, reference) +
                                 weight_of<CAREFUL>(logits[tile][half][2 * row + 1], scale, reference);
                sums[piece][tile][row] = some[0] + some[1];
            }
    }
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        float first = halve(sums[piece][0][0], sums[piece][0][1], 1);
        if (HEAD_TILES == 1) weights[piece] = first + swap(first, 2);
        else weights[piece] = halve(first, halve(sums[piece][HEAD_TILES - 1][0], sums[piece][HEAD_TILES - 1][1], 1), 2);
    }
}

// Two weights as multiples, 12 bits each, of a power of two, whose exponent is as in a float: 0 is 0. What is added to
// the total is what the word holds: masses sum to 1 whatever the rounding did.
__device__ unsigned encode(const float (&weights)[2], float& total) {
    unsigned exponent = max(__float_as_uint(fmaxf(weights[0], weights[1])) >> 23, 12u) - 11;
    float scale = __uint_as_float((254 - exponent) << 23), unit = __uint_as_float(exponent << 23);
    float first = fminf(fmaf(weights[0], scale, ONES), ONES + FRACTION);
    float second = fminf(fmaf(weights[1], scale, ONES), ONES + FRACTION);
    total += ((first - ONES) + (second - ONES)) * unit;
    return exponent << 24 | (__float_as_uint(second) & FRACTION) << 12 | (__float_as_uint(first) & FRACTION);
}

// Makes a lane's words relative to a reference that is higher by a whole number.
__device__ void lower(unsigned* word, const unsigned* end, float number) {
    int by = number < 256.0f ? (int)number : 256;
#pragma unroll 1
    for (; word != end; word += STRIDE) {
        int exponent = (int)(*word >> 24) - by;
        *word = exponent > 0 ? exponent << 24 | (*word & 0xFFFFFF) : 0;
    }
}

// A lane's sums: of its head's words from the first one on, relative to 2 to the power of the head's reference.
struct Sums {
    Heads references;
    float total;
    unsigned *first, *next;
    bool stores, coarse;  // whether any head's logits are large

    // `left` tokens of the step count.
    __device__ void add(const Query& query, const Keys& step, int left, float scale) {
        float weights[2];
        bool raised = false;
#pragma unroll 1
        while (true) {
            if (left >= STEP && !coarse && !raised) weigh<false>(query, step, left, scale, references, weights);
            else weigh<true>(query, step, left, scale, references, weights);
            bool fit = weights[0] < LIMIT && weights[1] < LIMIT;
            if (raised && !fit) total = NOT_A_NUMBER;
            if (raised || !__any_sync(ALL, !fit)) break;
            refer_to(query, step, 2, left, scale);
            raised = true;
        }
        unsigned word = encode(weights, total);
        if (stores) *next = word;
        next += STRIDE;
    }

    // Raises the references to the highest logits of some pieces at least.
    __device__ void refer_to(const Query& query, const Keys& tokens, int pieces, int left, float scale) {
        float before = references.own();
        raise(query, tokens, pieces, left, scale, references);
        coarse = __any_sync(ALL, !(fabsf(references.own()) < COARSE));
        raise_to(references.own(), before);
    }

    __device__ void raise_to(float reference, float before) {
        if (reference == before) return;
        total *= exp2_of(before - reference);
        if (stores) lower(first, next, reference - before);
    }
};

struct Shared {
    alignas(128) unsigned char keys[STAGES][TILE * ROW];
    float references[TOKEN_WARPS][HEADS], totals[TOKEN_WARPS][HEADS];
};

// What a thread copies of every tile: a chunk of each fourth one of a warp's tokens.
struct Copier {
    const int* table;
    const unsigned char* keys;  // this chunk of the first of these tokens, were it in block 0
    Place target;               // likewise, in the first stage
    int n_blocks, size_log2, stride, token;
    unsigned block_bytes;

    // `stride` is that of a key, in bytes.
    __device__ Copier(const int* table, const unsigned char* keys, unsigned char* stages, int n_blocks, int size_log2,
                      int stride)
        : table(table), keys(keys), target(place_of(stages)), n_blocks(n_blocks), size_log2(size_log2), stride(stride) {
        int lane = threadIdx.x % 32, chunk = lane % 8;
        token = threadIdx.x / 32 * 4 * COPIES + lane / 8;
        block_bytes = stride << size_log2;
        this->keys += within(0) * stride + chunk * CHUNK;
        target += token * ROW + (chunk ^ token % 8) * CHUNK;
        keep(this->table);
        keep(this->keys);
        keep(target);
    }

    // Of the i-th token, its place in its block.
    __device__ int within(int i) const { return token + 4 * i & (1 << size_log2) - 1; }

    // Blocks of the tokens, -1: none.
    __device__ void look_up(int tile, int last, int (&ids)[IDS]) const {
#pragma unroll
        for (int i = 0; i < IDS; i++) {
            int here = token + 4 * TOGETHER * i, block = (tile * TILE + here) >> size_log2;
            bool held = tile < last && block < n_blocks && (CHUNKS % THREADS == 0 || here < TILE);
            ids[i] = held ? table[block] : -1;
        }
    }

    __device__ void copy_tile(const int (&ids)[IDS], int stage) const {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            if (CHUNKS % THREADS != 0 && token + 4 * i >= TILE) break;
            int id = ids[i / TOGETHER], tokens = TOGETHER == 4 && i < 4 ? 4 * i : within(i) - within(0);
            const unsigned char* block = keys + (long long)((unsigned long long)(unsigned)max(id, 0) * block_bytes);
            Place place = (target ^ i % 2 * 4 * CHUNK) + (stage * TILE + 4 * i) * ROW;
            copy(place, block + tokens * stride, id >= 0);
        }
    }
};

// Tokens of a row: all of its blocks but for those behind the newest one, if that lies in the last block.
__device__ int length_of(const int* table, int n_blocks, long long last_slot, int size_log2) {
    int last = n_blocks - 1;
    if (table[last] != last_slot >> size_log2) return n_blocks << size_log2;
    return (last << size_log2) + (int)(last_slot & ((1 << size_log2) - 1)) + 1;
}

// No pointer is __restrict__: what the kernel before this one wrote must not be read as constant, or before the wait.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
block_mass_splits(const unsigned short* q, const unsigned char* keys, const int* table, const int* n_blocks_ptr,
                  const long long* last_slots, unsigned* words, float2* totals, long long q_stride_row,
                  long long q_stride_head, long long stride_bytes, long long table_stride, long long row_words,
                  long long size_log2_wide, long long scale_bits) {
    launch_dependents();
    await_inputs();
    SHARED(Shared, shared);
    int row = blockIdx.y, split = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int token_warp = warp / HEAD_WARPS, first_head = warp % HEAD_WARPS * 16 * HEAD_TILES;
    int n_blocks = n_blocks_ptr[row], size_log2 = (int)size_log2_wide;
    Share share(n_blocks, size_log2, gridDim.x, split);
    if (split >= share.splits) return;
    table += row * table_stride;
    float scale = __uint_as_float((unsigned)scale_bits);
    Copier copier(table, keys, shared.keys[0], n_blocks, size_log2, (int)stride_bytes);

    int ids[STAGES - 1][IDS], following[IDS];
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) copier.look_up(share.first + i, share.last, ids[i]);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (share.first + i < share.last) copier.copy_tile(ids[i], i);
        end_of_copies();
    }
    copier.look_up(share.first + STAGES - 1, share.last, following);
    Query query(q + row * q_stride_row + first_head * q_stride_head, q_stride_head);
    // Only the row's last tile has tokens that do not count.
    int length = share.last * TILE;
    if (share.last == share.tiles) length = length_of(table, n_blocks, last_slots[row], size_log2);

    int head = first_head + (HEAD_TILES == 2 ? lane / 2 % 2 * 16 : 0) + lane % 2 * 8 + lane / 4;
    Sums sums;
    sums.total = 0.0f;
    sums.first = sums.next = words + row * row_words + ((long long)share.first * TOKEN_WARPS + token_warp) * HEADS + head;
    sums.stores = HEAD_TILES == 2 || lane % 4 < 2;
#pragma unroll
    for (int i = 0; i < HEAD_TILES * 2; i++) sums.references.numbers[i / 2][i % 2] = LOWEST;

    Place stages = place_of(shared.keys);
    unsigned lane_place = place_of_lane() + token_warp * STEP * ROW;
    keep(lane_place);
    for (int tile = share.first, stage = 0; tile < share.last; tile++) {
        await_copies<STAGES - 2>();
        // Now all have this tile's keys, and none reads the last tile's.
        __syncthreads();
        int later = tile + STAGES - 1;
        if (later < share.last) copier.copy_tile(following, stage == 0 ? STAGES - 1 : stage - 1);
        end_of_copies();
        copier.look_up(later + 1, share.last, following);
        Place held = stages + stage * TILE * ROW;
        int left = length - tile * TILE;
        // All warps of a head start from the same reference.
        if (tile == share.first) sums.refer_to(query, Keys(held, lane_place - token_warp * STEP * ROW), 1, left, scale);
        sums.add(query, Keys(held, lane_place), left - token_warp * STEP, scale);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }

    if (sums.stores) shared.references[token_warp][head] = sums.references.own();
    __syncthreads();
    float highest = LOWEST;
#pragma unroll
    for (int i = 0; i < TOKEN_WARPS; i++) highest = fmaxf(highest, shared.references[i][head]);
    sums.raise_to(highest, sums.references.own());
    if (sums.stores) shared.totals[token_warp][head] = sums.total;
    __syncthreads();
    if (!sums.stores || token_warp != 0) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < TOKEN_WARPS; i++) total += shared.totals[i][head];
    totals[((long long)row * gridDim.x + split) * HEADS + head] = {highest, total};
}
