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

// Two values of 16 bits in a word: the lower and the upper one, and operations on both, each rounded once.
template <typename T>
__device__ __forceinline__ float lower(uint32_t two) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return __uint_as_float(two << 16);
    return __low2float(reinterpret_cast<const __half2&>(two));
}

template <typename T>
__device__ __forceinline__ float upper(uint32_t two) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return __uint_as_float(two & 0xffff0000);
    return __high2float(reinterpret_cast<const __half2&>(two));
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t two;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    }
    return two;
}

template <typename T>
__device__ __forceinline__ uint32_t product(uint32_t x, uint32_t y) {
    uint32_t two;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(two) : "r"(x), "r"(y));
    } else {
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(two) : "r"(x), "r"(y));
    }
    return two;
}

template <typename T>
__device__ __forceinline__ uint32_t product_and_sum(uint32_t x, uint32_t y, uint32_t z) {
    uint32_t two;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(two) : "r"(x), "r"(y), "r"(z));
    } else {
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(two) : "r"(x), "r"(y), "r"(z));
    }
    return two;
}

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
__device__ __forceinline__ void load_head(Head<LINES>& x, const void* from) {
#pragma unroll
    for (int i = 0; i < 2 * LINES; ++i) {
        const uint4 part = __ldcg(static_cast<const uint4*>(from) + i / 2 * 8 + i % 2);
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

// Whether the first product of a sum of two goes into it unrounded. The source of qkv_norm_rope_cache's kernel rounds
// both products of a rotation, but Triton's compilers (3.6 and 3.8) make one fused multiply-add of product and sum.
constexpr bool FUSED = true;

__device__ __forceinline__ float sum_of_squares(float a, float b) {
    return FUSED ? __fmaf_rn(a, a, __fmul_rn(b, b)) : __fadd_rn(__fmul_rn(a, a), __fmul_rn(b, b));
}

template <typename T>
__device__ __forceinline__ uint32_t sum_of_products(uint32_t a, uint32_t x, uint32_t of_others) {
    constexpr uint32_t one = std::is_same_v<T, __nv_bfloat16> ? 0x3f803f80 : 0x3c003c00;
    return FUSED ? product_and_sum<T>(a, x, of_others) : product_and_sum<T>(product<T>(a, x), one, of_others);
}

// RMSNorm and rotation of one head of 128, which four neighbouring lanes hold; all 32 lanes take part. The order of the
// sum is that of the eight lanes that hold a head in qkv_norm_rope_cache's kernel: lane t here is 2t and 2t + 1 there.
// Triton 3.8 adds a lane's eight squares as a `tree`, 3.6 one after the other.
template <typename T>
__device__ __forceinline__ void norm_and_rotate(Head<2>& x, const Head<2>& weight, const Head<2>& cos,
                                                const Head<2>& sin, float eps, bool tree) {
    float sums[2];
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
        float e[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t a = x[0][4 * chunk + i], b = x[1][4 * chunk + i];
            e[2 * i] = sum_of_squares(lower<T>(a), lower<T>(b));
            e[2 * i + 1] = sum_of_squares(upper<T>(a), upper<T>(b));
        }
        const float two = __fadd_rn(e[0], e[1]), four = __fadd_rn(two, __fadd_rn(e[2], e[3]));
        float chain = two;
#pragma unroll
        for (int i = 2; i < 8; ++i) chain = __fadd_rn(chain, e[i]);
        sums[chunk] = tree ? __fadd_rn(four, __fadd_rn(__fadd_rn(e[4], e[5]), __fadd_rn(e[6], e[7]))) : chain;
    }
#pragma unroll
    for (int distance = 2; distance; distance /= 2) {
#pragma unroll
        for (float& sum : sums) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
    }
    float inverse;
    const float mean = __fmul_rn(__fadd_rn(sums[0], sums[1]), 1.0f / 128);
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__fadd_rn(mean, eps)));
    const auto normalised = [&](uint32_t two, uint32_t by) {
        return product<T>(by, pack<T>(__fmul_rn(lower<T>(two), inverse), __fmul_rn(upper<T>(two), inverse)));
    };
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint32_t a = normalised(x[0][i], weight[0][i]), b = normalised(x[1][i], weight[1][i]);
        x[0][i] = sum_of_products<T>(a, cos[0][i], product<T>(b, sin[0][i]) ^ 0x80008000);
        x[1][i] = sum_of_products<T>(b, cos[1][i], product<T>(a, sin[1][i]));
    }
}

}  // namespace cluster_attention
