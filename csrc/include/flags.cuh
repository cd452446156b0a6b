// Flags, one byte each, as bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace zgcompile {

constexpr int kFlags = 16;  // a thread

// Bit j: byte j of `bytes` is not zero.
__device__ __forceinline__ unsigned nonzero_bytes(unsigned bytes) {
  const unsigned ones = __vsetne4(bytes, 0u);
  return (ones | ones >> 7 | ones >> 14 | ones >> 21) & 0xFu;
}

// Bit j: row + j is below `end` and its flag is set.
__device__ __forceinline__ unsigned load_flags(const uint8_t* flags, int64_t row, int64_t end, bool aligned) {
  if (aligned && row + kFlags <= end) {
    const uint4 bytes = *reinterpret_cast<const uint4*>(flags + row);
    return nonzero_bytes(bytes.x) | nonzero_bytes(bytes.y) << 4 | nonzero_bytes(bytes.z) << 8 |
           nonzero_bytes(bytes.w) << 12;
  }
  unsigned bits = 0;
  for (int j = 0; j < kFlags; ++j) {
    if (row + j < end && flags[row + j] != 0) bits |= 1u << j;
  }
  return bits;
}

}  // namespace zgcompile
