// What a CUDA kernel of this repository uses of CUDA, for a C++ compiler: each of its threads is a thread of the CPU,
// so that its logic can be tested without a GPU. Nothing here says anything about memory order or speed on one.

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(threads)
// One block runs at a time.
#define __shared__ static

using std::max;
using std::min;

struct Index {
    unsigned x, y;
};
static thread_local Index threadIdx, blockIdx;
static Index gridDim;

struct Warp {
    std::barrier<> barrier{32};
    unsigned values[32];
};
static std::vector<std::unique_ptr<Warp>> warps;
static std::unique_ptr<std::barrier<>> block;

static void __syncthreads() { block->arrive_and_wait(); }

// The values of all lanes.
static std::vector<unsigned> exchange(unsigned value) {
    Warp& warp = *warps[threadIdx.x / 32];
    warp.values[threadIdx.x % 32] = value;
    warp.barrier.arrive_and_wait();
    std::vector<unsigned> all(warp.values, warp.values + 32);
    warp.barrier.arrive_and_wait();
    return all;
}

static unsigned __ballot_sync(unsigned, bool flag) {
    unsigned mask = 0, lane = 0;
    for (unsigned value : exchange(flag)) mask |= value << lane++;
    return mask;
}
static unsigned __reduce_add_sync(unsigned, unsigned value) {
    unsigned sum = 0;
    for (unsigned other : exchange(value)) sum += other;
    return sum;
}
static unsigned __reduce_min_sync(unsigned, unsigned value) {
    auto all = exchange(value);
    return *std::min_element(all.begin(), all.end());
}
static unsigned __reduce_max_sync(unsigned, unsigned value) {
    auto all = exchange(value);
    return *std::max_element(all.begin(), all.end());
}
static unsigned __shfl_sync(unsigned, unsigned value, int lane) { return exchange(value)[lane]; }
static unsigned __shfl_up_sync(unsigned, unsigned value, int step) {
    int lane = threadIdx.x % 32;
    auto all = exchange(value);
    return all[lane >= step ? lane - step : lane];
}

static int __popc(unsigned value) { return __builtin_popcount(value); }
static int __clz(unsigned value) { return value ? __builtin_clz(value) : 32; }
static unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
static float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
struct float4 {
    float x, y, z, w;
};
template <typename Number> static Number atomicAdd(Number* place, Number value) {
    return __atomic_fetch_add(place, value, __ATOMIC_SEQ_CST);
}

// Runs a kernel's body in all threads of a grid, block after block.
template <typename Body> static void launch(unsigned columns, unsigned rows, unsigned threads, Body body) {
    gridDim = {columns, rows};
    for (unsigned row = 0; row < rows; row++) {
        for (unsigned column = 0; column < columns; column++) {
            block = std::make_unique<std::barrier<>>(threads);
            warps.clear();
            for (unsigned warp = 0; warp < threads / 32; warp++) warps.push_back(std::make_unique<Warp>());
            std::vector<std::jthread> running;
            for (unsigned thread = 0; thread < threads; thread++)
                running.emplace_back([=] {
                    threadIdx = {thread, 0};
                    blockIdx = {column, row};
                    body();
                });
        }
    }
}
