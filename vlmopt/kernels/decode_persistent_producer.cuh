// The last warps of a decode_persistent block: they ask for the weights, keys and values in the order of their use.
#pragma once

#include "decode_persistent_common.cuh"

namespace decode_persistent {

// Asks for one product's weights. `half` is the distance from a gate row to its up row, 0 where the product has none.
__device__ void produce(
    Ring& ring, const bf16* weight, int width, int n_units, int half, int n_rows, int& turn, uint64_t policy
) {
    const int lane = threadIdx.x % 32, blocks = gridDim.x;
    const int own = (threadIdx.x - CONSUMERS) / 32 * OWN + lane % OWN;  // row of the unit that this lane copies
    int unit = int(blockIdx.x) - turn;
    if (unit < 0) unit += blocks;
    turn = (turn + n_units) % blocks;
    for (; unit < n_units; unit += blocks) {
        int row = min(unit * ROWS + own, n_rows - 1);
        if (half) row = unit * (ROWS / 2) + own % 8 + (own & 8 ? half : 0);
        const bf16* source = weight + (long long)row * width;
        for (int k = 0; k < width; k += PIECE) {
            const uint32_t bytes = 2 * min(PIECE, width - k);
            ring.wait_empty();
            ring.wait_for_earlier();
            if (lane == 0) ring.expect(OWN * bytes);
            __syncwarp();
            if (lane < OWN) ring.copy(own * PITCH, source + k, bytes, policy);
            ring.advance();
        }
    }
}

// Asks for the past keys and values of this block's slot.
__device__ void produce_past(Ring& ring, const Arguments& p, int layer, int slots, int row, uint64_t policy) {
    if (blockIdx.x >= unsigned(slots * p.kv_heads)) return;
    const int kv_head = blockIdx.x % p.kv_heads, slot = blockIdx.x / p.kv_heads;
    const bf16* keys = p.cache + layer * p.cache_stride_layer + kv_head * p.cache_stride_head;
    const int own = (threadIdx.x - CONSUMERS) / 32;  // quarter of the chunk that this warp copies
    for (int start = slot * CHUNK; start < row; start += slots * CHUNK) {
        const uint32_t bytes = 2 * WIDTH / PRODUCERS * min(CHUNK, row - start);
#pragma unroll
        for (int kind = 0; kind < 2; ++kind) {
            ring.wait_empty();
            ring.wait_for_earlier();
            if (threadIdx.x % 32 == 0) {
                ring.expect(bytes);
                const bf16* source = keys + kind * p.cache_stride_kv + (long long)start * WIDTH;
                ring.copy(own * bytes, source + own * bytes / 2, bytes, policy);
            }
            __syncwarp();
            ring.advance();
        }
    }
}

__device__ __forceinline__ int slots_of(const Arguments& p) { return min(int(gridDim.x) / p.kv_heads, MAX_SLOTS); }

__device__ __forceinline__ int live_row(const Arguments& p) {
    const long long row = __ldcg(p.row);
    return int(row < 0 ? 0 : row < p.capacity ? row : p.capacity - 1);
}

__device__ void produce_step(const Arguments& p, const Layer* layers, Ring ring) {
    uint64_t once, again;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(again));
    const int slots = slots_of(p), hidden = p.hidden, heads = p.heads * WIDTH;
    int turn = 0, row = 0;
    for (int i = 0; i < p.n_layers; ++i) {
        const Layer& layer = layers[i];
        const int qkv_rows = heads + 2 * p.kv_heads * WIDTH;
        produce(ring, layer.qkv, hidden, qkv_rows / ROWS, 0, qkv_rows, turn, once);
        if (i == 0) {  // only the weights may be read while the kernel before this one still runs
            wait_for_predecessor();
            asm volatile("fence.proxy.async;" ::: "memory");
            row = live_row(p);
        }
        produce_past(ring, p, i, slots, row, again);
        produce(ring, layer.o, heads, hidden / ROWS, 0, hidden, turn, once);
        produce(ring, layer.gate_up, hidden, p.mlp * 2 / ROWS, p.mlp, 2 * p.mlp, turn, once);
        produce(ring, layer.down, p.mlp, hidden / ROWS, 0, hidden, turn, once);
    }
    if (p.with_head) {
        produce(ring, p.head, hidden, (p.vocabulary + ROWS - 1) / ROWS, 0, p.vocabulary, turn, once);
    }
}

}  // namespace decode_persistent
