// What the forms of the ring share (gemv_ring.cu over plain weights, gemv_ring_copies.cu over quantised ones): one warp
// streams a block's weights through a ring in shared memory, the others multiply.
//
// A stage of the ring holds 16 rows of the weight (a unit), eight lines of 128 bytes of each, as two boxes of eight rows.
// The copy engine sees the weight as [lines][rows][128 bytes], so that a box lies in shared memory line by line, eight
// rows of a line together, and swizzles the 16-byte chunks of a line by its row: a warp's reads hit all banks.
#pragma once

#include "hopper.cuh"

namespace {

using namespace hopper;

constexpr int ROWS = 8;         // of x: the columns of one matrix step
constexpr int UNIT = 16;        // rows of the weight that are multiplied together
constexpr int LINES = 8;        // of a stage
constexpr int LINE_BYTES = 128;
constexpr int EIGHT = 1024;     // bytes of a line of eight rows
constexpr int ROUND = 2048;     // columns that a warp's registers for x stand for; beyond the weight's last, zeros
constexpr int STAGE_BYTES = UNIT * LINES * LINE_BYTES;
constexpr int MAX_STAGES = 16;
constexpr int MOST_SHARED = 227 * 1024;  // that a block may have; a ring that leaves no room for a norm's rows gets shorter

struct Arguments {
    CUtensorMap weight;
    const void *x, *bias, *residual, *norm;  // where there is a norm, x stands for its argument
    void* y;
    long long x_stride, residual_stride;
    int rows, out, n_in, gated, rounds, stages;
    int units_each, blocks_with_one_more, early;
    float share, eps;  // share is 1 / n_in
    uint32_t nothing;  // 0, which the compiler cannot know
    const void *scale, *zero;  // of a quantised weight
    int beside;                // bytes of shared memory that they take
    // where bounds are made of the products, y being the upper ones:
    const float *radius, *x_norms;
    float* lowest;
    int* count;
};

// Where the second eight rows of a unit begin; where gated, they are up's and the first eight gate's.
__device__ __forceinline__ int first_row(const Arguments& a, int unit) { return unit * (a.gated ? 8 : UNIT); }
__device__ __forceinline__ int second_row(const Arguments& a, int unit) {
    return first_row(a, unit) + (a.gated ? a.out / 2 : 8);
}

template <int WARPS>
constexpr int SUMS = WARPS * UNIT * ROWS;  // of one unit, before the warps' sums are added

// Offsets in shared memory: the ring, the sums of two units, barriers, for a norm its sums of squares and its rows, and
// what stands beside a quantised weight.
template <int WARPS>
struct Layout {
    int sums, full, empty, squares, x, pitch, beside, end;
    __host__ __device__ explicit Layout(const Arguments& a) {
        sums = a.stages * STAGE_BYTES;
        full = sums + 2 * SUMS<WARPS> * 4;
        empty = full + 8 * MAX_STAGES;
        squares = empty + 8 * MAX_STAGES;
        x = squares + (a.norm == nullptr ? 0 : ROWS * WARPS * 4);
        pitch = a.n_in * 2 + 16;  // what eight neighbouring lanes read, of two rows, then hits all banks
        beside = x + (a.norm == nullptr ? 0 : a.rows * pitch);
        end = beside + a.beside;
    }
};

// Fills the ring; runs in one thread.
struct Producer {
    const Arguments& a;
    uint32_t ring, full, empty;
    int unit, pieces, piece = 0, stage = 0, turn = 0;


    // The next piece into the next stage, which must be free.
    __device__ __forceinline__ void fetch() {
        const uint32_t barrier = full + 8 * stage, to = ring + stage * STAGE_BYTES;
        barrier_expect(barrier, STAGE_BYTES);
        copy_box(to, a.weight, 0, first_row(a, unit), piece * LINES, barrier);
        copy_box(to + STAGE_BYTES / 2, a.weight, 0, second_row(a, unit), piece * LINES, barrier);
        if (++piece == pieces) piece = 0, ++unit;
        if (++stage == a.stages) stage = 0, ++turn;
    }

    __device__ __forceinline__ void fetch_when_free() {
        barrier_wait(empty + 8 * stage, (turn - 1) & 1);
        fetch();
    }
};

// RMSNorm of the rows of h, rounded as add_rms_norm_ref rounds; every block makes all of it for itself. A thread takes
// eight neighbouring columns of every COLUMNS, whose squares are added in an order that knows nothing of the rows.
template <typename T, int WARPS>
struct Norm {
    static constexpr int COLUMNS = 8 * 32 * WARPS;
    const Arguments& a;
    uint32_t x;      // in shared memory
    int pitch;       // of its rows, in bytes
    float* squares;  // [ROWS][WARPS]
    int warp, lane;

    __device__ __forceinline__ int first() const { return 8 * (warp * 32 + lane); }

    __device__ __forceinline__ uint4 weight(int column) const {
        return column < a.n_in ? load_constant(static_cast<const T*>(a.norm) + column) : make_uint4(0, 0, 0, 0);
    }

    // COUNT is 1, or ROWS for any number of rows; `own` is the weight of this thread's first columns.
    template <int COUNT>
    __device__ __forceinline__ void make(uint4 own) const {
        float sums[COUNT] = {};
        for (int column = first(); column < a.n_in; column += COLUMNS) {
            uint4 h[COUNT] = {};
#pragma unroll
            for (int row = 0; row < COUNT; ++row) {
                const T* from = static_cast<const T*>(a.x) + row * a.x_stride + column;
                if (row == 0 || row < a.rows) h[row] = __ldcg(reinterpret_cast<const uint4*>(from));
            }
#pragma unroll
            for (int row = 0; row < COUNT; ++row) {
                sums[row] = with_squares<T>(sums[row], h[row]);
                if (row == 0 || row < a.rows) store_shared(x + row * pitch + column * 2, h[row]);
            }
        }
#pragma unroll
        for (int row = 0; row < COUNT; ++row) {
            sums[row] = warp_total(sums[row]);
            if (lane == 0) squares[row * WARPS + warp] = sums[row];
        }
        meet(1, 32 * WARPS);
#pragma unroll
        for (int row = 0; row < COUNT; ++row) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < WARPS / 4; ++i) {
                const float4 four = reinterpret_cast<const float4*>(squares)[row * (WARPS / 4) + i];
                sum = sum + four.x + four.y + four.z + four.w;
            }
            sums[row] = rsqrtf(sum * a.share + a.eps);
        }
        for (int column = first(); column < a.n_in; column += COLUMNS) {
            const uint4 by = column == first() ? own : weight(column);
#pragma unroll
            for (int row = 0; row < COUNT; ++row) {
                const uint32_t at = x + row * pitch + column * 2;
                if (row == 0 || row < a.rows) store_shared(at, scaled<T>(load_shared(at), sums[row], by));
            }
        }
        copies_done();  // behind this meeting all warps' are, as the rows of x
        meet(1, 32 * WARPS);
    }
};

// What follows the sums of a unit: the warps' are added in their order, by a thread for each value.
template <typename T, int WARPS, bool SCALED>
struct Results {
    const Arguments& a;
    float* partial;
    int warp, lane;

    // What this thread will add in `finish`, asked for long before.
    __device__ __forceinline__ unsigned short residual_of(int unit) const {
        const int thread = warp * 32 + lane, of_x = thread / UNIT, at = unit * UNIT + thread % UNIT;
        if (a.residual == nullptr || of_x >= a.rows || at >= a.out) return 0;
        return __ldcg(static_cast<const unsigned short*>(a.residual) + of_x * a.residual_stride + at);
    }

    // Gives the other warps this one's sums of a unit and waits for theirs. `sum` is what a matrix step leaves with this
    // lane, for rows `row` and `row` + 8.
    __device__ __forceinline__ void exchange(float* sent, const float (&sum)[4], int row) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int of_x = lane % 4 * 2 + i % 2;
            if (of_x < a.rows) sent[(warp * ROWS + of_x) * UNIT + row + i / 2 * 8] = sum[i];
        }
        meet(1, 32 * WARPS);
    }

    // Where SCALED, `scales` holds the scales of the unit's rows.
    __device__ __forceinline__ void finish(int unit, int turn, unsigned short residual, const float (&sum)[4], int row,
                                           const float* scales) const {
        float* sent = partial + turn * SUMS<WARPS>;
        const int thread = warp * 32 + lane;
        exchange(sent, sum, row);
        const int of_x = thread / UNIT, r = thread % UNIT;
        if (of_x >= a.rows) return;
        if (a.gated) {
            const int at = unit * 8 + r;
            if (r >= 8 || at >= a.out / 2) return;
            const float gate = rounded<T>(total(sent + thread, scales + r, at));
            const float up = rounded<T>(total(sent + thread + 8, scales + r + 8, a.out / 2 + at));
            const float activated = rounded<T>(__fdiv_rn(gate, 1.0f + expf(-gate)));
            static_cast<T*>(a.y)[of_x * static_cast<long long>(a.out / 2) + at] = narrow<T>(activated * up);
        } else {
            const int at = unit * UNIT + r;
            if (at >= a.out) return;
            float value = rounded<T>(total(sent + thread, scales + r, at));
            if (a.residual != nullptr) value += widen(reinterpret_cast<const T&>(residual));
            static_cast<T*>(a.y)[of_x * static_cast<long long>(a.out) + at] = narrow<T>(value);
        }
    }
    __device__ __forceinline__ float total(const float* sent, const float* scale, int row) const {
        float sum = sent[0];
#pragma unroll
        for (int i = 1; i < WARPS; ++i) sum += sent[i * (UNIT * ROWS)];
        if constexpr (SCALED) sum *= *scale;
        return a.bias == nullptr ? sum : sum + widen(static_cast<const T*>(a.bias)[row]);
    }
};
// `Own` is what a warp that multiplies does. Where n_in fits in one round (ONE), x stays in registers for all units; else
// its next round is loaded step by step.
template <typename Own, bool ONE>
__global__ void __launch_bounds__(32 * (Own::WARPS + 1), Own::WARPS == 4 ? 3 : 2)
    gemv_ring_kernel(const __grid_constant__ Arguments a) {
    using T = typename Own::T;
    constexpr int WARPS = Own::WARPS;
    constexpr bool NORMED = Own::NORMED;
    extern __shared__ __align__(1024) unsigned char shared[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const Layout<WARPS> at(a);
    const uint32_t ring = shared_address(shared), full = ring + at.full, empty = ring + at.empty;
    const int block = blockIdx.x, more = a.blocks_with_one_more;
    const int first = block * a.units_each + min(block, more);
    const int last = first + a.units_each + (block < more ? 1 : 0);

    if (warp == WARPS) {
        const bool works = elected();
        const int pieces = a.rounds * (ROUND / Own::PIECE);
        Producer producer{a, ring, full, empty, first, pieces};
        const int total = (last - first) * pieces, filled = min(a.stages, total);
        if (works) {
            for (int i = 0; i < a.stages; ++i) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, WARPS);
            fence_barriers();
            for (int i = 0; i < filled; ++i) producer.fetch();
        }
        __syncwarp();
        __syncthreads();
        for (int i = filled; works && i < total; ++i) producer.fetch_when_free();
        return;
    }

    if (a.early) let_dependents_start();
    __syncthreads();
    Own consumer{{a, reinterpret_cast<float*>(shared + at.sums), warp, lane}, kept(ring), kept(full), kept(empty)};
    consumer.prepare(shared + at.beside, first, last);
    const uint4* from = nullptr;
    const Norm<T, WARPS> norm{a, ring + at.x, at.pitch, reinterpret_cast<float*>(shared + at.squares), warp, lane};
    uint4 norm_weight;
    if constexpr (NORMED) {
        norm_weight = norm.weight(norm.first());
        consumer.normed = kept(consumer.normed_at(norm.x, norm.pitch));
    } else {
        from = kept(consumer.x_at());
    }
    consumer.load(0);  // nothing more can be done before x is there
    consumer.load(1);
    wait_for_predecessor();
    if (!a.early) let_dependents_start();
    if constexpr (NORMED) {
        a.rows == 1 ? norm.template make<1>(norm_weight) : norm.template make<ROWS>(norm_weight);
    }
    typename Own::Columns x[Own::STEPS];
#pragma unroll
    for (int step = 0; step < Own::STEPS; ++step) consumer.load_x(x[step], from, 0, step);
    if constexpr (Own::BESIDE && !NORMED) copies_done(), meet(1, 32 * WARPS);

    const int rounds = ONE ? 1 : a.rounds;
    for (int unit = first; unit < last; ++unit) {
        const unsigned short residual = consumer.residual_of(unit);
        for (int round = 0; round < rounds; ++round) {
            const bool ends = round + 1 == rounds, goes_on = !ends || unit + 1 < last;
#pragma unroll
            for (int step = 0; step < Own::STEPS; ++step) {
                consumer.multiply_step(x[step], step);
                if (step + 2 < Own::STEPS || goes_on) consumer.load((step + 2) % Own::STEPS);
                if (!ONE && goes_on) consumer.load_x(x[step], from, ends ? 0 : round + 1, step);
            }
        }
        consumer.end(unit, (unit - first) & 1, residual);
    }
}

struct Grid {
    int blocks, dependent, alone;
    cudaStream_t stream;
};

template <typename Own, bool ONE>
cudaError_t start(Arguments a, const Grid& grid) {
    const auto kernel = gemv_ring_kernel<Own, ONE>;
    while (a.stages > 1 && Layout<Own::WARPS>(a).end > MOST_SHARED) --a.stages;
    // with more than half of what there is, a block gets a multiprocessor that has no other of the launch
    const int bytes = max(Layout<Own::WARPS>(a).end, grid.alone ? MOST_SHARED / 2 + 1024 : 0);
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    static int granted[64];  // shared memory that each device has been asked to grant this kernel
    if (error == cudaSuccess && granted[device % 64] < bytes) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error == cudaSuccess) {
            error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
        }
        if (error == cudaSuccess) granted[device % 64] = bytes;
    }
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid.blocks);
    config.blockDim = dim3(32 * (Own::WARPS + 1));
    config.dynamicSmemBytes = bytes;
    config.stream = grid.stream;
    config.attrs = &attribute;
    config.numAttrs = grid.dependent ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, a);
}

template <typename Own>
cudaError_t start_rounds(const Arguments& a, const Grid& grid) {
    return a.rounds == 1 ? start<Own, true>(a, grid) : start<Own, false>(a, grid);
}

// The weight as [lines][rows][128 bytes], `stride` bytes from row to row, in boxes of eight lines of eight rows.
bool describe(CUtensorMap* map, const void* weight, long long stride, int out, int lines) {
    const cuuint64_t sizes[3] = {LINE_BYTES / 2, static_cast<cuuint64_t>(out), static_cast<cuuint64_t>(lines)};
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(stride), LINE_BYTES};
    const cuuint32_t box[3] = {LINE_BYTES / 2, 8, LINES}, dense[3] = {1, 1, 1};
    const auto encode = tensor_map_encoder();
    return encode != nullptr &&
           encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(weight), sizes, strides, box, dense,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// What every form is given; the rest of the arguments are its own.
struct Shape {
    const void *x, *weight, *bias, *residual, *norm;
    void* y;
    long long x_stride, weight_bytes, residual_stride;  // weight_bytes from row to row
    float eps;
    int rows, out, n_in, gated, warps, stages, early, blocks;
};

// Fills in what follows from the shape, for a weight of `bits` a value; null, or what is wrong.
const char* fill(Arguments& a, Grid& grid, const Shape& s, int bits) {
    if (s.warps != 4 && s.warps != 8) return "4 or 8 warps multiply";
    if (s.stages < 1 || s.stages > MAX_STAGES) return "a ring has 1 to 16 stages";
    const int units = s.gated ? (s.out / 2 + 7) / 8 : (s.out + UNIT - 1) / UNIT;
    grid.blocks = s.blocks < units ? s.blocks : units;
    if (!describe(&a.weight, s.weight, s.weight_bytes, s.out, s.n_in * bits / (8 * LINE_BYTES))) {
        return "the copy engine does not take this weight";
    }
    a.x = s.x, a.bias = s.bias, a.residual = s.residual, a.norm = s.norm, a.y = s.y;
    a.x_stride = s.x_stride, a.residual_stride = s.residual_stride;
    a.rows = s.rows, a.out = s.out, a.n_in = s.n_in, a.gated = s.gated, a.early = s.early;
    a.rounds = (s.n_in + ROUND - 1) / ROUND, a.stages = s.stages, a.share = 1.0f / s.n_in, a.eps = s.eps;
    a.units_each = units / grid.blocks, a.blocks_with_one_more = units % grid.blocks;
    return nullptr;
}

}  // namespace
