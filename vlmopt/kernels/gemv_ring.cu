// See gemv_ring.py and gemv_ring_parts.cuh. Which of a line's 64 columns stands where in a matrix step is the same for the
// weight and for x, and otherwise free: a lane takes 16 neighbouring ones, so that it reads nothing narrower than 16 bytes
// anywhere.
#include "gemv_ring_parts.cuh"

namespace {

constexpr int LINE = 64;  // columns of a line, which a warp multiplies in four matrix steps

// One of the warps that multiply: of every WARPS lines it takes one, of all 16 rows.
template <typename Value, int N, bool AFTER_NORM>
struct Consumer : Results<Value, N, false> {
    using T = Value;
    using Columns = uint4[2];
    static constexpr int WARPS = N;
    static constexpr bool NORMED = AFTER_NORM, BESIDE = false;
    static constexpr int PIECE = LINES * LINE;     // columns of a stage
    static constexpr int STEP = WARPS * LINE;      // columns that all warps multiply at a time
    static constexpr int STEPS = ROUND / STEP;     // of a round
    static constexpr int OF_PIECE = PIECE / STEP;  // steps of a piece
    using Results<T, WARPS, false>::a, Results<T, WARPS, false>::warp, Results<T, WARPS, false>::lane;
    uint32_t ring, full, empty, normed = 0;
    int stage = 0, parity = 0;
    uint4 w[2][2][2];  // [step % 2][chunk][eight rows]
    float sums[2][4] = {};

    __device__ __forceinline__ void prepare(unsigned char*, int, int) {}

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

    __device__ __forceinline__ void end(int unit, int turn, unsigned short residual) {
        float sum[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[i] = sums[0][i] + sums[1][i];
            sums[0][i] = sums[1][i] = 0;
        }
        this->finish(unit, turn, residual, sum, lane / 4, nullptr);
    }
};

template <typename T, int WARPS>
cudaError_t start_form(const Arguments& a, const Grid& grid) {
    return a.norm == nullptr ? start_rounds<Consumer<T, WARPS, false>>(a, grid)
                             : start_rounds<Consumer<T, WARPS, true>>(a, grid);
}

}  // namespace

extern "C" const char* gemv_ring(const void* x, const void* weight, const void* bias, const void* residual,
                                 const void* norm, void* y, long long x_stride, long long weight_stride,
                                 long long residual_stride, float eps, int rows, int out, int n_in, int gated, int half,
                                 int warps, int stages, int early, int blocks, int alone, int dependent,
                                 void* stream) {
    Arguments a = {};
    Grid grid = {0, dependent, alone, static_cast<cudaStream_t>(stream)};
    const Shape shape = {x,   weight, bias, residual, norm,  y,     x_stride, weight_stride * 2, residual_stride,
                         eps, rows,   out,  n_in,     gated, warps, stages,   early,             blocks};
    if (const char* wrong = fill(a, grid, shape, 16)) return wrong;
    const auto start = half ? (warps == 4 ? start_form<__half, 4> : start_form<__half, 8>)
                            : (warps == 4 ? start_form<__nv_bfloat16, 4> : start_form<__nv_bfloat16, 8>);
    const cudaError_t error = start(a, grid);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
