// The steps by ATen's operators on the CPU, rounded where the references in vlmopt/kernels round.
#pragma once

#include <memory>

#include "device.h"

namespace vlmopt {

std::unique_ptr<Device> cpu_device(Dtype dtype);

}  // namespace vlmopt
