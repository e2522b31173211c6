// What the vision tower needs to know of the images' grids, computed on the host; stages/tables.py is the reference.
#pragma once

#include <array>

#include "loops.h"

namespace vlmopt {

// Frames, rows and columns of one image, in patches.
using Grid = std::array<int64_t, 3>;

int64_t patches_of(const std::vector<Grid>& grids);

// Patches of every attention segment: one frame of one image.
std::vector<int64_t> segments_of(const std::vector<Grid>& grids);

// Attention tiles of `block` rows; none where `block` is 0.
int64_t tiles_of(const std::vector<int64_t>& segments, int64_t block);

struct GridBuffers {
  GridBuffers(int64_t patches, int64_t tiles, Carver& carver);

  int64_t* indices;  // [N, 4] into the position embedding
  float* taps;       // [N, 4] their weights
  float* places;     // [N, 4] row, column, row, column: what an angle is a multiple of
  int32_t* tiles;    // [tiles, 3] first row, and its segment's first row and end; the longest segments come first
};

// Fills the buffers, which lie in host memory. Patches come in the order of the merge blocks.
void fill(const std::vector<Grid>& grids, int64_t merge, int64_t side, int64_t block, const GridBuffers& buffers);

}  // namespace vlmopt
