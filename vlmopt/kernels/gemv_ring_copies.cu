// See gemv_ring_copies.py and gemv_ring_parts.cuh. To the copy engine a quantised weight is bytes: a line is 128 columns of
// eight bits or 256 of four, which are two groups. A warp multiplies half a line at a time; of it a lane takes 16
// neighbouring bytes of two rows, widens them in registers to whole numbers that the activations' dtype holds exactly, and
// takes the columns of x in the order in which widening leaves them, two by two, from the even and from the odd bytes of
// a word.
#include "gemv_ring_parts.cuh"

namespace {

constexpr int GROUP = 128;  // columns that share a scale and a zero where a value has four bits

// Half precision with whole numbers in the last places of the significand: 128 + q, q below 128, or 1024 + q.
template <typename T>
constexpr uint32_t WHOLE = std::is_same_v<T, __nv_bfloat16> ? 0x43004300 : 0x64006400;

template <typename T>
__device__ __forceinline__ uint32_t difference(uint32_t a, uint32_t b) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        asm("sub.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    } else {
        asm("sub.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    }
    return a;
}

// The bits of `word` under MASK with those of WHOLE, which comes in a register: an instruction has room for one constant.
template <uint32_t MASK>
__device__ __forceinline__ uint32_t masked(uint32_t word, uint32_t whole) {
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(word), "n"(MASK), "r"(whole));
    return result;
}

// Bytes 0 and 2 of a word as whole numbers with a sign: the lower seven bits less 128 times the upper one.
template <typename T>
__device__ __forceinline__ uint32_t widened_bytes(uint32_t word, uint32_t whole) {
    return difference<T>(masked<0x007F007F>(word, whole), masked<0x00800080>(word, whole));
}

// The lower halves of bytes 0 and 2 less the zero, which comes as WHOLE + zero, twice.
template <typename T>
__device__ __forceinline__ uint32_t widened_nibbles(uint32_t word, uint32_t whole, uint32_t zero) {
    return difference<T>(masked<0x000F000F>(word, whole), zero);
}

// Eight values as widening orders their columns: 0, 2; 1, 3; 4, 6; 5, 7.
__device__ __forceinline__ uint4 by_even_and_odd(uint4 x) {
    return make_uint4(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x5410),
                      __byte_perm(x.z, x.w, 0x7632));
}

__device__ __forceinline__ uint32_t load_shared_byte(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

// A value of 16 bits, widened.
template <typename T>
__device__ __forceinline__ float load_shared_half(uint32_t address) {
    unsigned short value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
    return widen(reinterpret_cast<const T&>(value));
}

constexpr float SLACK = 0x1p-100f;  // of every bound; see lm_head_q8.py

// One of the warps that multiply: of every WARPS lines it takes one, of all 16 rows, half of it at a time. With BOUNDS a
// product is not the result but where it lies at most, and per block and row of x the best of where it lies at least.
template <typename Value, int N, bool AFTER_NORM, int BITS, bool BOUNDS = false>
struct Consumer : Results<Value, N, BITS == 8> {
    using T = Value;
    static constexpr int WARPS = N;
    static constexpr bool NORMED = AFTER_NORM, BESIDE = true;
    static constexpr int HALF = LINE_BYTES / 2 * 8 / BITS;  // columns of half a line; of four bits a group
    static constexpr int PIECE = LINES * 2 * HALF;          // of a stage
    static constexpr int STEPS = ROUND / (WARPS * HALF);    // of a round
    static constexpr int OF_PIECE = 2 * LINES / WARPS;      // steps of a piece
    static constexpr int CHUNKS = HALF / 32;                // of eight columns, a lane's of a step
    static_assert(STEPS % 2 == 0 && OF_PIECE % 2 == 0 && (BITS == 8 || HALF == GROUP));
    using Columns = uint4[CHUNKS];
    using Base = Results<T, WARPS, BITS == 8>;
    using Base::a, Base::warp, Base::lane;
    uint32_t ring, full, empty, normed = 0;
    int stage = 0, parity = 0, first = 0, last = 0;
    uint32_t whole = kept(WHOLE<T>);
    uint32_t read = 0;             // a word of every load from this stage that is no longer in w
    const float* scales = nullptr; // of the rows of the block's units; eight bits
    uint32_t group_scales = 0, group_zeros = 0;  // of the first group, in this lane's row; four bits
    uint32_t groups = 0;                         // bytes of zeros before the next step's group
    uint4 w[2][2];                 // [step % 2][eight rows]
    float sums[2][4] = {};
    float x_norm = 0, best = -INFINITY;  // of this thread's row of x

    // The row of eight that this lane reads and multiplies: eight neighbouring lanes take four chunks of rows i and i + 4,
    // which the swizzle puts into different halves of a line.
    __device__ __forceinline__ int row() const { return lane / 8 | (lane & 4); }

    // Asks for what stands beside the weight for all of the block's units: no kernel in flight writes it.
    __device__ __forceinline__ void prepare(unsigned char* to, int first_unit, int last_unit) {
        first = first_unit, last = last_unit;
        const int units = last_unit - first_unit, thread = warp * 32 + lane;
        const uint32_t begin = shared_address(to);
        if constexpr (BITS == 8) {
            const int n = units * UNIT;
            for (int i = thread; i < n; i += 32 * WARPS) {
                const int r = i % UNIT, unit = first_unit + i / UNIT;
                const int at = r < 8 ? first_row(a, unit) + r : second_row(a, unit) + r - 8;
                const bool exists = at < a.out;
                copy_ahead<4>(begin + 4 * i, static_cast<const float*>(a.scale) + (exists ? at : 0), exists);
                if constexpr (BOUNDS) copy_ahead<4>(begin + 4 * (n + i), a.radius + (exists ? at : 0), exists);
            }
            scales = reinterpret_cast<const float*>(to);
        } else {  // eight rows of a group at a time
            const int each = a.rounds * (ROUND / GROUP), n = units * each;
            for (int i = thread; i < 2 * n; i += 32 * WARPS) {
                const int item = i / 2, unit = first_unit + item / each, group = item % each;
                const int at = i % 2 ? second_row(a, unit) : first_row(a, unit);
                const bool exist = at < a.out && group * GROUP < a.n_in;
                const long long from = exist ? static_cast<long long>(group) * a.out + at : 0;
                copy_ahead<16>(begin + 16 * i, static_cast<const unsigned short*>(a.scale) + from, exist);
                copy_ahead<8>(begin + 32 * n + 8 * i, static_cast<const unsigned char*>(a.zero) + from, exist);
            }
            group_scales = begin + row() * 2, group_zeros = begin + 32 * n + row();
            groups = warp * 2 * UNIT;
        }
    }

    // This warp's half line of the step after the last one loaded (`step` counts from a round's beginning); gives back a
    // stage that is read.
    __device__ __forceinline__ void load(int step) {
        const int of_piece = step % OF_PIECE;
        if (of_piece == 0) barrier_wait(full + 8 * stage, parity);
        const int line = of_piece / 2 * WARPS + warp;
        const uint32_t chunk = (line * EIGHT + row() * LINE_BYTES + ((lane % 4) ^ row()) * 16) ^ (step % 2 * 64);
        const uint32_t at = ring + stage * STAGE_BYTES + chunk;
        w[step % 2][0] = load_shared(at);
        w[step % 2][1] = load_shared(at + STAGE_BYTES / 2);
        if (of_piece != OF_PIECE - 1) return;
        const uint32_t all = read | w[0][0].x | w[0][1].x | w[1][0].x | w[1][1].x;
        const uint32_t barrier = after(empty + 8 * stage, all, a.nothing);
        read = 0;
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
        if (++stage == a.stages) stage = 0, parity ^= 1;
    }

    // Where the columns of x begin that stand against a round's first step, in row lane / 4.
    __device__ __forceinline__ const uint4* x_at() const {
        const T* own = static_cast<const T*>(a.x) + lane / 4 * a.x_stride;
        return reinterpret_cast<const uint4*>(own + warp * 2 * HALF + lane % 4 * 16);
    }

    // The same of what a norm has made of x.
    __device__ __forceinline__ uint32_t normed_at(uint32_t x, int pitch) const {
        return x + lane / 4 * pitch + (warp * 2 * HALF + lane % 4 * 16) * 2;
    }

    __device__ __forceinline__ void load_x(Columns& x, const uint4* from, int round, int step) const {
        const int begin = round * ROUND + step / 2 * (WARPS * 2 * HALF) + step % 2 * HALF;
        const bool inside = lane / 4 < a.rows && begin + warp * 2 * HALF < a.n_in;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const int column = begin + chunk / 2 * 64 + chunk % 2 * 8;
            x[chunk] = make_uint4(0, 0, 0, 0);
            if (inside) x[chunk] = by_even_and_odd(NORMED ? load_shared(normed + column * 2) : __ldcg(from + column / 8));
        }
    }

    __device__ __forceinline__ void multiply_step(const Columns& x, int step) {
        const uint4(&own)[2] = w[step % 2];
        if constexpr (OF_PIECE > 2) read |= own[0].x | own[1].x;
        const uint32_t upper[4] = {own[0].x, own[0].y, own[0].z, own[0].w};
        const uint32_t lower[4] = {own[1].x, own[1].y, own[1].z, own[1].w};
        if constexpr (BITS == 8) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4& columns = x[i / 2];
                multiply<T>(sums[i % 2], widened_bytes<T>(upper[i], whole), widened_bytes<T>(lower[i], whole),
                            widened_bytes<T>(upper[i] >> 8, whole), widened_bytes<T>(lower[i] >> 8, whole),
                            i % 2 ? columns.z : columns.x, i % 2 ? columns.w : columns.y);
            }
        } else {
            const uint32_t here = groups + step % 2 * UNIT;
            const float scale[2] = {load_shared_half<T>(group_scales + 2 * here),
                                    load_shared_half<T>(group_scales + 2 * here + 16)};
            const uint32_t zeros[2] = {__byte_perm(load_shared_byte(group_zeros + here), whole, 0x5050),
                                       __byte_perm(load_shared_byte(group_zeros + here + 8), whole, 0x5050)};
            if (step % 2) groups += WARPS * 2 * UNIT;
            float parts[2][4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int high = 0; high < 2; ++high) {
                    const uint4& columns = x[high * 2 + i / 2];
                    const uint32_t one = upper[i] >> 4 * high, other = lower[i] >> 4 * high;
                    multiply<T>(parts[high], widened_nibbles<T>(one, whole, zeros[0]), widened_nibbles<T>(other, whole, zeros[1]),
                                widened_nibbles<T>(one >> 8, whole, zeros[0]), widened_nibbles<T>(other >> 8, whole, zeros[1]),
                                i % 2 ? columns.z : columns.x, i % 2 ? columns.w : columns.y);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[0][i] = fmaf(parts[0][i] + parts[1][i], scale[i / 2], sums[0][i]);
        }
    }

    __device__ __forceinline__ void end(int unit, int turn, unsigned short residual) {
        float sum[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[i] = BITS == 8 ? sums[0][i] + sums[1][i] : sums[0][i];
            sums[0][i] = sums[1][i] = 0;
        }
        if constexpr (BOUNDS) {
            float* sent = Base::partial + turn * SUMS<WARPS>;
            this->exchange(sent, sum, row());
            bound(unit, sent);
        } else {
            this->finish(unit, turn, residual, sum, row(), scales + (unit - first) * UNIT);
        }
    }

    __device__ __forceinline__ void bound(int unit, const float* sent) {
        const int thread = warp * 32 + lane, of_x = thread / UNIT, r = thread % UNIT, at = unit * UNIT + r;
        if (of_x >= a.rows) return;
        if (unit == first) x_norm = __ldcg(a.x_norms + of_x);
        if (at < a.out) {
            const float* scale = scales + (unit - first) * UNIT + r;
            const float product = this->total(sent + thread, scale, at);
            const float most_off = fmaf(scale[(last - first) * UNIT], x_norm, SLACK);
            static_cast<float*>(a.y)[of_x * static_cast<long long>(a.out) + at] = product + most_off;
            best = fmaxf(best, product - most_off);  // which passes over a NaN
        }
        if (unit + 1 < last) return;
#pragma unroll
        for (int apart = UNIT / 2; apart; apart /= 2) {
            best = fmaxf(best, __shfl_xor_sync(0xFFFFu << (lane & 16), best, apart));
        }
        if (r == 0) a.lowest[of_x * gridDim.x + blockIdx.x] = best;
        if (blockIdx.x == 0 && thread == 0) *a.count = 0;
    }
};

template <typename T, int WARPS, int BITS>
cudaError_t start_form(const Arguments& a, const Grid& grid) {
    return a.norm == nullptr ? start_rounds<Consumer<T, WARPS, false, BITS>>(a, grid)
                             : start_rounds<Consumer<T, WARPS, true, BITS>>(a, grid);
}

template <typename T>
cudaError_t start_bits(const Arguments& a, const Grid& grid, int warps) {
    if (a.zero == nullptr) return warps == 4 ? start_form<T, 4, 8>(a, grid) : start_form<T, 8, 8>(a, grid);
    return warps == 4 ? start_form<T, 4, 4>(a, grid) : start_form<T, 8, 4>(a, grid);
}

}  // namespace

// Where `zero` is null the weight has eight bits a value, else four.
extern "C" const char* gemv_ring_copies(const void* x, const void* weight, const void* scale, const void* zero,
                                        const void* bias, const void* residual, const void* norm, void* y,
                                        long long x_stride, long long weight_stride, long long residual_stride,
                                        float eps, int rows, int out, int n_in, int gated, int half, int warps,
                                        int stages, int early, int blocks, int alone, int dependent,
                                        void* stream) {
    Arguments a = {};
    Grid grid = {0, dependent, alone, static_cast<cudaStream_t>(stream)};
    const Shape shape = {x,   weight, bias, residual, norm,  y,     x_stride, weight_stride, residual_stride,
                         eps, rows,   out,  n_in,     gated, warps, stages,   early,         blocks};
    if (const char* wrong = fill(a, grid, shape, zero == nullptr ? 8 : 4)) return wrong;
    a.scale = scale, a.zero = zero;
    const int each = zero == nullptr ? UNIT * 4 : a.rounds * (ROUND / GROUP) * UNIT * 3;
    a.beside = (a.units_each + (a.blocks_with_one_more > 0)) * each;
    const cudaError_t error = half ? start_bits<__half>(a, grid, warps) : start_bits<__nv_bfloat16>(a, grid, warps);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Upper bounds [rows, out], per block the best lower bound of each row of x [rows, blocks], and a count of nothing yet.
extern "C" const char* gemv_ring_bounds(const void* x, const void* weight, const void* scale, const float* radius,
                                        const float* x_norms, void* upper, float* lowest, int* count,
                                        long long x_stride, int rows, int out, int n_in, int half, int stages, int early,
                                        int blocks, int alone, int dependent, void* stream) {
    Arguments a = {};
    Grid grid = {0, dependent, alone, static_cast<cudaStream_t>(stream)};
    const Shape shape = {x,    weight, nullptr, nullptr, nullptr, upper, x_stride, n_in,  0,
                         0.0f, rows,   out,     n_in,    0,       8,     stages,   early, blocks};
    if (const char* wrong = fill(a, grid, shape, 8)) return wrong;
    a.scale = scale, a.radius = radius, a.x_norms = x_norms, a.lowest = lowest, a.count = count;
    a.beside = (a.units_each + (a.blocks_with_one_more > 0)) * 2 * UNIT * 4;
    const cudaError_t error = half ? start_rounds<Consumer<__half, 8, false, 8, true>>(a, grid)
                                   : start_rounds<Consumer<__nv_bfloat16, 8, false, 8, true>>(a, grid);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
