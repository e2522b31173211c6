// The vision tower, step by step as stages/vision.py has it.
#include "loops.h"

namespace vlmopt {

VisionBuffers::VisionBuffers(const Vision& vision, int64_t patches, int64_t size, Carver& carver) {
  const int64_t hidden = vision.patch.out, group = vision.merge_size * vision.merge_size;
  h = carver.rows(patches, hidden, size);
  x = carver.rows(patches, hidden, size);
  y = carver.rows(patches, hidden, size);
  qkv = carver.rows(patches, 3 * hidden, size);
  const Rows rotated = carver.rows(2 * patches, hidden, size);  // neighbours, as the kernel writes them
  q = rotated.from(0, patches);
  k = rotated.from(patches, patches);
  wide = carver.rows(patches, vision.blocks.at(0).fc1.out, size);
  joined = carver.rows(patches / group, hidden * group, size);
  merged = carver.rows(patches / group, vision.merger.fc1.out, size);
}

VisionResults::VisionResults(const Vision& vision, int64_t patches, int64_t size, Carver& carver) {
  const int64_t tokens = patches / (vision.merge_size * vision.merge_size);
  features = carver.rows(tokens, vision.merger.fc2.out, size);
  for (const auto& [block, merger] : vision.deepstack) taps.push_back(carver.rows(tokens, merger.fc2.out, size));
}

namespace {

// Patches come in the order of the merge blocks, so the 2×2 shuffle joins neighbouring rows.
void merge(const Merger& merger, Rows out, VisionBuffers& b, Device& device) {
  const int64_t group = b.joined.width / b.h.width;
  if (merger.norm_after_shuffle) {
    device.add_layer_norm(nullptr, b.h.joined(group), merger.norm, b.joined);
  } else {
    device.add_layer_norm(nullptr, b.h, merger.norm, b.y);
  }
  device.linear_gelu(merger.norm_after_shuffle ? b.joined : b.y.joined(group), merger.fc1, false, b.merged);
  device.linear(b.merged, merger.fc2, out);
}

}  // namespace

void encode(const VisionCall& call, const Vision& vision, VisionBuffers& b, const VisionResult& result,
            Device& device) {
  const int64_t hidden = b.h.width, last = static_cast<int64_t>(vision.blocks.size()) - 1;
  size_t tap = 0;
  const Rows* pending = nullptr;  // what the next norm has to add to the residual stream first
  device.patch_embed(call, vision, b.h);
  for (int64_t index = 0; index <= last; ++index) {
    const VisionBlock& block = vision.blocks[index];
    device.add_layer_norm(pending, b.h, block.norm1, b.y);
    device.linear(b.y, block.qkv, b.qkv);
    device.vision_rotary(b.qkv, call, vision.heads, b.q, b.k);
    device.vision_attention(b.q, b.k, b.qkv.columns(2 * hidden, hidden), call, vision.heads, b.y);
    device.linear(b.y, block.proj, b.x);
    device.add_layer_norm(&b.x, b.h, block.norm2, b.y);
    device.linear_gelu(b.y, block.fc1, true, b.wide);
    const auto merger = vision.deepstack.find(index);
    if (merger == vision.deepstack.end() && index < last) {
      device.linear(b.wide, block.fc2, b.x);
      pending = &b.x;
      continue;
    }
    device.linear_add(b.wide, block.fc2, b.h);
    pending = nullptr;
    if (merger != vision.deepstack.end()) merge(merger->second, result.taps[tap++], b, device);
  }
  merge(vision.merger, result.features, b, device);
}

}  // namespace vlmopt
