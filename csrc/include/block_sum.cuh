// Sum over a block, known to every thread.
#pragma once

#include <cstdint>
#include <cub/block/block_reduce.cuh>

namespace zgcompile {

// Every thread of a one-dimensional block of kThreads must call it.
template <int kThreads>
__device__ __forceinline__ int64_t block_sum(int64_t value) {
  using Reduce = cub::BlockReduce<int64_t, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  __shared__ int64_t sum;
  const int64_t reduced = Reduce(storage).Sum(value);
  if (threadIdx.x == 0) sum = reduced;
  __syncthreads();
  const int64_t result = sum;
  __syncthreads();  // the next call writes the same shared memory
  return result;
}

}  // namespace zgcompile
