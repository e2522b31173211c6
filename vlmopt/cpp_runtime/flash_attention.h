// The library's FlashAttention-2 (Dao, 2023) through ATen, at any length without a plan.
#pragma once

#include <ATen/core/Tensor.h>

#include "cuda_device.h"

namespace vlmopt {

// `options` say the dtype and the device of q and the cache.
Attention flash_attention(const at::TensorOptions& options);

}  // namespace vlmopt
