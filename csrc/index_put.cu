#include "index_put.cuh"
#include "launchers.h"

namespace zgcompile {
namespace {

template <typename Unit, typename Id>
void launch_rows(const void* index, const void* values, const int64_t* n, int64_t length, int64_t rows, int64_t units,
                 void* out, cudaStream_t stream) {
  const dim3 block = row_block(units);
  zg_index_put_rows<Unit, Id><<<grid_blocks(length, block.y), block, 0, stream>>>(
      static_cast<const Id*>(index), static_cast<const Unit*>(values), n, length, rows, units, static_cast<Unit*>(out));
}

}  // namespace

cudaError_t index_put(const void* self, int64_t rows, const void* index, int id_bytes, const void* values,
                      const int64_t* n, int64_t length, int64_t row_bytes, void* out, cudaStream_t stream) {
  if (rows == 0 || row_bytes == 0) return cudaGetLastError();
  const int64_t bytes = rows * row_bytes;
  const uintptr_t target = reinterpret_cast<uintptr_t>(out);
  with_unit(widest_unit(static_cast<uintptr_t>(bytes) | reinterpret_cast<uintptr_t>(self) | target), [&](auto unit) {
    using Unit = decltype(unit);
    const int64_t units = bytes / sizeof(Unit);
    zg_index_put_copy<Unit><<<grid_blocks(units, kRowThreads), kRowThreads, 0, stream>>>(
        static_cast<const Unit*>(self), units, static_cast<Unit*>(out));
  });
  with_unit(widest_unit(static_cast<uintptr_t>(row_bytes) | reinterpret_cast<uintptr_t>(values) | target),
            [&](auto unit) {
              using Unit = decltype(unit);
              const int64_t units = row_bytes / sizeof(Unit);
              if (id_bytes == 4) {
                launch_rows<Unit, int32_t>(index, values, n, length, rows, units, out, stream);
              } else {
                launch_rows<Unit, int64_t>(index, values, n, length, rows, units, out, stream);
              }
            });
  return cudaGetLastError();
}

}  // namespace zgcompile
