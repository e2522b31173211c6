// Every launch names its kernel's parameters in the order of its signature in vlmopt/kernels; grids are its launcher's.
#include "cuda_device.h"

#include <cmath>
#include <utility>

namespace vlmopt {
namespace {

int64_t blocks(int64_t values, int64_t block) { return (values + block - 1) / block; }

Form plain(const Linear& linear) { return linear.bias ? Form::bias : Form::plain; }

// Of a product of heads, as an exponent of 2.
float scale_of(int64_t width) { return static_cast<float>(1 / std::log(2.0) / std::sqrt(static_cast<double>(width))); }

Form added(const Linear& linear) { return linear.bias ? Form::bias_add : Form::add; }

}  // namespace

CudaDevice::CudaDevice(Dtype dtype, const std::string& driver, const std::string& products,
                       std::map<std::string, Kernel> kernels, Attention attention)
    : kernels_(std::move(kernels)), attention_(std::move(attention)), driver_(driver), products_(products, dtype) {
  if (dtype == Dtype::fp32) throw Error("attention on a GPU takes bfloat16 or float16, the model is float32");
}

void CudaDevice::freeze(const Vision& vision, const Text& text, char* scratch) {
  const auto freeze = [&](const Linear& linear, Form form) {
    products_.freeze(linear, form, scratch, kScratch, stream_);
  };
  const VisionBlock& block = vision.blocks.at(0);
  freeze(vision.patch, plain(vision.patch));
  for (const Linear& linear : {block.qkv, block.proj, block.fc2}) freeze(linear, plain(linear));
  freeze(block.fc1, Form::gelu);
  freeze(block.fc2, added(block.fc2));
  for (const Linear& linear : {vision.merger.fc1, vision.merger.fc2}) freeze(linear, plain(linear));
  const TextLayer& layer = text.layers.at(0);
  const int64_t values = 2 * text.kv_heads * text.head_width;
  const Linear query{layer.qkv.weight, layer.qkv.bias, layer.o.in, layer.qkv.in};
  const Linear rest{layer.qkv.weight, layer.qkv.bias, values, layer.qkv.in};
  for (const Linear& linear : {layer.qkv, query, rest, layer.o, layer.gate_up, layer.down}) {
    freeze(linear, plain(linear));
  }
  freeze(layer.down, added(layer.down));
}

void CudaDevice::linear(Rows x, const Linear& linear, Rows y) { product(x, linear, plain(linear), y); }

void CudaDevice::linear_add(Rows x, const Linear& linear, Rows h) { product(x, linear, added(linear), h); }

void CudaDevice::linear_gelu(Rows x, const Linear& linear, bool tanh, Rows y) {
  if (tanh) return product(x, linear, Form::gelu, y);
  product(x, linear, plain(linear), y);  // the library has no epilogue of the exact form
  const Kernel& k = kernel("gelu");
  launch(k, y.count, blocks(y.width, k.constant("BLOCK_N")), {y.data, y.width});
}

void CudaDevice::add_layer_norm(const Rows* x, Rows h, const Norm& norm, Rows y) {
  const Kernel* k = &kernel(x ? "add_layer_norm" : "layer_norm");
  if (h.width > k->constant("BLOCK_N")) k = &kernel("layer_norm_joined");
  const Rows& given = x ? *x : h;
  launch(*k, h.count, 1,
         {given.data, h.data, norm.weight, norm.bias, y.data, h.data, given.stride, h.stride, h.width,
          static_cast<float>(norm.eps)});
}

void CudaDevice::add_rms_norm(const Rows* x, Rows h, const Norm& norm, Rows y) {
  const Kernel& k = kernel(x ? "add_rms_norm" : "rms_norm");
  const Rows& given = x ? *x : h;
  const int64_t residual_stride = x ? h.stride : 0;
  launch(k, blocks(h.count, k.constant("BLOCK_M")), 1,
         {given.data, h.data, norm.weight, y.data, h.data, given.stride, residual_stride, static_cast<float>(norm.eps),
          h.count});
}

void CudaDevice::patch_embed(const VisionCall& call, const Vision& vision, Rows h) {
  product(call.pixels, vision.patch, plain(vision.patch), h);
  const Kernel& k = kernel("positions");
  launch(k, h.count, blocks(h.width, k.constant("BLOCK_N")),
         {h.data, vision.pos_embed, call.indices, call.taps, h.width});
}

void CudaDevice::vision_rotary(Rows qkv, const VisionCall& call, int64_t heads, Rows q, Rows k) {
  if (k.data != q.data + q.count * q.width * q.size) throw Error("q and k are no neighbours");
  const Kernel& rotate = kernel("rotate");
  launch(rotate, q.count, blocks(2 * heads, rotate.constant("BLOCK_HEADS")),
         {qkv.data, call.cos, call.sin, q.data, q.count, qkv.stride});
}

void CudaDevice::vision_attention(Rows q, Rows k, Rows v, const VisionCall& call, int64_t heads, Rows out) {
  const int64_t width = q.width / heads;
  launch(kernel("attend"), heads, call.n_tiles,
         {q.data, k.data, v.data, out.data, call.tiles, q.stride, width, k.stride, width, v.stride, width, out.stride,
          scale_of(width)});
}

void CudaDevice::merge_embeddings(const PrefillCall& call, const Text& text, Rows h) {
  const bool images = call.slots != nullptr;
  const Kernel& k = kernel(images ? "merge" : "embed");
  const int64_t programs = h.count * blocks(h.width, k.constant("BLOCK_N"));
  if (!images) {
    return launch(k, programs, 1,
                  {call.ids, text.embed, call.ids, text.embed, h.data, text.hidden, int64_t{0},
                   text.vocabulary, int64_t{0}});
  }
  launch(k, programs, 1,
         {call.ids, text.embed, call.slots, call.features.data, h.data, text.hidden, call.features.stride,
          text.vocabulary, call.features.count});
}

void CudaDevice::deepstack_add(Rows h, const PrefillCall& call, Rows features) {
  const Kernel& k = kernel("deepstack");
  // in place: a program reads a value before it writes it, and no other program touches it
  launch(k, h.count * blocks(h.width, k.constant("BLOCK_N")), 1,
         {h.data, call.slots, features.data, h.data, h.stride, features.stride, features.count});
}

void CudaDevice::qkv_norm_rope_cache(Rows q, Rows k, Rows v, const TextLayer& layer, Rows cos, Rows sin,
                                     const int64_t* rows, KV kv, Rows out) {
  const bool packed = q.width && k.data == q.data + q.width * q.size;
  const Kernel& kernel = this->kernel(packed ? "qkv" : q.width ? "qkv_apart" : "kv");
  const int64_t heads = kernel.constant("BLOCK_H");
  const int64_t programs = blocks(q.width / kv.width, heads) + 2 * blocks(kv.heads, heads);
  const char *keys = packed ? q.data : k.data, *values = packed ? q.data : v.data;  // offsets are constants if packed
  launch(kernel, k.count * programs, 1,
         {q.data, keys, values, layer.q_norm.weight, layer.k_norm.weight, cos.data, sin.data, rows, out.data, kv.k, kv.v,
          q.stride, k.stride, v.stride, cos.stride, sin.stride, kv.head_stride, kv.width, kv.head_stride, kv.width,
          static_cast<float>(layer.q_norm.eps), kv.capacity, nullptr});
}

void CudaDevice::prefill_attention(Rows q, KV kv, Rows out) {
  const Kernel& k = kernel("attend_causal");
  launch(k, q.width / kv.width, blocks(q.count, k.constant("BLOCK_M")),
         {q.data, kv.k, kv.v, out.data, q.stride, kv.width, kv.width, kv.head_stride, kv.width, kv.head_stride,
          out.stride, scale_of(kv.width), q.count});
}

Rows CudaDevice::last_attention(Rows q, KV kv, int64_t length, Rows) {
  ++launches_;
  return attention_(q, kv, length);
}

void CudaDevice::swiglu(Rows gate_up, Rows y) {
  const Kernel& k = kernel("swiglu");
  launch(k, y.count * blocks(y.width, k.constant("BLOCK_N")), 1,
         {gate_up.data, gate_up.data, y.data, gate_up.stride, gate_up.stride});
}

const Kernel& CudaDevice::kernel(const char* name) const {
  const auto found = kernels_.find(name);
  if (found == kernels_.end()) throw Error(std::string("no kernel is described as ") + name);
  return found->second;
}

void CudaDevice::launch(const Kernel& kernel, int64_t grid_x, int64_t grid_y,
                        std::initializer_list<Argument> arguments) {
  driver_.launch(kernel, grid_x, grid_y, arguments, stream_);
  ++launches_;
}

void CudaDevice::product(Rows x, const Linear& linear, Form form, Rows y) {
  products_.run(x, linear, form, y, stream_);
  ++launches_;
}

}  // namespace vlmopt
