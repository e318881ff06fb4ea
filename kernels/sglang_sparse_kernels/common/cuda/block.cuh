// What the selections have in common: running sums over the threads of a block, and loads of a few numbers.

// Sum over the lanes up to this one.
__device__ unsigned lanes_through(unsigned mine) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        unsigned other = __shfl_up_sync(ALL, mine, step);
        if (lane >= step) mine += other;
    }
    return mine;
}

// Sum over the threads before this one; all threads call it. `slots` gets the sum of each warp.
__device__ unsigned threads_before(unsigned mine, unsigned* slots) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned running = lanes_through(mine);
    if (lane == 31) slots[warp] = running;
    __syncthreads();
    return __reduce_add_sync(ALL, lane < warp ? slots[lane] : 0u) + running - mine;
}

// Four of `left` numbers; where `aligned`, what lies between a row's last number and the next row may be read.
template <typename Four, typename Number>
__device__ void load_some(const Number* source, int left, bool aligned, Number* target) {
    if (left <= 0) return;
    if (aligned) {
        Four four = *(const Four*)source;
        target[0] = four.x;
        target[1] = four.y;
        target[2] = four.z;
        target[3] = four.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < left) target[i] = source[i];
    }
}
