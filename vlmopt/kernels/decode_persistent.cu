// One greedy decode step in one launch: see decode_persistent.py for the formula, the phases and the limits.
//
// Every block lives on an SM of its own. Its last warps copy the block's share of all weights, and of the past keys
// and values, into a ring in shared memory, in the order of their use and without regard to what other blocks do; the
// other warps consume the ring and wait for words of other blocks where the mathematics demands it. A product's
// units (16 weight rows) go to the blocks in turn, each product beginning where the one before ended, so that the loads
// even out.
#include "decode_persistent_attention.cuh"
#include "decode_persistent_producer.cuh"
#include "decode_persistent_product.cuh"

namespace decode_persistent {

// Activations in shared memory: of 64 values, word 8t + c holds values 8c + 2t and 8c + 2t + 1, so that a thread finds
// its words of eight chunks (the columns that it multiplies) side by side. Four values from `index` on:
__device__ __forceinline__ void place(unsigned* x, int index, unsigned first, unsigned second) {
    unsigned* group = x + index / 64 * 32 + index / 8 % 8 + index % 8 * 4;
    group[0] = first;
    group[8] = second;
}

constexpr int SPAN = 4 * CONSUMERS;  // values that the consumers load at once
constexpr int SPANS = MAX_HIDDEN / SPAN;
constexpr int MANY = 6;              // spans whose loads are on their way together

// Spans of a vector of tagged words, as soon as others have written them.
template <int N>
__device__ __forceinline__ void gather(
    const Consumer& c, const unsigned long long* words, int first, int width, unsigned tag, Site site,
    unsigned (&values)[N][2]
) {
    unsigned wanted = 0;
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (first + i * SPAN < width) wanted |= 1u << i;
    get_tagged([=](int i) { return words + first / 2 + i * (SPAN / 2); }, values, wanted, tag, site, c.p.fault);
}

__device__ __forceinline__ void load_vector(Consumer& c, const unsigned long long* words, int width, Site site) {
#pragma unroll 1
    for (int first = 4 * c.tid; first < width; first += MANY * SPAN) {
        unsigned values[MANY][2];
        gather(c, words, first, width, c.tag, site, values);
#pragma unroll
        for (int i = 0; i < MANY; ++i)
            if (first + i * SPAN < width)
                place(c.shared<unsigned>(c.at.x), first + i * SPAN, values[i][0], values[i][1]);
    }
    meet();
}

struct NormWeight {  // on its way to the registers while the block waits for others
    uint2 words[SPANS];
    __device__ __forceinline__ void fetch(const Consumer& c, const bf16* weight) {
#pragma unroll
        for (int i = 0; i < SPANS; ++i) {
            const int index = 4 * c.tid + i * SPAN;
            if (index < c.p.hidden) words[i] = __ldg(reinterpret_cast<const uint2*>(weight + index));
        }
    }
};

// The residual stream into shared memory, as it is and normalised: others' tagged words, or without them `row`.
__device__ __forceinline__ void load_normalised(
    Consumer& c, const unsigned long long* words, unsigned tag, const bf16* row, const NormWeight& weight
) {
    const int width = c.p.hidden, first = 4 * c.tid;
    float* partial = c.shared<float>(c.at.reduce);
    unsigned h[SPANS][2];
    if (words) {
        gather(c, words, first, width, tag, STREAM, h);
    } else {
#pragma unroll
        for (int i = 0; i < SPANS; ++i) {
            if (first + i * SPAN < width) {
                const uint2 pairs = __ldcg(reinterpret_cast<const uint2*>(row + first + i * SPAN));
                h[i][0] = pairs.x;
                h[i][1] = pairs.y;
            }
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SPANS; ++i)
        if (first + i * SPAN < width) sum += squares(h[i][0]) + squares(h[i][1]);
    __syncwarp();
    sum = warp_sum(sum);
    if (c.lane == 0) partial[c.warp] = sum;
    meet();  // after this nobody needs the stream that the shared memory held: warp 0 has finished its last product
    c.mark();
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += partial[w];
    const float inverse = rsqrtf(sum / width + c.p.eps);
#pragma unroll
    for (int i = 0; i < SPANS; ++i) {
        const int index = first + i * SPAN;
        if (index < width) {
            *reinterpret_cast<uint2*>(c.shared<bf16>(c.at.h) + index) = make_uint2(h[i][0], h[i][1]);
            const uint2& w = weight.words[i];
            const unsigned pairs[2] = {normalised(h[i][0], w.x, inverse), normalised(h[i][1], w.y, inverse)};
            place(c.shared<unsigned>(c.at.x), index, pairs[0], pairs[1]);
        }
    }
    meet();
}

// A product that is added to the residual stream.
__device__ __forceinline__ void product_into_stream(Consumer& c, int width, unsigned long long* stream) {
    product(c, width, c.p.hidden / ROWS, [&](const float* sums, int first, int n) {
        for (int i = c.lane; i < 8 * n; i += 32) {
            const int index = (first + i / 8 * int(gridDim.x)) * 8 + i % 8;
            const float2 y = total(sums, i / 8, i % 8);
            const unsigned h = c.shared<unsigned>(c.at.h)[index];
            put_tagged(stream + index, pack(low(h) + rounded(y.x), high(h) + rounded(y.y)), c.tag);
        }
    });
}

__device__ __forceinline__ float gated(float gate, float up) {
    gate = rounded(gate);
    return rounded(gate / (1.0f + expf(-gate))) * rounded(up);
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

// The layers. All words of a layer bear its tag. Nobody overwrites a word that is still to be read: a block waits for
// words only if it has units that need them, and a unit needs all words of the kind before. So whoever writes after_o
// of layer i + 1 has, through attended, qkv and after_down, waited for all units of down of layer i, whose blocks had
// read after_o and activated of layer i, and through activated for all units of gate/up, whose blocks had read after_o
// too; and so on round the circle for each kind. A block without units of a product must not wait for its input: as
// nobody waits for such a block, it could come a layer too late.
__device__ __forceinline__ void run_layers(Consumer& c, const Layer* layers, const bf16* token) {
    const Arguments& p = c.p;
    const int heads = p.heads * WIDTH, stream_units = p.hidden / ROWS;
    const int qkv_units = (heads + 2 * p.kv_heads * WIDTH) / ROWS, gate_up_units = 2 * p.mlp / ROWS;
    NormWeight weight;
    weight.fetch(c, layers[0].input_norm);
    for (int i = 0; i < p.n_layers; ++i) {
        const Layer& layer = layers[i];
        const uint2 norm = head_norm(c, layer);
        if (c.takes(qkv_units) || c.takes(stream_units, qkv_units))  // o's units add to the stream
            load_normalised(c, i ? p.after_down : nullptr, c.tag, token, weight);
        else
            c.mark();
        c.mark();
        ++c.tag;
        product(c, p.hidden, qkv_units, [&](const float* sums, int first, int n) {
            for (int j = c.lane; j < 8 * n; j += 32) {
                const float2 y = total(sums, j / 8, j % 8);
                put_tagged(p.qkv + (first + j / 8 * int(gridDim.x)) * 8 + j % 8, pack(y.x, y.y), c.tag);
            }
        });
        weight.fetch(c, layer.post_norm);
        attention(c, norm, i);
        if (c.takes(stream_units)) load_vector(c, p.attended, heads, ATTENDED);
        c.mark();
        product_into_stream(c, heads, p.after_o);
        if (c.takes(gate_up_units) || c.takes(stream_units, gate_up_units))
            load_normalised(c, p.after_o, c.tag, nullptr, weight);
        else
            c.mark();
        c.mark();
        product(c, p.hidden, gate_up_units, [&](const float* sums, int first, int n) {
            for (int j = c.lane; j < 4 * n; j += 32) {
                const float2 gate = total(sums, j / 4, j % 4), up = total(sums, j / 4, 4 + j % 4);
                const int index = (first + j / 4 * int(gridDim.x)) * 4 + j % 4;
                put_tagged(p.activated + index, pack(gated(gate.x, up.x), gated(gate.y, up.y)), c.tag);
            }
        });
        weight.fetch(c, i + 1 < p.n_layers ? layers[i + 1].input_norm : p.norm);
        if (c.takes(stream_units)) load_vector(c, p.activated, p.mlp, ACTIVATED);
        c.mark();
        product_into_stream(c, p.mlp, p.after_down);
    }
    if (!p.with_head) return;
    if (c.takes((p.vocabulary + ROWS - 1) / ROWS))
        load_normalised(c, p.after_down, c.tag, nullptr, weight);
    else
        c.mark();
    c.mark();
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
    p.state[BASE] = c.tag;
    if (!p.with_head) return;
    const long long token = (best & ALL_BITS) ^ ALL_BITS;
    *p.token = token;
    *p.row = c.row + 1;
    p.history[c.row + 1] = token;
}

__device__ __forceinline__ void consume_step(const Arguments& p, const Layout& at, char* memory, const Ring& ring) {
    wait_for_predecessor();
    const int tid = threadIdx.x;
    Consumer c{p, at, memory, ring, tid, tid / 32, tid % 32, slots_of(p), live_row(p)};
    c.tag = __ldcg(p.state + BASE);
    if (tid < WIDTH / 4) {  // 16 lanes of each 8 values: cos, then sin
        const long long place = c.row + __ldcg(p.delta);
        const int position = int(place < 0 ? 0 : place < p.rope_rows ? place : p.rope_rows - 1);
        const bf16* angles = (tid < 16 ? p.cos : p.sin) + (long long)position * WIDTH;
        c.shared<uint4>(tid < 16 ? at.cos : at.sin)[tid % 16] = reinterpret_cast<const uint4*>(angles)[tid % 16];
    }
    meet();
    const long long token = __ldcg(p.token);
    const long long known = token < 0 ? 0 : token < p.vocabulary ? token : p.vocabulary - 1;
    run_layers(c, c.shared<Layer>(at.table), p.embed + known * p.hidden);
    choose(c);
}

__global__ void __launch_bounds__(THREADS, 1) step(const __grid_constant__ Arguments p) {
    extern __shared__ __align__(1024) char memory[];
    const Layout at(p);
    let_dependents_start();
    const uint32_t base = shared_address(memory);
    const Ring ring{base, base + at.barriers, base + at.barriers + 8 * STAGES, p.fault, unsigned(p.with_head) >> 1};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(ring.full + 8 * i, PRODUCERS);
            barrier_init(ring.empty + 8 * i, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_barriers();
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
