// What decode_attention_cluster.cu needs of Hopper beyond hopper.cuh: boxes of a cache, messages inside a cluster,
// fragments; and the norm and rotation of one head.
#pragma once

#include "hopper.cuh"

namespace cluster_attention {

using namespace hopper;

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Some keys of one head, from `key` on, to shared memory, counted on the barrier in whole boxes; keys beyond the cache
// arrive as zeros.
__device__ __forceinline__ void copy_keys(uint32_t to, const CUtensorMap& map, int key, int head, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %2, %4}], [%5], %6;" ::"r"(to),
        "l"(&map), "r"(0), "r"(key), "r"(head), "r"(barrier), "l"(EVICT_FIRST)
        : "memory");
}

// Ask for them to be brought into the L2 cache; waits for nothing.
__device__ __forceinline__ void call_keys_into_l2(const CUtensorMap& map, int key, int head) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %1, %3}];" ::"l"(&map), "r"(0),
                 "r"(key), "r"(head)
                 : "memory");
}

// A barrier that other blocks of the cluster may signal once they have passed `join_cluster`.
__device__ __forceinline__ void fence_cluster_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Every thread of the cluster says that it has begun; `join_cluster` waits until all have.
__device__ __forceinline__ void announce_to_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void join_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Where block `rank` of the cluster has what this block has at `address`.
__device__ __forceinline__ uint32_t there(uint32_t address, int rank) {
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

// Values into another block's memory, counted on its barrier in bytes.
__device__ __forceinline__ void send(uint32_t to, float x, float y, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "f"(x), "f"(y), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void send(uint32_t to, const float4& x, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ bool barrier_passed_in_cluster(uint32_t barrier, uint32_t parity) {
    uint32_t passed;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(passed)
        : "r"(barrier), "r"(parity)
        : "memory");
    return passed != 0;
}

__device__ __forceinline__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Until the phase of this parity is over; ends the launch with an error after two seconds.
template <bool CLUSTER = false>
__device__ __forceinline__ void wait_or_trap(uint32_t barrier, uint32_t parity) {
    const auto passed = [&] {
        return CLUSTER ? barrier_passed_in_cluster(barrier, parity) : barrier_passed(barrier, parity);
    };
    if (passed()) return;
    const unsigned long long begin = nanoseconds();
    while (!passed()) {
        if (nanoseconds() - begin > 2'000'000'000) __trap();
    }
}

// Four 8 × 8 matrices, transposed; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_transposed(uint32_t (&m)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ uint32_t transposed(uint32_t matrix) {
    uint32_t result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
    return result;
}

__device__ __forceinline__ float exp2_of(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

template <typename T>
using Pair = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __nv_bfloat162, __half2>;

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t word;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    }
    return word;
}

template <typename T>
__device__ __forceinline__ Pair<T> as_pair(uint32_t word) {
    return reinterpret_cast<const Pair<T>&>(word);
}

__device__ __forceinline__ uint32_t as_word(__nv_bfloat162 pair) { return reinterpret_cast<const uint32_t&>(pair); }
__device__ __forceinline__ uint32_t as_word(__half2 pair) { return reinterpret_cast<const uint32_t&>(pair); }

// Whether one of a word's two values is NaN or infinite.
template <typename T>
__device__ __forceinline__ bool is_wild(uint32_t word) {
    constexpr uint32_t high = std::is_same_v<T, __nv_bfloat16> ? 0x7f800000 : 0x7c000000, low = high >> 16;
    return (word & high) == high || (word & low) == low;
}

// The 16 values from 16·(lane % 4) on of each line of 64 that a lane holds of a head.
template <int LINES>
using Head = uint32_t[LINES][8];

template <int LINES>
__device__ __forceinline__ void load_head(Head<LINES>& x, const void* from, bool wanted = true) {
#pragma unroll
    for (int i = 0; i < 2 * LINES; ++i) {
        uint4 part = make_uint4(0, 0, 0, 0);
        if (wanted) part = __ldcg(static_cast<const uint4*>(from) + i / 2 * 8 + i % 2);
        uint32_t* words = &x[i / 2][i % 2 * 4];
        words[0] = part.x, words[1] = part.y, words[2] = part.z, words[3] = part.w;
    }
}

__device__ __forceinline__ uint4 quarter(const uint32_t (&line)[8], int chunk) {
    return make_uint4(line[4 * chunk], line[4 * chunk + 1], line[4 * chunk + 2], line[4 * chunk + 3]);
}

template <int LINES>
__device__ __forceinline__ void store_head(const Head<LINES>& x, void* to) {
#pragma unroll
    for (int i = 0; i < 2 * LINES; ++i) static_cast<uint4*>(to)[i / 2 * 8 + i % 2] = quarter(x[i / 2], i % 2);
}

// Which of the roundings that Triton's compilers have made of qkv_norm_rope_cache's one source is followed.
struct Rounding {
    int tree;   // the squares of eight neighbours are summed as a tree (Triton 3.8), not one after the other (3.6)
    int fused;  // the first product of a rotation goes into the sum unrounded
};

// RMSNorm and rotation of one head of 128, which four neighbouring lanes hold; all 32 lanes take part. The order of the
// sum is that of the eight lanes that hold a head in qkv_norm_rope_cache's kernel: lane t here is 2t and 2t + 1 there.
template <typename T>
__device__ __forceinline__ void norm_and_rotate(Head<2>& x, const Head<2>& weight, const Head<2>& cos,
                                                const Head<2>& sin, float eps, Rounding rounding) {
    float sums[2];
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
        float e[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const auto a = as_pair<T>(x[0][4 * chunk + i / 2]), b = as_pair<T>(x[1][4 * chunk + i / 2]);
            const float one = widen(i % 2 ? a.y : a.x), other = widen(i % 2 ? b.y : b.x);
            e[i] = __fmaf_rn(one, one, __fmul_rn(other, other));
        }
        const float pairs[4] = {__fadd_rn(e[0], e[1]), __fadd_rn(e[2], e[3]), __fadd_rn(e[4], e[5]),
                                __fadd_rn(e[6], e[7])};
        const float tree = __fadd_rn(__fadd_rn(pairs[0], pairs[1]), __fadd_rn(pairs[2], pairs[3]));
        float chain = pairs[0];
#pragma unroll
        for (int i = 2; i < 8; ++i) chain = __fadd_rn(chain, e[i]);
        sums[chunk] = rounding.tree ? tree : chain;
    }
#pragma unroll
    for (int distance = 2; distance; distance /= 2) {
#pragma unroll
        for (float& sum : sums) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
    }
    float inverse;
    asm("rsqrt.approx.ftz.f32 %0, %1;"
        : "=f"(inverse)
        : "f"(__fadd_rn(__fmul_rn(__fadd_rn(sums[0], sums[1]), 1.0f / 128), eps)));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        Pair<T> n[2];
#pragma unroll
        for (int line = 0; line < 2; ++line) {
            const auto value = as_pair<T>(x[line][i]);
            const uint32_t scaled = pack<T>(__fmul_rn(widen(value.x), inverse), __fmul_rn(widen(value.y), inverse));
            n[line] = __hmul2_rn(as_pair<T>(weight[line][i]), as_pair<T>(scaled));
        }
        const auto cos_a = as_pair<T>(cos[0][i]), cos_b = as_pair<T>(cos[1][i]);
        const auto second_a = __hneg2(__hmul2_rn(n[1], as_pair<T>(sin[0][i])));
        const auto second_b = __hmul2_rn(n[0], as_pair<T>(sin[1][i]));
        if (rounding.fused) {
            x[0][i] = as_word(__hfma2(n[0], cos_a, second_a));
            x[1][i] = as_word(__hfma2(n[1], cos_b, second_b));
        } else {
            x[0][i] = as_word(__hadd2_rn(__hmul2_rn(n[0], cos_a), second_a));
            x[1][i] = as_word(__hadd2_rn(__hmul2_rn(n[1], cos_b), second_b));
        }
    }
}

}  // namespace cluster_attention
