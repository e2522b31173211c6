// One greedy decode step in one launch: see decode_persistent.py for the formula, the phases and the limits.
//
// Every block lives on an SM of its own. Its last warps copy the block's share of all weights, and of the past keys
// and values, into a ring in shared memory, in the order of their use and without regard to what other blocks do; the
// other warps consume the ring and meet the other blocks where the mathematics demands it. A product's units (16 weight
// rows) go to the blocks in turn, each product beginning where the one before ended, so that loads even out.
#include "decode_persistent_attention.cuh"
#include "decode_persistent_producer.cuh"

namespace decode_persistent {

// Activations in shared memory: of 64 values, word 8t + c holds values 8c + 2t and 8c + 2t + 1, so that a thread finds
// its words of eight chunks (the columns that it multiplies) side by side.
__device__ __forceinline__ void place(unsigned* x, int index, const uint4& values) {
    unsigned* group = x + index / 64 * 32 + index / 8 % 8;
    group[0] = values.x;
    group[8] = values.y;
    group[16] = values.z;
    group[24] = values.w;
}

constexpr int SPAN = 8 * CONSUMERS;  // values that the consumers load at once

__device__ __forceinline__ void load_vector(Consumer& c, const bf16* source, int width) {
    unsigned* x = c.shared<unsigned>(c.at.x);
    for (int first = 8 * c.tid; first < width; first += 4 * SPAN) {
        uint4 values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (first + i * SPAN < width) values[i] = __ldcg(reinterpret_cast<const uint4*>(source + first + i * SPAN));
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (first + i * SPAN < width) place(x, first + i * SPAN, values[i]);
    }
    meet();
    c.mark();
}

constexpr int SPANS = MAX_HIDDEN / SPAN;

struct NormWeight {  // on its way to the registers while the block waits for others
    uint4 words[SPANS];
    __device__ __forceinline__ void fetch(const Consumer& c, const bf16* weight) {
#pragma unroll
        for (int i = 0; i < SPANS; ++i) {
            const int index = 8 * c.tid + i * SPAN;
            if (index < c.p.hidden) words[i] = __ldg(reinterpret_cast<const uint4*>(weight + index));
        }
    }
};

__device__ __forceinline__ unsigned normalised(unsigned h, unsigned weight, float inverse) {
    return pack(low(weight) * rounded(low(h) * inverse), high(weight) * rounded(high(h) * inverse));
}

__device__ __forceinline__ float squares(unsigned pair) { return fmaf(low(pair), low(pair), high(pair) * high(pair)); }

// The residual stream into shared memory, as it is and normalised.
__device__ __forceinline__ void load_normalised(Consumer& c, const bf16* source, const NormWeight& weight) {
    float* partial = c.shared<float>(c.at.reduce);
    uint4 h[SPANS];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SPANS; ++i) {
        const int index = 8 * c.tid + i * SPAN;
        if (index < c.p.hidden) h[i] = __ldcg(reinterpret_cast<const uint4*>(source + index));
    }
#pragma unroll
    for (int i = 0; i < SPANS; ++i) {
        const int index = 8 * c.tid + i * SPAN;
        if (index < c.p.hidden) {
            *reinterpret_cast<uint4*>(c.shared<bf16>(c.at.h) + index) = h[i];
            sum += squares(h[i].x) + squares(h[i].y) + squares(h[i].z) + squares(h[i].w);
        }
    }
    sum = warp_sum(sum);
    if (c.lane == 0) partial[c.warp] = sum;
    meet();
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += partial[w];
    const float inverse = rsqrtf(sum / c.p.hidden + c.p.eps);
#pragma unroll
    for (int i = 0; i < SPANS; ++i) {
        const int index = 8 * c.tid + i * SPAN;
        if (index < c.p.hidden) {
            const uint4& w = weight.words[i];
            const uint4 y = make_uint4(
                normalised(h[i].x, w.x, inverse), normalised(h[i].y, w.y, inverse),
                normalised(h[i].z, w.z, inverse), normalised(h[i].w, w.w, inverse));
            place(c.shared<unsigned>(c.at.x), index, y);
        }
    }
    meet();
    c.mark();
}

// A part of a warp's share of one stage: 16 weight rows by 64 columns. All eight columns of the matrix instruction hold the same
// activations, so every thread of a row has the row's sum.
__device__ __forceinline__ void multiply(const Consumer& c, int k, int part, float (&sums)[4][4]) {
    const int column = c.warp * SHARE + part * 64;
    const uint4* x = c.shared<uint4>(c.at.x) + (k + column) / 64 * 8 + c.lane % 4 * 2;
    const uint4 first = x[0], second = x[1];
    const unsigned b[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    const uint32_t row = c.ring.address() + c.lane % 16 * PITCH + 2 * column + c.lane / 16 * 16;
    unsigned a[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[i][0]), "=r"(a[i][1]), "=r"(a[i][2]), "=r"(a[i][3])
                     : "r"(row + i * 32)
                     : "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])
            : "r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]), "r"(b[2 * i]), "r"(b[2 * i + 1]));
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
            for (int k = 0; k < width; k += PIECE) {
                c.ring.wait_full();
                if (k + c.warp * SHARE < width) {
#pragma unroll
                    for (int part = 0; part < SHARE / 64; ++part) multiply(c, k, part, own);
                }
                c.ring.release(c.lane);
            }
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

// A product that is added to the residual stream.
__device__ __forceinline__ void product_into_stream(Consumer& c, int width) {
    product(c, width, c.p.hidden / ROWS, [&](const float* sums, int first, int n) {
        for (int i = c.lane; i < 8 * n; i += 32) {
            const int index = (first + i / 8 * int(gridDim.x)) * 8 + i % 8;
            const float2 y = total(sums, i / 8, i % 8);
            const unsigned h = c.shared<unsigned>(c.at.h)[index];
            reinterpret_cast<unsigned*>(c.p.h)[index] = pack(low(h) + rounded(y.x), high(h) + rounded(y.y));
        }
    });
}

__device__ __forceinline__ float gated(float gate, float up) {
    gate = rounded(gate);
    return rounded(gate / (1.0f + expf(-gate))) * rounded(up);
}

// All of this block is written: tell the others (warp 0 has done the writing, or the warps have met).
__device__ __forceinline__ void tell(Consumer& c) {
    if (c.warp == 0) {
        __syncwarp();
        if (c.lane == 0) arrive(c.p.state);
    }
    c.target += gridDim.x;
}

__device__ __forceinline__ void wait_for_all(Consumer& c) {
    if (c.warp == 0) {
        if (c.lane == 0) wait_until(c.p.state, c.target, c.p.fault);
        __syncwarp();
    }
    meet();
    c.mark();
}

constexpr long long LOWEST = -0x7fffffffffffffffll - 1;
constexpr int ALL_BITS = 0x7fffffff;

// Orders by logit, then by lower index; NaN comes first and the zeros of both signs are equal.
__device__ __forceinline__ long long key_of(float logit, int index) {
    const int bits = logit == 0.0f ? 0 : __float_as_int(logit);
    const int ordered = isnan(logit) ? ALL_BITS : bits ^ ((bits >> 31) & ALL_BITS);
    return ((long long)ordered << 32) | (long long)(index ^ ALL_BITS);
}

__device__ __forceinline__ long long warp_best(long long key) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) key = max(key, __shfl_xor_sync(~0u, key, mask));
    return key;
}

// The layers; the residual stream is complete in `h` once `wait_for_all` returns after this.
__device__ __forceinline__ void run_layers(Consumer& c, const Layer* layers, const bf16* stream) {
    const Arguments& p = c.p;
    const int heads = p.heads * WIDTH;
    NormWeight weight;
    weight.fetch(c, layers[0].input_norm);
    for (int i = 0; i < p.n_layers; ++i) {
        const Layer& layer = layers[i];
        if (i)
            wait_for_all(c);
        else
            c.mark();
        load_normalised(c, stream, weight);
        stream = p.h;
        const unsigned tag = c.target + gridDim.x;  // no other layer of this or another step has it
        product(c, p.hidden, (heads + 2 * p.kv_heads * WIDTH) / ROWS, [&](const float* sums, int first, int n) {
            for (int j = c.lane; j < 8 * n; j += 32) {
                const float2 y = total(sums, j / 8, j % 8);
                put_tagged(p.qkv + (first + j / 8 * int(gridDim.x)) * 8 + j % 8, pack(y.x, y.y), tag);
            }
        });
        weight.fetch(c, layer.post_norm);
        attention(c, layer, i, tag);
        tell(c);
        wait_for_all(c);
        load_vector(c, p.attended, heads);
        product_into_stream(c, heads);
        tell(c);
        wait_for_all(c);
        load_normalised(c, p.h, weight);
        product(c, p.hidden, 2 * p.mlp / ROWS, [&](const float* sums, int first, int n) {
            for (int j = c.lane; j < 4 * n; j += 32) {
                const float2 gate = total(sums, j / 4, j % 4), up = total(sums, j / 4, 4 + j % 4);
                const int index = (first + j / 4 * int(gridDim.x)) * 4 + j % 4;
                reinterpret_cast<unsigned*>(p.activated)[index] = pack(gated(gate.x, up.x), gated(gate.y, up.y));
            }
        });
        tell(c);
        weight.fetch(c, i + 1 < p.n_layers ? layers[i + 1].input_norm : p.norm);
        wait_for_all(c);
        load_vector(c, p.activated, p.mlp);
        product_into_stream(c, p.mlp);
        tell(c);
    }
    if (!p.with_head) return;
    wait_for_all(c);
    load_normalised(c, p.h, weight);
}

// The head, and by the block that finishes last the choice of the token and the step's bookkeeping.
__device__ __forceinline__ void choose(Consumer& c) {
    const Arguments& p = c.p;
    long long best = LOWEST;
    if (p.with_head) {
        product(c, p.hidden, (p.vocabulary + ROWS - 1) / ROWS, [&](const float* sums, int first, int n) {
            for (int j = c.lane; j < 8 * n; j += 32) {
                const int index = (first + j / 8 * int(gridDim.x)) * ROWS + j % 8 * 2;
                const float2 y = total(sums, j / 8, j % 8);
                if (index < p.vocabulary) best = max(best, key_of(rounded(y.x), index));
                if (index + 1 < p.vocabulary) best = max(best, key_of(rounded(y.y), index + 1));
            }
        });
    }
    if (c.warp) return;
    best = warp_best(best);
    bool last = false;
    if (c.lane == 0) {
        p.keys[blockIdx.x] = best;
        last = arrive_last(p.state + DONE, gridDim.x - 1);
    }
    if (!__shfl_sync(~0u, last, 0)) return;
    __syncwarp();
    best = LOWEST;
    for (int i = c.lane; i < int(gridDim.x); i += 32) best = max(best, __ldcg(p.keys + i));
    best = warp_best(best);
    if (c.lane) return;
    p.state[BASE] = c.target;
    if (!p.with_head) return;
    const long long token = (best & ALL_BITS) ^ ALL_BITS;
    *p.token = token;
    *p.row = c.row + 1;
    p.history[c.row + 1] = token;
}

__device__ __forceinline__ void consume_step(const Arguments& p, const Layout& at, char* memory, const Ring& ring) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int tid = threadIdx.x;
    Consumer c{p, at, memory, ring, tid, tid / 32, tid % 32, slots_of(p), live_row(p)};
    c.target = __ldcg(p.state + BASE);
    if (tid < WIDTH / 4) {  // 16 lanes of each 8 values: cos, then sin
        const long long place = c.row + __ldcg(p.delta);
        const int position = int(place < 0 ? 0 : place < p.rope_rows ? place : p.rope_rows - 1);
        const bf16* angles = (tid < 16 ? p.cos : p.sin) + (long long)position * WIDTH;
        c.shared<uint4>(tid < 16 ? at.cos : at.sin)[tid % 16] = reinterpret_cast<const uint4*>(angles)[tid % 16];
    }
    const long long token = __ldcg(p.token);
    const long long known = token < 0 ? 0 : token < p.vocabulary ? token : p.vocabulary - 1;
    run_layers(c, c.shared<Layer>(at.table), p.embed + known * p.hidden);
    choose(c);
}

__global__ void __launch_bounds__(THREADS, 1) step(const __grid_constant__ Arguments p) {
    extern __shared__ __align__(1024) char memory[];
    const Layout at(p);
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const uint32_t base = shared_address(memory);
    const Ring ring{base, base + at.barriers, base + at.barriers + 8 * STAGES, p.fault};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            make_barrier(ring.full + 8 * i, PRODUCERS);
            make_barrier(ring.empty + 8 * i, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    auto* table = reinterpret_cast<uint4*>(memory + at.table);
    for (int i = threadIdx.x; i < p.n_layers * int(sizeof(Layer) / 16); i += THREADS)
        table[i] = __ldg(reinterpret_cast<const uint4*>(p.layers) + i);
    __syncthreads();
    if (threadIdx.x >= CONSUMERS)
        produce_step(p, reinterpret_cast<const Layer*>(memory + at.table), ring);
    else
        consume_step(p, at, memory, ring);
}

}  // namespace decode_persistent

extern "C" int decode_persistent_shared(const decode_persistent::Arguments* p) {
    return decode_persistent::Layout(*p).end;
}

extern "C" int decode_persistent_arguments() { return sizeof(decode_persistent::Arguments); }

// Once for a device, outside of a capture: loads the kernel and raises its limit of shared memory.
extern "C" const char* decode_persistent_prepare() {
    const cudaError_t error = cudaFuncSetAttribute(
        decode_persistent::step, cudaFuncAttributeMaxDynamicSharedMemorySize, decode_persistent::MAX_SHARED);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// `dependent`: start while the kernel before still runs. Else the launch is cooperative: all blocks or none.
extern "C" const char* decode_persistent_launch(
    const decode_persistent::Arguments* p, int blocks, int dependent, void* stream
) {
    cudaLaunchAttribute attribute;
    if (dependent) {
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
    } else {
        attribute.id = cudaLaunchAttributeCooperative;
        attribute.val.cooperative = 1;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(decode_persistent::THREADS);
    config.dynamicSmemBytes = decode_persistent::Layout(*p).end;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = 1;
    const cudaError_t error = cudaLaunchKernelEx(&config, decode_persistent::step, *p);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
