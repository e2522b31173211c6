// The steps that the layer loops are made of. A device makes them: at::ops on a CPU, launches on a GPU.
#pragma once

#include "model.h"

namespace vlmopt {

class Device {
 public:
  virtual ~Device() = default;

  // Both: y = x · Wᵀ (+ b); then h + y in place of h, or the activation of y.
  virtual void linear(Rows x, const Linear& linear, Rows y) = 0;
  virtual void linear_add(Rows x, const Linear& linear, Rows h) = 0;
  virtual void linear_gelu(Rows x, const Linear& linear, bool tanh, Rows y) = 0;

  // h += x where x is given; y = norm(h).
  virtual void add_layer_norm(const Rows* x, Rows h, const Norm& norm, Rows y) = 0;
  virtual void add_rms_norm(const Rows* x, Rows h, const Norm& norm, Rows y) = 0;

  // Rows that a program of the attention kernel takes, by which its table is made; 0 where there is no table.
  virtual int64_t attention_tile() const { return 0; }
  virtual void patch_embed(const VisionCall& call, const Vision& vision, Rows h) = 0;
  virtual void vision_rotary(Rows qkv, const VisionCall& call, int64_t heads, Rows q, Rows k) = 0;
  virtual void vision_attention(Rows q, Rows k, Rows v, const VisionCall& call, int64_t heads, Rows out) = 0;

  virtual void merge_embeddings(const PrefillCall& call, const Text& text, Rows h) = 0;
  virtual void deepstack_add(Rows h, const PrefillCall& call, Rows features) = 0;

  // Norm, rotation and cache write; `rows` of the cache. `q` has no columns where only k and v are asked for.
  virtual void qkv_norm_rope_cache(Rows q, Rows k, Rows v, const TextLayer& layer, Rows cos, Rows sin,
                                   const int64_t* rows, KV kv, Rows out) = 0;
  virtual void prefill_attention(Rows q, KV kv, Rows out) = 0;
  // Gives back where the result lies: `out`, or memory of the library that lives until the next call.
  virtual Rows last_attention(Rows q, KV kv, int64_t length, Rows out) = 0;
  virtual void swiglu(Rows gate_up, Rows y) = 0;

  // Of steps on a CPU, of launches on a GPU.
  int64_t launches() const { return launches_; }

 protected:
  int64_t launches_ = 0;
};

}  // namespace vlmopt
