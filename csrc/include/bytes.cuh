// Copies and fills in the widest unit that the addresses allow.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace zgcompile {

// The widest unit (16, 8, 4, 2 or 1 bytes) that divides `bits`: an OR of addresses and sizes in bytes.
inline int widest_unit(uintptr_t bits) {
  for (int unit = 16; unit > 1; unit /= 2) {
    if (bits % unit == 0) return unit;
  }
  return 1;
}

// Calls `launch` with a value of the type that is `unit` bytes wide.
template <typename Launch>
void with_unit(int unit, Launch launch) {
  switch (unit) {
    case 16: return launch(uint4{});
    case 8: return launch(uint2{});
    case 4: return launch(uint32_t{});
    case 2: return launch(uint16_t{});
    default: return launch(uint8_t{});
  }
}

// Zeroes `bytes` bytes at `out`, which is aligned to 16, with the whole grid of one-dimensional blocks.
__device__ __forceinline__ void clear_bytes(void* out, int64_t bytes) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t wide = bytes / 16;
  for (int64_t i = first; i < wide; i += stride) static_cast<uint4*>(out)[i] = uint4{};
  for (int64_t i = wide * 16 + first; i < bytes; i += stride) static_cast<uint8_t*>(out)[i] = 0;
}

}  // namespace zgcompile
