// What a CUDA kernel of this repository uses of CUDA, for a C++ compiler, so that its logic can be tested without a GPU.
// Its threads take turns on one thread of the CPU: each runs until it has to wait, the next one is any that need not, so
// what relies on an order without a barrier goes wrong. Nothing here says anything about memory order or speed.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include <setjmp.h>
#include <ucontext.h>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define SHARED(type, name) type& name = *(type*)memory[place_in_cluster]
#define DYNAMIC_SHARED(type, name)                                  \
    static_assert(sizeof(type) <= sizeof *memory, "more than here"); \
    SHARED(type, name)

using std::max;
using std::min;

struct Index {
    unsigned x, y;
};
struct Barrier {
    unsigned size, arrived = 0, passed = 0;
    unsigned arrive() {
        unsigned before = passed;
        if (++arrived == size) arrived = 0, passed++;
        return before;
    }
    void wait(unsigned before);
    void arrive_and_wait() { wait(arrive()); }
};
struct Warp {
    Barrier barrier{32};
    std::array<unsigned, 32> values;
    unsigned operands[32][6];
};
struct Block {
    Barrier barrier;
    std::vector<Warp> warps;
    unsigned left;
};
struct Thread {
    Index place, block;
    unsigned rank;
    std::unique_ptr<char[]> stack{new char[1 << 16]};
    ucontext_t context;
    jmp_buf turn;
    bool begun;
    const Barrier* awaited;
    unsigned before, arrival;
    bool ended;
};
static Index threadIdx, blockIdx, gridDim;
static unsigned place_in_cluster;
static Thread* running;
static jmp_buf scheduler;

// The blocks of one cluster run at a time; where there are no clusters, they are of one block.
static std::vector<Block> blocks;
static Barrier cluster;
alignas(1024) static unsigned char memory[16][1 << 17];

// A turn of a thread; only its first one is through a context, for which the system is called each time.
static void resume(Thread& thread) {
    if (_setjmp(scheduler)) return;
    if (thread.begun) _longjmp(thread.turn, 1);
    thread.begun = true;
    setcontext(&thread.context);
}
void Barrier::wait(unsigned before) {
    if (passed != before) return;
    running->awaited = this;
    running->before = before;
    if (!_setjmp(running->turn)) _longjmp(scheduler, 1);
}

static void __syncthreads() { blocks[place_in_cluster].barrier.arrive_and_wait(); }
static void __syncwarp() { blocks[place_in_cluster].warps[threadIdx.x / 32].barrier.arrive_and_wait(); }
static void __threadfence() {}

static void launch_dependents() {}
static void await_inputs() {}
static void hide(float&) {}

static void cluster_arrive() { running->arrival = cluster.arrive(); }
static void cluster_wait() { cluster.wait(running->arrival); }
static void cluster_barrier() { cluster.arrive_and_wait(); }
static unsigned load_from(unsigned rank, const unsigned* place) {
    return *(const unsigned*)(memory[rank] + ((const unsigned char*)place - memory[place_in_cluster]));
}

// The values of all lanes.
static std::array<unsigned, 32> exchange(unsigned value) {
    Warp& warp = blocks[place_in_cluster].warps[threadIdx.x / 32];
    warp.values[threadIdx.x % 32] = value;
    warp.barrier.arrive_and_wait();
    auto all = warp.values;
    warp.barrier.arrive_and_wait();
    return all;
}

static unsigned __ballot_sync(unsigned, bool flag) {
    unsigned mask = 0, lane = 0;
    for (unsigned value : exchange(flag)) mask |= value << lane++;
    return mask;
}
static bool __any_sync(unsigned mask, bool flag) { return __ballot_sync(mask, flag) != 0; }
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

static unsigned __shfl_xor_sync(unsigned, unsigned value, int mask) { return exchange(value)[threadIdx.x % 32 ^ mask]; }

static int __clz(unsigned value) { return value ? __builtin_clz(value) : 32; }
static int __popc(unsigned value) { return __builtin_popcount(value); }
static int __ffs(unsigned value) { return __builtin_ffs(value); }
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
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct int4 {
    int x, y, z, w;
};
template <typename Number> static Number atomicAdd(Number* place, Number value) {
    Number before = *place;
    *place += value;
    return before;
}
static void atomicOr(unsigned* place, unsigned value) { *place |= value; }
static void atomicMin(unsigned* place, unsigned value) { *place = min(*place, value); }
static void atomicMax(unsigned* place, unsigned value) { *place = max(*place, value); }

static uint4 load(const unsigned char* place) { return *(const uint4*)place; }
static float4 load_four(const float* place) { return {place[0], place[1], place[2], place[3]}; }

// Numbers of two bytes: bfloat16 or float16.
static float of_float16(unsigned bits) {
    unsigned short half = bits;
    _Float16 number;
    std::memcpy(&number, &half, sizeof half);
    return number;
}
static float of_half(bool bfloat16, unsigned bits) {
    return bfloat16 ? __uint_as_float(bits << 16) : of_float16(bits & 0xFFFF);
}
static unsigned half_of(bool bfloat16, float value) {
    unsigned bits = __float_as_uint(value);
    if (bfloat16) return value != value ? 0x7FFF : bits + 0x7FFF + (bits >> 16 & 1) >> 16;
    _Float16 number = value;
    unsigned short half;
    std::memcpy(&half, &number, sizeof half);
    return half;
}
static unsigned short to_float16(float value) { return half_of(false, value); }
static unsigned pack_as(bool bfloat16, float first, float second) {
    return half_of(bfloat16, first) | half_of(bfloat16, second) << 16;
}

// One number of float8 as float16: what the table of all 256 holds.
static unsigned half_of_e4m3(unsigned bits) {
    int exponent = bits >> 3 & 15, fraction = bits & 7;
    float size = exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp((float)fraction, -9);
    if ((bits & 127) == 127) size = NAN;
    return half_of(false, bits & 128 ? -size : size);
}
static uint2 of_e4m3(unsigned bits) {
    return {half_of_e4m3(bits & 255) | half_of_e4m3(bits >> 8 & 255) << 16,
            half_of_e4m3(bits >> 16 & 255) | half_of_e4m3(bits >> 24) << 16};
}

// Lets `use` read what each lane hands in, at most six words.
template <int SIZE, typename Use> static void share(const unsigned (&words)[SIZE], Use use) {
    Warp& warp = blocks[place_in_cluster].warps[threadIdx.x / 32];
    std::copy(words, words + SIZE, warp.operands[threadIdx.x % 32]);
    warp.barrier.arrive_and_wait();
    use(warp.operands);
    warp.barrier.arrive_and_wait();
}

// A product of tensor cores, from where each lane has its operands (mma.m16n8k16).
static void multiply_as(bool bfloat16, float (&sums)[4], const unsigned (&rows)[4], uint2 columns) {
    const unsigned words[6] = {rows[0], rows[1], rows[2], rows[3], columns.x, columns.y};
    share(words, [&](const unsigned (*all)[6]) {
        int lane = threadIdx.x % 32;
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            for (int entry = 0; entry < 16; entry++) {
                int holder = entry % 8 / 2, upper = entry % 2 * 16;
                unsigned one = all[row % 8 * 4 + holder][row / 8 + entry / 8 * 2];
                unsigned other = all[column * 4 + holder][4 + entry / 8];
                sums[i] += of_half(bfloat16, one >> upper & 0xFFFF) * of_half(bfloat16, other >> upper & 0xFFFF);
            }
        }
    });
}

// Likewise of unsigned with signed bytes (mma.m16n8k32).
static void multiply_bytes(int (&sums)[4], const unsigned (&rows)[4], uint2 columns) {
    const unsigned words[6] = {rows[0], rows[1], rows[2], rows[3], columns.x, columns.y};
    share(words, [&](const unsigned (*all)[6]) {
        int lane = threadIdx.x % 32;
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            for (int entry = 0; entry < 32; entry++) {
                int holder = entry % 16 / 4, shift = entry % 4 * 8;
                unsigned one = all[row % 8 * 4 + holder][row / 8 + entry / 16 * 2] >> shift & 255;
                sums[i] += (int)one * (signed char)(all[column * 4 + holder][4 + entry / 16] >> shift);
            }
        }
    });
}

// Shared memory as addresses; what is copied to it is there at once.
typedef unsigned long long Place;
static Place place_of(const void* memory) { return (Place)memory; }
static void copy(Place target, const unsigned char* source, bool held) {
    if (held) std::memcpy((void*)target, source, 16);
    else std::memset((void*)target, 0, 16);
}
static void end_of_copies() {}
template <typename Type> static void keep(Type&) {}
template <int LATER> static void await_copies() {}

// Four matrices of 8 rows of 16 bytes, each lane knowing the place of a row (ldmatrix.x4).
static void load_matrices(Place place, unsigned (&words)[4]) {
    const unsigned halves[2] = {(unsigned)place, (unsigned)(place >> 32)};
    share(halves, [&](const unsigned (*all)[6]) {
        int lane = threadIdx.x % 32;
        for (int i = 0; i < 4; i++) {
            const unsigned* row = all[i * 8 + lane / 4];
            words[i] = ((const unsigned*)(row[0] | (Place)row[1] << 32))[lane % 4];
        }
    });
}

// Of these matrices each lane gets what lies below each other in a column (ldmatrix.x4.trans).
static void load_transposed(Place place, unsigned (&words)[4]) {
    const unsigned halves[2] = {(unsigned)place, (unsigned)(place >> 32)};
    share(halves, [&](const unsigned (*all)[6]) {
        int lane = threadIdx.x % 32;
        auto number = [&](int matrix, int row) {
            const unsigned* address = all[matrix * 8 + row];
            return (unsigned)((const unsigned short*)(address[0] | (Place)address[1] << 32))[lane / 4];
        };
        for (int i = 0; i < 4; i++) words[i] = number(i, lane % 4 * 2) | number(i, lane % 4 * 2 + 1) << 16;
    });
}

// A matrix of 8 by 8, of which each lane has two numbers of a row (movmatrix.trans).
static unsigned transpose(unsigned words) {
    unsigned transposed;
    const unsigned handed[1] = {words};
    share(handed, [&](const unsigned (*all)[6]) {
        int lane = threadIdx.x % 32, column = lane / 4;
        auto number = [&](int row) { return all[row * 4 + column / 2][0] >> column % 2 * 16 & 0xFFFF; };
        transposed = number(lane % 4 * 2) | number(lane % 4 * 2 + 1) << 16;
    });
    return transposed;
}

static float __fmul_rn(float first, float second) { return first * second; }
static float exp2_of(float number) { return std::exp2(number); }
static float log2_of(float number) { return std::log2(number); }

// Runs the threads of a cluster until all have ended.
static void take_turns(std::vector<Thread>& threads) {
    static std::minstd_rand random;
    std::vector<Thread*> left;
    for (Thread& thread : threads) left.push_back(&thread);
    while (!left.empty()) {
        std::shuffle(left.begin(), left.end(), random);
        bool stuck = true;
        for (Thread* thread : left) {
            if (thread->awaited && thread->awaited->passed == thread->before) continue;
            stuck = false;
            running = thread;
            threadIdx = thread->place;
            blockIdx = thread->block;
            place_in_cluster = thread->rank;
            resume(*thread);
        }
        // All that are left wait for one that has ended, or for each other.
        if (stuck) std::abort();
        std::erase_if(left, [](const Thread* thread) { return thread->ended; });
    }
}

// Runs a kernel's body in all threads of a grid, one cluster of `size` blocks of a row after the other.
template <typename Body>
static void launch(unsigned columns, unsigned rows, unsigned threads, unsigned size, Body body) {
    static const Body* shared;
    shared = &body;
    void (*run)() = [] {
        (*shared)();
        running->ended = true;
        // A block's memory ends with it.
        if (--blocks[place_in_cluster].left == 0) std::memset(memory[place_in_cluster], 0x5A, sizeof *memory);
        _longjmp(scheduler, 1);
    };
    gridDim = {columns, rows};
    std::vector<Thread> all(size * threads);
    for (unsigned place = 0; place < columns * rows; place += size) {
        // What is not written is not zero.
        std::memset(memory, 0xA5, size * sizeof *memory);
        cluster = {size * threads};
        blocks.assign(size, {{threads}, std::vector<Warp>(threads / 32), threads});
        for (unsigned thread = 0; thread < size * threads; thread++) {
            Thread& one = all[thread];
            one.place = {thread % threads, 0};
            one.rank = thread / threads;
            one.block = {place % columns + one.rank, place / columns};
            one.awaited = nullptr;
            one.begun = one.ended = false;
            getcontext(&one.context);
            one.context.uc_stack.ss_sp = one.stack.get();
            one.context.uc_stack.ss_size = 1 << 16;
            one.context.uc_link = nullptr;
            makecontext(&one.context, run, 0);
        }
        take_turns(all);
    }
}

// Runs a kernel of these arguments, pointers and numbers; false if it takes more or fewer.
template <typename... Types>
static bool launch(void (*kernel)(Types...), unsigned columns, unsigned rows, unsigned threads, unsigned size,
                   const long long* arguments, unsigned count) {
    if (count != sizeof...(Types)) return false;
    [&]<std::size_t... place>(std::index_sequence<place...>) {
        launch(columns, rows, threads, size, [=] { kernel((Types)arguments[place]...); });
    }(std::index_sequence_for<Types...>{});
    return true;
}
