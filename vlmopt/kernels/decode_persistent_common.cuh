// What the parts of decode_persistent share: its arguments, the shared memory, and Hopper's instructions by name.
#pragma once

#include "hopper.cuh"

namespace decode_persistent {

using namespace hopper;
using bf16 = __nv_bfloat16;

constexpr int WIDTH = 128;      // of an attention head
constexpr int GROUP = 2;        // query heads of one KV head
constexpr int CHUNK = 64;       // keys that pass through the ring together
constexpr int MAX_SLOTS = 32;   // blocks that share one KV head: a warp has a lane for each
constexpr int MAX_HIDDEN = 4096;
constexpr int MAX_SHARED = 227 * 1024;  // bytes that a block of Hopper can have

constexpr int WARPS = 8;        // of consumers
constexpr int PRODUCERS = 2;    // warps that fill the ring: lanes that ask for different copies take turns
constexpr int CONSUMERS = 32 * WARPS;
constexpr int THREADS = CONSUMERS + 32 * PRODUCERS;
constexpr int ROWS = 16;        // weight rows of a unit: the rows of a matrix instruction
constexpr int OWN = ROWS / PRODUCERS;  // of them a producer warp's
constexpr int PIECE = 512;      // columns of a unit that a stage holds, of which a warp takes SHARE
constexpr int SHARE = PIECE / WARPS;  // a multiple of 64, as all widths are of it
constexpr int PITCH = PIECE * 2 + 16;  // bytes from row to row of a stage; eight rows then lie in distinct banks
constexpr int STAGE_BYTES = ROWS * PITCH;
constexpr int STAGES = 12;
constexpr int IN_FLIGHT = 2;    // stages on their way: more would queue, and what other blocks wait for behind them
constexpr int BATCH = 8;        // units between two meetings of the warps
constexpr int SUMS = BATCH * WARPS * ROWS;

struct Layer {  // one row of the table that the host fills
    const bf16 *input_norm, *qkv, *q_norm, *k_norm, *o, *post_norm, *gate_up, *down;
};

struct Arguments {  // the same order as in decode_persistent.py
    const Layer* layers;
    const bf16 *embed, *norm, *head, *cos, *sin;
    bf16* cache;
    long long cache_stride_layer, cache_stride_kv, cache_stride_head;  // in elements; rows are neighbours
    long long *token, *row, *history;
    const long long* delta;
    // What crosses blocks, words of a tag and two values each: the stream after o and after down, the rows between.
    unsigned long long *after_o, *after_down, *qkv, *attended, *activated;
    unsigned long long *sums, *stats;  // [kv_heads, slots, GROUP * WIDTH], [kv_heads, slots, GROUP, 2]: tagged floats
    unsigned* state;                // [64], zero at first: the last tag before this step, blocks done
    long long* keys;                // [blocks]
    unsigned long long* fault;      // in the host's memory; where a time-out happened
    long long* marks;               // [blocks, marks] or null: when each block reached which place of the step
    int n_layers, hidden, mlp, heads, kv_heads, vocabulary, capacity, rope_rows, with_head, n_marks;
    float eps, head_eps, scale;     // scale turns a product of q and k into an exponent of 2
};

constexpr int BASE = 0, DONE = 32;  // in `state`, on cache lines of their own

// Offsets in shared memory, in bytes, all multiples of 16.
struct Layout {
    int barriers, x, h, scratch, q, k, v, cos, sin, reduce, table, end;
    __host__ __device__ explicit Layout(const Arguments& p) {
        int widest = p.hidden > p.mlp ? p.hidden : p.mlp;
        if (p.heads * WIDTH > widest) widest = p.heads * WIDTH;
        barriers = STAGES * STAGE_BYTES;
        x = barriers + 256;
        h = x + 2 * widest;
        scratch = h + 2 * p.hidden;
        q = scratch + 4 * (WARPS * GROUP * WIDTH + 2 * WARPS * GROUP);
        k = q + 2 * GROUP * WIDTH;
        v = k + 2 * WIDTH;
        cos = v + 2 * WIDTH;
        sin = cos + 2 * WIDTH;
        reduce = sin + 2 * WIDTH;
        table = reduce + 64;
        end = table + p.n_layers * int(sizeof(Layer));
    }
};
static_assert(2 * SUMS * 4 <= 4 * (WARPS * GROUP * WIDTH + 2 * WARPS * GROUP), "sums of products fit the scratch");
static_assert(CHUNK * WIDTH * 2 <= STAGE_BYTES, "a chunk of keys fits a stage");

// A wait that lasts longer stops the kernel: about two seconds.
constexpr long long PATIENCE = 4000000000ll;
enum Site { RING_EMPTY = 1, RING_FULL, STREAM, QKV, SUMS_OF_SLOTS, ATTENDED, ACTIVATED };

__device__ __noinline__ void give_up(unsigned long long* fault, Site site, unsigned detail) {
    if (fault) {
        *reinterpret_cast<volatile unsigned long long*>(fault) =
            (1ull << 63) | ((unsigned long long)site << 56) | ((unsigned long long)blockIdx.x << 40) |
            ((unsigned long long)(threadIdx.x / 32) << 32) | detail;
        __threadfence_system();
    }
    __trap();
}

// The consumers alone.
__device__ __forceinline__ void meet() { hopper::meet(1, CONSUMERS); }

// The ring: stages that the producers fill by bulk copies and the consumers read, always in the same order.
struct Ring {
    uint32_t data, full, empty;  // shared-memory addresses
    unsigned long long* fault;
    uint32_t nothing;  // zero, which the compiler does not know
    int stage = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity, Site site) const {
        if (barrier_passed(barrier, parity)) return;
        const long long start = clock64();
        while (!barrier_passed(barrier, parity))
            if (clock64() - start > PATIENCE) give_up(fault, site, stage);
    }
    __device__ __forceinline__ uint32_t address() const { return data + stage * STAGE_BYTES; }
    __device__ __forceinline__ void wait_full() const { wait(full + 8 * stage, phase, RING_FULL); }
    __device__ __forceinline__ void wait_empty() const { wait(empty + 8 * stage, phase ^ 1, RING_EMPTY); }
    // The stage that was asked for `IN_FLIGHT` stages ago has arrived.
    __device__ __forceinline__ void wait_for_earlier() const {
        const bool wrapped = stage < IN_FLIGHT;
        wait(full + 8 * (stage - IN_FLIGHT + (wrapped ? STAGES : 0)), wrapped ? phase ^ 1 : phase, RING_FULL);
    }
    __device__ __forceinline__ void expect(uint32_t bytes) const { barrier_expect(full + 8 * stage, bytes); }
    __device__ __forceinline__ void copy(uint32_t offset, const void* source, uint32_t bytes, uint64_t policy) const {
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
            ::"r"(address() + offset), "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(full + 8 * stage),
            "l"(policy)
            : "memory");
    }
    // A consumer warp has what it needs of this stage. An arrival does not wait for loads by itself, so its address
    // depends on `read`, something that came from the last of them.
    __device__ __forceinline__ void release(int lane, uint32_t read) {
        const uint32_t barrier = after(empty + 8 * stage, read, nothing);
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
        advance();
    }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Counts to `last` and then begins again at zero; true for the last arrival, which sees what the others wrote.
__device__ __forceinline__ bool arrive_last(unsigned* counter, unsigned last) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter)), "r"(last)
                 : "memory");
    return before == last;
}

// 32 bits of data and a tag, written and read as one: the reader needs no barrier, it looks until the tag is right.
__device__ __forceinline__ void put_tagged(unsigned long long* word, unsigned value, unsigned tag) {
    const unsigned long long both = ((unsigned long long)tag << 32) | value;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "l"(both) : "memory");
}
struct Two {
    unsigned long long a, b;
};
// Two neighbours, each of which is read as one.
__device__ __forceinline__ Two peek(const unsigned long long* words) {
    Two two;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(two.a), "=l"(two.b)
                 : "l"(__cvta_generic_to_global(words))
                 : "memory");
    return two;
}
// The values of two words each from `place(i)` for the bits i of `wanted`; asks again for what is missing alone.
template <int N, class Place>
__device__ __forceinline__ void get_tagged(
    Place place, unsigned (&values)[N][2], unsigned wanted, unsigned tag, Site site, unsigned long long* fault
) {
    const long long start = clock64();
    while (wanted) {
        Two both[N];
#pragma unroll
        for (int i = 0; i < N; ++i)
            both[i] = wanted >> i & 1 ? peek(place(i)) : Two{};
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if ((wanted >> i & 1) && unsigned(both[i].a >> 32) == tag && unsigned(both[i].b >> 32) == tag) {
                values[i][0] = unsigned(both[i].a);
                values[i][1] = unsigned(both[i].b);
                wanted &= ~(1u << i);
            }
        }
        if (wanted && clock64() - start > PATIENCE) give_up(fault, site, tag);
    }
}

__device__ __forceinline__ float low(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
__device__ __forceinline__ unsigned pack(float a, float b) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&pair);
}
__device__ __forceinline__ unsigned normalised(unsigned h, unsigned weight, float inverse) {
    return pack(low(weight) * rounded(low(h) * inverse), high(weight) * rounded(high(h) * inverse));
}

__device__ __forceinline__ float squares(unsigned pair) { return fmaf(low(pair), low(pair), high(pair) * high(pair)); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
    return x;
}

// What every consumer thread carries through the step.
struct Consumer {
    const Arguments& p;
    const Layout& at;
    char* memory;  // shared
    Ring ring;
    int tid, warp, lane;
    int slots, row;
    int turn = 0;         // the block that takes the next product's first unit
    int buffer = 0;       // which half of the scratch the next batch of sums goes to
    unsigned tag = 0;     // of this layer: one more than that of the layer or the step before
    int marked = 0;

    // Whether this block has units of a product of `n_units` before which others take `earlier`.
    __device__ __forceinline__ bool takes(int n_units, int earlier = 0) const {
        const int blocks = gridDim.x, distance = (int(blockIdx.x) - turn - earlier) % blocks;
        return (distance < 0 ? distance + blocks : distance) < n_units;
    }

    // Notes when this block got here, in cycles of its multiprocessor.
    __device__ __forceinline__ void mark() {
        if (p.marks && tid == 0 && marked < p.n_marks) p.marks[blockIdx.x * p.n_marks + marked++] = clock64();
    }

    template <class T>
    __device__ __forceinline__ T* shared(int offset) const { return reinterpret_cast<T*>(memory + offset); }
};

}  // namespace decode_persistent
