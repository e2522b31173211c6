// Hopper's own instructions as functions: transaction barriers, the tensor copy engine, dependent launches, and one
// step of a matrix product.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace hopper {

// createpolicy's encoding of "first to be evicted": for what is read once.
constexpr uint64_t EVICT_FIRST = 0x12F0000000000000;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same value, computed here and now: not later where it is used, nor anew for every use.
__device__ __forceinline__ uint32_t kept(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

template <typename T>
__device__ __forceinline__ T* kept(T* pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
}

// One lane of a whole warp, the same whenever it is asked.
__device__ __forceinline__ bool elected() {
    uint32_t yes;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(yes));
    return yes != 0;
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Barriers that this thread has initialised may be used by the copy engine after this.
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool barrier_passed(uint32_t barrier, uint32_t parity) {
    uint32_t passed;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(passed)
        : "r"(barrier), "r"(parity)
        : "memory");
    return passed != 0;
}

// Until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    while (!barrier_passed(barrier, parity)) {
    }
}

// The box of a three-dimensional tensor map at these coordinates (innermost first) to shared memory, counted on the
// barrier in whole boxes; what lies outside the tensor arrives as zeros.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int c0, int c1, int c2,
                                         uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "l"(EVICT_FIRST)
        : "memory");
}

// Until every launch that this one depends on is over and what it wrote can be seen.
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Once every block has said so, the next launch of the stream may start.
__device__ __forceinline__ void let_dependents_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

// BYTES (4, 8 or 16) into shared memory, zeros where there are none; they are there after `copies_done` of this thread.
template <int BYTES>
__device__ __forceinline__ void copy_ahead(uint32_t to, const void* from, bool exist) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(exist ? BYTES : 0)
                 : "memory");
}

__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// What no kernel in flight writes, asked for here and now.
__device__ __forceinline__ uint4 load_constant(const void* from) {
    uint4 value;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}

// `value`, but not before the loads are over whose results went into `read`; `nothing` is 0, which the compiler must
// not know. For an arrival that gives shared memory back to the copy engine: it does not wait for loads by itself, and
// overtakes those that stand behind other warps' global loads, which then read what is copied there next.
__device__ __forceinline__ uint32_t after(uint32_t value, uint32_t read, uint32_t nothing) {
    return value + (read & nothing);
}

// Threads of some warps of a block wait for each other.
__device__ __forceinline__ void meet(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// d += a · b of m16n8k16, with PTX's fragments: a0, a1 are rows g and g + 8 of the lower eight columns, a2, a3 of the
// upper ones, b0, b1 the lower and the upper eight rows; g is lane / 4.
template <typename T>
__device__ __forceinline__ void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}

__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }

template <typename T>
__device__ __forceinline__ T narrow(float value) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return __float2bfloat16_rn(value);
    } else {
        return __float2half_rn(value);
    }
}

template <typename T>
__device__ __forceinline__ float rounded(float value) {
    return widen(narrow<T>(value));
}

// The sum over a warp's lanes, in each of them and always in the same order.
__device__ __forceinline__ float warp_total(float value) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
    return value;
}

// Two neighbouring values in one register.
template <typename T>
__device__ __forceinline__ float2 widen_two(uint32_t two) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(two));
    } else {
        return __half22float2(reinterpret_cast<const __half2&>(two));
    }
}

// round(two * by) * weight, rounded.
template <typename T>
__device__ __forceinline__ uint32_t scaled_two(uint32_t two, float by, uint32_t weight) {
    const float2 wide = widen_two<T>(two);
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const auto product = __hmul2(__floats2bfloat162_rn(wide.x * by, wide.y * by),
                                     reinterpret_cast<const __nv_bfloat162&>(weight));
        return reinterpret_cast<const uint32_t&>(product);
    } else {
        const auto product = __hmul2(__floats2half2_rn(wide.x * by, wide.y * by),
                                     reinterpret_cast<const __half2&>(weight));
        return reinterpret_cast<const uint32_t&>(product);
    }
}

template <typename T>
__device__ __forceinline__ uint4 scaled(uint4 values, float by, uint4 weight) {
    return make_uint4(scaled_two<T>(values.x, by, weight.x), scaled_two<T>(values.y, by, weight.y),
                      scaled_two<T>(values.z, by, weight.z), scaled_two<T>(values.w, by, weight.w));
}

// `sum` and the squares of eight values.
template <typename T>
__device__ __forceinline__ float with_squares(float sum, uint4 values) {
    for (const uint32_t two : {values.x, values.y, values.z, values.w}) {
        const float2 wide = widen_two<T>(two);
        sum = fmaf(wide.y, wide.y, fmaf(wide.x, wide.x, sum));
    }
    return sum;
}

// The driver's function that describes a tensor to the copy engine, or null.
inline auto tensor_map_encoder() {
    static const auto found = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult result;
        const auto error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
        return error == cudaSuccess && result == cudaDriverEntryPointSuccess
                   ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)
                   : nullptr;
    }();
    return found;
}

}  // namespace hopper
