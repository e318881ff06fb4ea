// Skip-Softmax decode by tensor cores: see cuda.py for the method and the launch.
//
// Compile-time: those of attention.cuh, and BLOCK_KEYS and LOCAL_BLOCKS (of the definition), WARPS, RING (pieces that a
// warp has on their way or in use), RESIDENT (blocks of threads that a multiprocessor is to run at once).
//
// Here a block is one of keys, as in the definition; a piece of it are 16 keys, or their values, the rows of a product.
// A warp takes whole blocks, on its own. Its pieces come through a ring, in the order in which they were asked for. Each
// that has been used makes place for another one: of values, if those of a block are wanted and not yet asked for, or
// else of the keys that follow. So as much is on its way whatever is skipped, and nothing waits for a decision but the
// values themselves, which come behind the keys of the next blocks. Until then the weights of a block lie in shared
// memory, each lane's own.

#include "attention.cuh"

#define THREADS (32 * WARPS)
#define PIECES (BLOCK_KEYS / PIECE)
#define NEAR ((1 + LOCAL_BLOCKS) * PIECES)
#define NEAR_EACH ((NEAR + WARPS - 1) / WARPS)
#define WAITING (2 + (RING - 2) / PIECES)  // blocks whose values may be on their way
#define MAX_SPLITS 256
#define KEY 1u
#define VALUE 2u

static_assert(BLOCK_KEYS == 64, "a lane looks up two tokens of a block");
static_assert(RING >= 2 && RING <= 16 && NEAR_EACH <= RING, "two bits of a word say what a piece is");

struct Weights {
    uint2 pieces[PIECES][32];
    float2 decay[32];  // of what was summed up before
};

struct Own {
    alignas(256) unsigned char ring[RING][PIECE_BYTES];
    Weights waiting[WAITING];
};

struct Shared {
    Own warps[WARPS];
    float near[WARPS][HEADS], maxima[WARPS][HEADS], totals[WARPS][HEADS];
    int visited[WARPS], skipped[WARPS];
    bool last;
};

struct Table {
    const int* pages;
    int length, size_log2;

    // The page of a token; 0, the pool's dummy, from the row's end on.
    __device__ int page_of(int token) const { return token < length ? pages[token >> size_log2] : 0; }

    // Copies the 16 tokens from `token` on, whose pages are this lane's and the following ones' of `lane`.
    __device__ void copy_piece(Place target, const Rows& rows, int token, int page, int lane) const {
#pragma unroll
        for (int i = 0; i < PIECE; i += COPIED) {
            int key = i + threadIdx.x % 32 / ROW_CHUNKS, chunk = threadIdx.x % ROW_CHUNKS ^ key % 8;
            long long slot = (long long)(int)__shfl_sync(ALL, (unsigned)page, lane + key) << size_log2;
            slot += token + key & (1 << size_log2) - 1;
            copy(target + key * ROW + chunk * CHUNK, rows.first + slot * rows.stride, token + key < length);
        }
    }
};

// Pages of the tokens of a block: two for each lane.
struct Pages {
    int halves[2];
    __device__ void look_up(int block, const Table& table) {
#pragma unroll
        for (int half = 0; half < 2; half++)
            halves[half] = table.page_of(block * BLOCK_KEYS + half * 32 + threadIdx.x % 32);
    }
    __device__ void copy_piece(Place target, const Rows& rows, int block, int piece, const Table& table) const {
        int page = piece < PIECES / 2 ? halves[0] : halves[1];
        table.copy_piece(target, rows, block * BLOCK_KEYS + piece * PIECE, page, piece * PIECE % 32);
    }
};

// Takes the weight of a piece's keys from the `left`-th one on.
__device__ void hide(float (&logits)[4], int left) {
    int key = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (key + i / 2 * 8 >= left) logits[i] = -INFINITE;
}

// The pieces of a warp, see above.
struct Stream {
    const Table& table;
    const Rows &keys, &values;
    Place ring;
    int block, step, blocks;  // of the keys asked for next, from one to the next, and of the row
    int piece = 0, value_block = 0, value_piece = PIECES;
    unsigned next = 0, oldest = 0;  // in the ring
    unsigned kinds = 0;             // of the pieces in the ring, two bits each, the oldest one in the lowest
    Pages pages, later, value_pages;

    __device__ Stream(const Table& table, const Rows& keys, const Rows& values, Place ring, int block, int step,
                      int blocks)
        : table(table), keys(keys), values(values), ring(ring), block(block), step(step), blocks(blocks) {
        pages.look_up(block, table);
        later.look_up(block + step, table);
    }

    // The place of what is asked for next; all lanes have used what it had before.
    __device__ Place take() {
        Place place = ring + next * PIECE_BYTES;
        next = next == RING - 1 ? 0 : next + 1;
        return place;
    }

    __device__ void want_values(int of_block) {
        value_block = of_block;
        value_piece = 0;
        value_pages.look_up(of_block, table);
    }

    // Asks for a piece behind the `before` ones in the ring; where nothing is left, for none.
    __device__ void ask(int before) {
        Place place = take();
        if (value_piece < PIECES) {
            value_pages.copy_piece(place, values, value_block, value_piece++, table);
            kinds |= VALUE << 2 * before;
        } else if (block < blocks) {
            pages.copy_piece(place, keys, block, piece, table);
            kinds |= KEY << 2 * before;
            if (++piece == PIECES) {
                piece = 0;
                block += step;
                pages = later;
                // Known one block before its keys are wanted.
                later.look_up(block + step, table);
            }
        }
        end_of_copies();
    }

    // The oldest piece, which has arrived.
    __device__ Place await() {
        await_copies<RING - 1>();
        __syncwarp();
        Place place = ring + oldest * PIECE_BYTES;
        oldest = oldest == RING - 1 ? 0 : oldest + 1;
        return place;
    }

    // Asks for another one in the place of the oldest piece.
    __device__ void renew() {
        __syncwarp();
        kinds >>= 2;
        ask(RING - 1);
    }
};

// The highest logit of each of the lane's columns among the first and the newest blocks, of whose pieces the warps take
// one in turn. All threads call it: it fills the ring.
__device__ void look_near(const Query& query, Stream& stream, bool sparse, Shared& shared, float (&highest)[2]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tokens[NEAR_EACH], pages[NEAR_EACH], count = 0;
    if (sparse) count = (NEAR - warp + WARPS - 1) / WARPS;
#pragma unroll
    for (int i = 0; i < NEAR_EACH; i++) {
        int piece = warp + i * WARPS, newest = max(stream.blocks - piece / PIECES, 0);
        tokens[i] = (piece < PIECES ? 0 : newest) * BLOCK_KEYS + piece % PIECES * PIECE;
        pages[i] = i < count ? stream.table.page_of(tokens[i] + lane % PIECE) : 0;
    }
#pragma unroll
    for (int i = 0; i < NEAR_EACH; i++) {
        if (i >= count) break;
        stream.table.copy_piece(stream.take(), stream.keys, tokens[i], pages[i], 0);
        end_of_copies();
    }
    for (int i = count; i < RING; i++) stream.ask(i);
    float found[2] = {-INFINITE, -INFINITE};
#pragma unroll
    for (int i = 0; i < NEAR_EACH; i++) {
        if (i >= count) break;
        float logits[4];
        multiply_keys(query, stream.await() + key_place(), logits);
        hide(logits, stream.table.length - tokens[i]);
#pragma unroll
        for (int j = 0; j < 4; j++) found[j % 2] = fmaxf(found[j % 2], reach_of(logits[j]));
        stream.renew();
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        found[i] = highest_of(found[i]);
        if (lane < 4) shared.near[warp][lane * 2 + i] = found[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        highest[i] = -INFINITE;
#pragma unroll
        for (int other = 0; other < WARPS; other++)
            highest[i] = fmaxf(highest[i], shared.near[other][lane % 4 * 2 + i]);
    }
}

// Online softmax over a warp's blocks. Rows of its sums are dimensions, columns heads; each lane has two of these.
struct Attention {
    float sums[TILES][4] = {}, maximum[2] = {-INFINITE, -INFINITE}, total[2] = {};
    float logits[PIECES][4];  // of the block whose keys are coming
    bool wanted = false;      // whether any of its keys is, as far as this lane knows
    int piece = 0, value_piece = 0, newest = 0, oldest = 0, values_left = 0, visited = 0, skipped = 0;

    __device__ void add_keys(const float (&found)[4], const float (&limit)[2]) {
#pragma unroll
        for (int i = 0; i < PIECES; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (i == piece) logits[i][j] = found[j];
#pragma unroll
        for (int j = 0; j < 4; j++)
            wanted |= threadIdx.x % 4 * 2 + j % 2 < GROUP && !(found[j] < limit[j % 2]);
        piece++;
    }

    // Whether the values of the block are wanted, of which all keys have come.
    __device__ bool decide(bool always, float scale, Weights* waiting) {
        bool keeps = __any_sync(ALL, wanted) || always;
        piece = 0;
        wanted = false;
        visited++;
        if (keeps) weigh(scale, waiting[newest]);
        else skipped++;
        return keeps;
    }

    __device__ void weigh(float scale, Weights& into) {
        int lane = threadIdx.x % 32;
        float decay[2], base[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float reached = -INFINITE;
#pragma unroll
            for (int j = 0; j < 2 * PIECES; j++) reached = fmaxf(reached, reach_of(logits[j / 2][j % 2 * 2 + i]));
            reached = fmaxf(maximum[i], highest_of(reached));
            base[i] = base_of(reached, scale);
            decay[i] = exp2_of(maximum[i] * scale - base[i]);
            maximum[i] = reached;
            total[i] *= decay[i];
        }
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            float weights[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                weights[j] = exp2_of(logits[i][j] * scale - base[j % 2]);
                total[j % 2] += weights[j];
            }
            into.pieces[i][lane] = columns_of(weights);
        }
        into.decay[lane] = float2{decay[0], decay[1]};
        newest = newest == WAITING - 1 ? 0 : newest + 1;
        values_left += PIECES;
    }

    __device__ void add_values(Place values, const Weights* waiting) {
        const Weights& block = waiting[oldest];
        int lane = threadIdx.x % 32;
        if (value_piece == 0) {
            float2 decay = block.decay[lane];
#pragma unroll
            for (int i = 0; i < 4 * TILES; i++) sums[i / 4][i % 4] *= i % 2 ? decay.y : decay.x;
        }
        multiply_values(values, block.pieces[value_piece][lane], sums);
        values_left--;
        if (++value_piece < PIECES) return;
        value_piece = 0;
        oldest = oldest == WAITING - 1 ? 0 : oldest + 1;
    }

    // Brings what the warp has found into shared memory, the sums into its ring.
    __device__ void hand_in(Shared& shared) {
        int warp = threadIdx.x / 32;
        __syncwarp();
        store_found(sums, maximum, total, (float*)shared.warps[warp].ring, shared.maxima[warp], shared.totals[warp]);
        if (threadIdx.x % 32 == 0) {
            shared.visited[warp] = visited;
            shared.skipped[warp] = skipped;
        }
        __syncthreads();
    }
};

// A warp's blocks, from `stream.block` on.
__device__ void attend(const Query& query, Stream& stream, Attention& attention, bool sparse, float gap, float scale,
                       Shared& shared) {
    Weights* waiting = shared.warps[threadIdx.x / 32].waiting;
    int block = stream.block;
    float limit[2];
    look_near(query, stream, sparse, shared, limit);
#pragma unroll
    for (int i = 0; i < 2; i++) limit[i] = sparse && limit[i] < INFINITE ? limit[i] + gap : -INFINITE;
    while (block < stream.blocks || attention.values_left > 0) {
        unsigned kind = stream.kinds & 3;
        Place place = stream.await();
        if (kind == KEY) {
            float logits[4];
            int first = block * BLOCK_KEYS + attention.piece * PIECE;
            multiply_keys(query, place + key_place(), logits);
            hide(logits, stream.table.length - first);
            attention.add_keys(logits, limit);
            if (attention.piece == PIECES) {
                bool always = block == 0 || block >= stream.blocks - LOCAL_BLOCKS;
                if (attention.decide(always, scale, waiting)) stream.want_values(block);
                block += stream.step;
            }
        } else if (kind == VALUE) {
            attention.add_values(place + value_place(), waiting);
        }
        stream.renew();
    }
}

// Combines the first `used` splits of a row's KV head, in their order; `first` is the head's in the first split, and
// `stride` the heads of a split. Other blocks of threads have just written these: volatile, so not from a cache.
__device__ void combine(const float* partial, const float* logarithms, unsigned* out, long long first, int stride,
                        int used, Shared& shared) {
    float* weights = (float*)shared.warps;
    static_assert(MAX_SPLITS * GROUP * sizeof(float) <= sizeof(shared.warps), "weights of the splits");
    int lane = threadIdx.x % 32;
    for (int head = threadIdx.x / 32; head < GROUP; head += WARPS) {
        const volatile float* numbers = logarithms + first + head;
        float maximum = -INFINITE, total = 0.0f;
        for (int i = lane; i < used; i += 32) {
            float number = numbers[(long long)i * stride];
            maximum = fmaxf(maximum, number);
            weights[head * MAX_SPLITS + i] = number;
        }
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) maximum = fmaxf(maximum, swap(maximum, mask));
        float base = base_of(maximum, 1.0f);
        for (int i = lane; i < used; i += 32) {
            float weight = exp2_of(weights[head * MAX_SPLITS + i] - base);
            weights[head * MAX_SPLITS + i] = weight;
            total += weight;
        }
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) total += swap(total, mask);
        if (total == 0.0f) total = 1.0f;
        for (int i = lane; i < used; i += 32) weights[head * MAX_SPLITS + i] /= total;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * DIM / 2; i += THREADS) {
        int head = i / (DIM / 2), dim = i % (DIM / 2) * 2;
        const volatile float* place = partial + (first + head) * DIM + dim;
        float2 sum = {0.0f, 0.0f};
#pragma unroll 8
        for (int split = 0; split < used; split++) {
            const volatile float* part = place + (long long)split * stride * DIM;
            float weight = weights[head * MAX_SPLITS + split];
            sum.x += part[0] * weight;
            sum.y += part[1] * weight;
        }
        out[i] = pack(sum.x, sum.y);
    }
}

// Whether this is the last of a pair's splits that comes here; all have written before.
__device__ bool comes_last(int* arrivals, int used, Shared& shared) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.last = atomicAdd(arrivals, 1) == used - 1;
        // Ready for the next call.
        if (shared.last) *arrivals = 0;
    }
    __syncthreads();
    __threadfence();
    return shared.last;
}

// No pointer is __restrict__: what the kernel before this one wrote must not be read as constant, or before the wait.
// Without `arrivals` the splits of a row are left to another kernel, if they are several.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
skip_softmax_decode(const unsigned short* q, const unsigned char* k_cache, const unsigned char* v_cache,
                    const int* page_table, const int* n_pages_ptr, const long long* last_slots, const float* factors,
                    unsigned short* out, float* partial, float* logarithms, int* arrivals, unsigned long long* stats,
                    long long q_row, long long q_head, long long k_slot, long long k_head, long long v_slot,
                    long long v_head, long long table_stride, long long size_log2, long long splits,
                    long long scale_bits, long long v_scale_bits) {
    launch_dependents();
    await_inputs();
    DYNAMIC_SHARED(Shared, shared);
    // Heads vary fastest: the blocks of threads that read neighbouring memory run together.
    int heads = gridDim.x / (int)splits, head = blockIdx.x % heads, split = blockIdx.x / heads, warp = threadIdx.x / 32;
    long long row = blockIdx.y;
    int n_pages = n_pages_ptr[row], offset = (int)(last_slots[row] & (1 << size_log2) - 1);
    float factor = factors[row], scale = __uint_as_float((unsigned)scale_bits);
    float v_scale = __uint_as_float((unsigned)v_scale_bits);
    Table table = {page_table + row * table_stride, n_pages > 0 ? (n_pages - 1 << size_log2) + offset + 1 : 0,
                   (int)size_log2};
    int blocks = (table.length + BLOCK_KEYS - 1) / BLOCK_KEYS;
    int used = max(min((int)splits, blocks), 1);
    // The first one writes the zeros of an empty row.
    if (split >= used) return;
    bool sparse = factor > 0.0f;
    float gap = log2f(fminf((sparse ? factor : 1.0f) / max(table.length, 1), 1.0f)) / scale;
    Rows keys(k_cache + head * k_head, k_slot), values(v_cache + head * v_head, v_slot);
    // Splits take blocks in turn, as do their warps: whatever the length is, they differ by one at most.
    Stream stream(table, keys, values, place_of(shared.warps[warp].ring), split + (int)splits * warp,
                  (int)splits * WARPS, blocks);
    Query query(q + row * q_row + head * GROUP * q_head, q_head);
    Attention attention;
    attend(query, stream, attention, sparse, gap, scale, shared);
    attention.hand_in(shared);

    if (stats && sparse && threadIdx.x == 0) {
        int visited = 0, skipped = 0;
        for (int i = 0; i < WARPS; i++) {
            visited += shared.visited[i];
            skipped += shared.skipped[i];
        }
        atomicAdd(stats, (unsigned long long)visited);
        atomicAdd(stats + 1, (unsigned long long)skipped);
    }
    bool whole = splits == 1 || arrivals && used == 1;
    int q_heads = heads * GROUP;
    long long first = row * splits * q_heads + head * GROUP, place = first + (long long)split * q_heads;
    unsigned* result = (unsigned*)(out + (row * q_heads + head * GROUP) * DIM);
    for (int i = threadIdx.x; i < GROUP * DIM / 2; i += THREADS) {
        int member = i / (DIM / 2), dim = i % (DIM / 2) * 2;
        float logarithm;
        float2 found = merge_warps<WARPS>((const float*)shared.warps, sizeof(Own) / sizeof(float), shared.maxima,
                                          shared.totals, member, dim, scale, v_scale, logarithm);
        if (whole) {
            result[i] = pack(found.x, found.y);
        } else {
            *(float2*)(partial + (place + member) * DIM + dim) = found;
            if (dim == 0) logarithms[place + member] = logarithm;
        }
    }
    if (whole || !arrivals || !comes_last(arrivals + row * heads + head, used, shared)) return;
    combine(partial, logarithms, result, first, q_heads, used, shared);
}
