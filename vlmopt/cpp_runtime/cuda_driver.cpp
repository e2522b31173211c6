#include "cuda_driver.h"

#include <cuda.h>
#include <dlfcn.h>

#include <array>
#include <cstring>

#include "model.h"

namespace vlmopt {
namespace {

constexpr size_t kMostArguments = 32;
constexpr size_t kScratchPointers = 2;  // global and profile scratch, which Triton adds to every kernel
constexpr int64_t kMultiple = 16;
constexpr int64_t kWarp = 32;

}  // namespace

int64_t Kernel::constant(const char* of) const {
  const auto found = constants.find(of);
  if (found == constants.end()) throw Error("the kernel " + name + " has no constant " + of);
  return found->second;
}

Argument::Argument(float value) : kind_('f'), bits_(0) { std::memcpy(&bits_, &value, sizeof value); }

bool Argument::fits(char letter) const {
  const int64_t value = static_cast<int64_t>(bits_);
  switch (letter) {
    case 'P': return kind_ == 'p' && value % kMultiple == 0;
    case 'p': return kind_ == 'p';
    case 'I': return kind_ == 'i' && value % kMultiple == 0 && value == static_cast<int32_t>(value);
    case 'i': return kind_ == 'i' && value == static_cast<int32_t>(value);
    case 'L': return kind_ == 'i' && value % kMultiple == 0;
    case 'l': return kind_ == 'i';
    case 'f': return kind_ == 'f';
    case '-': return value == (kind_ == 'i' ? 1 : 0) && kind_ != 'f';
    default: return false;
  }
}

Driver::Driver(const std::string& library) {
  void* opened = dlopen(library.c_str(), RTLD_LAZY);
  if (!opened) throw Error(std::string("the CUDA driver cannot be loaded: ") + dlerror());
  launch_ = dlsym(opened, "cuLaunchKernelEx");
  name_ = dlsym(opened, "cuGetErrorName");
  if (!launch_ || !name_) throw Error("the CUDA driver is too old: it has no cuLaunchKernelEx");
}

void Driver::launch(const Kernel& kernel, int64_t grid_x, int64_t grid_y, std::initializer_list<Argument> arguments,
                    void* stream) const {
  if (grid_x == 0 || grid_y == 0) return;
  if (arguments.size() != kernel.layout.size() || arguments.size() > kMostArguments) {
    throw Error("the kernel " + kernel.name + " takes another number of arguments than it is given");
  }
  std::array<uint64_t, kMostArguments> values;
  std::array<void*, kMostArguments + kScratchPointers> parameters;
  size_t kept = 0, index = 0;
  for (const Argument& argument : arguments) {
    const char letter = kernel.layout[index++];
    if (!argument.fits(letter)) {
      throw Error("argument " + std::to_string(index) + " of the kernel " + kernel.name +
                               " is not of the kind " + letter + " that it was compiled for");
    }
    if (letter == '-') continue;
    values[kept] = argument.bits();
    parameters[kept] = &values[kept];
    ++kept;
  }
  void* no_scratch = nullptr;
  parameters[kept] = parameters[kept + 1] = &no_scratch;

  CUlaunchAttribute dependent{};
  dependent.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  dependent.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(grid_x);
  config.gridDimY = static_cast<unsigned>(grid_y);
  config.gridDimZ = 1;
  config.blockDimX = static_cast<unsigned>(kWarp * kernel.warps);
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = kernel.shared;
  config.hStream = static_cast<CUstream>(stream);
  config.attrs = &dependent;
  config.numAttrs = kernel.dependent ? 1 : 0;
  const auto launch = reinterpret_cast<decltype(&cuLaunchKernelEx)>(launch_);
  const CUresult result = launch(&config, reinterpret_cast<CUfunction>(kernel.function), parameters.data(), nullptr);
  if (result != CUDA_SUCCESS) {
    const char* name = nullptr;
    reinterpret_cast<decltype(&cuGetErrorName)>(name_)(result, &name);
    throw Error("the kernel " + kernel.name + " could not be launched: " + (name ? name : "unknown error"));
  }
}

}  // namespace vlmopt
