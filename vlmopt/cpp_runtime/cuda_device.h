// The steps by launches on a GPU: Triton's kernels through the driver, cuBLASLt's products, and the attention that the
// bridge hands in. Free of torch.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "cuda_driver.h"
#include "cuda_products.h"
#include "device.h"

namespace vlmopt {

// The last query [1, Hq·D] over the first `length` rows of the cache; the result lives until the next call.
using Attention = std::function<Rows(Rows q, KV kv, int64_t length)>;

class CudaDevice final : public Device {
 public:
  static constexpr int64_t kProductWorkspace = 32 << 20;  // bytes, what the library advises for a Hopper
  static constexpr int64_t kScratch = 256 << 20;          // bytes, for some 9,000 rows of the widest product

  // `driver` and `products` are the names of the CUDA driver's and cuBLASLt's libraries.
  CudaDevice(Dtype dtype, const std::string& driver, const std::string& products, std::map<std::string, Kernel> kernels,
             Attention attention);

  void use_workspace(void* memory) { products_.use_workspace(memory, kProductWorkspace); }
  void use_stream(uintptr_t stream) { stream_ = reinterpret_cast<void*>(stream); }
  // Chooses the algorithms of all products; `scratch` [kScratch] is needed no longer than that.
  void freeze(const Vision& vision, const Text& text, char* scratch);

  void linear(Rows x, const Linear& linear, Rows y) override;
  void linear_add(Rows x, const Linear& linear, Rows h) override;
  void linear_gelu(Rows x, const Linear& linear, bool tanh, Rows y) override;
  void add_layer_norm(const Rows* x, Rows h, const Norm& norm, Rows y) override;
  void add_rms_norm(const Rows* x, Rows h, const Norm& norm, Rows y) override;
  int64_t attention_tile() const override { return kernel("attend").constant("BLOCK_M"); }
  void patch_embed(const VisionCall& call, const Vision& vision, Rows h) override;
  void vision_rotary(Rows qkv, const VisionCall& call, int64_t heads, Rows q, Rows k) override;
  void vision_attention(Rows q, Rows k, Rows v, const VisionCall& call, int64_t heads, Rows out) override;
  void merge_embeddings(const PrefillCall& call, const Text& text, Rows h) override;
  void deepstack_add(Rows h, const PrefillCall& call, Rows features) override;
  void qkv_norm_rope_cache(Rows q, Rows k, Rows v, const TextLayer& layer, Rows cos, Rows sin, const int64_t* rows,
                           KV kv, Rows out) override;
  void prefill_attention(Rows q, KV kv, Rows out) override;
  Rows last_attention(Rows q, KV kv, int64_t length, Rows out) override;
  void swiglu(Rows gate_up, Rows y) override;

 private:
  const Kernel& kernel(const char* name) const;
  void launch(const Kernel& kernel, int64_t grid_x, int64_t grid_y, std::initializer_list<Argument> arguments);
  void product(Rows x, const Linear& linear, Form form, Rows y);

  std::map<std::string, Kernel> kernels_;
  Attention attention_;
  Driver driver_;
  Products products_;
  void* stream_ = nullptr;
};

}  // namespace vlmopt
