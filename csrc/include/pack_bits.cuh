// Flags as bits, least significant first: a thread reads 16 bytes and writes two.
#pragma once

#include "flags.cuh"
#include "rows.cuh"

namespace zgcompile {

constexpr int kPackThreads = 256;

__global__ void __launch_bounds__(kPackThreads)
    zg_pack_bits(const uint8_t* flags, bool aligned, int64_t length, uint16_t* words) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kPackThreads;
  int64_t word = static_cast<int64_t>(blockIdx.x) * kPackThreads + threadIdx.x;
  for (; word * kFlags < length; word += stride) {
    words[word] = static_cast<uint16_t>(load_flags(flags, word * kFlags, length, aligned));
  }
}

}  // namespace zgcompile
