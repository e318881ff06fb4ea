// Scores of pages where a selection takes them from the votes of VOTERS query heads: from each head's logits, as
// `page_vote` leaves them, and the parts that it summed their votes up to. VOTERS is 0 where scores are given. The block
// has WARPS warps.

#define INFINITE __uint_as_float(0x7F800000u)
#define LARGEST 3.402823466e38f

// Where a row's scores come from. Of votes: each head's logits, `stride` apart, and what `page_vote` summed them up to,
// in `num_parts` pairs of a head's largest logit and the sum relative to it; pages from `newest` on score +inf.
struct Scores {
    const float* first;
    bool aligned;
#if VOTERS
    const float2* parts;
    long long stride;
    int num_parts, newest;
#endif
};

#define VOTED (VOTERS ? VOTERS : 1)
#define SLICES (WARPS > VOTED ? WARPS / VOTED : 1)  // of a head's parts, each summed up by a warp

// Logarithms, to the base 2, of the sums of each head's votes; and of each slice the largest and the sum.
struct Wholes {
    float of[VOTED];
    float2 slices[VOTED][SLICES];
};

#if VOTERS
__device__ float of_other(float number, int mask) {
    return __uint_as_float(__shfl_xor_sync(ALL, __float_as_uint(number), mask));
}

// What two sums are together, each relative to its largest.
__device__ float2 together(float2 one, float2 other) {
    float most = fmaxf(one.x, other.x), base = most == -INFINITE ? 0.0f : most;
    return {most, one.y * exp2_of(one.x - base) + other.y * exp2_of(other.x - base)};
}

// Sums up the parts of every head, in each block of a cluster to the same bits. Their loads wait for nothing but one
// another, and so are spread over all warps.
__device__ void sum_votes(const Scores& scores, Wholes& wholes) {
    int lane = threadIdx.x % 32;
    for (int slice = threadIdx.x / 32; slice < VOTERS * SLICES; slice += WARPS) {
        const float2* parts = scores.parts + slice / SLICES * scores.num_parts;
        float2 sum = {-INFINITE, 0.0f};
#pragma unroll 4
        for (int i = slice % SLICES * 32 + lane; i < scores.num_parts; i += 32 * SLICES) sum = together(sum, parts[i]);
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) sum = together(sum, {of_other(sum.x, mask), of_other(sum.y, mask)});
        if (lane == 0) wholes.slices[slice / SLICES][slice % SLICES] = sum;
    }
    __syncthreads();
    if (threadIdx.x < VOTERS) {
        float2 sum = wholes.slices[threadIdx.x][0];
        for (int i = 1; i < SLICES; i++) sum = together(sum, wholes.slices[threadIdx.x][i]);
        wholes.of[threadIdx.x] = sum.y > 0.0f ? sum.x + log2_of(sum.y) : 0.0f;
    }
    __syncthreads();
}

__device__ void load_logits(const Scores& scores, int page, int left, float (&logits)[VOTERS][4]) {
#pragma unroll
    for (int voter = 0; voter < VOTERS; voter++)
        load_some<float4>(scores.first + voter * scores.stride + page, left, scores.aligned, logits[voter]);
}

// Scores of four pages from `page` on: the logarithm, to the base 2, of what each gets of all heads.
__device__ void tally(const float (&logits)[VOTERS][4], const Scores& scores, int page, const Wholes& wholes,
                      float* target) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float votes[VOTERS], top = -INFINITE, total = 0.0f;
        bool known = true;
#pragma unroll
        for (int voter = 0; voter < VOTERS; voter++) {
            votes[voter] = logits[voter][i] - wholes.of[voter];
            known = known && votes[voter] == votes[voter];
            top = fmaxf(top, votes[voter]);
        }
        if (top == -INFINITE) top = 0.0f;
#pragma unroll
        for (int voter = 0; voter < VOTERS; voter++) total += exp2_of(votes[voter] - top);
        target[i] = page + i >= scores.newest ? INFINITE : known ? top + log2_of(total) : LARGEST;
    }
}
#endif
