// A copy of self, then out[index[i]] = values[i].
#pragma once

#include "bytes.cuh"
#include "rows.cuh"

namespace zgcompile {

template <typename Unit>
__global__ void __launch_bounds__(kRowThreads) zg_index_put_copy(const Unit* self, int64_t units, Unit* out) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kRowThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x; i < units; i += stride) {
    out[i] = self[i];
  }
}

// Unit: what one thread moves; `units` of them make a row. Blocks as by row_block(units).
template <typename Unit, typename Id>
__global__ void __launch_bounds__(kRowThreads)
    zg_index_put_rows(const Id* index, const Unit* values, const int64_t* n, int64_t length, int64_t rows,
                      int64_t units, Unit* out) {
  const int64_t valid = valid_rows(n, length);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; i < valid; i += stride) {
    const int64_t row = index[i];
    if (row < 0 || row >= rows) continue;
    const Unit* from = values + i * units;
    Unit* to = out + row * units;
    for (int64_t u = threadIdx.x; u < units; u += blockDim.x) to[u] = from[u];
  }
}

}  // namespace zgcompile
