// The matrix products of decode_persistent: units of 16 weight rows from the ring times activations in shared memory.
#pragma once

#include "decode_persistent_common.cuh"

namespace decode_persistent {

constexpr int PARTS = SHARE / 64;
constexpr int TOGETHER = 2;  // stages that a warp reads before it multiplies, so that their latencies overlap

// A part of a warp's share of one stage: 16 weight rows by 64 columns. All eight columns of the matrix instruction hold
// the same activations, so every thread of a row has the row's sum.
struct Fragment {
    unsigned a[4][4], b[8];

    __device__ __forceinline__ void read(const Consumer& c, uint32_t stage, int k, int part) {
        const int column = c.warp * SHARE + part * 64;
        const uint4* x = c.shared<uint4>(c.at.x) + (k + column) / 64 * 8 + c.lane % 4 * 2;
        const uint4 first = x[0], second = x[1];
        b[0] = first.x, b[1] = first.y, b[2] = first.z, b[3] = first.w;
        b[4] = second.x, b[5] = second.y, b[6] = second.z, b[7] = second.w;
        const uint32_t row = stage + c.lane % 16 * PITCH + 2 * column + c.lane / 16 * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(a[i][0]), "=r"(a[i][1]), "=r"(a[i][2]), "=r"(a[i][3])
                         : "r"(row + i * 32)
                         : "memory");
    }
    __device__ __forceinline__ void multiply(float (&sums)[4][4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            hopper::multiply<bf16>(sums[i], a[i][0], a[i][1], a[i][2], a[i][3], b[2 * i], b[2 * i + 1]);
    }
};

// `TOGETHER` stages, or those that are left of the width from column `k` on.
__device__ __forceinline__ void multiply(Consumer& c, int k, int width, float (&sums)[4][4]) {
    Fragment fragments[TOGETHER][PARTS];
    Ring ahead = c.ring;
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
        const int column = k + i * PIECE;
        if (column >= width) break;
        ahead.wait_full();
        if (column + c.warp * SHARE < width) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) fragments[i][part].read(c, ahead.address(), column, part);
        }
        ahead.advance();
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
        const int column = k + i * PIECE;
        if (column >= width) break;
        uint32_t read = 0;
        if (column + c.warp * SHARE < width) {
            read = fragments[i][PARTS - 1].a[3][3];
#pragma unroll
            for (int part = 0; part < PARTS; ++part) fragments[i][part].multiply(sums);
        }
        c.ring.release(c.lane, read);
    }
}

// Rows 2 * pair and 2 * pair + 1 of a batch's unit, summed over the warps in order.
__device__ __forceinline__ float2 total(const float* sums, int unit, int pair) {
    float2 y = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const float2 part = *reinterpret_cast<const float2*>(sums + (unit * WARPS + w) * ROWS + 2 * pair);
        y.x += part.x;
        y.y += part.y;
    }
    return y;
}

// One product: `finish(sums, first, n)` is called in warp 0 for the `n` units first, first + blocks, ... of a batch.
template <class Finish>
__device__ __forceinline__ void product(Consumer& c, int width, int n_units, Finish finish) {
    const int blocks = gridDim.x;
    int unit = int(blockIdx.x) - c.turn;
    if (unit < 0) unit += blocks;
    c.turn = (c.turn + n_units) % blocks;
    while (unit < n_units) {
        float* sums = c.shared<float>(c.at.scratch) + c.buffer * SUMS;
        const int first = unit;
        int n = 0;
        for (; n < BATCH && unit < n_units; ++n, unit += blocks) {
            float own[4][4] = {};
            for (int k = 0; k < width; k += TOGETHER * PIECE) multiply(c, k, width, own);
            if (c.lane % 4 == 0) {
                float* row = sums + (n * WARPS + c.warp) * ROWS + c.lane / 4;
                row[0] = (own[0][0] + own[1][0]) + (own[2][0] + own[3][0]);
                row[8] = (own[0][2] + own[1][2]) + (own[2][2] + own[3][2]);
            }
        }
        meet();
        if (c.warp == 0) finish(sums, first, n);
        c.buffer ^= 1;
    }
    c.mark();
}

}  // namespace decode_persistent
