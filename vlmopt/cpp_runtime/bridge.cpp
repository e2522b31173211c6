// The only file that both Python and the loops can see: tensors in, plain structs down, tensors of one workspace out.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <string>

#include "cpu_device.h"
#include "grid.h"
#include "loops.h"
#ifdef VLMOPT_CUDA
#include "cuda_device.h"
#include "flash_attention.h"
#endif

namespace vlmopt {
namespace {

namespace py = pybind11;
using at::Tensor;

Dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Dtype::fp32;
    case at::kBFloat16: return Dtype::bf16;
    case at::kHalf: return Dtype::fp16;
    default: throw Error("weights are neither float32, bfloat16 nor float16; use one of these dtypes");
  }
}

Tensor tensor_at(py::handle object, const char* name) { return object.attr(name).cast<Tensor>(); }

bool is_none(py::handle object, const char* name) { return object.attr(name).is_none(); }

// Reads weights by the names that vlmopt/weights.py gives them, and keeps their tensors alive.
class Reader {
 public:
  explicit Reader(std::vector<Tensor>& kept) : kept_(kept) {}

  const char* pointer(py::handle object, const char* name) {
    if (is_none(object, name)) return nullptr;
    Tensor tensor = tensor_at(object, name);
    if (!tensor.is_contiguous()) {
      throw Error(std::string("the weight ") + name + " is not dense; call .contiguous() first");
    }
    kept_.push_back(tensor);
    return static_cast<const char*>(tensor.data_ptr());
  }

  Norm norm(py::handle norm) {
    return {pointer(norm, "weight"), pointer(norm, "bias"), norm.attr("eps").cast<double>()};
  }

  Linear linear(py::handle linear) {
    const Tensor weight = tensor_at(linear, "weight");
    return {pointer(linear, "weight"), pointer(linear, "bias"), weight.size(0), weight[0].numel()};
  }

  Linear packed(py::handle linears) {
    const auto parts = linears.cast<py::tuple>();
    if (parts.size() != 1) throw Error("q/k/v or gate/up are not packed; switch `packed` on");
    return linear(parts[0]);
  }

  Merger merger(py::handle merger) {
    return {norm(merger.attr("norm")), merger.attr("norm_after_shuffle").cast<bool>(), linear(merger.attr("fc1")),
            linear(merger.attr("fc2"))};
  }

  Vision vision(py::handle weights) {
    Vision vision;
    vision.patch = linear(weights.attr("patch"));
    const Tensor patch = tensor_at(weights.attr("patch"), "weight"), positions = tensor_at(weights, "pos_embed");
    vision.patch_shape = patch.sizes().slice(1).vec();
    vision.pos_embed = pointer(weights, "pos_embed");
    vision.positions = positions.size(0);
    for (const auto& b : weights.attr("blocks")) {
      vision.blocks.push_back({norm(b.attr("norm1")), linear(b.attr("qkv")), linear(b.attr("proj")),
                               norm(b.attr("norm2")), linear(b.attr("fc1")), linear(b.attr("fc2"))});
    }
    vision.merger = merger(weights.attr("merger"));
    for (const auto& [block, tap] : weights.attr("deepstack").cast<py::dict>()) {
      vision.deepstack.emplace(block.cast<int64_t>(), merger(tap));
    }
    vision.heads = weights.attr("n_heads").cast<int64_t>();
    vision.merge_size = weights.attr("merge_size").cast<int64_t>();
    vision.side = weights.attr("side").cast<int64_t>();
    return vision;
  }

  Text text(py::handle weights) {
    Text text;
    const Tensor embed = tensor_at(weights, "embed");
    text.embed = pointer(weights, "embed");
    text.vocabulary = embed.size(0);
    text.hidden = embed.size(1);
    for (const auto& l : weights.attr("layers")) {
      text.layers.push_back({norm(l.attr("input_norm")), packed(l.attr("qkv")), norm(l.attr("q_norm")),
                             norm(l.attr("k_norm")), linear(l.attr("o")), norm(l.attr("post_norm")),
                             packed(l.attr("gate_up")), linear(l.attr("down"))});
    }
    text.heads = weights.attr("n_heads").cast<int64_t>();
    text.kv_heads = weights.attr("n_kv_heads").cast<int64_t>();
    text.head_width = weights.attr("head_dim").cast<int64_t>();
    return text;
  }

 private:
  std::vector<Tensor>& kept_;
};

// Dense, and at an address that every kernel can take; outside tensors may be neither.
Tensor aligned(const Tensor& tensor) {
  const bool fits = tensor.is_contiguous() && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  return fits ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

Rows rows_of(const Tensor& tensor) {
  if (tensor.dim() != 2 || !tensor.is_contiguous()) throw Error("an argument is not a dense matrix");
  return {static_cast<char*>(tensor.data_ptr()), tensor.size(0), tensor.size(1), tensor.size(1), tensor.element_size()};
}

template <typename T>
const T* data_of(const Tensor& tensor, int64_t count) {
  if (!tensor.is_contiguous() || tensor.numel() != count) throw Error("an argument has the wrong size");
  return tensor.const_data_ptr<T>();
}

// One model on one device. Not for two threads at once: the caller holds the engine's lock.
class Runtime {
 public:
  // `weights` is vlmopt.weights.Weights; `gpu` is vlmopt.cpp_runtime.kernels.Gpu, or None on a CPU.
  Runtime(py::handle weights, py::object gpu) {
    const Tensor embed = tensor_at(weights.attr("text"), "embed");
    options_ = embed.options();
    dtype_ = dtype_of(embed);
    Reader reader(kept_);
    vision_ = reader.vision(weights.attr("vision"));
    inv_freq_ = tensor_at(weights.attr("vision"), "inv_freq").to(at::kFloat);
    text_ = reader.text(weights.attr("text"));
    axes_ = at::tensor(axes_of(weights.attr("text").attr("mrope_section").cast<std::vector<int64_t>>()),
                       options_.dtype(at::kLong));
    if (gpu.is_none()) {
      device_ = cpu_device(dtype_);
      return;
    }
#ifdef VLMOPT_CUDA
    auto cuda = std::make_unique<CudaDevice>(dtype_, gpu.attr("driver").cast<std::string>(),
                                             gpu.attr("products").cast<std::string>(),
                                             read_kernels(gpu.attr("kernels")), flash_attention(options_));
    workspace_ = at::empty({CudaDevice::kProductWorkspace}, options_.dtype(at::kByte));
    cuda->use_workspace(workspace_.data_ptr());
    cuda->use_stream(gpu.attr("stream").cast<uintptr_t>());
    const Tensor scratch = at::empty({CudaDevice::kScratch}, options_.dtype(at::kByte));
    cuda->freeze(vision_, text_, static_cast<char*>(scratch.data_ptr()));
    cuda_ = cuda.get();
    device_ = std::move(cuda);
#else
    throw Error("this library was built without the CUDA headers; install the CUDA toolkit and rebuild it");
#endif
  }

  // `call` is vlmopt.cpp_runtime.bridge.VisionCall; returns the features and the DeepStack taps.
  std::pair<Tensor, std::vector<Tensor>> encode(py::handle call) {
    const at::NoGradGuard no_grad;
    const Tensor given = tensor_at(call, "pixels"), pixels = aligned(given.to(options_.dtype()));
    if (given.scalar_type() != pixels.scalar_type()) ++other_launches_;
    const auto grids = call.attr("grids").cast<std::vector<Grid>>();
    const int64_t patches = patches_of(grids);
    if (pixels.dim() != 2 || pixels.size(0) != patches || pixels.size(1) != vision_.patch.in) {
      throw Error("pixels do not fit the grids and the patches of this model");
    }
    const std::vector<int64_t> segments = segments_of(grids);
    const int64_t tile = device_->attention_tile(), tiles = tiles_of(segments, tile);
    const Tensor table = grid_table(grids, tile, tiles);
    Carver table_carver(table.data_ptr());
    const GridBuffers grid(patches, tiles, table_carver);
    const Tensor places = at::from_blob(grid.places, {patches, 4, 1}, options_.dtype(at::kFloat));
    const Tensor angles = (places * inv_freq_).flatten(1), cos = angles.cos(), sin = angles.sin();
    other_launches_ += 3;
    const float *cosines = cos.const_data_ptr<float>(), *sines = sin.const_data_ptr<float>();
    const VisionCall down{rows_of(pixels), grid.indices, grid.taps, cosines, sines, segments, grid.tiles, tiles};
    const auto [kept, results] = carved<VisionResults>(vision_, patches);
    auto [memory, buffers] = carved<VisionBuffers>(vision_, patches);
    begin(call);
    vlmopt::encode(down, vision_, buffers, results, *device_);
    std::vector<Tensor> taps;
    for (const Rows& tap : results.taps) taps.push_back(view_of(kept, tap));
    return {view_of(kept, results.features), taps};
  }

  // `call` is vlmopt.cpp_runtime.bridge.PrefillCall; fills the cache and returns the last row, before the final norm.
  Tensor prefill(py::handle call) {
    const at::NoGradGuard no_grad;
    const Tensor ids = aligned(tensor_at(call, "ids")), cache = tensor_at(call, "cache");
    const int64_t length = ids.numel(), layers = static_cast<int64_t>(text_.layers.size());
    const Tensor positions = tensor_at(call, "positions");
    if (positions.dim() != 2 || positions.size(0) != 3 || positions.size(1) != length) {
      throw Error("the positions are not three for each token");
    }
    // by every column's own axis, looked up in the table of all positions
    const Tensor places = on_device(positions).index_select(0, axes_).t();
    const Tensor cos = tensor_at(call, "cos").gather(0, places), sin = tensor_at(call, "sin").gather(0, places);
    const Tensor rows = at::arange(length, options_.dtype(at::kLong));
    other_launches_ += 4;
    PrefillCall down{};
    down.ids = data_of<int64_t>(ids, length);
    down.length = length;
    down.cos = rows_of(cos);
    down.sin = rows_of(sin);
    down.rows = rows.const_data_ptr<int64_t>();
    Tensor slots;
    if (!is_none(call, "slots")) {
      slots = on_device(tensor_at(call, "slots"));
      down.features = rows_of(tensor_at(call, "features"));
      down.slots = data_of<int32_t>(slots, length);
      for (const auto& tap : call.attr("deepstack")) down.deepstack.push_back(rows_of(tap.cast<Tensor>()));
    }
    const bool fits = cache.dim() == 5 && cache.size(0) >= layers && cache.size(1) == 2 &&
                      cache.size(2) == text_.kv_heads && cache.size(3) >= length && cache.size(4) == text_.head_width &&
                      cache.stride(3) == text_.head_width && cache.stride(4) == 1;
    if (!fits) throw Error("the cache does not fit this model and prompt");
    down.cache = {static_cast<char*>(cache.data_ptr()), text_.kv_heads, cache.size(3), text_.head_width,
                  cache.stride(0), cache.stride(1), cache.stride(2), size_of(dtype_)};
    auto [memory, buffers] = carved<PrefillBuffers>(text_, length);
    begin(call);
    return view_of(memory, vlmopt::prefill(down, text_, buffers, *device_));
  }

  // Steps on a CPU, launches on a GPU, since the runtime was made.
  int64_t launches() const { return device_->launches() + other_launches_; }

 private:
  // The grids' table on the model's device; the copy there does not wait.
  Tensor grid_table(const std::vector<Grid>& grids, int64_t tile, int64_t tiles) const {
    Carver measure(nullptr);
    GridBuffers(patches_of(grids), tiles, measure);
    const bool pinned = !options_.device().is_cpu();
    const Tensor host = at::empty({measure.used()}, at::TensorOptions().dtype(at::kByte).pinned_memory(pinned));
    Carver carver(host.data_ptr());
    fill(grids, vision_.merge_size, vision_.side, tile, GridBuffers(patches_of(grids), tiles, carver));
    return pinned ? host.to(options_.device(), at::kByte, /*non_blocking=*/true) : host;
  }

  // Values that the host has made, copied without waiting.
  Tensor on_device(const Tensor& values) const {
    return options_.device().is_cpu() ? values : values.pin_memory().to(options_.device(), values.scalar_type(), true);
  }

  // Which of the three positions every column of cos and sin follows: interleaved, the same in both halves.
  std::vector<int64_t> axes_of(const std::vector<int64_t>& section) const {
    std::vector<int64_t> axes(text_.head_width, 0);
    const int64_t half = text_.head_width / 2;
    for (int64_t axis = 1; axis < 3; ++axis) {
      for (int64_t column = axis; column < std::min(3 * section.at(axis), half); column += 3) {
        axes[column] = axes[half + column] = axis;
      }
    }
    return axes;
  }

  // Buffers for `count` rows, and the workspace that they are pieces of.
  template <typename Buffers, typename Model>
  std::pair<Tensor, Buffers> carved(const Model& model, int64_t count) const {
    Carver measure(nullptr);
    Buffers(model, count, size_of(dtype_), measure);
    const Tensor memory = at::empty({measure.used()}, options_.dtype(at::kByte));
    Carver carver(memory.data_ptr());
    return {memory, Buffers(model, count, size_of(dtype_), carver)};
  }

  void begin(py::handle call) {
#ifdef VLMOPT_CUDA
    if (cuda_) cuda_->use_stream(call.attr("stream").cast<uintptr_t>());
#else
    (void)call;
#endif
  }

  // Dense rows of the workspace as a tensor that keeps all of it alive.
  Tensor view_of(const Tensor& memory, Rows rows) const {
    const int64_t first = rows.data - static_cast<char*>(memory.data_ptr());
    const Tensor bytes = memory.narrow(0, first, rows.count * rows.width * rows.size);
    return bytes.view(c10::typeMetaToScalarType(options_.dtype())).view({rows.count, rows.width});
  }

#ifdef VLMOPT_CUDA
  static std::map<std::string, Kernel> read_kernels(py::handle kernels) {
    std::map<std::string, Kernel> read;
    for (const auto& [name, k] : kernels.cast<py::dict>()) {
      Kernel kernel{name.cast<std::string>(), k.attr("function").cast<uintptr_t>(), k.attr("warps").cast<unsigned>(),
                    k.attr("shared").cast<unsigned>(), k.attr("dependent").cast<bool>(),
                    k.attr("layout").cast<std::string>(),
                    k.attr("constants").cast<std::map<std::string, int64_t>>()};
      read.emplace(kernel.name, std::move(kernel));
    }
    return read;
  }

  Tensor workspace_;
  CudaDevice* cuda_ = nullptr;
#endif

  at::TensorOptions options_;
  Dtype dtype_;
  std::vector<Tensor> kept_;
  Tensor inv_freq_, axes_;
  Vision vision_;
  Text text_;
  std::unique_ptr<Device> device_;
  int64_t other_launches_ = 0;  // by ATen, before the loops; copies from the host are not counted
};

}  // namespace

PYBIND11_MODULE(vlmopt_cpp_runtime, module) {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      py::set_error(py::module_::import("vlmopt.errors").attr("VlmoptError"), error.what());
    } catch (const c10::Error&) {
      torch::translate_exception_to_python(std::current_exception());  // such as memory that ran out
    }
  });
  py::class_<Runtime>(module, "Runtime")
      .def(py::init<py::handle, py::object>(), py::arg("weights"), py::arg("gpu"))
      .def("encode", &Runtime::encode, py::arg("call"))
      .def("prefill", &Runtime::prefill, py::arg("call"))
      .def_property_readonly("launches", &Runtime::launches);
}

}  // namespace vlmopt
