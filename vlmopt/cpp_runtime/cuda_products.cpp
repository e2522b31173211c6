#include "cuda_products.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <type_traits>

namespace vlmopt {
namespace {

constexpr int64_t kFirstRung = 1, kFirstOctave = 16, kLastRung = 65536, kRungsPerOctave = 16;
constexpr int64_t kAlignment = 256;  // of what an allocator of device memory gives, in bytes
constexpr int kCandidates = 8;

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw Error(std::string("cuBLASLt: ") + what + " failed with status " + std::to_string(status));
  }
}

int64_t rung_after(int64_t rung) {
  if (rung == 1) return kFirstOctave;
  int64_t octave = kFirstOctave;
  while (2 * octave <= rung) octave *= 2;
  return rung + octave / kRungsPerOctave;
}

int64_t rung_before(int64_t rung) {
  if (rung == kFirstRung) return 0;
  int64_t before = kFirstRung;
  while (rung_after(before) < rung) before = rung_after(before);
  return before;
}

}  // namespace

int64_t rung_of(int64_t rows) {
  int64_t rung = kFirstRung;
  while (rung < rows && rung < kLastRung) rung = rung_after(rung);
  return rung;
}

// The functions of the library that torch has loaded; nothing is linked, so a machine without a GPU can load this file.
struct Products::Library {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulDescCreate) create_operation;
  decltype(&cublasLtMatmulDescDestroy) destroy_operation;
  decltype(&cublasLtMatmulDescSetAttribute) set_operation;
  decltype(&cublasLtMatrixLayoutCreate) create_layout;
  decltype(&cublasLtMatrixLayoutDestroy) destroy_layout;
  decltype(&cublasLtMatrixLayoutSetAttribute) set_layout;
  decltype(&cublasLtMatmulPreferenceCreate) create_preference;
  decltype(&cublasLtMatmulPreferenceDestroy) destroy_preference;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulAlgoCheck) check_algorithm;

  explicit Library(const std::string& name) {
    void* opened = dlopen(name.c_str(), RTLD_LAZY);
    if (!opened) throw Error("cuBLASLt cannot be loaded: " + std::string(dlerror()));
    const auto find = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(opened, symbol));
      if (!function) throw Error(name + " has no " + symbol);
    };
    find(create, "cublasLtCreate");
    find(destroy, "cublasLtDestroy");
    find(matmul, "cublasLtMatmul");
    find(create_operation, "cublasLtMatmulDescCreate");
    find(destroy_operation, "cublasLtMatmulDescDestroy");
    find(set_operation, "cublasLtMatmulDescSetAttribute");
    find(create_layout, "cublasLtMatrixLayoutCreate");
    find(destroy_layout, "cublasLtMatrixLayoutDestroy");
    find(set_layout, "cublasLtMatrixLayoutSetAttribute");
    find(create_preference, "cublasLtMatmulPreferenceCreate");
    find(destroy_preference, "cublasLtMatmulPreferenceDestroy");
    find(set_preference, "cublasLtMatmulPreferenceSetAttribute");
    find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(check_algorithm, "cublasLtMatmulAlgoCheck");
  }
};

Products::Products(const std::string& library, Dtype dtype)
    : library_(std::make_unique<const Library>(library)),
      type_(dtype == Dtype::fp32 ? CUDA_R_32F : dtype == Dtype::bf16 ? CUDA_R_16BF : CUDA_R_16F),
      size_(size_of(dtype)) {
  check(library_->create(&handle_), "making a handle");
}

Products::~Products() {
  for (auto& [key, product] : products_) {
    library_->destroy_operation(product.operation);
    for (const auto layout : {product.weight, product.x, product.y}) library_->destroy_layout(layout);
  }
  library_->destroy(handle_);
}

void Products::freeze(const Linear& linear, Form form, char* scratch, int64_t scratch_bytes, void* stream) {
  Product& frozen = product(linear, form);
  for (int64_t rung = kFirstRung; rung <= kLastRung; rung = rung_after(rung)) {
    const cublasLtMatmulAlgo_t& chosen = algorithm(frozen, linear, rung);
    const int64_t rows = rung_before(rung) + 1, x_bytes = rows * linear.in * size_;
    const int64_t y_begin = (x_bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (y_begin + rows * linear.out * size_ > scratch_bytes) continue;
    std::pair<Form, std::array<uint64_t, 8>> key{form, {}};
    static_assert(sizeof chosen.data == sizeof key.second);
    std::memcpy(key.second.data(), chosen.data, sizeof chosen.data);
    if (!run_.insert(key).second) continue;
    const Rows x{scratch, rows, linear.in, linear.in, size_};
    run(x, linear, form, {scratch + y_begin, rows, linear.out, linear.out, size_}, stream);
  }
}

void Products::run(Rows x, const Linear& linear, Form form, Rows y, void* stream) {
  const bool fits = x.width == linear.in && x.stride == linear.in && y.width == linear.out && y.stride == linear.out &&
                    x.count == y.count;
  if (!fits) throw Error("the rows of a product do not fit its weight");
  Product& found = product(linear, form);
  const cublasLtMatmulAlgo_t& chosen = algorithm(found, linear, x.count);
  set_rows(found, x.count);
  if (linear.bias) {
    check(library_->set_operation(found.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &linear.bias, sizeof linear.bias),
          "setting a bias");
  }
  const float one = 1, beta = form == Form::add || form == Form::bias_add ? 1 : 0;
  check(library_->matmul(handle_, found.operation, &one, linear.weight, found.weight, x.data, found.x, &beta, y.data,
                         found.y, y.data, found.y, &chosen, workspace_, workspace_bytes_,
                         static_cast<cudaStream_t>(stream)),
        "a product");
}

// Row-major rows are the library's columns: yᵀ [out, rows] = W [out, in] · xᵀ [in, rows], W stored as its transpose.
Products::Product& Products::product(const Linear& linear, Form form) {
  const auto [place, is_new] = products_.try_emplace({linear.out, linear.in, form});
  Product& made = place->second;
  if (!is_new) return made;
  check(library_->create_operation(&made.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product");
  const cublasOperation_t transposed = CUBLAS_OP_T;
  const cublasLtEpilogue_t epilogue = form == Form::gelu                            ? CUBLASLT_EPILOGUE_GELU_BIAS
                                      : form == Form::bias || form == Form::bias_add ? CUBLASLT_EPILOGUE_BIAS
                                                                                     : CUBLASLT_EPILOGUE_DEFAULT;
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    check(library_->set_operation(made.operation, attribute, &value, sizeof value), "describing a product");
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, transposed);
  set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
  if (linear.bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, linear.bias);
  check(library_->create_layout(&made.weight, type_, linear.in, linear.out, linear.in), "describing a weight");
  check(library_->create_layout(&made.x, type_, linear.in, 1, linear.in), "describing rows");
  check(library_->create_layout(&made.y, type_, linear.out, 1, linear.out), "describing rows");
  return made;
}

const cublasLtMatmulAlgo_t& Products::algorithm(Product& product, const Linear& linear, int64_t rows) {
  const int64_t rung = rung_of(rows);
  const auto found = product.algorithms.find(rung);
  if (found != product.algorithms.end()) return found->second;

  cublasLtMatmulPreference_t preference;
  check(library_->create_preference(&preference), "making a preference");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(library_->set_preference(preference, attribute, &value, sizeof value), "setting a preference");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes_);
  // parts of a sum are added in fp32, never in the model's dtype
  const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_INPLACE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
  const uint32_t x_alignment = std::gcd(kAlignment, linear.in * size_);
  const uint32_t y_alignment = std::gcd(kAlignment, linear.out * size_);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, x_alignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, x_alignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, y_alignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, y_alignment);
  cublasLtMatmulHeuristicResult_t candidates[kCandidates];
  int count = 0;
  set_rows(product, rung);
  const cublasStatus_t status =
      library_->heuristic(handle_, product.operation, product.weight, product.x, product.y, product.y, preference,
                          kCandidates, candidates, &count);
  library_->destroy_preference(preference);
  check(status, "choosing an algorithm");
  set_rows(product, rung_before(rung) + 1);  // it must serve the fewest rows of its rung as well
  const auto serves = [&](cublasLtMatmulHeuristicResult_t& candidate) {
    cublasLtMatmulHeuristicResult_t checked;
    return candidate.state == CUBLAS_STATUS_SUCCESS &&
           library_->check_algorithm(handle_, product.operation, product.weight, product.x, product.y, product.y,
                                     &candidate.algo, &checked) == CUBLAS_STATUS_SUCCESS &&
           checked.workspaceSize <= workspace_bytes_;
  };
  const auto end = candidates + count, chosen = std::find_if(candidates, end, serves);
  if (chosen == end) {
    throw Error("cuBLASLt has no algorithm for a weight of " + std::to_string(linear.out) + " x " +
                             std::to_string(linear.in));
  }
  return product.algorithms.emplace(rung, chosen->algo).first->second;
}

void Products::set_rows(const Product& product, int64_t rows) const {
  const uint64_t columns = static_cast<uint64_t>(rows);
  for (const auto layout : {product.x, product.y}) {
    check(library_->set_layout(layout, CUBLASLT_MATRIX_LAYOUT_COLS, &columns, sizeof columns), "setting the rows");
  }
}

}  // namespace vlmopt
