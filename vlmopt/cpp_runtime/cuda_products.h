// Dense products by cuBLASLt. An algorithm is chosen once for each weight shape, form and rung of a ladder of rows, so
// that a call of any size asks for no heuristic, and the same size always gets the same bits.
#pragma once

#include <cublasLt.h>

#include <array>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "model.h"

namespace vlmopt {

enum class Form { plain, bias, gelu, add, bias_add };

// The rung that serves `rows`: one row, then sixteen rungs to an octave from 16 on; the last serves all above it.
int64_t rung_of(int64_t rows);

class Products {
 public:
  Products(const std::string& library, Dtype dtype);
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  void use_workspace(void* memory, size_t bytes) { workspace_ = memory, workspace_bytes_ = bytes; }

  // Chooses the algorithms of one weight's shape for all rungs, and runs what is new among them once in `scratch`, as
  // far as that suffices: CUDA loads a kernel when it is first launched, which no call should wait for.
  void freeze(const Linear& linear, Form form, char* scratch, int64_t scratch_bytes, void* stream);

  // y = x · Wᵀ in the form's way; `add` is y itself before the product.
  void run(Rows x, const Linear& linear, Form form, Rows y, void* stream);

 private:
  struct Product {
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t weight, x, y;
    std::map<int64_t, cublasLtMatmulAlgo_t> algorithms;  // by rung
  };

  Product& product(const Linear& linear, Form form);
  const cublasLtMatmulAlgo_t& algorithm(Product& product, const Linear& linear, int64_t rows);
  void set_rows(const Product& product, int64_t rows) const;

  struct Library;
  std::unique_ptr<const Library> library_;
  cublasLtHandle_t handle_ = nullptr;
  cudaDataType type_;
  int64_t size_;
  void* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
  std::map<std::tuple<int64_t, int64_t, Form>, Product> products_;  // by out, in and form
  std::set<std::pair<Form, std::array<uint64_t, 8>>> run_;          // forms and algorithms
};

}  // namespace vlmopt
