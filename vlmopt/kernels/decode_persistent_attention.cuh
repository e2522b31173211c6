// The attention of decode_persistent: one block a slot, several slots a KV head, past keys and values from the ring.
#pragma once

#include "decode_persistent_common.cuh"

namespace decode_persistent {

// RMSNorm and rotation of one head by a warp: a lane's four dimensions; lane l ^ 16 has those of the other half.
__device__ __forceinline__ uint2 norm_and_rotate(const Consumer& c, const unsigned (&x)[2], const uint2& weight) {
    const uint2 cosines = c.shared<uint2>(c.at.cos)[c.lane], sines = c.shared<uint2>(c.at.sin)[c.lane];
    const float inverse = rsqrtf(warp_sum(squares(x[0]) + squares(x[1])) / WIDTH + c.p.head_eps);
    const float sign = c.lane < 16 ? -1.0f : 1.0f;
    auto turned = [&](unsigned own, unsigned cosine, unsigned sine) {
        const unsigned other = __shfl_xor_sync(~0u, own, 16);
        return pack(
            rounded(low(own) * low(cosine)) + sign * rounded(low(other) * low(sine)),
            rounded(high(own) * high(cosine)) + sign * rounded(high(other) * high(sine)));
    };
    const unsigned first = turned(normalised(x[0], weight.x, inverse), cosines.x, sines.x);
    return make_uint2(first, turned(normalised(x[1], weight.y, inverse), cosines.y, sines.y));
}

// The running softmax of a warp over its keys. `top` and `total` belong to the head of bit 3 of the lane, `total` to
// the lane's own keys alone; `sums` holds four dimensions of both heads.
struct Softmax {
    float top = -INFINITY, total = 0.0f;
    float sums[GROUP][4] = {};
};

__device__ __forceinline__ float dot(const uint4& k, const float (&q)[8]) {
    float s = low(k.x) * q[0];
    s = fmaf(high(k.x), q[1], s);
    s = fmaf(low(k.y), q[2], s);
    s = fmaf(high(k.y), q[3], s);
    float t = low(k.z) * q[4];
    t = fmaf(high(k.z), q[5], t);
    t = fmaf(low(k.w), q[6], t);
    t = fmaf(high(k.w), q[7], t);
    return s + t;
}

// Up to eight keys, of which `valid` (at least one) count. A lane gets the weight of key
// 2 * (bit 2, bit 1) + bit 4 for the head of bit 3, and the warp's sums are brought to the new largest score.
__device__ __forceinline__ float weigh(
    Softmax& soft, const char* keys, int valid, const float (&q)[GROUP][8], float scale, int lane
) {
    const int part = lane % 16, odd = lane / 16;
    float s[4][GROUP];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int key = min(2 * i + odd, valid - 1);
        const uint4 k = *reinterpret_cast<const uint4*>(keys + key * (2 * WIDTH) + part * 16);
        s[i][0] = dot(k, q[0]);
        s[i][1] = dot(k, q[1]);
    }
    const bool b3 = lane & 8, b2 = lane & 4, b1 = lane & 2;
    float v[4], u[2];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        v[i] = (b3 ? s[i][1] : s[i][0]) + __shfl_xor_sync(~0u, b3 ? s[i][0] : s[i][1], 8);
#pragma unroll
    for (int i = 0; i < 2; ++i) u[i] = (b2 ? v[2 + i] : v[i]) + __shfl_xor_sync(~0u, b2 ? v[i] : v[2 + i], 4);
    float score = (b1 ? u[1] : u[0]) + __shfl_xor_sync(~0u, b1 ? u[0] : u[1], 2);
    score += __shfl_xor_sync(~0u, score, 1);
    const int key = (b2 ? 4 : 0) + (b1 ? 2 : 0) + odd;
    score = key < valid ? score * scale : -INFINITY;

    float top = fmaxf(soft.top, score);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
    const float weight = exp2f(score - top), earlier = exp2f(soft.top - top);
    soft.top = top;
    soft.total = soft.total * earlier + weight;
#pragma unroll
    for (int head = 0; head < GROUP; ++head) {
        const float factor = __shfl_sync(~0u, earlier, 8 * head);
#pragma unroll
        for (int d = 0; d < 4; ++d) soft.sums[head][d] *= factor;
    }
    return weight;
}

__device__ __forceinline__ void add_values(Softmax& soft, const char* values, int valid, float weight, int lane) {
#pragma unroll
    for (int key = 0; key < 8; ++key) {
        const int owner = (key & 1) * 16 + (key >> 2) * 4 + ((key >> 1) & 1) * 2;
        const float w0 = __shfl_sync(~0u, weight, owner), w1 = __shfl_sync(~0u, weight, owner + 8);
        const uint2 v = *reinterpret_cast<const uint2*>(values + min(key, valid - 1) * (2 * WIDTH) + lane * 8);
        const float x[4] = {low(v.x), high(v.x), low(v.y), high(v.y)};
#pragma unroll
        for (int d = 0; d < 4; ++d) {
            soft.sums[0][d] = fmaf(w0, x[d], soft.sums[0][d]);
            soft.sums[1][d] = fmaf(w1, x[d], soft.sums[1][d]);
        }
    }
}

// The weight of the norm that this warp applies in `prepare_heads`, asked for early.
__device__ __forceinline__ uint2 head_norm(const Consumer& c, const Layer& layer) {
    return __ldg(reinterpret_cast<const uint2*>(c.warp < GROUP ? layer.q_norm : layer.k_norm) + c.lane);
}

// q (and for the newest key's owner k and v) of one KV head: normalised, rotated, into shared memory and the cache.
__device__ __forceinline__ void prepare_heads(
    const Consumer& c, const uint2& norm, bf16* cache, int kv_head, bool owner
) {
    const Arguments& p = c.p;
    const int role = c.warp < GROUP ? 0 : c.warp - GROUP + 1;  // q, k, v
    if (role == 0 || (owner && role < 3)) {
        const int head = role == 0 ? kv_head * GROUP + c.warp : p.heads + (role == 1 ? 0 : p.kv_heads) + kv_head;
        unsigned x[1][2];
        const unsigned long long* words = p.qkv + head * (WIDTH / 2) + 2 * c.lane;
        get_tagged([=](int) { return words; }, x, 1, c.tag, QKV, p.fault);
        __syncwarp();
        const uint2 y = role < 2 ? norm_and_rotate(c, x[0], norm) : make_uint2(x[0][0], x[0][1]);
        if (role == 0) {
            c.shared<uint2>(c.at.q)[c.warp * (WIDTH / 4) + c.lane] = y;
        } else {
            c.shared<uint2>(role == 1 ? c.at.k : c.at.v)[c.lane] = y;
            bf16* heads = cache + (role == 1 ? 0 : p.cache_stride_kv) + kv_head * p.cache_stride_head;
            reinterpret_cast<uint2*>(heads + (long long)c.row * WIDTH)[c.lane] = y;
        }
    }
    meet();
}

// The chunks of one slot: unnormalised sums and statistics of both heads, tagged, to global memory.
__device__ __forceinline__ void attend(Consumer& c, int kv_head, int slot, bool owner) {
    const Arguments& p = c.p;
    float q[GROUP][8];
#pragma unroll
    for (int head = 0; head < GROUP; ++head) {
        const uint4 words = c.shared<uint4>(c.at.q)[head * 16 + c.lane % 16];
        const unsigned pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            q[head][2 * i] = low(pairs[i]);
            q[head][2 * i + 1] = high(pairs[i]);
        }
    }
    Softmax soft;
    const int first = c.warp * (CHUNK / WARPS);
    for (int start = slot * CHUNK; start < c.row; start += c.slots * CHUNK) {
        const int valid = min(c.row - start - first, CHUNK / WARPS);
        const char* stage;
        float weight = 0.0f;
        c.ring.wait_full();
        stage = c.memory + c.ring.stage * STAGE_BYTES + first * (2 * WIDTH);
        if (valid > 0) weight = weigh(soft, stage, valid, q, p.scale, c.lane);
        c.ring.release(c.lane, __float_as_uint(weight));
        c.ring.wait_full();
        stage = c.memory + c.ring.stage * STAGE_BYTES + first * (2 * WIDTH);
        if (valid > 0) add_values(soft, stage, valid, weight, c.lane);
        c.ring.release(c.lane, __float_as_uint(soft.sums[1][3]));
    }
    if (owner && c.warp == WARPS - 1) {
        const float weight = weigh(soft, c.shared<char>(c.at.k), 1, q, p.scale, c.lane);
        add_values(soft, c.shared<char>(c.at.v), 1, weight, c.lane);
    }

    float* sums = c.shared<float>(c.at.scratch);
    float* tops = sums + WARPS * GROUP * WIDTH;
    float* totals = tops + WARPS * GROUP;
#pragma unroll
    for (int head = 0; head < GROUP; ++head)
        *reinterpret_cast<float4*>(sums + (c.warp * GROUP + head) * WIDTH + 4 * c.lane) =
            make_float4(soft.sums[head][0], soft.sums[head][1], soft.sums[head][2], soft.sums[head][3]);
    float total = soft.total;
    total += __shfl_xor_sync(~0u, total, 2);
    total += __shfl_xor_sync(~0u, total, 4);
    total += __shfl_xor_sync(~0u, total, 16);
    if (c.lane % 8 == 0 && c.lane < 16) {
        tops[c.warp * GROUP + c.lane / 8] = soft.top;
        totals[c.warp * GROUP + c.lane / 8] = total;
    }
    meet();
    const int head = c.tid / WIDTH;  // a thread for every dimension of both heads
    float top = -INFINITY;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, tops[w * GROUP + head]);
    float sum = 0.0f;
    total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const float factor = exp2f(tops[w * GROUP + head] - top);
        sum = fmaf(factor, sums[w * GROUP * WIDTH + c.tid], sum);
        total = fmaf(factor, totals[w * GROUP + head], total);
    }
    const long long place = (long long)kv_head * c.slots + slot;
    put_tagged(p.sums + place * (GROUP * WIDTH) + c.tid, __float_as_uint(sum), c.tag);
    if (c.tid % WIDTH == 0) {
        put_tagged(p.stats + (place * GROUP + head) * 2, __float_as_uint(top), c.tag);
        put_tagged(p.stats + (place * GROUP + head) * 2 + 1, __float_as_uint(total), c.tag);
    }
}

// This slot's share of the KV head's outputs, from all live slots in order: a lane each. Two outputs go into a word.
__device__ __forceinline__ void combine(const Consumer& c, int kv_head, int slot, int live) {
    const Arguments& p = c.p;
    constexpr int PAIRS = GROUP * WIDTH / 2;
    const int share = (PAIRS + c.slots - 1) / c.slots, end = min((slot + 1) * share, PAIRS);
    for (int pair = slot * share + c.warp; pair < end; pair += WARPS) {
        unsigned x[2][2] = {};
        if (c.lane < live) {
            const long long place = (long long)kv_head * c.slots + c.lane;
            const unsigned long long* sums = p.sums + place * (GROUP * WIDTH) + 2 * pair;
            const unsigned long long* stats = p.stats + (place * GROUP + pair / (WIDTH / 2)) * 2;
            get_tagged([=](int i) { return i ? stats : sums; }, x, 3, c.tag, SUMS_OF_SLOTS, p.fault);
        }
        __syncwarp();
        const float own = c.lane < live ? __uint_as_float(x[1][0]) : -INFINITY;
        const float factor = exp2f(own - warp_max(own));
        const float total = warp_sum(factor * __uint_as_float(x[1][1]));
        const float first = warp_sum(factor * __uint_as_float(x[0][0]));
        const float second = warp_sum(factor * __uint_as_float(x[0][1]));
        if (c.lane == 0) put_tagged(p.attended + kv_head * PAIRS + pair, pack(first / total, second / total), c.tag);
    }
}

__device__ __forceinline__ void attention(Consumer& c, const uint2& norm, int index) {
    const Arguments& p = c.p;
    const int kv_head = blockIdx.x % p.kv_heads, slot = blockIdx.x / p.kv_heads;
    const int newest = c.row / CHUNK, live = min(c.slots, newest + 1);
    const bool owner = newest % c.slots == slot;
    if (slot < live) prepare_heads(c, norm, p.cache + index * p.cache_stride_layer, kv_head, owner);
    c.mark();
    if (slot < live) attend(c, kv_head, slot, owner);
    c.mark();
    if (slot < c.slots) combine(c, kv_head, slot, live);
    c.mark();
}

}  // namespace decode_persistent
