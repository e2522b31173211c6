// The layer loops of stages/vision.py and stages/prefill.py, and the buffers that they need, all of one workspace.
#pragma once

#include "device.h"

namespace vlmopt {

// Hands out pieces of a workspace; with a null base it only counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

  Rows rows(int64_t count, int64_t width, int64_t size) {
    return {take(count * width * size), count, width, width, size};
  }
  char* take(int64_t bytes) {
    char* piece = reinterpret_cast<char*>(base_ + static_cast<uintptr_t>(used_));
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kAlignment = 256;
  uintptr_t base_;
  int64_t used_ = 0;
};

struct VisionBuffers {
  VisionBuffers(const Vision& vision, int64_t patches, int64_t size, Carver& carver);

  Rows h, x, y;  // the residual stream, a product that is still to be added to it, and what a norm or attention gave
  Rows qkv, q, k, wide;
  Rows joined, merged;  // of the mergers
};

// Where features and taps go: memory of their own, since they outlive the buffers.
struct VisionResults : VisionResult {
  VisionResults(const Vision& vision, int64_t patches, int64_t size, Carver& carver);
};

struct PrefillBuffers {
  PrefillBuffers(const Text& text, int64_t length, int64_t size, Carver& carver);

  Rows h, x, y;  // as of vision
  Rows qkv, q, attended, gate_up, gated;
};

// Features and DeepStack taps of all patches, into `result`.
void encode(const VisionCall& call, const Vision& vision, VisionBuffers& buffers, const VisionResult& result,
            Device& device);

// Fills the cache and gives the last position's row [1, hidden], before the final norm, in the buffers' `h`.
Rows prefill(const PrefillCall& call, const Text& text, PrefillBuffers& buffers, Device& device);

}  // namespace vlmopt
