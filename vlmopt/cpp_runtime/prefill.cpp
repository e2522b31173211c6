// The prompt through the decoder, step by step as stages/prefill.py has it with `narrow`.
#include "loops.h"

namespace vlmopt {

PrefillBuffers::PrefillBuffers(const Text& text, int64_t length, int64_t size, Carver& carver) {
  const TextLayer& layer = text.layers.at(0);
  h = carver.rows(length, text.hidden, size);
  x = carver.rows(length, text.hidden, size);
  y = carver.rows(length, text.hidden, size);
  qkv = carver.rows(length, layer.qkv.out, size);
  q = carver.rows(length, layer.o.in, size);
  attended = carver.rows(length, layer.o.in, size);
  gate_up = carver.rows(length, layer.gate_up.out, size);
  gated = carver.rows(length, layer.down.in, size);
}

namespace {

// The MLP over `rows` rows from `first` on, from the attention's output to the product that is to be added to h.
Rows mlp(const TextLayer& layer, int64_t first, int64_t rows, PrefillBuffers& b, Device& device) {
  const Rows x = b.x.from(first, rows), y = b.y.from(first, rows), gated = b.gated.from(first, rows);
  const Rows gate_up = b.gate_up.from(first, rows);
  device.add_rms_norm(&x, b.h.from(first, rows), layer.post_norm, y);
  device.linear(y, layer.gate_up, gate_up);
  device.swiglu(gate_up, gated);
  return gated;
}

// Keys and values of all rows, everything else of the last one alone: no other row's result is read.
void last_layer(const PrefillCall& call, const TextLayer& layer, KV kv, PrefillBuffers& b, Device& device) {
  const int64_t queries = layer.o.in, values = kv.heads * kv.width, last = call.length - 1;
  const Rows product{b.qkv.data, call.length, 2 * values, 2 * values, b.qkv.size};
  const Rows k = product.columns(0, values), v = product.columns(values, values);
  device.linear(b.y, layer.qkv.outputs(queries, 2 * values, b.y.size), product);
  device.qkv_norm_rope_cache(k.columns(0, 0), k, v, layer, call.cos, call.sin, call.rows, kv, k.columns(0, 0));
  const Rows query = b.attended.last(), q = b.q.last();
  device.linear(b.y.last(), layer.qkv.outputs(0, queries, b.y.size), query);
  device.qkv_norm_rope_cache(query, k.last(), v.last(), layer, call.cos.last(), call.sin.last(), call.rows,
                             kv.from(last), q);  // row 0 of a cache that begins at the last row
  const Rows attended = device.last_attention(q, kv, call.length, b.attended.last());
  device.linear(attended, layer.o, b.x.last());
  device.linear_add(mlp(layer, last, 1, b, device), layer.down, b.h.last());
}

}  // namespace

Rows prefill(const PrefillCall& call, const Text& text, PrefillBuffers& b, Device& device) {
  const size_t last = text.layers.size() - 1;
  const int64_t queries = text.heads * text.head_width, values = text.kv_heads * text.head_width;
  const Rows* pending = nullptr;  // what the next norm has to add to the residual stream first
  device.merge_embeddings(call, text, b.h);
  for (size_t index = 0; index <= last; ++index) {
    const TextLayer& layer = text.layers[index];
    const KV kv = call.cache.layer(static_cast<int64_t>(index));
    device.add_rms_norm(pending, b.h, layer.input_norm, b.y);
    if (index == last && index >= call.deepstack.size()) {
      last_layer(call, layer, kv, b, device);
      break;
    }
    device.linear(b.y, layer.qkv, b.qkv);
    device.qkv_norm_rope_cache(b.qkv.columns(0, queries), b.qkv.columns(queries, values),
                               b.qkv.columns(queries + values, values), layer, call.cos, call.sin, call.rows, kv, b.q);
    device.prefill_attention(b.q, kv, b.attended);
    device.linear(b.attended, layer.o, b.x);
    const Rows gated = mlp(layer, 0, call.length, b, device);
    if (index < call.deepstack.size()) {
      device.linear_add(gated, layer.down, b.h);
      device.deepstack_add(b.h, call, call.deepstack[index]);
      pending = nullptr;
    } else {
      device.linear(gated, layer.down, b.x);
      pending = &b.x;
    }
  }
  return b.h.last();
}

}  // namespace vlmopt
