#include "index_add.cuh"
#include "launchers.h"

namespace zgcompile {
namespace {

struct Call {
  const void* index;
  int id_bytes;
  const void* source;
  const int64_t* n;
  int64_t length, rows, width;
  void* out;
  cudaStream_t stream;
};

template <typename Unit, typename Id>
void launch_ids(const Call& call, int64_t units) {
  const dim3 block = row_block(units);
  zg_index_add_rows<Unit, Id><<<grid_blocks(call.length, block.y), block, 0, call.stream>>>(
      static_cast<const Id*>(call.index), static_cast<const Unit*>(call.source), call.n, call.length, call.rows, units,
      static_cast<Unit*>(call.out));
}

template <typename Unit, typename Element>
void launch(const Call& call) {
  const auto bytes = static_cast<int64_t>(call.rows * call.width * sizeof(Element));
  zg_index_add_clear<<<grid_blocks(bytes, 16 * kRowThreads), kRowThreads, 0, call.stream>>>(call.out, bytes);
  const int64_t units = call.width / static_cast<int64_t>(sizeof(Unit) / sizeof(Element));
  if (call.id_bytes == 4) {
    launch_ids<Unit, int32_t>(call, units);
  } else {
    launch_ids<Unit, int64_t>(call, units);
  }
}

// The bytes that divide every address of a row's first element, in source and output.
template <typename Element>
int row_alignment(const Call& call) {
  return widest_unit(static_cast<uintptr_t>(call.width * sizeof(Element)) | reinterpret_cast<uintptr_t>(call.source) |
                     reinterpret_cast<uintptr_t>(call.out));
}

}  // namespace

cudaError_t index_add(const void* index, int id_bytes, const void* source, Dtype dtype, const int64_t* n,
                      int64_t length, int64_t rows, int64_t width, void* out, cudaStream_t stream) {
  if (rows == 0 || width == 0) return cudaGetLastError();
  const Call call{index, id_bytes, source, n, length, rows, width, out, stream};
  switch (dtype) {
    case Dtype::kFloat32: {
      const int alignment = row_alignment<float>(call);
      if (alignment >= 16) {
        launch<float4, float>(call);
      } else if (alignment >= 8) {
        launch<float2, float>(call);
      } else {
        launch<float, float>(call);
      }
      break;
    }
    case Dtype::kFloat64: launch<double, double>(call); break;
    case Dtype::kBfloat16:
      if (row_alignment<__nv_bfloat16>(call) >= 4) {
        launch<__nv_bfloat162, __nv_bfloat16>(call);
      } else {
        launch<__nv_bfloat16, __nv_bfloat16>(call);
      }
      break;
    case Dtype::kFloat16:
      if (row_alignment<__half>(call) >= 4) {
        launch<__half2, __half>(call);
      } else {
        launch<__half, __half>(call);
      }
      break;
    case Dtype::kInt32: launch<int32_t, int32_t>(call); break;
    case Dtype::kInt64: launch<int64_t, int64_t>(call); break;
    default: return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace zgcompile
