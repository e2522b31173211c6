/* The CUDA driver's and cuBLASLt's functions that the C++ runtime calls, over ordinary memory: a launch is handed to
   `on_launch`, a product is computed here, in fp16 as the library would: summed in fp32, rounded once. */
#include <cublasLt.h>
#include <cuda.h>
#include <math.h>
#include <stdlib.h>

typedef int (*launch_t)(unsigned long function, unsigned x, unsigned y, unsigned threads, unsigned shared,
                        unsigned dependent, void** parameters);
launch_t on_launch;
int products, choices, refused;

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  const unsigned dependent =
      config->numAttrs == 1 && config->attrs->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  if (extra || config->gridDimZ != 1 || config->blockDimY != 1 || config->blockDimZ != 1) return CUDA_ERROR_INVALID_VALUE;
  return on_launch((unsigned long)function, config->gridDimX, config->gridDimY, config->blockDimX,
                   config->sharedMemBytes, dependent, parameters);
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "another error";
  return CUDA_SUCCESS;
}

struct operation { int transposed; cublasLtEpilogue_t epilogue; const _Float16* bias; };
struct layout { long rows, columns, stride; };

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return *handle = malloc(1), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return free(handle), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t compute, cudaDataType_t scale) {
  if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_INVALID_VALUE;
  return *made = calloc(1, sizeof(struct operation)), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t made) { return free(made), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t size) {
  struct operation* operation = (struct operation*)desc;
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSA && size == 4) operation->transposed = *(const int*)value == CUBLAS_OP_T;
  else if (attribute == CUBLASLT_MATMUL_DESC_EPILOGUE && size == 4) operation->epilogue = *(const int*)value;
  else if (attribute == CUBLASLT_MATMUL_DESC_BIAS_POINTER && size == 8) operation->bias = *(const _Float16* const*)value;
  else return CUBLAS_STATUS_INVALID_VALUE;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t stride) {
  if (type != CUDA_R_16F) return CUBLAS_STATUS_INVALID_VALUE;
  struct layout* layout = malloc(sizeof *layout);
  *layout = (struct layout){rows, columns, stride};
  return *made = (cublasLtMatrixLayout_t)layout, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t made) { return free(made), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, size_t size) {
  if (attribute != CUBLASLT_MATRIX_LAYOUT_COLS || size != 8) return CUBLAS_STATUS_INVALID_VALUE;
  ((struct layout*)layout)->columns = *(const long*)value;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  return *made = malloc(1), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t made) {
  return free(made), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t size) {
  (void)preference, (void)attribute, (void)value;
  return size == 4 || size == 8 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

/* Two candidates, the first of which does not serve the fewest rows of its rung. */
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int asked,
                                              cublasLtMatmulHeuristicResult_t found[], int* count) {
  (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)preference;
  if (asked < 2) return CUBLAS_STATUS_INVALID_VALUE;
  for (int i = 0; i < 2; ++i) found[i].state = CUBLAS_STATUS_SUCCESS, found[i].algo.data[0] = i;
  ++choices;
  return *count = 2, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algorithm, cublasLtMatmulHeuristicResult_t* result) {
  (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d;
  result->workspaceSize = 0;
  return algorithm->data[0] == 1 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  (void)handle, (void)stream;
  const struct operation* operation = (const struct operation*)desc;
  const struct layout *w = (const struct layout*)a_layout, *x = (const struct layout*)b_layout,
                      *z = (const struct layout*)c_layout, *y = (const struct layout*)d_layout;
  const _Float16 *weight = a, *rows = b, *summand = c;
  const int fits = operation->transposed && w->rows == x->rows && w->columns == y->rows && x->columns == y->columns &&
                   z->columns == y->columns && workspace && workspace_bytes && *(const float*)alpha == 1;
  if (!fits || algorithm->data[0] != 1) return ++refused, CUBLAS_STATUS_INVALID_VALUE;
  ++products;
  const int biased = operation->epilogue == CUBLASLT_EPILOGUE_BIAS || operation->epilogue == CUBLASLT_EPILOGUE_GELU_BIAS;
  for (long row = 0; row < x->columns; ++row) {
    for (long out = 0; out < w->columns; ++out) {
      float sum = 0;
      for (long in = 0; in < w->rows; ++in) {
        sum += (float)weight[out * w->stride + in] * (float)rows[row * x->stride + in];
      }
      if (*(const float*)beta != 0) sum += *(const float*)beta * (float)summand[row * z->stride + out];
      if (biased) sum += (float)operation->bias[out];
      if (operation->epilogue == CUBLASLT_EPILOGUE_GELU_BIAS) {
        sum *= 0.5f * (1 + tanhf(0.79788456f * (sum + 0.044715f * sum * sum * sum)));
      }
      ((_Float16*)d)[row * y->stride + out] = (_Float16)sum;
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}
