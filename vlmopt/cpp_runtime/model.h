// What crosses the bridge, as plain structs of pointers and numbers: the model's weights and the arguments of a call.
// Nothing here knows torch; whoever fills a struct keeps its memory alive.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <vector>

namespace vlmopt {

// What a caller can put right, in one sentence; Python sees a VlmoptError.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Dtype { fp32, bf16, fp16 };

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

// `count` rows of `width` values, `stride` values apart.
struct Rows {
  char* data = nullptr;
  int64_t count = 0, width = 0, stride = 0, size = 0;  // `size` of a value in bytes

  Rows from(int64_t first, int64_t rows) const { return {data + first * stride * size, rows, width, stride, size}; }
  Rows last() const { return from(count - 1, 1); }
  Rows columns(int64_t first, int64_t columns) const { return {data + first * size, count, columns, stride, size}; }
  // Every `group` neighbouring rows as one, where they lie densely.
  Rows joined(int64_t group) const { return {data, count / group, width * group, stride * group, size}; }
};

struct Norm {
  const void *weight, *bias;  // no bias: RMSNorm
  double eps;
};

struct Linear {
  const char *weight, *bias;  // [out, in] dense, and [out] or null
  int64_t out, in;

  Linear outputs(int64_t first, int64_t count, int64_t size) const {
    return {weight + first * in * size, bias ? bias + first * size : nullptr, count, in};
  }
};

struct VisionBlock {
  Norm norm1;
  Linear qkv, proj;
  Norm norm2;
  Linear fc1, fc2;
};

struct Merger {
  Norm norm;
  bool norm_after_shuffle;
  Linear fc1, fc2;
};

struct Vision {
  Linear patch;                      // the convolution's weight as [hidden, values of a patch]
  std::vector<int64_t> patch_shape;  // [channels, frames, height, width]
  const void* pos_embed;
  int64_t positions;  // rows of pos_embed
  std::vector<VisionBlock> blocks;
  Merger merger;
  std::map<int64_t, Merger> deepstack;  // by the block that it follows
  int64_t heads, merge_size;
  int64_t side;  // of the square that pos_embed is
};

struct TextLayer {
  Norm input_norm;
  Linear qkv;  // packed: q, k, v
  Norm q_norm, k_norm;
  Linear o;
  Norm post_norm;
  Linear gate_up;  // packed: gate, up
  Linear down;
};

struct Text {
  const void* embed;
  int64_t vocabulary, hidden;
  std::vector<TextLayer> layers;
  int64_t heads, kv_heads, head_width;
};

// One layer's keys and values [Hkv, capacity, D], the heads `head_stride` values apart.
struct KV {
  char *k, *v;
  int64_t heads, capacity, width, head_stride, size;

  // What begins at cache row `row`.
  KV from(int64_t row) const {
    const int64_t skipped = row * width * size;
    return {k + skipped, v + skipped, heads, capacity - row, width, head_stride, size};
  }
};

// [layers, 2, Hkv, capacity, D]; the rows of a head are dense, everything else may lie apart.
struct Cache {
  char* data;
  int64_t heads, capacity, width, layer_stride, kind_stride, head_stride, size;

  KV layer(int64_t index) const {
    char* k = data + index * layer_stride * size;
    return {k, k + kind_stride * size, heads, capacity, width, head_stride, size};
  }
};

// The patches of all images of a prompt, and the table of their grids.
struct VisionCall {
  Rows pixels;                   // in the model's dtype
  const int64_t* indices;        // [N, 4]
  const float *taps, *cos, *sin; // [N, 4], [N, D], [N, D]
  std::vector<int64_t> lengths;  // patches of every attention segment
  const int32_t* tiles;          // [n_tiles, 3], for the attention kernel; a CPU needs none
  int64_t n_tiles;
};

struct VisionResult {
  Rows features;
  std::vector<Rows> taps;
};

struct PrefillCall {
  const int64_t* ids;
  int64_t length;
  const int32_t* slots;  // of every row its feature or -1; null for a prompt without images
  Rows features;
  std::vector<Rows> deepstack;
  Rows cos, sin;        // [T, D] in the model's dtype
  const int64_t* rows;  // cache rows to write, 0 … T − 1
  Cache cache;
};

}  // namespace vlmopt
