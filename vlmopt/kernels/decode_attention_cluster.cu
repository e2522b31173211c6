// See decode_attention_cluster.py. A cluster of 16 blocks for a KV head, a block for a slot, four warps that each take
// 16 keys of every chunk of the slot. A warp fills its own part of the shared memory and works alone until its last
// chunk is done; then the block's sums are added, each block is sent its columns of them, and adds those of all slots.
// Or blocks run on their own, wherever there is room, and `combine` adds the slots up in the same order.
//
// Scores are products of 16 keys (the rows of a matrix step) with eight columns: a query row's head each. The copy
// engine lays 16 keys of a cache down as lines of 64 values, a line's keys together, and swizzles 16-byte chunks by the
// key. Which of a line's values stands where in a matrix step is the same for k and q, and otherwise free: a lane takes
// 16 neighbours, so that it reads q, k, cosines and sines in 16 bytes. Weights become the second factor of v' · w' by a
// transposition in registers.
#include "decode_attention_cluster_parts.cuh"

namespace cluster_attention {
namespace {

template <typename T, int WIDTH, int COLUMNS, bool PRODUCTS>
__global__ void __launch_bounds__(THREADS, 2) attend(const __grid_constant__ Arguments a) {
    using Own = Layout<WIDTH, COLUMNS>;
    constexpr int LINES = WIDTH / 64, TILES = COLUMNS / 8;
    extern __shared__ __align__(1024) unsigned char shared[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, thread = threadIdx.x;
    const int slot = blockIdx.x % SLOTS, kv_head = blockIdx.x / SLOTS;
    const int columns = a.rows * a.group, pairs = (columns + 1) / 2;
    const Own at = {shared_address(shared), static_cast<uint32_t>(a.stages)};
    const uint32_t ring = kept(at.ring(warp)), full = kept(at.full(warp));
    const bool works = elected();
    const long long row = __ldcg(a.row);

    if (works) {
        prefetch_map(a.k_map), prefetch_map(a.v_map);
        for (int i = 0; i < a.stages; ++i) barrier_init(full + 8 * i, 1);
        if (warp == 0 && a.sums == nullptr) {
            barrier_init(at.exchange(), 1);
            fence_cluster_barriers();
            barrier_expect(at.exchange(), SLOTS * pairs * (Own::DIMS * 8 + 16));
        }
        fence_barriers();
    }
    __syncwarp();
    announce_to_cluster();

    // The past of the cache does not depend on the kernel ahead.
    const int length = static_cast<int>(max(min(row + 1, static_cast<long long>(a.capacity)), 0LL));
    const int past = length - a.rows, first = slot * CHUNK + warp * KEYS;
    const auto fetch = [&](int stage, int start) {
        barrier_expect(full + 8 * stage, Own::STAGE);
        copy_keys(ring + stage * Own::STAGE, a.k_map, start, kv_head, full + 8 * stage);
        copy_keys(ring + stage * Own::STAGE + Own::BOX, a.v_map, start, kv_head, full + 8 * stage);
    };
    if (works) {
        int start = first;
        if (start < length) fetch(0, start);
        start += a.stages * ROUND;
        for (int i = 0; i < a.ahead && start < length; ++i, start += ROUND) {
            call_keys_into_l2(a.k_map, start, kv_head);
            call_keys_into_l2(a.v_map, start, kv_head);
        }
    }
    __syncwarp();
    const int inside = lane % 4 * 16, heads = a.kv_heads * a.group;
    const bool together = PRODUCTS && columns + a.rows <= 8;  // the newest keys stand behind the columns of q
    Newest<T, WIDTH> newest(a, PRODUCTS ? row + 1 - a.rows : past, length, first, together ? columns : 0, lane);
    const bool owns = __any_sync(~0u, newest.owned);
    Softmax<T, WIDTH, COLUMNS> softmax(past, a.group, lane);
    // Where everything lies. What nobody asks for, columns behind the last and rows of others, is a copy of something.
    const T* const from = static_cast<const T*>(a.q) + inside;
    const long long position = newest.owned ? newest.position : 0;
    T* const k_at = kept(static_cast<T*>(a.k) + kv_head * a.k_head + position * a.k_row + inside);
    T* const v_at = kept(static_cast<T*>(a.v) + kv_head * a.v_head + position * a.v_row + inside);
    const int newest_row = newest.owned ? newest.index : 0;
    const T* const k_from = PRODUCTS ? kept(from + newest_row * a.q_row + (heads + kv_head) * a.q_head) : k_at;
    const T* const v_from = PRODUCTS ? k_from + a.kv_heads * WIDTH : v_at;
    const T *q_from[TILES], *cos_from[TILES], *sin_from[TILES];
    const bool holds_key = together && newest.owned;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const int column = min(tile * 8 + lane / 4, columns - 1), head = kv_head * a.group + column % a.group;
        const int of_row = holds_key ? newest.index : column / a.group;
        q_from[tile] = kept(holds_key ? k_from : from + of_row * a.q_row + head * a.q_head);
        if constexpr (PRODUCTS) {
            cos_from[tile] = kept(static_cast<const T*>(a.cos) + of_row * a.cos_row + inside);
            sin_from[tile] = kept(static_cast<const T*>(a.sin) + of_row * a.sin_row + inside);
        }
    }
    Head<LINES> q[TILES], norm, cos, sin;
    if constexpr (PRODUCTS) {
        load_head<LINES>(norm, static_cast<const T*>(holds_key ? a.k_norm : a.q_norm) + inside);
        load_head<LINES>(cos, cos_from[0]), load_head<LINES>(sin, sin_from[0]);
    }
    // The next launches ask for their weights behind this one's last keys, which all of them have to wait for.
    if (first + a.stages * ROUND >= length) let_dependents_start();
    join_cluster();
    wait_for_predecessor();

    load_head<LINES>(q[0], q_from[0]);
    if (owns) {
        load_head<LINES>(newest.v, v_from);
        if (!together) load_head<LINES>(newest.k, k_from);
    }
    if (works) {  // not before: q would stand behind these keys in the memory's queues
        int start = first + ROUND;
        for (int i = 1; i < a.stages && start < length; ++i, start += ROUND) fetch(i, start);
    }
    __syncwarp();
    if constexpr (PRODUCTS) norm_and_rotate<T>(q[0], norm, cos, sin, a.eps, a.tree);
    if constexpr (TILES == 2) {
        load_head<LINES>(q[1], q_from[1]);
        if constexpr (PRODUCTS) {
            load_head<LINES>(cos, cos_from[1]), load_head<LINES>(sin, sin_from[1]);
            norm_and_rotate<T>(q[1], norm, cos, sin, a.eps, a.tree);
        }
    }
    if constexpr (PRODUCTS) {
        if (owns && together) {
            memcpy(newest.k, q[0], sizeof(q[0]));
        } else if (owns) {
            load_head<LINES>(norm, static_cast<const T*>(a.k_norm) + inside);
            load_head<LINES>(cos, static_cast<const T*>(a.cos) + newest_row * a.cos_row + inside);
            load_head<LINES>(sin, static_cast<const T*>(a.sin) + newest_row * a.sin_row + inside);
            norm_and_rotate<T>(newest.k, norm, cos, sin, a.eps, a.tree);
        }
        if (newest.owned) store_head<LINES>(newest.k, k_at), store_head<LINES>(newest.v, v_at);
    }
    const unsigned wild = owns && a.rows > 1 ? newest.tame() : 0;

    int stage = 0, parity = 0;
    for (int start = first; start < length; start += ROUND) {
        const uint32_t place = ring + stage * Own::STAGE;
        wait_or_trap(full + 8 * stage, parity);
        __syncwarp();
        if (start + KEYS > past) newest.put(place, start, length, lane);
        typename Softmax<T, WIDTH, COLUMNS>::Keys keys;
        softmax.load(keys, place);
        if (start + a.stages * ROUND < length) {  // the stage is refilled once all lanes have read it
            const int free = after(stage, softmax.last_of(keys), unsigned(a.rows) >> 16);
            __syncwarp();
            if (works) fetch(free, start + a.stages * ROUND);
            if (start + (a.stages + 1) * ROUND >= length) let_dependents_start();
        }
        softmax.take(keys, q, start, a.scale, lane);
        if (++stage == a.stages) stage = 0, parity ^= 1;
    }
    softmax.finish(wild, past);
    __syncwarp();
    softmax.leave(ring, at.own() + warp * (Own::PAIRS * 16), pairs, lane);
    __syncthreads();

    // The slot's sums; every block gets its dimensions of them.
    const int dim = thread % WIDTH;
    for (int pair = thread / WIDTH; pair < pairs; pair += THREADS / WIDTH) {
        float4 found[WARPS];
        float2 sum = {}, weight[WARPS];
#pragma unroll
        for (int i = 0; i < WARPS; ++i) found[i] = shared_at<float4>(at.own() + (i * Own::PAIRS + pair) * 16);
        float4 slots = {-INFINITY, 0, -INFINITY, 0};
#pragma unroll
        for (int i = 0; i < WARPS; ++i) slots.x = fmaxf(slots.x, found[i].x), slots.z = fmaxf(slots.z, found[i].z);
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            const float2 part = shared_at<float2>(at.ring(i) + pair * Own::PITCH + dim * 8);
            weight[i] = {exp2_of(found[i].x - shift_of(slots.x)), exp2_of(found[i].z - shift_of(slots.z))};
            slots.y += weight[i].x * found[i].y, slots.w += weight[i].y * found[i].w;
            sum.x += weight[i].x * part.x, sum.y += weight[i].y * part.y;
        }
        if (a.sums != nullptr) {
            const int place = (kv_head * SLOTS + slot) * pairs + pair;
            a.sums[place * WIDTH + dim] = sum;
            if (dim == 0) a.stats[place] = slots;
            continue;
        }
        const int to = dim / Own::DIMS, place = (slot * Own::PAIRS + pair) * Own::DIMS + dim % Own::DIMS;
        send(there(at.received() + place * 8, to), sum.x, sum.y, there(at.exchange(), to));
        if (dim < SLOTS) {
            send(there(at.stats() + (slot * Own::PAIRS + pair) * 16, dim), slots, there(at.exchange(), dim));
        }
    }

    // This block's dimensions of all columns, from all slots in order.
    if (a.sums != nullptr) return;
    const int column = thread / Own::DIMS, own = thread % Own::DIMS;
    const int place = column / a.group * heads + kv_head * a.group + column % a.group;
    T* const out = kept(static_cast<T*>(a.out) + place * WIDTH + slot * Own::DIMS + own);
    wait_or_trap<true>(at.exchange(), 0);
    if (column >= columns) return;
    float2 found[SLOTS];
    float top = -INFINITY, sum = 0, total = 0;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        found[i] = shared_at<float2>(at.stats() + (i * Own::PAIRS * 2 + column) * 8);
        top = fmaxf(top, found[i].x);
    }
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        const int pair = i * Own::PAIRS + column / 2;
        const float weight = exp2_of(found[i].x - shift_of(top));
        total += weight * found[i].y;
        sum += weight * shared_at<float>(at.received() + (pair * Own::DIMS + own) * 8 + column % 2 * 4);
    }
    *out = narrow<T>(__fdividef(sum, total));
}

// All slots of one column, in order, by a thread for each dimension: the arithmetic of `attend`'s end.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(WIDTH) combine(const __grid_constant__ Arguments a) {
    const int columns = a.rows * a.group, pairs = (columns + 1) / 2, heads = a.kv_heads * a.group;
    const int column = blockIdx.x % columns, kv_head = blockIdx.x / columns, dim = threadIdx.x;
    wait_for_predecessor();
    let_dependents_start();
    float2 found[SLOTS];
    float part[SLOTS], top = -INFINITY, sum = 0, total = 0;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        const int place = (kv_head * SLOTS + i) * pairs + column / 2;
        found[i] = __ldcg(reinterpret_cast<const float2*>(a.stats + place) + column % 2);
        part[i] = __ldcg(reinterpret_cast<const float*>(a.sums + place * WIDTH + dim) + column % 2);
    }
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) top = fmaxf(top, found[i].x);
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        const float weight = exp2_of(found[i].x - shift_of(top));
        total += weight * found[i].y;
        sum += weight * part[i];
    }
    const int place = column / a.group * heads + kv_head * a.group + column % a.group;
    static_cast<T*>(a.out)[place * WIDTH + dim] = narrow<T>(__fdividef(sum, total));
}

struct Start {
    int spread, dependent;
    int* room;  // where it is given, nothing is launched: how many clusters the GPU can hold
    cudaStream_t stream;
};

cudaLaunchAttribute dependent_launch() {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return attribute;
}

template <typename T, int WIDTH>
cudaError_t start_combine(const Arguments& a, const Start& how) {
    cudaLaunchAttribute attribute = dependent_launch();
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(a.kv_heads * a.rows * a.group);
    config.blockDim = dim3(WIDTH);
    config.stream = how.stream;
    config.attrs = &attribute;
    config.numAttrs = how.dependent ? 1 : 0;
    return cudaLaunchKernelEx(&config, combine<T, WIDTH>, a);
}

template <typename T, int WIDTH, int COLUMNS, bool PRODUCTS>
const char* start(const Arguments& a, const Start& how) {
    const auto kernel = attend<T, WIDTH, COLUMNS, PRODUCTS>;
    const int bytes = Layout<WIDTH, COLUMNS>::bytes(a.stages);
    const bool apart = a.sums != nullptr;
    cudaLaunchAttribute attributes[3] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = SLOTS, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(SLOTS * a.kv_heads);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = bytes;
    config.stream = how.stream;
    config.attrs = attributes;
    config.numAttrs = apart ? 0 : 1;

    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    static int granted[64], room[64];  // shared memory granted on each device, and the clusters that then fit
    int &own = granted[device % 64], &fitting = room[device % 64];
    if (error == cudaSuccess && own < bytes) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error == cudaSuccess) {
            error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        }
        if (error == cudaSuccess) {
            error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
        }
        if (error == cudaSuccess) own = bytes, fitting = 0;
    }
    if (error == cudaSuccess && !apart && (fitting == 0 || how.room != nullptr)) {
        error = cudaOccupancyMaxActiveClusters(&fitting, kernel, &config);
    }
    if (error != cudaSuccess) return cudaGetErrorString(error);
    if (how.room != nullptr) {
        *how.room = fitting;
        return nullptr;
    }
    if (!apart && fitting == 0) return "the GPU has no room for a cluster of 16 blocks";

    auto& spread = attributes[config.numAttrs];
    spread.id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
    spread.val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicySpread;
    if (how.spread && !apart) ++config.numAttrs;
    if (how.dependent) attributes[config.numAttrs++] = dependent_launch();
    error = cudaLaunchKernelEx(&config, kernel, a);
    if (error == cudaSuccess && apart) error = start_combine<T, WIDTH>(a, how);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename T>
const char* start_width(const Arguments& a, int width, const Start& how) {
    const bool few = a.rows * a.group <= 8;
    if (a.q_norm != nullptr) return few ? start<T, 128, 8, true>(a, how) : start<T, 128, 16, true>(a, how);
    if (width == 128) return few ? start<T, 128, 8, false>(a, how) : start<T, 128, 16, false>(a, how);
    return few ? start<T, 64, 8, false>(a, how) : start<T, 64, 16, false>(a, how);
}

// A cache as [KV head][width / 64][key][64], in boxes of KEYS keys of one head.
bool describe(CUtensorMap* map, void* cache, long long head, long long row, int kv_heads, int capacity, int width) {
    const auto lines = static_cast<cuuint32_t>(width / 64);
    const cuuint64_t sizes[4] = {64, static_cast<cuuint64_t>(capacity), lines, static_cast<cuuint64_t>(kv_heads)};
    const cuuint64_t strides[3] = {static_cast<cuuint64_t>(row) * 2, 128, static_cast<cuuint64_t>(head) * 2};
    const cuuint32_t box[4] = {64, KEYS, lines, 1}, dense[4] = {1, 1, 1, 1};
    const auto encode = tensor_map_encoder();
    return encode != nullptr &&
           encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, cache, sizes, strides, box, dense,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace
}  // namespace cluster_attention

// Of q's norm and what follows it to `sin`, all or none is given; with them, q is the packed product. With `sums` and
// `stats` blocks run on their own.
extern "C" const char* decode_attention_cluster(
    const void* q, const void* q_norm, const void* k_norm, const void* cos, const void* sin, void* k, void* v,
    const void* row, void* out, void* sums, void* stats, long long q_row, long long q_head, long long k_head, long long k_row, long long v_head,
    long long v_row, long long cos_row, long long sin_row, float scale, float eps, int capacity, int rows, int group,
    int kv_heads, int width, int half, int stages, int ahead, int tree, int spread, int dependent, int* room,
    void* stream) {
    using namespace cluster_attention;
    if (stages < 2 || stages > MAX_STAGES) return "a warp's ring has 2 to 8 stages";
    if (rows < 1 || rows > 8 || group < 1 || rows * group > 16) return "1 to 8 rows, and 16 heads of them in a group";
    if (width != 128 && (width != 64 || q_norm != nullptr)) return "heads have 128 values, or 64 where q is given";
    Arguments a = {};
    if (!describe(&a.k_map, k, k_head, k_row, kv_heads, capacity, width) ||
        !describe(&a.v_map, v, v_head, v_row, kv_heads, capacity, width)) {
        return "the copy engine does not take this cache";
    }
    a.q = q, a.q_norm = q_norm, a.k_norm = k_norm, a.cos = cos, a.sin = sin, a.k = k, a.v = v, a.out = out;
    a.row = static_cast<const long long*>(row);
    a.q_row = q_row, a.q_head = q_head, a.k_head = k_head, a.k_row = k_row, a.v_head = v_head, a.v_row = v_row;
    a.cos_row = cos_row, a.sin_row = sin_row, a.scale = scale, a.eps = eps;
    a.capacity = capacity, a.rows = rows, a.group = group, a.kv_heads = kv_heads, a.stages = stages, a.ahead = ahead;
    a.tree = tree, a.sums = static_cast<float2*>(sums), a.stats = static_cast<float4*>(stats);
    const Start how = {spread, dependent, room, static_cast<cudaStream_t>(stream)};
    return half ? start_width<__half>(a, width, how) : start_width<__nv_bfloat16>(a, width, how);
}
