// The parts of decode_attention_cluster.cu: its arguments, its shared memory, a warp's softmax, and the newest rows.
#pragma once

#include "decode_attention_cluster.cuh"

namespace cluster_attention {

constexpr int SLOTS = 16;              // blocks of a cluster
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int KEYS = 16;               // of a chunk that a warp takes
constexpr int CHUNK = KEYS * WARPS;
constexpr int ROUND = CHUNK * SLOTS;   // keys from one chunk of a slot to its next
constexpr int MAX_STAGES = 8;

struct Arguments {
    CUtensorMap k_map, v_map;
    const void *q, *q_norm, *k_norm, *cos, *sin;  // q is the packed product where k and v come from it too
    void *k, *v, *out;
    const long long* row;
    long long q_row, q_head, k_head, k_row, v_head, v_row, cos_row, sin_row;  // strides in values
    float scale, eps;
    int capacity, rows, group, kv_heads, stages, ahead;
    bool tree;  // see norm_and_rotate
    // Where blocks run on their own, what they leave for `combine`: [KV head][slot][pair of columns], of each all
    // dimensions' sums, and two largest scores and weights' sums; else null.
    float2* sums;
    float4* stats;
};

// Shared memory: every warp's ring, then what the block's warps and the other blocks leave.
template <int WIDTH, int COLUMNS>
struct Layout {
    static constexpr int BOX = KEYS * WIDTH * 2, STAGE = 2 * BOX;  // bytes of k's or v's keys, and of both
    static constexpr int PAIRS = COLUMNS / 2, DIMS = WIDTH / SLOTS;
    static constexpr int PITCH = WIDTH * 8 + 32;  // of a pair of columns in a warp's sums, which take the ring's place
    static constexpr int RECEIVED = SLOTS * PAIRS * DIMS * 8, STATS = SLOTS * PAIRS * 16, OWN = WARPS * PAIRS * 16;
    uint32_t base, stages;
    __device__ __forceinline__ uint32_t ring(int warp) const { return base + warp * stages * STAGE; }
    __device__ __forceinline__ uint32_t received() const { return ring(WARPS); }
    __device__ __forceinline__ uint32_t stats() const { return received() + RECEIVED; }
    __device__ __forceinline__ uint32_t own() const { return stats() + STATS; }
    __device__ __forceinline__ uint32_t exchange() const { return own() + OWN; }
    __device__ __forceinline__ uint32_t full(int warp) const { return exchange() + 8 + warp * MAX_STAGES * 8; }
    static int bytes(int stages) {
        return WARPS * stages * STAGE + RECEIVED + STATS + OWN + 8 + WARPS * MAX_STAGES * 8;
    }
};

template <typename V>
__device__ __forceinline__ V& shared_at(uint32_t address) {
    return *static_cast<V*>(__cvta_shared_to_generic(address));
}

__device__ __forceinline__ float shift_of(float top) { return top == -INFINITY ? 0.0f : top; }

// One warp's keys: output, weights' sum and largest score of all columns. Of column 8n + 2·(lane % 4) + e the lane has
// the sum over its own keys lane / 4 and lane / 4 + 8, and of the output dimensions 16m + lane / 4 (+ 8).
template <typename T, int WIDTH, int COLUMNS>
struct Softmax {
    static constexpr int LINES = WIDTH / 64, TILES = COLUMNS / 8, PARTS = WIDTH / 16;
    float out[TILES][PARTS][4] = {}, total[TILES][2] = {}, top[TILES][2];
    int limit[TILES][2];  // keys from here on are not seen
    uint32_t k_place, v_place;

    __device__ __forceinline__ Softmax(int past, int group, int lane) {
        const int g = lane / 4, t = lane % 4, key = lane % 8 + lane / 16 * 8;
        k_place = g * 128 + ((2 * t) ^ g) * 16;
        v_place = key * 128 + ((lane / 8 % 2) ^ (key % 8)) * 16;
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
            top[i / 2][i % 2] = -INFINITY;
            limit[i / 2][i % 2] = past + 1 + (i / 2 * 8 + 2 * t + i % 2) / group;
        }
    }

    // What a warp reads of a stage, all at once, so that the stage can be filled anew.
    struct Keys {
        uint4 k[LINES][2][2];  // [line][chunk][key / 8]
        uint32_t v[PARTS][4];
    };

    __device__ __forceinline__ void load(Keys& keys, uint32_t stage) const {
#pragma unroll
        for (int i = 0; i < 4 * LINES; ++i) {
            const uint32_t at = stage + k_place + i / 4 * (KEYS * 128) + i % 2 * 1024;
            keys.k[i / 4][i / 2 % 2][i % 2] = load_shared(at ^ (i / 2 % 2 * 16));
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const uint32_t at = stage + KEYS * WIDTH * 2 + v_place + part / 4 * (KEYS * 128);
            load_transposed(keys.v[part], at ^ (part % 4 * 32));
        }
    }

    // What arrives last of a load.
    __device__ __forceinline__ static uint32_t last_of(const Keys& keys) {
        return keys.k[LINES - 1][1][1].w ^ keys.v[PARTS - 1][3];
    }

    __device__ __forceinline__ void take(const Keys& keys, const Head<LINES> (&q)[TILES], int start, float scale,
                                         int lane) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            float sums[2 * LINES][4] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int i = 0; i < 2 * LINES; ++i) {
                    const auto& [low, high] = keys.k[i / 2][i % 2];
                    const uint32_t* own = &q[tile][i / 2][i % 2 * 4 + half * 2];
                    if (half == 0) {
                        multiply<T>(sums[i], low.x, high.x, low.y, high.y, own[0], own[1]);
                    } else {
                        multiply<T>(sums[i], low.z, high.z, low.w, high.w, own[0], own[1]);
                    }
                }
            }
            float weights[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float sum = sums[0][i] + sums[1][i];
                if constexpr (LINES == 2) sum += sums[2][i] + sums[3][i];
                const int key = start + lane / 4 + i / 2 * 8;
                weights[i] = key < limit[tile][i % 2] ? sum * scale : -INFINITY;
            }
            float earlier[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float highest = fmaxf(weights[e], weights[2 + e]);
#pragma unroll
                for (int distance = 4; distance < 32; distance *= 2) {
                    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, distance));
                }
                highest = fmaxf(highest, top[tile][e]);
                const float shift = shift_of(highest);
                earlier[e] = exp2_of(top[tile][e] - shift);
                weights[e] = exp2_of(weights[e] - shift);
                weights[2 + e] = exp2_of(weights[2 + e] - shift);
                total[tile][e] = total[tile][e] * earlier[e] + (weights[e] + weights[2 + e]);
                top[tile][e] = highest;
            }
            const uint32_t first = transposed(pack<T>(weights[0], weights[1]));
            const uint32_t second = transposed(pack<T>(weights[2], weights[3]));
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                float(&o)[4] = out[tile][part];
#pragma unroll
                for (int i = 0; i < 4; ++i) o[i] *= earlier[i % 2];
                const auto& v = keys.v[part];
                multiply<T>(o, v[0], v[1], v[2], v[3], first, second);
            }
        }
    }

    // Sums over all of the warp's keys; NaN where the query of a column sees one of the `wild` rows.
    __device__ __forceinline__ void finish(unsigned wild, int past) {
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
            float& sum = total[i / 2][i % 2];
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
            const int seen = min(limit[i / 2][i % 2] - past, 8);  // of the newest rows
            if (wild & ((1u << seen) - 1)) sum = NAN;
        }
    }

    // For the block's other warps.
    __device__ __forceinline__ void leave(uint32_t sums, uint32_t stats, int pairs, int lane) const {
        using Own = Layout<WIDTH, COLUMNS>;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const int pair = tile * 4 + lane % 4;
            if (pair >= pairs) continue;
            const uint32_t at = sums + pair * Own::PITCH + lane / 4 * 8;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const float(&o)[4] = out[tile][part];
                shared_at<float2>(at + part * 128) = make_float2(o[0], o[1]);
                shared_at<float2>(at + part * 128 + 64) = make_float2(o[2], o[3]);
            }
            const float4 found = {top[tile][0], total[tile][0], top[tile][1], total[tile][1]};
            if (lane < 4) shared_at<float4>(stats + pair * 16) = found;
        }
    }
};

// One of the newest rows, where this warp's keys hold it: its k and v, 16 values of each line. Four neighbouring lanes
// hold row `index`, row 0 those from 4 · `before` on.
template <typename T, int WIDTH>
struct Newest {
    static constexpr int LINES = WIDTH / 64;
    Head<LINES> k, v;
    long long position;
    int index, before;
    bool owned;

    __device__ __forceinline__ Newest(const Arguments& a, long long first, int length, int own_first, int before,
                                      int lane)
        : position(first + lane / 4 - before), index(lane / 4 - before), before(before) {
        owned = index >= 0 && index < a.rows && position >= 0 && position < length &&
                position % ROUND / KEYS == own_first / KEYS;
    }

    // Rows of v with a NaN or infinity that not all queries see become zeros, since a weight of zero would not keep it
    // from a query; gives back a bit for each.
    __device__ __forceinline__ unsigned tame() {
        bool found = false;
#pragma unroll
        for (int i = 0; i < 8 * LINES; ++i) found |= is_wild<T>(v[i / 8][i % 8]);
        unsigned lanes = __ballot_sync(~0u, found && owned && index > 0), rows = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) rows |= (lanes >> (4 * i) & 15) ? 1u << i : 0;
        rows >>= before;
        if (owned && rows >> index & 1) {
#pragma unroll
            for (int i = 0; i < 8 * LINES; ++i) v[i / 8][i % 8] = 0;
        }
        return rows;
    }

    // Into their places among the keys from `start` on; zeros for v beyond the live length.
    __device__ __forceinline__ void put(uint32_t stage, int start, int length, int lane) const {
        constexpr int BOX = KEYS * WIDTH * 2;
        if (owned && position >= start && position < start + KEYS) {
            const int key = static_cast<int>(position) - start;
#pragma unroll
            for (int i = 0; i < 2 * LINES; ++i) {
                const uint32_t at = i / 2 * (KEYS * 128) + key * 128 + ((lane % 4 * 2 + i % 2) ^ (key % 8)) * 16;
                store_shared(stage + at, quarter(k[i / 2], i % 2));
                store_shared(stage + BOX + at, quarter(v[i / 2], i % 2));
            }
        }
        for (int key = length - start + lane / 8; key < KEYS; key += 4) {
#pragma unroll
            for (int line = 0; line < LINES; ++line) {
                store_shared(stage + BOX + line * (KEYS * 128) + key * 128 + lane % 8 * 16, make_uint4(0, 0, 0, 0));
            }
        }
        __syncwarp();
    }
};

}  // namespace cluster_attention
