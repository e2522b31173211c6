#include "grid.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace vlmopt {
namespace {

constexpr int64_t kTaps = 4;

// Where one position of an axis lies on the position embedding's axis: two neighbours and their weights.
struct Tap {
  int64_t index[2];
  float weight[2];
};

// An axis of `side` stretched over `size`, corners aligned; in fp32 and in the reference's order.
std::vector<Tap> taps_of(int64_t size, int64_t side) {
  std::vector<Tap> taps(size);
  for (int64_t i = 0; i < size; ++i) {
    const float scaled = static_cast<float>(i) * static_cast<float>(side - 1);
    const float source = scaled / static_cast<float>(std::max<int64_t>(size - 1, 1)), floor = std::floor(source);
    for (int64_t tap = 0; tap < 2; ++tap) {
      const float distance = std::fabs(source - floor - static_cast<float>(tap));
      taps[i].index[tap] = std::clamp<int64_t>(static_cast<int64_t>(floor) + tap, 0, side - 1);
      taps[i].weight[tap] = std::max(1.0f - distance, 0.0f);
    }
  }
  return taps;
}

void fill_tiles(const std::vector<int64_t>& segments, int64_t block, int32_t* tiles) {
  std::vector<int64_t> starts(segments.size()), order(segments.size());
  std::exclusive_scan(segments.begin(), segments.end(), starts.begin(), int64_t{0});
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return segments[a] > segments[b]; });
  for (const int64_t segment : order) {
    const int64_t end = starts[segment] + segments[segment];
    for (int64_t row = starts[segment]; row < end; row += block) {
      *tiles++ = static_cast<int32_t>(row);
      *tiles++ = static_cast<int32_t>(starts[segment]);
      *tiles++ = static_cast<int32_t>(end);
    }
  }
}

}  // namespace

int64_t patches_of(const std::vector<Grid>& grids) {
  int64_t patches = 0;
  for (const auto& [frames, height, width] : grids) patches += frames * height * width;
  return patches;
}

std::vector<int64_t> segments_of(const std::vector<Grid>& grids) {
  std::vector<int64_t> segments;
  for (const auto& [frames, height, width] : grids) segments.insert(segments.end(), frames, height * width);
  return segments;
}

int64_t tiles_of(const std::vector<int64_t>& segments, int64_t block) {
  int64_t tiles = 0;
  for (const int64_t segment : segments) tiles += block ? (segment + block - 1) / block : 0;
  return tiles;
}

GridBuffers::GridBuffers(int64_t patches, int64_t n_tiles, Carver& carver)
    : indices(reinterpret_cast<int64_t*>(carver.take(kTaps * patches * static_cast<int64_t>(sizeof(int64_t))))),
      taps(reinterpret_cast<float*>(carver.take(kTaps * patches * static_cast<int64_t>(sizeof(float))))),
      places(reinterpret_cast<float*>(carver.take(kTaps * patches * static_cast<int64_t>(sizeof(float))))),
      tiles(reinterpret_cast<int32_t*>(carver.take(3 * n_tiles * static_cast<int64_t>(sizeof(int32_t))))) {}

void fill(const std::vector<Grid>& grids, int64_t merge, int64_t side, int64_t block, const GridBuffers& buffers) {
  int64_t* index = buffers.indices;
  float *weight = buffers.taps, *place = buffers.places;
  const auto patch = [&](const std::vector<Tap>& rows, const std::vector<Tap>& columns, int64_t row, int64_t column) {
    for (int64_t tap = 0; tap < kTaps; ++tap) {
      *index++ = rows[row].index[tap / 2] * side + columns[column].index[tap % 2];
      *weight++ = rows[row].weight[tap / 2] * columns[column].weight[tap % 2];
      *place++ = static_cast<float>(tap % 2 ? column : row);
    }
  };
  for (const auto& [frames, height, width] : grids) {
    if (height % merge || width % merge) throw Error("an image's grid is no multiple of the merge size");
    const std::vector<Tap> rows = taps_of(height, side), columns = taps_of(width, side);
    for (int64_t frame = 0; frame < frames; ++frame) {
      for (int64_t top = 0; top < height; top += merge) {
        for (int64_t left = 0; left < width; left += merge) {
          for (int64_t cell = 0; cell < merge * merge; ++cell) {
            patch(rows, columns, top + cell / merge, left + cell % merge);
          }
        }
      }
    }
  }
  if (block) fill_tiles(segments_of(grids), block, buffers.tiles);
}

}  // namespace vlmopt
