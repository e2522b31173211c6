// See gemv_ring.py. One warp streams a block's weights through a ring in shared memory, the others multiply.
//
// A stage of the ring holds 16 rows of the weight (a unit), PIECE columns of each, as two boxes of eight rows. The copy
// engine sees the weight as [columns / 64][rows][64], so that a box lies in shared memory as lines of 64 columns, eight
// rows of a group of columns together, and swizzles the 16-byte chunks of a line by its row: a warp's reads hit all
// banks. Which of 64 columns stands where in a matrix step is the same for the weight and for x, and otherwise free: a
// lane takes 16 neighbouring ones, so that it reads nothing narrower than 16 bytes anywhere.
#include "hopper.cuh"

namespace {

using namespace hopper;

constexpr int ROWS = 8;      // of x: the columns of one matrix step
constexpr int UNIT = 16;     // rows of the weight that are multiplied together
constexpr int LINE = 64;     // columns of a line, which a warp multiplies in four matrix steps
constexpr int PIECE = 512;   // columns of a stage
constexpr int EIGHT = 1024;  // bytes of a line of eight rows
constexpr int ROUND = 2048;  // columns that a warp's registers for x stand for; beyond the weight's last, zeros
constexpr int STAGE_BYTES = UNIT * PIECE * 2;
constexpr int MAX_STAGES = 16;

struct Arguments {
    CUtensorMap weight;
    const void *x, *bias, *residual, *norm;  // where there is a norm, x stands for its argument
    void* y;
    long long x_stride, residual_stride;
    int rows, out, n_in, gated, rounds, stages;
    int units_each, blocks_with_one_more, early;
    float share, eps;  // share is 1 / n_in
    uint32_t nothing;  // 0, which the compiler cannot know
};

template <int WARPS>
constexpr int SUMS = WARPS * UNIT * ROWS;  // of one unit, before the warps' sums are added

// Offsets in shared memory: the ring, the sums of two units, barriers, and for a norm its sums of squares and its rows.
template <int WARPS>
struct Layout {
    int sums, full, empty, squares, x, pitch, end;
    __host__ __device__ explicit Layout(const Arguments& a) {
        sums = a.stages * STAGE_BYTES;
        full = sums + 2 * SUMS<WARPS> * 4;
        empty = full + 8 * MAX_STAGES;
        squares = empty + 8 * MAX_STAGES;
        x = squares + (a.norm == nullptr ? 0 : ROWS * WARPS * 4);
        pitch = a.n_in * 2 + 16;  // what eight neighbouring lanes read, of two rows, then hits all banks
        end = x + (a.norm == nullptr ? 0 : a.rows * pitch);
    }
};

// Fills the ring; runs in one thread.
struct Producer {
    const Arguments& a;
    uint32_t ring, full, empty;
    int unit, pieces, piece = 0, stage = 0, turn = 0;

    // Where the second eight rows of a unit begin; where gated, they are up's and the first eight gate's.
    __device__ __forceinline__ int first_row(int of_unit) const { return of_unit * (a.gated ? 8 : UNIT); }
    __device__ __forceinline__ int second_row(int of_unit) const {
        return first_row(of_unit) + (a.gated ? a.out / 2 : 8);
    }

    // The next piece into the next stage, which must be free.
    __device__ __forceinline__ void fetch() {
        const uint32_t barrier = full + 8 * stage, to = ring + stage * STAGE_BYTES;
        barrier_expect(barrier, STAGE_BYTES);
        copy_box(to, a.weight, 0, first_row(unit), piece * (PIECE / LINE), barrier);
        copy_box(to + STAGE_BYTES / 2, a.weight, 0, second_row(unit), piece * (PIECE / LINE), barrier);
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
        meet(1, 32 * WARPS);
    }
};

// One of the warps that multiply: of every WARPS lines it takes one, of all 16 rows.
template <typename T, int WARPS, bool NORMED>
struct Consumer {
    static constexpr int STEP = WARPS * LINE;      // columns that all warps multiply at a time
    static constexpr int STEPS = ROUND / STEP;     // of a round
    static constexpr int OF_PIECE = PIECE / STEP;  // steps of a piece
    const Arguments& a;
    uint32_t ring, full, empty, normed;
    float* partial;
    int warp, lane, stage = 0, parity = 0;
    uint4 w[2][2][2];  // [step % 2][chunk][eight rows]
    float sums[2][4] = {};

    // This warp's line of the step after the last one loaded (`step` counts from a round's beginning); gives back a
    // stage that is read.
    __device__ __forceinline__ void load(int step) {
        if (step % OF_PIECE == 0) barrier_wait(full + 8 * stage, parity);
        const int row = lane / 4, line = step % OF_PIECE * WARPS + warp;
        const int place = line * EIGHT + row * 128 + ((lane % 4 * 2) ^ row) * 16;
        const uint32_t at = ring + stage * STAGE_BYTES + place;
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
            w[step % 2][chunk][0] = load_shared(at ^ (chunk * 16));
            w[step % 2][chunk][1] = load_shared((at ^ (chunk * 16)) + STAGE_BYTES / 2);
        }
        if (step % OF_PIECE != OF_PIECE - 1) return;
        uint32_t read = 0;  // a word of every load from this stage
#pragma unroll
        for (int i = 0; i < OF_PIECE * 4; ++i) read |= w[(step + i / 4) % 2][i / 2 % 2][i % 2].x;
        const uint32_t barrier = after(empty + 8 * stage, read, a.nothing);
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
        if (++stage == a.stages) stage = 0, parity ^= 1;
    }

    // Where the columns of x begin that stand against a round's first step, in row lane / 4.
    __device__ __forceinline__ const uint4* x_at() const {
        const T* row = static_cast<const T*>(a.x) + lane / 4 * a.x_stride;
        return reinterpret_cast<const uint4*>(row + warp * LINE + lane % 4 * 16);
    }

    // The same of what a norm has made of x.
    __device__ __forceinline__ uint32_t normed_at(uint32_t x, int pitch) const {
        return x + lane / 4 * pitch + (warp * LINE + lane % 4 * 16) * 2;
    }

    __device__ __forceinline__ void load_x(uint4 (&x)[2], const uint4* from, int round, int step) const {
        const int first = round * ROUND + step * STEP;
        const bool inside = lane / 4 < a.rows && first + warp * LINE < a.n_in;
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
            x[chunk] = make_uint4(0, 0, 0, 0);
            if (!inside) continue;
            x[chunk] = NORMED ? load_shared(normed + first * 2 + chunk * 16) : __ldcg(from + first / 8 + chunk);
        }
    }

    // A sum for each chunk, so that a matrix step need not wait for the one before.
    __device__ __forceinline__ void multiply_step(const uint4 (&x)[2], int step) {
        const auto& [first, second] = w[step % 2];
        multiply<T>(sums[0], first[0].x, first[1].x, first[0].y, first[1].y, x[0].x, x[0].y);
        multiply<T>(sums[1], second[0].x, second[1].x, second[0].y, second[1].y, x[1].x, x[1].y);
        multiply<T>(sums[0], first[0].z, first[1].z, first[0].w, first[1].w, x[0].z, x[0].w);
        multiply<T>(sums[1], second[0].z, second[1].z, second[0].w, second[1].w, x[1].z, x[1].w);
    }

    // What this thread will add in `finish`, asked for long before.
    __device__ __forceinline__ unsigned short residual_of(int unit) const {
        const int thread = warp * 32 + lane, of_x = thread / UNIT, at = unit * UNIT + thread % UNIT;
        if (a.residual == nullptr || of_x >= a.rows || at >= a.out) return 0;
        return __ldcg(static_cast<const unsigned short*>(a.residual) + of_x * a.residual_stride + at);
    }

    // The warps' sums are added in their order and what follows the product is done, by a thread for each value.
    __device__ __forceinline__ void finish(int unit, int turn, unsigned short residual) {
        float* sent = partial + turn * SUMS<WARPS>;
        const int thread = warp * 32 + lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float sum = sums[0][i] + sums[1][i];
            const int of_x = lane % 4 * 2 + i % 2;
            if (of_x < a.rows) sent[(warp * ROWS + of_x) * UNIT + lane / 4 + i / 2 * 8] = sum;
            sums[0][i] = sums[1][i] = 0;
        }
        meet(1, 32 * WARPS);
        const int of_x = thread / UNIT, r = thread % UNIT;
        if (of_x >= a.rows) return;
        if (a.gated) {
            const int at = unit * 8 + r;
            if (r >= 8 || at >= a.out / 2) return;
            const float gate = rounded<T>(total(sent + thread, at));
            const float up = rounded<T>(total(sent + thread + 8, a.out / 2 + at));
            const float activated = rounded<T>(__fdiv_rn(gate, 1.0f + expf(-gate)));
            static_cast<T*>(a.y)[of_x * static_cast<long long>(a.out / 2) + at] = narrow<T>(activated * up);
        } else {
            const int at = unit * UNIT + r;
            if (at >= a.out) return;
            float value = rounded<T>(total(sent + thread, at));
            if (a.residual != nullptr) value += widen(reinterpret_cast<const T&>(residual));
            static_cast<T*>(a.y)[of_x * static_cast<long long>(a.out) + at] = narrow<T>(value);
        }
    }

    __device__ __forceinline__ float total(const float* sent, int row) const {
        float sum = sent[0];
#pragma unroll
        for (int i = 1; i < WARPS; ++i) sum += sent[i * (UNIT * ROWS)];
        return a.bias == nullptr ? sum : sum + widen(static_cast<const T*>(a.bias)[row]);
    }
};

// Where n_in fits in one round (ONE), x stays in registers for all units; else its next round is loaded step by step.
template <typename T, int WARPS, bool ONE, bool NORMED>
__global__ void __launch_bounds__(32 * (WARPS + 1), WARPS == 4 ? 3 : 2)
    gemv_ring_kernel(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const Layout<WARPS> at(a);
    const uint32_t ring = shared_address(shared), full = ring + at.full, empty = ring + at.empty;
    const int block = blockIdx.x, more = a.blocks_with_one_more;
    const int first = block * a.units_each + min(block, more);
    const int last = first + a.units_each + (block < more ? 1 : 0);

    if (warp == WARPS) {
        const bool works = elected();
        const int pieces = a.rounds * (ROUND / PIECE);
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
    using Own = Consumer<T, WARPS, NORMED>;
    Own consumer{a, kept(ring), kept(full), kept(empty), 0, reinterpret_cast<float*>(shared + at.sums), warp, lane};
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
    uint4 x[Own::STEPS][2];
#pragma unroll
    for (int step = 0; step < Own::STEPS; ++step) consumer.load_x(x[step], from, 0, step);

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
        consumer.finish(unit, (unit - first) & 1, residual);
    }
}

struct Grid {
    int blocks, dependent;
    cudaStream_t stream;
};

template <typename T, int WARPS, bool ONE, bool NORMED>
cudaError_t start(const Arguments& a, const Grid& grid) {
    const auto kernel = gemv_ring_kernel<T, WARPS, ONE, NORMED>;
    const int bytes = Layout<WARPS>(a).end;
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
    config.blockDim = dim3(32 * (WARPS + 1));
    config.dynamicSmemBytes = bytes;
    config.stream = grid.stream;
    config.attrs = &attribute;
    config.numAttrs = grid.dependent ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, a);
}

template <typename T, int WARPS>
cudaError_t start_form(const Arguments& a, const Grid& grid) {
    if (a.norm == nullptr) {
        return a.rounds == 1 ? start<T, WARPS, true, false>(a, grid) : start<T, WARPS, false, false>(a, grid);
    }
    return a.rounds == 1 ? start<T, WARPS, true, true>(a, grid) : start<T, WARPS, false, true>(a, grid);
}

// The weight as [columns / 64][rows][64], in boxes of PIECE columns of eight rows.
bool describe(CUtensorMap* map, const void* weight, long long stride, int out, int n_in) {
    const cuuint64_t sizes[3] = {LINE, static_cast<cuuint64_t>(out), static_cast<cuuint64_t>(n_in / LINE)};
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(stride) * 2, LINE * 2};
    const cuuint32_t box[3] = {LINE, 8, PIECE / LINE}, dense[3] = {1, 1, 1};
    const auto encode = tensor_map_encoder();
    return encode != nullptr &&
           encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(weight), sizes, strides, box, dense,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

extern "C" const char* gemv_ring(const void* x, const void* weight, const void* bias, const void* residual,
                                 const void* norm, void* y, long long x_stride, long long weight_stride,
                                 long long residual_stride, float eps, int rows, int out, int n_in, int gated, int half,
                                 int warps, int stages, int early, int blocks, int dependent, void* stream) {
    if (warps != 4 && warps != 8) return "4 or 8 warps multiply";
    if (stages < 1 || stages > MAX_STAGES) return "a ring has 1 to 16 stages";
    const int units = gated ? (out / 2 + 7) / 8 : (out + UNIT - 1) / UNIT;
    const Grid grid = {blocks < units ? blocks : units, dependent, static_cast<cudaStream_t>(stream)};
    Arguments a = {};
    if (!describe(&a.weight, weight, weight_stride, out, n_in)) return "the copy engine does not take this weight";
    a.x = x, a.bias = bias, a.residual = residual, a.norm = norm, a.y = y;
    a.x_stride = x_stride, a.residual_stride = residual_stride;
    a.rows = rows, a.out = out, a.n_in = n_in, a.gated = gated, a.early = early;
    a.rounds = (n_in + ROUND - 1) / ROUND, a.stages = stages, a.share = 1.0f / n_in, a.eps = eps;
    a.units_each = units / grid.blocks, a.blocks_with_one_more = units % grid.blocks;
    const auto start = half ? (warps == 4 ? start_form<__half, 4> : start_form<__half, 8>)
                            : (warps == 4 ? start_form<__nv_bfloat16, 4> : start_form<__nv_bfloat16, 8>);
    const cudaError_t error = start(a, grid);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
