// Rows of a bounded tensor: how many are valid, and how threads are laid over them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace zgcompile {

constexpr int kRowThreads = 256;

// The number of valid rows. A count may exceed its buffer after an overflow, or be negative after a bad input.
__device__ __forceinline__ int64_t valid_rows(const int64_t* n, int64_t length) {
  const int64_t count = *n;
  return count < 0 ? 0 : (count < length ? count : length);
}

// The first j in [0, size) with sorted[j] > value, or size.
template <typename T>
__device__ __forceinline__ int upper_bound(const T* sorted, int size, T value) {
  int low = 0;
  while (size > 0) {
    const int half = size >> 1;
    const bool right = sorted[low + half] <= value;
    low = right ? low + half + 1 : low;
    size = right ? size - half - 1 : half;
  }
  return low;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks of a grid-stride loop: at least one, so that a kernel can write its counts, and no more than keep a GPU full.
inline unsigned grid_blocks(int64_t items, int64_t items_a_block) {
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(items, items_a_block), 1, 8192));
}

// x runs over the units of a row and y over rows, kRowThreads in all; x is the power of two that idles the fewest
// threads.
inline dim3 row_block(int64_t units) {
  int64_t x = 1;
  if (units <= 32) {
    while (x < units) x *= 2;
  } else {
    x = kRowThreads;
    for (int64_t smaller = x / 2; smaller >= 32; smaller /= 2) {
      if (ceil_div(units, smaller) * smaller < ceil_div(units, x) * x) x = smaller;
    }
  }
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(kRowThreads / x));
}

}  // namespace zgcompile
