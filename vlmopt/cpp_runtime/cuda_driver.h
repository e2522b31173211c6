// Launching loaded kernels through the CUDA driver. Knows neither torch nor Triton: a kernel is a handle and a layout.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>

namespace vlmopt {

// What cpp_runtime/kernels.py describes, where `layout` is explained.
struct Kernel {
  std::string name;
  uintptr_t function;
  unsigned warps, shared;
  bool dependent;
  std::string layout;
  std::map<std::string, int64_t> constants;

  int64_t constant(const char* of) const;
};

// One argument of a kernel: a pointer, an integer or a float.
class Argument {
 public:
  Argument(const void* pointer) : kind_('p'), bits_(reinterpret_cast<uintptr_t>(pointer)) {}
  Argument(int64_t value) : kind_('i'), bits_(static_cast<uint64_t>(value)) {}
  Argument(float value);

  // The bits as the kernel reads them, the low ones first.
  const uint64_t& bits() const { return bits_; }
  // Whether the kernel was compiled for such an argument; `letter` is of its layout.
  bool fits(char letter) const;

 private:
  char kind_;
  uint64_t bits_;
};

class Driver {
 public:
  explicit Driver(const std::string& library);

  // Launches grid_x × grid_y blocks on `stream`; a grid of nothing is left out.
  void launch(const Kernel& kernel, int64_t grid_x, int64_t grid_y, std::initializer_list<Argument> arguments,
              void* stream) const;

 private:
  void* launch_;  // cuLaunchKernelEx
  void* name_;    // cuGetErrorName
};

}  // namespace vlmopt
