#include "cpu_device.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv3d.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>

#include <optional>
#include <utility>

namespace vlmopt {
namespace {

using at::Tensor;

at::ScalarType scalar(Dtype dtype) {
  return dtype == Dtype::fp32 ? at::kFloat : dtype == Dtype::bf16 ? at::kBFloat16 : at::kHalf;
}

Tensor view(const void* data, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  return at::from_blob(const_cast<void*>(data), sizes, strides, at::TensorOptions().dtype(type));
}

Tensor dense(const void* data, at::IntArrayRef sizes, at::ScalarType type) {
  return at::from_blob(const_cast<void*>(data), sizes, at::TensorOptions().dtype(type));
}

// Rotary embedding by halves of x [rows, heads, D] with cos and sin [rows, D].
Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const auto halves = x.chunk(2, -1);
  return x * cos.unsqueeze(1) + at::cat({-halves[1], halves[0]}, -1) * sin.unsqueeze(1);
}

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(Dtype dtype) : type_(scalar(dtype)) {}

  void linear(Rows x, const Linear& linear, Rows y) override { write(y, product(x, linear)); }

  void linear_add(Rows x, const Linear& linear, Rows h) override { write(h, of(h) + product(x, linear)); }

  void linear_gelu(Rows x, const Linear& linear, bool tanh, Rows y) override {
    write(y, at::gelu(product(x, linear), tanh ? "tanh" : "none"));
  }

  void add_layer_norm(const Rows* x, Rows h, const Norm& norm, Rows y) override {
    add(x, h);
    write(y, at::layer_norm(of(h), {h.width}, vector(norm.weight, h.width), vector(norm.bias, h.width), norm.eps));
  }

  void add_rms_norm(const Rows* x, Rows h, const Norm& norm, Rows y) override {
    add(x, h);
    write(y, rms_norm(of(h), norm, h.width));
  }

  void patch_embed(const VisionCall& call, const Vision& vision, Rows h) override {
    const auto& shape = vision.patch_shape;
    const Tensor pixels = of(call.pixels).view({-1, shape[0], shape[1], shape[2], shape[3]});
    const Tensor weight = dense(vision.patch.weight, {h.width, shape[0], shape[1], shape[2], shape[3]}, type_);
    const Tensor bias = vector(vision.patch.bias, h.width);
    const Tensor y = at::conv3d(pixels, weight, bias, {shape[1], shape[2], shape[3]}).view({-1, h.width});
    const Tensor indices = dense(call.indices, {h.count, 4}, at::kLong);
    const Tensor taps = dense(call.taps, {h.count, 4}, at::kFloat);
    const Tensor table = dense(vision.pos_embed, {vision.positions, h.width}, type_);
    const Tensor positions = (at::embedding(table, indices) * taps.unsqueeze(2)).sum(1);
    write(h, y + positions.to(type_));
  }

  void vision_rotary(Rows qkv, const VisionCall& call, int64_t heads, Rows q, Rows k) override {
    const int64_t width = q.width / heads;
    const Tensor cos = dense(call.cos, {q.count, width}, at::kFloat);
    const Tensor sin = dense(call.sin, {q.count, width}, at::kFloat);
    for (const auto& [from, to] : {std::pair{qkv.columns(0, q.width), q}, {qkv.columns(q.width, q.width), k}}) {
      of(to).copy_(rotate(of_heads(from, heads).to(at::kFloat), cos, sin).to(type_).flatten(1));
    }
    ++launches_;
  }

  void vision_attention(Rows q, Rows k, Rows v, const VisionCall& call, int64_t heads, Rows out) override {
    int64_t first = 0;
    for (const int64_t length : call.lengths) {
      const auto segment = [&](Rows x) {
        return of_heads(x, heads).transpose(0, 1).unsqueeze(0).narrow(2, first, length);
      };
      const Tensor attended = at::scaled_dot_product_attention(segment(q), segment(k), segment(v));
      of(out.from(first, length)).copy_(attended[0].transpose(0, 1).flatten(1));
      first += length;
    }
    ++launches_;
  }

  void merge_embeddings(const PrefillCall& call, const Text& text, Rows h) override {
    const Tensor embed = dense(text.embed, {text.vocabulary, text.hidden}, type_);
    Tensor x = at::embedding(embed, dense(call.ids, {call.length}, at::kLong));
    if (call.slots) x = at::where(visual(call), of_rows(call, call.features), x);
    write(h, x);
  }

  void deepstack_add(Rows h, const PrefillCall& call, Rows features) override {
    const Tensor hidden = of(h);
    write(h, at::where(visual(call), hidden + of_rows(call, features), hidden));
  }

  void qkv_norm_rope_cache(Rows q, Rows k, Rows v, const TextLayer& layer, Rows cos, Rows sin, const int64_t* rows,
                           KV kv, Rows out) override {
    const Tensor cosines = of(cos), sines = of(sin), positions = dense(rows, {k.count}, at::kLong);
    if (q.width) {
      const Tensor heads = of_heads(q, q.width / kv.width);
      of(out).copy_(rotate(rms_norm(heads, layer.q_norm, kv.width), cosines, sines).flatten(1));
    }
    const Tensor keys = rotate(rms_norm(of_heads(k, kv.heads), layer.k_norm, kv.width), cosines, sines);
    of_cache(kv.k, kv).index_copy_(1, positions, keys.transpose(0, 1));
    of_cache(kv.v, kv).index_copy_(1, positions, of_heads(v, kv.heads).transpose(0, 1));
    ++launches_;
  }

  void prefill_attention(Rows q, KV kv, Rows out) override { attend(q, kv, q.count, out); }

  Rows last_attention(Rows q, KV kv, int64_t length, Rows out) override { return attend(q, kv, length, out); }

  void swiglu(Rows gate_up, Rows y) override {
    write(y, at::silu(of(gate_up.columns(0, y.width))) * of(gate_up.columns(y.width, y.width)));
  }

 private:
  Tensor of(Rows x) const { return view(x.data, {x.count, x.width}, {x.stride, 1}, type_); }

  Tensor of_heads(Rows x, int64_t heads) const {
    const int64_t width = x.width / heads;
    return view(x.data, {x.count, heads, width}, {x.stride, width, 1}, type_);
  }

  Tensor of_cache(char* data, KV kv) const {
    return view(data, {kv.heads, kv.capacity, kv.width}, {kv.head_stride, kv.width, 1}, type_);
  }

  Tensor vector(const void* data, int64_t width) const { return dense(data, {width}, type_); }

  Tensor slots(const PrefillCall& call) const { return dense(call.slots, {call.length}, at::kInt); }

  Tensor visual(const PrefillCall& call) const { return slots(call).ge(0).unsqueeze(1); }

  // To each row its feature, and any to those that have none.
  Tensor of_rows(const PrefillCall& call, Rows features) const {
    return of(features).index_select(0, slots(call).clamp_min(0));
  }

  Tensor product(Rows x, const Linear& linear) const {
    std::optional<Tensor> bias;
    if (linear.bias) bias = vector(linear.bias, linear.out);
    return at::linear(of(x), dense(linear.weight, {linear.out, linear.in}, type_), bias);
  }

  Tensor rms_norm(const Tensor& x, const Norm& norm, int64_t width) const {
    const Tensor x32 = x.to(at::kFloat);
    const Tensor y = x32 * at::rsqrt(x32.pow(2).mean(-1, true) + norm.eps);
    return vector(norm.weight, width) * y.to(type_);
  }

  Rows attend(Rows q, KV kv, int64_t length, Rows out) {
    const Tensor query = of_heads(q, q.width / kv.width).transpose(0, 1).unsqueeze(0);
    const auto live = [&](char* data) { return of_cache(data, kv).narrow(1, 0, length).unsqueeze(0); };
    const Tensor attended = at::scaled_dot_product_attention(query, live(kv.k), live(kv.v), {}, 0.0, q.count > 1,
                                                             std::nullopt, /*enable_gqa=*/true);
    write(out, attended[0].transpose(0, 1).flatten(1));
    return out;
  }

  void add(const Rows* x, Rows h) {
    if (x) of(h).copy_(of(h) + of(*x));
  }

  void write(Rows y, const Tensor& value) {
    of(y).copy_(value);
    ++launches_;
  }

  at::ScalarType type_;
};

}  // namespace

std::unique_ptr<Device> cpu_device(Dtype dtype) { return std::make_unique<CpuDevice>(dtype); }

}  // namespace vlmopt
