// Valid rows of several pieces, back to back. Each block derives all offsets from the counts, so one launch does it.
#pragma once

#include "launchers.h"
#include "rows.cuh"

namespace zgcompile {

struct ConcatPieces {
  const void* rows[kConcatLimit];
  int64_t lengths[kConcatLimit];
  int k;
};
static_assert(sizeof(ConcatPieces) <= 4000, "kernel parameters hold at most 4096 bytes");

// Unit: what one thread moves; `units` of them make a row. Blocks as by row_block(units).
template <typename Unit>
__global__ void __launch_bounds__(kRowThreads) zg_concat(const __grid_constant__ ConcatPieces pieces,
                                                         const int64_t* counts, int64_t cap, int64_t units, Unit* out) {
  constexpr int kItems = kConcatLimit / 32;
  __shared__ int64_t starts[kConcatLimit + 1];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (thread < 32) {
    int64_t valid[kItems], sum = 0;
    for (int j = 0; j < kItems; ++j) {
      const int piece = thread * kItems + j;
      valid[j] = piece < pieces.k ? valid_rows(counts + piece, pieces.lengths[piece]) : 0;
      sum += valid[j];
    }
    int64_t end = sum;
    for (int delta = 1; delta < 32; delta *= 2) {
      const int64_t lower = __shfl_up_sync(0xFFFFFFFFu, end, delta);
      if (thread >= delta) end += lower;
    }
    int64_t start = end - sum;
    for (int j = 0; j < kItems; ++j) {
      starts[thread * kItems + j] = start;
      start += valid[j];
    }
    if (thread == 31) starts[kConcatLimit] = start;
  }
  __syncthreads();

  const int64_t total = starts[kConcatLimit];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < cap; row += stride) {
    Unit* to = out + row * units;
    if (row < total) {
      const int piece = upper_bound(starts, pieces.k, row) - 1;
      const Unit* from = static_cast<const Unit*>(pieces.rows[piece]) + (row - starts[piece]) * units;
      for (int64_t u = threadIdx.x; u < units; u += blockDim.x) to[u] = from[u];
    } else {
      for (int64_t u = threadIdx.x; u < units; u += blockDim.x) to[u] = Unit{};
    }
  }
}

}  // namespace zgcompile
