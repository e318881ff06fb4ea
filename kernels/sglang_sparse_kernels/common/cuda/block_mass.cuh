// What both halves of the block mass have in common.
//
// Compile-time: HEADS (a multiple of 16), TOKEN_WARPS (warps that divide a tile's tokens, 2 or 4).
//
// A piece are 16 tokens; the smallest block is one. A word has what two pieces weigh in a head: two multiples, 12 bits
// each, of a power of two, whose exponent is as in a float. The words of all heads lie side by side.

#include "hopper.cuh"

#define PIECE 16
#define STEP (2 * PIECE)  // tokens of a word
#define TILE (STEP * TOKEN_WARPS)
#define TILE_LOG2 (TOKEN_WARPS == 2 ? 6 : 7)
#define STRIDE (TOKEN_WARPS * HEADS)  // words from a tile to the next one

#define FRACTION 4095
// From 2^23 on, a float's last bit is worth one.
#define ONES 8388608.0f
#define LOWEST -3.402823466e38f

__device__ float swap(float number, int mask) {
    return __uint_as_float(__shfl_xor_sync(ALL, __float_as_uint(number), mask));
}

// Of two sums over lanes `mask` apart the one that this lane goes on with: the second one if its bit is set.
__device__ float halve(float first, float second, int mask) {
    bool upper = threadIdx.x & mask;
    return (upper ? second : first) + swap(upper ? first : second, mask);
}

// The tiles of a split. Splits take consecutive tiles, as many as the others or one more.
struct Share {
    int tiles, splits, first, last;  // of the row: tiles, and splits that have any; of this split
    __device__ Share(int n_blocks, int size_log2, int most, int split) {
        int blocks_log2 = TILE_LOG2 - size_log2;
        tiles = (n_blocks + (1 << blocks_log2) - 1) >> blocks_log2;
        splits = min(most, tiles);
        unsigned each = (unsigned)tiles / max(splits, 1), more = (unsigned)tiles % max(splits, 1);
        first = split * each + min(split, (int)more);
        last = split < splits ? first + each + (split < more) : first;
    }
};
